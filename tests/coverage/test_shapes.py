"""A shape that FP8 cannot multiply: the exception names the layer, the GEMM, and a shape that works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.session import InspectSession
from tests.capability import stand_for
from tests.conftest import statistics

pytestmark = pytest.mark.usefixtures("any_gpu")

HOPPER, BLACKWELL = (9, 0), (10, 0)


class Case(NamedTuple):
    """Sizes of a layer that do not work.

    Attributes:
        make: returns the layer for the wrong size: tokens, or one of its features.
        recipe, capability: where.
        size: the wrong size.
        told: layer, GEMM and dimension, and the required multiple.
        next_size: the smallest larger size that trains.
    """

    make: Callable[[int], torch.nn.Module]
    recipe: Any
    capability: tuple[int, int]
    size: int
    told: tuple[str, str, str, int]
    next_size: int


def linear(*features: int) -> Callable[[int], torch.nn.Module]:
    return lambda tokens: te.Linear(*features, params_dtype=torch.bfloat16)


CASES = {
    "fprop": Case(linear(32, 48), recipes.DelayedScaling, HOPPER, 30, ("layer", "fprop", "tokens", 8), 32),
    "fprop, and then wgrad": Case(
        linear(32, 48), recipes.Float8CurrentScaling, HOPPER, 34, ("layer", "fprop", "tokens", 8), 48
    ),
    "wgrad": Case(linear(32, 48), recipes.DelayedScaling, HOPPER, 40, ("layer", "wgrad", "tokens", 16), 48),
    "wgrad of a LayerNormLinear": Case(
        lambda tokens: te.LayerNormLinear(32, 48, params_dtype=torch.bfloat16),
        recipes.Float8CurrentScaling,
        HOPPER,
        40,
        ("layer", "wgrad", "tokens", 16),
        48,
    ),
    "wgrad of a LayerNormMLP": Case(
        lambda tokens: te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16),
        recipes.Float8CurrentScaling,
        HOPPER,
        40,
        ("layer.fc2", "wgrad", "tokens", 16),
        48,
    ),
    "dgrad": Case(
        lambda size: te.Linear(32, size, params_dtype=torch.bfloat16),
        recipes.Float8CurrentScaling,
        HOPPER,
        24,
        ("layer", "dgrad", "out_features", 16),
        32,
    ),
    "fprop of fc2": Case(
        lambda size: te.LayerNormMLP(32, size, params_dtype=torch.bfloat16),
        recipes.Float8CurrentScaling,
        HOPPER,
        40,
        ("layer.fc2", "fprop", "in_features", 16),
        48,
    ),
    "FP8 blocks": Case(linear(32, 48), recipes.Float8BlockScaling, HOPPER, 40, ("layer", "wgrad", "tokens", 16), 48),
    "a GroupedLinear": Case(
        lambda tokens: te.GroupedLinear(2, 32, 48, params_dtype=torch.bfloat16),
        recipes.Float8CurrentScaling,
        HOPPER,
        20,
        ("layer.gemm_0", "wgrad", "tokens", 16),
        32,
    ),
    "MXFP8": Case(linear(32, 64), recipes.MXFP8BlockScaling, BLACKWELL, 40, ("layer", "fprop", "tokens", 32), 64),
}


def train(net: torch.nn.ModuleDict, case: Case, size: int) -> None:
    tokens = size if case.told[2] == "tokens" else 32
    several = isinstance(net["layer"], te.GroupedLinear)
    x = torch.randn(tokens * (1 + several), 32, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=True, recipe=case.recipe()):
        out = net["layer"](x, [tokens, tokens]) if several else net["layer"](x)
    out.sum().backward()


def model(case: Case, size: int) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"layer": case.make(size)})


@pytest.mark.few
@pytest.mark.parametrize("name", CASES)
def test_the_exception_says_where_and_what_works(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    stand_for(case.capability)
    config = statistics(layers=["another" if name == "wgrad" else "all"])
    with pytest.raises(Exception) as alone:  # noqa: PT011
        train(model(case, case.size), case, case.size)
    with pytest.raises(type(alone.value)) as raised:
        net = model(case, case.size)
        with InspectSession(config, model=net, log_dir=tmp_path, allow_unmatched=True):
            train(net, case, case.size)
    (note,) = raised.value.__notes__
    layer, gemm, dimension, multiple = case.told
    assert f"the layer {layer!r} cannot run the GEMM {gemm}: {dimension}" in note
    assert f"is {case.size}, but must be a multiple of {multiple} for" in note
    assert note.endswith(f"support: {case.next_size}.")
    for size in range(case.size + 1, case.next_size):
        with pytest.raises(Exception):  # noqa: B017, PT011
            train(model(case, size), case, size)
    train(model(case, case.next_size), case, case.next_size)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layer_that_is_recomputed_in_the_backward(tmp_path: Path, use_reentrant: bool) -> None:
    """A checkpoint hands other tensors to the backward than the module's own."""
    case = CASES["wgrad"]
    net = model(case, case.size)
    x = torch.randn(case.size, 32, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError) as raised, InspectSession(statistics(), model=net, log_dir=tmp_path):
        with te.autocast(enabled=True, recipe=case.recipe()):
            out = te.checkpoint(net["layer"], x, use_reentrant=use_reentrant)
        out.sum().backward()
    assert "the layer 'layer' cannot run the GEMM wgrad" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (lambda **keywords: te.Linear(32, 64, parallel_mode="column", **keywords), 20),
        (lambda **keywords: te.Linear(64, 32, parallel_mode="row", **keywords), 10),
        (lambda **keywords: te.LayerNormMLP(32, 128, set_parallel_mode=True, **keywords), 20),
    ],
    ids=["column", "row", "LayerNormMLP"],
)
def test_with_sequence_parallelism_a_gemm_has_the_tokens_of_all_ranks(
    make: Callable[..., torch.nn.Module], tokens: int, tmp_path: Path
) -> None:
    """The operand is split over tokens: each of two ranks has ten of them."""
    stand_for(HOPPER)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = torch.distributed.new_group([0, 1])
        net = torch.nn.ModuleDict({"layer": make(tp_group=group, tp_size=2, sequence_parallel=True)})
        with pytest.raises(ValueError) as raised, InspectSession(statistics(), model=net, log_dir=tmp_path):  # noqa: PT011
            with te.autocast(recipe=recipes.Float8CurrentScaling()):
                net["layer"](torch.randn(10, 32))
    finally:
        torch.distributed.destroy_process_group()
    assert f"is {tokens}, but must be a multiple of 8 for" in raised.value.__notes__[0]


OTHERS = {
    "an option": (
        lambda: te.Linear(32, 32, save_original_input=True, params_dtype=torch.bfloat16),
        (32, 32),
        "the layer 'layer' (Linear)",
        recipes.DelayedScaling,
    ),
    "a wrong size": (
        lambda: te.LayerNormLinear(32, 48, params_dtype=torch.bfloat16),
        (32, 16),
        "the layer 'layer' (LayerNormLinear)",
        recipes.Float8CurrentScaling,
    ),
    "without a recipe": (lambda: te.Linear(32, 48), (32, 16), "the layer 'layer' (Linear)", None),
    "te.ops": (lambda: te.ops.BasicLinear(32, 48), (32, 16), "the layer 'layer' (BasicLinear)", None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_exception_of_transformer_engine_names_the_layer(name: str, tmp_path: Path) -> None:
    make, shape, where, recipe = OTHERS[name]
    net = torch.nn.ModuleDict({"layer": make()})
    x = torch.randn(*shape, dtype=next(net.parameters()).dtype, requires_grad=True)
    with (
        pytest.raises(Exception) as raised,  # noqa: PT011
        InspectSession(statistics(), model=net, log_dir=tmp_path, allow_unmatched=True),
        te.autocast(enabled=recipe is not None, recipe=recipe and recipe()),
    ):
        net["layer"](x)
    assert raised.value.__notes__ == [f"te-precision-callbacks: raised in the forward of {where}."]


def test_loading_a_state_is_not_the_forward_of_a_layer(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"layer": te.Linear(32, 48)})
    with (
        pytest.raises(RuntimeError, match="size mismatch") as raised,
        InspectSession(statistics(), model=net, log_dir=tmp_path, allow_unmatched=True),
    ):
        net["layer"].load_state_dict(te.Linear(16, 48).state_dict())
    assert not hasattr(raised.value, "__notes__")


def test_attention_is_named_too(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"core": te.DotProductAttention(2, 16)})
    q = torch.randn(8, 1, 2, 16, dtype=torch.bfloat16)
    with (
        pytest.raises(Exception) as raised,  # noqa: PT011
        InspectSession(statistics(), model=net, log_dir=tmp_path, allow_unmatched=True),
    ):
        net["core"](q, q[:, :, :1], q)
    assert "of the layer 'core' (DotProductAttention)" in raised.value.__notes__[0]


def test_an_exception_of_the_script_has_no_note(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"layer": te.Linear(32, 24, params_dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="script") as raised, InspectSession(statistics(), model=net, log_dir=tmp_path):
        raise ValueError("of the script")
    assert not hasattr(raised.value, "__notes__")


def test_a_session_that_is_stopped_by_hand_explains_too(tmp_path: Path) -> None:
    case = CASES["wgrad"]
    net = model(case, case.size)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path).start()
    with pytest.raises(RuntimeError) as raised:
        try:
            train(net, case, case.size)
        finally:
            session.stop()
    assert "the layer 'layer' cannot run the GEMM wgrad" in raised.value.__notes__[0]
