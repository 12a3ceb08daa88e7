"""GEMMs that features select: LogGemmError measures their errors, and DumpTensors records them.

The kernel's error follows from a GEMM's codes, scales and result. The format's error needs operands in high precision:

- Weight and activation exist only in the forward, where they are multiplied with the probes of the backward's GEMMs.
  Only the products are kept.
- The gradient exists when the backward's GEMMs run.

The fused path has the tensors of ``te/modules.py``, the debug path has all. Without a tensor, the format's error is
missing.

An operand in high precision is recorded for DumpTensors if it exists when the GEMM runs: both operands of fprop and
dgrad, and the gradient of wgrad.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import nvdlfw_inspect.api as debug_api
import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import Guard, Report
from te_precision_callbacks.base.numerics.layouts import LayoutError
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import OPERANDS, RESULT, ROWWISE, GemmName
from te_precision_callbacks.config.schemas import DumpTensorsGemmItem, LogGemmErrorItem
from te_precision_callbacks.dumps.contents import (
    Dump,
    DumpedGemm,
    DumpedOperand,
    Header,
    Plain,
    Tensors,
    add_operand,
    add_plain,
)
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.gemm_error import (
    Factor,
    FactorError,
    GemmCall,
    Thin,
    check_format,
    check_kernel,
    factor_of,
    kernel_columns,
    probes,
    seed_of,
    thin,
)
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent, GemmOperand, Kept
from te_precision_callbacks.layers.naming import NamedModule, modules_by_layer
from te_precision_callbacks.statistics.table import StatisticSource
from te_precision_callbacks.te.debug import debug_quantization
from te_precision_callbacks.te.state import debug_iteration
from te_precision_callbacks.te.tensors import is_quantized

logger = logging.getLogger(__name__)

_OptionsT = TypeVar("_OptionsT", LogGemmErrorItem, DumpTensorsGemmItem)

_FORWARD_OPERAND: Mapping[GemmName, str] = {"fprop": "weight", "dgrad": "weight", "wgrad": "activation"}
"""GEMM -> its operand A, which exists in high precision in the forward."""


class SelectedGemms:
    """Measures the errors of selected GEMMs, and records operands, result, and previous sum of others.

    Attributes:
        unmeasured: why a GEMM was not measured, if none was.
    """

    def __init__(self, engine: StatisticsEngine, report: Report) -> None:
        self._engine = engine
        self._report = report
        self._modules: dict[str, int] = {}
        self._options: dict[str, Sequence[LogGemmErrorItem | DumpTensorsGemmItem]] = {}
        self._operands: dict[tuple[str, str], torch.Tensor] = {}  # of one module in high precision, until their GEMM
        self._module: int | None = None
        self._has_measured = False
        self.unmeasured = ""
        engine.keep_operand = self._keep_operand

    def watch(self, modules: Sequence[NamedModule]) -> None:
        self._modules = {layer: id(module) for layer, module in modules_by_layer(modules).items()}
        self._options.clear()
        self.forget_operands()

    def forget_operands(self) -> None:
        self._operands.clear()
        self._module = None

    def _keep_operand(self, layer: str, tensor: str, values: torch.Tensor) -> None:
        """Keep an operand; the first one of another module drops the others."""
        module = self._modules.get(layer)
        if module != self._module:
            self.forget_operands()
            self._module = module
        self._operands[layer, tensor] = values

    def _due(self, kind: type[_OptionsT], layer: str, gemm: str, call_data: Kept) -> tuple[_OptionsT, int] | None:
        if layer not in self._options:
            self._options[layer] = self._find(layer) if layer in self._modules else ()
        iteration = call_data.setdefault("iteration", debug_iteration())
        for options in self._options[layer]:
            if isinstance(options, kind) and options.gemm == gemm and options.schedule.at(iteration)[0]:
                return options, iteration
        return None

    def _find(self, layer: str) -> Sequence[LogGemmErrorItem | DumpTensorsGemmItem]:
        watchers = (debug_api.transformer_engine.watchers(layer, tensor) for tensor in ROWWISE)
        options = [watcher.options for watcher in itertools.chain.from_iterable(watchers)]
        kinds = LogGemmErrorItem, DumpTensorsGemmItem
        return [item for item in options if isinstance(item, kinds) and item.gemm]

    def before_sum(self, layer: str, gemm: GemmName, out: Any, call_data: Kept) -> Thin | None:
        """Copy the accumulated tensor, or multiply it with the probes, before a GEMM adds to it."""
        if not isinstance(out, torch.Tensor) or is_capturing():
            return None
        if self._due(DumpTensorsGemmItem, layer, gemm, call_data) is not None:
            call_data.setdefault("sums", {})[layer, gemm] = out.detach().clone()
        due = self._due(LogGemmErrorItem, layer, gemm, call_data)
        if due is None or is_quantized(out) or not out.numel():
            return None
        item, iteration = due
        with without_autograd(out.device):
            matrix = factor_of(out, columnwise=False, piece_bytes=item.max_memory)
            return thin(matrix, _probes(layer, item, iteration, gemm, matrix.t))

    def __call__(self, event: GemmEvent) -> None:
        sum_before = event.kept.get("sums", {}).pop((event.layer, event.gemm), None)
        if event.kind is not ForwardKind.OBSERVED:
            return
        subject = f"{event.layer} {event.gemm}"
        with Guard(functools.partial(self._report, "recording the GEMM of", subject)):
            due = self._due(DumpTensorsGemmItem, event.layer, event.gemm, event.kept)
            if due is not None:
                self._record(event, sum_before, due[1])
        if is_capturing():
            return
        with Guard(functools.partial(self._report, "measuring the GEMM of", subject)):
            try:
                if event.gemm == "fprop":
                    self._prepare(event)
                selected = self._due(LogGemmErrorItem, event.layer, event.gemm, event.kept)
                if selected is not None:
                    self._measure(event, *selected)
            except (FactorError, LayoutError) as error:
                self._skip(event, str(error))
        last_of = {"fprop": "activation", "wgrad": "gradient"}.get(event.gemm)
        if last_of is not None:
            self._operands.pop((event.layer, last_of), None)

    def _skip(self, event: GemmEvent, reason: str) -> None:
        """Log once why a GEMM or its format error is not measured."""
        if not self._has_measured:
            self.unmeasured = reason
        if self._engine.notices.first(f"not measured: {reason}"):
            logger.info(
                "LogGemmError does not measure %s %s: %s. Other layers with this reason are not listed.",
                event.layer,
                event.gemm,
                reason,
            )

    def _prepare(self, event: GemmEvent) -> None:
        """Multiply the forward's operands with the probes of all GEMMs that have them as operand A."""
        for gemm, tensor in _FORWARD_OPERAND.items():
            due = self._due(LogGemmErrorItem, event.layer, gemm, event.kept)
            operand = event.a if tensor == "weight" else event.b
            high = self._high_precision(event.layer, operand)
            if due is not None and high is not None and high.numel():
                item, iteration = due
                with without_autograd(high.device):
                    right = factor_of(high, columnwise=gemm != "fprop", piece_bytes=item.max_memory)
                    x = _probes(event.layer, item, iteration, gemm, right)
                    product = right.t.multiply(x).product
                event.kept.setdefault("probed", {})[event.layer, gemm] = product

    def _measure(self, event: GemmEvent, item: LogGemmErrorItem, iteration: int) -> None:
        reason = why_not_seen(event, event.before)
        if reason:
            self._skip(event, reason)
            return
        read = functools.partial(factor_of, piece_bytes=item.max_memory)
        left_factor = read(event.b.data, columnwise=event.b.columnwise)
        right = read(event.a.data, columnwise=event.a.columnwise)
        if not is_quantized(event.b.data) and not is_quantized(event.a.data):
            self._skip(event, "it runs in high precision")
            return
        (n, k), m = left_factor.shape, right.shape[0]
        if 0 in (n, k, m):
            return
        with without_autograd(left_factor.device):
            matrix = read(result_of(event), columnwise=False)
            if matrix.shape != (n, m):
                self._skip(event, f"its result has the shape {matrix.shape}, but its operands give {(n, m)}")
                return
            x = _probes(event.layer, item, iteration, event.gemm, right)
            call = call_of(event, event.before)
            check = check_kernel(thin(matrix, x), left_factor, right, x, call)
            add = functools.partial(self._engine.add, event.layer, RESULT[event.gemm], iteration)
            add(StatisticSource.GEMM, *kernel_columns(check, own_rank()))
            self._has_measured = True
            self.unmeasured = ""
            product = event.kept.get("probed", {}).pop((event.layer, event.gemm), None)
            high = self._high_precision(event.layer, event.b)
            if high is None or product is None:
                which = OPERANDS[event.gemm][0] if high is None else _FORWARD_OPERAND[event.gemm]
                self._skip(event, f"the format: {which} does not exist in high precision")
            elif high.numel() != n * k or len(product) != k:
                self._skip(event, "the format: an operand was gathered after quantization")
            else:
                exact = read(high, columnwise=event.b.columnwise)
                errors = check_format(check.stored, call.alpha * exact.multiply(product).product)
                add(StatisticSource.GEMM_FORMAT, errors)

    def _record(self, event: GemmEvent, sum_before: torch.Tensor | None, iteration: int) -> None:
        reason = why_not_seen(event, sum_before)
        if reason:
            if self._engine.notices.first(f"not dumped: {reason}"):
                logger.warning(
                    "DumpTensors: the GEMM %s of %s is not dumped: %s. Other GEMMs are not listed.",
                    event.gemm,
                    event.layer,
                    reason,
                )
            return
        record = functools.partial(self._make_dump, event, sum_before, iteration)
        debug_api.transformer_engine.observation.recorder.note(event.layer, f"{event.gemm} GEMM", record)

    def _make_dump(self, event: GemmEvent, sum_before: torch.Tensor | None, iteration: int, micro_batch: int) -> Dump:
        n, m, k = event.sizes
        call = call_of(event, None)
        tensors: Tensors = {}
        a = DumpedOperand(event.a.tensor, event.a.columnwise)
        b = DumpedOperand(event.b.tensor, event.b.columnwise)
        optional: dict[str, Plain] = {}
        for name, tensor in (("before", sum_before), ("bias", call.bias)):
            if tensor is not None:
                optional[name] = add_plain(tensors, name, tensor)
        gemm = DumpedGemm(
            gemm=event.gemm,
            result=RESULT[event.gemm],
            n=n,
            m=m,
            k=k,
            a=add_operand(tensors, "a", a, event.a.data, self._rows_of(event, event.a, m)),
            b=add_operand(tensors, "b", b, event.b.data, self._rows_of(event, event.b, n)),
            out=add_plain(tensors, "out", result_of(event)),
            alpha=call.alpha,
            beta=call.beta,
            split_accumulator=call.split_accumulator,
            before=optional.get("before"),
            bias=optional.get("bias"),
            capability=call.capability,
        )
        header = Header(
            layer=event.layer,
            tensor=f"{event.gemm}_gemm",
            iteration=iteration,
            micro_batch=micro_batch,
            rank=own_rank(),
            recipe=event.recipe,
            gemm=gemm,
        )
        return Dump(header, tensors)

    def _rows_of(self, event: GemmEvent, operand: GemmOperand, rows: int) -> torch.Tensor | None:
        """Return an operand in high precision, [rows, k], unless gathered after quantization."""
        high = self._high_precision(event.layer, operand)
        return None if high is None or high.numel() != rows * event.sizes[2] else high

    def _high_precision(self, layer: str, operand: GemmOperand) -> torch.Tensor | None:
        high = operand.high if operand.high is not None else self._operands.get((layer, operand.tensor))
        if high is None or is_quantized(high):
            return None
        return high.detach()


def _probes(layer: str, item: LogGemmErrorItem, iteration: int, gemm: str, right: Factor) -> torch.Tensor:
    """Return the probes of a GEMM, [m, probes]; ``right`` has m rows."""
    return probes(right.shape[0], item.probes, seed_of(iteration, layer, gemm), right.device)


@contextmanager
def without_autograd(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast, which would round thin products."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def result_of(event: GemmEvent) -> Any:
    """Return a GEMM's result, before a fused GELU."""
    if event.arguments.get("gelu"):
        return event.gelu_input
    return event.out


def why_not_seen(event: GemmEvent, sum_before: Any) -> str:
    """Return why a GEMM's product is unavailable, or an empty string; ``sum_before``: the sum so far."""
    arguments = event.arguments
    if arguments.get("ub") is not None:
        return "Userbuffers overlap its communication"
    if arguments.get("gelu") and arguments.get("grad"):
        return "the derivative of GELU is fused into it"
    if arguments.get("gelu") and event.gelu_input is None:
        return "its result before GELU is not available"
    result = result_of(event)
    if result is None:
        return "the results of all experts are in one buffer"
    if is_quantized(result) or not isinstance(result, torch.Tensor):
        return "its result is written quantized"
    if getattr(arguments.get("quantization_params"), "rowwise_tensor_plan", None) == debug_quantization.API_CALL_MODIFY:
        return "a feature replaces its result"
    if arguments.get("accumulate") and sum_before is None:
        return "the previous sum was not observed"
    return ""


def call_of(event: GemmEvent, sum_before: Any) -> GemmCall:
    """Return the parameters of a GEMM; ``sum_before`` is the tensor that it was added to."""
    arguments = event.arguments
    bias = arguments.get("bias")
    bias = bias[event.expert] if isinstance(bias, (list, tuple)) and event.expert is not None else bias
    has_bias = isinstance(bias, torch.Tensor) and bias.numel() and not arguments.get("grad") and event.gemm == "fprop"
    beta = arguments.get("beta")
    out = result_of(event)
    return GemmCall(
        dtype=out.dtype,
        alpha=float(arguments.get("alpha", 1.0)),
        beta=1.0 if beta is None else float(beta),
        bias=bias if has_bias else None,
        before=sum_before,
        split_accumulator=bool(arguments.get("use_split_accumulator", False)),
        capability=torch.cuda.get_device_capability(out.device) if out.device.type == "cuda" else None,
    )
