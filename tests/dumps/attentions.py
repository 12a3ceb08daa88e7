"""Records of attention, made by small trainings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention.dot_product_attention import backends

from te_precision_callbacks.session import InspectSession
from tests.capability import stand_for
from tests.conftest import feature

HEADS, SIZE, LENGTH, BATCH = 4, 128, 128, 2
"""Of fused attention, which FP8 takes with these sizes; unfused attention takes smaller ones."""

FUSED: Mapping[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "delayed": (lambda: recipes.DelayedScaling(fp8_dpa=True), (9, 0)),
    "current": (lambda: recipes.Float8CurrentScaling(fp8_dpa=True), (10, 0)),
    "mxfp8": (lambda: recipes.MXFP8BlockScaling(fp8_dpa=True), (10, 0)),
}


def train(
    folder: Path,
    recipe: str = "",
    *,
    form: str = "sbhd",
    mask: str = "causal",
    keys: int = 0,
    dropout: float = 0.0,
    measures: bool = False,
    **options: Any,
) -> list[Path]:
    """Run attention once, unfused in BF16 or in a recipe, and return the files of the step.

    Args:
        folder: the log folder.
        recipe: one of :data:`FUSED`; empty for unfused attention.
        form: the format of the operands.
        mask: the name of the mask; with padding, sequences have lengths of their own.
        keys: the heads of keys, if not as many as of queries.
        dropout: its probability.
        measures: whether LogGemmError measures the output.
        **options: of DumpTensors.
    """
    make, capability = FUSED[recipe] if recipe else (None, (9, 0))
    stand_for(capability)
    torch.manual_seed(2)
    size, length = (SIZE, LENGTH) if recipe else (16, 24)
    core: Any = te.DotProductAttention(
        HEADS, size, num_gqa_groups=keys or None, attention_dropout=dropout, qkv_format=form
    )
    lengths = [length - 7, length] if form == "thd" or "padding" in mask else [length] * BATCH
    shapes = {"sbhd": (length, BATCH), "bshd": (BATCH, length), "thd": (sum(lengths),)}[form]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    given = [
        torch.randn(*shapes, heads, size, dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, keys or HEADS, keys or HEADS)
    ]
    more = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), bounds) if "padding" in mask else {}
    if form == "thd":
        more |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), length)
    config = {"record": feature("DumpTensors", ["core"], **{"gemms": ["fprop", "dgrad"], **options})}
    if measures:
        config["measure"] = feature("LogGemmError", ["core"], gemms=["fprop"], freq=1)
    model = torch.nn.ModuleDict({"core": core})
    with InspectSession(config, model=model, log_dir=folder, strict=True) as session:
        with te.autocast(enabled=bool(recipe), recipe=make and make()):
            out = core(*given, attn_mask_type=mask, **more)
        (out * torch.randn_like(out)).sum().backward()
        session.step()
    found = (folder / "tensor_dumps" / "rank_0" / "iter_000000").glob("*.safetensors")
    return sorted(found, key=lambda path: "backward" in path.name)


@contextmanager
def damaged(
    damage: Callable[[str, list[Any]], Any] = lambda which, results: None,
    reads: Callable[[Any, Any], tuple[Any, Any]] = lambda keys, values: (keys, values),
) -> Iterator[None]:
    """Attention whose kernel is at fault.

    Args:
        damage: gets "forward", "backward" or "unfused", and the results.
        reads: what a forward reads in place of its keys and values.
    """
    forward, backward, unfused = tex.fused_attn_fwd, tex.fused_attn_bwd, backends.UnfusedDotProductAttention._forward

    @functools.wraps(unfused)
    def _forward(module: Any, cache: Any, query: Any, key: Any, value: Any, *arguments: Any, **keywords: Any) -> Any:
        result = unfused(module, cache, query, *reads(key, value), *arguments, **keywords)
        with torch.no_grad():
            damage("unfused", [result.view(*result.shape[:-1], HEADS, -1)])
        return result

    def fused_attn_fwd(*arguments: Any) -> Any:
        result = forward(*arguments[:17], *reads(*arguments[17:19]), *arguments[19:])
        damage("forward", result)
        return result

    def fused_attn_bwd(*arguments: Any) -> Any:
        result = backward(*arguments)
        damage("backward", result)
        return result

    tex.fused_attn_fwd, tex.fused_attn_bwd = fused_attn_fwd, fused_attn_bwd
    backends.UnfusedDotProductAttention._forward = _forward
    try:
        yield
    finally:
        tex.fused_attn_fwd, tex.fused_attn_bwd = forward, backward
        backends.UnfusedDotProductAttention._forward = unfused
