"""``make test-quick``: the tests that start no process and are not marked slow, and of each the first case alone.

Which tests start one is read off their code and that of their fixtures: they, or functions of the tests that they
call, name one of ``STARTING``. Where one starts a Python all the same, it fails, and says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

STARTING = {"subprocess", "multiprocessing", "fork", "forked", "executable", "Popen", "ranks", "launched", "Running"}

_started: list[Any] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only what starts no process, and the first case of each")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: over half a second, or starts a process unseen; not in make test-quick")
    if config.getoption("quick"):
        sys.addaudithook(_watch)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        return
    seen, chosen, left_out = set(), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in seen or item.get_closest_marker("slow") is not None or _starts_processes(item):
            left_out.append(item)
        else:
            seen.add(name)
            chosen.append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def no_process_is_started() -> Iterator[None]:
    """In quick runs, which alone are watched."""
    _started.clear()
    yield
    assert not _started, f"{_started}: tests/quick.py does not see in the code of this test that it starts a process"


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    is_python = event == "subprocess.Popen" and Path(str(arguments[0])).name.startswith("python")
    # Where its cache is empty, torch.compile calls a compiler, and has a Python load what that makes, to see if it can.
    if event == "os.fork" or (is_python and "cdll.LoadLibrary" not in str(arguments[1])):
        _started.append((event, *arguments[:2]))


def _starts_processes(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    fixtures = [found.func for name in item.fixturenames for found in item._fixtureinfo.name2fixturedefs.get(name, ())]
    return any(_named(inspect.unwrap(function)) & STARTING for function in (item.function, *fixtures))


@cache
def _named(function: Any) -> frozenset[str]:
    """The names in the code of a function of the tests, and in that of those that it names."""
    found: set[str] = set()
    left, done = [function], set()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in done or not function.__module__.startswith("tests"):
            continue
        done.add(function)
        names = set(_names(function.__code__))
        found |= names
        values = [function.__globals__.get(name) for name in names]
        inside = [vars(value) for value in values if isinstance(value, ModuleType | type)]
        left += [*values, *(members[name] for members in inside for name in names & members.keys())]
        left += [member for value in values if isinstance(value, type) for member in vars(value).values()]
        left += [vars(value).get("__wrapped__") for value in values if isinstance(value, FunctionType)]
    return frozenset(found)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
