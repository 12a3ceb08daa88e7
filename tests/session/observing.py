"""Whether observing changes training: one layer trained with and without, compared bit for bit.

The table of docs/observing.md is printed by ``python -m tests.session.observing``, in seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from te_precision_callbacks import reference

if __name__ == "__main__":
    reference.install_where_needed()

import nvdlfw_inspect.api as debug_api
import torch
import transformer_engine.debug.features
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.instrumentation.upstream import Snapshot
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import statistics

ROWS, HIDDEN, STEPS = 64, 64, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECIPES: dict[str, tuple[tuple[int, int], Callable[[], Any] | None]] = {
    "none": ((9, 0), None),
    "delayed": ((9, 0), recipes.DelayedScaling),
    "current": ((9, 0), recipes.Float8CurrentScaling),
    "FP8 blocks": ((9, 0), recipes.Float8BlockScaling),
    "MXFP8": ((10, 0), recipes.MXFP8BlockScaling),
    "NVFP4": ((10, 0), recipes.NVFP4BlockScaling),
}
ACTIVATIONS = ("gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu")
ALIKE = {
    "qgelu": "silu",
    "srelu": "silu",
    "geglu": "swiglu",
    "qgeglu": "swiglu",
    "reglu": "swiglu",
    "sreglu": "swiglu",
}
"""Activations without a row of their own -> the one whose row holds for them."""
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, 96, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, 96, **kw),
    **{
        f"LayerNormMLP, {name}": lambda name=name, **kw: te.LayerNormMLP(HIDDEN, 128, activation=name, **kw)
        for name in ACTIVATIONS
    },
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, HIDDEN, 96, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        HIDDEN, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="no_mask", **kw
    ),
}
TABLE = [name for name in MODULES if name.removeprefix("LayerNormMLP, ") not in ALIKE]
Run = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The outputs of all steps, and the gradients."""
Observer = Callable[[torch.nn.Module], AbstractContextManager[Callable[[], object]]]
"""What a module is trained under; gives what is called at the end of a step."""


def config(**options: Any) -> dict[str, Any]:
    """All tensors are watched, in every step unless the options say otherwise."""
    tensors = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
    return statistics(tensors=tensors, stats=["max", "std"], **options)


@contextmanager
def ours(module: torch.nn.Module, **options: Any) -> Iterator[Callable[[], object]]:
    """Under a session, on Transformer Engine's debug path."""
    keywords: Any = {"strict": True, "observe": "debug", "records": "off"}
    with (
        tempfile.TemporaryDirectory() as folder,
        InspectSession(config(**options), model=module, log_dir=folder, **keywords) as session,
    ):
        yield session.step


@contextmanager
def theirs(module: torch.nn.Module) -> Iterator[Callable[[], object]]:
    """Under plain nvidia-dlfw-inspect, with Transformer Engine's own features."""
    snapshot = Snapshot()
    try:
        with tempfile.TemporaryDirectory() as folder:
            features = [str(Path(transformer_engine.debug.features.__path__[0]))]
            debug_api.initialize(config(), feature_dirs=features, log_dir=folder)
            TEDebugState.debug_enabled = True
            debug_api.infer_and_assign_layer_names(module)
            yield debug_api.step
            debug_api.end_debug()
    finally:
        snapshot.restore()


@contextmanager
def nobody(module: torch.nn.Module) -> Iterator[Callable[[], object]]:
    yield lambda: None


def train(name: str, recipe: str, dtype: str, observer: Observer) -> Run:
    """Forward and backward passes of one layer, its parameters as they are."""
    stand_for(RECIPES[recipe][0])
    make = RECIPES[recipe][1]
    torch.manual_seed(0)
    module = MODULES[name](params_dtype=DTYPES[dtype])
    for kind, parameter in module.named_parameters():
        if kind.endswith("bias"):  # as in training, not the zeros of a new layer, with which no rounding shows
            torch.nn.init.normal_(parameter)
    outputs, gradients = [], []
    with observer(module) as step:
        for number in range(STEPS):
            torch.manual_seed(number + 1)
            x = torch.randn(ROWS, HIDDEN).to(DTYPES[dtype]).requires_grad_()
            with te.autocast(enabled=True, recipe=make()) if make else nullcontext():
                out = run(module, x)
            out.backward(torch.randn(out.shape).to(out.dtype))
            outputs.append(out.detach().clone())
            gradients += [tensor.grad.clone() for tensor in (x, *module.parameters()) if tensor.grad is not None]
            module.zero_grad()
            step()
    FP8GlobalStateManager.reset()
    return outputs, gradients


def run(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, te.GroupedLinear):
        out = module(x, [ROWS // 2, ROWS // 2])
    else:
        out = module(x.view(ROWS // 2, 2, HIDDEN) if isinstance(module, te.TransformerLayer) else x)
    assert isinstance(out, torch.Tensor)
    return out


def changed(first: Run, second: Run) -> str:
    """Which differ in a bit: "", "y", "g" or "y, g"."""
    same = [all(map(torch.equal, *pair)) for pair in zip(first, second, strict=True)]
    return ", ".join(name for name, is_same in zip(("y", "g"), same, strict=True) if not is_same)


def runs(recipe: str, dtype: str) -> bool:
    """Whether Transformer Engine runs it: NVFP4's random Hadamard transform takes bfloat16 only."""
    return (recipe, dtype) != ("NVFP4", "float32")


@contextmanager
def prepared() -> Iterator[None]:
    """Nothing is compiled, which takes a minute, and any GPU may be stood for."""
    checkpoint(use_reentrant=True)
    with mock.patch.object(compiled, "SMALLEST", sys.maxsize), any_capability():
        try:
            yield
        finally:
            checkpoint(use_reentrant=True)


def checkpoint(*, use_reentrant: bool) -> None:
    """Run a checkpoint of this kind: Transformer Engine's GELU goes by the last one of the process, until the next."""
    te.checkpoint(torch.nn.Identity(), torch.ones(1, requires_grad=True), use_reentrant=use_reentrant)


def cell(name: str, recipe: str) -> str:
    """What observing changes: of float32 / of bfloat16."""
    found = []
    for dtype in DTYPES:
        alone = train(name, recipe, dtype, nobody) if runs(recipe, dtype) else None
        found.append("-" if alone is None else changed(alone, train(name, recipe, dtype, ours)) or "=")
    return " / ".join(found)


def row(name: str) -> str:
    """A line of the table."""
    return f"| {name} | {' | '.join(cell(name, recipe) for recipe in RECIPES)} |"


def head() -> str:
    """The first two lines of the table."""
    return f"| layer | {' | '.join(RECIPES)} |\n|---|{'---|' * len(RECIPES)}"


if __name__ == "__main__":
    with prepared():
        sys.stdout.write("\n".join([head(), *map(row, TABLE)]) + "\n")
