"""Adds the layer to an exception of Transformer Engine; for an unsupported shape also the GEMM and the dimension.

The layer is read from the frames of the traceback, so healthy runs have no cost. Local variables of Transformer Engine
2.20.2: the forwards and backwards of ``pytorch/module/*.py`` (``self``, ``inp``, ``m_splits``, ``ctx``,
``grad_output``, ``grad_outputs``), and ``layout`` of ``pytorch/cpp_extensions/gemm.py``.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import TracebackType
from typing import Any

from torch.utils.checkpoint import CheckpointError

from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, GEMMS, GemmName, recipe_of
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.gemm_shapes import refusals
from te_precision_callbacks.te.package import transformer_engine_error
from te_precision_callbacks.te.state import recipe_of_module

logger = logging.getLogger(__name__)


def explain_failure(
    error: BaseException | None, modules: Sequence[NamedModule], other_layers: Mapping[int, str]
) -> None:
    """Add notes to the exceptions in the chain of an error.

    An exception of Transformer Engine gets the layer, and the next supported size; a ``CheckpointError`` of torch that
    layers of Transformer Engine in FP8 cause gets the remedy. ``other_layers``: the names of other modules of
    Transformer Engine, such as attention, by id.
    """
    was_shown = error is getattr(sys, "last_value", None)
    inner = transformer_engine_error(error)
    if isinstance(inner, Exception):
        try:
            failed = _place(inner.__traceback__, modules)
            _add_note(inner, _explanation(failed) or _layer_of(inner, failed, other_layers), was_shown=was_shown)
        except Exception as failure:
            logger.error("The layer of the exception above could not be found.", exc_info=failure)
    while error is not None and not isinstance(error, CheckpointError):
        error = error.__cause__ or error.__context__
    if error is not None and any(recipe_of_module(named.module) for named in modules):
        _add_note(
            error,
            "torch.utils.checkpoint(use_reentrant=False), the default of gradient_checkpointing in transformers,"
            " recomputes the forward outside of te.autocast, where layers save other tensors than in FP8. Use"
            " transformer_engine.pytorch.checkpoint; for transformers see docs/transformers.md.",
            was_shown=was_shown,
        )


def _add_note(error: BaseException, text: str, *, was_shown: bool) -> None:
    """Add a note, unless it is empty; log it if the exception was shown already. Python 3.10 has no notes."""
    if not text:
        return
    if was_shown or not hasattr(error, "add_note"):
        logger.error("%s", text)
    elif text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def _layer_of(error: Exception, failed: _FailedLayer | None, other_layers: Mapping[int, str]) -> str:
    where = "forward"
    if failed is not None:
        name = failed.named.name
        module: Any = failed.named.module
        if failed.in_backward:
            where = "backward"
    else:
        for frame, _ in walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if frame.f_code.co_name in _FORWARDS and id(module) in other_layers:
                break
        else:
            return ""
        name = other_layers[id(module)]
    return f"te-precision-callbacks: raised in the {where} of the layer {name!r} ({type(module).__name__})."


_FORWARDS = ("forward", "_call_impl")
"""Functions of a module that run its forward; load_state_dict(), for example, does not."""


@dataclass
class _FailedLayer:
    named: NamedModule
    in_backward: bool
    rows: int | None = None
    splits: Sequence[Any] | None = None
    gemm: GemmName | None = None


def _explanation(failed: _FailedLayer | None) -> str | None:
    if failed is None or not failed.named.module.fp8:
        return None
    module: Any = failed.named.module
    recipe = recipe_of_module(module)
    name = recipe_of(recipe)
    if name is None:
        return None
    from te_precision_callbacks.te.recipes import compute_capability

    gemms: tuple[GemmName, ...] = ("fprop",)
    if failed.gemm is not None:
        gemms = (failed.gemm,)
    elif failed.in_backward:
        gemms = ("dgrad", "wgrad")
    checked = {*gemms, "fprop"}
    if module.training and recipe.backward_override is None:
        checked.update(GEMMS)
    row = te_modules.of(module)
    sizes = row.tokens(module, failed.rows or 0, failed.splits, in_backward=failed.in_backward)
    layers = list(zip(failed.named.layers, sizes, row.features(module), strict=True))
    for layer, tokens, (in_features, out_features) in row.in_backward_order(layers) if failed.in_backward else layers:
        refused = refusals(
            name,
            compute_capability(),
            tokens=tokens,
            in_features=in_features,
            out_features=out_features,
            gemms=checked,
            result_bytes=module.activation_dtype.itemsize,
            asserted=row.checks_operands,
        )
        for refusal in refused:
            if refusal.gemm not in gemms:
                continue
            works = max(other.next_size for other in refused if other.dimension == refusal.dimension)
            dimension: str = refusal.dimension
            if dimension == "tokens":
                dimension += " (product of all input dimensions but the last)"
            return (
                f"te-precision-callbacks: the layer {layer.name!r} cannot run the GEMM {refusal.gemm}: {dimension} is"
                f" {refusal.size}, but must be a multiple of {refusal.multiple} for {refusal.asked_by}. Next size that"
                f" all GEMMs of the layer support: {works}."
            )
    return None


def _place(trace: TracebackType | None, modules: Sequence[NamedModule]) -> _FailedLayer | None:
    by_module = {id(named.module): named for named in modules}
    failed: _FailedLayer | None = None
    for frame, _ in walk_tb(trace):
        if not frame.f_globals.get("__name__", "").startswith("transformer_engine.pytorch."):
            continue
        local = frame.f_locals
        function = frame.f_code.co_name
        layer = by_module.get(id(local.get("self")))
        forward = getattr(local.get("ctx"), "te_precision_forward", None)  # of the tap, which has entered the module
        if layer is not None and (failed is not None or function == "forward"):
            failed = _FailedLayer(layer, in_backward=False)
        elif function == "backward" and forward is not None and forward.module in by_module:
            failed = _FailedLayer(by_module[forward.module], in_backward=True)
        if failed is not None:
            _read_sizes(failed, local)
    return failed


def _read_sizes(failed: _FailedLayer, local: Mapping[str, Any]) -> None:
    names: tuple[str, ...] = ("inp",)
    if failed.in_backward:
        names = ("grad_output", "grad_outputs")
    for name in names:
        tensor: Any = local.get(name)
        if isinstance(tensor, tuple) and tensor:
            tensor = tensor[0]
        if failed.rows is None and hasattr(tensor, "size"):  # also the storage of a quantized tensor
            failed.rows = math.prod(tensor.size()[:-1])
    splits = local.get("m_splits", getattr(local.get("ctx"), "m_splits", None))
    if failed.splits is None and splits is not None:
        failed.splits = list(splits)
    failed.gemm = GEMM_OF_LAYOUT.get(str(local.get("layout")), failed.gemm)
