"""Saving and restoring what FP8 training keeps between steps: training that is repeated is the same to the last bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.layers import fp8_state
from tests.capability import any_capability, stand_for

ROWS, WIDTH = 128, 128
HOPPER, BLACKWELL = (9, 0), (10, 0)

RECIPES: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "delayed": (lambda: recipes.DelayedScaling(amax_history_len=4), HOPPER),
    "current": (recipes.Float8CurrentScaling, HOPPER),
    "block": (recipes.Float8BlockScaling, HOPPER),
    "MXFP8": (recipes.MXFP8BlockScaling, BLACKWELL),
    "NVFP4": (recipes.NVFP4BlockScaling, BLACKWELL),  # with stochastic rounding and random Hadamard transforms
}
BF16 = {"params_dtype": torch.bfloat16}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(WIDTH, WIDTH, **BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH, **BF16),
    "GroupedLinear": lambda: te.GroupedLinear(2, WIDTH, WIDTH, **BF16),
    "TransformerLayer": lambda: te.TransformerLayer(WIDTH, 2 * WIDTH, 4, fuse_qkv_params=True, **BF16),  # with dropout
    "ops": lambda: te.ops.Sequential(
        te.ops.LayerNorm(WIDTH, dtype=torch.bfloat16),
        te.ops.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
        te.ops.GELU(),
        te.ops.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
    ),
}


@pytest.fixture(autouse=True)
def own_gpu() -> Iterator[None]:
    with any_capability():
        yield


@dataclass
class Training:
    """A model in training, on the same batch in each step."""

    net: torch.nn.Module
    recipe: Any
    optimizer: torch.optim.Optimizer
    batch: torch.Tensor

    @classmethod
    def begin(cls, module: str, recipe: str, *, quantized_weights: bool = False) -> Training:
        make, capability = RECIPES[recipe]
        stand_for(capability)
        torch.manual_seed(0)
        made = make()
        with te.quantized_model_init(enabled=quantized_weights, recipe=made):
            net = MODULES[module]()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=False)
        return cls(net, made, optimizer, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))

    def step(self, **keywords: Any) -> list[torch.Tensor]:
        """The loss and the gradients."""
        self.optimizer.zero_grad()
        x = self.batch.clone().requires_grad_()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            if isinstance(self.net, te.GroupedLinear):
                out = self.net(x, [ROWS // 2, ROWS // 2], **keywords)
            else:
                out = self.net(x.view(-1, 2, WIDTH) if isinstance(self.net, te.TransformerLayer) else x, **keywords)
        loss = out.float().pow(2).mean()
        loss.backward()
        gradients = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        found = [tensor.detach().clone() for tensor in (loss, x.grad, *gradients) if tensor is not None]
        self.optimizer.step()
        return found

    def steps(self, count: int) -> list[torch.Tensor]:
        """All that some steps compute, and the state at their end."""
        found = [tensor for _ in range(count) for tensor in self.step()]
        return found + self.parameters() + self.recipe_state()

    def parameters(self) -> list[torch.Tensor]:
        """Of quantized ones the data and scales, as they lie in memory."""
        return [
            tensor.detach().clone()
            for parameter in self.net.parameters()
            for tensor in ([parameter] if not quantized(parameter) else vars(parameter).values())
            if isinstance(tensor, torch.Tensor)
        ]

    def recipe_state(self) -> list[torch.Tensor]:
        """Scales and amax histories as a checkpoint has them, and those that it leaves out."""
        saved = [value for name, value in self.net.state_dict().items() if name.endswith("_extra_state")]
        loaded = [pickle.loads(value.numpy().tobytes()) if value.numel() else {} for value in saved]
        metas = [vars(module).get("fp8_meta") or {} for module in self.net.modules()]
        states = [state for meta in metas for state in meta.values() if hasattr(state, "amax_history")]
        return tensors_in(loaded) + [t.clone() for state in states for t in (state.scale, state.amax_history)]

    def save(self) -> Callable[[], None]:
        """As its user does it: with parameters and optimizer, in place."""
        state, optimizer = fp8_state.save(self.net), copy.deepcopy(self.optimizer.state_dict())
        parameters = {name: value.detach().clone() for name, value in self.net.named_parameters()}

        def restore() -> None:
            self.optimizer.load_state_dict(copy.deepcopy(optimizer))
            with torch.no_grad():
                for name, parameter in self.net.named_parameters():
                    parameter.copy_(parameters[name])
            fp8_state.restore(state)

        return restore


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for member in inside for tensor in tensors_in(member)]


def quantized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, te.QuantizedTensor)


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
WEIGHTS = pytest.mark.parametrize("quantized_weights", [False, True], ids=["BF16 weights", "quantized weights"])


@EVERY_RECIPE
@WEIGHTS
@pytest.mark.parametrize("module", MODULES)
def test_steps_that_are_repeated_are_the_same_to_the_last_bit(
    module: str, recipe: str, quantized_weights: bool
) -> None:
    training = Training.begin(module, recipe, quantized_weights=quantized_weights)
    assert any(map(quantized, training.net.parameters())) == quantized_weights
    training.steps(2)
    restore = training.save()
    first = training.steps(2)
    for _ in range(2):
        restore()
        assert_equal(training.steps(2), first)


@pytest.mark.parametrize("recipe", ["delayed", "NVFP4"])
def test_parameters_and_optimizer_alone_do_not_repeat_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of delayed scaling have gone on, and the generator that stochastic rounding draws from."""
    training = Training.begin("Linear", recipe)
    training.steps(2)
    restore = training.save()
    first = training.step()
    training.batch *= 3
    training.step()
    training.batch /= 3
    monkeypatch.setattr(fp8_state, "restore", lambda state: None)
    restore()
    assert any(not torch.equal(*pair) for pair in zip(training.step(), first, strict=True))


@pytest.mark.parametrize(
    ("recipe", "other"),
    [(one, other) for one in RECIPES for other in (None, *RECIPES) if RECIPES[one][1] == RECIPES[other or one][1]],
)
def test_another_precision_is_tried_from_the_same_point(recipe: str, other: str | None) -> None:
    training = Training.begin("LayerNormMLP", recipe)
    training.steps(2)
    restore = training.save()
    first = training.steps(2)
    restore()
    own, training.recipe = training.recipe, None if other is None else RECIPES[other][0]()
    if other == recipe == "delayed":
        training.recipe = recipes.DelayedScaling(amax_history_len=4, margin=2, amax_compute_algo="most_recent")
    training.steps(2)
    training.recipe = own
    restore()
    assert_equal(training.steps(2), first)


@EVERY_RECIPE
@pytest.mark.parametrize("module", ["Linear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"])
def test_cached_weights_are_those_of_then(module: str, recipe: str) -> None:
    """A later micro-batch computes with the weight that the first one has quantized."""
    training = Training.begin(module, recipe)
    training.step(is_first_microbatch=True)
    restore = training.save()
    first = training.step(is_first_microbatch=False)
    training.step(is_first_microbatch=True)
    restore()
    assert_equal(training.step(is_first_microbatch=False), first)


@WEIGHTS
def test_it_is_the_same_tensors_afterwards(quantized_weights: bool) -> None:
    """So that optimizers and CUDA graphs that refer to them stay valid."""

    def addresses() -> list[int]:
        quantizers = [quantizer for held in net.quantizers.values() for quantizer in held]
        held = [*net._fp8_workspaces.values(), *net.parameters(), *quantizers]
        tensors = [tensor for thing in held for tensor in vars(thing).values() if isinstance(tensor, torch.Tensor)]
        states = [net.fp8_meta[direction] for direction in ("scaling_fwd", "scaling_bwd")]
        tensors += [tensor for state in states for tensor in (state.scale, state.amax_history)]
        return [tensor.data_ptr() for tensor in tensors] + list(map(id, held))

    training = Training.begin("Linear", "delayed", quantized_weights=quantized_weights)
    net: Any = training.net
    training.step(is_first_microbatch=True)
    before, restore = addresses(), training.save()
    training.step(is_first_microbatch=True)
    training.recipe = None if quantized_weights else recipes.Float8CurrentScaling()
    training.step(is_first_microbatch=True)
    restore()
    assert addresses() == before


def reduced() -> dict[str, int]:
    """In how many modules' amaxes the reduction of each direction and recipe is, of each of its three buffers."""
    state = te.quantization.FP8GlobalStateManager.quantization_state
    buffers = (state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer)
    lengths = [{key: len(held) for key, held in buffer.items()} for buffer in buffers]
    assert lengths[0] == lengths[1] == lengths[2]
    return lengths[0]


def test_a_layer_that_has_begun_delayed_scaling_since_begins_it_again() -> None:
    training = Training.begin("LayerNormMLP", "delayed")
    restore = training.save()
    first = training.steps(2)
    places = reduced()
    for _ in range(2):
        restore()
        assert reduced() == {}
        assert "scaling_fwd" not in vars(training.net)["fp8_meta"]
        assert_equal(training.steps(2), first)
        assert reduced() == places


def test_other_modules_keep_their_places_in_the_reduction() -> None:
    training = Training.begin("Linear", "delayed")
    restore = training.save()
    training.steps(1)
    other = Training(te.Linear(WIDTH, WIDTH, **BF16), training.recipe, training.optimizer, training.batch)
    other.steps(1)
    history = other.net.fp8_meta["scaling_fwd"].amax_history
    restore()
    training.steps(1)
    other.steps(1)
    assert (history[-2:] != 0).any(dim=1).all(), "both of its steps are in its history"


def test_a_state_outlives_a_reset_of_transformer_engine() -> None:
    training = Training.begin("Linear", "delayed")
    training.steps(2)
    restore = training.save()
    first = training.steps(2)
    te.quantization.FP8GlobalStateManager.reset()
    restore()
    assert_equal(training.steps(2), first)


def test_the_generators_of_the_tracker_are_put_back() -> None:
    tracker, net = te.distributed.CudaRNGStatesTracker(), torch.nn.Linear(2, 2)
    state = torch.get_rng_state()
    te.distributed.set_all_rng_states({"model-parallel-rng": state.clone()})
    try:
        saved = fp8_state.save(net)
        te.distributed.get_all_rng_states()["model-parallel-rng"] = torch.Generator().manual_seed(1).get_state()
        torch.rand(3)
        fp8_state.restore(saved)
        assert torch.equal(te.distributed.get_all_rng_states()["model-parallel-rng"], state)
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        te.distributed.set_all_rng_states(tracker.states_)


def test_a_quantized_parameter_that_was_replaced_is_an_error_and_nothing_is_changed() -> None:
    training = Training.begin("Linear", "delayed", quantized_weights=True)
    training.steps(1)
    state = fp8_state.save(training.net)
    training.steps(1)
    before = training.recipe_state()
    training.net.weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(fp8_state.Fp8StateError, match="weight of a Linear was replaced since"):
        fp8_state.restore(state)
    assert_equal(training.recipe_state(), before)


def test_transformer_engine_keeps_its_state_where_it_is_looked_for() -> None:
    """What is private there, as of 2.20.2. A name that is new may be of a state that is not saved."""
    state = te.quantization.FP8GlobalState
    of_autocast = {"fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "is_first_fp8_module"}
    of_autocast |= {"fp8_parameters", "high_precision_init_val", "fp8_graph_capturing", "autocast_depth"}
    assert set(state.__slots__) - of_autocast == {
        *("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer", "fp8_tensors_recompute_buffer"),
        *("autocast_arguments", "skip_fp8_weight_update_tensor"),
    }
    found: set[str] = set()
    for module in MODULES:
        training = Training.begin(module, "delayed")
        training.steps(1)
        parts = list(training.net.modules())
        before = [{name: id(value) for name, value in vars(part).items()} for part in parts]
        found |= {name for part in parts for name in vars(part)}
        training.recipe = None
        training.steps(1)
        changed = {
            n for part, had in zip(parts, before, strict=True) for n in vars(part) if had.get(n) != id(vars(part)[n])
        }
        assert changed <= {*fp8_state._OF_MODULE, "_module_groups"}
    assert found >= {*fp8_state._OF_MODULE}
    tracked = te.distributed.CudaRNGStatesTracker()
    assert tracked.states_ == {}
