"""On the debug path, a session changes the same bits of a training as Transformer Engine's own features."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import statistics
from tests.features.plain import THEIRS, plain

ROWS, HIDDEN, STEPS = 64, 64, 2
RECIPES: dict[str, tuple[tuple[int, int], Callable[[], Any] | None]] = {
    "none": ((9, 0), None),
    "delayed": ((9, 0), recipes.DelayedScaling),
    "current": ((9, 0), recipes.Float8CurrentScaling),
    "MXFP8": ((10, 0), recipes.MXFP8BlockScaling),
}
MODULES: dict[str, Callable[..., Any]] = {
    "LayerNormLinear": lambda **keywords: te.LayerNormLinear(HIDDEN, 96, **keywords),
    "LayerNormMLP, gelu": lambda **keywords: te.LayerNormMLP(HIDDEN, 128, activation="gelu", **keywords),
    "LayerNormMLP, srelu": lambda **keywords: te.LayerNormMLP(HIDDEN, 128, activation="srelu", **keywords),
    "TransformerLayer": lambda **keywords: te.TransformerLayer(
        HIDDEN, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="no_mask", **keywords
    ),
}
# Observes a training of a module; returns the function that ends a step.
Observer = Callable[[torch.nn.Module, Path], AbstractContextManager[Callable[[], object]]]


def config(**options: Any) -> dict[str, Any]:
    return statistics(
        tensors=["activation", "weight", "gradient", "output", "wgrad", "dgrad"], stats=["max", "std"], **options
    )


@contextmanager
def ours(module: torch.nn.Module, folder: Path, **options: Any) -> Iterator[Callable[[], object]]:
    with InspectSession(
        config(**options), model=module, log_dir=folder, strict=True, observe="debug", records="off"
    ) as session:
        yield session.step


@contextmanager
def theirs(module: torch.nn.Module, folder: Path) -> Iterator[Callable[[], object]]:
    with plain(config()["stats"]["transformer_engine"], folder, folders=[THEIRS], layers="all"):
        TEDebugState.debug_enabled = True
        debug_api.infer_and_assign_layer_names(module)
        yield debug_api.step


def train(name: str, recipe: str, dtype: torch.dtype, observer: Observer, folder: Path) -> list[torch.Tensor]:
    capability, make = RECIPES[recipe]
    stand_for(capability)
    torch.manual_seed(0)
    module = MODULES[name](params_dtype=dtype)
    for kind, parameter in module.named_parameters():
        if kind.endswith("bias"):  # zeros would hide a rounding
            torch.nn.init.normal_(parameter)
    tensors = []
    with observer(module, folder) as step:
        for number in range(STEPS):
            torch.manual_seed(number + 1)
            x = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
            with te.autocast(enabled=True, recipe=make()) if make else nullcontext():
                out = module(x.view(ROWS // 2, 2, HIDDEN) if isinstance(module, te.TransformerLayer) else x)
            out.backward(torch.randn(out.shape).to(out.dtype))
            tensors.append(out.detach().clone())
            tensors += [tensor.grad.clone() for tensor in (x, *module.parameters()) if tensor.grad is not None]
            module.zero_grad()
            step()
    FP8GlobalStateManager.reset()
    return tensors


@pytest.mark.parametrize(
    ("name", "recipe", "dtype"),
    [
        ("LayerNormLinear", "delayed", torch.bfloat16),
        ("LayerNormMLP, gelu", "none", torch.float32),
        ("LayerNormMLP, srelu", "MXFP8", torch.bfloat16),
        ("TransformerLayer", "current", torch.bfloat16),
    ],
)
def test_the_debug_path_changes_the_same_bits_as_upstreams_features(
    tmp_path: Path, name: str, recipe: str, dtype: torch.dtype
) -> None:
    # Transformer Engine's GELU depends on the last checkpoint of the process.
    te.checkpoint(torch.nn.Identity(), torch.ones(1, requires_grad=True), use_reentrant=True)
    with mock.patch.object(compiled, "SMALLEST", sys.maxsize), any_capability():  # nothing is compiled
        alone = train(name, recipe, dtype, lambda module, folder: nullcontext(lambda: None), tmp_path)
        observed = train(name, recipe, dtype, ours, tmp_path)
        assert not all(map(torch.equal, alone, observed))
        assert all(map(torch.equal, observed, train(name, recipe, dtype, theirs, tmp_path)))
        without_statistics = train(name, recipe, dtype, partial(ours, start_step=100), tmp_path)
        assert all(map(torch.equal, alone, without_statistics))
