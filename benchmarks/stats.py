"""Statistics of one tensor: this project's engine and Transformer Engine 2.20's functions, in one process.

    python benchmarks/stats.py [--json] [--size 4096] [--seconds 20]

Values of a case:
  ours_ms       time of a step for the tensor: a note for each feature and the measuring, not only the kernel;
                flush_ms, once a step for all tensors, is separate.
  te_ms         the functions that Transformer Engine's buffer calls for these statistics (in their
                DEPENDENCIES), each once. Its buffer calls each of them twice in the first micro-batch of a step, and
                copies, waits and logs around them: none of that is counted here (step.py counts all of it).
                The quantized tensor of the FP8 cases is made before, by Transformer Engine's own quantizer.
  read_once_ms  x.sum(): the time to read the high-precision tensor once.
  ours_reads    ours_ms over a paired read: the median of the pairs with its interval, see measuring.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from measuring import (
    FP8_STATISTICS,
    TENSOR_STATISTICS,
    Case,
    arguments,
    in_turn,
    interval,
    plainly,
    progress,
    report,
    spent,
    upstream_functions,
)

from te_precision_callbacks import reference
from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import Request, quantized_request, tensor_request

COLUMNS = {
    "statistics of a tensor": "case",
    "here, ms": "ours_ms",
    "in reads of the tensor": "ours_reads",
    "Transformer Engine, ms": "te_ms",
    "ratio": "ratio",
}
CURRENT, DELAYED = "current scaling", "delayed scaling"


class Measured:
    """A tensor with the statistics that are measured.

    Args:
        dtype: of the tensor.
        tensor: statistics of the tensor itself.
        quantized: statistics of its quantized form.
        recipe: of the quantized form.
        size: of the square tensor.
        device: where it lies.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        tensor: Sequence[str] = (),
        quantized: Sequence[str] = (),
        recipe: str = "",
        *,
        size: int,
        device: torch.device,
    ) -> None:
        parts = [f"{len(tensor)} of the tensor"] if tensor else []
        parts += [f"{len(quantized)} of FP8 {recipe}"] if quantized else []
        self.name = f"{' + '.join(parts)}, {str(dtype).removeprefix('torch.')}"
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(size, size, generator=generator).to(device, dtype)
        quantizer = _quantizer(recipe, self.values) if quantized else None
        self.quantized = quantizer(self.values) if quantizer is not None else None
        self._statistics = [names for names in (tensor, quantized) if names]
        self._engine = StatisticsEngine(on_failure=_fail)
        self._watched = Watched("benchmark", "activation", 0, self.values, self.quantized, self.quantized, quantizer)
        notes = [[tensor_request(name) for name in tensor], [quantized_request(name) for name in quantized]]
        self._notes: list[list[Request]] = [requests for requests in notes if requests]

    def ours(self) -> None:
        """Note the tensor for each feature and measure it in one pass, as a session does."""
        for requests in self._notes:
            self._engine.note(self._watched, requests)
        self._engine.measure()

    @contextlib.contextmanager
    def upstream(self) -> Iterator[Callable[[], None]]:
        """Call each function of Transformer Engine's buffers once: a buffer for each feature."""
        from transformer_engine.debug.features.utils.stats_computation import DEPENDENCIES, STATS

        def call() -> None:
            results = {"": self.quantized}
            for statistics in self._statistics:
                for name in set().union(*(DEPENDENCIES[statistic] for statistic in statistics)):
                    STATS[name][0](self.values, results)

        with upstream_functions():
            yield call

    def run(self, seconds: float, least: int) -> Case:
        progress(self.name)
        self.ours()
        results = len(self._engine.flush(reduce=False))
        if results != sum(map(len, self._notes)):
            raise RuntimeError(f"{self.name}: the engine gave {results} statistics of {self._notes}")
        ways = {"ours": plainly(self.ours), "te": self.upstream}
        times = in_turn(ways, plainly(self.values.sum), self.device, share=0.05, seconds=seconds, least=least)
        ours, upstream = times["ours"].way(), times["te"].way()
        return {
            "case": self.name,
            "path": path_of(self.values),
            "shape": list(self.values.shape),
            "ours_ms": ours,
            "ours_reads": times["ours"].ratio(),
            "pairs": len(times["ours"].ways),
            "flush_ms": interval([self._flush() for _ in range(least)]),
            "te_ms": upstream,
            "ratio": upstream.value / ours.value,
            "read_once_ms": times["ours"].base(),
        }

    def _flush(self) -> float:
        self.ours()
        return spent(lambda: self._engine.flush(reduce=False), self.device).wall


def path_of(values: torch.Tensor) -> str:
    """The pass that a tensor takes now: ``triton``, ``native`` or ``eager``."""
    taken = kernels._pass_for(values)
    return "triton" if taken is kernels._with_triton else taken.__module__.rpartition(".")[2]


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


def main() -> None:
    parser = arguments(__doc__, 20)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the tensor (default: 4096)")
    options = parser.parse_args()
    reference.install_where_needed()
    import transformer_engine.pytorch  # noqa: F401

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    delayed = (*FP8_STATISTICS, "overflows%")
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        for tensor, quantized, recipe in (
            (TENSOR_STATISTICS, (), ""),
            ((), FP8_STATISTICS, CURRENT),
            ((), delayed, DELAYED),
            (TENSOR_STATISTICS, delayed, DELAYED),
        ):
            measured = Measured(dtype, tensor, quantized, recipe, size=options.size, device=device)
            cases.append(measured.run(options.seconds, options.least))
    report(cases, COLUMNS, device, as_json=options.json)


if __name__ == "__main__":
    main()
