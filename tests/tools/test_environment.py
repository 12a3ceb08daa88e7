"""The set-up of the virtual environment: from one source of pins, resumed where it was interrupted, and reported."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import environment

ROOT = Path(__file__).parents[2]
INSTALLER = """\
import os, pathlib, sys
if __name__ == "__main__":
    if sys.argv[-1] == "uv":
        sys.exit("no such option: --python" if "PIP_IS_OLD" in os.environ else None)
    if sys.argv[1:] == ["config", "list"]:
        print("WARNING: a=file that cannot be read")
        print("global.find-links='other'", ":env:.find-links='wheels'", sep=chr(10))
        sys.exit()
    name = pathlib.Path(__file__).stem
    site = pathlib.Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    with open(os.environ["CALLS"], "a") as calls:
        print(name, sys.argv[-1], [path.name for path in site.glob("*left*")], file=calls)
    print(*sys.argv)
    sys.exit(f"no space left for {name}" if name in os.environ.get("FAILS", "") else None)
"""


def needed(extra: str) -> set[str]:
    results: set[tuple[str, str]] = set()
    wanted = [("te-precision-callbacks", item) for item in ("", extra)]
    while wanted:
        entry = wanted.pop()
        results.add(entry)
        for text in distribution(entry[0]).requires or []:
            first = Requirement(text)
            if first.marker is None or first.marker.evaluate({"extra": entry[1]}):
                wanted += {(canonicalize_name(first.name), asked) for asked in ("", *first.extras)} - results
    return {name for name, _ in results} - {"te-precision-callbacks"}


def pins() -> set[str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}


def test_every_package_is_pinned_and_every_pin_is_needed() -> None:
    try:
        results = needed("dev")
    except PackageNotFoundError as error:
        pytest.skip(f"an environment that 'make install' did not make: {error}")
    if sys.version_info[:2] == (3, 11):  # but for dependencies of a torch built for GPUs
        assert {name for name in results if not name.startswith(("nvidia-", "cuda-"))} == pins()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with its own pip and uv, which write down their arguments and surroundings."""
    (tmp_path / "requirements.lock").write_text("rich==15.0.0\n")
    (tmp_path / "pyproject.toml").write_text("")
    for name in ("pip", "uv"):
        (tmp_path / f"{name}.py").write_text(INSTALLER)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    real = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[1:3] == ["-m", "ensurepip"]:  # the tests have their own pip, and are done sooner
            command = [sys.executable, "-c", f"print('ensurepip', file=open({str(tmp_path / 'calls')!r}, 'a'))"]
        return real(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "run", run)
    return tmp_path / "calls"


@pytest.mark.processes
def test_what_is_set_up_is_left_and_what_has_changed_is_done_again(
    calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = calls.parent / ".venv"

    def set_up(wanted: str) -> list[str]:
        calls.unlink(missing_ok=True)
        assert environment.main([str(folder), wanted]) == 0
        return calls.read_text().splitlines() if calls.exists() else []

    assert set_up("demo") == ["uv .[reference,lightning,report] []"]
    shown = capsys.readouterr().out
    assert "a virtual environment of Python 3." in shown
    assert "packages for the demo, about" in shown
    assert "done in" in shown
    assert "--find-links wheels" in (folder / "uv.log").read_text(), "pip's setting"
    assert set_up("demo") == []
    assert set_up("all") == ["uv .[dev] []"]
    assert set_up("demo") == set_up("all") == [], "the tests' environment has what the demo needs"
    (calls.parent / "requirements.lock").write_text("rich==14.0.0\n")
    assert set_up("demo") == ["uv .[reference,lightning,report] []"]
    assert set_up("all") == ["uv .[dev] []"]


@pytest.mark.processes
@pytest.mark.extended
def test_an_interrupted_set_up_goes_on(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that failed or was killed leaves no environment that is taken for whole, and no packages that are."""
    folder = calls.parent / ".venv"
    monkeypatch.setenv("FAILS", "pip uv")
    assert environment.main([str(folder), "demo"]) == 1
    shown = capsys.readouterr().err
    for name in ("uv", "pip"):
        assert f"no space left for {name}" in shown
        assert f"{name} has failed; all that it said is in {folder / name}.log" in shown
    assert "The next call goes on from here." in shown
    (site,) = folder.glob("lib/python*/site-packages")
    for half_installed in ("left-1.0.dist-info", "~left"):
        (site / half_installed).mkdir()
    (site / "whole_left-1.0.dist-info").mkdir()
    (site / "whole_left-1.0.dist-info" / "RECORD").touch()
    monkeypatch.setenv("FAILS", "uv")
    assert environment.main([str(folder), "demo"]) == 0
    _, _, *later = calls.read_text().splitlines()
    assert later == [f"{name} .[reference,lightning,report] ['whole_left-1.0.dist-info']" for name in ("uv", "pip")]
    assert "pip goes on in its place" in capsys.readouterr().err
