"""Runs Transformer Engine's own tests on the reference backend, and compares with a table.

Usage::

    python tests/reference/te_suite.py --te-src CHECKOUT [--capability 9.0] [--features te] [--whole] [FILE ...]

CHECKOUT is a checkout of NVIDIA/TransformerEngine at the version in use, outside this repository. Its tests run
unmodified, through the pytest plugin, one process a file, as in its own ``qa/L0_pytorch_debug_unittest/test.sh``.
``te_suite.toml`` next to this file has the expected results of each file, and why a test fails. Of a file with
thousands of tests a share runs, always the same one, with its counts in the table: a sample, or a keyword
expression's selection. With ``--whole`` all of it runs, and no test may fail that is not in the table. With this
project's features before or after Transformer Engine's (``--features ours,te`` or ``te,ours``) the tests of debug
features run, and none may fail that does not fail in the table.

Exits with 0 if everything is as in the table, 1 if not, 2 on wrong use.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

HERE = Path(__file__).parent
TABLE = Path(__file__).with_suffix(".toml")
FOLDER = Path("tests", "pytorch")
DEBUG = FOLDER / "debug"


@dataclass
class Result:
    """Results of one file's tests.

    Attributes:
        passed, failed, skipped: how many passed, the names of failed tests, how many were skipped.
        share: pytest's arguments for the share of the file's tests that the counts are of; none for all.
        output: what pytest wrote.
    """

    passed: int
    failed: set[str]
    skipped: int
    share: tuple[str, ...] = field(default=(), compare=False)
    output: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--te-src", type=Path, required=True, metavar="CHECKOUT", help="a checkout of TransformerEngine"
    )
    parser.add_argument("--capability", default="9.0", choices=["9.0", "10.0"], help="compute capability to stand for")
    parser.add_argument(
        "--features",
        default="te",
        choices=["te", "ours,te", "te,ours"],
        help="the folders of features, in order: Transformer Engine's alone, or with this project's",
    )
    parser.add_argument("--whole", action="store_true", help="run all tests of each file")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="files of the table to run; all of them if none is given"
    )
    options = parser.parse_args()
    checkout = options.te_src.resolve()
    if not (checkout / DEBUG).is_dir():
        parser.error(f"--te-src {options.te_src}: there is no folder {DEBUG} in it")

    table = read_table(options.capability)
    for file in options.files:
        if file not in table:
            parser.error(f"{file}: not in {TABLE.name} at {options.capability}, which has {', '.join(table)}")
    differences = 0
    for file, wanted in table.items():
        if (options.files and file not in options.files) or (
            options.features != "te" and not file.startswith("debug/")
        ):
            continue
        share = () if options.whole else wanted.share
        started = time.monotonic()
        result = run(checkout, file, options.capability, options.features.split(","), share)
        seconds = time.monotonic() - started
        print(f"{file:<52} {options.capability:>5}  {result}, {seconds:.0f} s", flush=True)
        only_failures = options.features != "te" or share != wanted.share
        if (result.failed - wanted.failed) if only_failures else (result != wanted):
            differences += 1
            report(wanted, result)
    print("as expected" if differences == 0 else f"{differences} files differ from {TABLE.name}")
    return 0 if differences == 0 else 1


def read_table(capability: str) -> dict[str, Result]:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    results = {}
    for row in table["result"]:
        if row["capability"] == capability:
            failed = {test for failures in row.get("failures", []) for test in failures["tests"]}
            share = ("-p", "te_suite_sample", f"--sample={row['sample']}") if "sample" in row else ()
            share += ("-k", row["select"]) if "select" in row else ()
            results[row["file"]] = Result(row["passed"], failed, row["skipped"], share)
    return results


def run(checkout: Path, file: str, capability: str, features: list[str], share: Sequence[str]) -> Result:
    environment = os.environ | {"TE_PRECISION_REFERENCE_CAPABILITY": capability, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        command += ["-p", "te_precision_callbacks.reference.pytest_plugin", f"--junitxml={junit}"]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), environment.get("PYTHONPATH"))))
        command += [*share, str(checkout / FOLDER / file)]
        if file.startswith("debug/"):
            command.append(f"--configs_dir={checkout / DEBUG / 'test_configs'}{os.sep}")
            command += ["--feature_dirs", *(str(feature_folder(whose)) for whose in features)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not junit.is_file():
            return Result(0, {"(pytest did not run)"}, 0, output=done.stdout + done.stderr)
        return read_junit(junit, done.stdout)


def feature_folder(whose: str) -> Path:
    """The folder of debug features of this project (``ours``) or of the installed Transformer Engine (``te``)."""
    if whose == "ours":
        return HERE.parents[1] / "features"
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        raise SystemExit("Transformer Engine is not installed")
    return Path(spec.origin).parent / "debug" / "features"


def read_junit(path: Path, output: str) -> Result:
    result = Result(0, set(), 0, output=output)
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.add(case.get("name", ""))
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    return result


def report(wanted: Result, found: Result) -> None:
    print(f"  expected: {wanted}")
    for test in sorted(wanted.failed - found.failed):
        print(f"  does not fail: {test}")
    for test in sorted(found.failed - wanted.failed):
        print(f"  fails: {test}")
    if found.failed - wanted.failed:
        print(found.output)


if __name__ == "__main__":
    sys.exit(main())
