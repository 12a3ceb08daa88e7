"""Several gloo processes: their statistics equal one process's that computes the same, and cost one message.

All that needs processes runs in one launch of two and one of four: see ranks_script.py. Their results are compared
here with the same models and batches in this process. A data-parallel rank's batch is a micro-batch here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.parameters.watch import is_due
from tests.conftest import feature
from tests.engine import ranks_script
from tests.engine.ranks_script import (
    PROGRAMS,
    TENSORS,
    Layers,
    Split,
    Values,
    config,
    normal,
    run_program,
    session,
)
from tests.engine.recipes import Pair, by_block, quantize
from tests.forked import ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the ranks compute on CPUs, with the reference backend"
)

# Results of the cases: rank -> case -> result.
Ranks = list[dict[str, Any]]


def launch(world: int, folder: Path) -> Ranks:
    arguments = [[str(rank), str(world), str(folder)] for rank in range(world)]
    said = "\n".join(rank.stderr[-2000:] for rank in ranks(Path(ranks_script.__file__), arguments))
    assert all((folder / f"{rank}.json").exists() for rank in range(world)), said
    results: Ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert not [rank["error"] for rank in results if "error" in rank], said
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch(4, tmp_path_factory.mktemp("four"))


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., list[Values]]:
    return lambda model, program: run_program(model, tmp_path, program)


def assert_equal(found: Values, expected: Values) -> None:
    """As exact as float32 GEMMs of another order allow; numbers of elements exactly."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        tensor, _, statistic = key.rpartition(" ")
        if statistic in ("numel", "nonfinite_num"):
            assert found[key] == value, key
        else:
            scale = abs(value) if statistic in ("l1_norm", "std") else expected[f"{tensor} std"]
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-5 * scale), key


# ---------------------------------------------------------------------- the same numbers as one process


@pytest.mark.processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_that_run_their_own_layers(two: Ranks, alone: Any, name: str) -> None:
    ranks = PROGRAMS[name]
    layers = sorted({layer for program in ranks for calls in program for layer, _ in calls})
    together = [[[call] for program in ranks for call in program[step]] for step in range(len(ranks[0]))]
    expected = alone(Layers(layers), together)
    for rank in two:
        for values, expected_values in zip(rank["programs"][name], expected, strict=True):
            assert_equal(values, expected_values)
    assert two[0]["programs"][name] == two[1]["programs"][name]


# Sums with a term on each tensor-parallel rank: no merging of statistics gives the sum's.
TERMS = {
    "tp": {"column dgrad", "norm_column dgrad", "mlp.fc1 dgrad", "row output", "second_row output", "mlp.fc2 output"},
}
TERMS["sp"] = {*TERMS["tp"], "copied wgrad"}


def split_tensors(found: Values, parallelism: str) -> Values:
    return {key: value for key, value in found.items() if key.rpartition(" ")[0] not in TERMS[parallelism]}


@pytest.mark.processes
@pytest.mark.parametrize("parallelism", ["tp", "sp"])
def test_of_terms_of_a_sum_all_are_counted(four: Ranks, alone: Any, parallelism: str) -> None:
    """In the step where one of the replicas rests."""
    model = Split()
    seen: dict[str, torch.Tensor] = {}
    model.row.register_forward_pre_hook(lambda module, inputs: seen.update(input=inputs[0].detach()))
    model.column.register_forward_hook(
        lambda module, inputs, output: output.register_hook(lambda grad: seen.update(grad=grad)) and None
    )
    (expected,) = alone(model, [[2]])
    result = four[0]["data_and_tensor_parallel"][parallelism][1]
    for tensor in TERMS[parallelism]:
        assert result[f"{tensor} numel"] == 2 * expected[f"{tensor} numel"]
        assert result[f"{tensor} l1_norm"] > 1.01 * expected[f"{tensor} l1_norm"]
    for tensor, left, right in (
        ("row output", seen["input"], model.row.weight.detach().T),
        ("column dgrad", seen["grad"], model.column.weight.detach()),
    ):
        terms = [x @ w for x, w in zip(left.chunk(2, 1), right.chunk(2, 0), strict=True)]
        l1_norm = sum(term.double().abs().sum().item() for term in terms)
        assert result[f"{tensor} l1_norm"] == pytest.approx(l1_norm, rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("parallelism", ["tp", "sp"])
def test_data_parallel_replicas_of_split_layers(four: Ranks, alone: Any, parallelism: str) -> None:
    expected = alone(Split(), [[0, 1], [2]])
    assert {key.split()[1] for key in expected[0]} == set(TENSORS)
    for rank in four:
        for result, values in zip(rank["data_and_tensor_parallel"][parallelism], expected, strict=True):
            assert_equal(split_tensors(result, parallelism), split_tensors(values, parallelism))


@pytest.mark.processes
def test_without_reduction_each_rank_has_its_own(two: Ranks, alone: Any) -> None:
    for number, rank in enumerate(two):
        expected = alone(Layers("a"), [[[("a", number)]]])
        assert_equal(rank["no_reduction"]["steps"][0], expected[0])
        assert rank["no_reduction"]["collectives"] == {}


@pytest.mark.processes
def test_inf_and_nan_of_one_rank_and_micro_batch_are_counted_and_left_out(two: Ranks) -> None:
    x = torch.stack([normal(seed, 8, 16) for seed in (0, 1, 10, 11)]).double()
    bad = x[3]
    bad[0, 0], bad[1, 1], bad[2, 2] = torch.inf, -torch.inf, torch.nan
    finite = x[x.isfinite()]
    expected = {
        "layers.a activation nonfinite_num": 3,
        "layers.a activation numel": x.numel(),
        "layers.a activation l1_norm": pytest.approx(finite.abs().sum().item(), rel=1e-6),
        "layers.a activation std": pytest.approx(finite.std().item(), rel=1e-6),
        "layers.a activation max": finite.max().item(),
        "layers.a output nonfinite_num": 3 * 16,
    }
    for rank in two:
        (result,) = rank["not_finite"]
        assert {name: result[name] for name in expected} == expected


@pytest.mark.processes
def test_rows_that_are_empty_or_due_on_one_rank_only(two: Ranks) -> None:
    for rank in two:
        for step, item in enumerate(rank["rows_that_differ"]):
            # The sum of nothing, 0, is larger than rank 1's.
            for layer, expected in {"empty on rank 0": [-3, -3, 8], "empty on both": [0, 0, 0]}.items():
                assert [item[f"{layer} weight {name}"] for name in ("mean", "max", "numel")] == expected
            assert (item["more on rank 1 activation min"], item["more on rank 1 activation max"]) == (-3, -3)
            assert item["equal activation std"] == 0.0
            in_turns = {key: value for key, value in item.items() if key.startswith("in turns")}
            assert in_turns == ({"in turns activation numel": 8} if step else {"in turns activation max": -3})
            histogram = item["histogram gradient exponent_histogram"]
            assert {e - 127: count for e, count in enumerate(histogram) if count} == {0: 1, 1: 2, 2: 2, 3: 1}


@pytest.mark.processes
def test_blocks_of_all_ranks_are_put_together(two: Ranks) -> None:
    for recipe in ranks_script.BLOCK_RECIPES:
        for step in range(3):
            weight = normal(step, 48, 32).numpy()
            activations = [x.numpy() for rank in range(2) for x in ranks_script.of_ranks(rank, step)]
            expected = {
                "activation": by_block(recipe, [Pair(x, quantize(recipe, x)) for x in activations]),
                "weight": by_block(recipe, [Pair(weight, quantize(recipe, weight, weight=True))]),
            }
            for rank in two:
                for tensor, statistics in expected.items():
                    for name, value in statistics.items():
                        assert rank["blocks"][step][f"{tensor} {recipe}_{name}"] == pytest.approx(value, rel=1e-12), (
                            name
                        )


# ---------------------------------------------------------------------- cost

_COPIES = {"numpy": 2}
"""Of the statistics, and of the row of the watch of every step, which a collection step reads too."""


@pytest.mark.processes
@pytest.mark.parametrize("tensors", [6, 102])
def test_a_step_ends_with_one_message_and_one_copy(two: Ranks, tensors: int) -> None:
    for rank in two:
        assert rank["costs"][str(tensors)] == {
            "watched": tensors,
            "inside": [{}, {}],  # nothing waits for the device in a forward or backward
            "at the end": [{"statistics": 1}, _COPIES],
        }


@pytest.mark.parametrize("fp8", [False, True])
def test_a_single_process_needs_no_collective_and_copies_once(tmp_path: Path, fp8: bool) -> None:
    model = Layers("ab")
    quantized = {"tensors": TENSORS[:3], "stats": ["underflows%", "mse", "scale_inv_max", "mxfp8_mse"], "freq": 1}
    chosen = {**config(), "fp8": feature("LogFp8TensorStats", ["all"], **quantized)} if fp8 else config()
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        model.run([("a", 0)])  # the process's first backward makes an empty tensor of Transformer Engine
    with session(model, tmp_path, config=chosen) as (running, _):
        for step in range(2):
            with ranks_script.Counted() as inside, te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
                model.run([("a", step), ("b", step)])
            with ranks_script.Counted() as at_end:
                running.step()
            assert (inside.kinds, dict(inside.waits)) == ({}, {})
            assert (at_end.kinds, dict(at_end.waits)) == ({}, _COPIES)


def plain(step: int, *, statistics: bool) -> dict[str, int]:
    """The messages of a step of a strict session; in few steps the ranks compare their parameters."""
    wanted = {"statistics": statistics, "parameters": is_due(step), "agreement": True}
    return {kind: 1 for kind, sent in wanted.items() if sent}


@pytest.mark.processes
def test_ranks_meet_in_the_steps_in_which_a_statistic_is_due_on_any(two: Ranks) -> None:
    for rank in two:
        assert "statistics" in rank["schedules"][0]
        assert rank["schedules"][1:] == [plain(step, statistics=step in (2, 3, 4)) for step in range(1, 6)]


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.processes
def test_after_a_failed_reduction_a_rank_is_on_its_own(two: Ranks, alone: Any) -> None:
    survivor, left = (rank["a_rank_leaves"] for rank in two)
    assert survivor["local"] == [False, True, True, True]
    assert survivor["messages"][1:] == [{"statistics": 1}, {}, {}], "nothing is sent after the one that failed"
    assert left["local"] == [False, True]
    for item, own, first in ((survivor, range(1, 4), 0), (left, [11], 10)):
        expected = alone(Layers("a"), [[[("a", seed)]] for seed in own])
        for step, values in enumerate(expected, start=1):
            assert_equal(item["steps"][step], values)
        assert item["steps"][0] == survivor["steps"][0], f"the step with batch {first} was reduced"


@pytest.mark.processes
def test_ranks_out_of_step_are_named_and_nothing_is_mixed(two: Ranks, alone: Any) -> None:
    for number, rank in enumerate(two):
        result = rank["out_of_step"]["another iteration"]
        iterations = [[1, 2, 3], [7, 8, 9]][number]
        assert result["iterations"] == [0, *iterations]
        assert result["local"] == [False, True, True, True]
        expected = alone(Layers("a"), [[[("a", 10 * number + seed)]] for seed in (1, 2, 3)])
        for step, values in enumerate(expected, start=1):
            assert_equal(result["steps"][step], values)
        named = [line for line in result["said"] if "out of step" in line]
        assert len(named) == (number == 0), "the first rank says it for all"
        if named:
            assert "The ranks are out of step: iteration 1 on rank 0; iteration 7 on rank 1." in named[0]
        assert result["messages"][1:] == [{"statistics": 1, "stamps": 1}, {}, {}]


@pytest.mark.processes
def test_a_rank_that_misses_a_step_early_mixes_no_batches(two: Ranks, alone: Any) -> None:
    """From the step on where the counts of optimizer steps differ; the third one shows that it is no optimizer that
    steps less often."""
    first, second = (rank["out_of_step"]["skips a step"] for rank in two)
    assert (first["local"], second["local"]) == ([False, *[True] * 5], [False, *[True] * 4])
    for rank, batches in ((first, [[1], [2], [3], [4], [5]]), (second, [[11, 12], [13], [14], [15]])):
        expected = alone(Layers("a"), [[[("a", seed) for seed in seeds]] for seeds in batches])
        for step, values in enumerate(expected, start=1):
            assert_equal(rank["steps"][step], values)
    (stated,) = [line for line in first["said"] if "steps since the start" in line]
    assert "optimizer steps since the start: 4 steps on rank 0; 5 steps on rank 1" in stated
    assert not [line for line in second["said"] if "steps since the start" in line]


@pytest.mark.processes
def test_ranks_with_other_schedules_are_named_and_nothing_is_mixed(two: Ranks) -> None:
    for number, rank in enumerate(two):
        result = rank["other_schedules"]
        (said,) = result["said"]
        assert "in different iterations: schedule 1 on rank 0; schedule 2 on rank 1." in said
        assert (result["own"], result["local"]) == ([number], True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("attempt", "kind", "said"),
    [
        ("another freq", "ConfigError", "all.transformer_engine.LogTensorStats.freq is 1 on one rank and 2 on another"),
        ("one more statistic", "ConfigError", "config 1 on rank 0; config 2 on rank 1"),
        ("other names", "ConfigError", "First difference: layer_names is None on one rank and 'upstream' on another."),
        ("another start_step", "SessionError", "iteration 0 on rank 0; iteration 5 on rank 1"),
        ("a section for no stage", "ConfigError", "the selector matches none of the 2 layers."),
        ("an exact name that no rank has", "ConfigError", "there is no layer 'stage7'. Did you mean 'stage1'?"),
        ("one rank's config is wrong", "ConfigError", "there is no feature 'NoSuchFeature'"),
        ("one rank's model is wrong", "SessionError", "not 'no model'"),
    ],
)
def test_what_one_rank_cannot_attach_raises_on_all(two: Ranks, attempt: str, kind: str, said: str) -> None:
    first, second = (rank["attaching"][attempt] for rank in two)
    where = "On rank 1: " if attempt.startswith("one rank's") else ""
    assert first == [kind, where + second[1]]
    assert second[0] == kind
    assert said in second[1]
