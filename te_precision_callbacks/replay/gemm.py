"""Replays a record of a GEMM: its faults, and the position of wrong elements.

The product is computed in several ways, the *lanes*, in float64:

========  ==================================================  ========================
lane      computed                                            next differs by
========  ==================================================  ========================
original  from the operands before quantization               format and quantizer
codes     from the recorded codes and scales                  accumulation and kernel
result    recorded, without bias and the previous sum
========  ==================================================  ========================

The kernel is checked by the tolerances of :mod:`te_precision_callbacks.gemm_error.kernel_check`: rows and columns with
probes, elements by the same bound on the variance of the accumulator and the rounding of the result.
All codes and scales of the quantizer are checked (:mod:`te_precision_callbacks.gemm_error.codes`).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.dumps.contents import Dump, operand_of, require_dump
from te_precision_callbacks.dumps.dump_files import list_dumps, load
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import HIGH_PRECISION, DumpedGemm, DumpedOperand, Header
from te_precision_callbacks.gemm_error.codes import WINDOW_COLUMNS, WINDOW_ROWS, CodeCheck, check_codes
from te_precision_callbacks.gemm_error.factors import factor_of
from te_precision_callbacks.gemm_error.kernel_check import (
    GemmCall,
    KernelCheck,
    accumulator_of,
    check_kernel,
    probes,
    product,
    rounding_variance,
    seed_of,
    thin,
)

PROBES = 64
"""The number of probes on each side."""

MOST_DEVIATIONS = 8.0
"""The allowed error of an element, in standard deviations of the bound."""

_MOST_BIAS = 6.0
"""The allowed bias of stochastic rounding, and deviation of the share of zeros, in standard deviations."""

_LEFT = 0.2
"""A factor explains an error if it reduces the error to less than this share."""

_MOST_NAMED = 4

Cause = Literal["kernel", "quantizer"]


@dataclass(frozen=True)
class Lane:
    """A way to compute a result.

    Attributes:
        name: see the table above.
        difference: the cause of the difference to the next lane; empty for the last lane.
        error: the norm of the difference to the next lane divided by the norm of this lane, if known.
    """

    name: str
    difference: str
    error: float | None


@dataclass(frozen=True)
class Fault:
    """A fault of a GEMM.

    Attributes:
        cause: the kernel, or the quantizer.
        text: the fault with its position.
        operand: the operand of the quantizer; empty for the kernel.
    """

    cause: Cause
    text: str
    operand: str = ""


@dataclass(frozen=True)
class Replayed:
    """The result of the replay of a record.

    Attributes:
        header, gemm: the header of the record, and its GEMM.
        lanes: the ways to compute the product.
        faults: faults of the kernel come first.
        not_checked: parts that cannot be checked, and why.
        gain: <result, codes> / |codes|^2, which should be 1, if known.
        rows, columns: the error of each row and column divided by its tolerance, [n] and [m]; above 1 is wrong.
    """

    header: Header
    gemm: DumpedGemm
    lanes: tuple[Lane, ...]
    faults: tuple[Fault, ...]
    not_checked: tuple[str, ...]
    gain: float | None
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def name(self) -> str:
        """Such as ``fc1 fprop, step 3``."""
        header = self.header
        text = f"{header.layer} {self.gemm.name}, step {header.iteration}"
        if header.micro_batch:
            text += f", micro-batch {header.micro_batch}"
        if header.rank:
            text += f", rank {header.rank}"
        return text

    @property
    def verdict(self) -> str:
        if self.faults:
            return f"{self.name}: {self.faults[0].cause}: {self.faults[0].text}"
        text = f"{self.name}: no faults in the kernel and the quantizers"
        for lane in self.lanes:
            if lane.name == "original" and lane.error is not None:
                text += f"; error of the format: {100 * lane.error:.2f} %"
        if self.not_checked:
            return f"{text}. Not checked: {'; '.join(self.not_checked)}."
        return f"{text}."


@dataclass(frozen=True)
class ReplayedFolder:
    """The records of a folder.

    Attributes:
        records: path -> result, in execution order.
        unread: path -> why it could not be read.
    """

    records: dict[Path, Replayed]
    unread: dict[Path, str]

    @property
    def first_bad(self) -> tuple[Path, Replayed] | None:
        return next(((path, replayed) for path, replayed in self.records.items() if replayed.faults), None)


@torch.no_grad()
def replay(dump: Dump) -> Replayed:
    """Replay a record of a GEMM.

    Raises:
        DumpError: the dump is not a record of a GEMM.
    """
    gemm = require_dump(dump).header.gemm
    if gemm is None:
        raise DumpError("The dump has a single tensor, not a whole GEMM. DumpTensors writes GEMMs with 'gemms'.")
    left = Recorded.of(dump, "b", gemm.b)
    right = Recorded.of(dump, "a", gemm.a)
    kernel = _Kernel(dump, gemm, left, right)
    faults = kernel.faults()
    not_checked = []
    if not kernel.counts:
        not_checked.append(f"the kernel, since {kernel.why_not}")
    for operand in (left, right):
        checked = operand.checked()
        if checked is not None:
            faults += _faults_of_codes(operand.described.tensor, checked)
            not_checked += filter(None, [operand.left_out])
        elif isinstance(operand.data, Stored):
            missing = "its quantizer"
            if operand.high is None:
                missing = "the tensor before quantization"
            not_checked.append(f"the quantizer of {operand.described.tensor}, because {missing} is not in the record")
    return Replayed(
        dump.header,
        gemm,
        _lanes(kernel, left, right),
        tuple(faults),
        tuple(not_checked),
        kernel.gain,
        kernel.check.rows,
        kernel.check.columns,
    )


def replay_file(path: str | os.PathLike[str]) -> Replayed:
    """Replay one record.

    Raises:
        DumpError: the file is not a record of a GEMM, is damaged, or of a later version.
    """
    try:
        return replay(load(path))
    except DumpError as error:
        text = str(error).removeprefix(f"{path}: ")
        raise type(error)(f"{path}: {text}") from error


def replay_folder(folder: str | os.PathLike[str]) -> ReplayedFolder:
    """Replay all records in a folder and its subfolders in execution order; skips dumps of tensors.

    Raises:
        DumpError: the folder does not exist, or has no records.
    """
    listed = list_dumps(folder)
    unread = {file.path: file.why for file in listed.foreign if file.path.suffix == ".safetensors"}
    recorded = []
    for entry in listed:
        header = entry.header
        if header.gemm is not None:
            recorded.append(((header.time, header.iteration or 0, header.gemm.order, header.rank), entry.path))
    if not recorded and not unread:
        raise DumpError(f"{folder}: no records of GEMMs. DumpTensors writes them with 'gemms', below the log folder.")
    records: dict[Path, Replayed] = {}
    for _, path in sorted(recorded):
        try:
            records[path] = replay_file(path)
        except DumpError as error:
            unread[path] = str(error)
    return ReplayedFolder(records, unread)


class _Kernel:
    """A recorded GEMM, computed again in float64 from its codes.

    Attributes:
        left, right: operands as decoded codes, float64.
        codes: their product, float64.
        result: of the kernel, float64.
        check: the result of the kernel check.
        counts: whether the product could be checked.
        alone: the result without bias and previous sum.
        ratios: errors over their bounds.
        gain: factor between product and result; None if the product is 0.
    """

    def __init__(self, dump: Dump, gemm: DumpedGemm, left: Recorded, right: Recorded) -> None:
        self.gemm = gemm
        self.left = left.decoded()
        self.right = right.decoded()
        self.accumulator = accumulator_of(
            left.data, right.data, split_accumulator=gemm.split_accumulator, capability=gemm.capability
        )
        out = dump.tensors["out"].reshape(gemm.n, gemm.m)
        self.codes = gemm.alpha * (self.left @ self.right.t())
        self.result = out.double()
        bias = dump.tensors.get("bias")
        before = dump.tensors.get("before")
        added = torch.zeros_like(self.codes)
        if bias is not None:
            added += bias.reshape(1, -1).double()
        if before is not None:
            added += gemm.beta * before.reshape(gemm.n, gemm.m).double()
        self.check: KernelCheck = self._check(out, before, bias)
        self.counts = bool(self.check.counts)
        self.alone = self.result - added
        self.ratios = self._ratios(out.dtype, added)
        self.gain: float | None = None
        if self.check.expected_square:
            self.gain = float(self.check.gain_dot / self.check.expected_square)

    def _check(self, out: torch.Tensor, before: torch.Tensor | None, bias: torch.Tensor | None) -> KernelCheck:
        x = probes(self.gemm.m, PROBES, seed_of("replay", "x"), out.device, torch.float64)
        y = probes(self.gemm.n, PROBES, seed_of("replay", "y"), out.device, torch.float64)
        left = factor_of(self.left, columnwise=False)
        right = factor_of(self.right, columnwise=False)
        expected = product(left, right, x, y, self.gemm.alpha)
        run = thin(factor_of(out, columnwise=False), x, y)
        sum_of = None
        if before is not None:
            sum_of = thin(factor_of(before.reshape(out.shape), columnwise=False), x, y)
        call = GemmCall(self.gemm.k, out.dtype, x, y, self.accumulator, bias, sum_of, self.gemm.beta)
        return check_kernel(run, expected, call)

    def _ratios(self, dtype: torch.dtype, added: torch.Tensor) -> torch.Tensor:
        if not self.counts:
            return torch.zeros_like(self.codes)
        gemm = self.gemm
        terms = gemm.alpha**2 * (self.left.square() @ self.right.square().t())
        expected = self.codes + added
        rounded = expected.square() + self.codes.square()  # the product may be rounded before it is added
        variance = rounded * rounding_variance(dtype) + self.accumulator.variance(gemm.k, terms, self.codes.square())
        variance += (torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps) ** 2
        ratios = (self.result - expected).abs() / (MOST_DEVIATIONS * variance.sqrt())
        saturates = expected.abs() > torch.finfo(dtype).max / 64
        ratios = torch.where(self.result.isfinite() | saturates, ratios, math.inf)
        return torch.where(expected.isfinite() & ~(saturates & ~self.result.isfinite()), ratios, 0.0)

    def faults(self) -> list[Fault]:
        is_right = self.check.ratio <= 1 and (self.ratios <= 1).all()
        if is_right or not self.counts:
            return []
        text = describe_damage(self.ratios > 1, self.check.rows > 1, self.check.columns > 1)
        gain = ""
        if self.gain is not None:
            off = (self.alone - self.codes).norm()
            left = (self.alone - self.gain * self.codes).norm()
            if left < _LEFT * off:
                gain = f"; the result is {self.gain:.3g} of the product"
        return [Fault("kernel", f"{text}{gain}")]

    @property
    def why_not(self) -> str:
        if self.codes.isfinite().all(1).any():
            return "the product is too small relative to the sum that it was added to"
        return "each row of the product has inf or nan"


def _lanes(kernel: _Kernel, left: Recorded, right: Recorded) -> tuple[Lane, ...]:
    b = left.original()
    a = right.original()
    original = None
    if a is not None and b is not None:
        original = kernel.gemm.alpha * (b @ a.t())
    return (
        Lane("original", "format and quantizer", _distance(original, kernel.codes)),
        Lane("codes", "accumulation and kernel", _distance(kernel.codes, kernel.alone)),
        Lane("result", "", None),
    )


def _faults_of_codes(tensor: str, checked: CodeCheck) -> list[Fault]:
    codes, wrong, rounded, bias, zeros, expected_zeros, scales, wrong_scales = (number.item() for number in checked)
    faults = []
    if wrong_scales:
        faults.append(f"{wrong_scales:.0f} of {scales:.0f} scales do not match the format")
    if wrong:
        faults.append(f"{wrong:.0f} of {codes:.0f} codes are not the nearest value of the format")
    if rounded and not wrong:
        deviation = bias / math.sqrt(rounded / 4)
        if abs(deviation) > _MOST_BIAS:
            direction = "away from 0"
            if deviation < 0:
                direction = "towards 0"
            faults.append(f"stochastic rounding has a bias {direction}: {bias / rounded:+.3f} of a step on average")
        excess = zeros - expected_zeros
        if excess > _MOST_BIAS * math.sqrt(max(1.0, expected_zeros)):
            faults.append(f"{zeros:.0f} codes are 0, expected: {expected_zeros:.0f}")
    if faults:
        return [Fault("quantizer", f"{tensor}: {'; '.join(faults)}", tensor)]
    return []


def _distance(lane: torch.Tensor | None, following: torch.Tensor) -> float | None:
    """The norm of the difference of two lanes divided by the norm of the first, for elements that are finite in both;
    None without a lane or finite elements.
    """
    if lane is None:
        return None
    use = lane.isfinite() & following.isfinite()
    if use.numel() and not use.any():
        return None
    lane = torch.where(use, lane, 0.0)
    following = torch.where(use, following, 0.0)
    norm = float(lane.norm())
    off = float((lane - following).norm())
    if norm:
        return off / norm
    if off == 0:
        return 0.0
    return math.inf


@dataclass(frozen=True)
class Recorded:
    """An operand as the GEMM read it, and before quantization, if recorded."""

    described: DumpedOperand
    data: Stored | torch.Tensor
    high: torch.Tensor | None

    @classmethod
    def of(cls, dump: Dump, side: str, described: DumpedOperand) -> Recorded:
        return cls(described, operand_of(dump, side), dump.tensors.get(f"{side}.{HIGH_PRECISION}"))

    def decoded(self) -> torch.Tensor:
        return factor_of(self.data, columnwise=self.described.columnwise).matrix()

    def original(self) -> torch.Tensor | None:
        if not isinstance(self.data, Stored):
            return self.decoded()
        if self.high is None:
            return None
        return factor_of(self.high, columnwise=self.described.columnwise).matrix()

    @property
    def left_out(self) -> str:
        if self.high is None or self.high.isfinite().all():
            return ""
        lost = int((~self.high.isfinite()).sum())
        return f"{many(lost, 'element')} of {self.described.tensor} with inf or nan, and their scales"

    def checked(self) -> CodeCheck | None:
        """Check all codes and scales; None without an original, or for a plain tensor."""
        rules = self.described.rounding
        if self.high is None or not isinstance(self.data, Stored) or rules is None:
            return None
        rows, columns = self.data.matrix_shape
        total = torch.zeros(len(CodeCheck._fields), dtype=torch.float64)
        for row in range(-(-rows // WINDOW_ROWS)):
            for column in range(-(-columns // WINDOW_COLUMNS)):
                total += torch.stack(list(check_codes(self.data, self.high, rules, row, column)))
        return CodeCheck(*total)


def describe_damage(bad: torch.Tensor, bad_rows: torch.Tensor, bad_columns: torch.Tensor) -> str:
    """Describe the wrong elements: ``rows 16 to 47, columns 32 to 63: 1,024 elements are wrong``.

    The arguments mark elements, [n, m], rows and columns beyond their tolerance.
    """
    rows = (bad.any(1) | bad_rows).nonzero().flatten().tolist()
    columns = (bad.any(0) | bad_columns).nonzero().flatten().tolist()
    number = int(bad.sum())
    in_rows = _place("row", rows)
    in_columns = _place("column", columns)
    if not number:
        place = ", ".join(filter(None, (in_rows, in_columns))) or "the whole result"
        return f"{place}: off by more than rounding"
    if len(rows) == bad.shape[0] and len(columns) == bad.shape[1]:
        place = "the whole result"
    elif min(len(rows), len(columns)) > _MOST_NAMED:
        place = f"{in_rows}, {in_columns}"
    elif len(rows) <= len(columns):
        place = in_rows
    else:
        place = in_columns
    wrong = "1 element is"
    if number > 1:
        wrong = f"{number:,} elements are"
    return f"{place}: {wrong} wrong ({100 * number / bad.numel():.2g} % of the result)"


def _place(name: str, indices: list[int]) -> str:
    if not indices:
        return ""
    if len(indices) == 1:
        return f"{name} {indices[0]}"
    if len(indices) <= _MOST_NAMED:
        return f"{name}s {', '.join(map(str, indices))}"
    is_span = indices[-1] - indices[0] + 1 == len(indices)
    if is_span:
        return f"{name}s {indices[0]} to {indices[-1]}"
    return f"{len(indices)} {name}s"
