"""The search on models with planted layers: its findings, its files, and that it leaves no trace."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.search import BudgetError, SearchError, SearchResult, search
from tests.forked import ranks
from tests.search import ranks_script
from tests.search.models import HIDDEN, RECIPES, Net, batches, closure_of, on_gpu_of, plant


def trained(
    recipe: str = "current", steps: int = 2, *, width: int = HIDDEN, **options: Any
) -> tuple[Net, torch.optim.Optimizer, Iterator[Any]]:
    model = Net(RECIPES[recipe](), width=width, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(width=width)
    train(model, optimizer, data, steps)
    return model, optimizer, data


def train(model: Net, optimizer: torch.optim.Optimizer, data: Iterator[Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = closure_of(model)(next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def find(model: Net, data: Any, **options: Any) -> SearchResult:
    return search(model, closure_of(model), data, **{"cosine": 0.995, "progress": False, **options})


# ---------------------------------------------------------------------- planted layers


@pytest.mark.parametrize(("recipe", "place"), [("current", 2), ("nvfp4", 0)])
def test_a_planted_layer_and_its_gemm_come_first(recipe: str, place: int) -> None:
    with on_gpu_of(recipe):
        model, _, data = trained(recipe, steps=0)
        batch = [next(data)]
        healthy = find(model, batch, low_share=1, cosine=None).all_low.error
        plant(model.blocks[place])
        result = find(model, batch, low_share=0.85, cosine=None)
        first = {level: next(e for e in result.measured if e.level == level) for level in ("block", "layer", "gemm")}
        assert first["block"].group.name == f"blocks.{place}"
        assert first["layer"].group.name == f"blocks.{place}.up"
        assert first["gemm"].group.name == f"blocks.{place}.up fprop"
        assert "fprop" in result.high[f"blocks.{place}.up"]
        assert result.low_share >= 0.85
        closed = (result.all_low.error - result.effect.error) / (result.all_low.error - healthy)
        assert closed > 0.8
        if recipe == "nvfp4":  # two of twelve layers, which cannot help the first block
            assert result.prior is not None
            assert result.prior.source.startswith("https://arxiv.org/")
            assert result.prior.low_share == pytest.approx(1 - 3 / 18)
            assert result.prior.effect.error > result.effect.error
            assert result.frontier[0].kept == ""
        else:
            assert result.prior is None


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [(0, "self_attention.layernorm_qkv"), (2, "layernorm_mlp.fc1")])
def test_a_layer_planted_in_a_transformer_comes_first(place: int, name: str) -> None:
    torch.manual_seed(0)
    options: Any = {"hidden_dropout": 0, "attention_dropout": 0, "params_dtype": torch.bfloat16}
    model = torch.nn.ModuleList(te.TransformerLayer(64, 256, 4, **options) for _ in range(3))
    planted = model[place].get_submodule(name.removesuffix(".fc1"))
    weights = [planted.fc1_weight] if name.endswith("fc1") else [getattr(planted, n) for n in planted.weight_names]
    with torch.no_grad():
        planted.layer_norm_weight[3] = 2.0**-18
        for weight in weights:
            weight[:, 3] *= 2.0**18

    def closure(hidden: Any) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=RECIPES["current"]()):
            for layer in model:
                hidden = layer(hidden)
        return hidden.float().square().mean()

    result = search(model, closure, [torch.randn(32, 2, 64).bfloat16()], low_share=0.85, progress=False)
    first = {level: next(e for e in result.measured if e.level == level).group.name for level in ("layer", "gemm")}
    assert first == {"layer": f"{place}.{name}", "gemm": f"{place}.{name} fprop"}
    assert result.effect.error < 0.2 * result.all_low.error


# ---------------------------------------------------------------------- no trace


def state_of(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state: dict[str, Any] = {f"model {name}": tensor.detach() for name, tensor in tensors.items()}
    state |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
    state["generators"] = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1]]
    for number, entry in enumerate(optimizer.state.values()):
        state |= {f"optimizer {number} {name}": value for name, value in entry.items()}
    for name, module in model.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            fp8 = getattr(module, "fp8_meta", {}).get(key)
            if hasattr(fp8, "amax_history"):
                state[f"{name} {key}"] = [fp8.scale.clone(), fp8.amax_history.clone()]
        state[f"{name} attributes"] = [getattr(module, "name", None), id(getattr(module, "fp8_meta", None))]
    state["regions"] = id(FP8GlobalStateManager.quantization_state)
    return state


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    return bool(a == b)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_search_in_a_training_changes_no_bit(recipe: str, tmp_path: Path) -> None:
    with on_gpu_of(recipe):
        losses = []
        for searches in (False, True):
            model, optimizer, data = trained(recipe, blocks=2)
            tensors = [p.grad for p in model.parameters()]
            before = {name: copied(value) for name, value in state_of(model, optimizer).items()}
            if searches:
                result = find(model, batches(1), optimizer=optimizer, steps=2, seeds=1, folder=tmp_path, cosine=0.9999)
                assert result.high
            after = state_of(model, optimizer)
            assert [name for name in {**before, **after} if not same(before[name], after[name])] == []
            assert all(p.grad is tensor for p, tensor in zip(model.parameters(), tensors, strict=True))
            losses.append(train(model, optimizer, data, 3))
        assert losses[0] == losses[1]


# ---------------------------------------------------------------------- the update


def test_the_cosine_of_the_update_is_that_of_steps_by_hand() -> None:
    """Adam, with its state of two steps."""
    model, optimizer, data = trained(blocks=2, dtype=torch.float32)
    model.dropout.p = 0.0
    batch = next(data)
    changes = []
    for recipe in (model.recipe, None):
        copied, stepped = copy.deepcopy((model, optimizer))
        before = [parameter.detach().clone() for parameter in copied.parameters()]
        optimizer_of_copy = type(optimizer)(copied.parameters(), lr=1e-3)
        optimizer_of_copy.load_state_dict(stepped.state_dict())
        copied.recipe = recipe or RECIPES["current"]()
        loss = closure_of(copied)(batch) if recipe else (high_output(copied, batch[0]) - batch[1]).square().mean()
        optimizer_of_copy.zero_grad()
        loss.backward()
        optimizer_of_copy.step()
        changes.append([p.detach() - old for p, old in zip(copied.parameters(), before, strict=True)])
    cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(*changes, strict=True)]
    sizes = [float(b.numel()) for b in changes[1]]
    expected = sum(float(c) * size for c, size in zip(cosines, sizes, strict=True)) / sum(sizes)
    found = find(model, [batch], optimizer=optimizer, seeds=0).all_low
    assert found.update == pytest.approx(expected, abs=2e-5)
    assert found.update != pytest.approx(found.cosine, abs=1e-3)


def high_output(model: Net, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs.to(model.dtype)
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


def test_an_update_by_the_gradient_alone_has_the_cosine_of_the_gradient() -> None:
    model, _, data = trained(blocks=2, dtype=torch.float32)
    result = find(model, data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seeds=0)
    for entry in result.measured:
        assert entry.effect.update == pytest.approx(entry.effect.cosine, abs=1e-4)


def test_an_optimizer_that_changes_nothing_has_no_cosine() -> None:
    model, _, data = trained(blocks=2)
    result = find(model, data, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), seeds=0)
    assert result.all_low.update is None
    assert result.effect.cosine >= 0.995


# ---------------------------------------------------------------------- budgets


def test_each_budget_holds() -> None:
    model, _, data = trained(blocks=2)
    batch = [next(data)]
    by_share = find(model, batch, low_share=0.7, cosine=None)
    assert 0.7 <= by_share.low_share < 1
    by_cosine = find(model, batch, cosine=0.999)
    assert by_cosine.effect.cosine >= 0.999
    cheaper = find(model, batch, cosine=0.995)
    assert len(cheaper.high) <= len(by_cosine.high)
    by_time = find(model, batch, cosine=None, extra_ms=0.001, device="h200")
    assert by_time.extra_ms is not None
    assert by_time.extra_ms <= 0.001


def test_a_budget_that_cannot_be_met_is_said_with_the_best() -> None:
    model, _, data = trained(blocks=2)
    with pytest.raises(BudgetError, match=r"cosine=0.99999 needs .* the best cosine found is 0\.9.*with 9\d"):
        find(model, data, cosine=0.99999, low_share=0.9)


def test_gemms_that_do_not_run_cost_nothing() -> None:
    """The first layer has no norm and no gradient of its input, so its dgrad is not among the multiply-adds."""
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 64))

    def closure(batch: Any) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=RECIPES["current"]()):
            return model(batch).square().mean()

    result = search(model, closure, [torch.randn(32, 32)], low_share=0.5, progress=False)
    shares = {gemm: macs / (2 + 3 * 2) for gemm, macs in {"0 fprop": 1, "0 wgrad": 1, "1 dgrad": 2}.items()}
    left = 1 - sum(share for name, share in shares.items() if name.split()[1] in result.high.get(name[0], ()))
    left -= sum(2 / 8 for gemm in ("fprop", "wgrad") if gemm in result.high.get("1", ()))
    assert result.low_share == pytest.approx(left)


def test_layers_that_belong_together_are_chosen_together() -> None:
    model, _, data = trained(blocks=2)
    plant(model.blocks[1], 12)
    result = find(model, data, cosine=0.999, together=[r"blocks\.(\d+)\.mlp\.fc[12]", r"blocks\.\d+\.up"])
    names = {entry.group.name for entry in result.measured if entry.level != "gemm"}
    assert "blocks.0.up + blocks.1.up" in names
    assert not any(name.endswith((".fc1", ".up")) and " + " not in name for name in names)
    assert result.high.get("blocks.0.up") == result.high.get("blocks.1.up")
    with pytest.raises(SearchError, match=r"together='layers.*' matches no layer. Layers: blocks.0.up,"):
        find(model, data, together=[r"layers\.\d+"])


# ---------------------------------------------------------------------- passes, time, files


def test_the_number_of_passes_keeps_its_bound() -> None:
    """Of a healthy model, and without an optimizer."""
    model, _, data = trained(blocks=2)
    result = find(model, data, sweep_batches=2)
    assert result.all_low.update is None
    assert result.confirmation is None
    errors = [entry.effect.error for entry in result.measured if entry.level == "layer"]
    assert max(errors) < 6 * min(errors)
    blocks, layers, points = 2, 8, len(result.frontier)
    assert result.passes <= 2 * (3 + blocks + layers + 50 + points.bit_length() + 1)


def test_an_interrupted_search_continues(tmp_path: Path) -> None:
    model, _, data = trained(blocks=2)
    batch = [next(data)]
    calls = 0

    def interrupted(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return closure_of(model)(batch)

    before = model.state_dict()
    with pytest.raises(KeyboardInterrupt):
        search(model, interrupted, batch, cosine=0.995, folder=tmp_path, progress=False)
    kept = json.loads((tmp_path / "search.json").read_text())["effects"]
    assert len(kept) == 4
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items() if "extra" not in name)
    resumed = find(model, batch, folder=tmp_path)
    whole = find(model, batch, folder=tmp_path / "whole")
    assert resumed.high == whole.high
    assert resumed.measured == whole.measured
    assert resumed.passes == whole.passes - len(kept)
    with torch.no_grad():
        model.blocks[0].up.weight *= 1.5
    with pytest.raises(SearchError, match=r"search.json is of another search: (loss|gradient) is .* Delete it"):
        find(model, batch, folder=tmp_path)


def test_a_search_is_confirmed_later_with_its_measurements(tmp_path: Path) -> None:
    model, optimizer, data = trained(blocks=2)
    batch = [next(data)]
    first = find(model, batch, optimizer=optimizer, seeds=0, folder=tmp_path)
    later = find(model, [*batch, next(data), next(data)], optimizer=optimizer, seeds=1, steps=2, folder=tmp_path)
    assert later.high == first.high
    assert later.passes == 3  # high precision, its noise, and the recipe of the file
    assert later.confirmation is not None


def test_without_time_nothing_is_chosen(tmp_path: Path) -> None:
    model, _, data = trained(blocks=2)
    with pytest.raises(SearchError, match=r"max_time= was over before the blocks were measured.*keeps 1 measurement"):
        find(model, data, max_time=0, folder=tmp_path)


# ---------------------------------------------------------------------- confirmation


def test_one_seed_cannot_decide(tmp_path: Path) -> None:
    model, optimizer, data = trained(blocks=2)
    result = find(model, data, optimizer=optimizer, seeds=1, steps=4, folder=tmp_path)
    assert result.confirmation is not None
    assert result.confirmation.choice.decision == "undecided"


def test_the_choice_closes_the_gap_of_the_loss() -> None:
    """Planted layers cost loss in all-low, which the choice gets back."""
    with on_gpu_of("nvfp4"):
        model, optimizer, data = trained("nvfp4", steps=0, width=128)
        plant(model.blocks[0])
        plant(model.blocks[2])
        result = find(model, data, optimizer=optimizer, seeds=1, steps=20, low_share=0.8, cosine=None)
        assert result.confirmation is not None
        gap = result.confirmation.low.difference
        assert gap > 0.01
        assert abs(result.confirmation.choice.difference) < 0.2 * gap


# ---------------------------------------------------------------------- bad input


def broken(kind: str, model: Net, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    closure = closure_of(model)
    calls = iter(range(1000))

    def call(batch: Any) -> Any:
        loss = closure(batch)
        if kind == "not deterministic":
            return loss * (1 + 0.3 * (next(calls) % 2))
        if kind == "drifts":
            return loss * (1 + 0.01 * next(calls))
        if kind == "steps":
            loss.backward()
            optimizer.step()
        if kind == "backward":
            loss.backward()
        if kind == "nan":
            return loss * math.nan
        if kind == "memory" and next(calls) == 5:
            raise torch.OutOfMemoryError("out of memory")
        if kind == "no loss":
            return loss.item()
        return loss

    return call


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "not deterministic",
            r"not deterministic: two runs .* differ by 0\.\d+ in the loss and by 0\.0(9|899) in the",
        ),
        ("drifts", r"not deterministic: two runs .* differ by 0\.\d+ in the loss"),
        ("steps", r"changed 2\d of 2\d parameters: it must not step the optimizer"),
        ("memory", r"out of memory in the search; the state of the training was put back"),
        ("no loss", r"must return the loss of a batch"),
        ("backward", r"The closure ran the backward"),
        ("nan", r"The loss is nan in high precision"),
    ],
)
def test_a_closure_that_cannot_be_searched_is_said_and_leaves_no_trace(kind: str, message: str) -> None:
    model, optimizer, data = trained(blocks=2)
    before = {name: copied(value) for name, value in state_of(model, optimizer).items()}
    with pytest.raises(SearchError, match=message):
        search(model, broken(kind, model, optimizer), data, cosine=0.99, optimizer=optimizer, steps=1, progress=False)
    after = state_of(model, optimizer)
    assert [name for name in before if not same(before[name], after[name])] == []


def test_wrong_options_and_models_are_refused() -> None:
    model, optimizer, data = trained(blocks=2)
    with pytest.raises(SearchError, match=r"batches= ended after 2, but the search needs 61: 1 for the sweep and 20"):
        find(model, [next(data), next(data)], optimizer=optimizer)
    with pytest.raises(SearchError, match=r"batches= cannot be read: TypeError: 'NoneType'"):
        find(model, None)
    for wrong, message in (
        ({"cosine": None}, "needs a budget"),
        ({"cosine": 2}, r"cosine=2 must be between 0 and 1"),
        ({"extra_ms": 1}, r"extra_ms= needs a device"),
        ({"steps": 0}, r"steps=0 must be 1 or more"),
        ({"together": ["("]}, r"together='\(' is not a regular expression"),
    ):
        with pytest.raises(OptionError, match=message):
            find(model, data, **wrong)
    with pytest.raises(SearchError, match="optimizer= has no parameter of the model"):
        find(model, data, optimizer=torch.optim.SGD(te.Linear(32, 32).parameters()))
    with pytest.raises(SearchError, match="no layers of Transformer Engine"):
        search(torch.nn.Linear(2, 2), lambda batch: batch, [1], cosine=0.9)
    with pytest.raises(SearchError, match="it has fuse_wgrad_accumulation=True"):
        fused = torch.nn.Sequential(te.Linear(32, 32, fuse_wgrad_accumulation=True))
        search(fused, lambda batch: batch, [1], cosine=0.9)
    plain = torch.nn.Sequential(te.Linear(32, 32))
    with pytest.raises(SearchError, match=r"does not enter te.autocast"):
        search(plain, lambda batch: plain(batch).square().mean(), [torch.ones(32, 32)], cosine=0.9)


# ---------------------------------------------------------------------- two ranks


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks compute on CPUs, with the reference backend")
def test_two_ranks_choose_alike_and_leave_no_trace(tmp_path: Path) -> None:
    done = ranks(Path(ranks_script.__file__), [[str(rank), str(tmp_path)] for rank in range(2)])
    said = "\n".join(rank.stderr[-2000:] for rank in done)
    assert all((tmp_path / f"{rank}.json").exists() for rank in range(2)), said
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["plain"] == first["searched"] != second["plain"]
    assert second["plain"] == second["searched"]
    assert first["high"]
    for name in ("high", "cosine", "differences"):
        assert first[name] == second[name]


# ---------------------------------------------------------------------- a block of one layer


class WithHead(Net):
    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe, blocks=2)
        self.head = te.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=self.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=self.recipe):
            return self.head(super().forward(hidden))


def test_a_block_of_one_layer_counts_once() -> None:
    model = WithHead(RECIPES["delayed"]())
    for _ in range(2):
        closure_of(model)(next(batches())).backward()
    leaves = [entry.group for entry in find(model, batches(), cosine=0.9).measured if not entry.is_split]
    assert "head" in [group.name for group in leaves]
    gemms = [gemm for group in leaves for gemm in group.switches]
    assert len(gemms) == len(set(gemms))
