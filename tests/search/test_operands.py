"""One operand in low precision: what Transformer Engine refuses, and its fake quantization."""

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe

from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.search import search
from te_precision_callbacks.search.factory import QuantizerFactory, assign_names, custom_recipe, high_quantizer
from te_precision_callbacks.search.operands import operand_recipe
from tests.search.models import HIDDEN, RECIPES, Net, batches, closure_of, on_gpu_of, plant

OTHER = {"fprop": ("dgrad", "wgrad"), "dgrad": ("fprop", "wgrad"), "wgrad": ("fprop", "dgrad")}
OPERANDS = {"fprop": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}


def results(recipe: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The results of the three GEMMs of a layer, in float64."""
    torch.manual_seed(0)
    layer = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=dtype)
    assign_names(layer)
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(HIDDEN, HIDDEN, generator=generator).exp().to(dtype)
    inputs = wide.clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        output = layer(inputs)
    output.backward(torch.randn(HIDDEN, HIDDEN, generator=generator).to(dtype))
    made = {"fprop": output.detach(), "dgrad": inputs.grad, "wgrad": layer.weight.grad}
    return {gemm: tensor.double() for gemm, tensor in made.items() if tensor is not None}


@pytest.mark.parametrize("gemm", OTHER)
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_errors_of_both_operands_add_up_to_the_error_of_the_gemm(name: str, gemm: str) -> None:
    """A product's error is, to first order, the sum of the errors by each operand."""
    dtype = torch.bfloat16 if name == "nvfp4" else torch.float32
    with on_gpu_of(name):
        options = {"disable_stochastic_rounding": True} if name == "nvfp4" else {}
        low = type(RECIPES[name]())(**options)
        high = {"Linear": OTHER[gemm]}
        exact = results(None, dtype)
        whole = results(custom_recipe(low, high), dtype)[gemm] - exact[gemm]
        parts = [results(operand_recipe(low, high, operand), dtype) for operand in OPERANDS[gemm]]
        errors = [part[gemm] - exact[gemm] for part in parts]
        assert all(error.norm() > 0.2 * whole.norm() for error in errors)
        assert (sum(errors) - whole).norm() < 0.2 * whole.norm()
        for part in parts:
            assert all(torch.equal(part[other], exact[other]) for other in OTHER[gemm])


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_a_gemm_takes_no_operands_of_different_precision(name: str) -> None:
    class HighWeight(QuantizerFactory):
        def __call__(self, role: Any) -> Any:
            if role is not None and role.tensor_type == "weight":
                return high_quantizer()
            return self._quantizer("input")

    with on_gpu_of(name), pytest.raises(ReferenceBackendError, match="operands have incompatible scaling modes"):
        results(CustomRecipe(qfactory=HighWeight(RECIPES[name](), {})), torch.bfloat16)


def test_the_operand_with_the_planted_outlier_comes_first() -> None:
    model = Net(RECIPES["current"](), blocks=2)
    plant(model.blocks[1])
    result = search(model, closure_of(model), batches(), low_share=0.85, progress=False)
    operands = [entry for entry in result.measured if entry.level == "operand"]
    assert operands[0].group.name == "blocks.1.up fprop weight"
    assert operands[0].effect.error > 10 * next(
        entry.effect.error for entry in operands if entry.group.name == "blocks.1.up fprop activation"
    )
    assert not any(point.kept.endswith(("weight", "activation", "gradient")) for point in result.frontier)
    assert "fprop" in result.high["blocks.1.up"]
