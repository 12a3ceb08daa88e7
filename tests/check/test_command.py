"""``te-precision check``."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.check.factory import ModelFactoryError, build_model
from te_precision_callbacks.check.findings import FindingKind
from tests.docs.pages import ROOT, blocks
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
    def __init__(self, blocks=4, spare=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(te.TransformerLayer(64, 128, 4) for _ in range(blocks))
        self.head = torch.nn.Linear(64, 100)
        if spare:
            self.spare = torch.nn.Linear(64, 64)

    def forward(self, x, rows=None):
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x if rows is None else x[:rows])}

class WithNumbers(Net):
    def forward(self, x):
        return super().forward(x, rows=1 + int(x.sum() > 0))

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

def asks_for_numbers():
    return WithNumbers()

def with_a_spare_layer():
    return Net(spare=True)

def batch():
    return torch.ones(32, 2, 64)

def keywords():
    return {"x": torch.ones(30, 1, 64), "rows": 16}

def too_wide():
    return (torch.ones(32, 2, 65),)

def returns_a_list():
    return [torch.ones(32, 2, 64)]
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
    assert one_line(run("config.yaml")) == "config.yaml: no errors in 3 sections, of which 1 not enabled."
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
    ):
        assert said in stated
    assert "line 11 (section 'kept')" in stated
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
            "steps": "steps 0 on that are multiples of 10",
        }
    ]
    whole = sum(row["macs"] for row in result["plan"])
    assert whole == result["macs"] == 3 * (4 * (3 * 64 * 64 + 64 * 64 + 2 * 64 * 128) + 64 * 100)
    assert result["share"]["fp8"] == pytest.approx(1 - (2 * 32768 + 3 * 6400) / whole)


@pytest.mark.usefixtures("here")
def test_the_plan_with_a_batch() -> None:
    arguments = ("config.yaml", "--recipe", "fp8_current_scaling", "--model")
    result = as_json(*arguments, "my_models:build", "--batch", "my_models:batch")
    assert (result["device"], result["tokens"], result["batch"]) == ("meta", None, "my_models:batch")
    of_layer = {layer: row for row in result["plan"] for layer in row["layers"]}
    layers = 3 * (4 * (3 * 64 * 64 + 64 * 64 + 2 * 64 * 128) + 64 * 100) * 64
    attention = 3 * 4 * (2 * 2 * 4 * 32 * 32 * 16)
    assert result["macs"] == layers + attention
    assert set(of_layer["layers.0.self_attention.core_attention"]["gemms"]) == {
        "qk",
        "pv",
        "qk backward",
        "pv backward",
    }
    assert result["not_reached"] == []
    numbers = as_json(*arguments, "my_models:asks_for_numbers", "--batch", "my_models:batch")
    assert numbers["device"] == "cpu"
    assert numbers["macs"] == result["macs"] - 3 * (64 - 2 * 2) * 64 * 100
    stated = run(*arguments, "my_models:build", "--batch", "my_models:keywords", code=1)
    assert "the batch of my_models:keywords." in one_line(stated)
    assert "tokens is 30 and has to be a multiple of 16 (next: 32)" in one_line(stated)
    stated = run(*arguments, "my_models:with_a_spare_layer", "--batch", "my_models:batch")
    assert "The forward does not reach these: spare." in stated


def test_findings_end_with_1(here: Path) -> None:
    (here / "config.yaml").write_text(CONFIG.replace("[fc1]", "[fc9]"))
    stated = run("config.yaml", "--model", "my_models:build", "--tokens", "30", code=1)
    assert "matches none of the 16 layers. Similar names: 'fc" in one_line(stated)
    assert "tokens is 30 and has to be a multiple of 16 (next: 32)" in one_line(stated)
    result = as_json("config.yaml", "--model", "my_models:build", "--tokens", "30", code=1)
    assert [finding["kind"] for finding in result["findings"]] == ["unmatched", "shape"]
    assert stated.startswith("config.yaml: 2 findings on this model, at the end.")
    assert "no errors" not in stated


def test_a_section_without_a_layer_can_be_allowed(here: Path) -> None:
    (here / "config.yaml").write_text(CONFIG.replace("[fc1]", "[fc9]"))
    stated = run("config.yaml", "--model", "my_models:build", "--allow-unmatched")
    assert stated.startswith("config.yaml: no errors in 3 sections")
    assert "Note: config.yaml, line 4 (section 'watched'): the section 'watched' matches none" in one_line(stated)


@pytest.mark.usefixtures("here")
def test_a_contract_that_the_plan_does_not_hold() -> None:
    arguments = ("config.yaml", "--model", "my_models:build", "--recipe", "fp8_current_scaling", "--require")
    assert as_json(*arguments, "fp8 fprop >= 60%")["findings"] == []
    assert [finding["kind"] for finding in as_json(*arguments, "fp8 fprop >= 99%", code=1)["findings"]] == ["contract"]
    assert "fp8 fprop >= 99%: it is 9" in one_line(run(*arguments, "fp8 fprop >= 99%", code=1))


def test_a_model_that_meta_cannot_make(here: Path) -> None:
    assert as_json("config.yaml", "--model", "my_models:on_the_cpu_only")["device"] == "cpu"
    before = list(sys.path)
    build_model("my_models:build")
    assert sys.path == before


FACTORIES = {
    "nothing": "'nothing' failed: ModuleNotFoundError: No module named 'nothing'. Write package.module:function",
    "my-models:build": "ValueError: invalid format: 'my-models:build'. Write package.module:function",
    "my_model:build": "ModuleNotFoundError: No module named 'my_model'",
    "my_models:buidl": "AttributeError: module 'my_models' has no attribute 'buidl'",
    "my_models:not_a_function": "TypeError: 'int' object is not callable",
    "my_models:model": "TypeError: ",
    "my_models:with_argument": "missing 1 required positional argument: 'width'. Write package.module:function",
    "my_models:fails": 'ValueError: no such width (FILE, line 39: raise ValueError("no such width"))',
    "my_models:exits": "failed: SystemExit: usage",
    "my_models:asks_for_a_gpu": "line 45: return Net(1).cuda())",
    "my_models:returns_the_class": "'my_models:returns_the_class' has returned <class ",
    "my_models:returns_a_number": "has returned 3. Write package.module:function",
    "broken:build": "'broken:build' failed: ModuleNotFoundError: No module named 'nowhere_at_all'",
    "wrong:build": "'wrong:build' failed: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("spec", FACTORIES)
def test_a_factory_that_gives_no_model(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    stated = ends(monkeypatch, capsys, "check", "config.yaml", "--model", spec)
    for part in FACTORIES[spec].replace("FILE", str(here / "my_models.py")).split(".*"):
        assert part in stated
    assert "Traceback" not in stated
    with pytest.raises(ModelFactoryError):
        build_model(spec)


PLAN = "config.yaml --model my_models:build"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("confg.yaml", "'confg.yaml' does not exist .* Did you mean 'config.yaml'?"),
        ("config.yaml --tokens 3", "--tokens: it is for a plan; give --model, too"),
        (f"{PLAN} --observe fast", "--observe= must be 'debug', 'fused' or 'auto', not 'fast'"),
        (f"{PLAN} --require fp8", "--require= has 'fp8'"),
        ("config.yaml --model my_models:build --tokens 0", "0 is less than 1"),
        ("config.yaml --model my_models:build --require 'fp9 >= 1%'", "no precision 'fp9'. Did you mean 'fp8'"),
        (f"{PLAN} --batch my_models:batch --tokens 3", "a batch has the tokens"),
        (f"{PLAN} --batch my_models:model", "'my_models:model' failed: TypeError: "),
        (f"{PLAN} --batch my_models:returns_a_number", "has returned 3, which is no batch"),
        (f"{PLAN} --batch my_models:returns_a_list", "Write a tuple in place of the list"),
        (f"{PLAN} --batch my_models:too_wide", "failed with the batch (float32[32, 2, 65])"),
        ("config.yaml --model my_models:build --recipe mxfp", "There is no recipe 'mxfp'. Did you mean 'mxfp8'?"),
        ("config.yaml --model my_models:build --recipe mxfp8", "refuses the recipe 'mxfp8': Device compute capability"),
    ],
)
def test_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
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
    models, of_transformers, use = blocks(PAGE, "python")
    (tmp_path / "config.yaml").write_text(PAGE_CONFIG)
    (tmp_path / "my_models.py").write_text(models)
    (tmp_path / "hf_models.py").write_text(of_transformers)
    monkeypatch.chdir(tmp_path)
    outputs = []
    for command in blocks(PAGE, "bash"):
        program, *arguments = shlex.split(command)
        assert program == "te-precision"
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
        outputs.append([line.split() for line in done.output.splitlines()])
    for drawn, output in zip(blocks(PAGE, "text"), outputs[1:], strict=True):
        for line in drawn.splitlines():
            assert line.split() in output, line
    del sys.modules["my_models"], sys.modules["hf_models"]

    names: dict[str, Any] = {}
    exec(compile(models, "my_models", "exec"), names)
    with torch.device("meta"):
        names["model"] = names["build"]()
    exec(compile(use, "use", "exec"), names)


def test_the_kinds_of_findings_are_on_the_page() -> None:
    text = (ROOT / PAGE).read_text()
    assert [kind for kind in get_args(FindingKind) if f"| `{kind}` |" not in text] == []
