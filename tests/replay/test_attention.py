"""Replay of attention: right on healthy records, and with each planted fault."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from te_precision_callbacks.cli import app
from te_precision_callbacks.replay import Replayed, replay_folder, shown
from tests.capability import any_capability
from tests.dumps.attentions import damaged, train
from tests.replay import faults

HEALTHY: Mapping[str, dict[str, Any]] = {
    "unfused, causal": {},
    "unfused, no mask, few heads of keys": {"mask": "no_mask", "form": "bshd", "keys": 2},
    "unfused, padding": {"mask": "padding", "form": "bshd"},
    "unfused, thd": {"mask": "padding_causal", "form": "thd"},
    "current": {"recipe": "current"},
    "delayed, padding, few heads of keys": {"recipe": "delayed", "mask": "padding_causal", "keys": 2},
    "mxfp8": {"recipe": "mxfp8", "gemms": ["fprop"]},
}


@pytest.fixture(autouse=True)
def any_gpu() -> Iterator[None]:
    with any_capability():
        yield


def replayed(folder: Path, **options: Any) -> list[Replayed]:
    train(folder, **options)
    found = replay_folder(folder)
    assert not found.unread
    return list(found.records.values())


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy(tmp_path: Path, case: str) -> None:
    options = HEALTHY[case]
    found = replayed(tmp_path, **options)
    passes = 2 if "recipe" in options and "gemms" not in options else 1
    assert [each.call.name for each in found] == ["attention forward", "attention backward"][:passes]
    for path, each in replay_folder(tmp_path).records.items():
        assert not shown.attention(*shown.read(path))
        assert each.faults == ()
        assert each.gain == pytest.approx(1, abs=0.02)
        lanes = {lane.name: lane.error for lane in each.lanes}
        # The rounding of S and dS as the record has it leaves that of the result: 2^-9 of bfloat16, E4M3 or E5M2.
        assert lanes["rounded S"] is not None
        assert lanes["rounded S"] < (0.07 if "delayed" in case else 0.004)
        original = lanes["original"]
        if "backward" in each.call.name:
            assert original is None
            assert "the quantizers of query, key, value" in each.verdict
        else:
            assert original is not None
            assert (0.03 < original < 0.05) if "recipe" in options else original == 0


def codes(tensor: Any) -> Any:
    return getattr(tensor, "_data", tensor)


def _half(which: str, results: list[Any]) -> None:
    if which != "backward":
        scale = getattr(results[0], "_scale_inv", results[0])
        scale.mul_(0.5)


def _swapped_keys(keys: Any, values: Any) -> tuple[Any, Any]:
    keys = keys.detach().clone()
    codes(keys)[[3, 17]] = codes(keys)[[17, 3]].clone()
    return keys, values


def _without_a_key(keys: Any, values: Any) -> tuple[Any, Any]:
    return torch.cat([keys[:5], keys[6:]]), torch.cat([values[:5], values[6:]])


FAULTS: Mapping[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a head zeroed": (
        {"damage": lambda which, out: codes(out[0])[:, 1, 2].zero_()},
        {},
        "O, head 2 of sequence 1: all",
    ),
    "a factor": ({"damage": _half}, {}, "O, all heads: all of it: .*; 0.5 of what it should be"),
    "a row": ({"damage": lambda which, out: codes(out[0])[7, 0, 3].zero_()}, {}, "O, head 3 of sequence 0: row 7, col"),
    "keys swapped": ({"reads": _swapped_keys}, {"mask": "causal"}, "O, all heads: "),
    "a key dropped": ({"reads": _without_a_key}, {"mask": "no_mask"}, "O, all heads: "),
}


@pytest.mark.parametrize(
    ("fault", "recipe"),  # in FP8 one key of 128 is within the rounding of S
    [
        (fault, recipe)
        for fault in FAULTS
        for recipe in ("", "current")
        if (fault, recipe) != ("a key dropped", "current")
    ],
)
def test_faults_of_the_forward(tmp_path: Path, fault: str, recipe: str) -> None:
    how, options, told = FAULTS[fault]
    with damaged(**how):
        forward = replayed(tmp_path, recipe=recipe, gemms=["fprop"], **options)[0]
    assert [each.cause for each in forward.faults] == ["kernel"]
    assert forward.verdict.startswith("core attention forward, step 0: kernel: ")
    assert re.search(told, forward.verdict)
    if not recipe:
        product = "in the scores QK^T or the product PV"
    elif fault == "keys swapped":
        product = "in the scores QK^T, since the statistics of the softmax are wrong"
    else:
        product = "in the product PV, since the statistics of the softmax are right"
    assert forward.verdict.endswith(product)
    assert [shown.attention(*shown.read(path)) for path in replay_folder(tmp_path).records] == [True]


def _row_of_dv(which: str, results: list[Any]) -> None:
    if which == "backward":
        codes(results[2])[5, 1, 1].copy_(codes(results[2])[9, 1, 1])


def _half_of_dk(which: str, results: list[Any]) -> None:
    if which == "backward":
        getattr(results[1], "_scale_inv", results[1]).mul_(0.5)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_row_of_dv, ("dV, head 1 of sequence 1: row 5, columns", "in the product S^T dO")),
        (_half_of_dk, ("dK, ", "of what it should be; in the product dS^T Q")),
    ],
)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_faults_of_the_backward(tmp_path: Path, recipe: str, damage: Callable[..., Any], told: Any) -> None:
    with damaged(damage):
        forward, backward = replayed(tmp_path, recipe=recipe)
    assert forward.faults == ()
    assert [each.cause for each in backward.faults] == ["kernel"]
    assert all(text in backward.verdict for text in told)
    assert [shown.attention(*shown.read(path)) for path in replay_folder(tmp_path).records] == [False, True]


def test_a_fault_of_the_quantizer(tmp_path: Path) -> None:
    with faults.quantizer(faults.QUANTIZER["rounding always down"]):
        (found,) = replayed(tmp_path, recipe="current", gemms=["fprop"])
    assert {(each.cause, each.operand) for each in found.faults} == {
        ("quantizer", name) for name in ("query", "key", "value")
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with damaged(lambda which, out: codes(out[0])[:, 1, 2].zero_()):
        train(tmp_path / "bad")
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "bad")])
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "worst tokens of O" in text
    drawn = result.output[result.output.index("48 tokens of O x 4 heads") :].splitlines()[1:]
    marked = {column for line in drawn for column, mark in enumerate(line.strip()) if mark == "#"}
    assert marked == {2}
    script = tmp_path / "repro.py"
    CliRunner().invoke(app, ["replay", str(tmp_path / "bad"), "--repro", str(script)])
    assert "attention forward, step 0: kernel: O, head 2" in script.read_text()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 1
    assert "  sequence 1, head 2: the whole result: all zeros\n" in capsys.readouterr().out
    train(tmp_path / "dropout", dropout=0.1)
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "dropout")])
    assert result.exit_code == 3
    assert "core attention forward, step 0: not judged: its dropout cannot be drawn again." in result.output
