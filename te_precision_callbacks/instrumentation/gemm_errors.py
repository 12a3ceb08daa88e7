"""Listeners of the tap: output errors of GEMMs selected by LogGemmError, and GEMMs recorded for DumpTensors.

The kernel error follows from a GEMM's codes, scales and result. Format and quantizer errors need operands in high
precision:

- Weight and activation exist only in the forward, where they are multiplied with the probes of the backward's GEMMs.
  Only the products are kept.
- The gradient exists when the backward's GEMMs run.

The fused path has the tensors of ``te/modules.py``, the debug path has all. Without a tensor, format and quantizer
statistics are missing.

An operand in high precision is recorded for DumpTensors if it exists when the GEMM runs: both operands of fprop and
dgrad, and the gradient of wgrad.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.numerics.layouts import LayoutError, Stored, is_quantized
from te_precision_callbacks.base.numerics.nvfp4 import rotate
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import OPERANDS, RESULT, ROWWISE, GemmName
from te_precision_callbacks.config.schemas import DumpTensorsGemmItem, LogGemmErrorItem
from te_precision_callbacks.dumps.contents import Dump, create_record
from te_precision_callbacks.dumps.header import DumpedGemm, DumpedOperand, Plain
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.gemm_operands import GemmOperands
from te_precision_callbacks.gemm_error.codes import check_codes, rules_of
from te_precision_callbacks.gemm_error.factors import Factor, FactorError, factor_of
from te_precision_callbacks.gemm_error.kernel_check import (
    Accumulator,
    GemmCall,
    ProbedOperands,
    Thin,
    accumulator_of,
    check_kernel,
    kernel_columns,
    probes,
    product_and_operands,
    remove_added,
    seed_of,
    squares_of_difference,
    thin,
)
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent, GemmOperand, Kept
from te_precision_callbacks.layers.naming import NamedModule, modules_by_layer
from te_precision_callbacks.statistics.table import StatisticSource

logger = logging.getLogger(__name__)

_OptionsT = TypeVar("_OptionsT", LogGemmErrorItem, DumpTensorsGemmItem)

_FORWARD_OPERAND: Mapping[GemmName, str] = {"fprop": "weight", "dgrad": "weight", "wgrad": "activation"}
"""GEMM -> its operand A, which exists in high precision in the forward."""

_FORMAT = "the format: "
"""Start of reasons why only the format error was not measured."""


@dataclass(frozen=True)
class _Kept:
    """Products of a GEMM's operand A (``right``, [m, k]) with probes.

    Attributes:
        to_k: ``right^T x``, [k, probes].
        to_rows: ``right g``, [m, probes].
        codes: columns of the check of its codes, if available.
    """

    iteration: int
    to_k: torch.Tensor
    to_rows: torch.Tensor
    codes: torch.Tensor | None


class SelectedGemms(Generic[_OptionsT]):
    """GEMMs that a feature selects, by the class of its options."""

    def __init__(self, kind: type[_OptionsT]) -> None:
        self._kind: type[_OptionsT] = kind
        self._layers: frozenset[str] = frozenset()
        self._options: dict[str, dict[str, _OptionsT]] = {}

    def watch(self, modules: Sequence[NamedModule]) -> None:
        self._layers = frozenset(modules_by_layer(modules))
        self._options.clear()

    def due(self, layer: str, gemm: str, kept: Kept) -> tuple[_OptionsT, int] | None:
        options = self.of_layer(layer).get(gemm)
        if options is None:
            return None
        iteration = kept.get("iteration")
        if iteration is None:
            from transformer_engine.debug.pytorch.debug_state import TEDebugState

            iteration = int(TEDebugState.get_iteration())
            kept["iteration"] = iteration
        if options.schedule.at(iteration)[0]:
            return (options, iteration)
        return None

    def of_layer(self, layer: str) -> Mapping[str, _OptionsT]:
        of_layer = self._options.get(layer)
        if of_layer is None:
            of_layer = self._read(layer) if layer in self._layers else {}
            self._options[layer] = of_layer
        return of_layer

    def _read(self, layer: str) -> dict[str, _OptionsT]:
        import nvdlfw_inspect.api as debug_api

        selected: dict[str, _OptionsT] = {}
        for tensor in ROWWISE:
            for watcher in debug_api.transformer_engine.watchers(layer, tensor):
                if isinstance(watcher.options, self._kind):
                    selected[watcher.options.gemm] = watcher.options
        return selected


class GemmErrors:
    """Measures the errors of selected GEMMs.

    Attributes:
        operands: operands in high precision, until their GEMM has run.
        not_measured: (layer, GEMM) -> why the GEMM, or its format error, was not measured in any call.
    """

    def __init__(self, engine: StatisticsEngine, report: Report) -> None:
        self._engine = engine
        self._report = report
        self.operands = engine.gemm_operands = GemmOperands()
        self.selected = SelectedGemms(LogGemmErrorItem)
        self._weights: dict[tuple[str, str], _Kept] = {}
        self.not_measured: dict[tuple[str, str], str] = {}
        self._measured: set[tuple[str, str, bool]] = set()

    @property
    def why_none_measured(self) -> str:
        if self._measured:
            return ""
        return next(iter(self.not_measured.values()), "")

    def watch(self, modules: Sequence[NamedModule]) -> None:
        self.selected.watch(modules)
        self._weights.clear()
        self.operands.forget()
        self.operands.modules = {layer: id(module) for layer, module in modules_by_layer(modules).items()}

    def begin_iteration(self) -> None:
        self._weights.clear()
        self.operands.forget()

    def before_sum(self, layer: str, gemm: GemmName, out: Any, kept: Kept) -> Thin | None:
        """Multiply the accumulated tensor with the probes before a GEMM adds to it."""
        due = self.selected.due(layer, gemm, kept)
        if due is None or not isinstance(out, torch.Tensor) or is_quantized(out) or not out.numel() or is_capturing():
            return None
        item, iteration = due
        with without_autograd(out.device):
            matrix = factor_of(out, columnwise=False, piece_bytes=item.max_memory)
            n, m = matrix.shape
            x, y = self._probes(layer, item, iteration, gemm, out.device, x=m, y=n)
            return thin(matrix, x, y)

    def __call__(self, event: GemmEvent) -> None:
        if event.kind is not ForwardKind.OBSERVED or is_capturing():
            return
        try:
            if event.gemm == "fprop":
                self._prepare(event)
            due = self.selected.due(event.layer, event.gemm, event.kept)
            if due is not None:
                self._measure(event, *due)
        except ObservationError:
            raise
        except (FactorError, LayoutError) as error:
            self.skip(event.layer, event.gemm, str(error))
        except Exception as error:
            self._report("measuring the GEMM of", f"{event.layer} {event.gemm}", error)
        finally:
            if event.gemm == "fprop":
                self.operands.drop(event.layer, "activation")
            elif event.gemm == "wgrad":
                self.operands.drop(event.layer, "gradient")

    def skip(self, layer: str, gemm: str, reason: str, remedy: str = "") -> None:
        """Record why a GEMM or some of its statistics is missing; each reason is logged once.

        A ``remedy``, a change of the config, is logged as a warning once.
        """
        if (layer, gemm, reason.startswith(_FORMAT)) not in self._measured:
            self.not_measured.setdefault((layer, gemm), reason)
        if self._engine.notices.first(f"not measured: {remedy or reason}"):
            logger.log(
                logging.WARNING if remedy else logging.INFO,
                "LogGemmError does not measure %s %s: %s. %sOther layers with this reason are not listed.",
                layer,
                gemm,
                reason,
                f"{remedy}. " if remedy else "",
            )

    def _note_measured(self, layer: str, gemm: str, *, of_format: bool = False) -> None:
        self._measured.add((layer, gemm, of_format))
        if self.not_measured.get((layer, gemm), "").startswith(_FORMAT) is of_format:
            self.not_measured.pop((layer, gemm), None)

    def _prepare(self, event: GemmEvent) -> None:
        """Multiply the forward's operands with the probes of all GEMMs that have them as operand A."""
        layer = event.layer
        for gemm, tensor in _FORWARD_OPERAND.items():
            due = self.selected.due(layer, gemm, event.kept)
            if due is None:
                continue
            item, iteration = due
            operand = event.a if tensor == "weight" else event.b
            high = high_precision_of(self.operands, layer, operand)
            if high is None or not high.numel():
                cached = self._weights.get((layer, gemm)) if tensor == "weight" else None
                if cached is not None and cached.iteration == iteration:
                    event.kept.setdefault("probed", {})[layer, gemm] = cached
                continue
            columnwise = gemm != "fprop"
            with without_autograd(high.device):
                right = factor_of(high, columnwise=columnwise, piece_bytes=item.max_memory)
                x, g = self._probes(layer, item, iteration, gemm, right.device, x=right.shape[0], g=right.shape[1])
                swept = right.sweep(from_rows=x, from_k=g)
                codes = _check_operand_codes(
                    operand._replace(columnwise=columnwise), high, seed_of(iteration, layer, gemm, "window")
                )
            if swept.to_k is not None and swept.to_rows is not None:
                kept = _Kept(iteration, swept.to_k, swept.to_rows, codes)
                event.kept.setdefault("probed", {})[layer, gemm] = kept
                if tensor == "weight":
                    self._weights[layer, gemm] = kept

    def _probes(
        self,
        layer: str,
        item: LogGemmErrorItem,
        iteration: int,
        gemm: str,
        device: torch.device,
        **extents: int,
    ) -> Iterator[torch.Tensor]:
        for name, extent in extents.items():
            yield probes(extent, item.probes, seed_of(iteration, layer, gemm, name), device)

    def _factors(self, event: GemmEvent, item: LogGemmErrorItem) -> tuple[Factor, Factor] | None:
        """Return operands B and A; None for a GEMM that is not measured, with its reason in :attr:`not_measured`."""
        reason = why_not_seen(event, event.before)
        if reason:
            self.skip(event.layer, event.gemm, reason)
            return None
        left = factor_of(event.b.data, columnwise=event.b.columnwise, piece_bytes=item.max_memory)
        right = factor_of(event.a.data, columnwise=event.a.columnwise, piece_bytes=item.max_memory)
        if not left.is_quantized and not right.is_quantized:
            self.skip(event.layer, event.gemm, "it runs in high precision")
            return None
        if 0 in (*left.shape, right.shape[0]):
            return None
        needed = max(left.needs, right.needs, min(left.shape[0], 128) * right.shape[0] * torch.float32.itemsize)
        if needed > item.max_memory:
            reason = f"max_memory is {item.max_memory} bytes, and 128 rows need {needed}"
            self.skip(event.layer, event.gemm, reason, remedy="Raise max_memory")
            return None
        return left, right

    def _measure(self, event: GemmEvent, item: LogGemmErrorItem, iteration: int) -> None:
        factors = self._factors(event, item)
        if factors is None:
            return
        left, right = factors
        (n, k), m = left.shape, right.shape[0]
        with without_autograd(left.device):
            x, y, g = self._probes(event.layer, item, iteration, event.gemm, left.device, x=m, y=n, g=k)
            alpha = float(event.arguments.get("alpha", 1.0))
            of_g = ProbedOperands(_rotate_probes(g, left, event.b), _rotate_probes(g, right, event.a))
            expected, operands = product_and_operands(left, right, x, y, of_g, alpha)
            matrix = factor_of(result_of(event), columnwise=False, piece_bytes=item.max_memory)
            if matrix.shape != (n, m):
                self.skip(
                    event.layer, event.gemm, f"its result has the shape {matrix.shape}, but its operands give {(n, m)}"
                )
                return
            run = thin(matrix, x, y)
            call = GemmCall(k, result_of(event).dtype, x, y, _accumulator(event, left, right), **added_terms(event))
            check = check_kernel(run, expected, call)
            tensor = RESULT[event.gemm]
            self._engine.add(event.layer, tensor, iteration, StatisticSource.GEMM, *kernel_columns(check, own_rank()))
            self._note_measured(event.layer, event.gemm)
            kept: _Kept | None = event.kept.get("probed", {}).pop((event.layer, event.gemm), None)
            high = high_precision_of(self.operands, event.layer, event.b)
            if high is not None and high.numel() != n * k:
                self.skip(event.layer, event.gemm, f"{_FORMAT}an operand was gathered after quantization")
                high = None
            if high is not None and left.is_quantized:
                codes = _check_operand_codes(event.b, high, seed_of(iteration, event.layer, event.gemm, "window"))
                if codes is not None:
                    self._engine.add(event.layer, tensor, iteration, StatisticSource.GEMM_CODES_B, codes)
            if kept is not None and kept.codes is not None:
                self._engine.add(event.layer, tensor, iteration, StatisticSource.GEMM_CODES_A, kept.codes)
            if high is None or kept is None or kept.to_k.shape[0] != k or kept.to_rows.shape[0] != m:
                which = OPERANDS[event.gemm][0] if high is None else _FORWARD_OPERAND[event.gemm]
                self.skip(event.layer, event.gemm, f"{_FORMAT}{which} does not exist in high precision")
                return
            exact = factor_of(high, columnwise=event.b.columnwise, piece_bytes=item.max_memory)
            swept = exact.sweep(from_k=torch.cat([kept.to_k, g], 1)).to_rows
            if swept is not None:
                v_hp, left_g = torch.split(swept, [kept.to_k.shape[1], g.shape[1]], 1)
                v_hp = v_hp * alpha
                errors = (
                    squares_of_difference(remove_added(run, expected, call), v_hp)[0],
                    *squares_of_difference(expected.right, v_hp),
                    *squares_of_difference(operands.right, kept.to_rows),
                    *squares_of_difference(operands.left, left_g),
                )
                self._engine.add(
                    event.layer, tensor, iteration, StatisticSource.GEMM_FORMAT, torch.stack(errors) * check.counts
                )
                self._note_measured(event.layer, event.gemm, of_format=True)


def high_precision_of(kept: GemmOperands, layer: str, operand: GemmOperand) -> torch.Tensor | None:
    high = operand.high if operand.high is not None else kept.get(layer, operand.tensor)
    if high is None or is_quantized(high):
        return None
    return high.detach()


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


def why_not_seen(event: GemmEvent, before: Any) -> str:
    """Return why a GEMM's product is unavailable, or an empty string; ``before`` is the tensor that it was added to."""
    from transformer_engine.debug.pytorch.debug_quantization import API_CALL_MODIFY

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
    if getattr(arguments.get("quantization_params"), "rowwise_tensor_plan", None) == API_CALL_MODIFY:
        return "a feature replaces its result"
    if arguments.get("accumulate") and before is None:
        return "the previous sum was not observed"
    return ""


def added_terms(event: GemmEvent) -> dict[str, Any]:
    arguments = event.arguments
    bias = arguments.get("bias")
    bias = bias[event.expert] if isinstance(bias, (list, tuple)) and event.expert is not None else bias
    has_bias = isinstance(bias, torch.Tensor) and bias.numel() and not arguments.get("grad") and event.gemm == "fprop"
    beta = arguments.get("beta")
    return {
        "bias": bias if has_bias else None,
        "before": event.before,
        "beta": 1.0 if beta is None else float(beta),
    }


def _accumulator(event: GemmEvent, left: Factor, right: Factor) -> Accumulator:
    device = left.device
    return accumulator_of(
        left.memory,
        right.memory,
        split_accumulator=bool(event.arguments.get("use_split_accumulator", False)),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
    )


def _rotate_probes(g: torch.Tensor, factor: Factor, operand: GemmOperand) -> torch.Tensor:
    """Rotate probes for an operand that was quantized after a Hadamard transform."""
    if not isinstance(factor.memory, Stored) or not factor.memory.hadamard:
        return g
    mask = rules_of(operand.data._quantizer, columnwise=operand.columnwise).sign_mask
    if mask is None:
        return g
    return rotate(g, mask)


def _check_operand_codes(operand: GemmOperand, high: torch.Tensor, seed: int) -> torch.Tensor | None:
    """Return the columns of a check of an operand's codes.

    None without codes of this direction, or if the tensor before quantization was recomputed.
    """
    data = operand.data
    quantizer = getattr(data, "_quantizer", None)
    if quantizer is None or not is_quantized(data) or operand.recomputed:
        return None
    try:
        part = factor_of(data, columnwise=operand.columnwise).memory
    except FactorError:
        return None
    if not isinstance(part, Stored) or part.matrix_shape[0] * part.matrix_shape[1] != high.numel():
        return None
    rules = rules_of(quantizer, columnwise=operand.columnwise)
    return torch.stack(list(check_codes(part, high, rules, seed, seed >> 20)))


class GemmRecords:
    """Listener of the tap that records GEMMs for a replay: operands, result, and previous sum.

    Attributes:
        selected: the GEMMs to record.
        watch: sets the layers with their options.
    """

    def __init__(self, operands: GemmOperands, report: Report) -> None:
        self._operands = operands
        self._report = report
        self._notices = Notices()
        self.selected = SelectedGemms(DumpTensorsGemmItem)
        self.watch = self.selected.watch

    def before_sum(self, layer: str, gemm: GemmName, out: Any, kept: Kept) -> None:
        if isinstance(out, torch.Tensor) and not is_capturing() and self.selected.due(layer, gemm, kept) is not None:
            kept.setdefault("sums", {})[layer, gemm] = out.detach().clone()

    def __call__(self, event: GemmEvent) -> None:
        before = event.kept.get("sums", {}).pop((event.layer, event.gemm), None)
        if event.kind is not ForwardKind.OBSERVED:
            return
        try:
            due = self.selected.due(event.layer, event.gemm, event.kept)
            if due is not None:
                self._record(event, before, due[1])
        except ObservationError:
            raise
        except Exception as error:
            self._report("recording the GEMM of", f"{event.layer} {event.gemm}", error)

    def _record(self, event: GemmEvent, before: torch.Tensor | None, iteration: int) -> None:
        import nvdlfw_inspect.api as debug_api

        reason = why_not_seen(event, before)
        if reason:
            if self._notices.first(reason):
                logger.warning(
                    "DumpTensors: the GEMM %s of %s is not dumped: %s. Other GEMMs are not listed.",
                    event.gemm,
                    event.layer,
                    reason,
                )
            return
        record = functools.partial(self._make_dump, event, before, iteration)
        debug_api.transformer_engine.observation.recorder.note(event.layer, f"{event.gemm} GEMM", record)

    def _make_dump(self, event: GemmEvent, before: torch.Tensor | None, iteration: int, micro_batch: int) -> Dump:
        out = result_of(event)
        n, m, k = event.sizes
        more = added_terms(event)
        on_gpu = out.device.type == "cuda"
        gemm = DumpedGemm(
            gemm=event.gemm,
            result=RESULT[event.gemm],
            order=event.order,
            layout=event.arguments["layout"],
            n=n,
            m=m,
            k=k,
            a=DumpedOperand(event.a.tensor, event.a.columnwise),
            b=DumpedOperand(event.b.tensor, event.b.columnwise),
            out=Plain((), ""),
            expert=event.expert,
            alpha=float(event.arguments.get("alpha", 1.0)),
            beta=more["beta"],
            split_accumulator=bool(event.arguments.get("use_split_accumulator", False)),
            device=torch.cuda.get_device_name(out.device) if on_gpu else out.device.type,
            capability=torch.cuda.get_device_capability(out.device) if on_gpu else None,
        )
        operands = {
            "a": (event.a.data, self._high_precision(event, event.a)),
            "b": (event.b.data, self._high_precision(event, event.b)),
        }
        return create_record(
            gemm,
            operands,
            out,
            before=before,
            bias=more["bias"],
            layer=event.layer,
            iteration=iteration,
            micro_batch=micro_batch,
            rank=own_rank(),
            recipe=event.recipe,
        )

    def _high_precision(self, event: GemmEvent, operand: GemmOperand) -> torch.Tensor | None:
        """Return an operand in high precision, unless recomputed, or gathered after quantization."""
        if operand.recomputed:
            return None
        high = high_precision_of(self._operands, event.layer, operand)
        n, m, k = event.sizes
        rows = m if operand is event.a else n
        if high is None or high.numel() != rows * k:
            return None
        return high
