"""deepnvme-bench: what a drive can do, and how close we get. Needs the extra deepnvme[bench]."""
