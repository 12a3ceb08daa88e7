"""Several gloo processes: reduced values, the files of each rank, and the effects of a failure on one rank."""

import ast
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.cli import app
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs import open_run
from tests.forked import TIMEOUT, Running, ranks
from tests.lightning.models import log_of, logged_lines, marked_lines
from tests.session.files_script import CASES

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two ranks that have run all cases; in the last one the second rank fails."""
    folder = tmp_path_factory.mktemp("two")
    script = Path(__file__).with_name("distributed_script.py")
    first, second = ranks(script, [[str(rank), str(folder)] for rank in range(2)])
    assert first.returncode == 0, f"{first.stderr}\nrank 1:\n{second.stderr}"
    assert second.returncode != 0  # 1, or the abort of a thread of gloo's that did not end with the process
    return folder


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("world", [{0: 2.0, 1: 2.0, 2: 2.0}, None]),
        ("all", [{0: 2.0, 1: 2.0, 2: 2.0}] * 2),
        ("own group", [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 2.0, 2: 2.0}]),
        ("no reduction", [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0}]),
    ],
)
def test_statistics_are_reduced_over_the_chosen_ranks(
    two: Path, case: str, expected: list[dict[int, float] | None]
) -> None:
    for rank in range(2):
        if expected[rank] is None:
            assert not log_of(two / case, rank).exists(), "the numbers are those of rank 0, which writes them"
        else:
            assert maxima(two / case, rank) == expected[rank]
            assert not set().union(*marked_lines(two / case, rank).values()), "nothing is out of the ordinary"
    run = open_run(two / case)
    assert (run.notes, run.segments[0].world) == ((), 2)
    results = {}
    for row in run.series.to_pylist():
        if row["statistic"] == "max":
            table = run.values([row["series"]])
            results[row["rank"]] = dict(zip(table["iteration"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert results == ({None: expected[0]} if case in ("world", "all") else dict(enumerate(expected)))
    assert run.steps["iteration"].to_pylist() == [0, 1, 2]


def maxima(folder: Path, rank: int) -> dict[int, float]:
    return {
        step: value for (name, step), value in logged_lines(folder, rank).items() if name == "linear_activation_max"
    }


def written(folder: Path, of: str = "") -> list[Any]:
    return [ast.literal_eval((folder / f"{of}{rank}.txt").read_text()) for rank in range(2)]


DIFFERS = "the scale of delayed scaling differs between ranks"
NOT_REDUCED = "amaxes are not reduced over all ranks that share a layer"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("reduced", {}),
        ("own", {DIFFERS: "warning", NOT_REDUCED: "note"}),
        ("alone", {DIFFERS: "warning", NOT_REDUCED: "note"}),
    ],
)
def test_scales_by_rank(two: Path, case: str, expected: dict[str, str]) -> None:
    verdict = diagnose(two / f"scales {case}")
    assert {finding.title: finding.severity for finding in verdict if finding.tensor in ("activation", "")} == expected
    assert not [item for item in verdict.not_checked if item.rule == "stale-scale" and "ranks" in item.why]


def test_the_records_of_a_pipeline_have_the_layers_of_all_ranks(two: Path) -> None:
    run = open_run(two / "coverage")
    not_called = ["pp0.module_list", "pp1.module_list"]  # what torch computes between the modules is not seen
    assert run.ordered_layers == ["pp0.0", "pp1.0", *not_called]
    assert {row["scope"] for row in run.layers.to_pylist()} == {"pp0", "pp1", ""}  # the stages themselves are no layers
    assert {row["layer"] for row in run.gemms.to_pylist()} == {"pp0.0", "pp1.0", *not_called}
    assert {row["scope"] for row in run.series.to_pylist()} == {"pp0", "pp1"}


def test_rank_0_records_the_losses_of_the_last_stage(two: Path) -> None:
    _, known = written(two / "losses")
    # Up to the last collection step.
    assert list(open_run(two / "losses").metrics["loss"].values) == pytest.approx(known)


def test_errors_of_gemms_are_merged(two: Path) -> None:
    """The largest errors are kept, with the rank: one bad device is not averaged away."""
    first, second, merged, _ = (*written(two / "gemm errors, own"), *written(two / "gemm errors, merged"))
    assert first["gemm_kernel_ratio"] < 1 < second["gemm_kernel_ratio"] == merged["gemm_kernel_ratio"]
    assert first["gemm_kernel_error"] < second["gemm_kernel_error"] == merged["gemm_kernel_error"]
    assert [values["gemm_wrong_rank"] for values in (first, second, merged)] == [-1, 1, 1]
    share = (merged["gemm_gain"] - first["gemm_gain"]) / (second["gemm_gain"] - first["gemm_gain"])
    assert share == pytest.approx(0.8, abs=0.05), "of the squares, of operands that are twice as large"
    expected = (1 - share) * first["gemm_format_error"] ** 2 + share * second["gemm_format_error"] ** 2
    assert merged["gemm_format_error"] ** 2 == pytest.approx(expected, rel=0.01)
    results = [finding for finding in diagnose(two / "gemm errors, merged") if finding.rule == "wrong-gemm"]
    assert [finding.layers for finding in results] == [("linear",)]
    assert "only on rank 1" in results[0].seen


def test_layers_of_a_pipeline_and_experts_are_not_mixed(two: Path) -> None:
    """Both ranks have them at one path; Megatron's attributes give each one's place in the whole model."""
    lines = logged_lines(two / "stages", 0)
    assert {name: value for (name, _), value in lines.items() if name.endswith("activation_max")} == {
        "layers.0.0_activation_max": 1.0,
        "layers.1.0_activation_max": 2.0,
        **{f"mixture.experts_0_1.gemm_{index}_activation_max": 4.0 for index in range(2)},
        **{f"mixture.experts_2_3.gemm_{index}_activation_max": 5.0 for index in range(2)},
    }


@pytest.mark.parametrize("case", ["said", "mesh"])
def test_layers_at_equal_paths_have_the_numbers_of_one_process(two: Path, case: str) -> None:
    """Two stages, and four experts on two ranks: distinguished by ``scope=``, or by the dimension of a device mesh."""
    whole = logged_lines(two / "whole", 0)
    split = logged_lines(two / case, 0)
    in_one = {f"pp{stage}.blocks.0_": f"blocks.{stage}_" for stage in range(2)}
    if case == "said":
        in_one |= {f"ep{number // 2}.experts.gemm_{number % 2}_": f"experts.gemm_{number}_" for number in range(4)}
    names = {name: next(first for first in in_one if name.startswith(first)) for name, _ in split}
    expected = {key: value for key, value in whole.items() if key[0].startswith(tuple(in_one.values()))}

    results = {(name.replace(names[name], in_one[names[name]]), step): value for (name, step), value in split.items()}

    assert len(results) == len(split) == len(expected) >= 2 * (3 * 4 + 2 * 2)
    assert results == pytest.approx(expected, rel=1e-12)


LINEAR = 32 * 32
OF_STAGES = {
    **{f"pp0.0 {gemm} fp8": 16 * LINEAR for gemm in ("fprop", "wgrad")},
    **{f"pp1.0 {gemm} fp32": 16 * LINEAR * 2 for gemm in ("fprop", "wgrad")},
}
RUN_OF_SPLIT = ["up fprop", "up wgrad", *(f"down {gemm}" for gemm in GEMMS)]
NUMBERS = 2 * 64 * 32 + 32 + 64  # of the two layers' parameters


@pytest.mark.parametrize(
    ("case", "of", "expected"),
    [
        ("coverage", "", (OF_STAGES, "nan")),  # the loop calls modules of the model, not the model
        # Its shard under tensor parallelism, the whole weight under fully_shard; each product once.
        ("sharded", "tensor parallel ", {f"{product} fp32": 16 * 64 * 64 for product in RUN_OF_SPLIT}),
        ("sharded", "fully_shard ", {f"{product} fp32": 16 * 64 * 128 for product in RUN_OF_SPLIT}),
        ("reduced", "DDP ", {"float32": 4 * NUMBERS}),
        ("reduced", "DDP with a hook ", {"float16": 2 * NUMBERS}),
        ("reduced", "fully_shard in bfloat16 ", {"float32": 4 * NUMBERS}),
        ("reduced", "FSDP1 ", {"bfloat16": 2 * NUMBERS}),
        ("reduced", "tensor parallel ", {}),  # it reduces activations and their gradients alone
        # inf and nan of one rank stop all ranks before the step of their optimizers
        ("kept", "", (2, True, [(("pp1.linear",), "activation", 2)])),
    ],
)
def test_both_ranks_know_the_same(two: Path, case: str, of: str, expected: object) -> None:
    """Their products, and the bytes of gradients that they reduce, by type."""
    assert written(two / case, of) == [expected] * 2


def test_products_of_batches_of_other_sizes_are_added_up(two: Path) -> None:
    first = (16 + 48) * LINEAR
    low = {f"0 {gemm} fp8": first for gemm in ("fprop", "wgrad")}
    for products, count, share, parameters in written(two / "uneven"):
        assert products == {**low, **{f"1 {gemm} fp32": first for gemm in GEMMS}}
        # Each product once, although its size differs; and perhaps dgrad of the first layer, which is not run.
        assert 0 <= count - len(products) <= 1
        assert share == pytest.approx(2 / 5)
        assert parameters == 2 * 4


def test_a_rank_that_misses_a_step_mixes_no_batches(two: Path) -> None:
    assert logged_lines(two / "missed", 0) == {
        (f"linear_activation_{name}", step): step for step in range(45) for name in ("min", "max")
    }
    local = [step for step, marks in sorted(marked_lines(two / "missed", 0).items()) if marks]
    assert local == list(range(2, local[-1] + 1))
    assert 26 <= len(local) < 45, "they have met again"
    assert maxima(two / "missed", 1)[2] == 3, (
        "an iteration of rank 1 holds two steps of the optimizer, of which no other rank hears"
    )


@pytest.mark.parametrize(
    ("case", "at", "parts"),
    [
        ("stopped", 4, ["pp1", "nonfinite"]),  # what is found at the end of a step travels with the next one's numbers
        (
            "contract",
            3,
            [
                "fp8 is 50.0 %, required: >= 100 %",
                "pp1.linear fprop, wgrad: 50.0 % in FP32 (runs inside te.autocast(enabled=False))",
            ],
        ),
    ],
)
def test_a_finding_or_broken_contract_of_one_rank_stops_all_in_one_step(
    two: Path, case: str, at: int, parts: list[str]
) -> None:
    for step, text in written(two / case):
        assert step == at
        assert not [part for part in parts if part not in text], text


def test_the_first_rank_knows_where_it_began_on_another_one(two: Path) -> None:
    """Statistics are sent in step 5, and not before step 10, when the weights have nan too."""
    assert written(two / "origin")[0] == ("nonfinite", ("2",), "activation", 7, (1,))
    verdict = diagnose(two / "origin")
    assert (verdict[0].layers, verdict[0].since, verdict[0].ranks) == (("2",), 7, (1,))


def test_what_one_rank_alone_has_seen_is_in_the_verdict_on_the_recorded_run(two: Path) -> None:
    """The loss of rank 1, which is not recorded, is nan before rank 0's."""
    (finding,) = diagnose(two / "lost").wrong
    said = "loss is nan (nonfinite, since step 3, on rank 1)"
    assert str(finding) == said
    for folder in (two / "lost", two / "lost on one rank"):
        for text in ((folder / f"{rank}.txt").read_text() for rank in range(2)):
            assert said in text
            assert "\nProblems found: 1 error" in text, "that of the rank that has not found it too"
    assert (finding.last_good, finding.checkpoint, finding.until) == (2, 2, 4)


@pytest.mark.parametrize("reduce", [False, True])
def test_what_one_rank_alone_has_is_found(two: Path, reduce: bool) -> None:
    """Either by the rank's own numbers of each step, or by the numbers gathered when the run has ended."""
    folder = two / f"on one rank {reduce}"
    verdict = diagnose(folder)
    actual, *consequences = verdict.wrong
    assert [finding.rule for finding in consequences] == ["failed-run"] * reduce, "the script raises in one of the two"
    assert verdict.rank is None
    assert (actual.rule, actual.ranks, actual.since, actual.last_good) == ("nonfinite", (1,), 2, 1)
    assert str(actual).endswith("(nonfinite, since step 2, on rank 1)")
    live = [(folder / f"{rank}.txt").read_text() for rank in range(2)]
    assert [text.count("\nError: ") for text in live] == [0, 1]
    assert "(nonfinite, since step 2, on rank 1). What to do: " in live[1]
    said = live[0].splitlines()[0]
    assert said.startswith("Problems found: 1 error" if reduce else "Not enough checked: ")
    assert "checked; only local values of rank 0)." in said
    assert ("finding", 1) in [(row["kind"], row["rank"]) for row in open_run(folder).events.to_pylist()]
    result = CliRunner().invoke(app, ["diagnose", str(folder)])
    assert result.exit_code == 1
    assert " on rank 1; last step without the problem: 1" in " ".join(result.output.split())


def test_what_a_failing_rank_had_gathered_is_its_own(two: Path) -> None:
    """And the other rank's, where the collective has failed, under its iteration."""
    assert maxima(two / "one fails", 0) == {0: 2.0, 1: 2.0, 2: 1.0}
    assert maxima(two / "one fails", 1) == {0: 2.0, 1: 2.0, 2: 2.0}
    lines = logged_lines(two / "one fails", 1)
    assert [lines["linear_activation_l1_norm", step] for step in range(3)] == [1536.0, 1536.0, 1024.0], (
        "over both ranks, and the last one of this rank alone"
    )
    for rank in range(2):
        assert marked_lines(two / "one fails", rank) == {0: set(), 1: set(), 2: {f"rank={rank}"}}


# --- files, and how often a rank waits for the disk ---


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    done = Running(Path(__file__).with_name("files_script.py"), [str(folder)]).end()
    assert done.returncode == 0, done.stderr
    return folder


def made(folder: Path, case: str) -> Mapping[int, list[str]]:
    return {rank: (folder / case / f"{rank}.txt").read_text().splitlines() for rank in range(CASES[case][0])}


@pytest.mark.parametrize(("case", "status"), [("normal", 0), ("sigterm", -signal.SIGTERM)])
def test_rank_0_alone_makes_files(runs: Path, case: str, status: int) -> None:
    result = made(runs, case)
    assert ast.literal_eval((runs / case / "ended.txt").read_text()) == [status] * len(result)
    if case == "normal":
        assert not any(result[rank] for rank in result if rank)
    else:
        assert not result[1]
        (end,) = [row for row in open_run(runs / case / "run").events.to_pylist() if row["severity"] == "error"]
        assert (end["kind"], end["rank"], end["iteration"], end["text"]) == ("segment_ended", 0, 1, "SIGTERM")
    assert {"nvdlfw_inspect_logs", "nvdlfw_inspect_statistics_logs", "precision_records"} <= set(result[0])
    recorded = open_run(runs / case / "run").steps["iteration"].to_pylist()
    assert recorded == ([0, 1] if case == "sigterm" else [0, 1, 2])
    assert {name for name, _ in logged_lines(runs / case / "run", 0)} >= {"linear_activation_max"}


@pytest.mark.parametrize(("case", "wanted"), [("default", {"steps", "values"}), ("failure", {"events", "values"})])
def test_what_another_rank_writes_is_its_own(runs: Path, case: str, wanted: set[str]) -> None:
    """With the default config its numbers of the optimizer's step; its local values where it fails."""
    result = made(runs, case)
    files = {path for path in result[1] if Path(path).suffix}
    in_records = {path for path in files if "/seg-000/rank-00001/" in path}
    assert files - in_records == {"nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-1.log"}
    assert {Path(path).name.partition("-")[0] for path in in_records if "incomplete" not in path} >= wanted
    run = open_run(runs / case / "run")
    if case == "default":
        assert {row["statistic"] for row in run.series.to_pylist() if row["rank"] == 1} == {"gradients_below_eps%"}
    else:
        assert result[2] == result[3] == []
        assert result[1].count("fsync") < 10
        assert {row["rank"] for row in run.series.to_pylist()} == {None, 0, 1}
        events = [event for event in run.events.to_pylist() if event["rank"] == 1]
        assert [event["kind"] for event in events] == ["last_steps", "segment_ended"]
        assert events[1]["text"] == "ValueError: bad batch"


def test_all_ranks_write_if_they_are_told_to(runs: Path) -> None:
    for rank in range(2):
        assert log_of(runs / "all" / "run", rank).exists()
        assert (runs / "all" / "run" / "nvdlfw_inspect_logs" / f"nvdlfw_inspect_globalrank-{rank}.log").exists()


# --- a rank runs out of memory inside step() or attach(): the training's own collectives are as without a session ---

EVERY = int(os.environ.get("INJECT_EVERY", "797"))  # something fails at each of these places
LONGEST = 45.0  # seconds: less than the timeout of a message in a step, so no rank has waited; on a busy machine too
LONGEST_RUN = 4 * 3600.0 if "INJECT_EVERY" in os.environ else TIMEOUT  # seconds

Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4] if "INJECT_EVERY" in os.environ else [2])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("injecting_script.py")
    ended = ranks(script, [[str(rank), str(world), str(folder), str(EVERY)] for rank in range(world)], LONGEST_RUN)
    assert [rank.returncode for rank in ended] == [0] * world, "\n".join(rank.stderr[-2000:] for rank in ended)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert not [rank["failed"] for rank in results if "failed" in rank]
    return results


@pytest.mark.extended
def test_no_failure_reaches_the_training(outcomes: Outcomes) -> None:
    for results in zip(*(rank["places"] for rank in outcomes), strict=True):
        place = {name: results[0][name] for name in ("where", "victim", "place")}
        assert not any(results[0]["right"]), f"a sum of the training is wrong: {place}"
        errors = [result["errors"] for result in results]
        assert len({bool(error["attach"]) for error in errors}) == 1, (
            f"attach() has raised on one rank alone: {place} {errors}"
        )
        assert not any(error.get("step") for error in errors), f"step() has raised: {place} {errors}"
        assert max(result["slowest"] for result in results) < LONGEST, f"a rank has waited: {place}"
    assert {result["where"] for result in outcomes[0]["places"]} == {"attach", "step 0", "step 2"}
    assert any(result["raised"] for rank in outcomes for result in rank["places"])


@pytest.mark.extended
def test_ranks_that_are_apart_meet_again(outcomes: Outcomes) -> None:
    local = [rank["meet again"]["local"] for rank in outcomes]
    for again in (rank["meet again"] for rank in outcomes):
        assert again["right"]
        assert not any(again["errors"]), "step() has not raised"
        assert again["iterations"] == list(range(50))
        assert not any(again["local"][:2]), "until then all is reduced"
        assert all(again["local"][3:28]), "then the ranks are apart"
        assert not any(again["local"][40:]), "then they have met"
    assert all(of_rank[3:] == local[0][3:] for of_rank in local), "all in the same step"


@pytest.mark.extended
def test_a_strict_session_raises_on_all_ranks_in_the_same_step(outcomes: Outcomes) -> None:
    for number, rank in enumerate(outcomes):
        attached, first, second = rank["strict"]["errors"]
        assert (attached, first) == ("", "")
        assert "no room" in second
        assert number == 1 or "rank 1" in second.lower()
        assert rank["strict"]["right"]


@pytest.mark.extended
def test_a_rank_that_compiles_in_its_first_step_is_waited_for(outcomes: Outcomes) -> None:
    assert {tuple(rank["slow"]) for rank in outcomes} == {(True, False)}
