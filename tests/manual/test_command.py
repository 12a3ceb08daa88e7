"""``te-precision features`` and ``te-precision statistics``."""

import json
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.cli.manual.features import UnknownFeatureError, features
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.engine.simulation import SIMULATED
from te_precision_callbacks.statistics.table import GEMM_STATISTICS, STATISTICS, SYMBOLS
from tests.conftest import feature
from tests.docs.pages import ROOT
from tests.reference.processes import answers
from tools import recipes_table


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output, "no colour in a pipe"
    return done.output


def one_line(text: str) -> str:
    return " ".join(text.split())


def ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["te-precision", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which typer replaces
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return one_line(capsys.readouterr().err.replace("│", " "))


def test_a_feature_is_explained_with_an_example_that_loads() -> None:
    for name in FEATURES:
        output = run("features", name.lower())
        shown, _, example = output.partition("\nExample\n\n")
        (section,) = load_config(yaml.safe_load(example)).sections
        assert list(section.features["transformer_engine"]) == [name]
        words = one_line(shown)
        assert words.startswith(f"{name}, in transformer_engine: {one_line(FEATURES[name].__doc__ or '')}")
        for key, field in FEATURES[name].model_fields.items():
            assert f" {key}: " in words
            assert one_line(str(field.description)) in words


def test_a_key_is_said_to_be_required_or_has_its_default() -> None:
    output = one_line(run("features", "PerTensorScaling"))
    assert "enabled: True or False where: feature; required" in output
    assert "items of `tensors_struct`; default: 0 The scale is" in output
    assert "gemms: a list of fprop, dgrad, wgrad where: feature GEMMs that" in output


def test_features_as_json() -> None:
    listed = json.loads(run("features", "--json"))["features"]
    assert [(item["namespace"], item["name"]) for item in listed] == [(f.namespace, f.name) for f in features()]
    (quant,) = json.loads(run("features", "fakequant", "--json"))["features"]
    keys = {key["name"]: key for key in quant["keys"]}
    assert keys["gemm"] == {
        "name": "gemm",
        "where": [["gemms_struct"]],
        "values": "one of fprop, dgrad, wgrad",
        "required": True,
        "default": None,
        "meaning": "The GEMM that the item is for.",
    }
    assert (keys["margin"]["default"], keys["margin"]["required"]) == (0, False)
    assert quant == next(item for item in listed if item["name"] == "FakeQuant")


def test_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownFeatureError, match=r"There is no feature 'FakeQunt'\. Did you mean 'FakeQuant'"):
        run("features", "FakeQunt")
    said = ends(monkeypatch, capsys, "features", "FakeQunt")
    assert said.startswith("te-precision: There is no feature 'FakeQunt'. Did you mean 'FakeQuant'")
    assert "The features are: DisableFP8GEMM, " in ends(monkeypatch, capsys, "features", "zzz")
    assert "there is no statistic 'underflow%'. Did you mean 'underflows%'" in ends(
        monkeypatch, capsys, "statistics", "underflow%"
    )
    assert "List all: te-precision statistics." in ends(monkeypatch, capsys, "statistics", "qqq")
    one_scale = ends(monkeypatch, capsys, "statistics", "fp8_current_scaling_mse_columnwise")
    assert "has one scale for the whole tensor" in one_scale
    assert "'fp8_current_scaling_mse'" in one_scale


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    return {statistic["name"]: statistic for statistic in json.loads(run("statistics", "--json"))["statistics"]}


@pytest.mark.parametrize("name", ["max", "mse", "max_blockwise_dynamic_range", next(iter(GEMM_STATISTICS))])
def test_the_list_filtered_by_a_name(name: str, listed: dict[str, Any]) -> None:
    assert json.loads(run("statistics", name, "--json"))["statistics"] == [listed[name]]
    printed = run("statistics", name)
    assert all(listed[name][fact] in printed for fact in ("formula", "unit", "worse", "example"))
    assert len(printed.splitlines()) < len(run("statistics").splitlines())


def test_the_example_of_a_statistic_loads_in_what_collects_it() -> None:
    for name in [*STATISTICS, "mxfp8_mse_columnwise"]:
        (statistic,) = json.loads(run("statistics", name, "--json"))["statistics"]
        assert (statistic["collected_by"] == ["LogGemmError"]) == (name in GEMM_STATISTICS)
        options = yaml.safe_load(statistic["example"])
        if name in GEMM_STATISTICS:
            load_config({"s": feature("LogGemmError", ["fc1"], **options)})
            continue
        for collects, model in FEATURES.items():
            if "stats" in model.model_fields:
                section = feature(collects, ["fc1"], tensors=["activation"], **options)
                if collects in statistic["collected_by"]:
                    load_config({"s": section})
                else:
                    with pytest.raises(ConfigError):
                        load_config({"s": section})


def test_docs_statistics_has_the_recipes_and_symbols() -> None:
    page = (ROOT / "docs" / "statistics.md").read_text()
    assert recipes_table.table() in page
    assert SYMBOLS in one_line(page)
    for name, recipe in SIMULATED.items():
        shares = recipes_table.SHARES[name]
        assert shares.partition(";")[0] == ("all" if recipe.side is None else str(recipe.side))
        assert ("in a weight" in shares) == recipe.square_weights


@pytest.mark.processes
def test_torch_is_not_imported() -> None:
    assert (
        answers(
            """
            import contextlib, io, sys
            from te_precision_callbacks.cli import app
            with contextlib.redirect_stdout(io.StringIO()):
                for arguments in ["features", "FakeQuant"], ["statistics"]:
                    app(arguments, standalone_mode=False)
            heavy = ["torch", "transformer_engine", "nvdlfw_inspect", "lightning"]
            answer = [name for name in heavy if name in sys.modules]
            """,
            fresh=True,
        )
        == []
    )
