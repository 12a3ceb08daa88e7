"""``te-precision show``."""

import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.run_files import FOLDER, make_segment
from te_precision_callbacks.runs.summary import no_step_note
from te_precision_callbacks.views.report.data import page_data
from te_precision_callbacks.views.show import command
from te_precision_callbacks.views.show.view import NothingToShowError, RunView, sparkline
from tests.compare.recorded import Values, append, layers, record
from tests.planted import defective
from tests.runs.making import RunWriter

STEPS = 40
EVIL = 'fc<script>"/../\x1b[31m[bold]\u202e'


def values(count: int = 6) -> Values:
    draw = np.random.default_rng(0)
    results = {}
    for number, layer in enumerate(layers(count)):
        results[layer, "activation", "underflows%"] = number + draw.uniform(0, 0.1, STEPS)
        results[layer, "activation", "sqnr_db"] = 30 - number + draw.uniform(0, 0.1, STEPS)
        results[layer, "weight", "numel"] = np.full(STEPS, 4096.0)
    return results


def show(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["show", *map(str, arguments)], catch_exceptions=False)


def drawn(path: Path, width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(RunView(open_run(path), **options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_worst_layers_come_first_in_the_direction_that_is_worse(tmp_path: Path) -> None:
    view = RunView(record(tmp_path, values()))
    assert list(view.worst) == ["sqnr_db", "underflows%"], "numel has no worse direction"
    for statistic in view.worst:
        assert [series.subject.layer for series in view.worst[statistic]] == layers(6)[:2:-1]
    worst = view.worst["sqnr_db"][0]
    curve = values()[worst.subject.layer, "activation", "sqnr_db"]
    assert (worst.worst, worst.worst_iteration) == (curve.min(), curve.argmin())
    assert worst.low_is_worse
    assert worst.curve.values.tolist() == curve.tolist()


def test_a_statistic_is_chosen_with_or_without_its_recipe(tmp_path: Path) -> None:
    more = {("fc", "weight", "mxfp8_underflows%"): np.ones(STEPS), ("fc", "weight", "cur_amax"): np.ones(STEPS)}
    run = record(tmp_path, {**values(), **more})
    assert list(RunView(run, ["underflows%"]).worst) == ["mxfp8_underflows%", "underflows%"]
    view = RunView(run, ["mxfp8_underflows%"], most=1)
    assert [len(worst) for worst in view.worst.values()] == [1]
    assert "cur_amax" in view.more_statistics
    lines = drawn(tmp_path, 120, statistics=["mxfp8_underflows%"]).splitlines()
    assert [line.split(":")[0] for line in lines if "shown" in line] == ["Not shown"]
    with pytest.raises(NothingToShowError, match=r"no statistic .mse.\. It has .*sqnr_db"):
        RunView(run, ["mse"])


def test_a_statistic_of_ones_own_is_shown_when_it_is_asked_for(tmp_path: Path) -> None:
    run = record(tmp_path, {**values(), ("fc", "activation", "kurt"): np.array([1.0, -7.0, 3.0] + [0.0] * (STEPS - 3))})
    view = RunView(run)
    assert "kurt" in set(view.more_statistics) - set(view.worst)
    (shown,) = RunView(run, ["kurt"]).worst["kurt"]
    assert (shown.subject.layer, shown.worst, shown.worst_iteration) == ("fc", -7.0, 1)
    assert "kurt" in show(tmp_path, "--statistic", "kurt").output


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_terminal(tmp_path: Path, width: int) -> None:
    long = {(f"model.{'deep.' * 30}{n}.fc", "activation", "underflows%"): np.arange(9.0) for n in range(3)}
    product = {"layer": "fc", "gemm": "fprop", "macs": 10}
    gemms = [product | {"gemm_id": n, "precision": low} for n, low in enumerate(("fp8", "bf16", "fp8"))]
    facts: dict[str, Any] = {"recipes": ["fp8_current_scaling"], "integration": "Lightning", "gpu": "H200"}
    record(tmp_path, long, gemms=gemms, scalars={"loss": np.linspace(3, 1, 9), "a" * 30: np.arange(9.0)}, **facts)
    text = drawn(tmp_path, width)
    assert max(map(len, text.splitlines())) <= width
    assert "FP8 66.7 %, BF16 33.3 %" in text
    assert "3 -> 1" in text
    assert ("a" * 30 in text) == (width == 200), "a name has a quarter of the width, and 16 columns at least"
    assert "2.fc activation" in text, "the end of a long name tells layers apart"


def test_a_name_leaves_out_what_all_layers_share(tmp_path: Path) -> None:
    """The rows of BioNeMo's log of ESM2, which read model.esm.enc…self_attention.layernorm_qkv in all of them."""
    names = [
        f"model.esm.encoder.layers.{n}.self_attention.{part}" for n in range(3) for part in ("layernorm_qkv", "proj")
    ]
    record(tmp_path, {(name, "activation", "underflows%"): np.arange(9.0) + n for n, name in enumerate(names)},
           scalars={"loss": np.arange(9.0)})  # fmt: skip
    rows = [line.split()[0] for line in drawn(tmp_path, 100, most=6).splitlines() if " activation " in line]
    ends = [f"layers.{n}.self_attention.{part}" for n in (2, 1, 0) for part in ("proj", "layernorm_qkv")]
    assert all(row.startswith("…") and row.endswith(end) for row, end in zip(rows, ends, strict=True))


def test_events_and_notes_are_shown(tmp_path: Path) -> None:
    with RunWriter.begin(tmp_path, writing_ranks=[0, 1], world=2) as run:
        append(run, values())
        for step in range(8):
            run.add_event("dump_written", f"number {step}", iteration=step, layer="fc1", severity="warning")
    output = show(tmp_path).output
    assert "number 7" in output
    assert "number 2" not in output, "only the last ones"
    assert "Note: Segment 0 lacks the files of 1 of 2 ranks: 1." in output


def test_an_event_of_several_ranks_is_one_line_and_that_of_another_rank_names_it(tmp_path: Path) -> None:
    with RunWriter.begin(tmp_path, world=4) as first:
        append(first, values())
        for rank, last in ((0, 9), (1, 9), (2, 4), (3, 9)):
            run = RunWriter(first.folder.parent, 0, rank) if rank else first
            run.add_event("observation_failed", "out of memory", iteration=3, severity="error")
            run.add_event("segment_ended", "The session was stopped.", iteration=last)
            if rank:
                run.close()
    result = show(tmp_path, "--json")
    events = [(event["ranks"], event["kind"]) for event in json.loads(result.output)["events"]]
    assert events == [([0, 1, 2, 3], "observation_failed"), ([2], "segment_ended"), ([0, 1, 3], "segment_ended")]
    text = drawn(tmp_path, 120)
    assert "step 3  rank {0-3}  observation_failed  out of memory" in text
    assert "step 4  rank 2  segment_ended  The session was stopped." in text
    assert "step 9  rank {0-1,3}  segment_ended  The session was stopped." in text


def test_names_of_layers_do_no_harm(tmp_path: Path) -> None:
    record(tmp_path, {(EVIL, "activation", "underflows%"): np.arange(5.0)})
    text = drawn(tmp_path, 120)
    assert "\x1b[31m" not in text
    assert "\u202e" not in text
    assert "[bold]\\u202e activation" in text


def test_json_has_what_is_shown(tmp_path: Path) -> None:
    record(tmp_path, values(), scalars={"loss": np.arange(3.0)})
    result = json.loads(show(tmp_path, "--json").output)
    assert (result["status"], result["state"]) == ("ended", "not enough checked")
    assert result["scalars"]["loss"] == {"iterations": [0, 1, 2], "values": [0, 1, 2]}
    worst, layer = result["worst"]["sqnr_db"][0], layers(6)[-1]
    assert (worst["layer"], worst["tensor"], worst["rank"]) == (layer, "activation", None)
    assert (worst["last"], worst["last_iteration"]) == (values()[layer, "activation", "sqnr_db"][-1], STEPS - 1)


@pytest.mark.parametrize("most", [1, 4])
def test_the_number_of_layers_of_a_statistic(tmp_path: Path, most: int) -> None:
    record(tmp_path, values())
    result = json.loads(show(tmp_path, "--most", most, "--json").output)
    assert [row["layer"] for row in result["worst"]["sqnr_db"]] == layers(6)[: -most - 1 : -1]


def test_equal_numbers_of_the_trainer_are_one_curve(tmp_path: Path) -> None:
    loss = np.array([3.0, np.nan, 1.0])
    scalars = {"loss": loss, "train_loss": loss, "train_loss_step": loss, "eval_loss": loss + 1}
    record(tmp_path, values(), scalars=scalars)
    lines = [line.rstrip() for line in show(tmp_path).output.splitlines()]
    assert [line.split()[0] for line in lines if " -> " in line] == ["loss", "eval_loss"]
    assert "  same values: train_loss, train_loss_step" in lines
    assert list(json.loads(show(tmp_path, "--json").output)["scalars"]) == list(scalars)


def test_what_cannot_be_shown_is_told(tmp_path: Path) -> None:
    RunWriter.begin(tmp_path / "empty").close("ended")
    (tmp_path / "file").write_text("x")
    for arguments, says in (
        (["missing"], "no such file"),
        (["."], "no recorded run"),
        (["empty"], "has no records"),
        (["file", "--follow"], "not a recorded run"),
        (["empty", "--run", "other", "--follow"], "no run 'other'"),
    ):
        with pytest.raises(cli.PrecisionDebugError, match=says):
            show(tmp_path / arguments[0], *arguments[1:])


def test_a_run_without_a_step_is_told_as_its_report_tells_it(tmp_path: Path) -> None:
    with RunWriter.begin(tmp_path) as run:
        run.add_event("contract_checked", "The contract was never checked.", severity="warning", iteration=0)
        (running,) = no_step_note(open_run(tmp_path))
        assert running.startswith("The run has no step yet")
    says = "The run has no step, so it has no statistics and no coverage."
    output = show(tmp_path).output
    assert f"Note: {says}" in output
    assert "The contract was never checked." in output
    assert page_data(open_run(tmp_path), 10**6)[0]["notes"] == [says]


@pytest.mark.parametrize("place", ["/dev/full", "latin-1"])
def test_output_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    record(tmp_path / "run", values(), scalars={"loss": np.arange(9.0)})
    file = Path(place if place == "/dev/full" else tmp_path / "out")
    with file.open("w", encoding="latin-1") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["te-precision", "show", str(tmp_path / "run")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    if place == "/dev/full":
        assert ended.value.code == 2
        assert "the output cannot be written: [Errno 28] No space left on device\n" in capsys.readouterr().err
    else:
        assert not ended.value.code
        assert "loss  0 -> 8  ????" in file.read_text("latin-1")


# ---------------------------------------------------------------------- following


def test_following_waits_for_the_run_and_prints_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder comes while the command waits, then steps of the run; each wait is one turn of the training."""
    logs, printed = tmp_path / "logs", []
    run: RunWriter | None = None

    def train(seconds: float) -> None:
        nonlocal run
        printed.append(capsys.readouterr().out)
        if run is None:
            run = RunWriter.begin(logs)
            return
        step = len(printed) - 2
        numbers = {"underflows%": float(step), "cur_amax": 1.0}  # one due step is enough for amax
        append(run, {("fc1", "activation", name): np.array([value]) for name, value in numbers.items()}, first=step)
        run.add_event("dump_written", f"number {step}", iteration=step)
        run.flush()
        if step == 3:
            run.close("ended")

    monkeypatch.setattr(command.time, "sleep", train)
    monkeypatch.setattr(sys, "argv", ["te-precision", "show", str(logs), "--follow"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert printed == [""] * 5
    numbers, events = capsys.readouterr().out.split("Last events")
    assert "fc1 activation" in numbers
    assert [line for line in events.splitlines() if line] == [f"step {n}  dump_written  number {n}" for n in range(4)]


WRITING = """
import sys, time
import numpy as np
from tests.runs.making import RunWriter
run = RunWriter.begin(sys.argv[1])
series = run.series("fc1", "activation", "underflows%")
run.add_step(0)
run.add_values(0, np.array([series], np.int32), np.array([1.0]))
run.flush()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_following_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    threading.Timer(0.5, lambda: (process.kill(), process.wait())).start()
    assert "stopped without an end" in show(tmp_path, "--follow", "--every", "0.1").output


# ---------------------------------------------------------------------- curves


def test_a_curve_shows_every_peak() -> None:
    curve = np.zeros(1000)
    curve[777] = 5
    line = sparkline(np.arange(1000), curve, 20)
    at = 777 * 20 // 1000
    assert line == "▁" * at + "█" + "▁" * (19 - at)
    assert sparkline(np.arange(1000), -curve, 20, low_is_worse=True).index("▁") == at


def test_a_curve_has_gaps_and_marks() -> None:
    line = sparkline(np.array([0, 1, 8, 9]), np.array([1.0, np.nan, 2.0, np.inf]), 10)
    assert (len(line), "!" in line) == (4, True)
    assert sparkline(np.array([3]), np.array([2.0]), 10) == "▁"
    assert sparkline(np.empty(0, np.int64), np.empty(0), 10) == ""
    assert sparkline(np.arange(2), np.array([-1e308, 1e308]), 10) == "▁█"


# ---------------------------------------------------------------------- the verdict


def test_the_command_for_more_names_the_run_where_there_are_several(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    name = open_run(defective(folder)).run_id
    with RunWriter.begin(folder) as run:
        append(run, values())
    command = json.loads(show(folder, "--json", "--run", name).output)["more"]
    assert command == f"te-precision diagnose '{folder}' --run {name}"


def test_following_waits_for_a_run_whose_folder_is_still_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = make_segment(tmp_path / FOLDER / "run")

    def train(seconds: float) -> None:
        with RunWriter(tmp_path / FOLDER / "run", number) as run:
            run.put_run()
            append(run, {("fc1", "activation", "underflows%"): np.arange(5.0)})

    monkeypatch.setattr(command.time, "sleep", train)
    assert "fc1 activation" in show(tmp_path, "--follow").output
