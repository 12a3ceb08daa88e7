"""Which Python modules have imported a function."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from te_precision_callbacks.instrumentation.callers import Callers


def general_gemm() -> None:
    """Stands for Transformer Engine's function in a module of its own."""


THIS = sys.modules[__name__]


def module(name: str, spec: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = spec
    monkeypatch.setitem(sys.modules, name, made)
    return made


def found(name: str) -> list[str]:
    return [called for caller, called in Callers().find({THIS: ("general_gemm",)}) if caller.__name__ == name]


def test_a_notebook_that_imports_a_function_after_a_session_is_found_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook = module("a_notebook", None, monkeypatch)
    assert found("a_notebook") == []
    vars(notebook)["general_gemm"] = general_gemm
    assert found("a_notebook") == ["general_gemm"]


def test_a_module_that_was_being_imported_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("half_imported", None)
    spec._initializing = True  # type: ignore[attr-defined]
    half = module("half_imported", spec, monkeypatch)
    assert found("half_imported") == []
    vars(half)["general_gemm"] = general_gemm
    assert found("half_imported") == ["general_gemm"]


def test_a_module_that_took_the_place_of_another_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("reloaded", None)
    module("reloaded", spec, monkeypatch)
    assert found("reloaded") == []
    vars(module("reloaded", spec, monkeypatch))["general_gemm"] = general_gemm
    assert found("reloaded") == ["general_gemm"]


def test_a_module_that_came_where_another_has_gone_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many as before."""
    module("gone", ModuleSpec("gone", None), monkeypatch)
    assert found("has_come") == []
    monkeypatch.delitem(sys.modules, "gone")
    vars(module("has_come", ModuleSpec("has_come", None), monkeypatch))["general_gemm"] = general_gemm
    assert found("has_come") == ["general_gemm"]
