"""Every block of code of the README and of docs/ runs, is parsed by its tool, or is run by another test."""

import importlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import tomllib
import torch
import transformer_engine.pytorch as te
import transformers
import typer
from accelerate import Accelerator
from lightning.pytorch.cli import LightningCLI
from packaging.requirements import Requirement

from te_precision_callbacks import PrecisionDebugCallback, cli
from te_precision_callbacks.config import load_config
from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from tests.conftest import statistics
from tests.docs.pages import LANGUAGES, PAGES, ROOT, RUN_BY, Block, all_blocks, blocks, run
from tests.functions import Function
from tests.lightning.models import Plain, loader, logged_lines
from tests.lightning.test_fabric import Net as PlainNet
from tests.transformers.models import Net, vectors

BLOCKS = [block for page in PAGES for block in all_blocks(page)]
HERE = [block for block in BLOCKS if not block.run_by and not block.not_run]


def of(language: str) -> list[Block]:
    return [block for block in HERE if block.language == language]


def test_each_block_has_a_language_and_a_test() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.page}, line {block.line}"
    for (page, language, begin), test in RUN_BY.items():
        assert blocks(page, language, begin), f"{page} has no block of {language} that begins with {begin!r}"
        assert "blocks(" in (ROOT / test).read_text(), f"{test} runs no blocks of {page}"
    marks = sum(path.read_text().count("<!-- not run:") for path in PAGES.values())
    assert marks == sum(bool(block.not_run) for block in BLOCKS), "a mark stands above a block, with its reason"


# ---------------------------------------------------------------------- Python


def with_loss() -> Function:
    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = Function(
        lambda inputs: SimpleNamespace(loss=(model.factor * last(first(inputs).abs())).square().mean()),
        first=first,
        last=last,
    )
    model.factor = 1.0
    return model


QUICK = "max_steps=2, accelerator='cpu', enable_progress_bar=False, default_root_dir='runs', logger=False"
"""The arguments of a Lightning trainer, in the place of ``max_steps=100``."""


def readme(folder: Path, first: str, line: str, accelerate: str, callback: str, pair: str, loop: str) -> None:
    names = run(first.replace("max_steps=100", QUICK), L=L, model=Plain(), data=loader(2))
    assert names["callback"].session.coverage().share("fp32") == 1

    Path("config.yaml").write_text(*blocks("README.md", "yaml"))
    trainer = run(line, L=L, PrecisionDebugCallback=PrecisionDebugCallback)["trainer"]
    assert any(isinstance(callback, PrecisionDebugCallback) for callback in trainer.callbacks)

    model = torch.nn.ModuleDict({"block": te.TransformerLayer(64, 128, 4)})
    accelerator = Accelerator(cpu=True)
    names = {"accelerator": accelerator, "model": accelerator.prepare(model), "loader": range(3)}
    assert run(accelerate, **names)["debugger"].session.iteration == 3

    args = transformers.TrainingArguments("run", use_cpu=True, report_to=[])
    result = run(callback, transformers=transformers, model=Net(), data=vectors(8), args=args)
    assert result["callback"] in result["trainer"].callback_handler.callbacks
    run(pair)

    names = run(loop, **names)
    assert names["session"].iteration == 3
    assert len(names["session"].layers) == 4


def lightning_page(folder: Path, script: str, fabric: str) -> None:
    Path("config.yaml").write_text(str(statistics()))
    assert run(script.replace("max_steps=100", QUICK))["callback"].session.iteration == 2
    assert len(logged_lines(folder / "runs")) == 4 * 2 * 2, "layers, statistics, steps"
    net = PlainNet()
    given = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "data": [torch.ones(16, 32)] * 3}
    result = run(fabric.replace("callbacks=", "accelerator='cpu', devices=1, callbacks="), **given)
    assert result["callback"].session.iteration == 3
    assert result["callback"].session.coverage().share("fp8") == 1


def activation_overflow(folder: Path, block: str, label: str, look: str, skip: str) -> None:
    model = with_loss()
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [{"inputs": torch.ones(2, 4)}] * 3,
    }
    run(block, **names)
    model.factor = float("inf")
    with pytest.raises(ActivationOverflowError, match=r"\[0\]"):
        run(block, **names)

    labelled = type("Labelled", (torch.nn.Module,), {"forward": run(label)["forward"]})()
    labelled.layer_norm = lambda hidden: hidden * float("inf")  # no module: nothing else watches its result
    watch = DebugActivationOverflow(labelled)
    labelled(torch.ones(2, 4))
    with pytest.raises(ActivationOverflowError, match="after layer_norm"):
        watch.close()

    names |= {"ActivationOverflowError": ActivationOverflowError, "debug_overflow": DebugActivationOverflow(model)}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ActivationOverflowError):
        run(look, loss=model(torch.ones(2, 4)).loss, **names)
    names["debug_overflow"].close()
    with DebugActivationOverflow(model):
        run(skip, loss=model(torch.ones(2, 4)).loss, **names)
        assert all(map(torch.equal, before, model.parameters())), "the batch was left out"
        assert all(parameter.grad is None for parameter in model.parameters())
        model.factor = 1.0
        run(skip, loss=model(torch.ones(2, 4)).loss, **names)
    assert not all(map(torch.equal, before, model.parameters()))


def reference_backend(folder: Path, code: str) -> None:
    assert run(code)["layer"].weight.grad.isfinite().all()


def scopes(folder: Path, code: str) -> None:
    Path("config.yaml").write_text(str(statistics()))
    result = run(code)
    model = torch.nn.ModuleDict({"fc": te.Linear(32, 32), "experts": te.GroupedLinear(1, 32, 32)})
    for session, names in (
        (result["of_stage"], ["pp1.fc", "pp1.experts.gemm_0"]),
        (result["of_experts"], ["fc", "ep1.experts.gemm_0"]),
    ):
        with session:
            session.attach(model)
            assert [layer.name for layer in session.layers] == names


def diagnosis(folder: Path, session: str, react: str, again: str) -> None:
    result = run(session)
    assert f"# {result['session'].findings.summary}\n" in session
    assert result["session"].coverage().share("fp8") > 0
    stops = run(react)["react"]
    assert [stops(SimpleNamespace(severity="note", layers=layers)) for layers in (("head",), ())] == ["stop", None]
    result |= run(again)
    assert result["verdict"] == result["session"].findings


def gemm_error(folder: Path, code: str) -> None:
    result = run(code)["session"].findings
    assert "wrong-gemm" in result.checked


PYTHON: dict[str, Callable[..., None]] = {
    "README.md": readme,
    "docs/activation-overflow.md": activation_overflow,
    "docs/diagnosis.md": diagnosis,
    "docs/gemm-error.md": gemm_error,
    "docs/lightning.md": lightning_page,
    "docs/reference-backend.md": reference_backend,
    "docs/statistics.md": scopes,
}


@pytest.mark.parametrize("page", sorted({block.page for block in HERE if block.language == "python"}))
def test_the_python_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PYTHON[page](tmp_path, *[block.code for block in HERE if (block.page, block.language) == (page, "python")])


# ---------------------------------------------------------------------- YAML


@pytest.mark.parametrize("block", of("yaml"), ids=lambda block: f"{block.page}:{block.line}")
def test_a_yaml_block_is_a_valid_config(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(block.code)
    if block.code.startswith("trainer:"):  # of LightningCLI
        Path("trainer.yaml").write_text(block.code)
        Path("config.yaml").write_text(str(statistics()))
        monkeypatch.setattr("sys.argv", ["train.py", "--config", "trainer.yaml"])
        parsed = LightningCLI(Plain, run=False, save_config_callback=None, seed_everything_default=False)
        assert any(isinstance(callback, PrecisionDebugCallback) for callback in parsed.trainer.callbacks)
        return
    assert load_config(tmp_path / "config.yaml").enabled_sections


# ---------------------------------------------------------------------- shell


SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(arguments: list[str], comment: str) -> None:
    for word in arguments:
        variable, is_variable, _ = word.partition("=")
        pattern = rf"\$\({variable}\)" if is_variable else rf"^{word}:"
        assert re.search(pattern, MAKEFILE, re.MULTILINE), f"the Makefile has no {variable}"


def pip(arguments: list[str], comment: str) -> None:
    assert arguments[0] == "install"
    for text in arguments[2 if "-e" in arguments else 1 :]:
        wanted = Requirement(re.sub(r"^\.", SETTINGS["name"], text))
        assert wanted.name == SETTINGS["name"]
        assert wanted.extras <= set(SETTINGS["optional-dependencies"])


def te_precision(arguments: list[str], comment: str) -> None:
    """Its arguments are accepted; tests/reference/test_run.py tests their effect."""
    command: Any = typer.main.get_command(cli.app)
    with command.make_context("te-precision", arguments) as context:
        name, result, rest = command.resolve_command(context, arguments)
        result.make_context(name, rest, parent=context).close()


def pytest_(arguments: list[str], comment: str) -> None:
    assert arguments[0] == "-p"
    assert "pytest_" in " ".join(vars(importlib.import_module(arguments[1])))


def python(arguments: list[str], comment: str) -> None:
    """A script of the repository; the comment names some of its options, which may be keys of a table there."""
    script = ROOT / arguments[0]
    sources = "".join(path.read_text() for path in script.parent.glob("*.py"))
    assert script.is_file()
    for option in re.findall(r"--[\w-]+", comment):
        assert re.search(rf'"(--)?{option.removeprefix("--")}"', sources), option


SHELL = {"make": make, "pip": pip, "te-precision": te_precision, "pytest": pytest_, "python": python}


def test_a_shell_block_names_existing_targets_and_options() -> None:
    """Commands that install, or that run all tests, are read: each target, extra, file and option must be there."""
    for block in of("bash"):
        for line in block.code.splitlines():
            command, _, comment = line.partition("  #")
            program, *arguments = shlex.split(
                re.sub(r"[\[\]](?![^\[]*')", "", command) if "make" in command else command
            )
            SHELL[program](arguments, comment)
