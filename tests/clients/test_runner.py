"""The runner itself, without a client: search, comparison, and errors for bad input."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.__main__ import main
from tests.clients.comparing import Notes, check_statistics, compare_gemms, compare_losses
from tests.clients.inside.tensors import Summary
from tests.clients.known import CLIENTS
from tests.clients.table import BEGIN, END, write_table
from tests.clients.trial import Trial, why_it_failed


def operand(name: str, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    figures = Summary(name, array).figures()
    return {"kind": "float32", "read": name, "source": figures, "quantized": None}


def gemm(layout: str, a: str, b: str, d: str, arrays: dict[str, np.ndarray[Any, Any]], **more: Any) -> dict[str, Any]:
    parts = {part: operand(name, arrays[name]) for part, name in (("A", a), ("B", b), ("D", d))}
    of_backward = {"layer": None, "trains": None, "accumulate": False, "expert": None}
    return {"kind": "gemm", "step": 0, "layout": layout} | of_backward | parts | more


def step_of_a_layer() -> tuple[list[dict[str, Any]], dict[str, np.ndarray[Any, Any]]]:
    draw = np.random.default_rng(0)
    names = ("weight", "activation", "output", "gradient", "dgrad", "wgrad")
    arrays = {name: draw.standard_normal(64) for name in names}
    notes = [
        gemm("TN", "weight", "activation", "output", arrays, layer="module.block.fc", trains=True, of="Linear"),
        {"kind": "loss", "step": 0, "value": (0.25).hex()},
        gemm("NN", "weight", "gradient", "dgrad", arrays),
        gemm("NT", "activation", "gradient", "wgrad", arrays),
        {"kind": "step", "step": 0, "parameters": "aa"},
    ]
    return notes, arrays


def write_log(folder: Path, lines: dict[str, float]) -> None:
    logs = folder / "0" / "nvdlfw_inspect_statistics_logs"
    logs.mkdir(parents=True)
    text = "".join(
        f"2026-01-01 00:00:00,000 - INFO - {name} \t iteration=000000 \t value={value!r}\n"
        for name, value in lines.items()
    )
    (logs / "nvdlfw_inspect_globalrank-0.log").write_text(text, encoding="utf-8")


@pytest.mark.processes
def test_losses_and_gemms_are_the_same_only_to_the_last_digit() -> None:
    notes, _ = step_of_a_layer()
    same, other_loss, other_operand = (json.loads(json.dumps(notes)) for _ in range(3))
    other_loss[1]["value"] = math.nextafter(0.25, 1).hex()
    other_operand[2]["B"]["read"] = "changed"

    assert compare_losses(Notes((notes,)), Notes((same,))) == ""
    assert compare_gemms(Notes((notes,)), Notes((same,))) == ""
    assert "0.25 without, 0.25000000000000006 with" in compare_losses(Notes((notes,)), Notes((other_loss,)))
    assert compare_gemms(Notes((notes,)), Notes((other_operand,))).startswith("GEMM 1 of rank 0 (step 0, backward): B")
    assert compare_gemms(Notes((notes,)), Notes((notes[:3],))) == "rank 0: 3 GEMMs without, 2 with"


@pytest.mark.processes
def test_a_run_without_training_is_no_agreement() -> None:
    assert compare_losses(Notes(((),)), Notes(((),))) == "no step of an optimizer was seen"


@pytest.mark.processes
def test_statistics_are_those_of_numpy_for_each_tensor_of_a_layer(tmp_path: Path) -> None:
    notes, arrays = step_of_a_layer()
    write_log(
        tmp_path,
        {f"block.fc_{tensor}_std": float(np.std(array, ddof=1)) for tensor, array in arrays.items()}
        | {f"block.fc_{tensor}_l1_norm": float(np.abs(array).sum()) for tensor, array in arrays.items()},
    )
    checked = check_statistics(Notes((tuple(notes),)), tmp_path)
    assert (checked.equal, checked.different, checked.unlinked.total()) == (12, [], 0)


@pytest.mark.processes
def test_a_statistic_of_another_tensor_is_reported(tmp_path: Path) -> None:
    notes, arrays = step_of_a_layer()
    write_log(tmp_path, {"block.fc_dgrad_max": float(arrays["wgrad"].max())})
    ((name, iteration, logged, wanted),) = check_statistics(Notes((tuple(notes),)), tmp_path).different
    assert (name, iteration) == ("block.fc_dgrad_max", 0)
    assert (logged, wanted) == (float(arrays["wgrad"].max()), float(arrays["dgrad"].max()))


@pytest.mark.processes
@pytest.mark.parametrize("present", [True, False])
def test_a_folder_without_anything_known_is_refused(
    present: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "src"
    if present:
        (folder / "esm2_native_te").mkdir(parents=True)  # without its script
    with pytest.raises(SystemExit) as stopped:
        main(["--src", str(folder), "--cache", str(tmp_path / "cache")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert str(folder) in said
    assert ("esm2_native_te/train_ddp.py" in said) if present else ("no such folder" in said)


def test_every_client_is_found_by_its_marker_at_any_depth(tmp_path: Path) -> None:
    for client in CLIENTS:
        marker = tmp_path / "deep" / client.marker
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    for client in CLIENTS:
        folder = client.find(tmp_path)
        script = next(argument for argument in client.arguments if argument.endswith(".py") or "." in argument)
        assert client.arguments[0] == "-m" or (folder / script).is_file()
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def trial(name: str, **results: Any) -> Trial:
    return Trial(next(client for client in CLIENTS if client.name == name), "0123456789", **{"ran": "runs", **results})


def test_the_table_lists_differences_and_the_page_around_it_stays(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text(f"before\n{BEGIN}\nof the last time\n{END}\nafter\n", encoding="utf-8")
    same = trial("llama3_native_te", steps=3, compared=9, checked=50, analysis="reads 9")
    other = trial("opengenome2_llama_native_te", losses="loss 1 of rank 0: 1.0 | 2.0")
    stopped = trial("codonfm_ptl_te", ran="with the debugger: exit code 1: ValueError: no")
    write_table(page, [stopped, other])
    write_table(page, [same])
    text = page.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "of the last time" not in text
    assert [row.split("`")[1] for row in rows] == [item.client.name for item in (same, other, stopped)]
    assert "the same, 3 steps" in rows[0]
    assert "1.0 \\| 2.0" in rows[1]
    assert "ValueError: no" in rows[2]
    assert (same.good, other.good, stopped.good) == (True, False, False)


def test_a_known_difference_is_no_failure_and_its_end_is() -> None:
    known = trial("esm2_native_te", losses="loss 0 of rank 0")
    ended = trial("esm2_native_te")
    wrong = trial("esm2_native_te", losses="x", statistics="1")
    assert (known.good, ended.good, wrong.good) == (True, False, False)
    assert "known: under delayed scaling" in known.verdict
    assert "nothing differs any more" in ended.verdict


def test_a_failed_script_reports_its_own_exception_not_its_launchers() -> None:
    output = (
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "train.py", line 3, in main\n'
        "[rank0]: ValueError: no such column: text\n"
        "Traceback (most recent call last):\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "=======\n"
    )

    assert why_it_failed(output) == "ValueError: no such column: text"
    assert why_it_failed("usage: train.py\ntrain.py: no such option\n") == "train.py: no such option"
