"""Verdicts on recorded runs, on logs that Transformer Engine's own features have written; on runs of several ranks."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from typer.testing import CliRunner, Result

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.cli import app
from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose
from te_precision_callbacks.diagnosis.command import KnownFindingsError, known_line, leave_out, read_known
from te_precision_callbacks.runs import RunError
from te_precision_callbacks.session import InspectSession
from tests.compare.recorded import append
from tests.conftest import statistics
from tests.diagnosis.conftest import Planted
from tests.diagnosis.planted import train
from tests.features.plain import THEIRS, plain
from tests.runs.making import RunWriter


def called(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def refusal(*arguments: object) -> str:
    error = called(*arguments).exception
    assert isinstance(error, PrecisionDebugError)
    return str(error)


def test_json_has_the_finding_with_all_its_parts(planted: Planted) -> None:
    stated = json.loads(called("diagnose", planted.folder, "--json").output)
    assert stated["verdict"].startswith("Problems found: 1 warning (")
    assert stated["checked"] > 5
    (finding,) = stated["findings"]
    assert (finding["rule"], finding["layers"], finding["tensor"], finding["since"]) == (
        "sibling",
        ["4.fc"],
        "gradient",
        0,
    )
    assert {"severity", "seen", "seen_at", "why", "remedy", "source", "disproof", "patch"} <= set(finding)
    assert all(set(item) == {"rule", "why", "collect", "essential"} for item in stated["not_checked"])


def test_a_run_without_a_step_says_that_it_has_none(tmp_path: Path) -> None:
    with InspectSession(model=te.Linear(32, 32), log_dir=tmp_path) as session:
        session.state_dict()
    result, stated = called("diagnose", tmp_path), json.loads(called("diagnose", tmp_path, "--json").output)
    assert (result.exit_code, result.output) == (3, "Not enough checked: no training step has run.\n")
    assert {(item["why"], item["collect"]) for item in stated["not_checked"]} == {("no training step has run", "")}


def test_a_run_without_numbers_and_a_plain_log(tmp_path: Path) -> None:
    """A run that has only the trainer's numbers has facts; a log of nvidia-dlfw-inspect has numbers alone."""
    net = te.Linear(32, 32)
    with InspectSession(statistics(start_step=5), model=net, log_dir=tmp_path / "run") as session:
        net(torch.ones(16, 32)).sum().backward()
        session.log({"loss": 1.0})
        session.step()
    result = called("diagnose", tmp_path / "run")
    assert (result.exit_code, result.output.splitlines()[0][:18]) == (3, "Not enough checked")
    log = tmp_path / "plain" / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    log.parent.mkdir(parents=True)
    line = "2026-11-22 13:01:44,718 - INFO - net.fc1_{}_cur_amax \t\t\t\t iteration={:06d} \t\t\t\t value={}"
    text = "".join(f"{line.format('gradient', 10 * step, '0.0000')}\n" for step in range(4))
    log.write_text(text)
    result = called("diagnose", log.parents[1])
    assert result.exit_code == 3, "with four decimals it may be a small number"
    log.write_text(f"{text}{line.format('activation', 30, '1.23456789')}\n")
    result = called("diagnose", log.parents[1])
    assert result.exit_code == 1
    assert "gradient of net.fc1: at step 20, all elements are 0" in result.output


def test_a_finding_of_a_rule_that_this_version_lacks_is_shown_as_recorded(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        for loss in (1.0, math.nan):
            net(torch.ones(16, 32)).sum().backward()
            session.log({"loss": loss})
            session.step()
    (known,) = (finding for finding in diagnose(tmp_path) if finding.rule == "nonfinite")
    for file in tmp_path.rglob("events-*.parquet"):
        table = pq.read_table(file)
        texts = [
            text and text.replace(known.rule, "rule-of-tomorrow").replace(known.title, "a problem of tomorrow")
            for text in table["data"].to_pylist()
        ]
        column = table.schema.get_field_index("data")
        pq.write_table(table.set_column(column, table.schema.field(column), [texts]), file)
    verdict = diagnose(tmp_path)
    (found,) = (finding for finding in verdict if finding.rule == "rule-of-tomorrow")
    assert (found.seen, found.severity, found.since, found.remedy) == ("loss is nan", "error", 1, known.remedy)
    assert "rule-of-tomorrow" not in verdict.checked
    assert "loss is nan" in called("diagnose", tmp_path).output


LINE = "2026-11-22 13:01:44,718 - INFO - layers.{}.fc2_{}_{} \t\t\t\t iteration={:06d} \t\t\t\t value={:.4f}\n"


def write_log(folder: Path, lines: Iterable[str], name: str = "statistics_logs") -> None:
    log = folder / f"nvdlfw_inspect_{name}" / "nvdlfw_inspect_globalrank-0.log"
    log.parent.mkdir()
    log.write_text("".join(lines))


@pytest.mark.parametrize(
    ("least", "largest", "ordinary", "expected"),
    [
        (0.0039, 64.0, 4.0, 0),
        (0.0039, 256.0, 4.0, 0),
        (0.0039, 2048.0, 4.0, 0),
        (119.0, 121.0, 100.0, 0),
        (0.0039, 65536.0, 4.0, 1),
    ],
    ids=["power of two", "and no code", "larger", "codes of E8M0", "far larger"],
)
def test_scales_of_a_plain_log_are_compared_as_they_are(
    tmp_path: Path, least: float, largest: float, ordinary: float, expected: int
) -> None:
    """The log does not show whether a number is a scale or MXFP8's code of one, and codes are never far apart."""
    scales = ((layer, (least, largest) if layer == 5 else (min(least, ordinary), ordinary)) for layer in range(6))
    write_log(
        tmp_path,
        (
            LINE.format(layer, "activation", statistic, 10 * step, value)
            for layer, ends in scales
            for step in range(5)
            for statistic, value in zip(("scale_inv_min", "scale_inv_max"), ends, strict=True)
        ),
    )
    verdict = diagnose(tmp_path)
    assert len(verdict) == expected, str(verdict)
    if expected:
        assert "16,400 times larger" in str(verdict)


def test_a_plain_log_does_not_show_whether_a_layer_has_a_backward(tmp_path: Path) -> None:
    layers = {0: ("activation", "gradient"), 1: ("activation",)}
    names = (f"2026-11-22 13:01:44,718 - INFO - Assigned layer name: layers.{layer}.fc2\n" for layer in layers)
    write_log(tmp_path, names, "logs")
    write_log(
        tmp_path,
        (
            LINE.format(layer, tensor, "cur_amax", 50 * step, 1 + step)
            for step in range(9)
            for layer, tensors in layers.items()
            for tensor in tensors
        ),
    )
    verdict = diagnose(tmp_path)
    assert "dead-gradient" in verdict.checked
    assert not verdict.wrong, str(verdict)


@pytest.mark.parametrize(
    ("line", "code"),
    [("sibling", 0), ("sibling 4.*", 0), ("sibling 5.*", 1), ("# sibling", 1), ("overflow", 1)],
)
def test_known_findings(planted: Planted, tmp_path: Path, line: str, code: int) -> None:
    known = tmp_path / "known.txt"
    known.write_text(f"# known\n\n{line}\n")
    result = called("diagnose", planted.folder, "--known", known)
    assert result.exit_code == code
    unused = "matches no finding" in " ".join(result.output.split())
    assert unused == (code == 1 and not line.startswith("#")), "a line for a finding that is no more is named"


def finding_of(*layers: str) -> Finding:
    texts = dict.fromkeys(("title", "tensor", "statistic", "seen", "why", "remedy", "patch", "disproof", "source"), "")
    steps = dict.fromkeys(("since", "until", "last_good", "checkpoint"))
    return Finding(rule="hole", severity="warning", layers=layers, **texts, **steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        (["hole"], True),
        (["hole h.0.fc1", "hole h.1.fc1", "hole h.12.fc1", "hole head"], True),
        (["hole h.0.fc1", "hole h.1.fc1", "hole head"], False),
        (["hole h.{0-1,12}.fc1, head"], True),
        (["hole h.{0-11}.fc1, head"], False),
        (["hole *.{0-1,12}.fc?,head"], True),
        (["hole h.*, head"], True),
        (["hole h.*", "overflow head"], False),
    ],
)
def test_lines_of_a_rule_cover_a_finding_together(tmp_path: Path, lines: list[str], known: bool) -> None:
    (tmp_path / "known.txt").write_text("\n".join(lines))
    verdict = Verdict((finding_of("h.0.fc1", "h.1.fc1", "h.12.fc1", "head"),), ("hole",))
    left, count, unused = leave_out(read_known(tmp_path / "known.txt"), verdict)
    assert (len(left), count, bool(unused)) == ((0, 1, False) if known else (1, 0, True))


IGNORED = "  to ignore it, add to a --known file: "


def test_the_line_of_a_finding_leaves_it_out(planted: Planted, tmp_path: Path) -> None:
    many = finding_of(*(f"h.{number}.fc1" for number in range(0, 40, 2)), *(f"x{chr(97 + n)}" for n in range(20)))
    for finding in (many, finding_of(), finding_of("a, b")):
        (tmp_path / "known.txt").write_text(known_line(finding))
        assert leave_out(read_known(tmp_path / "known.txt"), Verdict((finding,)))[1] == 1, known_line(finding)
    printed = next(line for line in called("diagnose", planted.folder).output.splitlines() if line.startswith(IGNORED))
    (tmp_path / "known.txt").write_text(printed.removeprefix(IGNORED))
    result = called("diagnose", planted.folder, "--known", tmp_path / "known.txt")
    assert (result.exit_code, "leaves out 1 known finding." in " ".join(result.output.split())) == (0, True)
    (tmp_path / "known.txt").write_text("hole h.{0,2,4,6 and 16 more}.fc1")
    with pytest.raises(KnownFindingsError, match="is an incomplete list of layers"):
        read_known(tmp_path / "known.txt")


def test_wrong_known_findings(planted: Planted, tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("\nsiblings\n")
    stated = refusal("diagnose", planted.folder, "--known", known)
    assert f"{known}:2: there is no rule 'siblings'. Did you mean 'sibling'?" in stated
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("missing.txt", "No such file"),
        (".", "Is a directory"),
        ("binary", "can't decode byte 0xff"),
    ):
        stated = refusal("diagnose", planted.folder, "--known", tmp_path / name)
        assert f"--known {tmp_path / name} cannot be read: " in stated
        assert why in stated
        assert "Errno" not in stated


def test_what_cannot_be_read_is_told_first(tmp_path: Path) -> None:
    """A damaged run without findings in its readable part is not reported as healthy."""
    train(tmp_path, steps=3, defect=False)
    assert called("diagnose", tmp_path).exit_code == 0
    (values, *_) = tmp_path.rglob("values-*.parquet")
    values.write_bytes(values.read_bytes()[:100])
    result = called("diagnose", tmp_path)
    assert isinstance(result.exception, RunError), "so the exit code is 2"
    assert result.output.startswith("A part of the run cannot be read. Only the rest was checked:\n")
    assert "\nNot enough checked: " in result.output
    assert "checked; a part of the run cannot be read)." in " ".join(result.output.split())
    assert result.output.count("its rows are missing") == 1
    stated = json.loads(called("diagnose", tmp_path, "--json").output)
    assert stated["partial"]
    assert [unread in stated["notes"] for unread in stated["unread"]] == [True]
    next(tmp_path.rglob("run.json")).write_text("{")
    assert len(json.loads(called("diagnose", tmp_path, "--json").output)["unread"]) == 2


def test_a_damaged_run_is_shown_and_what_is_wrong_in_it_stays_wrong(tmp_path: Path) -> None:
    train(tmp_path, steps=3)
    next(tmp_path.rglob("states.parquet")).write_bytes(b"")
    assert "a part of the run cannot be read)." in " ".join(called("show", tmp_path).output.split())
    next(tmp_path.rglob("run.json")).write_text("{")
    assert called("diagnose", tmp_path).exit_code == 1
    assert called("show", tmp_path).output.startswith("Note: ")


USUAL = ("underflows%", "mse", "scale_inv_min", "scale_inv_max")
TENSORS = ["activation", "gradient", "weight"]


def verdict_on_log(
    folder: Path,
    recipe: Any,
    stats: tuple[str, ...] = USUAL,
    *,
    count: int = 4,
    odd: float = 1.0,
) -> Verdict:
    """The verdict on a log of three steps.

    Args:
        odd: a factor on a channel of the input of the layer 2.
    """
    features: dict[str, Any] = {
        "LogTensorStats": {"enabled": True, "tensors": TENSORS, "stats": ["min", "max"]},
        "LogFp8TensorStats": {"enabled": True, "tensors": TENSORS, "stats": list(stats)},
    }
    torch.manual_seed(0)
    with plain(
        features if stats is USUAL else {"LogFp8TensorStats": features["LogFp8TensorStats"]}, folder, folders=(THEIRS,)
    ) as logged:
        import nvdlfw_inspect.api as debug_api

        layers = [te.Linear(64, 64, name=f"h.{place}.linear") for place in range(count)]
        optimizer = torch.optim.SGD((parameter for layer in layers for parameter in layer.parameters()), lr=0.1)
        factor = torch.ones(64)
        factor[5] = odd
        for _ in range(4):
            x = torch.randn(64, 64)
            with te.autocast(recipe=recipe):
                for place, layer in enumerate(layers):
                    x = x + layer(x * factor if place == 2 else x)
                    x = torch.nn.functional.layer_norm(x, (64,))
            (x - 1).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            debug_api.step()
    logs = folder / "nvdlfw_inspect_statistics_logs"
    logs.mkdir(exist_ok=True)
    lines = [
        f"2026-03-01 09:30:00,718 - INFO - {name} \t\t\t\t iteration={step:06d} \t\t\t\t value={value:.4f}"
        for name, row in logged.rows.items()
        for step, value in row.items()
    ]
    (logs / "nvdlfw_inspect_globalrank-0.log").write_text("\n".join(lines) + "\n")
    return diagnose(folder)


LOSS = 'session.log({"loss": ...}) in each step, named for example loss, train_loss or train/loss'

RECIPES = {"delayed": DelayedScaling(), "current": Float8CurrentScaling(), "blocks": Float8BlockScaling()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rules_with_equivalents_are_checked(recipe: str, tmp_path: Path) -> None:
    result = verdict_on_log(tmp_path, RECIPES[recipe])
    assert not result.findings, str(result)
    assert {"sibling", "dead-gradient", "growth"} <= set(result.checked)
    assert {item.collect for item in result.not_checked if item.rule == "nonfinite" and item.essential} == {LOSS}
    assert "underflow" in result.checked, "also without underflow_norm%, which Transformer Engine does not have"
    assert "stale-scale" in {item.rule for item in result.not_checked}, "which needs a recipe"


def test_one_of_27_alike_layers_loses_far_more(tmp_path: Path) -> None:
    """As in the log of a published training of 7B: 18.6 %, and less than 1 % in the others."""
    result = verdict_on_log(tmp_path, Float8CurrentScaling(), ("underflows%",), count=27, odd=2.0**14.7)
    assert [(finding.rule, finding.severity, finding.layers) for finding in result] == [
        ("sibling", "warning", ("h.2.linear",))
    ]
    assert "% of the elements round to 0, 0 % in similar layers" in result[0].seen


STEPS = 6


def counts(**since: int) -> dict[tuple[str, str, str], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    steps = np.arange(STEPS)
    return {
        (layer, "activation", "nonfinite_num"): np.where(steps >= since.get(layer, STEPS), 2.0, 0.0)
        for layer in ("fc1", "fc2")
    }


def recorded(folder: Path, of_ranks: Mapping[int | None, Mapping[str, int]], world: int = 4) -> Verdict:
    """The verdict on a run with inf and nan from a step on: rank -> layer -> step. None: reduced."""
    with RunWriter.begin(folder, world=world) as run:
        for rank, since in of_ranks.items():
            append(run, counts(**since), rank=rank)
        run.put_facts("layers", [{"layer": f"fc{place + 1}", "exec_fwd": place, "since": 0} for place in range(2)])
    return diagnose(folder)


@pytest.mark.processes
def test_each_rank_is_checked(tmp_path: Path) -> None:
    assert not recorded(tmp_path / "healthy", {rank: {} for rank in range(4)}).wrong
    (result,) = verdict = recorded(tmp_path / "last", {0: {}, 1: {}, 2: {}, 3: {"fc2": 4}})
    assert (result.rule, result.layers, result.ranks, result.since, result.until) == ("nonfinite", ("fc2",), (3,), 4, 5)
    assert (result.last_good, verdict.rank) == (3, None)
    assert str(verdict).endswith("(nonfinite, since step 4, on rank 3).")
    assert result.as_json()["ranks"] == [3]


@pytest.mark.processes
def test_what_ranks_have_alike_is_one_finding_since_the_first_of_them(tmp_path: Path) -> None:
    (result,) = recorded(tmp_path, {0: {}, 1: {"fc2": 3}, 2: {"fc1": 2, "fc2": 2}, 3: {"fc2": 3}})
    assert (result.layers, result.ranks) == (("fc1", "fc2"), (2, 1, 3)), "the numbers are of the first of them"
    assert (result.since, result.seen_at, result.until, result.last_good) == (2, 2, 5, 1)
    assert result.where == "on rank 2 and 2 more ranks"
    assert result.seen.startswith("2 elements are inf or nan; 1 more layer")


@pytest.mark.processes
def test_what_reduced_numbers_show_is_not_repeated_by_a_rank(tmp_path: Path) -> None:
    reduced: dict[int | None, dict[str, int]] = {None: {"fc1": 2}, 0: {"fc1": 5}, 1: {"fc1": 2}}
    (result,) = recorded(tmp_path / "the same", reduced)
    assert (result.layers, result.ranks, result.since) == (("fc1",), (), 2)
    two = recorded(tmp_path / "another layer", {None: {"fc1": 2}, 1: {"fc2": 3}})
    assert [(item.layers, item.ranks, item.since) for item in two] == [(("fc1",), (), 2), (("fc2",), (1,), 3)]


@pytest.mark.processes
def test_a_run_of_one_rank_names_none(tmp_path: Path) -> None:
    (result,) = recorded(tmp_path, {0: {"fc1": 1}}, world=1)
    assert (result.ranks, result.where) == ((), "")


@pytest.mark.parametrize("change", [{}, {"severity": "dire"}, {"title": "inf or nan in a tensor"}], ids=str)
@pytest.mark.processes
def test_a_finding_of_another_rank_may_come_late_or_damaged(tmp_path: Path, change: dict[str, str]) -> None:
    """The local values of rank 1 are recorded for the rule nonfinite, so that its finding is not taken over."""
    with RunWriter.begin(tmp_path) as run, RunWriter(run.folder.parent, run.segment, rank=1) as other:
        for iteration in range(5):
            run.add_scalars(iteration, {"loss": 1.0 if iteration < 3 else float("nan")})
        run.flush()
        (first,) = diagnose(tmp_path)
        data = {**first.as_json(), "since": 2, "last_good": 1, "ranks": [1], **change}
        other.add_event("finding", "of rank 1", iteration=2, data=data)
        other.flush()
        (now,) = diagnose(tmp_path)
        assert (now.since, now.last_good, now.ranks) == ((3, 2, ()) if change else (2, 1, (1,)))
