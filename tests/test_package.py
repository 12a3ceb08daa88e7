"""The package: installation, quick imports, errors of missing extras, and the steps of CONTRIBUTING.md in a copy."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_namespace_packages

import te_precision_callbacks
from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE
from tests.docs.pages import blocks
from tests.forked import executable
from tests.reference.processes import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("lightning", "accelerate", "transformers", "transformer_engine", "nvdlfw_inspect", "tensorboard")


def python(code: str, folder: Path = ROOT.parent, *, fresh: bool = False) -> str:
    """Run code in another process, without this process's reference backend.

    Args:
        fresh: whether no library may be imported before; without it, the process starts sooner.
    """
    environment = {key: value for key, value in os.environ.items() if key not in (ENVIRONMENT_VARIABLE, "PYTHONPATH")}
    command = [sys.executable if fresh else executable(), "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.processes
def test_readers_load_no_session_and_a_session_no_trainer() -> None:
    """As it is, with what packages import by themselves, and in one process: most of the time goes to torch."""
    code = f"""
import sys, te_precision_callbacks.dumps, te_precision_callbacks.sinks, te_precision_callbacks.debug_utils
import te_precision_callbacks.views.compare.comparison, te_precision_callbacks.views.show.view
import te_precision_callbacks.speed.expected
session = tuple(f"te_precision_callbacks.{{part}}" for part in ("session", "config", "features"))
print([name for name in sys.modules if name.startswith((*session, "transformer_engine.", "nvdlfw"))])
from te_precision_callbacks.config import load_config
from te_precision_callbacks.session import InspectSession
import te_precision_callbacks.features
print([name for name in {FRAMEWORKS} if name in sys.modules])"""
    assert python(code, fresh=True).splitlines() == ["[]", "[]"]


def test_every_lazy_name_is_there() -> None:
    for name in te_precision_callbacks.__all__:
        assert getattr(te_precision_callbacks, name).__name__ == name
    assert set(te_precision_callbacks.__all__) <= set(dir(te_precision_callbacks))
    with pytest.raises(AttributeError, match="no attribute 'PrecisionDebugCallbak'"):
        _ = te_precision_callbacks.PrecisionDebugCallbak


@pytest.mark.processes
def test_the_error_of_a_missing_package_has_a_remedy() -> None:
    """Of a session without Transformer Engine, and of a missing extra."""
    code = """
import sys
from te_precision_callbacks import InspectSession, PrecisionDebugError
try:
    InspectSession().start()
except PrecisionDebugError as error:
    print(type(error).__name__, error)
sys.modules |= {name: None for name in ("lightning", *sys.modules) if name.partition(".")[0] == "lightning"}
try:
    from te_precision_callbacks import PrecisionDebugCallback
except ImportError as error:
    print("extra:", isinstance(error, PrecisionDebugError), error)"""
    of_session, _, of_extra = python(code).partition("extra: ")
    assert of_session.startswith("TransformerEngineUnavailableError")
    assert "reference.install_where_needed()" in of_session
    assert "te-precision run" in of_session
    assert re.match(r"True.*pip install -e '.\[lightning\]' in a checkout of te-precision-callbacks", of_extra)


@pytest.mark.processes
def test_overflow_detection_needs_no_transformer_engine(tmp_path: Path) -> None:
    """Each of its integrations stops on a +inf; one that needs Transformer Engine names the extra to install."""
    code = """
import argparse, sys
sys.modules["transformer_engine"] = sys.modules["nvdlfw_inspect"] = None  # as where they are not installed
import torch
from te_precision_callbacks.debug_utils import ActivationOverflowError, DebugActivationOverflow
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("te_precision_callbacks.")}
assert not loaded & {"session", "config", "features", "dumps", "sinks", "reference"}, loaded
from accelerate import Accelerator
from te_precision_callbacks import PrecisionDebugger
from te_precision_callbacks.debug_options import add_debug_options, debugging
from te_precision_callbacks.session import TransformerEngineUnavailableError
from te_precision_callbacks.transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": self.last(self.first(x).abs() * float("inf")).sum()}

def by_hand(model):
    with DebugActivationOverflow(model) as watch:
        model(torch.ones(2, 4))["loss"].backward()
        watch.check()

def by_flag(model):
    parser = argparse.ArgumentParser()
    add_debug_options(parser)
    with debugging(parser.parse_args(["--debug", "activation_overflow"]), model) as debug:
        model(torch.ones(2, 4))["loss"].backward()
        debug.step()

def by_trainer(model, debug="activation_overflow"):
    args = TrainingArguments("run", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, debug=debug)
    Trainer(model, args, train_dataset=[{"x": torch.ones(4)}] * 8).train()

for integration in (by_hand, by_flag, by_trainer):
    try:
        integration(Net())
    except ActivationOverflowError as error:
        print(integration.__name__, str(error).splitlines()[0])

accelerator = Accelerator(cpu=True)
debugger = PrecisionDebugger(accelerator, accelerator.prepare(Net()), debug="activation_overflow")
for needs_a_session in (debugger.start, lambda: by_trainer(Net(), "te_precision")):
    try:
        needs_a_session()
    except TransformerEngineUnavailableError as error:
        print(error)"""
    lines = python(code, tmp_path).splitlines()
    assert [line.split(" Linear")[0] for line in lines[:3]] == [
        f"{name} > [0] last:" for name in ("by_hand", "by_flag", "by_trainer")
    ]
    assert len(lines) == 5
    assert all("pip install -e '.[reference]'" in line for line in lines[3:])


def test_the_list_of_packages_is_complete() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    result = find_namespace_packages(str(ROOT), include=["te_precision_callbacks*"])
    with_files = [name for name in result if list((ROOT / name.replace(".", "/")).glob("*.py"))]
    assert sorted(settings["packages"]) == sorted([*with_files, "te_precision_callbacks.features"])


def built(kind: str, folder: Path) -> Path:
    made_here = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "*_cache", "__pycache__", "*.egg-info")
    source = shutil.copytree(ROOT, folder / "source", ignore=made_here)
    code = f"import setuptools.build_meta as build; build.build_{kind}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (made,) = [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]
    return made


@pytest.mark.processes
def test_a_wheel_has_the_features_and_does_not_require_transformer_engine(tmp_path: Path) -> None:
    zipfile.ZipFile(built("wheel", tmp_path)).extractall(tmp_path / "site")
    (metadata,) = (tmp_path / "site").glob("*.dist-info")
    links = re.findall(r"\]\(([^)]+)\)", (metadata / "METADATA").read_text())
    here = re.compile(r"https://github\.com/[\w-]+/te-precision-callbacks/(?:blob|raw)/v[\d.]+/([^#]+)")
    results = [here.match(link) for link in links if "NVIDIA" not in link and not link.startswith("#")]
    assert len(results) > 20
    assert all(link and (ROOT / link[1]).is_file() for link in results), "an index page knows no relative links"
    needed = [Requirement(text) for text in Distribution.at(metadata).requires or ()]
    without_extra = {item.name for item in needed if item.marker is None or item.marker.evaluate({"extra": ""})}
    assert {"torch", "nvdlfw-inspect"} <= without_extra
    assert not [name for name in without_extra if name.startswith("transformer-engine")], "PEFT fails where it is empty"
    code = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, {str(tmp_path / "site")!r})
import te_precision_callbacks.features, te_precision_callbacks.cli
from te_precision_callbacks.speed import known_devices
assert all(device.constants for device in known_devices().values())
print(te_precision_callbacks.features.__file__)"""
    assert python(code).startswith(str(tmp_path / "site"))
    assert not list((tmp_path / "site").glob("*.pth")), "it would run in every Python process of the environment"


TEXT = (ROOT / "CONTRIBUTING.md").read_text()

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import torch
from te_precision_callbacks import InspectSession, reference
from te_precision_callbacks.base.numerics.formats import E3M2
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.statistics.series import SeriesTable
reference.install()
import transformer_engine.pytorch as te

{integration}

class Loop:
    folder = Path("logs")
    step = 7

class Kept:
    rows = []
    def start(self, run): pass
    def write(self, records): self.rows += records
    def close(self, error): pass

config = {{"all": {{"enabled": True, "layers": {{"layer_types": ["linear"]}}, "transformer_engine": {{
    "HighPrecisionWgrad": {{"enabled": True}},
    "LogTensorStats": {{"enabled": True, "tensors": ["activation"], "stats": ["rms"], "freq": 1}},
}}}}}}
model, x, loop = te.Linear(32, 32), torch.randn(64, 32, requires_grad=True), Loop()
debugger = LoopDebugger(model, config, sinks=[Kept()])
debugger.on_train_start(loop)
with te.autocast(enabled=True):
    y = model(x)
y.sum().backward()
debugger.on_step_end(loop)
debugger.on_end(loop)
print({{found.gemm: sorted(set(found.operands.values())) for found in debugger.session.precision}})
table, diagnosis = SeriesTable(), Diagnosis()
series = np.array([table.intern("fc1", "activation", "zeros%")], np.int32)
splitter = Splitter(table.__getitem__)
for step in range(4):
    diagnosis.step(splitter.step(step, series, np.array([99.5 if step else 1.0])))
print([f"{{finding}}" for finding in diagnosis.verdict])
(row,) = Kept.rows
torch.testing.assert_close(row.value, x.double().square().mean().sqrt().item(), rtol=1e-6, atol=0)
print(row.statistic, E3M2.max, E3M2.min_subnormal, sys.modules["te_precision_callbacks"].__file__)
"""


def steps(heading: str) -> list[str]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [code for code in blocks("CONTRIBUTING.md", "python") if code.splitlines()[0] in section]


def put(file: Path, before: str, text: str) -> None:
    source = file.read_text()
    assert source.count(before) == 1, f"{file.name} has no longer one {before!r}"
    file.write_text(source.replace(before, text + before))


@pytest.mark.processes
def test_the_steps_of_the_page_work(tmp_path: Path) -> None:
    for folder in ("te_precision_callbacks", "features"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.move(tmp_path / "features", tmp_path / "te_precision_callbacks" / "features")
    package = tmp_path / "te_precision_callbacks"

    (statistic,) = steps("A statistic")
    put(package / "statistics" / "table.py", '    yield magnitude("l1_norm"', textwrap.indent(statistic, "    "))
    feature, schema = steps("A feature")
    (package / "features" / "high_precision_wgrad.py").write_text(feature)
    put(package / "config" / "schemas.py", "_SCHEMAS: tuple", schema + "\n\n")
    put(package / "config" / "schemas.py", "    DumpTensors,\n", "    HighPrecisionWgrad,\n")
    (of_format,) = steps("A format")
    put(package / "base" / "numerics" / "formats.py", "E2M1 = FloatFormat", of_format)
    (row,) = steps("A rule of the diagnosis")
    rules = package / "diagnosis" / "rules" / "tensors.py"
    put(rules, '    Rule(\n        id="zeros-in-wgrad"', textwrap.indent(row.rstrip(), "    ") + ",\n")
    (integration,) = steps("An integration")

    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(integration=integration))
    # The copy, not the installed package.
    done = run([executable(), str(script)], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    operands, of_rule, last = done.stdout.splitlines()[-3:]
    assert (
        of_rule == "['activation of fc1: at step 3, 99.5 % of the elements are 0 (zeros-in-activation, since step 1)']"
    )
    assert operands == "{'fprop': ['FP8 E4M3'], 'dgrad': ['FP8 E4M3', 'FP8 E5M2'], 'wgrad': ['FP32']}"
    # OCP Microscaling Formats (MX) Specification 1.0, table 1: the largest number and the smallest subnormal of E3M2.
    assert last == f"rms 28.0 0.0625 {package / '__init__.py'}"


def test_every_place_that_it_names_is_there() -> None:
    named = re.findall(
        r"(?:te_precision_callbacks|tests|docs|features|engine|statistics|\.github)/[\w/]+\.(?:py|md|yml)", TEXT
    )
    assert len(named) > 8
    for path in set(named) - {"features/high_precision_wgrad.py"}:
        assert any((base / path).exists() for base in (ROOT, ROOT / "te_precision_callbacks")), path
