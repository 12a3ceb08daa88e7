"""The names of environment variables against the sources that read them, and the problems of those that are set."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformer_engine

from te_precision_callbacks.base.environment import VARIABLES, read_environment
from te_precision_callbacks.reference import target

SOURCE = Path(transformer_engine.__path__[0])
PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"

# ---------------------------------------------------------------------- what Transformer Engine's Python reads


def is_name(text: str) -> bool:
    return re.fullmatch(r"NVTE_\w+", text) is not None


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(
        ast.parse(text)
        for path in sorted(SOURCE.rglob("*.py"))
        if "NVTE_" in (text := path.read_text(encoding="utf-8"))
    )


def readings() -> Iterator[tuple[str, ast.Call, ast.AST]]:
    """Each ``os.getenv("NVTE_...")`` with the expression around it."""
    for tree in trees():
        for around in ast.walk(tree):
            for node in ast.iter_child_nodes(around):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get"):
                    name = node.args[0]
                    if isinstance(name, ast.Constant) and is_name(name.value):
                        yield name.value, node, around


READ_BY_THE_EXTENSION_TOO = {"NVTE_USE_FAST_MATH"}


@pytest.mark.slow
def test_values_are_read_as_the_source_reads_them() -> None:
    """``== "1"`` takes any other text for 0 in silence; ``int`` raises for a word."""
    ways = defaultdict(set)
    for name, _, around in readings():
        if isinstance(around, ast.Compare) and ast.unparse(around).endswith("== '1'"):
            ways[name].add("equals 1")
        elif isinstance(around, ast.Call) and ast.unparse(around.func) == "int":
            ways[name].add("int")
    python_alone = (ways.keys() & VARIABLES.keys()) - READ_BY_THE_EXTENSION_TOO
    by_text = [name for name in python_alone if ways[name] == {"equals 1"}]
    by_number = [name for name in python_alone if "int" in ways[name]]
    assert min(len(by_text), len(by_number)) >= 7
    for name in by_text:
        fault = VARIABLES[name]("true")
        assert fault is not None, name
        assert not fault.stops, name
    for name in by_number:
        fault = VARIABLES[name]("yes")
        assert fault is not None, name
        assert fault.stops, name
        assert VARIABLES[name]("1") is None


def test_the_gpu_of_the_reference_backend() -> None:
    for capability in target.ALLOWED:
        assert problems({target.ENVIRONMENT_VARIABLE: "{}.{}".format(*capability)}) == []


def test_the_page_lists_the_names() -> None:
    listed = PAGE.read_text().partition("\n### Environment variables\n")[2]
    assert set(re.findall(r"`([A-Z]\w{2,})`", listed)) == VARIABLES.keys()


# ---------------------------------------------------------------------- what is said of an environment


def problems(environ: Mapping[str, str]) -> list[bool]:
    """For each problem, whether it stops a run."""
    return [problem.stops for problem in read_environment(environ).problems]


def test_what_is_set_is_given_with_its_value_and_nothing_else() -> None:
    environ = {"NVTE_FP8_DPA_BWD": "0", "NVTE_NVTX_ENABLED": "1", "WANDB_API_KEY": "hush", "NVTE_TOKEN_OF_MINE": "hush"}
    environment = read_environment(environ)
    assert (environment.settings, environment.problems) == ({"NVTE_FP8_DPA_BWD": "0"}, ())


@pytest.mark.parametrize(
    ("name", "value", "stops"),
    [
        ("NVTE_FLASH_ATTN", "no", True),  # int("no")
        ("NVTE_FLASH_ATTN", "2", False),  # counts as 1
        ("NVTE_FP8_DPA_BWD", "-1", False),
        ("NVTE_NVFP4_DISABLE_RHT", "true", False),
        ("NVTE_USE_FAST_MATH", "true", True),  # the extension
        ("NVTE_BACKWARD_OVERRIDE", "", True),
        ("NVTE_BACKWARD_OVERRIDE", "None", True),
        ("NVTE_DPA_FP8_RECIPE", "MXFP8", False),
        ("NVTE_DPA_FP8DS_AMAX_HISTLEN", "1.5", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "true", False),
        ("ACCELERATE_MIXED_PRECISION", "FP8", True),
        ("TE_PRECISION_REFERENCE_CAPABILITY", "8.9", True),
    ],
)
def test_a_bad_value(name: str, value: str, stops: bool) -> None:
    (problem,) = read_environment({name: value}).problems
    assert problem.stops == stops
    assert f"{name}={value!r}" in problem.what


FINE: list[dict[str, str]] = [
    {},
    {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"},
    {"NVTE_NVFP4_4OVER6": "all", "NVTE_NVFP4_DISABLE_RHT": "1", "NVTE_NVFP4_4OVER6_ERR_MODE": "mse"},
    {"NVTE_NVFP4_4OVER6": "weights"},
    {"NVTE_DPA_FP8_RECIPE": "MXFP8BlockScaling", "NVTE_BACKWARD_OVERRIDE": "dequantized"},
    {"NVTE_DPA_FP8_RECIPE": "DelayedScaling", "NVTE_DPA_FP8_RECIPE_DPA": "1", "NVTE_DPA_FP8_FORMAT": "E4M3"},
]


@pytest.mark.parametrize("environ", FINE, ids=str)
def test_settings_that_agree(environ: dict[str, str]) -> None:
    assert problems(environ) == []


def test_settings_that_contradict_each_other() -> None:
    assert problems({"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}) == [False]


# ---------------------------------------------------------------------- what Transformer Engine makes of them


def recipes(monkeypatch: pytest.MonkeyPatch, **environ: str) -> Any:
    """Transformer Engine's recipes as a process has them that starts with these variables."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    path = SOURCE / "common" / "recipe" / "__init__.py"
    spec = importlib.util.spec_from_file_location("recipes_of_another_process", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_defaults_of_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recipes(
        monkeypatch,
        NVTE_NVFP4_DISABLE_RHT="1",
        NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING="true",  # as if it were not set
        NVTE_NVFP4_4OVER6_ERR_MODE="mse",
        NVTE_FP8_BLOCK_SCALING_FP32_SCALES="1",
        NVTE_BACKWARD_OVERRIDE="dequantized",
    )
    nvfp4 = found.NVFP4BlockScaling()
    assert not nvfp4.fp4_quant_bwd_grad.random_hadamard_transform
    assert nvfp4.fp4_quant_bwd_grad.stochastic_rounding
    assert nvfp4.nvfp4_4over6_err_mode == "MSE"
    assert not found.Float8BlockScaling().fp8_quant_fwd_inp.power_2_scale
    assert found.MXFP8BlockScaling().backward_override == "dequantized"
    with pytest.raises(ValueError, match="only supports backward_override=None"):
        found.DelayedScaling()


@pytest.mark.parametrize(
    ("name", "value", "recipe"),
    [
        ("NVTE_BACKWARD_OVERRIDE", "", "Float8CurrentScaling"),
        ("NVTE_NVFP4_4OVER6", "weight", "NVFP4BlockScaling"),
        ("NVTE_NVFP4_4OVER6_ERR_MODE", "RMS", "NVFP4BlockScaling"),
    ],
)
def test_a_value_that_is_said_to_stop_a_run_does(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, recipe: str
) -> None:
    assert read_environment({name: value}).problems[0].stops
    with pytest.raises(ValueError, match=name):
        getattr(recipes(monkeypatch, **{name: value}), recipe)()
