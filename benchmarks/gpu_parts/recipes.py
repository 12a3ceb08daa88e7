"""Compare statistics of the fused path with Transformer Engine's own ``dequantize()``, in each recipe of a GPU.

The recipes belong to one compute capability. Where the GPU has it and Transformer Engine is compiled, its kernels
make the tensors; otherwise the reference backend makes them, on the same device. A spy in the place of
``general_gemm`` sees the operands of each GEMM, and takes from them the error and the underflows in float64. Training
must be the same to the last bit with and without the session.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from gpu_parts.rows import CannotRunHereError, Rows, Settings, of_all_layers, values_of
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.te.tensors import is_quantized

ROWS, INPUTS, OUTPUTS, STEPS = 256, 512, 384, 3
TENSORS = ("activation", "weight", "gradient")
_RECIPES = {
    "9.0": {"DelayedScaling": "fp8", "Float8CurrentScaling": "fp8", "Float8BlockScaling": "fp8_block_scaling"},
    "10.0": {"MXFP8BlockScaling": "mxfp8", "NVFP4BlockScaling": "nvfp4"},
}
"""Compute capability -> the recipe's class, and the name of Transformer Engine's check of it."""
_TOLERANCE = 1e-5
"""Of the squared error, against float64: the kernels sum in float32 over some elements at a time."""

_OPERANDS = {"TN": ("weight", "activation"), "NN": ("weight", "gradient"), "NT": ("activation", "gradient")}
"""Layout -> what A and B are."""

Numbers = dict[str, float]  # "tensor statistic" -> value


@contextlib.contextmanager
def witnessed(layer: torch.nn.Module) -> Iterator[Numbers]:
    """Look at the operands of a layer, as Transformer Engine's own tensors give them back: those before quantization by
    hooks, those after it in the GEMM. Yields the numbers of the last step."""
    from transformer_engine.pytorch.module import linear

    upstream = linear.general_gemm
    seen: Numbers = {}
    high_precision: dict[str, torch.Tensor] = {}

    def spy(a: Any, b: Any, *arguments: Any, **keywords: Any) -> Any:
        for name, operand in zip(_OPERANDS[keywords.get("layout", "TN")], (a, b), strict=True):
            if f"{name} mse" not in seen and is_quantized(operand):
                high = high_precision[name].double()
                back = operand.dequantize(dtype=torch.float32).double().reshape(high.shape)
                seen[f"{name} mse"] = float((high - back).square().mean())
                seen[f"{name} underflows%"] = 100 * float(((high != 0) & (back == 0)).double().mean())
                seen[f"{name} max"] = float(high.max())
        return upstream(a, b, *arguments, **keywords)

    def before(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.clear()
        high_precision.update(activation=inputs[0].detach().clone(), weight=module.weight.detach().clone())

    def after(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: high_precision.update(gradient=gradient.detach().clone())
        )

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
    with mock.patch.object(linear, "general_gemm", spy):
        yield seen


def _train(settings: Settings, recipe: Any, *, watched: bool) -> tuple[list[torch.Tensor], Numbers, Numbers]:
    """Return losses and weights, and the last step's values of the session and of the witness."""
    te = settings.transformer_engine()
    torch.manual_seed(0)
    layer = te.Linear(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device=settings.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    kept: list[torch.Tensor] = []
    of_codes = "LogNvfp4TensorStats" if type(recipe).__name__.startswith("NVFP4") else "LogFp8TensorStats"
    features = {
        "LogTensorStats": {"enabled": True, "tensors": list(TENSORS), "stats": ["max"]},
        of_codes: {"enabled": True, "tensors": list(TENSORS), "stats": ["mse", "underflows%"]},
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        values, seen = Numbers(), Numbers()
        session = InspectSession(of_all_layers(features), model=layer, log_dir=folder, observe="fused", strict=True)
        if watched:
            seen = stack.enter_context(witnessed(layer))
            stack.enter_context(session)
        for _ in range(STEPS):
            # Magnitudes over some ten powers of two, so that each format has underflows.
            spread = torch.exp(2 * torch.randn(ROWS, INPUTS, generator=generator))
            inputs = (torch.randn(ROWS, INPUTS, generator=generator) * spread).bfloat16().to(settings.device)
            inputs.requires_grad_()
            with te.autocast(enabled=True, recipe=recipe):
                output = layer(inputs)
            loss = output.float().abs().pow(1.5).mean()
            loss.backward()
            kept += [loss.detach().clone(), inputs.grad.clone()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                values = values_of(session.step())
    # Without the recipe in the statistics' names.
    pairs = ((key.split(), value) for key, value in values.items())
    last = {f"{tensor} {statistic.rpartition('_')[2]}": value for (tensor, statistic), value in pairs}
    return [*kept, layer.weight.detach().clone()], last, seen


def _check_recipe(settings: Settings, rows: Rows, name: str, supported_as: str) -> None:
    settings.transformer_engine()
    from transformer_engine.common import recipe
    from transformer_engine.pytorch import quantization

    runs, why = getattr(quantization, f"check_{supported_as}_support")()
    if not runs:
        raise CannotRunHereError(str(why))
    alone, _, _ = _train(settings, getattr(recipe, name)(), watched=False)
    beside, ours, theirs = _train(settings, getattr(recipe, name)(), watched=True)
    note = settings.backend_note
    rows.same(f"{name}: losses, gradients and weights with a session", all(map(torch.equal, alone, beside)), note)
    rows.equal(f"{name}: statistics", len(ours), 3 * len(TENSORS), note=note)
    for tensor in TENSORS:
        for statistic in ("mse", "underflows%", "max"):
            key = f"{tensor} {statistic}"
            value, right = ours.get(key, math.nan), theirs.get(key, math.nan)
            # A count in a hundredth of an element is the same count; a mean squared error has some digits.
            allowed = _TOLERANCE * right if statistic == "mse" else 1e-9 * max(1.0, abs(right))
            rows.add(f"{name}: {key}", value, expected=right, ok=abs(value - right) <= allowed, note=note)


def check(settings: Settings, rows: Rows) -> None:
    for name, supported_as in _RECIPES[settings.capability or "9.0"].items():
        with rows.of(name):
            _check_recipe(settings, rows, name, supported_as)
