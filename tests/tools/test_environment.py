"""The set-up of the virtual environment: from one source of pins, resumed where it was interrupted, and told."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[2]
PIP = """\
import os, pathlib, sys
if sys.argv[-1] == "pip>=26":
    sys.exit("no such option: --python" if "PIP_IS_OLD" in os.environ else None)
elif __name__ == "__main__":
    site = pathlib.Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    with open(os.environ["PIP_CALLS"], "a") as calls:
        print(sys.argv[-1], [path.name for path in site.glob("*left*")], file=calls)
    print("Collecting rich<16,>=13 (from te-precision-callbacks)")
    sys.exit("no space left on device" if "PIP_FAILS" in os.environ else None)
"""


@pytest.fixture(scope="module")
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needed(extra: str) -> set[str]:
    """The names of all that an extra needs on this machine, from what is installed."""
    found: set[tuple[str, str]] = set()
    wanted = [("te-precision-callbacks", one) for one in ("", extra)]
    while wanted:
        entry = wanted.pop()
        if entry in found:
            continue
        found.add(entry)
        for text in distribution(entry[0]).requires or []:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": entry[1]}):
                wanted += [(canonicalize_name(one.name), asked) for asked in ("", *one.extras)]
    return {name for name, _ in found} - {"te-precision-callbacks"}


def pins() -> set[str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}


def test_every_package_is_pinned_and_every_pin_is_needed() -> None:
    try:
        found = needed("dev")
    except PackageNotFoundError as error:
        pytest.skip(f"an environment that 'make install' did not make: {error}")
    found = {
        name for name in found if not name.startswith(("nvidia-", "cuda-"))
    }  # what a build of torch for GPUs brings
    if sys.version_info[:2] == (3, 11):
        assert found == pins()


def test_the_demo_has_what_it_needs_and_the_tests_have_that_too(environment: ModuleType) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert list(environment.EXTRAS) == ["demo", "all"], "each holds those before it"
    of_demo = set(environment.EXTRAS["demo"].split(","))
    (base,) = (Requirement(text) for text in extras["dev"] if text.startswith("te-precision-callbacks"))
    assert of_demo <= base.extras
    imported = set(re.findall(r"^(?:import|from) (\w+)", (ROOT / "examples" / "byte_lm.py").read_text(), re.MULTILINE))
    third_party = imported - set(sys.stdlib_module_names) - {"te_precision_callbacks"}
    brought = set().union(*(needed(extra) for extra in of_demo))
    assert third_party <= brought


@pytest.fixture
def calls(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a pip of its own, which writes down how it was called and what it found."""
    (tmp_path / "requirements.lock").write_text("rich==15.0.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_CALLS", str(tmp_path / "calls"))
    real = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[1:3] == ["-m", "ensurepip"]:  # the tests have a pip of their own, and are done sooner
            command = [sys.executable, "-c", f"print('ensurepip', file=open({str(tmp_path / 'calls')!r}, 'a'))"]
        return real(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "run", run)
    return tmp_path / "calls"


def test_what_is_set_up_is_left_and_what_has_changed_is_done_again(
    environment: ModuleType, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = calls.parent / ".venv"

    def set_up(wanted: str) -> list[str]:
        calls.unlink(missing_ok=True)
        assert environment.main([str(folder), wanted]) == 0
        return calls.read_text().splitlines() if calls.exists() else []

    assert set_up("demo") == [".[reference,lightning,report] []"]
    shown = capsys.readouterr().out
    assert "a virtual environment of Python 3." in shown
    assert "packages for the demo, with pip" in shown
    assert "done in" in shown
    assert set_up("demo") == []
    assert set_up("all") == [".[dev] []"]
    assert set_up("demo") == set_up("all") == [], "the tests' environment has what the demo needs"
    (calls.parent / "requirements.lock").write_text("rich==14.0.0\n")
    assert set_up("demo") == [".[reference,lightning,report] []"]
    assert set_up("all") == [".[dev] []"]


def test_the_newest_is_looked_for_each_time_and_without_pins(
    environment: ModuleType, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = calls.parent / ".venv-newest"
    (calls.parent / "requirements.lock").unlink()
    for _ in range(2):
        assert environment.main([str(folder), "newest", "transformers<5"]) == 0
    assert calls.read_text().splitlines() == ["transformers<5 []"] * 2
    assert environment.main([str(folder), "newest"]) == 0
    assert calls.read_text().splitlines()[-1] == ".[dev] []"
    assert not environment.is_complete(folder, "all"), "the tests' environment has the pinned versions"
    assert environment.main([str(folder), "all", "transformers<5"]) == 2
    assert "newest [REQUIREMENT ...]" in capsys.readouterr().err


def test_an_interrupted_set_up_goes_on(
    environment: ModuleType, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed or killed pip leaves no environment that is taken for whole, and no packages that are taken for such."""
    folder = calls.parent / ".venv"
    monkeypatch.setenv("PIP_FAILS", "1")
    assert environment.main([str(folder), "demo"]) == 1
    shown = capsys.readouterr().err
    assert "no space left on device" in shown
    assert "pip.log" in shown
    (site,) = folder.glob("lib/python*/site-packages")
    for half_installed in ("left-1.0.dist-info", "~left"):
        (site / half_installed).mkdir()
    (site / "whole_left-1.0.dist-info").mkdir()
    (site / "whole_left-1.0.dist-info" / "RECORD").touch()
    monkeypatch.delenv("PIP_FAILS")
    assert environment.main([str(folder), "demo"]) == 0
    assert calls.read_text().splitlines()[1:] == [".[reference,lightning,report] ['whole_left-1.0.dist-info']"]


def test_where_no_new_pip_can_be_had_the_one_that_python_brings_does(
    environment: ModuleType, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_IS_OLD", "1")
    assert environment.main([str(calls.parent / ".venv"), "demo"]) == 0
    assert calls.read_text().splitlines() == ["ensurepip", ".[reference,lightning,report] []"]


def test_an_environment_of_another_python_is_made_anew(environment: ModuleType, calls: Path) -> None:
    folder = calls.parent / ".venv"
    assert environment.main([str(folder), "demo"]) == 0
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/no/such/python")
    (folder / "left").touch()
    assert environment.main([str(folder), "demo"]) == 0
    assert not (folder / "left").exists()


def test_progress_is_told_from_what_pip_has_done(environment: ModuleType, tmp_path: Path) -> None:
    assert environment.progress("Obtaining file:///project\n", tmp_path) == "pip looks for packages"
    log = "Collecting torch<3,>=2.6\nCollecting typing-extensions>=4\n"
    assert environment.progress(log, tmp_path) == "2 packages found"
    log += "Processing /wheels/tqdm-4.70.1-py3-none-any.whl (from te-precision-callbacks)\n"
    log += "Collecting numpy\n  Downloading numpy-2.4.6-cp311-cp311-linux_x86_64.whl (16.2 MB)\n"
    assert environment.progress(log, tmp_path) == "4 packages found, the last fetched: numpy-2.4.6 (16.2 MB)"
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("pip-23.2.1", "typing_extensions-4.16.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info" / "RECORD").touch()
    log += "Installing collected packages: torch, typing-extensions\n"
    assert environment.progress(log, tmp_path) == "1 of 2 packages installed"
