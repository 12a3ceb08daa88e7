"""Problems of a machine, with remedies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.base.torch_facts import Torch
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.cli.doctor.machine import LogFolder, Machine
from te_precision_callbacks.cli.doctor.te_installation import TransformerEngine

Severity = Literal["stops a run", "changes a run"]

COMPILED_BUILD = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20,<2.21'"
_ORDER: tuple[Severity, ...] = ("stops a run", "changes a run")


@dataclass(frozen=True)
class DoctorFinding:
    severity: Severity
    what: str
    remedy: str


def findings(machine: Machine) -> tuple[DoctorFinding, ...]:
    engine, torch = machine.transformer_engine, machine.torch
    advice = list(_of_engine(engine, with_gpu=not isinstance(torch, str) and bool(torch.gpus)))
    advice += _of_torch(torch)
    advice += _of_folder(machine.log_folder)
    return tuple(sorted(advice, key=lambda finding: _ORDER.index(finding.severity)))


def _of_engine(engine: TransformerEngine, *, with_gpu: bool) -> Iterator[DoctorFinding]:
    if engine.backend == "none":
        yield DoctorFinding(
            "stops a run",
            "neither the compiled Transformer Engine nor the reference backend can be used. Compiled:"
            f" {engine.why_not_compiled}. Reference backend: {engine.why_no_reference}",
            f"With a GPU: {COMPILED_BUILD}. Without a GPU: {install_line('reference')}. Overflow"
            " detection needs neither.",
        )
    elif engine.backend == "reference" and (with_gpu or len(engine.installed) > 1):
        yield DoctorFinding(
            "changes a run",
            f"the compiled Transformer Engine cannot be imported: {engine.why_not_compiled}. The reference backend runs"
            " instead where a script or te-precision run installs it, and is slow",
            f"Install the build for this torch and CUDA: {COMPILED_BUILD}",
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
