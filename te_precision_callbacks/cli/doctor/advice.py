"""Problems of a machine, with remedies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.base.torch_facts import Torch
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.cli.doctor.machine import LogFolder, Machine, Package
from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine

Severity = Literal["stops a run", "changes a run"]

_ENGINE = "transformer-engine"
_ORDER: tuple[Severity, ...] = ("stops a run", "changes a run")


@dataclass(frozen=True)
class DoctorFinding:
    severity: Severity
    what: str
    remedy: str


def findings(machine: Machine) -> tuple[DoctorFinding, ...]:
    engine, torch = machine.transformer_engine, machine.torch
    wanted = next((package.wanted for package in machine.packages if package.name == _ENGINE), "")
    compiled_build = f"pip install --no-build-isolation '{_ENGINE}[pytorch]{wanted}'"
    advice = list(_of_packages(machine.packages, engine, compiled_build))
    advice += _of_engine(engine, compiled_build, with_gpu=not isinstance(torch, str) and bool(torch.gpus))
    advice += _of_torch(torch)
    advice += _of_folder(machine.log_folder)
    return tuple(sorted(advice, key=lambda finding: _ORDER.index(finding.severity)))


def _of_packages(
    packages: tuple[Package, ...], engine: TransformerEngine, compiled_build: str
) -> Iterator[DoctorFinding]:
    for package in packages:
        remedy = f"Do: pip install '{package.name}{package.wanted}'"
        if package.name == _ENGINE and engine.backend == "compiled":
            remedy = f"Do: {compiled_build}"
        if package.name == "python":
            remedy = f"Use Python {package.wanted}."
        if package.state == "outside":
            what = f"{package.name} {package.version} is installed; the versions that work are {package.wanted}"
            yield DoctorFinding("changes a run", what, remedy)
        elif package.state == "missing" and not package.extra:
            yield DoctorFinding("stops a run", f"{package.name} is not installed", remedy)


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
    recipes = engine.recipes
    if recipes is None:
        return
    if recipes.failure:
        yield DoctorFinding(
            "stops a run",
            f"Transformer Engine's checks of recipes fail ({recipes.place}): {recipes.failure}",
            "A variable with a bad value can be the reason: see the other findings.",
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


def _of_torch(torch: Torch | str) -> Iterator[DoctorFinding]:
    if isinstance(torch, str):
        yield DoctorFinding("stops a run", f"torch cannot be imported: {torch}", "Install torch again.")
        return
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
