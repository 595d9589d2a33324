"""The packages of the house as their files describe them; what the other scripts here share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("deepnvme", "cpu_adam", "zero3", "zinf")  # lowest in the graph of dependencies first

_HEADING = re.compile(r"^## (\d+\.\d+\.\d+)", re.MULTILINE)
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)")


@dataclass(frozen=True)
class Package:
    """A package's folder and what its metadata says."""

    name: str
    folder: Path
    version: str
    requirements: dict[str, str]  # name -> range, such as ">=0.1,<0.2"

    @classmethod
    def read(cls, name: str) -> Package:
        folder = ROOT / "packages" / name
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        matches = (_REQUIREMENT.match(requirement) for requirement in project.get("dependencies", []))
        requirements = {match[1]: match[2].strip() for match in matches if match}
        return cls(name, folder, project["version"], requirements)

    @property
    def changelog_version(self) -> str | None:
        """The newest version that the changelog has a heading for."""
        match = _HEADING.search((self.folder / "CHANGELOG.md").read_text(encoding="utf-8"))
        return match[1] if match else None

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"


def read_all() -> list[Package]:
    return [Package.read(name) for name in NAMES]


def accepts(version_range: str, version: str) -> bool:
    """Whether a range of `>=`, `>`, `<`, `<=` and `==` clauses accepts a version of plain numbers."""
    found = _numbers(version)
    for clause in filter(None, (part.strip() for part in version_range.split(","))):
        match = re.fullmatch(r"(>=|<=|==|>|<)\s*([0-9.]+)", clause)
        if not match:
            raise ValueError(f"cannot read the clause {clause!r} of {version_range!r}")
        bound = _numbers(match[2])
        holds = {
            ">=": found >= bound,
            "<=": found <= bound,
            "==": found == bound,
            ">": found > bound,
            "<": found < bound,
        }[match[1]]
        if not holds:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    parts = [int(part) for part in version.split(".")]
    return tuple(parts + [0] * (4 - len(parts)))
