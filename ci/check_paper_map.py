"""Every file that PAPER.md names exists. Prints those that do not and exits with 1."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)\)")


def missing_files(text: str, root: Path) -> list[str]:
    """Targets of links in `text`, other than web addresses, that are not under `root`."""
    targets = [target for target in _LINK.findall(text) if "://" not in target]
    return [target for target in targets if not (root / target).exists()]


def main() -> int:
    missing = missing_files((ROOT / "PAPER.md").read_text(encoding="utf-8"), ROOT)
    for target in missing:
        print(f"PAPER.md names {target}, which does not exist")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
