"""The versions of this package and of what it works with, against the ranges in its own metadata.

The ranges are those of pyproject.toml, read by importlib.metadata from the installed package.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.base.installed import installed_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

DISTRIBUTION = "te-precision-callbacks"

_FOR_DEVELOPMENT = ("dev", "docs")
"""Extras whose packages no run needs."""


@dataclass(frozen=True)
class Package:
    """A package, or Python itself.

    Attributes:
        name: its name in pip.
        version: the installed version; None if it is not installed.
        wanted: the versions that work, as pip writes them; empty for any.
        extra: the extra of this package that asks for it; empty where it is needed always.
        state: ``ok``, ``outside`` of the range, or ``missing``.
    """

    name: str
    version: str | None
    wanted: str
    extra: str
    state: Literal["ok", "outside", "missing"]

    @property
    def remedy(self) -> str:
        """What to do; empty where there is nothing to do."""
        if self.state == "ok":
            return ""
        if self.name == "python":
            return f"use Python {self.wanted}"
        if self.extra and self.state == "missing":
            return f"if you use it: {install_line(self.extra)}"
        return f"pip install '{self.name}{self.wanted}'"


def packages() -> tuple[Package, ...]:
    """This package, Python, and all packages that this package or its extras ask for.

    Raises:
        importlib.metadata.PackageNotFoundError: this package runs from its sources, without being installed.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    own = metadata.metadata(DISTRIBUTION)
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    extras = [extra for extra in own.get_all("Provides-Extra") or () if extra not in _FOR_DEVELOPMENT]
    ranges: dict[str, tuple[SpecifierSet, str]] = {}
    for extra in ("", *extras):
        for requirement in _of(requirements, extra):
            wanted, first = ranges.get(requirement.name, (SpecifierSet(), extra))
            ranges[requirement.name] = wanted & requirement.specifier, first
    return (
        Package(DISTRIBUTION, own["Version"], "", "", "ok"),
        _judged("python", platform.python_version(), SpecifierSet(own["Requires-Python"]), ""),
        *(_judged(name, installed_version(name), wanted, extra) for name, (wanted, extra) in ranges.items()),
    )


def _of(requirements: list[Requirement], extra: str) -> Iterator[Requirement]:
    """The requirements of this package with an extra; without one for the empty extra."""
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _judged(name: str, version: str | None, wanted: SpecifierSet, extra: str) -> Package:
    words = _in_words(wanted)
    if version is None:
        return Package(name, None, words, extra, "missing")
    fits = wanted.contains(version, prereleases=True)
    return Package(name, version, words, extra, "ok" if fits else "outside")


def _in_words(wanted: SpecifierSet) -> str:
    """A range with its highest lower bound and its lowest upper bound: ``>=2.9,<3``, also of ``>=2.9,>=2,<3``."""
    from packaging.version import Version

    bounds: dict[str, str] = {}
    for operator, narrower in ((">=", max), ("<", min)):
        versions = [each.version for each in wanted if each.operator == operator]
        if versions:
            bounds[operator] = f"{operator}{narrower(versions, key=Version)}"
    others = sorted(str(each) for each in wanted if each.operator not in bounds)
    return ",".join((*bounds.values(), *others))
