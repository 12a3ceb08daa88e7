"""``make test-quick``: the first case of each test that is not marked ``slow``, ``processes`` or ``extended``. And how
many tests a run leaves out, also where workers do."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_started: list[Any] = []
_left_out = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the first case of tests not marked slow or processes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: over half a second; not in make test-quick")
    config.addinivalue_line("markers", "processes: starts Python processes; not in make test-quick")
    config.addinivalue_line("markers", "few: half of its cases are extended")
    config.addinivalue_line(
        "markers", "extended: signals, injected faults, other processors, further slow cases; only in make test-all"
    )
    if config.getoption("quick"):
        sys.addaudithook(_watch)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = Counter[str]()
    for item in items:
        if item.get_closest_marker("few"):
            name = item.nodeid.partition("[")[0]
            if cases[name].bit_count() % 2:  # not always the same value of an inner factor with two
                item.add_marker("extended")
            cases[name] += 1
    if not config.getoption("quick"):
        return
    seen, chosen, left_out = set(), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in seen or any(map(item.get_closest_marker, ("slow", "processes", "extended"))):
            left_out.append(item)
        else:
            seen.add(name)
            chosen.append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)


def pytest_deselected(items: list[pytest.Item]) -> None:
    global _left_out
    _left_out += len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker of pytest-xdist leaves out the same tests, and its number is in no summary."""
    global _left_out
    _left_out = getattr(node, "workeroutput", {}).get("left out", _left_out)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _left_out and config.getoption("dist", "no") != "no":
        terminalreporter.write_line(f"{_left_out} deselected")


@pytest.fixture(autouse=True)
def no_process_is_started() -> Iterator[None]:
    """In quick runs, which alone are watched."""
    _started.clear()
    yield
    assert not _started, f"{_started}: mark this test with pytest.mark.processes"


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    is_python = event == "subprocess.Popen" and Path(str(arguments[0])).name.startswith("python")
    # Where its cache is empty, torch.compile calls a compiler, and has a Python load what that makes, to see if it can.
    if event == "os.fork" or (is_python and "cdll.LoadLibrary" not in str(arguments[1])):
        _started.append((event, *arguments[:2]))
