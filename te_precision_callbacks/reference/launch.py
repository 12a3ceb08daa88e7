"""Plans and starts ``te-precision run``.

The script or module runs in a fresh Python process that replaces this one, so ``__main__``, ``sys.argv``,
``sys.path[0]``, the exit code, tracebacks, signals, and starting the script again for other ranks work as without this
launcher. The backend is installed there as in child processes (:mod:`te_precision_callbacks.startup`).
"""

from __future__ import annotations

import enum
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from te_precision_callbacks.base.errors import PrecisionDebugError, install_line
from te_precision_callbacks.reference import compiled_extension, inherited, target
from te_precision_callbacks.reference.errors import InstallError, TransformerEngineVersionError
from te_precision_callbacks.reference.inherited import Inherited

_START_OF_PROGRAM = 4096
"""The bytes of a program that say what runs it."""


class CommandError(PrecisionDebugError, ValueError):
    """There is no script, program or module of this name."""


class Backend(str, enum.Enum):
    AUTO = "auto"
    """The compiled Transformer Engine if there is a GPU and it can be imported, else the reference backend."""
    TE = "te"
    """The compiled Transformer Engine."""
    REFERENCE = "reference"
    """The reference backend."""


@dataclass(frozen=True)
class Launch:
    """The Transformer Engine for a script, as text, and the environment variables for its process."""

    description: str
    environment: dict[str, str]


def plan_launch(backend: Backend) -> Launch:
    """Choose the compiled Transformer Engine or the reference backend for a script.

    Raises:
        TransformerEngineVersionError: no Transformer Engine is installed, or the backend does not support its version.
        InstallError: the compiled Transformer Engine was requested but cannot be imported.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise TransformerEngineVersionError(
            f"No Transformer Engine is installed. Its Python part is enough here: {install_line('reference')}"
        )
    has_gpu = backend is not Backend.TE and _has_gpu()
    if backend is Backend.TE or (backend is Backend.AUTO and has_gpu):  # as install_where_needed() decides
        reason = compiled_extension.why_unavailable()
        if reason is None:
            return Launch("the compiled Transformer Engine", {})
        if backend is Backend.TE:
            raise InstallError(
                f"--backend te: the compiled Transformer Engine cannot be imported: {reason}. Install it, or use "
                "--backend reference."
            )
    version = compiled_extension.checked_version()
    capability = target.capability()
    description = "Transformer Engine {} on the reference backend: {}, compute capability {}.{}".format(
        version, "the real GPU" if has_gpu else "a GPU emulated on the CPU", *capability
    )
    always = backend is Backend.REFERENCE
    return Launch(description, inherited.environment(Inherited(not has_gpu, capability, always)))


def script_command(script: str, runner: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a script, or a program such as ``torchrun``, ``accelerate`` or ``python``.

    A program is looked up on the PATH, then among the scripts of this environment. If it is written in Python, it runs
    in this interpreter, by the arguments ``runner``.

    Raises:
        CommandError: neither a script nor a program of this name exists.
    """
    if Path(script).is_file():
        return [*_python(), *runner, script]
    program = shutil.which(script) or shutil.which(script, path=sysconfig.get_path("scripts"))
    if program is not None:
        if _is_python(Path(program)):
            return [*_python(), *runner, program]
        return [program]
    what = "there is no file" if Path(script).name != script else "there is no file and no program on the PATH named"
    hint = f". To run the module, put -m before it: te-precision run -m {script}" if _is_module(script) else ""
    raise CommandError(f"{what} {script!r}{hint}")


def module_command(name: str, runner: Sequence[str] = ()) -> list[str]:
    return [*_python(), *runner, "-m", name]


def _python() -> list[str]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags]


def _is_python(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            start = file.read(_START_OF_PROGRAM)
    except OSError:
        return False
    return re.match(rb"#!\S*/(?:env\s+(?:-S\s+)?)?python|#!/bin/sh\n'''exec' ", start) is not None


def _is_module(name: str) -> bool:
    top, *_ = parts = name.split(".")
    return all(map(str.isidentifier, parts)) and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None


def launch(environment: Mapping[str, str], command: Sequence[str]) -> NoReturn:
    os.environ.pop(inherited.ENVIRONMENT_VARIABLE, None)
    os.environ.update(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
