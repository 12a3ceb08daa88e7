"""Every key of a config, option and flag is named by a test: as a keyword, a key of a dict or of YAML, or a flag."""

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from te_precision_callbacks import (
    InspectSession,
    PrecisionDebugCallback,
    PrecisionDebugFabricCallback,
    PrecisionDebugger,
    PrecisionDebugTrainerCallback,
)
from te_precision_callbacks.cli import app
from te_precision_callbacks.config.contract import Contract
from te_precision_callbacks.config.levels import levels
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.config.selection import SELECTOR_KEYS
from te_precision_callbacks.debug_options import add_debug_options, debugging
from te_precision_callbacks.options import SessionKeywords
from te_precision_callbacks.overflow import DebugActivationOverflow

pytestmark = pytest.mark.slow  # the first one reads all tests

TESTS = Path(__file__).parent
KEY_OF_YAML = re.compile(r"(?:^|[\s{,\[-])(\w+):(?=\s|$)", re.MULTILINE)

NAMED_ELSEWHERE = {
    ("LogGemmError", "probes"): "in tests/instrumentation/test_gemm_errors.py, whose config() names the feature",
}
"""Feature and key -> why no function of a test names both."""


class Part(NamedTuple):
    """A function, class or constant of a test: its strings and names, and the values of its keywords and keys."""

    file: Path
    words: str
    keys: frozenset[str]


@functools.cache
def parts() -> tuple[Part, ...]:
    others = (path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__))
    return tuple(part for path in others for part in parts_of(path))


def keys_of(parts: Iterable[Part]) -> frozenset[str]:
    return frozenset().union(*(part.keys for part in parts))


def naming(name: str) -> list[Part]:
    return [part for part in parts() if re.search(rf"(^|\W){name}($|\W)", part.words)]


def parts_of(path: Path) -> Iterator[Part]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        nodes = list(ast.walk(statement))
        strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        keywords = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        of_dicts = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
        keywords |= {key.value for key in of_dicts if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        text = "\n".join(strings)
        yield Part(path, "\n".join([text, *names]), frozenset(keywords | set(KEY_OF_YAML.findall(text))))


def test_a_test_gives_every_key_of_a_feature() -> None:
    for feature in FEATURES:
        keys = {key for level in levels(FEATURES[feature]).values() for key in level.model_fields}
        given = keys_of(naming(feature))
        excepted = {key for name, key in NAMED_ELSEWHERE if name == feature}
        assert keys - given == excepted
        assert excepted <= keys_of(parts())


def test_a_test_gives_every_key_of_a_section_and_of_a_contract() -> None:
    assert {"enabled", "layers", *SELECTOR_KEYS, *Contract.model_fields} <= keys_of(parts())


def test_a_test_gives_every_option_of_a_session() -> None:
    assert {"config", *SessionKeywords.__annotations__} <= keys_of(parts())


OBJECTS: tuple[Any, ...] = (
    InspectSession,
    PrecisionDebugCallback,
    PrecisionDebugFabricCallback,
    PrecisionDebugger,
    PrecisionDebugTrainerCallback,
    DebugActivationOverflow,
    add_debug_options,
    debugging,
)


def test_a_test_gives_every_keyword_of_an_integration() -> None:
    """Those that only it has; the others are options of a session."""
    for taking in OBJECTS:
        own = {
            name
            for name, parameter in inspect.signature(taking).parameters.items()
            if parameter.default is not parameter.empty and name not in SessionKeywords.__annotations__
        }
        given = keys_of(naming(taking.__name__))
        assert own - given - {"config"} == set()  # config is given by its place


def commands(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    for name, one in below.items():
        yield from commands(one, *names, name)
    if not below:
        yield " ".join(names), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_a_test_gives_every_flag_of_a_command() -> None:
    """In a file that also names the command."""
    for name in COMMANDS:
        files = {part.file for part in naming(name.split()[-1])}
        text = "\n".join(part.words for part in parts() if part.file in files)
        given = set(re.findall(r"(?<![\w-])-{1,2}\w[\w-]*", text))
        options = [option for option in COMMANDS[name].params if option.param_type_name == "option"]
        flags = [opts for option in options for opts in (option.opts, option.secondary_opts) if opts]
        assert [opts for opts in flags if given.isdisjoint(opts) and opts != ["--help"]] == []
