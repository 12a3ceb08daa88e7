"""The variables that Transformer Engine's Python reads are all classified: they change numerical results, or do not."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_precision_callbacks.te.environment import VARIABLES

WITHOUT_INFLUENCE = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "order of launches; checked for sequence parallelism",
    "CUDA_HOME": "where libraries are",
    "CUDA_PATH": "where libraries are",
    "CUTEDSL_DEBUG_LOGGING": "prints",
    "NCCL_EP_HOME": "where libraries are",
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "a checkpoint is loaded, or refused with an error",
    "NVTE_BATCH_MHA_P2P_COMM": "sends the same tensors in one batch, or each alone",
    "NVTE_COMPILE_OP_SIDE_EFFECTS": "keeps torch.compile from dropping calls",
    "NVTE_CPU_OFFLOAD_V1": "copies tensors to the host and back",
    "NVTE_CUDA_INCLUDE_DIR": "where headers are",
    "NVTE_DEBUG": "logs",
    "NVTE_DEBUG_LEVEL": "logs",
    "NVTE_FRAMEWORK": "which framework is imported",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "a forward reduces each row by blocks whose number the margin does not change",
    "NVTE_INF_LAYERNORM_SM_MARGIN": "a forward reduces each row by blocks whose number the margin does not change",
    "NVTE_NVTX_ENABLED": "ranges for profilers",
    "NVTE_PRINT_LAYER_NUMBER": "logs",
    "NVTE_PRINT_RANK": "logs",
    "NVTE_PROJECT_BUILDING": "builds Transformer Engine",
    "NVTE_RELEASE_BUILD": "builds Transformer Engine",
}


def variables_read(tree: ast.AST) -> Iterator[str]:
    """Names that begin with ``NVTE_``, also of constants, and all names given to ``getenv`` or ``environ``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"NVTE_\w+", str(node.value)):
            yield node.value
        elif isinstance(node, ast.Subscript | ast.Call):
            is_call = isinstance(node, ast.Call)
            name = (node.args[0] if node.args else None) if is_call else node.slice
            if not isinstance(name, ast.Constant):
                continue
            reader = ast.unparse(node.func if is_call else node.value)
            if reader.endswith(("getenv", "environ", "environ.get")):
                yield name.value


def test_variables_are_found() -> None:
    source = """
NAME = "NVTE_A"
os.getenv("B", "1"); os.environ.get("C"); os.environ["D"]; getenv("E"); "NVTE_F" in os.environ
os.getenv(NAME); print("G", tex.NVTE_H); "NVTE_I=1"
"""
    assert sorted(variables_read(ast.parse(source))) == ["B", "C", "D", "E", "NVTE_A", "NVTE_F"]


@pytest.mark.slow
def test_each_variable_of_transformer_engine_is_classified() -> None:
    """Its JAX part and its setup.py are left out, and what only the compiled extension reads cannot be seen here."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    paths = [path for path in folder.rglob("*.py") if path.name != "setup.py" and folder / "jax" not in path.parents]
    texts = [text for text in (path.read_text() for path in paths) if re.search("NVTE_|getenv|environ", text)]
    variables = {name for text in texts for name in variables_read(ast.parse(text))}
    assert variables - {*VARIABLES, *WITHOUT_INFLUENCE} == set(), "add it to VARIABLES, or here with a reason"
    assert WITHOUT_INFLUENCE.keys() - variables == set(), "no longer read"
    assert WITHOUT_INFLUENCE.keys() & set(VARIABLES) == set()
