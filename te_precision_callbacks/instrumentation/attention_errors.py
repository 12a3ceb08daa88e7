"""Measures the error at the output of the attention that LogGemmError has chosen: a listener of the tap.

Sampled rows of the result are computed again, from what the kernel was handed and from what it was quantized from. The
statistics are those of GEMMs, of the tensor ``output`` of the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.numerics.layouts import MXFP8, PER_TENSOR, LayoutError, is_quantized, scaling_mode
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.config.levels import FeatureSchema
from te_precision_callbacks.config.schemas import LogGemmError, LogGemmErrorItem
from te_precision_callbacks.coverage.gemm_events import UNFUSED, AttentionEvent
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.gemm_error.accumulators import accumulator_of
from te_precision_callbacks.gemm_error.attention import check_operands, format_error, judged, sample
from te_precision_callbacks.gemm_error.attention_operands import Bounds, Call, HeadTensor, Mask, Spacing, bytes_of_query
from te_precision_callbacks.gemm_error.codes import amax_of_all, rules_of
from te_precision_callbacks.gemm_error.columns import code_columns, format_columns, kernel_columns
from te_precision_callbacks.gemm_error.factors import FactorError
from te_precision_callbacks.gemm_error.probes import seed_of
from te_precision_callbacks.instrumentation.gemm_errors import quiet
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.statistics.table import Of

ATTENTION = "attention"
"""Stands for the GEMM in what is not measured."""

_OUTPUT = "output"

_OTHER_KERNEL = "its kernel is not Transformer Engine's fused attention: FlashAttention, unfused, or over several ranks"


class AttentionErrors:
    """See the module's description.

    Args:
        engine: takes the numbers.
        report: receives failures.
        tell: as ``GemmErrors.tell`` has it, with :data:`ATTENTION` as the GEMM.
    """

    def __init__(
        self,
        engine: StatisticsEngine,
        report: Callable[[str, str, Exception], None],
        tell: Callable[..., None],
    ) -> None:
        self._engine = engine
        self._report = report
        self._tell = tell
        self._modules: Mapping[int, tuple[str, LogGemmErrorItem]] = {}
        self._items: Mapping[str, LogGemmErrorItem] = {}
        self._noted: set[str] = set()

    def watch(self, modules: Mapping[int, tuple[str, Sequence[FeatureSchema]]]) -> None:
        """Set the modules of attention: id -> name, and the features that look at it."""
        self._modules = {
            key: (layer, item)
            for key, (layer, features) in modules.items()
            for feature in features
            for item in (feature.of_attention.values() if isinstance(feature, LogGemmError) else ())
        }
        self._items = dict(self._modules.values())
        self._noted.clear()

    def due(self, iteration: int) -> dict[int, str]:
        """The modules that are measured in an iteration: id -> name."""
        return {key: layer for key, (layer, item) in self._modules.items() if item.schedule.at(iteration)[0]}

    def _item(self, layer: str, kind: ForwardKind) -> tuple[LogGemmErrorItem, int] | None:
        """The options of attention whose forward is measured, and the iteration."""
        item = self._items.get(layer)
        if item is None or kind is not ForwardKind.OBSERVED or is_capturing():
            return None
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        iteration = int(TEDebugState.get_iteration())
        return (item, iteration) if item.schedule.at(iteration)[0] else None

    # ------------------------------------------------------------------ what runs

    def enter_attention(self, layer: str, kind: ForwardKind) -> None:
        """A forward begins."""
        self._noted.discard(layer)

    def note_attention(self, event: AttentionEvent) -> None:
        """Measure fused attention that has run."""
        if event.backward:
            return
        self._noted.add(event.layer)
        due = self._item(event.layer, event.kind)
        if due is None:
            return
        try:
            self._measure(event, *due)
        except ObservationError:
            raise
        except (FactorError, LayoutError) as error:
            self._tell(event.layer, ATTENTION, str(error))
        except Exception as error:
            self._report("measuring the attention of", event.layer, error)

    def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None:
        """A forward ends, which another kernel may have run."""
        if layer not in self._noted and self._item(layer, kind) is not None:
            self._tell(layer, ATTENTION, _OTHER_KERNEL)

    def _measure(self, event: AttentionEvent, item: LogGemmErrorItem, iteration: int) -> None:
        reason = why_not(event)
        if reason:
            self._tell(event.layer, ATTENTION, reason)
            return
        form = str(event.arguments["o_format"])
        if not all(event.sizes):
            return
        result = HeadTensor(event.output, form)
        with quiet(result.device):
            call = call_of(event, result)
            samples = sample(call, result, seed_of(iteration, event.layer, ATTENTION), item.max_memory)
            if not samples:
                needed = bytes_of_query(call.longest[1])
                reason = f"max_memory is {item.max_memory} bytes, and one query needs {needed}"
                self._tell(event.layer, ATTENTION, reason, "Raise max_memory")
                return
            found = judged(call, samples, result)
            self._engine.add(event.layer, _OUTPUT, iteration, Of.GEMM, *kernel_columns(found, own_rank()))
            high = [event.high[name] for name in ("query", "key", "value") if name in event.high]
            if not is_quantized(event.query):
                return
            if len(high) < 3:
                reason = "the format and the quantizer: its operands were quantized before it"
                self._tell(event.layer, ATTENTION, reason)
                return
            query, key, value = (HeadTensor(tensor, form) for tensor in high)
            exact = replace(call, query=query, key=key, value=value)
            counted = format_columns(*format_error(call, exact, samples, item.max_memory)) * found.counts
            self._engine.add(event.layer, _OUTPUT, iteration, Of.GEMM_FORMAT, counted)
            # Q, K and V are quantized with one quantizer; per tensor with one scale, of the largest of all three
            # (combine_and_quantize of pytorch/attention/dot_product_attention/utils.py, TE 2.20.2).
            rules = rules_of(event.query._quantizer, columnwise=False)
            amax = amax_of_all(high) if rules.scales_follow and scaling_mode(event.query) == PER_TENSOR else None
            seed = seed_of(iteration, event.layer, ATTENTION, "window")
            of_operands = check_operands(call, exact, samples, rules, seed, amax)
            for of, check in zip((Of.GEMM_CODES_A, Of.GEMM_CODES_B), of_operands, strict=True):
                self._engine.add(event.layer, _OUTPUT, iteration, of, code_columns(check))


def why_not(event: AttentionEvent) -> str:
    """Why attention cannot be computed again; empty if it can."""
    given = event.arguments
    if given["dropout"] and given.get("is_training", True):
        return "its dropout cannot be drawn again"
    if given["softmax_type"] != "vanilla":
        return f"its softmax is {given['softmax_type']}"
    if given["attn_bias_type"] not in ("no_bias", "pre_scale_bias", "post_scale_bias"):
        return f"its bias is {given['attn_bias_type']}"
    if any(given.get(name) is not None for name in ("page_table_k", "page_table_v")) or given.get("is_paged"):
        return "its keys are in pages"
    if given.get("fp8"):
        return "it emulates FP8 in torch's operators"
    if given.get("softcap"):
        return "its scores are capped"
    if event.kernel == UNFUSED and given["attn_bias_type"] != "no_bias":
        return "its scores and its bias are rounded one after the other"
    mask = given["attn_mask_type"]
    if mask == "arbitrary" or ("padding" in mask and given["cu_seqlens_q"] is None):
        return "its mask is a tensor"
    if event.backward and given["attn_bias_type"] != "no_bias":
        return "its backward is not handed its bias"
    if event.backward and scaling_mode(event.query) == MXFP8:
        return "the backward of MXFP8 reads its operands in both directions"
    quantizer = event.probabilities
    if quantizer is not None and getattr(quantizer, "scale", None) is None:
        return f"the scale of S is not known: it has a {type(quantizer).__name__}"
    return ""


def forms_of(layout: Any) -> tuple[str, str, str]:
    """The formats of the three tensors of a layout: ``bshd`` of all, for ``bshd_bs2hd``."""
    parts = ["".join(filter(str.isalpha, part)) for part in str(layout).split("_")]
    return parts[0], parts[1 % len(parts)], parts[-1]


def call_of(event: AttentionEvent, result: HeadTensor) -> Call:
    """What attention was handed.

    Read from Transformer Engine 2.20.2: ``fused_attn_fwd`` and ``fused_attn_bwd`` of
    ``pytorch/cpp_extensions/fused_attn.py``.

    Args:
        event: the forward or backward.
        result: what it gave, or one of the gradients.

    Raises:
        FactorError: an operand is of an unknown kind.
    """
    given = event.arguments
    forms = forms_of(given["qkv_layout"])
    query, key, value = (
        HeadTensor(tensor, form, along_tokens=number == 2)
        for number, (tensor, form) in enumerate(zip((event.query, event.key, event.value), forms, strict=True))
    )
    mask, scale = str(given["attn_mask_type"]), given["attn_scale"]
    packed = "thd" in (forms[0], forms[1])
    bounds: list[Bounds | None] = [None, None]
    if packed or "padding" in mask:
        for number, name in enumerate(("cu_seqlens_q", "cu_seqlens_kv")):
            padded = given.get(f"{name}_padded")
            places = (given[name] if padded is None else padded) if forms[number] == "thd" else None
            bounds[number] = Bounds(given[name], places)
    quantizer = event.probabilities
    capability = torch.cuda.get_device_capability(query.device) if query.device.type == "cuda" else None
    bias_type = given["attn_bias_type"]
    return Call(
        query,
        key,
        value,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        (int(given["max_seqlen_q"]), int(given["max_seqlen_kv"])) if packed else (query.shape[2], key.shape[2]),
        len(given["cu_seqlens_q"]) - 1 if packed else query.shape[0],
        _mask(mask, given["window_size"], at_the_end=bool(given["bottom_right_diagonal"])),
        bounds[0],
        bounds[1],
        Spacing.of(query.numbers, None if quantizer is None else quantizer.scale.view(())),
        result.spacing,
        None if bias_type == "no_bias" else given.get("attn_bias"),
        bias_type == "pre_scale_bias",
        accumulator_of(query.part, split_accumulator=False, capability=capability),
        Spacing.of(query.numbers) if event.kernel == UNFUSED else None,
    )


def _mask(mask: str, window: Any, *, at_the_end: bool) -> Mask:
    """Which keys a query sees. A causal mask has its own alignment, a window that of the call."""
    left, right = (-1, -1) if window is None else window
    if "causal" in mask:
        return Mask(left, 0, mask.endswith("bottom_right"))
    return Mask(left, right, at_the_end)
