"""Changes of one line: the kinds, and that a change that no test notices is listed."""

from pathlib import Path

import pytest

from tools import mutants

SOURCE = b"""
import math

if TYPE_CHECKING:
    LEFT_OUT = 1 + 1


@decorated(order=True)
def scale(amax: int = 3, *, of: "a or b" = None) -> float | None:
    '''The docstring has a number, 1.'''
    if not amax:
        raise ValueError(f"{amax + 1} is not above {0}")
    return min(amax, -2.5) if amax >= 1 and of in SEEN else math.prod(zip(of, of, strict=True))
"""

HALVING = """\
def halved(n):
    return n // 2


def steps(n):
    while n > 0:
        n = n - 1
    return n
"""

TESTS = """\
from te_precision_callbacks.halving import halved, steps


def test_halved():
    assert halved(0) == 0


def test_steps():
    assert steps(2) == 0
"""

FILES = {
    "features/__init__.py": "",
    "te_precision_callbacks/__init__.py": "",
    "te_precision_callbacks/halving.py": HALVING,
    "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')\n",
    "tests/test_halving.py": TESTS,
}


def test_the_changes_of_a_small_module() -> None:
    changes = list(mutants.mutants("scale.py", SOURCE))
    whole = "min(amax, -2.5) if amax >= 1 and of in SEEN else math.prod(zip(of, of, strict=True))"
    assert [(change.line, change.before, change.after) for change in changes] == [
        (9, "3", "4"),
        (11, "not amax", "not not amax"),
        (11, "not amax", "amax"),
        (13, whole, "None"),
        (13, "amax >= 1 and of in SEEN", "not (amax >= 1 and of in SEEN)"),
        (13, "amax >= 1 and of in SEEN", "amax >= 1 or of in SEEN"),
        (13, "amax >= 1", "amax > 1"),
        (13, "1", "2"),
        (13, "of in SEEN", "of not in SEEN"),
        (13, "min", "max"),
        (13, "-2.5", "2.5"),
        (13, "2.5", "5.0"),
    ]
    assert changes[9].applied(SOURCE) == SOURCE.replace(b"min(", b"(max)(")


def test_the_tests_near_a_module_are_there() -> None:
    root = Path(mutants.__file__).parents[1]
    assert not [
        name for names in mutants.NEAR.values() for name in names.split() if not (root / "tests" / name).exists()
    ]
    assert mutants.near("te_precision_callbacks/views/show/view.py", root)[-1] == "tests/show"
    assert mutants.near("te_precision_callbacks/base/ranks/group.py", root)[0] == "tests/test_ranks.py"
    assert mutants.near("features/base.py", root)[-1] == "tests/features"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def change_of(project: Path, after: str) -> mutants.Mutant:
    path = "te_precision_callbacks/halving.py"
    (change,) = (change for change in mutants.mutants(path, (project / path).read_bytes()) if change.after == after)
    return change


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.extended
def test_what_no_test_notices_is_listed(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    survives = change_of(project, "n * 2")
    assert mutants.near(survives.path, project) == ["tests/test_halving.py"]
    assert mutants.survivors(project, [change_of(project, "not n > 0"), survives], 1) == [survives]
    assert capfd.readouterr().out.splitlines() == [
        "1/2  te_precision_callbacks/halving.py:6: n > 0 -> not n > 0",
        "    killed by tests/test_halving.py::test_steps",
        "2/2  te_precision_callbacks/halving.py:2: n // 2 -> n * 2",
        "    SURVIVED",
    ]
    assert {name: (project / name).read_text() for name in FILES} == FILES


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.extended
def test_a_loop_without_an_end_is_noticed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "LIMIT", 2.0)
    assert mutants.survivors(project, [change_of(project, "n + 1")], 1) == []
    assert "killed by no end of" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.extended
def test_a_test_that_fails_without_a_change_kills_none(project: Path) -> None:
    (project / "tests" / "test_halving.py").write_text("def test_it():\n    assert False\n")
    survives = change_of(project, "n * 2")
    assert mutants.survivors(project, [survives], 1) == [survives]
