"""Every name that Transformer Engine looks up in its compiled module is in the reference extension."""

import ast
from pathlib import Path

import pytest
import transformer_engine
from transformer_engine.pytorch import constants
from transformer_engine.pytorch.cpp_extensions import fused_attn

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import MissingFunctionError
from te_precision_callbacks.reference.extension import missing
from tests.reference.processes import answers

EXTENSION = "transformer_engine_torch"
# onnx_extensions.py reads it in a function that is never called; the compiled module does not have it.
SLIPS = {"LayerNorm"}


def _names_looked_up() -> dict[str, set[str]]:
    results: dict[str, set[str]] = {}
    root = Path(transformer_engine.__path__[0])
    for file in [*root.glob("pytorch/**/*.py"), *root.glob("debug/**/*.py")]:
        tree = ast.parse(file.read_text())
        aliases = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {alias.asname or alias.name for alias in node.names if alias.name == EXTENSION}
            elif isinstance(node, ast.ImportFrom):
                # cpp_extensions passes all of the extension on.
                aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "cpp_extensions"}
                if node.module == EXTENSION:
                    for alias in node.names:
                        results.setdefault(alias.name, set()).add(str(file.relative_to(root)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                results.setdefault(node.attr, set()).add(str(file.relative_to(root)))
    return {name: files for name, files in results.items() if name != "*" and name not in SLIPS}


@pytest.mark.slow
def test_every_name_is_there() -> None:
    names = _names_looked_up()
    assert len(names) > 150
    assert {name: files for name, files in names.items() if not hasattr(tex, name)} == {}
    assert set(names) <= set(tex.__all__)


@pytest.mark.parametrize("name", sorted(missing.FUNCTIONS))
def test_what_is_missing_says_so(name: str) -> None:
    with pytest.raises(MissingFunctionError, match=rf"^{name} is not in the reference backend"):
        getattr(tex, name)(1, 2, three=4)


def test_enumerations_agree_with_transformer_engines_own() -> None:
    assert {member.name: int(member) for member in constants.DType} == {m.name: int(m) for m in tex.DType}
    assert {f"NVTE_{name}": int(member) for name, member in fused_attn.FusedAttnBackend.__members__.items()} == {
        member.name: int(member) for member in tex.NVTE_Fused_Attn_Backend
    }
    assert constants.DType.kFloat8E5M2 == tex.DType.kFloat8E5M2


@pytest.mark.processes
def test_importing_it_imports_nothing_of_transformer_engine() -> None:
    code = """
    import sys, te_precision_callbacks.reference.extension
    answer = [name for name in sys.modules if name.startswith("transformer_engine")]
    """
    assert answers(code, fresh=True) == []
