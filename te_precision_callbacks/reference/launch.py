"""Running an unmodified GPU script, on the compiled Transformer Engine or on the reference backend.

Usage::

    plan = plan_launch(Backend.AUTO)
    launch(plan, Path("train.py"), ["--steps", "10"])  # does not return

The script gets a Python process of its own, in place of this one: so ``__main__``, ``sys.argv``, ``sys.path[0]``, the
exit code, tracebacks, signals, and what the script does to start itself again on other ranks, are what they are
without us. The backend is installed in it as in every process that one with the backend starts; see
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
from pathlib import Path
from typing import NoReturn

from te_precision_callbacks.reference import children, compiled, target, versions
from te_precision_callbacks.reference.errors import InstallError, TransformerEngineVersionError


class Backend(str, enum.Enum):
    """Which Transformer Engine a script runs on."""

    AUTO = "auto"
    """The compiled one if it can be imported, else the reference backend."""
    TE = "te"
    """The compiled one."""
    REFERENCE = "reference"
    """The reference backend."""


@dataclass(frozen=True)
class Launch:
    """What a script is going to run on.

    Attributes:
        description: the same in words.
        environment: what to add to the environment of its process.
    """

    description: str
    environment: dict[str, str]


def plan_launch(backend: Backend) -> Launch:
    """Decide what to run on, and how.

    Raises:
        TransformerEngineVersionError: there is no Transformer Engine, or it is not one that the reference backend was
            written for.
        InstallError: the compiled one was asked for and cannot be imported.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise TransformerEngineVersionError(
            f'No Transformer Engine is installed. Its Python is enough here: pip install "{versions.EXTRA}"'
        )
    if backend is not Backend.REFERENCE:
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
    has_gpu = _has_gpu()
    description = "Transformer Engine {} on the reference backend: {}, compute capability {}.{}".format(
        version, "the real GPU" if has_gpu else "the CPU as a pretended GPU", *capability
    )
    always = backend is Backend.REFERENCE
    return Launch(description, children.environment(pretend_cuda=not has_gpu, capability=capability, always=always))


def launch(plan: Launch, script: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by one that runs ``script``."""
    os.environ.pop(children.ENVIRONMENT_VARIABLE, None)
    os.environ.update(plan.environment)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, str(script), *arguments])


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
