"""Statistics of one tensor: this project's engine and Transformer Engine 2.20's functions, in one process.

    python benchmarks/stats.py [--json] [--size 4096] [--seconds 20] [--device cpu|cuda]

Columns:
  ours_ms       time of a step for the tensor: a note for each feature and the measuring, not only the kernel;
                flush_ms, once a step for all tensors, is separate.
  te_ms         the functions that Transformer Engine's buffer calls for these statistics (in their
                DEPENDENCIES), each once. Its buffer calls each of them twice in the first micro-batch of a step, and
                copies, waits and logs around them: none of that is counted here (step.py counts all of it).
                Its torch.compile is on or off, whichever is faster (te_mode); both are warmed up.
                The quantized tensor of the FP8 cases is made before, by Transformer Engine's own quantizer.
  read_once_ms  x.sum(): the time to read the high-precision tensor once.
  ours_reads    ours_ms over a paired read: the median of the pairs with its interval, see in_turn.py.
  claim         how many readings it takes at most.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from in_turn import Way, add_arguments, in_turn, interval, plainly
from measuring import (
    FP8_STATISTICS,
    MODES,
    TENSOR_STATISTICS,
    Mode,
    arguments,
    as_in_a_long_run,
    device_milliseconds,
    machine,
    measured_tensor,
    progress,
    report,
    spent,
    upstream_functions,
)

from te_precision_callbacks import reference
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import Request, quantized_request, tensor_request

COLUMNS = ("case", "path", "ours_ms", "ours_reads", "claim", "te_ms", "te_mode", "ratio", "read_once_ms", "flush_ms")
ON_GPU = ("pass_ms", "bandwidth_share")
CURRENT, DELAYED = "current scaling", "delayed scaling"

_COPIES_BYTES = 512 * 2**20
"""Larger than the cache of any GPU."""


@dataclass(frozen=True)
class Case:
    """A measured case.

    Attributes:
        dtype: of the tensor.
        tensor: statistics of the tensor itself.
        quantized: statistics of its quantized form.
        recipe: of the quantized form.
        eager: whether our pass is the one of plain torch operations, as without a compiler or Triton.
    """

    dtype: torch.dtype
    tensor: Sequence[str] = ()
    quantized: Sequence[str] = ()
    recipe: str = ""
    eager: bool = False

    @property
    def claim(self) -> float | None:
        """Claimed upper limit in reads of the tensor; None without a claim."""
        if self.eager:
            return None
        return 2.0 if self.quantized else 1.3 if self.dtype == torch.float32 else 1.6

    @property
    def name(self) -> str:
        parts = [f"{len(self.tensor)} of the tensor"] if self.tensor else []
        parts += [f"{len(self.quantized)} of FP8 {self.recipe}"] if self.quantized else []
        return f"{' + '.join(parts)}, {str(self.dtype).removeprefix('torch.')}{', plain torch' * self.eager}"


def _cases() -> Iterator[Case]:
    delayed = (*FP8_STATISTICS, "overflows%")
    yield Case(torch.float32, TENSOR_STATISTICS)
    yield Case(torch.float32, TENSOR_STATISTICS, eager=True)
    yield Case(torch.bfloat16, TENSOR_STATISTICS)
    for dtype in (torch.float32, torch.bfloat16):
        yield Case(dtype, (), FP8_STATISTICS, CURRENT)
        yield Case(dtype, (), delayed, DELAYED)
        yield Case(dtype, TENSOR_STATISTICS, delayed, DELAYED)


class Measured:
    """A case with its tensors.

    Args:
        case: the measured case.
        size: of the square tensor.
        device: where it lies.
    """

    def __init__(self, case: Case, size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case = case
        self.device = device
        self._engine = StatisticsEngine(on_failure=_fail)
        self.values = torch.randn(size, size, generator=generator).to(device, case.dtype)
        self.quantizer = _quantizer(case.recipe, self.values) if case.quantized else None
        self.quantized = self.quantizer(self.values) if self.quantizer is not None else None
        self._watched = Watched(
            "benchmark", "activation", 0, self.values, self.quantized, self.quantized, self.quantizer
        )
        notes = [[tensor_request(name) for name in case.tensor], [quantized_request(name) for name in case.quantized]]
        self._notes: list[list[Request]] = [requests for requests in notes if requests]

    def ours(self) -> None:
        """Note the tensor for each feature and measure it in one pass, as a session does."""
        for requests in self._notes:
            self._engine.note(self._watched, requests)
        self._engine.measure()

    def upstream(self) -> None:
        """Call each function of Transformer Engine's buffers once: a buffer for each feature."""
        from transformer_engine.debug.features.utils.stats_computation import DEPENDENCIES, STATS

        results = {"": self.quantized}
        for statistics in (self.case.tensor, self.case.quantized):
            for name in set().union(*(DEPENDENCIES[statistic] for statistic in statistics)):
                STATS[name][0](self.values, results)

    def run(self, seconds: float, least: int) -> dict[str, Any]:
        """The numbers of the case."""
        with _plain_torch() if self.case.eager else contextlib.nullcontext():
            self._engine = StatisticsEngine(on_failure=_fail)
            self.ours()
            results = len(self._engine.flush(reduce=False))
            if results != sum(map(len, self._notes)):
                raise RuntimeError(f"{self.case.name}: the engine gave {results} statistics of {self._notes}")
            modes = MODES if self.case.tensor else MODES[:1]  # nothing of the FP8 statistics is ever compiled
            ways: dict[str, Way] = {"ours": plainly(self.ours)}
            ways |= {mode: functools.partial(self._in_mode, mode) for mode in modes}
            claim = self.case.claim
            times = in_turn(ways, plainly(self.values.sum), self.device, share=0.05, seconds=seconds, least=least)
            flush = interval([self._flush() for _ in range(least)])
            upstream = {mode: times[mode].way() for mode in modes}
            mode = min(modes, key=lambda mode: upstream[mode].value)
            ours, reads = times["ours"].way(), times["ours"].ratio()
            result = {
                "case": self.case.name,
                "path": path_of(self.values),
                "dtype": str(self.case.dtype).removeprefix("torch."),
                "shape": list(self.values.shape),
                "statistics": [*self.case.tensor, *self.case.quantized],
                "ours_ms": ours,
                "ours_reads": reads,
                "claim": reads.beside(claim),
                "pairs": len(times["ours"].ways),
                "flush_ms": flush,
                "te_ms": upstream[mode],
                "te_mode": mode,
                "te_eager_ms": upstream["eager"],
                "te_compile_ms": upstream.get("torch.compile"),
                "ratio": upstream[mode].value / ours.value,
                "read_once_ms": times["ours"].base(),
                "read_once": "x.sum()",
            }
            if self.device.type == "cuda" and not self.case.eager:
                result |= self._bandwidth()
        return result

    @contextlib.contextmanager
    def _in_mode(self, mode: Mode) -> Iterator[Callable[[], None]]:
        with upstream_functions(mode):
            yield self.upstream

    def _flush(self) -> float:
        self.ours()
        return spent(lambda: self._engine.flush(reduce=False), self.device).wall

    def _bandwidth(self) -> dict[str, float]:
        """Return the share of the GPU's bandwidth that our pass reaches, relative to copies and sums."""
        tensors = [self.values] if self.quantized is None else [self.values, self.quantized._data]
        read = sum(tensor.nbytes for tensor in tensors)
        copies = [[tensor.clone() for tensor in tensors] for _ in range(max(2, -(-_COPIES_BYTES // read)))]
        scale = () if self.quantized is None else (self.quantized._scale_inv,)
        ms = device_milliseconds([functools.partial(measured_tensor, *copy, *scale) for copy in copies])
        # Not `values`, whose sum may not be bound by memory in every dtype.
        large = torch.ones(_COPIES_BYTES // 4, device=self.device)
        rates = [2 * large.nbytes / device_milliseconds([large.clone]), large.nbytes / device_milliseconds([large.sum])]
        peak = max(rates)
        return {"pass_ms": ms, "peak_gb_per_s": peak / 1e6, "bandwidth_share": read / ms / peak}


def path_of(values: torch.Tensor) -> str:
    """The pass that a tensor takes now: ``triton``, ``native`` or ``eager``."""
    taken = kernels._pass_for(values)
    return "triton" if taken is kernels._with_triton else taken.__module__.rpartition(".")[2]


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Our pass as it is without a compiler and without Triton."""
    with mock.patch.object(kernels, "_pass_for", return_value=eager.add):
        yield


def _quantizer(recipe: str, values: torch.Tensor) -> Any:
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    if recipe == CURRENT:
        return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, values.device, columnwise=False)
    amax = values.abs().amax().float().reshape(1)
    scale = 2 * 448.0 / amax  # twice too large: as if the amaxes before had been half of it, so that some overflow
    return Float8Quantizer(scale, amax.clone(), DType.kFloat8E4M3, columnwise=False)


def _fail(what: str, of: str, error: Exception) -> None:
    raise RuntimeError(f"the engine could not give {what} {of}") from error


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the tensor (default: 4096)")
    add_arguments(parser, 20, "that a case may take")
    device_of = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device_of, help=f"default here: {device_of}")
    options = parser.parse_args(given)
    reference.install_where_needed()
    import transformer_engine.pytorch  # noqa: F401

    device = torch.device(options.device)
    progress(machine(device)) if options.json else print(machine(device), end="\n\n")
    cases = []
    for case in _cases():
        progress(case.name)
        with as_in_a_long_run():
            cases.append(
                {**Measured(case, options.size, device).run(options.seconds, options.least), "machine": machine(device)}
            )
    columns = COLUMNS + (ON_GPU if device.type == "cuda" else ())
    notes = (
        "ours_ms: StatisticsEngine.note and measure; flush_ms comes once a step, for all tensors together. te_ms: each"
        " function\nthat Transformer Engine's buffer needs, called once, in the faster mode. read_once_ms: x.sum()."
        " Medians with their 95 % intervals."
    )
    if device.type == "cuda":
        notes += (
            "\npass_ms: our pass on the device alone, on tensors that are not in its cache. bandwidth_share: of the"
            " larger of the rates\nof a copy and of a sum, measured in this run."
        )
    report(cases, columns, notes, as_json=options.json)


if __name__ == "__main__":
    main()
