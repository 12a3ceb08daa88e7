"""Reading runs: which one of a folder, logs of plain nvidia-dlfw-inspect, and the code of docs/records.md."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Recipe
from typer.testing import CliRunner, Result

from te_precision_callbacks import InspectSession, cli
from te_precision_callbacks.runs import NotARunError, list_runs, open_run, writing
from te_precision_callbacks.runs.importing import parse_names
from te_precision_callbacks.runs.tables import EVENTS, FACTS, SCALARS, STEP0, STEPS, VALUES, VECTORS
from te_precision_callbacks.views.show.view import RunView
from tests.conftest import statistics
from tests.docs.pages import PAGES, blocks
from tests.features.plain import THEIRS, plain
from tests.runs.making import write_run

FOLDER = "my logs"
TAB = " \t\t\t\t "
_, OPEN, PANDAS, POLARS, DUCKDB, LOOP = blocks("docs/records.md", "python")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- which run of a folder ---


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "500")
    return [write_run(tmp_path / FOLDER, range(steps)) for steps in (3, 6, 9)]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [*map(str, arguments)], catch_exceptions=False)


def test_the_latest_is_read_and_the_others_are_named(ids: list[str]) -> None:
    first, second, third = ids
    stated = f"{FOLDER} has 3 runs. The latest is read: {third}. The others, for --run: {second}, {first}."
    for command in ("show", "report", "compare"):
        result = call(command, FOLDER, *[FOLDER] * (command == "compare"))
        assert result.exit_code == 0
        assert " ".join(result.stdout.split()).count(stated) == 1, "once, also where it is read twice"
    shown = call("show", FOLDER, "--json")
    assert json.loads(shown.stdout)["run_id"] == third
    assert stated in " ".join(shown.stderr.split())


def test_a_run_that_was_resumed_is_later_than_an_attempt_that_came_between(ids: list[str]) -> None:
    first, *_, last = ids
    assert open_run(FOLDER, run="latest").run_id == last
    run = Path(FOLDER) / "precision_records" / first
    shutil.copytree(run / "seg-000", run / "seg-001")
    facts = run / "seg-001" / "run.json"
    later = {"segment": 1, "first_iteration": 3, "started_at": "2999-01-01T00:00:00.000+00:00"}
    facts.write_text(json.dumps(json.loads(facts.read_text()) | later))
    assert open_run(FOLDER, run="latest").run_id == first
    facts.write_text("damaged")
    assert open_run(FOLDER, run="latest").run_id == last


def test_a_run_is_chosen_by_as_much_of_its_name_as_is_needed(ids: list[str]) -> None:
    first, _, third = ids
    records = f"{FOLDER}/precision_records"
    for arguments, chosen in (
        ((FOLDER, "--run", first), first),
        ((FOLDER, "--run", first[:-1]), first),
        ((FOLDER, "--run", "latest"), third),
        ((records, "--run", first), first),
        ((f"{records}/{first}",), first),
    ):
        result = call("show", *arguments, "--json")
        assert not result.stderr, "nothing is said of a choice that was made"
        assert json.loads(result.stdout)["run_id"] == chosen
    for command in ("show", "report"):
        with pytest.raises(cli.PrecisionDebugError, match=r"there is no run 'x'\. There are: "):
            call(command, FOLDER, "--run", "x")
        with pytest.raises(cli.PrecisionDebugError, match=f"is the run {first!r}, not {third!r}"):
            call(command, f"{records}/{first}", "--run", third)


def test_two_runs_of_a_folder_are_compared(ids: list[str]) -> None:
    first, second, third = ids
    for both in ([FOLDER, FOLDER], [FOLDER]):
        actual = json.loads(call("compare", *both, "--run", first, "--run", second, "--json").stdout)
        assert (actual["a"], actual["b"]) == (f"{FOLDER} ({first})", f"{FOLDER} ({second})")
        assert (actual["pairing"]["first"], actual["pairing"]["last"]) == (0, 2)
    actual = json.loads(call("compare", FOLDER, FOLDER, "--noise", FOLDER,
                            *(part for item in ids for part in ("--run", item)), "--json").stdout)  # fmt: skip
    assert actual["floor"]["sides"] == [f"{FOLDER} ({third})"]
    result = call("compare", FOLDER, FOLDER, *("--run", first) * 3)
    assert result.exit_code == 2
    assert "3 runs are chosen" in " ".join(result.output.split())


# --- logs of plain nvidia-dlfw-inspect ---


def line(name: str, iteration: int, value: object, end: str = "\n") -> str:
    return f"2026-11-22 13:01:44,718 - INFO - {name}{TAB}iteration={iteration:06d}{TAB}value={value}{end}"


def log(folder: Path, text: str | bytes, rank: int = 0, kind: str = "statistics_logs") -> Path:
    path = folder / f"nvdlfw_inspect_{kind}" / f"nvdlfw_inspect_globalrank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(folder: Path) -> dict[tuple[str, str, str, int | None], dict[int, float]]:
    """Layer, tensor, statistic and rank -> iteration -> value."""
    run = open_run(folder)
    results: dict[tuple[str, str, str, int | None], dict[int, float]] = {}
    for series in run.series.to_pylist():
        table = run.values([series["series"]])
        key = (series["layer"], series["tensor"], series["statistic"], series["rank"])
        results[key] = dict(zip(table["iteration"].to_pylist(), table["value"].to_pylist(), strict=True))
        assert (series["count"], series["first"], series["last"]) == (len(table), min(results[key]), max(results[key]))
    return results


def test_a_log_and_its_event_log(tmp_path: Path) -> None:
    file = log(
        tmp_path,
        "".join(line(f"{name}_activation_max", it, it + n / 2) for it in range(3) for n, name in enumerate("ab")),
    )
    assigned = [f"2026-11-22 13:01:40,102 - INFO - Assigned layer name: {name}\n" for name in "ba"]
    log(tmp_path, "".join(assigned) + "2026-11-22 13:01:41,000 - WARNING - look at fc1\n", kind="logs")
    run = open_run(tmp_path)
    assert (run.source, run.notes, run.ordered_layers) == ("nvidia-dlfw-inspect", (), ["b", "a"])
    assert run.grid("max", "activation").values.tolist() == [[0.5, 1.5, 2.5], [0.0, 1.0, 2.0]]
    assert run.steps["iteration"].to_pylist() == [0, 1, 2]
    assert run.steps["wall_time"].to_pylist()[0].second == 44
    assert len(run.events) == len(run.gemms) == len(run.scalars) == len(run.vectors()) == 0
    for path in (tmp_path, file.parent, file):
        assert len(open_run(path).values()) == 6


def test_every_number_of_a_log_is_read(tmp_path: Path) -> None:
    for value, read in [
        ("-1.5", -1.5),
        ("nan", None),
        ("inf", float("inf")),
        ("-inf", -float("inf")),
        ("1e-30", 1e-30),
    ]:
        log(tmp_path, line("fc1_weight_min", 0, value) + line("fc1_weight_min", 1, 2))
        (result,) = rows(tmp_path).values()
        assert result[0] == read or (read is None and result[0] != result[0])
        assert result[1] == 2.0


NAMES = {
    "fc1_activation_max": ("fc1", "activation", "max"),
    "fc_activation_1_weight_max": ("fc_activation_1", "weight", "max"),
    "fc1_gradient_mxfp8_underflows%": ("fc1", "gradient", "mxfp8_underflows%"),
    "fc1_gradient_underflows%_columnwise": ("fc1", "gradient", "underflows%_columnwise"),
    "fc1_gradient_fp8_delayed_scaling_underflows_num": ("fc1", "gradient", "fp8_delayed_scaling_underflows_num"),
    "fc1_activation_num_zeros[0.5]%": ("fc1", "activation", "num_zeros[0.5]%"),
    "fc1_gradient_new_statistic": ("fc1", "gradient", "new_statistic"),
    'a/b, "c" <script>_weight_std': ('a/b, "c" <script>', "weight", "std"),
    "x\ty_weight_std": ("x\ty", "weight", "std"),
    "a - INFO - b iteration=3_output_l2_norm": ("a - INFO - b iteration=3", "output", "l2_norm"),
    "\x1b[31m_weight_std": ("\x1b[31m", "weight", "std"),
    f"{'n' * 300}_wgrad_mean": ("n" * 300, "wgrad", "mean"),
    "Stufe \u00e4_dgrad_min": ("Stufe \u00e4", "dgrad", "min"),
    "my_own": ("", "", "my_own"),
    "gradient_scaler": ("", "", "gradient_scaler"),
    "unknown_weight_stat": ("", "", "unknown_weight_stat"),
}


def test_layer_names_with_any_characters_and_unknown_statistics(tmp_path: Path) -> None:
    log(tmp_path, "".join(line(name, it, n) for it in range(2) for n, name in enumerate(NAMES)))
    assert rows(tmp_path) == {(*name, None): {0: n, 1: n} for n, name in enumerate(NAMES.values())}
    assert parse_names(["new.layer_weight_new"], ["new.layer"]) == {
        "new.layer_weight_new": ("new.layer", "weight", "new")
    }


def test_a_log_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a piece ends, also in the middle of a character and of a mark."""
    text = line("\u00e4_weight_max", 0, 1) + "2026-11-22 13:01:44,718 - INFO - Here another run begins, of process 7.\n"
    text += line("\u00e4_weight_max", 0, 3) + line("\u00e4_weight_max", 1, 4)
    log(tmp_path, text)
    for size in (7, 64, 100, 150, 10_000):
        monkeypatch.setattr("te_precision_callbacks.runs.importing._PIECE", size)
        assert rows(tmp_path) == {("\u00e4", "weight", "max", None): {0: 3.0, 1: 4.0}}, (
            "what ran again counts as it ran last"
        )
        assert open_run(tmp_path).notes == ()


def test_half_a_line_at_the_end_and_lines_that_are_none(tmp_path: Path) -> None:
    whole = line("a_weight_max", 0, 1) + "no statistic\n" + line("a_weight_max", 1, 2).replace("\n", "\r\n") + "\n"
    whole += line("a_weight_max", 2, "abc") + line("a_weight_max", 3, 4)
    path = log(tmp_path, (whole + line("a_weight_max", 4, "1.234", end="")).encode() + b"")
    assert rows(tmp_path) == {("a", "weight", "max", None): {0: 1.0, 1: 2.0, 3: 4.0}}
    assert open_run(tmp_path).notes == (f"{path}: 2 lines are no statistics, and were left out.",)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    log(tmp_path, line("a_weight_max", 0, 1).encode() + b"\xff\xfe\n" + line("a_weight_max", 1, 2).encode())
    assert rows(tmp_path) == {("a", "weight", "max", None): {0: 1.0, 1: 2.0}}


def test_numbers_on_which_ranks_agree_are_there_once(tmp_path: Path) -> None:
    alike, stage, other = line("a_weight_max", 0, 1), line("b_weight_max", 0, 5), line("c_weight_max", 0, 7)
    log(tmp_path, alike + stage + line("c_weight_max", 0, 8) + line("c_weight_max", 1, "nan"))
    log(tmp_path, alike + other, rank=2)
    assert str(rows(tmp_path)) == str(
        {
            ("a", "weight", "max", None): {0: 1.0},
            ("b", "weight", "max", None): {0: 5.0},
            ("c", "weight", "max", 0): {0: 8.0, 1: float("nan")},
            ("c", "weight", "max", 2): {0: 7.0},
        }
    )
    run = open_run(tmp_path)
    assert (run.notes, run.segments[0].world) == (("The logs of 1 ranks are missing: 1.",), 3)


def test_folders_of_ranks_as_in_bionemo(tmp_path: Path) -> None:
    for rank in range(2):
        log(tmp_path / f"rank_{rank}", line("a_weight_max", 0, rank), rank=rank)
    assert set(rows(tmp_path)) == {("a", "weight", "max", 0), ("a", "weight", "max", 1)}


def test_a_local_value_of_a_session(tmp_path: Path) -> None:
    log(tmp_path, line("a_weight_max", 0, 1) + line("a_weight_max", 1, 2, end=f"{TAB}rank=0\n"))
    assert rows(tmp_path) == {("a", "weight", "max", None): {0: 1.0, 1: 2.0}}


def test_a_log_without_a_statistic(tmp_path: Path) -> None:
    for text in ["", "no statistic\n", line("a_weight_max", 0, 1, end="")]:
        log(tmp_path, text)
        with pytest.raises(NotARunError, match="hold no statistic"):
            open_run(tmp_path)


def train_plainly(
    folder: Path, build: Callable[[], torch.nn.Module], feature: str, recipe: Recipe | None = None, **options: Any
) -> torch.Tensor:
    inputs = torch.randn(3, 16, 32)
    with plain({feature: {"enabled": True, **options}}, folder, folders=[THEIRS], layers="all", files=True):
        net = build()
        for batch in inputs:
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = net(batch)
            (out.sum() * 1e-6).backward()
            debug_api.step()
    return inputs


def test_what_plain_nvidia_dlfw_inspect_writes(tmp_path: Path) -> None:
    """With Transformer Engine's own features, which round to four decimals."""
    tensors, stats = ["activation", "weight"], ["l1_norm", "max"]
    inputs = train_plainly(
        tmp_path, lambda: te.Linear(32, 32, name="net.fc1"), "LogTensorStats", tensors=tensors, stats=stats
    )
    result = rows(tmp_path)
    assert sorted(result) == [("net.fc1", tensor, name, None) for tensor in tensors for name in stats]
    expected = {step: batch.max().item() for step, batch in enumerate(inputs)}
    assert result["net.fc1", "activation", "max", None] == pytest.approx(expected, abs=1e-4)


def unnumbered() -> torch.nn.Module:
    """Two blocks without a number, which nvidia-dlfw-inspect gives one name."""
    two = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    for block in two:
        block.layer_number = None
    net = torch.nn.Sequential(OrderedDict(blocks=two, head=te.Linear(32, 32)))
    debug_api.infer_and_assign_layer_names(net)
    return net


def test_iteration_0_counts_as_the_first_step_of_delayed_scaling(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stats = ["underflows%", "scale_inv_max"]
    train_plainly(tmp_path, unnumbered, "LogFp8TensorStats", DelayedScaling(), tensors=["gradient"], stats=stats)
    run = open_run(tmp_path)
    grid = run.grid("underflows%", "gradient")
    head = grid.values[grid.layers.index("model.head")]
    assert head[0] > 90
    assert (head[1:] < 10).all()
    values = run.values(run.select(layer="model.head"))
    marked = (values["flags"].to_numpy() & STEP0) != 0
    assert values["iteration"].to_numpy()[marked].tolist() == [0, 0], "of both statistics"
    shown = RunView(run, ["underflows%"]).worst["underflows%"]
    (worst,) = (series for series in shown if series.subject.layer == "model.head")
    assert worst.worst_iteration > 0
    assert worst.curve.iterations.tolist() == [1, 2]


# --- the code of docs/records.md ---


@pytest.mark.parametrize("code", [PANDAS, POLARS, DUCKDB], ids=["pandas", "polars", "DuckDB"])
def test_other_libraries_read_it(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len([line for line in code.splitlines() if line]) == 3
    monkeypatch.setattr(writing, "CLOSE_BYTES", 1)
    run_id = write_run(Path("logs"), range(5))
    write_run(Path("logs"), range(5, 7), run_id=run_id)
    names: dict[str, Any] = {}
    exec(code, names)
    assert {str(layer): value for layer, value in np.asarray(names["values"]).tolist()} == {
        "net.0": 60.0,
        "net.1": 61.0,
    }


def test_reading_with_this_package() -> None:
    run_id = write_run(Path("logs"), range(5), statistic="cur_amax")
    names: dict[str, Any] = {}
    exec(OPEN, names)
    assert list_runs("logs") == (run_id,)
    assert len(names["table"]) == 5
    assert names["grid"].layers == ["net.1", "net.0"]


def test_a_loop_of_your_own() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": torch.randn(3, 16, 32)}
    with InspectSession(statistics(), model=model, log_dir="logs") as session:
        exec(LOOP, {**names, "session": session})
    rows = [(row["name"], row["iteration"]) for row in open_run("logs").scalars.to_pylist()]
    assert sorted(rows) == [(name, iteration) for name in ("loss", "lr") for iteration in range(3)]


def test_the_tables_and_kinds_of_the_page() -> None:
    text = PAGES["docs/records.md"].read_text()
    for name in FACTS:
        assert f"`{name}`" in text
    for schema in (VALUES, VECTORS, STEPS, SCALARS, EVENTS):
        assert schema.names[0] == "segment"
