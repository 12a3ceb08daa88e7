"""Finds the first overflow among frames, and reports the frames before it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.layers.naming import NamedTorchModule
from te_precision_callbacks.overflow.frames import Extremes, Frame, measure, read
from te_precision_callbacks.overflow.hooks import is_compiled, watched_modules

_LISTED = 5


@dataclass(frozen=True)
class Finding:
    """A detected overflow, or a failure of detection; see :class:`ActivationOverflowError` for other attributes.

    Attributes:
        failure: class and text of the failure; empty for an overflow.
        index: the number of frames before it since the last common check of the ranks.
        headline: the line that names the bad tensor.
        report: the complete report.
        step: the training step as text, if known.
    """

    rank: int
    failure: str = ""
    path: str = ""
    class_name: str = ""
    role: str = ""
    batch: int = 0
    evaluation: bool = False
    index: int = 0
    headline: str = ""
    advice: str = ""
    report: str = ""
    step: str = ""


def first_bad(
    frames: Sequence[Frame], traced: Collection[int], allow_neg_inf: Iterable[str], *, gradients: bool
) -> int | None:
    """Return the index of the first bad frame, of batches that are not ``traced``.

    A nan or +inf is bad in any tensor, a -inf only if a module produces it from inputs without -inf.
    """
    excused: set[Extremes] = set()
    for index, frame in enumerate(frames):
        extremes = frame.extremes
        if not extremes.kind or frame.batch in traced or (frame.kind == "gradient" and not gradients):
            continue
        if not extremes.high < math.inf or frame.kind == "gradient":
            return index
        if frame.kind == "label" or frame.sign == ">" or extremes in excused:
            continue
        entered = any(entered_frame.extremes.low == -math.inf for entered_frame in frame.inputs)
        if not (entered or any(fnmatch.fnmatchcase(frame.module.path, pattern) for pattern in allow_neg_inf)):
            return index
        excused.add(extremes)  # outer modules return it too
    return None


def format_frame(frame: Frame, *, abs_min: bool) -> str:
    """Format a frame: ``abs_max= 3.17e+03 < [0] encoder.block.1.layer.1.DenseReluDense.wo: Linear: output``."""
    extremes = frame.extremes
    abs_max = f"abs_max={extremes.format(max(abs(extremes.low), abs(extremes.high))):>9}"
    least = f"abs_min={extremes.format(extremes.least):>9} " if abs_min else ""
    return f"{least}{abs_max} {format_place(frame)}"


def format_place(frame: Frame) -> str:
    names = frame.module.path, frame.module.class_name, frame.role
    return f"{frame.sign} [{frame.batch}] {': '.join(filter(None, names))}"


def advice_on(frame: Frame, loss_scale: float | None) -> str:
    if frame.kind == "gradient":
        scaler = (
            " If the loss is scaled without torch's GradScaler, set detector.loss_scaled = True."
            if loss_scale is None
            else f" The loss scale is only {loss_scale:g}, so it is not the cause; a GradScaler would skip every"
            " further step."
        )
        return f"The forward was finite: the gradient became inf or nan in the backward.{scaler}"
    if frame.sign == ">":
        return (
            "The value comes from outside the watched modules: from the data, or from code between modules, which"
            " detect_overflow() can check."
        )
    if frame.extremes.high < math.inf:
        return f"The only such value is -inf: if it is intended, allow it with allow_neg_inf=[{frame.module.path!r}]."
    return (
        "Find the frame where abs_max starts to grow, and run that part in higher precision, or reduce its values."
        " parameters=True also checks weights; detect_overflow() checks tensors inside a forward."
    )


def advice_on_parameters(roots: Sequence[NamedTorchModule], path: str) -> str:
    """Name the parameters with inf or nan, first of the module at ``path``; empty if all are finite. The host waits."""
    named: dict[torch.nn.Parameter, tuple[str, Extremes]] = {}
    for module_path, module in sorted(watched_modules(roots), key=lambda watched: watched[0] != path):
        for name, parameter in module.named_parameters(recurse=is_compiled(module)):
            if parameter not in named:
                named[parameter] = f"{module_path}.{name}".removeprefix("."), measure(parameter, abs_min=False)
    read(extremes for _, extremes in named.values())
    broken = [f"{name} ({extremes.kind})" for name, extremes in named.values() if extremes.kind]
    if not broken:
        return ""
    return (
        f"The weights already have inf or nan: {some_of(broken, _LISTED)}. Check the initialization, the"
        " loaded checkpoint, code that writes weights, and the optimizer's learning rate, state and eps. Resume from"
        " an earlier checkpoint."
    )
