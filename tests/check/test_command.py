"""``te-precision check``, also of a model that Accelerate converts."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformer_engine.pytorch as te
import transformers
from accelerate.state import AcceleratorState
from transformer_engine.common import recipe as recipes
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.accelerate import convert_to_te
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.check.checked_model import FindingKind
from te_precision_callbacks.check.factory import ModelFactoryError, build_model
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature
from tests.coverage.test_coverage import llama as llama_of
from tests.coverage.test_coverage import words
from tests.docs.pages import PAGES, blocks
from tests.docs.pages import run as run_block
from tests.manual.test_command import ends, one_line

CONFIG = """
watched:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [weight], stats: [max], freq: 10}
kept:
  enabled: True
  layers: {layer_numbers: ['0-1']}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [dgrad]}
later:
  enabled: False
"""

MODELS = """
import torch
import transformer_engine.pytorch as te

not_a_function = 3

class Net(torch.nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(te.TransformerLayer(64, 128, 4) for _ in range(blocks))
        self.head = torch.nn.Linear(64, 100)

def build():
    print("building")
    return Net()

model = torch.nn.Linear(2, 2)

def on_the_cpu_only():
    made = Net(1)
    assert float(torch.ones(1)) == 1
    return made

def with_argument(width):
    return Net()

def fails():
    raise ValueError("no such width")

def exits():
    raise SystemExit("usage")

def asks_for_a_gpu():
    return Net(1).cuda()

def returns_the_class():
    return Net

def returns_a_number():
    return 3

"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import torch\nimport nowhere_at_all\n")
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    before = set(sys.modules)
    yield tmp_path
    for name in {"my_models", "broken", "wrong"} & (set(sys.modules) - before):
        del sys.modules[name]


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["check", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def as_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", code=code))


@pytest.mark.usefixtures("here")
def test_a_config_alone() -> None:
    assert one_line(run("config.yaml")) == "config.yaml: 3 sections (1 not enabled), no errors."
    assert as_json("config.yaml") == {"config": "config.yaml", "errors": [], "notes": []}


def test_all_errors_of_a_config(here: Path) -> None:
    text = CONFIG.replace("[fc1]", "3").replace("weight", "weigth").replace("DisableFP8GEMM", "DisableFp8Gem")
    (here / "config.yaml").write_text(text)
    stated = one_line(run("config.yaml", code=1))
    assert stated.startswith("config.yaml: 3 errors")
    for said in (
        "line 4 column 12 (section 'watched'): 'layer_types'",
        "line 6 column 47 (section 'watched')",
        "Did you mean 'weight'?",
        "line 11 (section 'kept')",
    ):
        assert said in stated
    assert len(as_json("config.yaml", code=1)["errors"]) == 3
    (here / "config.yaml").write_text("".join(f"s{number}: 3\n" for number in range(250)))
    assert len(as_json("config.yaml", code=1)["errors"]) == 250


@pytest.mark.usefixtures("here")
def test_the_plan_as_json() -> None:
    result = as_json("config.yaml", "--model", "my_models:build", "--recipe", "fp8_current_scaling")
    assert (result["recipe"], result["device"], result["tokens"]) == ("fp8_current_scaling", "meta", None)
    of_layer = {layer: row for row in result["plan"] for layer in row["layers"]}
    assert len(of_layer) == 17
    dgrad = of_layer["layers.1.self_attention.proj"]["gemms"]["dgrad"]
    assert dgrad["operands"] == {"gradient": "FP32", "weight": "FP32"}
    assert (dgrad["reason"], dgrad["reason_ref"]) == (
        "a feature of the config",
        "DisableFP8GEMM in config.yaml, line 7 (section 'kept')",
    )
    assert of_layer["layers.2.layernorm_mlp.fc1"]["features"] == [
        {
            "feature": "LogTensorStats",
            "section": "watched",
            "on": "weight",
            "steps": "steps that are multiples of 10",
        }
    ]
    whole = sum(row["macs"] for row in result["plan"])
    assert whole == result["macs"] == 3 * (4 * (3 * 64 * 64 + 64 * 64 + 2 * 64 * 128) + 64 * 100)
    assert result["share"]["fp8"] == pytest.approx(1 - (2 * 32768 + 3 * 6400) / whole)


def test_findings_end_with_1(here: Path) -> None:
    (here / "config.yaml").write_text(CONFIG.replace("[fc1]", "[fc9]"))
    stated = run("config.yaml", "--model", "my_models:build", "--tokens", "30", code=1)
    assert "matches none of the 16 layers. Similar names: 'fc" in one_line(stated)
    assert "tokens is 30, but must be a multiple of 16 (next: 32)" in one_line(stated)
    result = as_json("config.yaml", "--model", "my_models:build", "--tokens", "30", code=1)
    assert [finding["kind"] for finding in result["findings"]] == ["unmatched", "shape"]
    assert stated.startswith("config.yaml: 2 findings for this model, listed at the end.")
    assert "no errors" not in stated


def test_a_section_without_a_layer_can_be_allowed(here: Path) -> None:
    (here / "config.yaml").write_text(CONFIG.replace("[fc1]", "[fc9]"))
    stated = run("config.yaml", "--model", "my_models:build", "--allow-unmatched")
    assert stated.startswith("config.yaml: 3 sections")
    assert "Note: config.yaml, line 4 (section 'watched'): the selector matches none" in one_line(stated)


@pytest.mark.usefixtures("here")
def test_a_share_that_is_not_known_is_no_finding_and_does_not_pass() -> None:
    arguments = ("config.yaml", "--model", "my_models:build", "--recipe", "fp8_current_scaling", "--require")
    stated = one_line(run(*arguments, "fp8 >= 1%"))
    assert stated.startswith("config.yaml: 3 sections (1 not enabled), no errors; not known before the run: fp8 >= 1%.")
    assert "attention of layers.{0-3}.self_attention: its kernel, formats and multiply-adds." in stated
    assert "te-precision run SCRIPT" in stated
    assert as_json(*arguments, "fp8 >= 1%")["undecided"] == ["fp8 >= 1%"]
    (Path("config.yaml")).write_text(CONFIG.replace("[fc1]", "[fc9]"))
    stated = one_line(run(*arguments, "fp8 >= 1%", code=1))
    assert stated.startswith(
        "config.yaml: 1 finding for this model, listed at the end; not known before the run: fp8 >= 1%."
    )


@pytest.mark.usefixtures("here")
def test_a_contract_that_the_plan_does_not_hold() -> None:
    arguments = ("config.yaml", "--model", "my_models:build", "--recipe", "fp8_current_scaling", "--require")
    assert as_json(*arguments, "fp8 fprop >= 60%")["findings"] == []
    assert [finding["kind"] for finding in as_json(*arguments, "fp8 fprop >= 99%", code=1)["findings"]] == ["contract"]
    assert "fp8 fprop is 9" in one_line(run(*arguments, "fp8 fprop >= 99%", code=1))


def test_a_model_that_meta_cannot_make(here: Path) -> None:
    assert as_json("config.yaml", "--model", "my_models:on_the_cpu_only")["device"] == "cpu"
    before = list(sys.path)
    build_model("my_models:build")
    assert sys.path == before


FACTORIES = {
    "nothing": "'nothing' failed: ModuleNotFoundError: No module named 'nothing'. Give package.module:function",
    "my-models:build": "ValueError: invalid format: 'my-models:build'. Give package.module:function",
    "my_model:build": "ModuleNotFoundError: No module named 'my_model'",
    "my_models:buidl": "AttributeError: module 'my_models' has no attribute 'buidl'",
    "my_models:not_a_function": "TypeError: 'int' object is not callable",
    "my_models:model": "TypeError: ",
    "my_models:with_argument": "missing 1 required positional argument: 'width'. Give package.module:function",
    "my_models:fails": 'ValueError: no such width (FILE, line 28: raise ValueError("no such width"))',
    "my_models:exits": "failed: SystemExit: usage",
    "my_models:asks_for_a_gpu": "line 34: return Net(1).cuda())",
    "my_models:returns_the_class": "'my_models:returns_the_class' has returned <class ",
    "my_models:returns_a_number": "has returned 3. Give package.module:function",
    "broken:build": "'broken:build' failed: ModuleNotFoundError: No module named 'nowhere_at_all'",
    "wrong:build": "'wrong:build' failed: ZeroDivisionError: division by zero",
}


def test_a_factory_that_gives_no_model(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for spec in FACTORIES:
        stated = ends(monkeypatch, capsys, "check", "config.yaml", "--model", spec)
        for part in FACTORIES[spec].replace("FILE", str(here / "my_models.py")).split(".*"):
            assert part in stated
        assert "Traceback" not in stated
        with pytest.raises(ModelFactoryError):
            build_model(spec)


@pytest.mark.usefixtures("here")
def test_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ("confg.yaml", "'confg.yaml' does not exist .* Did you mean 'config.yaml'?"),
        ("config.yaml --tokens 3", "--tokens: also give --model"),
        (
            "config.yaml --model my_models:build --observe fast",
            "--observe= must be 'debug', 'fused' or 'auto', not 'fast'",
        ),
        ("config.yaml --model my_models:build --require fp8", "--require= has 'fp8'"),
        ("config.yaml --model my_models:build --tokens 0", "Invalid value for '--tokens'"),
        ("config.yaml --model my_models:build --require 'fp9 >= 1%'", "no precision 'fp9'. Did you mean 'fp8'"),
        ("config.yaml --model my_models:build --recipe mxfp", "There is no recipe 'mxfp'. Did you mean 'mxfp8'?"),
        (
            "config.yaml --model my_models:build --recipe mxfp8",
            "cannot run the recipe 'mxfp8': Device compute capability",
        ),
    ]:
        stated = ends(monkeypatch, capsys, "check", *shlex.split(arguments))
        for part in message.split(" .* "):
            assert part in stated


# -------------------------------------------------------------------------------------------------------- docs/check.md


PAGE = "docs/check.md"

PAGE_CONFIG = """
kept:
  enabled: True
  layers: {layer_types: [fc2, down_proj]}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [fprop]}
"""


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, of_transformers, use = blocks(PAGE, "python")[:3]
    (tmp_path / "config.yaml").write_text(PAGE_CONFIG)
    (tmp_path / "my_models.py").write_text(models)
    (tmp_path / "hf_models.py").write_text(of_transformers)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    commands = blocks(PAGE, "bash", "te-precision check config.yaml")
    outputs = [[line.split() for line in run(*shlex.split(command)[2:]).splitlines()] for command in commands]
    for line in blocks(PAGE, "text")[0].splitlines():
        assert line.split() in outputs[1], line
    assert ["lm_head", *3 * ["FP32"], "3.15e+09", "(4.7", "%)", "torch.nn.Linear"] in outputs[2]
    del sys.modules["my_models"], sys.modules["hf_models"]

    names = run_block(models)
    with torch.device("meta"):
        names["model"] = names["build"]()
    run_block(use, **names)


def test_the_kinds_of_findings_are_on_the_page() -> None:
    text = PAGES[PAGE].read_text()
    assert [kind for kind in get_args(FindingKind) if f"| `{kind}` |" not in text] == []


# ---------------------------------------------------------------------- a model that Accelerate converts


HEAD = 100
"""The words of the Llama: no multiple of 16, so that Accelerate leaves its head out."""


def llama() -> transformers.PreTrainedModel:
    model = llama_of()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, HEAD, bias=False)
    model.config.vocab_size = HEAD
    return model


def converted() -> torch.nn.Module:
    return convert_to_te(llama())


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"  # which is YAML, too
    path.write_text(
        json.dumps({"watched": feature("LogTensorStats", ["q_proj"], tensors=["activation"], stats=["max"])})
    )
    return str(path)


def check(config: str, model: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    return as_json(config, "--model", f"{__name__}:{model}", *arguments, code=code)


def test_a_function_that_converts_its_model_is_planned_as_it_runs(config: str, tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # of a trainer of an earlier test
    result = check(config, "converted", "--recipe", "fp8_delayed_scaling", "--tokens", str(words().numel()))
    assert not AcceleratorState._shared_state
    assert result["device"] == "meta"
    model = converted()
    with InspectSession(None, model=model, log_dir=tmp_path / "run", statistics_log="off", strict=True) as session:
        with te.autocast(enabled=True, recipe=recipes.DelayedScaling()):
            loss = model(input_ids=words(), labels=words()).loss
        loss.backward()
        session.step()
    planned = {
        (layer, gemm): (product["operands"], product["reason"], product["reason_ref"])
        for row in result["plan"]
        for layer in row["layers"]
        for gemm, product in row["gemms"].items()
    }
    assert ("lm_head", "fprop") in planned
    assert planned == {
        (product.layer, product.gemm): (
            dict(product.operands),
            "" if product.reason is None else product.reason.value,
            product.reason_ref,
        )
        for product in session.coverage()
        if product.gemm in GEMMS
    }


def with_an_adapter() -> torch.nn.Module:
    return torch.nn.Sequential(llama())


@pytest.mark.parametrize("model", ["llama", "with_an_adapter"])
def test_the_layers_after_a_conversion_are_not_known(config: str, model: str) -> None:
    result = check(config, model, "--require", "fp8 fprop >= 90%", code=1)
    assert "te_precision_callbacks.accelerate.convert_to_te(model)" in result["unknown"][0]
    assert result["undecided"] == ["fp8 fprop >= 90%"]
    assert [finding["kind"] for finding in result["findings"]] == ["high_precision"]
    assert any("no Transformer Engine layer" in note for note in result["notes"])
