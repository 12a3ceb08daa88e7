"""``te-precision doctor``: on this machine, without Transformer Engine, with another version, and its findings.

Processes have real problems: an environment without Transformer Engine, metadata of another version first on
the path, a log folder below a file.
"""

import json
import platform
import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.cli.doctor.machine import (
    COMPILED_BUILD,
    LogFolder,
    Machine,
    Recipes,
    TransformerEngine,
    find_transformer_engine,
    findings,
    log_folder,
)
from te_precision_callbacks.reference import target
from te_precision_callbacks.te import environment
from te_precision_callbacks.te.environment import VARIABLES, Gpu, Torch
from tests.forked import executable
from tests.manual.test_command import one_line
from tests.reference.processes import REPOSITORY, run

# ---------------------------------------------------------------------- whole machines


@pytest.mark.slow
def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference backend stands in, and nothing is wrong; only the table's environment variables are shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", executable())
    for name in ("TE_PRECISION_REFERENCE_INSTALL", "TE_PRECISION_REFERENCE_CAPABILITY", "TE_PRECISION_QUIET"):
        monkeypatch.delenv(name, raising=False)  # as the user's shell, which the tests' backend is not in
    secrets = {"WANDB_API_KEY": "hush", "NVTE_TOKEN_OF_MINE": "hush"}
    settings = {"NVTE_FP8_DPA_BWD": "0", "NVTE_NVTX_ENABLED": "1", **secrets}
    for name, value in (settings | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--log-dir", "logs"])
    assert done.exit_code == 0, done.output
    assert "hush" not in done.output
    result = json.loads(done.stdout)
    assert result["findings"] == []

    expected = {name: metadata.version(name) for name in ("torch", "transformer-engine")}
    assert {"python": platform.python_version(), **expected}.items() <= result["packages"].items()

    engine = result["transformer_engine"]
    assert engine["backend"] == "reference"
    assert "meta package" in engine["why_not_compiled"]
    recipes = engine["recipes"]
    assert recipes["place"] == "reference backend at {}.{}".format(*target.capability())
    if target.capability() == (9, 0):
        assert set(recipes["refusals"]) == {"mxfp8", "nvfp4"}
        assert "10.0 or higher" in recipes["refusals"]["nvfp4"]

    assert result["torch"]["gpus"] == []
    assert result["torch"]["settings"]["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert result["environment"] == {"NVTE_FP8_DPA_BWD": "0"}
    assert result["log_folder"]["path"] == str(tmp_path / "logs")
    assert not result["log_folder"]["exists"]
    assert result["log_folder"]["why_not_writable"] == ""
    assert result["log_folder"]["free_bytes"] > 0
    assert log_folder(tmp_path).exists
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.fixture(scope="module")
def without_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has all of this one's packages, but for Transformer Engine and trackers."""
    folder = tmp_path_factory.mktemp("environment")
    real = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\ninclude-system-site-packages = false\n")
    site = folder / "lib" / real.name / "site-packages"
    site.mkdir(parents=True)
    for path in Path(torch.__path__[0]).parent.iterdir():
        if not path.name.startswith(("transformer_engine", "wandb", "mlflow", "tensorboard")):
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.mark.extended
@pytest.mark.slow
def test_a_machine_where_everything_is_wrong(without_engine: Path, tmp_path: Path) -> None:
    """No Transformer Engine, and a log folder below a file, for root as well."""
    (tmp_path / "file").write_text("not a folder")
    command = [str(without_engine), "-m", "te_precision_callbacks", "doctor", "--log-dir", "file/logs"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    _, _, shown = done.stdout.partition("Known problems\n")
    first, second = map(one_line, re.split(r"^(?=\d\. )", shown, flags=re.MULTILINE)[1:])
    shown = one_line(shown)
    assert first.startswith("1. (stops a run) neither the compiled Transformer Engine nor the reference backend")
    assert "No module named 'transformer_engine'" in first
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20,<2.21'" in shown
    assert "pip install -e '.[reference]'" in shown
    assert second.startswith("2. (stops a run)")
    assert str(tmp_path / "file") in second
    assert "is not a folder" in second
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "not installed" in rows["transformer-engine"]


# ---------------------------------------------------------------------- parts


def test_the_versions_of_driver_and_cudnn() -> None:
    """The two forms of the driver's text, and numbers as in cudnn_version.h: 9.10.2, 8.9.2."""
    text = "NVRM version: NVIDIA UNIX {}  570.124.06  Wed Feb 26 02:09:47 UTC 2025\nGCC version:  gcc version 12.3.0\n"
    for kind in ("x86_64 Kernel Module", "Open Kernel Module for x86_64"):
        assert environment._driver(text.format(kind)) == "570.124.06"
    assert [environment._cudnn(number) for number in (91002, 90100, 8902)] == ["9.10.2", "9.1.0", "8.9.2"]


def test_another_cudnn_than_the_one_that_torch_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises at the first query, as after Transformer Engine has loaded the cuDNN of the system."""
    said = "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0) but found runtime version (9, 14, 0)"
    monkeypatch.setattr(torch.backends.cudnn, "version", mock.Mock(side_effect=RuntimeError(said)))
    monkeypatch.setattr(torch._C, "_cudnn", SimpleNamespace(getVersionInt=lambda: 91400), raising=False)
    facts = environment.torch_facts()
    assert (facts.cudnn, facts.warnings) == ("9.14.0", (said,))


# ---------------------------------------------------------------------- findings

HERE = Machine(
    platform="Linux",
    packages={"transformer-engine": "2.20.2"},
    transformer_engine=TransformerEngine(
        {"transformer-engine": "2.20.2"},
        "compiled",
        "the compiled Transformer Engine",
        "",
        "",
        Recipes("this GPU", {"nvfp4": "Device compute capability 10.0"}),
    ),
    torch=Torch((Gpu("NVIDIA H100", "9.0", 80 << 30),), None, "570.124.06", "12.8", "9.10.2", (), {}),
    environment={},
    log_folder=LogFolder("/logs", True, "", "", 1 << 40),
)


def told(machine: Machine) -> list[str]:
    return [f"{finding.severity}: {finding.what} -> {finding.remedy}" for finding in findings(machine)]


def with_engine(**changed: Any) -> Machine:
    return replace(HERE, transformer_engine=replace(HERE.transformer_engine, **changed))


def with_recipes(**changed: Any) -> Machine:
    return with_engine(recipes=replace(HERE.transformer_engine.recipes, **changed))


@pytest.mark.parametrize(
    ("examination", "words"),
    [
        (
            with_engine(backend="reference", why_not_compiled="ImportError: libcudart.so.13"),
            "changes a run: the compiled .* cannot be imported: ImportError: libcudart.so.13",
        ),
        (
            with_recipes(refusals=dict.fromkeys(RECIPES, "8.9 or higher")),
            "changes a run: no FP8 recipe runs on this GPU: 8.9 or higher",
        ),
        (
            with_recipes(failure="KeyError: 'X'"),
            r"stops a run: Transformer Engine's checks of recipes fail \(this GPU\): KeyError: 'X'",
        ),
        (
            replace(HERE, torch=Torch((), None, "570.1", None, None, (), {})),
            "changes a run: an NVIDIA driver \\(570.1\\)",
        ),
        (
            replace(HERE, torch=Torch((), None, None, "13.0", None, ("driver too old",), {})),
            "changes a run: torch warns: driver too old",
        ),
        (replace(HERE, log_folder=LogFolder("/logs", True, "", "little space", 9)), "changes a run: .*little space"),
        (replace(HERE, torch="ImportError: no libtorch"), "stops a run: torch cannot be imported: ImportError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_finding(examination: Machine, words: str) -> None:
    assert told(HERE) == []
    (line,) = told(examination)
    assert re.match(words, line), line


@pytest.mark.slow
def test_another_version_of_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine-2.19.0.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.19.0\n"
    (tmp_path / "transformer_engine-2.19.0.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    engine = find_transformer_engine()
    assert (engine.backend, engine.installed) == ("none", {"transformer-engine": "2.19.0"})
    assert "2.19.0" in engine.why_no_reference
    (line,) = told(replace(HERE, transformer_engine=engine))
    assert line.startswith("stops a run: neither the compiled Transformer Engine nor the reference backend")


def test_names_on_pages() -> None:
    """Of the variables that are read, and the range of versions in the line that installs."""
    listed = (REPOSITORY / "docs" / "support.md").read_text().partition("\n### Environment variables\n")[2]
    assert set(re.findall(r"`([A-Z]\w{2,})`", listed)) == set(VARIABLES)
    (versions,) = set(re.findall(r'"transformer-engine(>=[^"]*)"', (REPOSITORY / "pyproject.toml").read_text()))
    assert f"transformer-engine[pytorch]{versions}" in COMPILED_BUILD
