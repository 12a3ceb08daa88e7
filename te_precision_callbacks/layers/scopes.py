"""Distinguishes layers at the same path on several ranks, as in pipeline stages and expert parallelism.

A scope is a text such as ``pp1``, ``ep0`` or ``pp1.ep0``. It comes from Megatron's parallel state, or from the device
mesh of a module's parameters; otherwise the user passes it as ``scope=`` to any integration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import OptionError

Scope = str | Callable[[str], str]
"""A rank's scope, or a function from a module's path to the scope of that module; empty if no scope is needed."""

_TEXT = re.compile(r"\w+(\.\w+)*")

_PIPELINE = ("pp", "pipeline", "pipe", "pipeline_parallel")
_EXPERTS = ("ep", "expert", "experts", "expert_parallel")
"""Names of dimensions of a device mesh, including those of torchtitan, Lightning, Accelerate and NeMo."""


class FoundScope(NamedTuple):
    """The position of a rank; empty if unknown, or if all ranks have the same position."""

    stage: str
    experts: str


def found_scope(module: torch.nn.Module) -> FoundScope:
    parameters = [p for p in module._parameters.values() if p is not None]  # as parameters(recurse=False)
    stage, experts = _of_megatron(parameters)
    meshes: list[Any] = [p.device_mesh for p in parameters if hasattr(p, "device_mesh")]
    for mesh in {id(mesh): mesh for mesh in meshes}.values():
        # Read from torch 2.13, distributed/device_mesh.py: a parameter's mesh is a part of that of the whole job.
        root = mesh._get_root_mesh()
        stage = stage or _place(root, _PIPELINE, "pp")
        experts = experts or _place(mesh, _EXPERTS, "ep")
    return FoundScope(stage, experts)


def _megatron() -> Any:
    """Megatron Core's module ``parallel_state``, of 0.16.1; None if it is not in use."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def _of_megatron(parameters: list[torch.nn.Parameter]) -> tuple[str, str]:
    """The scope by Megatron Core's parallel state; expert layers' parameters have ``allreduce=False``."""
    state = _megatron()
    if state is None:
        return "", ""
    stage = experts = ""
    if state.get_pipeline_model_parallel_world_size() > 1:
        stage = f"pp{state.get_pipeline_model_parallel_rank()}"
    has_experts = any(getattr(parameter, "allreduce", True) is False for parameter in parameters)
    if has_experts and state.get_expert_model_parallel_world_size() > 1:
        experts = f"ep{state.get_expert_model_parallel_rank()}"
    return stage, experts


def _place(mesh: Any, names: tuple[str, ...], prefix: str) -> str:
    for name in names:
        if name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1:
            return f"{prefix}{mesh.get_local_rank(name)}"
    return ""


def check_scope(scope: object) -> None:
    """Check the keyword ``scope`` of an integration.

    Raises:
        OptionError: ``scope`` is not a :data:`Scope`.
    """
    if not callable(scope):
        _check_text("scope=", scope)


def scope_of(scope: Scope, path: str) -> str:
    """The user's scope of a module.

    Raises:
        OptionError: the function does not return a scope.
    """
    if not callable(scope):
        return scope
    text = scope(path)
    _check_text(f"scope= for the module {path!r}", text)
    return text


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str) or not (text == "" or _TEXT.fullmatch(text)):
        raise OptionError(
            f"{what} must be empty, or a text of letters, digits and underscores with dots between its parts, such as"
            f" 'pp1' or 'pp1.ep0', not {text!r}."
        )
