"""CONTRIBUTING.md: its steps to add a statistic, a feature, a format and an integration work in a copy."""

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.forked import executable
from tests.reference.processes import run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

SCRIPT = """
import sys
from pathlib import Path
import torch
from te_precision_callbacks import InspectSession, reference
from te_precision_callbacks.base.numerics.formats import E3M2
from te_precision_callbacks.options import SessionOptions
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
    put(package / "config" / "schemas.py", "FEATURES: Mapping", schema + "\n\n")
    put(package / "config" / "schemas.py", "        DumpTensors,\n", "        HighPrecisionWgrad,\n")
    (of_format,) = steps("A format")
    put(package / "base" / "numerics" / "formats.py", "E2M1 = FloatFormat", of_format)
    (integration,) = steps("An integration")

    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(integration=integration))
    # The copy, not the installed package.
    done = run([executable(), str(script)], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    operands, last = done.stdout.splitlines()[-2:]
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
