"""In every package version, `__version__`, changelog head and the ranges that packages state of one another agree.

Prints what does not agree and exits with 1.
"""

from __future__ import annotations

import re
import sys

from packages import Package, accepts, read_all

_DUNDER = re.compile(r"^__version__ = \"([^\"]+)\"", re.MULTILINE)


def faults(packages: list[Package]) -> list[str]:
    """What does not agree, in words."""
    versions = {package.name: package.version for package in packages}
    found = []
    for package in packages:
        if package.changelog_version != package.version:
            found.append(
                f"{package.name} is {package.version}, but the head of its changelog is {package.changelog_version}"
            )
        init = (package.folder / "src" / package.name / "__init__.py").read_text(encoding="utf-8")
        stated = _DUNDER.search(init)
        if stated and stated[1] != package.version:
            found.append(f"{package.name} is {package.version}, but its __version__ says {stated[1]}")
        for name, version_range in package.requirements.items():
            if name in versions and not accepts(version_range, versions[name]):
                found.append(f"{package.name} asks for {name}{version_range}, but that is {versions[name]}")
            if name in versions and "<" not in version_range:
                found.append(f"{package.name} sets no upper bound on {name}")
    return found


if __name__ == "__main__":
    problems = faults(read_all())
    print("\n".join(problems) or "versions, changelogs and ranges agree")
    sys.exit(1 if problems else 0)
