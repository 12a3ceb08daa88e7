"""Runs an unmodified GPU script, on the compiled Transformer Engine or on the reference backend.

Usage::

    plan = plan_launch(Backend.AUTO)
    launch(plan, ["train.py", "--steps", "10"])  # does not return
    launch(plan, ["-m", "package.train", "--steps", "10"])

The script or module gets a fresh Python process, which replaces this one: so ``__main__``, ``sys.argv``,
``sys.path[0]``, the exit code, tracebacks, signals, and the way in which the script starts itself again on other ranks
are the same as without this launcher. The backend is installed in that process as in child processes; see
:mod:`te_precision_callbacks.reference.children`.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NoReturn

from te_precision_callbacks.reference import compiled, inherited, target, versions
from te_precision_callbacks.reference.errors import InstallError, TransformerEngineVersionError


class Backend(str, enum.Enum):
    """Which Transformer Engine a script runs on."""

    AUTO = "auto"
    """The compiled Transformer Engine if there is a GPU and it can be imported, else the reference backend."""
    TE = "te"
    """The compiled Transformer Engine."""
    REFERENCE = "reference"
    """The reference backend."""


@dataclass(frozen=True)
class Launch:
    """The Transformer Engine that a script is going to run on.

    Attributes:
        description: a description in words.
        environment: variables to add to the environment of its process.
    """

    description: str
    environment: dict[str, str]


def plan_launch(backend: Backend) -> Launch:
    """Decide what to run on, and how.

    Raises:
        TransformerEngineVersionError: there is no Transformer Engine, or the reference backend was written for another
            version.
        InstallError: the compiled Transformer Engine was asked for but cannot be imported.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise TransformerEngineVersionError(
            f'No Transformer Engine is installed. Its Python part is enough here: pip install "{versions.EXTRA}"'
        )
    has_gpu = backend is not Backend.TE and _has_gpu()
    if backend is Backend.TE or (backend is Backend.AUTO and has_gpu):  # as install_where_needed() decides
        reason = compiled.why_unavailable()
        if reason is None:
            return Launch("the compiled Transformer Engine", {})
        if backend is Backend.TE:
            raise InstallError(
                f"--backend te: the compiled Transformer Engine cannot be imported: {reason}. Install it, or use "
                "--backend reference."
            )
    version = versions.checked_version()
    capability = target.capability()
    description = "Transformer Engine {} on the reference backend: {}, compute capability {}.{}".format(
        version, "the real GPU" if has_gpu else "the CPU as a pretended GPU", *capability
    )
    always = backend is Backend.REFERENCE
    return Launch(description, inherited.environment(pretend_cuda=not has_gpu, capability=capability, always=always))


def why_no_script(script: str) -> str | None:
    """None if ``python script`` finds something to run, else the problem."""
    return None if Path(script).is_file() else f"there is no file {script!r}"


def why_no_module(name: str) -> str | None:
    """None if ``python -m name`` finds something to run, as far as can be known; else the problem.

    No package is imported to find out, since it may import Transformer Engine, which this process does not have. So the
    content of a package that changes its own ``__path__`` is left for Python to check.
    """
    first, *rest = parts = name.split(".")
    spec = _find_top_level(first) if all(parts) else None
    if spec is None:
        return f"there is no module {name!r}, neither in the current folder nor in the environment"
    found = first
    for part in rest:
        if spec.submodule_search_locations is None:
            return f"there is no module {name!r}: {found!r} is not a package. To run a file, leave -m out"
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        if inner is None:
            return None if _changes_path(spec) else f"there is no module {part!r} in the package {found!r}"
        spec, found = inner, f"{found}.{part}"
    locations = spec.submodule_search_locations
    if locations is None or PathFinder.find_spec("__main__", list(locations)) is not None or _changes_path(spec):
        return None
    return f"the package {name!r} has no module __main__. Give one of its modules"


def _find_top_level(name: str) -> ModuleSpec | None:
    """The module that ``python -m`` finds: it searches the current folder first, which this process may not."""
    if not getattr(sys.flags, "safe_path", False):  # a flag since Python 3.11
        found = PathFinder.find_spec(name, [os.getcwd(), *sys.path])
        if found is not None:
            return found
    specs = (finder.find_spec(name, None, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _changes_path(package: ModuleSpec) -> bool:
    source = Path(package.origin) if package.has_location and package.origin else None
    return source is not None and source.is_file() and b"__path__" in source.read_bytes()


def launch(plan: Launch, command: Sequence[str]) -> NoReturn:
    """Replace this process by ``python command``, which is a script, or ``-m`` and a module, and its arguments."""
    os.environ.pop(inherited.ENVIRONMENT_VARIABLE, None)
    os.environ.update(plan.environment)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, *command])


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
