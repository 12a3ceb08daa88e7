"""Each name that no longer exists gives one error, which says what to use instead."""

import importlib
import sys
from pathlib import Path

import pytest

from te_precision_callbacks.base.former_names import FORMER_NAMES
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.cli import main
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.diagnosis.engine import OptionError, read_on_finding

COMMANDS = [name for name in FORMER_NAMES if name.startswith("te-precision ")]
PYTHON_NAMES = [name for name in FORMER_NAMES if name.startswith("te_precision_callbacks.")]


def test_a_command_and_an_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        command, *options = name.split()[1:]
        for words in (
            [command, *options, "run"],
            [command, "run", *options],
            [command, "run", *(f"{option}=1" for option in options)],
        ):
            if options and not options[0].startswith("-") and words[1] != options[0]:
                continue  # a command below a command
            monkeypatch.setattr(sys, "argv", ["te-precision", *words])
            with pytest.raises(SystemExit) as ended:
                main()
            printed = capsys.readouterr()
            assert (ended.value.code, printed.out) == (2, "")
            assert printed.err == f"te-precision: {name} no longer exists. {FORMER_NAMES[name]}\n"


def test_a_python_name() -> None:
    for name in PYTHON_NAMES:
        module, _, attribute = name.rpartition(".")
        with pytest.raises(ImportError, match=f"{name} no longer exists") as raised:
            exec(f"from {module} import {attribute}")
        assert FORMER_NAMES[name] in str(raised.value)
        if hasattr(importlib.import_module(module), "__path__"):  # a package, so it may have been a module
            with pytest.raises(ImportError, match=f"{name} no longer exists"):
                importlib.import_module(name)


def test_each_sentence_says_what_to_use_instead() -> None:
    for name, sentence in FORMER_NAMES.items():
        assert sentence[0].isupper(), name
        assert sentence.endswith("."), name


def test_a_former_name_in_a_config_or_a_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_precision_callbacks.base.suggestions.FORMER_NAMES", {"maximum": "Use max."})
    assert suggestion("maximum", ["max"]) == " It no longer exists. Use max."
    assert suggestion("maxima", ["max"]) == " Did you mean 'max'?"


SECTION = "s: {enabled: true, layers: {layer_types: [all]}, transformer_engine: {DisableFP8Layer: {enabled: true}}}"


def test_a_former_keyword_in_place_of_a_section(tmp_path: Path) -> None:
    for name in ["profile", "early_steps", "layer_names", "require_same", "on_broken"]:
        for body in ["true", "5", "{steps: 3}", "rollout.json"]:
            file = tmp_path / "config.yaml"
            file.write_text(f"{name}: {body}\n{SECTION}\n", encoding="utf-8")
            with pytest.raises(ConfigError) as raised:
                load_config(file)
            is_key = name == "layer_names" and body != "{steps: 3}"  # it is a key of the config, above the sections
            expected = "beside the sections must be 'path' or 'upstream'" if is_key else FORMER_NAMES[name]
            assert expected in str(raised.value)
            assert str(raised.value).count("\n") == 0, "a single error"


def test_a_former_reaction_to_all_findings() -> None:
    for reaction in ["dump", "profile", "protect checkpoint"]:
        with pytest.raises(OptionError) as raised:
            read_on_finding(reaction)
        assert FORMER_NAMES[reaction] in str(raised.value)
