"""Values of debug=, and --debug for any argparse parser."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base.debug_values import parse_debug
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.debug_options import (
    UnknownDebugOptionError,
    add_debug_options,
    debugging,
)
from te_precision_callbacks.overflow import ActivationOverflowError
from tests.conftest import Keeper, statistics
from tests.lightning.models import logged_lines
from tests.reference.processes import python


def test_every_spelling_of_the_options_is_parsed() -> None:
    for value, names in [
        (None, ()),
        ("", ()),
        ((), ()),
        ("te_precision", ("te_precision",)),
        (" te_precision  activation_overflow ", ("te_precision", "activation_overflow")),
        (["te_precision", "activation_overflow te_precision", None], ("te_precision", "activation_overflow")),
    ]:
        assert parse_debug(value) == names
    for wrong in ["overflow", ["te_precision", "overflow"], True, 3, [True], "te_precision,"]:
        with pytest.raises(UnknownDebugOptionError, match="'activation_overflow', 'te_precision'") as raised:
            parse_debug(wrong)
        assert isinstance(raised.value, ValueError)
        assert isinstance(raised.value, PrecisionDebugError)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--steps", type=int, default=3)
    add_debug_options(made)
    return made


@pytest.mark.parametrize(
    ("flags", "debug", "config"),
    [
        ([], (), None),
        (["--debug", "activation_overflow"], ("activation_overflow",), None),
        (["--debug", "te_precision", "activation_overflow"], ("te_precision", "activation_overflow"), None),
        (["--debug", "activation_overflow te_precision"], ("activation_overflow", "te_precision"), None),
        (["--debug=te_precision", "--debug", "activation_overflow"], ("te_precision", "activation_overflow"), None),
        (["--debug", "te_precision", "--te_precision_config", "my.yaml"], ("te_precision",), "my.yaml"),
        (["--debug", "te_precision", "--te-precision-config", "my.yaml"], ("te_precision",), "my.yaml"),
    ],
)
def test_any_parser_takes_the_options(
    flags: list[str], debug: tuple[str, ...], config: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = parser().parse_args(flags)
    assert (arguments.debug, arguments.te_precision_config) == (debug, config)
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args([*flags, "--debug", "te_precision", "overflow"])
    assert "argument --debug: There is no debug option 'overflow'" in capsys.readouterr().err


# ---------------------------------------------------------------------- acting on them


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def train(arguments: argparse.Namespace, model: torch.nn.Module, spoil_at: int | None = None, **keywords: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with debugging(arguments, model, **keywords) as debug:
        for step in range(arguments.steps):
            loss = model(batch(step) * (float("inf") if step == spoil_at else 1.0)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            debug.step()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))


@pytest.mark.parametrize("more", [[], ["activation_overflow"]])
def test_te_precision_is_a_session(tmp_path: Path, keeper: Keeper, more: list[str]) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(
        "s: {enabled: True, layers: {layer_types: ['0']}, transformer_engine:"
        " {LogTensorStats: {enabled: True, tensors: [activation], stats: [max], freq: 1}}}"
    )
    arguments = parser().parse_args(["--debug", "te_precision", *more, "--te_precision_config", str(config)])
    train(arguments, net(), log_dir=tmp_path, sinks=[keeper])
    largest = {step: batch(step).max().item() for step in range(3)}
    assert keeper.values("max") == largest
    assert logged_lines(tmp_path) == {("0_activation_max", step): value for step, value in largest.items()}


@pytest.mark.parametrize("flags", [["activation_overflow"], ["activation_overflow", "te_precision"]])
def test_an_overflow_stops_the_loop(tmp_path: Path, flags: list[str]) -> None:
    model = net()
    with pytest.raises(ActivationOverflowError, match=r"\[1\]"):
        train(parser().parse_args(["--debug", *flags]), model, spoil_at=1, log_dir=tmp_path)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]


@pytest.mark.parametrize(
    ("options", "keywords", "kind", "message"),
    [
        ({}, {}, OptionError, r"no 'debug': call add_debug_options\(parser\)"),
        ({"debug": ["overflow"], "te_precision_config": None}, {}, UnknownDebugOptionError, "overflow"),
        ({"debug": (), "te_precision_config": "my.yaml"}, {}, OptionError, r"my.yaml.*--debug te_precision"),
        ({"debug": "te_precision", "te_precision_config": "no_such.yaml"}, {}, ConfigError, r"no_such\.yaml"),
        ({"debug": "te_precision", "te_precision_config": None}, {"log_dri": "x"}, OptionError, "log_dri"),
    ],
)
def test_wrong_options_raise_before_the_loop(
    options: dict[str, Any], keywords: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        debugging(argparse.Namespace(**options), net(), **keywords)


def test_a_mapping_is_taken_as_well(tmp_path: Path) -> None:
    debugging(argparse.Namespace(debug="te_precision", te_precision_config=statistics()), net(), log_dir=tmp_path)


@pytest.mark.processes
def test_adding_the_options_imports_no_framework() -> None:
    code = """
        import argparse, sys
        from te_precision_callbacks.debug_options import add_debug_options
        parser = argparse.ArgumentParser()
        add_debug_options(parser)
        parser.parse_args(["--debug", "activation_overflow"])
        print([name for name in ("torch", "transformers", "transformer_engine") if name in sys.modules])
    """
    assert python(code, fresh=True).stdout.strip() == "[]"
