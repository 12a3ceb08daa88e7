"""Changes one line of the code at a time, and lists the changes that no test near them notices.

python -m tools.mutants --count 60 --seed 7 --jobs 2 te_precision_callbacks features

A copy of the repository is changed, never the repository. Each change is tested in a process that is forked from this
one, which has imported all libraries: first by ``--quick``, then by all tests near the module.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PACKAGE = "te_precision_callbacks"
ENDLESS = "no end of"
UNSOUND = "a test that fails without the change too"
FORK = multiprocessing.get_context("fork")
NO_TESTS = 5  # exit status of pytest
LIMIT = 300.0  # seconds for one test, on a busy machine

NEAR = {
    "__init__": "test_imports.py test_commands.py",
    "__main__": "test_commands.py",
    "base": "session/test_lifecycle.py session/test_failures.py test_contracts.py test_commands.py",
    "te/environment": "reference/test_install.py test_doctor.py",
    "base/numerics": "numerics test_formats.py test_gemm_shapes.py dumps engine/test_quantization.py reference",
    "base/ranks": "test_ranks.py session/test_distributed.py engine/test_ranks.py",
    "base/vocabulary": "test_parity.py test_gemm_shapes.py manual engine/test_statistics.py",
    "cli": "test_commands.py",
    "cli/doctor": "test_doctor.py",
    "config": "test_config_loading_and_plan.py test_contracts.py check features session/test_due_steps.py",
    "debug_utils": "overflow",
    "dumps/recording": "features/test_observing_features.py session/test_dumps.py",
    "fabric": "lightning/test_fabric.py",
    "instrumentation/debug_path": "session/test_resuming.py",
    "parameters/watch": "diagnosis/test_parameters.py",
    "parameters/updates": "diagnosis/test_live.py diagnosis/test_parameters.py",
    "parameters/replicas": "diagnosis/test_parameters.py engine/test_ranks.py",
    "layers": "test_layers.py instrumentation/test_tap.py instrumentation/test_experts.py coverage",
    "lightning": "lightning",
    "observation": "features session/test_observation.py session/test_lifecycle.py",
    "options": "test_parity.py session/test_lifecycle.py test_debug_options.py",
    "runs/fingerprints": "test_fingerprints.py session/test_resume_audit.py",
    "runs/training_state": "session/test_training_state.py test_fingerprints.py",
    "te": "test_layers.py test_fingerprints.py coverage instrumentation/test_fused.py",
    "coverage/matrix_products": "test_matrix_products.py coverage",
    "sinks": "test_metrics.py test_records.py runs session/test_failures.py accelerate/test_trackers.py",
    "statistics": "engine features test_records.py manual",
    "views": "show report compare",
}
"""Tests, in tests/, of a module or package that is not named like the folder of its tests."""

SWAPS: dict[type, Any] = {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
_INVERSE = ("Lt LtE", "Gt GtE", "Eq NotEq", "Is IsNot", "In NotIn", "And Or", "Add Sub", "Mult Div", "BitAnd BitOr")
for _pair in (*_INVERSE, "LShift RShift"):
    _one, _other = (getattr(ast, name) for name in _pair.split())
    SWAPS |= {_one: _other, _other: _one}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """A change of one expression; ``begin`` and ``end`` in bytes."""

    path: str
    line: int
    before: str
    after: str
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + f"({self.after})".encode() + source[self.end :]


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """All changes of one expression. Annotations, decorators, texts, and raised exceptions stay as they are."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, changed in _changes(ast.parse(source)):
        before = ast.unparse(node)
        after = ast.unparse(changed)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        if after != before:
            yield Mutant(path, node.lineno, before, after, begin, end)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions, each with a replacement."""
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check, as an assertion
        return
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node.value, ast.Constant(None)
    elif isinstance(node, ast.comprehension):
        yield from ((test, ast.UnaryOp(ast.Not(), test)) for test in node.ifs)
    elif isinstance(node, ast.expr):
        yield from ((node, changed) for changed in _substitutes(node))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from _changes(part)


def _substitutes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            operators = [*node.ops[:place], SWAPS[type(operator)](), *node.ops[place + 1 :]]
            yield ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield ast.Constant(2 * node.value or 1.0)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield ast.Name(NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr])


def near(path: str, root: Path) -> list[str]:
    """The tests of a module, beginning with the files that import it."""
    module = Path(path).with_suffix("")
    parts = module.parts[1:] if module.parts[0] == PACKAGE else module.parts
    name = ".".join((PACKAGE, *parts))
    imported = re.compile(rf"^\s*(from|import) {re.escape(name)}\b", re.MULTILINE)
    found = [file for file in sorted((root / "tests").rglob("test_*.py")) if imported.search(file.read_text())]
    for length in range(len(parts), 0, -1):
        is_module = length == len(parts)
        own = f"test_{parts[-1]}.py" if is_module else parts[length - 1]
        own = NEAR.get("/".join(parts[:length]), own)
        existing = [root / "tests" / entry for entry in own.split() if (root / "tests" / entry).exists()]
        found += existing
        if existing and not is_module:
            break
    found = [file for file in found if not any(parent in found for parent in file.parents)]  # pytest skips the folder
    return list(dict.fromkeys(str(file.relative_to(root)) for file in found))


@dataclass(eq=False)
class Reporter:
    """A plugin of pytest that reports the running test, and failed ones."""

    told: Connection

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.told.send((nodeid, False))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.told.send((report.nodeid, report.failed))

    def pytest_collectreport(self, report: Any) -> None:
        self.told.send((report.nodeid, report.failed))


def first_failure(tree: Path, arguments: Sequence[str]) -> str:
    """Run tests of a copy of the repository in a forked process; return which failed, or an empty string."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run_pytest, args=(tree, arguments, sender))
    process.start()
    sender.close()
    test: str = ""
    try:
        while receiver.poll(LIMIT):
            test, failed = receiver.recv()
            if failed:
                return test
        return f"{ENDLESS} {test}"
    except EOFError:
        process.join()
        return "" if process.exitcode in (0, NO_TESTS) else f"exit status {process.exitcode} in {test}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _run_pytest(tree: Path, arguments: Sequence[str], told: Connection) -> None:
    os.setsid()
    sys.stdout = sys.stderr = nothing = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    os.dup2(nothing.fileno(), 1)
    os.dup2(nothing.fileno(), 2)
    sys.path[0] = str(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, "tests", "tools")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["TESTS_FORKED"] = f"{os.getpid()}:{tempfile.mkdtemp(dir=tree.parent)}"  # tests/forked.py
    code = importlib.import_module("pytest").main(["-x", "-p", "no:cacheprovider", *arguments], [Reporter(told)])
    os._exit(code)


def verdict(mutant: Mutant) -> str:
    """Return what fails after a change of this process's copy of the repository; empty if it survives."""
    tree = Path.cwd()
    changed = tree / mutant.path
    original = changed.read_bytes()
    times = changed.stat()
    tests = near(mutant.path, tree)
    changed.write_bytes(mutant.applied(original))
    try:
        failed = first_failure(tree, ["--quick", *tests]) or first_failure(tree, tests)
    finally:
        changed.write_bytes(original)
        os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))  # its bytecode is right again
    if not failed or failed.startswith(ENDLESS):
        return failed
    is_test = (tree / failed.partition("::")[0]).is_file()
    again = [failed] if is_test else ["--quick", *tests]
    without = first_failure(tree, again)
    return f"{UNSOUND} ({without}): {failed}" if without else failed


_FEATURES = """\
__file__ = {file!r}
__path__ = [__file__.rpartition("/")[0]]
exec(compile(open(__file__).read(), __file__, "exec"))
"""
"""In a copy, the package that an installation maps to the folder features/; it goes before the installed one."""


def _use_copy(root: Path, folder: Path) -> None:
    tree = folder / str(os.getpid()) / "tree"
    shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".*", "site", "build", "dist"))
    file = str(tree / "features" / "__init__.py")
    (tree / PACKAGE / "features.py").write_text(_FEATURES.format(file=file))
    os.chdir(tree)


def survivors(root: Path, drawn: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """Test all changes, and print what came of each."""
    results: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        with ProcessPoolExecutor(jobs, FORK, _use_copy, (root, Path(folder))) as executor:
            tested = {executor.submit(verdict, mutant): mutant for mutant in drawn}
            for number, future in enumerate(as_completed(tested), 1):
                failed = future.result()
                told = f"killed by {failed}" if failed else "SURVIVED"
                print(f"{number}/{len(drawn)}  {tested[future]}\n    {told}", flush=True)
                if not failed or failed.startswith(UNSOUND):
                    results.append(tested[future])
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*", default=[PACKAGE, "features"], help="files or folders")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    root = Path(__file__).parents[1]
    files = [file for path in given.paths for file in sorted((root / path).rglob("*.py")) or [root / path]]
    possible: list[Mutant] = []
    for file in files:
        possible += mutants(str(file.relative_to(root)), file.read_bytes())
    drawn = random.Random(given.seed).sample(possible, min(given.count, len(possible)))
    print(f"{len(drawn)} of {len(possible)} changes in {len(files)} files, drawn by the seed {given.seed}", flush=True)
    importlib.import_module("tests.forking.libraries")
    left = survivors(root, drawn, given.jobs)
    print(f"{len(left)} of {len(drawn)} survived", *left, sep="\n")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
