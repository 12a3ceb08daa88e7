"""Bytes that were computed by hand, of three layers of each class, from the shapes and the formats' specifications.

M tokens, a weight of N x K; BF16 has 2 bytes, FP8 1, FP4 1/2. MXFP8: an E8M0 scale for 32 numbers. NVFP4: an E4M3 scale
for 16 numbers, and a float32 for each direction of a tensor. Block scaling: a float32 for 128 numbers, or for 128 x 128
of a weight. All sizes here are multiples of 512, so that no scale is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base.counts import size
from te_precision_callbacks.check.named_recipes import recipe_named
from te_precision_callbacks.layers.naming import named_te_modules
from te_precision_callbacks.speed.memory import Memory, plan_memory, show
from te_precision_callbacks.speed.memory.planned import ACTIVATION_INPUT
from tests.capability import any_capability, stand_for
from tests.check.running import BF16

M = 8192
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]  # N x K


def planned(module: torch.nn.Module, recipe: str, capability: tuple[int, int] = (9, 0), **keywords: Any) -> Memory:
    with any_capability():
        stand_for(capability)
        model = torch.nn.ModuleDict({"layer": module})
        return plan_memory(model, named_te_modules(model), recipe_named(recipe), tokens=M, **keywords)


class Codes(NamedTuple):
    """Bytes of a tensor with a number of numbers: of the codes of one direction, and of its scales."""

    codes: Callable[[int], int]
    scales_of_saved: Callable[[int], int]
    scales_of_weight: Callable[[int, int], int]


OF_RECIPE = {
    "mxfp8": Codes(lambda n: n, lambda n: n // 32, lambda n, k: 2 * n * k // 32),
    "nvfp4": Codes(lambda n: n // 2, lambda n: n // 16 + 4, lambda n, k: 2 * (n * k // 16 + 4)),
    "fp8_block_scaling": Codes(
        lambda n: n,
        lambda n: 4 * n // 128,
        lambda n, k: 2 * 4 * (n // 128) * (k // 128),  # 32 and 112 blocks are multiples of 4
    ),
    "fp8_current_scaling": Codes(lambda n: n, lambda n: 4, lambda n, k: 4),
    "fp8_delayed_scaling": Codes(lambda n: n, lambda n: 4, lambda n, k: 4),
}
CAPABILITIES = {"mxfp8": (10, 0), "nvfp4": (10, 0)}
CASES = [(recipe, n, k) for recipe in OF_RECIPE for n, k in SHAPES]


@pytest.mark.parametrize(("recipe", "n", "k"), CASES)
def test_linear(recipe: str, n: int, k: int) -> None:
    memory = planned(
        te.Linear(k, n, bias=False, params_dtype=BF16, device="meta"), recipe, CAPABILITIES.get(recipe, (9, 0))
    )
    of = OF_RECIPE[recipe]
    expected = {
        "parameter": (2 * n * k, 2 * n * k),
        "weight_rowwise": (of.codes(n * k), 0),
        "weight_columnwise": (of.codes(n * k), 0),
        "weight_scales": (of.scales_of_weight(n, k), 0),
        "gradient": (2 * n * k, 2 * n * k),
        "saved_high": (0, 2 * M * k),
        "saved_columnwise": (of.codes(M * k), 0),
        "saved_scales": (of.scales_of_saved(M * k), 0),
        "gradient_codes": (
            2 * of.codes(M * n) + of.scales_of_saved(M * n) * (1 if recipe in ONE_FOR_BOTH else 2),
            0,
        ),
    }
    if recipe == "fp8_delayed_scaling":
        expected["scaling_state"] = (5 * 1025 * 4, 0)
    assert {kind: tuple(found) for kind, found in memory.by_kind().items()} == expected


ONE_FOR_BOTH = ("fp8_current_scaling", "fp8_delayed_scaling")
"""Recipes with one scale for both directions."""


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layer_norm_linear(n: int, k: int, normalization: str) -> None:
    module = te.LayerNormLinear(k, n, bias=False, normalization=normalization, params_dtype=BF16, device="meta")
    memory = planned(module, "mxfp8", (10, 0), cached=True)
    statistics = 4 * M * (2 if normalization == "LayerNorm" else 1)
    assert memory.bytes("saved_high") == (2 * M * k + statistics, 4 * M * k + statistics)
    assert memory.bytes("saved_columnwise") == (M * k, 0)
    assert memory.bytes("saved_scales") == (M * k // 32, 0)
    assert memory.bytes("weight_rowwise", lives="always") == memory.bytes("weight_columnwise") == (n * k, 0)


@pytest.mark.parametrize(("hidden", "inner"), [(4096, 14336), (1024, 4096), (8192, 28672)])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_layer_norm_mlp(hidden: int, inner: int, activation: str) -> None:
    module = te.LayerNormMLP(hidden, inner, bias=False, activation=activation, params_dtype=BF16, device="meta")
    memory = planned(module, "nvfp4", (10, 0))
    before = inner * (2 if activation == "swiglu" else 1)
    high = 2 * M * hidden + 8 * M + 2 * M * before
    assert memory.bytes("saved_high") == (high, high + 2 * M * (hidden + inner))
    assert memory.bytes("saved_rowwise") == memory.bytes("saved_columnwise") == (M * (hidden + inner) // 2, 0)
    assert memory.bytes("saved_scales") == (2 * M * (hidden + inner) // 16 + 4 * 4, 0)
    assert memory.bytes("weight_columnwise") == (hidden * (before + inner) // 2, 0)
    assert memory.bytes(what=ACTIVATION_INPUT).low == 2 * M * before
    # 4 bits in both directions, with a scale for 16 numbers; of the layer with more outputs alone
    codes = M * max(hidden, before) * (1 + 2 / 16)
    assert memory.bytes("gradient_codes").low == pytest.approx(codes, rel=1e-3)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_grouped_linear(n: int, k: int) -> None:
    memory = planned(te.GroupedLinear(8, k, n, bias=False, params_dtype=BF16, device="meta"), "fp8_block_scaling")
    assert memory.layers == tuple(f"layer.gemm_{number}" for number in range(8))
    assert memory.bytes("weight_rowwise") == (8 * n * k, 0)
    assert memory.bytes("saved_columnwise") == (M * k, 0)
    assert memory.bytes("saved_scales") == (4 * M * k // 128, 0)
    assert memory.bytes("saved_columnwise", layer="layer.gemm_3") == (M * k // 8, 0)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_operations(n: int, k: int) -> None:
    memory = planned(te.ops.Linear(k, n, bias=False, dtype=BF16, device="meta"), "mxfp8", (10, 0), cached=True)
    assert memory.bytes("weight_rowwise") == (0, 0), "the forward's own codes are dropped"
    assert memory.bytes("weight_columnwise", lives="to_backward") == (n * k, 0), (
        "te.ops keep nothing over micro-batches"
    )
    assert memory.bytes("saved_columnwise") == (M * k, 0)


@pytest.mark.parametrize("recipe", ["fp8_delayed_scaling", "fp8_current_scaling"])
def test_blackwell_needs_no_transposes(recipe: str) -> None:
    module = te.Linear(4096, 4096, bias=False, params_dtype=BF16, device="meta")
    hopper, blackwell = (planned(module, recipe, capability) for capability in ((9, 0), (10, 0)))
    assert hopper.bytes("weight_columnwise").low == 4096 * 4096
    assert blackwell.bytes("weight_columnwise").low == 0
    assert blackwell.bytes("saved_rowwise").low == hopper.bytes("saved_columnwise").low == M * 4096


def test_the_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    memory = planned(te.Linear(4096, 4096, bias=False, params_dtype=BF16, device="meta"), "fp8_current_scaling")
    monkeypatch.setenv("COLUMNS", "200")
    show(memory)
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    show(memory)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 60
    assert {word for word in wide.split() if "─" not in word} <= set(narrow.split()), "the same words, wrapped"


def test_primary_weights_take_the_place_of_the_parameter() -> None:
    with any_capability():
        stand_for((9, 0))
        recipe = recipe_named("fp8_current_scaling")
        with te.quantized_model_init(enabled=True, recipe=recipe):
            module = te.Linear(4096, 4096, bias=False, params_dtype=BF16, device="meta")
    memory = planned(module, "fp8_current_scaling")
    assert memory.bytes("parameter") == (0, 2 * 4096 * 4096)
    assert memory.bytes("weight_rowwise", lives="always") == memory.bytes("weight_columnwise") == (4096 * 4096, 0)
    assert memory.added(lives="always") == 4, "codes in both directions are as large as BF16"


def test_without_tokens_nothing_saved_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    with any_capability():
        stand_for((9, 0))
        model = torch.nn.ModuleDict({"layer": te.Linear(128, 128, params_dtype=BF16, device="meta")})
        memory = plan_memory(model, named_te_modules(model), recipe_named("fp8_current_scaling"))
    assert not any(row.kind.startswith("saved") for row in memory)
    show(memory)
    assert "tokens of a forward are unknown" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (-(10 << 20), "-10.0 MiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
