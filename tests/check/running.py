"""Models with a different weight shape in each layer, and the operands of their GEMMs in three steps."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.check import CheckedModel, check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.functions import Function
from tests.instrumentation.gemm_spy import Spy

BF16 = torch.bfloat16
STEPS = 3
TOKENS = 128
SPLITS = [32, 96]

RECIPES: Mapping[str, tuple[tuple[int, int], Callable[[], Any]]] = {
    "fp8_delayed_scaling": ((9, 0), recipes.DelayedScaling),
    "fp8_current_scaling": ((9, 0), recipes.Float8CurrentScaling),
    "fp8_block_scaling": ((9, 0), recipes.Float8BlockScaling),
    "mxfp8": ((10, 0), recipes.MXFP8BlockScaling),
    "nvfp4": ((10, 0), recipes.NVFP4BlockScaling),
    "none": ((9, 0), lambda: None),
}
"""Recipe -> a GPU that has it, and how it is made."""

Operands = dict[tuple[str, str, str], str]
"""(layer, GEMM, tensor) -> its format."""


@contextmanager
def gpu_with(recipe: str) -> Iterator[None]:
    with any_capability():
        stand_for(RECIPES[recipe][0])
        yield


def grouped(inputs: int, outputs: int) -> Function:
    experts = te.GroupedLinear(2, inputs, outputs, params_dtype=BF16)
    return Function(lambda x: experts(x, SPLITS), experts=experts)


def block(width: int, inner: int) -> Function:
    layer = te.TransformerLayer(width, inner, 2, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
    return Function(lambda x: layer(x.view(-1, 2, x.shape[-1])).reshape(x.shape), transformer_layer=layer)


class Chain(torch.nn.Module):
    """Modules in a row, some of them nested.

    Args:
        width: of the input.
        parts: name -> the module.
        shapes: (outputs, inputs) of a weight -> its layer.
    """

    def __init__(self, width: int, parts: Mapping[str, torch.nn.Module], shapes: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self.width = width
        self.parts = torch.nn.ModuleDict(parts)
        self.shapes = shapes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def chain(draw: random.Random, kinds: Sequence[str]) -> Chain:
    """A chain of modules of these kinds; no two weights have one shape."""
    sides = [32 * number for number in range(1, 9)]
    shapes: dict[tuple[int, int], str] = {}
    parts: dict[str, torch.nn.Module] = {}
    width = first = draw.choice(sides[1:])

    for number, kind in enumerate(kinds):
        for inner in draw.sample(sides, len(sides)):
            name, wrapped = f"part{number}", draw.random() < 0.3
            path = f"parts.{name}" + (".0" if wrapped else "")
            if kind == "TransformerLayer":
                of_attention = f"{path}.transformer_layer.self_attention"
                mlp = f"{path}.transformer_layer.layernorm_mlp"
                made = {
                    (3 * width, width): f"{of_attention}.layernorm_qkv",
                    (width, width): f"{of_attention}.proj",
                    (inner, width): f"{mlp}.fc1",
                    (width, inner): f"{mlp}.fc2",
                }
            elif kind == "LayerNormMLP":
                made = {(inner, width): f"{path}.fc1", (width, inner): f"{path}.fc2"}
            else:
                made = {(inner, width): path + (".experts" if kind == "GroupedLinear" else "")}
            size = {"TransformerLayer": 4, "LayerNormMLP": 2}.get(kind, 1)
            if len(made) == size and not set(made) & set(shapes):
                shapes |= made
                part = _BUILD[kind](width, inner)
                parts[name] = torch.nn.Sequential(part) if wrapped else part
                width = inner if size == 1 else width
                break
    return Chain(first, parts, shapes)


_BUILD: Mapping[str, Callable[[int, int], torch.nn.Module]] = {
    "Linear": lambda inputs, outputs: te.Linear(inputs, outputs, params_dtype=BF16),
    "LayerNormLinear": lambda inputs, outputs: te.LayerNormLinear(inputs, outputs, params_dtype=BF16),
    "GroupedLinear": grouped,
    "LayerNormMLP": lambda width, inner: te.LayerNormMLP(width, inner, params_dtype=BF16),
    "TransformerLayer": block,
}

KINDS = tuple(_BUILD)


def ran(model: Chain, config: Mapping[str, Any], recipe: Any, folder: Path) -> tuple[Operands, Coverage]:
    # The rows identify the expert of a GroupedLinear; other layers have all rows.
    spy = Spy(model.shapes, {rows: f".gemm_{number}" for number, rows in enumerate(SPLITS)})
    with (
        warnings.catch_warnings(),
        InspectSession(
            config, model=model, log_dir=folder, allow_unmatched=True, strict=True, records="off"
        ) as session,
        spy.watching(),
    ):
        warnings.simplefilter("ignore")
        for _ in range(STEPS):
            spy.begin_step()
            x = torch.randn(TOKENS, model.width, dtype=BF16, requires_grad=True)
            with nullcontext() if recipe is None else te.autocast(recipe=recipe):
                model(x).float().sum().backward()
            session.step()
    assert all(handed == spy.handed for handed in spy.handed_in), "every step is alike"
    assert all(len(formats) == 1 for formats in spy.handed.values())
    return {operand: next(iter(formats)) for operand, formats in spy.handed.items()}, session.coverage()


def planned(checked: CheckedModel) -> Operands:
    return {
        (product.layer, product.gemm, tensor): text.removesuffix(" (modified)")
        for product in checked.coverage
        for tensor, text in product.operands.items()
    }


def compare(model: Chain, config: Mapping[str, Any], recipe: str, folder: Path) -> CheckedModel:
    checked = check_model(model, load_config(config), recipe=recipe, tokens=TOKENS)
    assert [finding for finding in checked.findings if finding.kind not in ("unmatched", "high_precision")] == []
    assert {product.runs for product in checked.coverage if product.operands} <= {"planned"}
    handed, coverage = ran(model, config, RECIPES[recipe][1](), folder)
    assert planned(checked) == handed
    assert of_equal_shares(checked.coverage) == of_equal_shares(coverage)
    return checked


def of_equal_shares(coverage: Coverage) -> dict[tuple[str, str], Any]:
    """All products but the experts', where only the run has token counts, and attention's, which are not planned."""
    return {
        (p.layer, p.gemm): (p.n, p.m, p.k, p.macs, dict(p.operands), p.not_run, p.reason, p.reason_ref)
        for p in coverage
        if p.gemm in GEMMS and "experts" not in p.layer
        if p.operands or p.family == "te"  # the session does not report GEMMs that an operation leaves out
    }
