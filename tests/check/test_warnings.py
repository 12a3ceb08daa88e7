"""``te-precision check`` gives every warning that loading a config or attaching a model gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from typer.testing import CliRunner

import te_precision_callbacks
from te_precision_callbacks import cli
from te_precision_callbacks.instrumentation import upstream
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature

PACKAGE = Path(te_precision_callbacks.__file__).parent

STATS: dict[str, Any] = {"tensors": ["activation"], "stats": ["max"]}
WATCHED = feature("LogTensorStats", ["all"], **STATS)


def two() -> torch.nn.Module:
    return torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))


def delayed() -> torch.nn.Module:
    return torch.nn.Sequential(te.Linear(32, 32, delay_wgrad_compute=True), te.Linear(32, 32))


def plain() -> torch.nn.Module:
    return torch.nn.Linear(32, 32)


class Case(NamedTuple):
    """A config and a model of which something is to be said.

    Attributes:
        config: the config.
        model: makes the model.
        said_in: the functions that log it, as module:function.
        options: of the session.
    """

    config: dict[str, Any]
    model: Callable[[], torch.nn.Module]
    said_in: str
    options: tuple[tuple[str, Any], ...] = ()


def selected(**layers: Any) -> dict[str, Any]:
    return {"s": {**WATCHED, "layers": layers}}


GEMM = feature("LogTensorStats", ["all"], tensors=["activation", "fprop"], stats=["max"])
REPLACED = feature("FakeQuant", ["all"], quant_format="FP8E4M3", tensors=["weight"], gemms=["fprop"])
ATTACH = "session/model.py:attach"

CASES = {
    "no section": Case({"s": WATCHED | {"enabled": False}}, two, ATTACH),
    "no feature": Case({"s": feature("LogTensorStats", ["all"], enabled=False)}, two, ATTACH),
    "no layer": Case({"s": WATCHED}, plain, ATTACH),
    "a GEMM among tensors": Case({"s": GEMM}, two, "config/checking.py:_without_gemms"),
    "a key beside one that decides": Case(
        selected(exact_layer_names=["0"], layer_types=["linear"]), two, "config/selection.py:_warn_of_idle_keys"
    ),
    "an empty pattern": Case(selected(layer_name_regex_pattern=""), two, "config/selection.py:_warn_of_idle_keys"),
    "a type that no layer has": Case(selected(layer_types=["linear", "nothing"]), two, "config/problems.py:warn"),
    "a name that no layer has": Case(
        selected(exact_layer_names=["0", "5"]), two, "config/problems.py:warn", (("allow_unmatched", True),)
    ),
    "a layer that is refused": Case(
        {"s": REPLACED}, delayed, "instrumentation/refusals.py:warn", (("observe", "debug"),)
    ),
    "a version that is not known": Case({"s": WATCHED}, two, "instrumentation/upstream.py:warn_unless_supported"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_session_warns_of_is_said_by_check(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    options = dict(case.options)
    if name == "a version that is not known":
        monkeypatch.setattr(upstream, "SUPPORTED_TE", ("1.0", "1.1"))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(case.config))
    with caplog.at_level(logging.WARNING), InspectSession(path, model=case.model(), log_dir=tmp_path, **options):
        pass
    stated = [record for record in caplog.records if record.name.startswith("te_precision_callbacks")]
    places = {f"{Path(record.pathname).relative_to(PACKAGE).as_posix()}:{record.funcName}" for record in stated}
    assert case.said_in in places
    caplog.clear()
    monkeypatch.syspath_prepend(tmp_path)
    observe = ["--observe", options["observe"]] if "observe" in options else []
    model = ["--model", f"{__name__}:{case.model.__name__}"]
    said = json.loads(CliRunner().invoke(cli.app, ["check", str(path), *model, *observe, "--json"]).stdout)
    texts = " ".join([*said["notes"], *(finding["text"] for finding in said["findings"])])
    for record in stated:
        if record.funcName == "warn":  # in other words: which layers, and why
            assert record.getMessage().partition(" (")[2].rpartition(")")[0] in texts
        else:
            assert record.getMessage() in texts
    assert not caplog.records  # said once


def test_without_a_model_the_config_alone_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"s": feature("LogTensorStats", ["all"], enabled=False), "t": GEMM}))
    done = CliRunner().invoke(cli.app, ["check", str(path)])
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "Note: " in said
    assert "has no enabled feature" in said
    assert "which is a GEMM and no tensor" in said
    assert len(json.loads(CliRunner().invoke(cli.app, ["check", str(path), "--json"]).stdout)["notes"]) == 2
