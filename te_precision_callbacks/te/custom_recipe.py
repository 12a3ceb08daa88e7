"""Quantizers of a ``CustomRecipe`` by layer and GEMM. Needs Transformer Engine 2.20 only.

``te-precision search`` uses this module, and copies its text into the module that it writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_OPERANDS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""Tensor -> the GEMMs that read its rowwise and its columnwise data."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


def assign_names(model: Any) -> None:
    """Name Transformer Engine's modules by their paths. Call it before the first forward."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for path, module in model.named_modules():
        if isinstance(module, TransformerEngineBaseModule):
            parts = [part for part in path.removeprefix("module.").split(".") if part not in _WRAPPERS]
            module.name = ".".join(parts) or type(module).__name__


class QuantizerFactory:
    """The ``qfactory`` of a ``CustomRecipe``.

    Args:
        low: the recipe in low precision, one of Transformer Engine's own.
        high: layer -> its GEMMs in high precision; all other GEMMs are in low precision. An unknown layer raises.
    """

    def __init__(self, low: Any, high: Mapping[str, Collection[str]]) -> None:
        self.low = low
        self.high = high

    def __call__(self, role: Any) -> Any:
        from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

        if role is None or role.tensor_type not in _OPERANDS:
            return self._quantizer("input")  # a boundary, whose quantizer has no effect
        if role.name not in self.high:
            layers = ", ".join(list(self.high)[:3])
            raise ValueError(
                f"{role.name!r} is not a layer of the searched model, which has {layers}, ... Call assign_names(model)"
                " before the first forward, with the model that was searched."
            )
        rowwise, columnwise = (gemm in self.high[role.name] for gemm in _OPERANDS[role.tensor_type])
        rows = high_quantizer() if rowwise else self._quantizer(role.tensor_type)
        if rowwise == columnwise:
            return rows
        columns = high_quantizer() if columnwise else self._quantizer(role.tensor_type)
        quantizer = HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)
        if self.low.float8_current_scaling() and rowwise:
            columns.set_usage(rowwise=True)  # its kernel writes columnwise data only together with rowwise data
        return quantizer

    def _quantizer(self, tensor: str) -> Any:
        from transformer_engine.pytorch.quantization import DelayedScalingRequest, RecipeState

        low = self.low
        if low.delayed():
            names = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo")
            return DelayedScalingRequest(reduce_amax=low.reduce_amax, **{name: getattr(low, name) for name in names})
        mode = "backward" if tensor == "grad_output" else "forward"
        count = 2 if tensor == "grad_output" else 3
        quantizers = RecipeState.create(low, mode=mode, num_quantizers=count).make_quantizers()
        quantizer = quantizers[1 if tensor == "weight" else 0]
        if low.float8_current_scaling():  # as the modules do for this recipe
            options = {"input": low.fp8_quant_fwd_inp, "weight": low.fp8_quant_fwd_weight}
            chosen = options.get(tensor, low.fp8_quant_bwd_grad)
            quantizer.force_pow_2_scales = chosen.power_2_scale
            quantizer.amax_epsilon = chosen.amax_epsilon
        return quantizer


def high_quantizer() -> Any:
    """Return an IdentityQuantizer that casts weights as torch.autocast does."""
    import torch
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    dtypes = [torch.get_autocast_dtype(name) for name in ("cuda", "cpu") if torch.is_autocast_enabled(name)]
    return IdentityQuantizer(dtype=dtypes[0] if dtypes else None)


def custom_recipe(low: Any, high: Mapping[str, Collection[str]]) -> Any:
    """Return the recipe for ``te.autocast(recipe=...)``; arguments as for :class:`QuantizerFactory`."""
    from transformer_engine.common.recipe import CustomRecipe

    recipe = CustomRecipe(qfactory=QuantizerFactory(low, high), backward_override=low.backward_override)
    for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        if hasattr(low, name):
            setattr(recipe, name, getattr(low, name))
    return recipe
