"""Whether a trace is of the run whose products it is measured with: by its ranges, its GEMMs' formats and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from te_precision_callbacks.base.vocabulary import LOW_PRECISION
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.trace.calls import Call
from te_precision_callbacks.speed.trace.contexts import Contexts
from te_precision_callbacks.speed.trace.errors import TraceError
from te_precision_callbacks.speed.trace.range_names import read_layer
from te_precision_callbacks.speed.trace.timeline import NOTHING, Trace

_LEAST_FIT = 0.2
"""Of the GEMMs that tell their sizes, the share that must be products of the run."""
_KEPT_IN_BYTES = "unsigned char"

QuantizedGemms = frozenset[tuple[str, str, str]]
"""Layer, GEMM and pass of those whose operands are quantized."""


def quantized_gemms(trace: Trace, contexts: Contexts) -> QuantizedGemms:
    """The GEMMs of a CPU's trace that read quantized operands, which Transformer Engine keeps as bytes."""
    host = trace.host
    return frozenset(
        (context.layer, context.gemm, context.of_pass)
        for place, context in enumerate(contexts.of)
        if context.gemm and host.operands[place] != NOTHING
        if _KEPT_IN_BYTES in trace.operands[host.operands[place]].types
    )


def is_low(call: Call, trace: Trace, quantized: QuantizedGemms) -> bool | None:
    """Whether a trace says that a GEMM is in low precision; None where it does not say it."""
    known, context = call.work[0].known, call.work[0].context
    if known is not None and known.format:
        return known.format in LOW_PRECISION["quantized"]
    if trace.has_device or not trace.has_shapes or not context.gemm:
        return None
    return (context.layer, context.gemm, context.of_pass) in quantized


def ranged_layers(trace: Trace) -> set[str]:
    """The layers, or modules of experts, whose GEMMs have ranges."""
    return {read.layer for name in trace.names if (read := read_layer(name)) is not None and read.gemm}


def require_own_layers(trace: Trace, run: Sequence[Product]) -> None:
    """Refuse a trace whose ranges name other layers than those of the run.

    Raises:
        TraceError: none of its layers with GEMMs is one of the run's.
    """
    found, own = ranged_layers(trace), {product.layer for product in run}
    if run and found and not found & {*own, *(layer.rpartition(".")[0] for layer in own)}:
        raise TraceError(
            f"{trace.path} is a trace of another run: its ranges name {in_sentence(*sorted(found), most=2)}, and the"
            f" run has {in_sentence(*sorted(own), most=2)}. Give the trace of this run, or the run of this trace."
        )


def require_own_gemms(
    trace: Trace, calls: Iterable[Call], run: Sequence[Product], quantized: QuantizedGemms, *, is_own: bool
) -> list[str]:
    """Refuse a trace most of whose GEMMs contradict the products of the run.

    Args:
        trace: the trace.
        calls: its GEMMs, with their products.
        run: the products of the run.
        quantized: the GEMMs of :func:`quantized_gemms`.
        is_own: whether the trace is known to be of the run: nothing is refused then.

    Returns:
        Notes on what contradicts the run, but does not refuse the trace.

    Raises:
        TraceError: most GEMMs have another format or other shapes than the run's, or few of them fit a product.
    """
    gemms = [call for call in calls if not call.is_attention]
    wrong: list[str] = []
    of_run = [call for call in gemms if call.product is not None]
    formats = sum(_has_other_format(call, trace, quantized) for call in of_run)
    shapes = sum(_has_other_shape(call) for call in of_run)
    fitting = [call for call in gemms if call.sizes is not None or call.among is not None]
    fit = sum(bool(call.layer) for call in fitting)
    if formats:
        wrong.append(
            f"{formats} of {len(of_run)} GEMMs are in low precision in the trace and in high precision at the end of"
            " the run, or the other way round."
        )
    if shapes:
        wrong.append(f"{shapes} of {len(of_run)} GEMMs have other shapes of their weights than the run.")
    few = bool(run and fitting) and fit < _LEAST_FIT * len(fitting)
    if not is_own and (few or 2 * max(formats, shapes) > len(of_run) > 0):
        text = " ".join(wrong)
        if few:
            text = f"{fit} of {len(fitting)} GEMMs fit a product of the run. {text}".rstrip()
        raise TraceError(
            f"{trace.path} is of another run: {text} Give the trace of this run, or the run of this trace. If it is of"
            " this run with batches of another size, profile with profile=, whose ranges name the layers."
        )
    return wrong


def _has_other_format(call: Call, trace: Trace, quantized: QuantizedGemms) -> bool:
    low = is_low(call, trace, quantized)
    return low is not None and call.product is not None and low != call.product.is_low


def _has_other_shape(call: Call) -> bool:
    """Whether the weight has another shape; the number of tokens may differ between steps."""
    if call.sizes is None or call.product is None:
        return False
    (inner, outer), one = call.sizes, call.product
    if one.gemm == "wgrad":
        return outer != {one.n, one.m}
    return one.gemm in ("fprop", "dgrad") and (inner != one.k or one.m not in outer)
