"""What is wrong with a machine, in words, the most serious first, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.base.torch_facts import Torch
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.cli.doctor.examination import Examination, Failed
from te_precision_callbacks.cli.doctor.log_folder import LogFolder
from te_precision_callbacks.cli.doctor.packages import Package
from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine

Severity = Literal["stops a run", "changes a run"]

_ENGINE = "transformer-engine"
_ORDER: tuple[Severity, ...] = ("stops a run", "changes a run")


@dataclass(frozen=True)
class DoctorFinding:
    """Something that is wrong.

    Attributes:
        severity: what it does to a run.
        what: what is wrong.
        remedy: what to do.
    """

    severity: Severity
    what: str
    remedy: str


def findings(examination: Examination) -> tuple[DoctorFinding, ...]:
    """What is wrong, the most serious first."""
    engine, torch, folder = examination.transformer_engine, examination.torch, examination.log_folder
    packages = () if isinstance(examination.packages, Failed) else examination.packages
    wanted = next((package.wanted for package in packages if package.name == _ENGINE), "")
    compiled_build = f"pip install --no-build-isolation '{_ENGINE}[pytorch]{wanted}'"
    found = list(_failed(examination))
    found += _of_packages(packages, engine, compiled_build)
    if not isinstance(engine, Failed):
        found += _of_engine(engine, compiled_build, with_gpu=not isinstance(torch, Failed) and bool(torch.gpus))
    if not isinstance(torch, Failed):
        found += _of_torch(torch)
    if not isinstance(folder, Failed):
        found += _of_folder(folder)
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


def _failed(examination: Examination) -> Iterator[DoctorFinding]:
    for field in fields(examination):
        part = getattr(examination, field.name)
        if isinstance(part, Failed):
            what = f"{field.name.replace('_', ' ')} could not be examined: {part.failure}"
            yield DoctorFinding("changes a run", what, "Repair this first, and run doctor again.")


def _of_packages(
    packages: tuple[Package, ...], engine: TransformerEngine | Failed, compiled_build: str
) -> Iterator[DoctorFinding]:
    backend = "none" if isinstance(engine, Failed) else engine.backend
    for package in packages:
        remedy = compiled_build if package.name == _ENGINE and backend == "compiled" else package.remedy
        if package.state == "outside":
            what = f"{package.name} {package.version} is installed; the versions that work are {package.wanted}"
            yield DoctorFinding("changes a run", what, f"Do: {remedy}")
        elif package.state == "missing" and not package.extra:
            yield DoctorFinding("stops a run", f"{package.name} is not installed", f"Do: {remedy}")


def _of_engine(engine: TransformerEngine, compiled_build: str, *, with_gpu: bool) -> Iterator[DoctorFinding]:
    if engine.backend == "none":
        yield DoctorFinding(
            "stops a run",
            "neither the compiled Transformer Engine nor the reference backend can be used. Compiled:"
            f" {engine.why_not_compiled}. Reference backend: {engine.why_no_reference}",
            f"With a GPU: {compiled_build}. Without a GPU: {install_line('reference')}. Overflow"
            " detection needs neither.",
        )
    elif engine.backend == "reference" and (with_gpu or len(engine.installed) > 1):
        yield DoctorFinding(
            "changes a run",
            f"the compiled Transformer Engine cannot be imported: {engine.why_not_compiled}. The reference backend runs"
            " instead where a script or te-precision run installs it, and is slow",
            f"Install the build for this torch and CUDA: {compiled_build}",
        )
    for recipes in (recipes for recipes in engine.recipes if recipes.chosen):
        if recipes.failure:
            what = f"Transformer Engine cannot be asked for its recipes ({recipes.place}): {recipes.failure}"
            yield DoctorFinding(
                "stops a run", what, "A variable with a bad value can be the reason: see the other findings."
            )
        elif recipes.why_no_default:
            yield DoctorFinding(
                "stops a run",
                f"te.autocast() without a recipe raises an exception ({recipes.place}): {recipes.why_no_default}",
                "Give te.autocast() a recipe, or change the variable that the exception names.",
            )
        elif len(recipes.refusals) == len(RECIPES):
            reasons = "; ".join(dict.fromkeys(recipes.refusals.values()))
            yield DoctorFinding("changes a run", f"no FP8 recipe runs on this GPU: {reasons}", "Use another GPU.")


def _of_torch(torch: Torch) -> Iterator[DoctorFinding]:
    for warning in torch.warnings:
        yield DoctorFinding("changes a run", f"torch warns: {warning}", "Until this is solved, torch may see no GPU.")
    if torch.driver is not None and not torch.gpus and torch.visible_devices not in ("", "-1"):
        yield DoctorFinding(
            "changes a run",
            f"there is an NVIDIA driver ({torch.driver}), but torch sees no GPU",
            "Check CUDA_VISIBLE_DEVICES, and that torch is a build for CUDA (torch.version.cuda).",
        )


def _of_folder(folder: LogFolder) -> Iterator[DoctorFinding]:
    where = f"the log folder {folder.path}"
    if folder.why_not_writable:
        yield DoctorFinding(
            "stops a run", f"{where} cannot be written to: {folder.why_not_writable}", "Give another one: log_dir=."
        )
    if folder.why_full:
        yield DoctorFinding(
            "changes a run", f"{where}: {folder.why_full}. Tensors are not dumped", "Make room, or use another disk."
        )
    if folder.why_no_locks:
        yield DoctorFinding(
            "changes a run",
            f"{where} is without file locks: {folder.why_no_locks}. Processes that start together write into one file",
            "Give each of them its own log_dir, or use another file system.",
        )
