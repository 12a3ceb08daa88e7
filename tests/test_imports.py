"""Import rules: no cycles, no imports upwards in the table of docs/architecture.md, Transformer Engine in te/ alone."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import te_precision_callbacks

PACKAGE = "te_precision_callbacks"
HERE = Path(te_precision_callbacks.__path__[0])
FEATURES = HERE.parent / "features"


@cache
def files() -> Mapping[str, Path]:
    """Module -> its file; the features are importable as ``te_precision_callbacks.features``."""
    results = {}
    for folder, name in ((HERE, PACKAGE), (FEATURES, f"{PACKAGE}.features")):
        for path in sorted(folder.rglob("*.py")):
            parts = [name, *path.relative_to(folder).with_suffix("").parts]
            results[".".join(part for part in parts if part != "__init__")] = path
    return results


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Those of a tree, which several tests go through."""
    return list(ast.walk(tree))


IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name"}


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def beginning(node: ast.expr) -> str:
    """The text of a string, or of an f-string up to its first value; empty for other expressions."""
    while isinstance(node, ast.JoinedStr | ast.BinOp):
        node = node.left if isinstance(node, ast.BinOp) else next(iter(node.values), ast.Constant(""))
    return str(node.value) if isinstance(node, ast.Constant) else ""


def imports(tree: ast.AST) -> Iterator[str]:
    """What a file imports anywhere, finds, or takes from ``sys.modules``: modules, and names in modules."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Subscript) and last_name(node.value) == "modules":
            yield beginning(node.slice)
        elif isinstance(node, ast.Call):
            of_modules = isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "modules"
            if of_modules or last_name(node.func) in IMPORTERS:
                yield from map(beginning, [*node.args[:1], *(keyword.value for keyword in node.keywords)])


@cache
def graph() -> Mapping[str, frozenset[str]]:
    results = {}
    for module, path in files().items():
        targets = set()
        for name in imports(tree(path)):
            while name and name not in files():  # a name in a module
                name = name.rpartition(".")[0]
            targets.add(name)
        results[module] = frozenset(targets - {module, ""})
    return results


def part(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.").partition(".")[0]


def graph_of_parts() -> Mapping[str, frozenset[str]]:
    results: dict[str, frozenset[str]] = {}
    for module, targets in graph().items():
        name = part(module)
        results[name] = results.get(name, frozenset()) | {*map(part, targets)} - {name}
    return results


def reached(module: str, edges: Mapping[str, frozenset[str]]) -> set[str]:
    results: set[str] = set()
    left = [module]
    while left:
        for target in edges[left.pop()] - results:
            results.add(target)
            left.append(target)
    return results


@pytest.mark.slow
def test_the_graph_is_that_of_the_sources() -> None:
    assert len(graph()) > 150
    assert f"{PACKAGE}.session.session" in graph()[f"{PACKAGE}.session"]
    assert f"{PACKAGE}.observation" in graph()[f"{PACKAGE}.features.api"]
    assert f"{PACKAGE}.session" in graph()[f"{PACKAGE}.debug_options"], "an import in a function counts"


@pytest.mark.parametrize("edges", [graph, graph_of_parts])
def test_there_is_no_circle(edges: Callable[[], Mapping[str, frozenset[str]]]) -> None:
    assert [name for name in edges() if name in reached(name, edges())] == []


def lines_of_the_table() -> list[set[str]]:
    """The table of docs/architecture.md, from the top: on each line the parts."""
    text = (HERE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("```text\n")[2].partition("```")[0]
    lines = re.split(r"\n(?! )", table.strip())  # a line that begins with a space goes on
    return [set(re.findall(r"(?<![/\w])(\w+)(?:\.py|/)", line)) for line in lines]


def test_no_part_imports_one_of_a_line_above() -> None:
    line_of = {part: number for number, parts in enumerate(lines_of_the_table()) for part in parts}
    assert {*map(part, graph())} - {PACKAGE} == set(line_of), "all parts are in the table"
    upwards = [
        (module, target)
        for module, targets in graph().items()
        for target in targets
        if PACKAGE not in (part(module), part(target)) and line_of[part(target)] < line_of[part(module)]
    ]
    assert upwards == []


def test_doctor_loads_no_session() -> None:
    """The line of ``cli`` may import the session, so the test of the table does not cover this."""
    above = {"session", "lightning", "fabric", "transformers", "debug_options"}
    for module in (f"{PACKAGE}.cli.doctor", f"{PACKAGE}.cli.doctor.command", f"{PACKAGE}.cli.doctor.machine"):
        assert not {target for target in reached(module, graph()) if f"{target}.".split(".")[1] in above}


TE_NAMES = ("transformer_engine", "transformer_engine_torch")
"""Transformer Engine and its compiled extension."""


def names_te(tree: ast.AST) -> bool:
    return any(re.split("[.:]", name)[0] in TE_NAMES for name in imports(tree))


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("import torch, transformer_engine", True),
        ("def f():\n    from transformer_engine.pytorch.module import linear", True),
        ("import transformer_engine_torch as tex", True),
        ("x = importlib.import_module('transformer_engine.pytorch')", True),
        ("__import__('transformer_engine')", True),
        ("find_spec(name='transformer_engine')", True),
        ("importlib.import_module(f'transformer_engine.pytorch.{name}').forward", True),
        ("importlib.import_module('transformer_engine.' + name)", True),
        ("sys.modules['transformer_engine.pytorch']", True),
        ("sys.modules.get(f'transformer_engine.{name}')", True),
        ("pkgutil.resolve_name('transformer_engine.pytorch:Linear')", True),
        ("from accelerate.utils import transformer_engine", False),
        ("debug_api.transformer_engine.fp8_gemm_enabled()", False),
        ("if name == 'transformer_engine': pass", False),
        ("from te_precision_callbacks.te import seams", False),
    ],
)
def test_an_import_of_transformer_engine_is_found(source: str, is_found: bool) -> None:
    assert names_te(ast.parse(source)) == is_found


def test_te_alone_imports_transformer_engine() -> None:
    """``reference`` replaces its compiled extension. A name compared with that of a module is no import."""
    others = [path for module, path in files().items() if part(module) not in ("reference", "te")]
    assert [str(path) for path in others if names_te(tree(path))] == []


OF_TE = frozenset({"fp8_meta", "_fp8_metas", "_fp8_workspaces", "scaling_fwd", "scaling_bwd", "RecipeState"}) | {
    *("weight_names", "fc1_weight", "fc2_weight", "num_gemms", "num_groups", "parallel_mode", "set_parallel_mode"),
    *("get_quantizer_roles", "LayerNormMLP", "LayerNormLinear", "GroupedLinear", "BasicLinear", "DotProductAttention"),
    *("_fp8_dtype", "_scale_inv", "_quantizer", "_transpose_invalid", "_rowwise_data", "_columnwise_data"),
    *("_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise", "_hp_data"),
    *("FP8GlobalStateManager", "TEDebugState", "is_mlp", "_rowwise_storage"),
}
"""Classes of Transformer Engine's modules, and names in the state of modules and of quantized tensors."""


def names_in(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name | ast.ClassDef):
            yield node.id if isinstance(node, ast.Name) else node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


@pytest.mark.slow
def test_te_alone_knows_the_modules_of_transformer_engine() -> None:
    results = {
        module.removeprefix(f"{PACKAGE}."): OF_TE.intersection(names_in(tree(path)))
        for module, path in files().items()
        if part(module) not in ("reference", "te")
    }
    assert {module: names for module, names in results.items() if names} == {}


# Module -> what changes at its level: the run of now, seams, caches. All else that changes belongs to a run.
CHANGES = {
    "session.session": {"_live"},  # the session of this process
    "transformers.callback": {"_TRAININGS"},  # trainings that a Trainer has left without closing
    "overflow.grad_scalers": {"_listeners"},  # the listeners to torch's GradScaler
    "overflow.detector": {"_DETECTORS"},  # the detectors of this process, which detect_overflow() tells
    "base.ranks.group": {"_OPEN"},  # connections that a forked process lets go
    "engine.kernels": {"_on_gpu"},  # caches of kernels, and their limits
    "engine.kernels.largest": {"_on_gpu"},
    "engine.kernels.triton_blocks": {"_known"},
    "engine.kernels.triton_largest": {"_launchers"},
    "engine.kernels.triton_parts": {
        "_needs_binder",
        "kept_scratch",
    },  # memory of launches, one for each device and stream
}


def changing(tree: ast.Module) -> Iterator[str]:
    """Names at the level of a module that functions assign to, and containers that begin empty."""
    for node in nodes(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(target, ast.Name):
            continue
        is_empty = isinstance(value, ast.Dict | ast.List | ast.Set) and not ast.unparse(value).strip("{}[]")
        if is_empty or (isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MUTABLE):
            yield target.id


MUTABLE = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "deque", "set", "dict", "list", "count", "Notices"}


@pytest.mark.slow
def test_module_variables_that_change_are_listed() -> None:
    results = {
        module.removeprefix(f"{PACKAGE}."): set(changing(tree(path)))
        for module, path in files().items()
        if not module.startswith(f"{PACKAGE}.reference")
    }
    assert {module: names for module, names in results.items() if names} == CHANGES
