"""Models that `zinf train` builds by name. They are plain PyTorch and know nothing of zinf."""
