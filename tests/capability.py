"""Let the reference backend emulate another GPU after Transformer Engine has cached the first one."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch import quantization, utils
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

from te_precision_callbacks.reference import target


@contextmanager
def extension_of(capability: tuple[int, int]) -> Iterator[None]:
    """Let the extension emulate a GPU, without the facts that Transformer Engine's Python caches about it."""
    before = target.capability()
    target.choose(capability)
    try:
        yield
    finally:
        target.choose(before)


@contextmanager
def any_capability() -> Iterator[None]:
    """Within it :func:`stand_for` may be called; after it the GPU is the one of before."""
    before = target.capability()
    try:
        yield
    finally:
        stand_for(before)


def stand_for(capability: tuple[int, int]) -> None:
    """Clear Transformer Engine's cached facts about the GPU. Read from TE 2.20.2."""
    target.choose(capability)
    utils._get_device_compute_capability.cache_clear()
    utils.is_non_tn_fp8_gemm_supported.cache_clear()
    for support in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        setattr(quantization, support, None)
    _attention_backends["attention_params"] = None
    quantization.FP8GlobalStateManager.reset()
