"""The search on models with planted layers: its findings, its files, and that it leaves no trace."""

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


@pytest.mark.parametrize(("recipe", "place"), [("current", 2), pytest.param("nvfp4", 0, marks=pytest.mark.extended)])
def test_a_planted_layer_and_its_gemm_come_first(recipe: str, place: int) -> None:
    with on_gpu_of(recipe):
        model, _, data = trained(recipe, steps=0)
        batch = [next(data)]
        healthy = find(model, batch, low_share=1, cosine=None).all_low.error
        plant(model.blocks[place])
        result = find(model, batch, low_share=0.85, cosine=None)
        first = {level: next(e for e in result.measured if e.level == level) for level in ("block", "layer", "gemm")}
        assert first["block"].name == f"blocks.{place}"
        assert first["layer"].name == f"blocks.{place}.up"
        assert first["gemm"].name == f"blocks.{place}.up fprop"
        assert "fprop" in result.high[f"blocks.{place}.up"]
        assert result.low_share >= 0.85
        closed = (result.all_low.error - result.effect.error) / (result.all_low.error - healthy)
        assert closed > 0.8
        assert result.frontier[0].kept == ""


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), [(2, "layernorm_mlp.fc1")])
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
    first = {level: next(e for e in result.measured if e.level == level).name for level in ("layer", "gemm")}
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


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.extended)])
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


def test_the_effect_is_that_of_gradients_by_hand() -> None:
    model, _, data = trained(blocks=2, dtype=torch.float32)
    model.dropout.p = 0.0
    batch = next(data)
    gradients = []
    for output in (model, lambda inputs: high_output(model, inputs)):
        model.zero_grad()
        (output(batch[0]).float() - batch[1]).square().mean().backward()
        gradients.append([parameter.grad.double().flatten() for parameter in model.parameters()])
    low, high = gradients
    sizes = torch.tensor([float(len(gradient)) for gradient in high])
    cosines = torch.tensor([torch.cosine_similarity(a, b, dim=0) for a, b in zip(low, high, strict=True)])
    errors = torch.tensor([(a - b).square().sum() / b.square().sum() for a, b in zip(low, high, strict=True)])
    found = find(model, [batch]).all_low
    assert found.cosine == pytest.approx(float((cosines * sizes).sum() / sizes.sum()), abs=2e-5)
    assert found.error == pytest.approx(float((errors * sizes).sum() / sizes.sum()), rel=1e-3)


def high_output(model: Net, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs.to(model.dtype)
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


class _Listed(torch.optim.SGD):
    """Keeps its state in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                (sums,) = self.state[parameter].setdefault("sums", [torch.zeros_like(parameter)])
                parameter.sub_(sums.add_(parameter.grad), alpha=1e-3)


def test_an_assigned_buffer_a_parameter_outside_and_state_in_a_list_are_put_back() -> None:
    model, _, data = trained(blocks=1, steps=0)
    model.register_buffer("average", torch.zeros(HIDDEN))
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    optimizer = _Listed([*model.parameters(), temperature])

    def closure(batch: Any) -> torch.Tensor:
        model.average = 0.9 * model.average + 0.1 * batch[0].float().mean(0)
        return closure_of(model)(batch) * temperature.exp()

    closure(next(data)).backward()
    optimizer.step()
    buffer = model.average
    sums = [sums for state in optimizer.state.values() for sums in state["sums"]]
    before = [tensor.detach().clone() for tensor in (buffer, temperature, *sums)]
    search(model, closure, data, optimizer=optimizer, low_share=0.5, seeds=1, steps=2, progress=False)
    assert model.average is buffer
    assert all(map(torch.equal, before, (buffer, temperature, *sums)))


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
    names = {entry.name for entry in result.measured if entry.level != "gemm"}
    assert "blocks.0.up + blocks.1.up" in names
    assert not any(name.endswith((".fc1", ".up")) and " + " not in name for name in names)
    assert result.high.get("blocks.0.up") == result.high.get("blocks.1.up")
    with pytest.raises(SearchError, match=r"together='layers.*' matches no layer. Layers: blocks.0.up,"):
        find(model, data, together=[r"layers\.\d+"])


# ---------------------------------------------------------------------- passes, time, files


@pytest.mark.extended
def test_the_number_of_passes_keeps_its_bound() -> None:
    """Of a healthy model, and without an optimizer."""
    model, _, data = trained(blocks=2)
    result = find(model, data, sweep_batches=2)
    assert result.confirmation is None
    errors = [entry.effect.error for entry in result.measured if entry.level == "layer"]
    assert max(errors) < 6 * min(errors)
    blocks, layers, points = 2, 8, len(result.frontier)
    assert result.passes <= 2 * (4 + blocks + layers + 30 + points.bit_length() + 1)


@pytest.mark.extended
def test_a_folder_of_an_earlier_search_changes_no_result(tmp_path: Path) -> None:
    """Of another learning rate, whose final losses are others."""
    confirmed = []
    for rate in (1e-3, 1.0):
        for folder in (tmp_path / "one", None):
            model, optimizer, data = trained(blocks=1)
            optimizer.param_groups[0]["lr"] = rate
            result = find(model, data, optimizer=optimizer, seeds=1, steps=2, folder=folder)
            confirmed.append(result.confirmation)
            if folder is not None:
                assert json.loads((folder / "search.json").read_text())["passes"] == result.passes
    assert confirmed[0] == confirmed[1] != confirmed[2] == confirmed[3]


def test_without_time_nothing_is_chosen() -> None:
    model, _, data = trained(blocks=2)
    with pytest.raises(SearchError, match=r"max_time= was over before the blocks were measured"):
        find(model, data, max_time=0)


@pytest.mark.extended
def test_one_seed_cannot_decide(tmp_path: Path) -> None:
    model, optimizer, data = trained(blocks=2)
    result = find(model, data, optimizer=optimizer, seeds=1, steps=4, folder=tmp_path)
    assert result.confirmation is not None
    assert result.confirmation.choice.decision == "undecided"


# ---------------------------------------------------------------------- confirmation


@pytest.mark.extended
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
        if kind == "drifts slowly":
            return loss * (1 + 5e-4 * next(calls))
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


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "not deterministic",
            r"not deterministic: two runs .* differ by 0\.\d+ in the loss and by 0\.0(9|899) in the",
        ),
        ("drifts slowly", r"not deterministic: two runs .* differ by 0\.\d+ in the loss"),
        ("steps", r"failed: RuntimeError: .*Return the loss of the batch.* the search .* steps optimizer="),
        ("memory", r"out of memory in the search; the state of the training was put back"),
        ("no loss", r"'float' object has no attribute 'backward'.* Return the loss of the batch, a tensor with one"),
        ("backward", r"backward through the graph a second time.*; the search runs the backward"),
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
    frontier = find(model, batches(), cosine=0.9).frontier
    assert "head" in [point.kept for point in frontier]
    shares = [point.low_share for point in frontier]
    assert shares == sorted(set(shares), reverse=True), "each group adds its own GEMMs"
    assert shares[-1] == pytest.approx(0)
