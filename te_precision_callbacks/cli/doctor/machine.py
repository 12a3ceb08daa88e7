"""Examination of packages, Transformer Engine, torch, variables and the log folder."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from te_precision_callbacks.base.environment import read_environment
from te_precision_callbacks.base.installed import installed_version
from te_precision_callbacks.base.torch_facts import Torch, torch_facts
from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine, transformer_engine
from te_precision_callbacks.dumps.budget import why_full

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_DISTRIBUTION = "te-precision-callbacks"

_FOR_DEVELOPMENT = ("dev", "docs")
"""Extras that no run needs."""


@dataclass(frozen=True)
class Package:
    """A package, or Python itself: its state is ``ok``, ``outside`` of the supported versions, or ``missing``.

    ``version`` is None if it is not installed, ``extra`` empty if it is always required.
    """

    name: str
    version: str | None
    wanted: str
    extra: str
    state: Literal["ok", "outside", "missing"]


@dataclass(frozen=True)
class LogFolder:
    """A log folder, which need not exist yet; the reasons are empty if there are none."""

    path: str
    exists: bool
    why_not_writable: str
    why_full: str
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """A machine; ``torch`` is the error if torch cannot be imported."""

    platform: str
    packages: tuple[Package, ...]
    transformer_engine: TransformerEngine
    torch: Torch | str
    environment: dict[str, str]
    log_folder: LogFolder


def examine(log_dir: Path) -> Machine:
    torch: Torch | str
    try:
        torch = torch_facts()  # before the search for Transformer Engine, since torch warns about GPUs only once
    except Exception as error:  # a broken installation
        torch = f"{type(error).__name__}: {error}"
    return Machine(
        platform=platform.platform(),
        packages=packages(),
        transformer_engine=transformer_engine(),
        torch=torch,
        environment=read_environment(os.environ),
        log_folder=log_folder(log_dir),
    )


def packages() -> tuple[Package, ...]:
    """This package, Python, and all packages that this package or its extras require."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    own = metadata.metadata(_DISTRIBUTION)
    requirements = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
    ranges: dict[str, tuple[SpecifierSet, str]] = {}
    for extra in ("", *(name for name in own.get_all("Provides-Extra") or () if name not in _FOR_DEVELOPMENT)):
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted, first = ranges.get(requirement.name, (SpecifierSet(), extra))
                ranges[requirement.name] = wanted & requirement.specifier, first
    return (
        Package(_DISTRIBUTION, own["Version"], "", "", "ok"),
        _package("python", platform.python_version(), SpecifierSet(own["Requires-Python"]), ""),
        *(_package(name, installed_version(name), wanted, extra) for name, (wanted, extra) in ranges.items()),
    )


def _package(name: str, version: str | None, wanted: SpecifierSet, extra: str) -> Package:
    fits = version is not None and wanted.contains(version, prereleases=True)
    text = ",".join(sorted({str(each) for each in wanted}, reverse=True))
    return Package(name, version, text, extra, "ok" if fits else "missing" if version is None else "outside")


def log_folder(folder: Path) -> LogFolder:
    """Write a file in the folder, or where the folder would be made, and remove it."""
    path = folder.expanduser().absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    why_not_writable = ""
    try:
        if not place.is_dir():
            raise NotADirectoryError(f"{str(place)!r} is not a folder")
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"written")
    except OSError as error:
        why_not_writable = str(error)
    return LogFolder(str(path), path.is_dir(), why_not_writable, why_full(path) or "", shutil.disk_usage(place).free)
