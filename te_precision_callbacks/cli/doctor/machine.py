"""Examines packages, Transformer Engine, torch, variables and the log folder for known problems.

Transformer Engine is imported in another process, since the import may fail, crash or hang. Its checks (2.20.2,
``pytorch/quantization.py``) determine the supported recipes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from te_precision_callbacks import reference
from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.base.files import why_full
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.reference import ReferenceBackendError, inherited, target
from te_precision_callbacks.reference.launch import Backend, plan_launch
from te_precision_callbacks.te.environment import Torch, installed_version, read_environment, torch_facts

_TE_PACKAGES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")

_TIMEOUT = 180.0
"""Seconds after which the other process counts as hanging."""


class NoAnswerError(Exception):
    """The process failed, crashed or hung."""


@dataclass(frozen=True)
class Recipes:
    """The supported recipes.

    Attributes:
        place: ``this GPU``, or the emulated compute capability.
        refusals: recipe -> the reason why it is not supported.
        failure: the exception of the checks; empty without one.
    """

    place: str
    refusals: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class TransformerEngine:
    """The Transformer Engine of this machine; reasons are empty if they do not apply.

    ``backend``: the ``compiled`` build, the ``reference`` backend, or ``none``; then ``recipes`` is None.
    """

    installed: Mapping[str, str]
    backend: Literal["compiled", "reference", "none"]
    description: str
    why_not_compiled: str
    why_no_reference: str
    recipes: Recipes | None


def find_transformer_engine() -> TransformerEngine:
    installed = {name: version for name in _TE_PACKAGES if (version := installed_version(name)) is not None}
    environment = {name: value for name, value in os.environ.items() if name != inherited.ENVIRONMENT_VARIABLE}
    try:
        recipes = recipes_in_process(environment)
    except NoAnswerError as error:
        why = str(error)
    else:
        return TransformerEngine(installed, "compiled", "the compiled Transformer Engine", "", "", recipes)
    try:
        plan = plan_launch(Backend.REFERENCE)
    except ReferenceBackendError as error:
        return TransformerEngine(installed, "none", "no usable Transformer Engine", why, str(error), None)
    try:
        recipes = recipes_in_process(environment | plan.environment)
    except NoAnswerError as error:
        recipes = Recipes("reference backend", failure=str(error))
    return TransformerEngine(installed, "reference", plan.description, why, "", recipes)


def recipes_in_process(environment: Mapping[str, str]) -> Recipes:
    """Return the recipes supported in a process with this environment, on the GPU or on the reference backend.

    Raises:
        NoAnswerError: Transformer Engine cannot be imported there.
    """
    code = f"from {__name__} import recipes_here; import json; print(json.dumps(recipes_here()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"the process had not ended after {_TIMEOUT:.0f} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise NoAnswerError(lines[-1] if lines else f"the process ended with status {done.returncode}")
    return Recipes(**json.loads(done.stdout.splitlines()[-1]))  # imports may have printed earlier lines


def recipes_here() -> dict[str, Any]:
    from te_precision_callbacks.te.recipes import unsupported_recipes

    emulated = "reference backend at {}.{}".format(*target.capability())
    gpu = emulated if reference.is_installed() else "this GPU"
    try:
        recipes = Recipes(gpu, unsupported_recipes())
    except Exception as error:  # a compiled build without a GPU, for example
        recipes = Recipes(gpu, failure=f"{type(error).__name__}: {error}")
    return dataclasses.asdict(recipes)


# ---------------------------------------------------------------------- the machine

_PACKAGES = (
    "te-precision-callbacks",
    "transformer-engine",
    "nvdlfw-inspect",
    "torch",
    "triton",
    "numpy",
    "pyarrow",
    "pydantic",
    "safetensors",
    "lightning",
    "accelerate",
    "transformers",
)


@dataclass(frozen=True)
class LogFolder:
    """A log folder, which need not exist yet; reasons are empty if they do not apply."""

    path: str
    exists: bool
    why_not_writable: str
    why_full: str
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """A machine. ``torch`` is the error if torch cannot be imported; ``packages``: name -> version, None if missing."""

    platform: str
    packages: dict[str, str | None]
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
        packages={"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}},
        transformer_engine=find_transformer_engine(),
        torch=torch,
        environment=read_environment(os.environ),
        log_folder=log_folder(log_dir),
    )


def log_folder(folder: Path) -> LogFolder:
    path = folder.expanduser().absolute()
    parent = path
    while not parent.exists():
        parent = parent.parent
    why_not_writable = ""
    try:
        if not parent.is_dir():
            raise NotADirectoryError(f"{str(parent)!r} is not a folder")
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"written")
    except OSError as error:
        why_not_writable = str(error)
    return LogFolder(str(path), path.is_dir(), why_not_writable, why_full(path) or "", shutil.disk_usage(parent).free)


# ---------------------------------------------------------------------- problems

Severity = Literal["stops a run", "changes a run"]

COMPILED_BUILD = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20,<2.21'"


@dataclass(frozen=True)
class DoctorFinding:
    severity: Severity
    what: str
    remedy: str


def findings(machine: Machine) -> tuple[DoctorFinding, ...]:
    engine = machine.transformer_engine
    torch = machine.torch
    advice = list(_engine_findings(engine, with_gpu=not isinstance(torch, str) and bool(torch.gpus)))
    advice += _torch_findings(torch)
    advice += _folder_findings(machine.log_folder)
    return tuple(sorted(advice, key=lambda finding: finding.severity != "stops a run"))


def _engine_findings(engine: TransformerEngine, *, with_gpu: bool) -> Iterator[DoctorFinding]:
    if engine.backend == "none":
        yield DoctorFinding(
            "stops a run",
            "neither the compiled Transformer Engine nor the reference backend is usable. Compiled:"
            f" {engine.why_not_compiled}. Reference backend: {engine.why_no_reference}",
            f"With a GPU: {COMPILED_BUILD}. Without a GPU: {install_line('reference')}. Overflow"
            " detection needs neither.",
        )
    elif engine.backend == "reference" and (with_gpu or len(engine.installed) > 1):
        yield DoctorFinding(
            "changes a run",
            f"the compiled Transformer Engine cannot be imported: {engine.why_not_compiled}. The slow reference"
            " backend is used instead, in scripts that install it and with te-precision run",
            f"Install the build for this torch and CUDA: {COMPILED_BUILD}",
        )
    recipes = engine.recipes
    if recipes is None:
        return
    if recipes.failure:
        yield DoctorFinding(
            "stops a run",
            f"Transformer Engine's checks of recipes fail ({recipes.place}): {recipes.failure}",
            "An environment variable with an invalid value can be the cause: see the other findings.",
        )
    elif len(recipes.refusals) == len(RECIPES):
        reasons = "; ".join(dict.fromkeys(recipes.refusals.values()))
        yield DoctorFinding("changes a run", f"no FP8 recipe runs on this GPU: {reasons}", "Use another GPU.")


def _torch_findings(torch: Torch | str) -> Iterator[DoctorFinding]:
    if isinstance(torch, str):
        yield DoctorFinding("stops a run", f"torch cannot be imported: {torch}", "Install torch again.")
        return
    for warning in torch.warnings:
        yield DoctorFinding("changes a run", f"torch warns: {warning}", "Until this is fixed, torch may not see a GPU.")
    if torch.driver is not None and not torch.gpus and torch.visible_devices not in ("", "-1"):
        yield DoctorFinding(
            "changes a run",
            f"an NVIDIA driver ({torch.driver}) is installed, but torch sees no GPU",
            "Check CUDA_VISIBLE_DEVICES, and that torch is a CUDA build (torch.version.cuda).",
        )


def _folder_findings(folder: LogFolder) -> Iterator[DoctorFinding]:
    where = f"the log folder {folder.path}"
    if folder.why_not_writable:
        yield DoctorFinding(
            "stops a run", f"{where} cannot be written to: {folder.why_not_writable}", "Set log_dir= to another folder."
        )
    if folder.why_full:
        yield DoctorFinding(
            "changes a run",
            f"{where}: {folder.why_full}. Tensors are not dumped",
            "Free some space, or use another disk.",
        )
