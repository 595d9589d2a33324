"""Tags NAME-vX.Y.Z for every package whose version has no tag yet, lowest in the graph of dependencies first.

    python ci/release.py            says what would be tagged
    python ci/release.py --tag      tags it; push the tags afterwards

Refuses when versions, changelogs and ranges do not agree, when a changelog still says "unreleased" or when there are
changes that are not committed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from check_versions import faults
from packages import ROOT, Package, read_all


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def untagged(packages: list[Package], tags: set[str]) -> list[Package]:
    """Packages whose version was not released, in the order in which to release them."""
    return [package for package in packages if package.tag not in tags]


def obstacles(packages: list[Package]) -> list[str]:
    """Why `packages` cannot be released now."""
    found = faults(read_all())
    for package in packages:
        changelog = (package.folder / "CHANGELOG.md").read_text(encoding="utf-8").lower()
        if f"## {package.version} (unreleased)" in changelog:
            found.append(f"the changelog of {package.name} calls {package.version} unreleased")
    if _git("status", "--porcelain", "--untracked-files=no").strip():
        found.append("there are changes that are not committed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tag", action="store_true", help="make the tags; without it they are only named")
    arguments = parser.parse_args()
    packages = untagged(read_all(), set(_git("tag", "--list").split()))
    for problem in (problems := obstacles(packages)):
        print(problem, file=sys.stderr)
    for package in packages:
        print(package.tag)
        if arguments.tag and not problems:
            _git("tag", "--annotate", package.tag, "--message", f"{package.name} {package.version}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
