"""Derives layer names from the module tree, and scopes that distinguish layers with equal paths on several ranks.

A *module* is a Transformer Engine module with observable GEMMs (``te/modules.py``). A *layer* is the unit that configs
select and logs name: the module itself, or its parts ``<module>.fc1`` and ``<module>.fc2``, or
``<module>.gemm_0``, ``<module>.gemm_1`` and so on.

A *scope* is a text such as ``pp1``, ``ep0`` or ``pp1.ep0``, for pipeline stages and expert parallelism. It comes from
Megatron's parallel state, or from the device mesh of a module's parameters; otherwise the user passes it as ``scope=``
to any integration.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.te import modules as te_modules

Scope = str | Callable[[str], str]
"""A rank's scope, or a function that maps a module's path to its scope; empty if not needed."""

_TEXT = re.compile(r"\w+(\.\w+)*")

_PIPELINE = ("pp", "pipeline", "pipe", "pipeline_parallel")
_EXPERTS = ("ep", "expert", "experts", "expert_parallel")
"""Names of device mesh dimensions, including those of torchtitan, Lightning, Accelerate and NeMo."""


NamedTorchModule = tuple[str, torch.nn.Module]
"""A module after its path."""


def _detect_scope(node: _Node) -> str:
    """Return the pipeline stage and the expert group of a rank, without the numbers that the path already shows;
    empty if unknown, or equal on all ranks."""
    parameters = [parameter for parameter in node.module._parameters.values() if parameter is not None]
    stage, experts = _megatron_scope(parameters)
    meshes: dict[Any, None] = dict.fromkeys(getattr(parameter, "device_mesh", None) for parameter in parameters)
    meshes.pop(None, None)
    for mesh in meshes:
        # Read from torch 2.13, distributed/device_mesh.py: a parameter's mesh is a submesh of the root mesh.
        stage = stage or _mesh_position(mesh._get_root_mesh(), _PIPELINE, "pp")
        experts = experts or _mesh_position(mesh, _EXPERTS, "ep")
    if node.has_number:
        stage = ""
    if node.has_experts:
        experts = ""
    return ".".join(filter(None, (stage, experts)))


def _megatron_scope(parameters: list[torch.nn.Parameter]) -> tuple[str, str]:
    """Return stage and experts by Megatron Core's ``parallel_state`` (0.16.1), if in use; parameters of experts have
    ``allreduce=False``.
    """
    state: Any = sys.modules.get("megatron.core.parallel_state")
    stage = ""
    experts = ""
    if state is None or not state.model_parallel_is_initialized():
        return stage, experts
    if state.get_pipeline_model_parallel_world_size() > 1:
        stage = f"pp{state.get_pipeline_model_parallel_rank()}"
    has_experts = any(getattr(parameter, "allreduce", True) is False for parameter in parameters)
    if has_experts and state.get_expert_model_parallel_world_size() > 1:
        experts = f"ep{state.get_expert_model_parallel_rank()}"
    return stage, experts


def _mesh_position(mesh: Any, names: tuple[str, ...], prefix: str) -> str:
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


def resolve_scope(scope: Scope, path: str) -> str:
    """Return the user's scope of a module.

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
            f"{what} must be empty, or parts of letters, digits and underscores separated by dots, such as 'pp1' or"
            f" 'pp1.ep0', not {text!r}."
        )


if TYPE_CHECKING:
    from te_precision_callbacks.base.vocabulary import LayerNames

Model = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module]
"""A model, or several: a list of a model's chunks, or a mapping of, for example, generator and discriminator."""

_WRAPPER_CHILDREN = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
"""Attributes of the wrapped module in FSDP, torch.compile, torch's checkpoint wrapper and Lightning Fabric."""

_MODULE_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module"})
"""Classes with the wrapped module in the attribute ``module``."""

_PEFT_WRAPPERS = {
    "base_model": {"PeftModel", "PeftMixedModel"},
    "model": {"BaseTuner"},
    "base_layer": {"BaseTunerLayer"},
}
"""Attribute -> the classes of PEFT 0.21 that hold a wrapped model in it, or the layer with adapters."""

_OLD_SPELLINGS = (
    ("self_attention", "self_attn"),
    ("inter_attention", "inter_attn"),
    ("layernorm_query", "layernorm_q"),
    ("layernorm_linear_query", "layernorm_linear_q"),
)
"""Module attributes of TE 2.20, and their names in TE's documentation."""

_NUMBERED_EXPERTS = re.compile(r"\bexperts_\d+_\d+\b")
"""The experts of a rank in :attr:`Layer.by_number`; a selector without numbers selects the experts of all ranks."""

_AUTOMATIC_NAME = re.compile(r"Layer_\d+(\.|\Z)")
"""TE's name for a module that was built without a name, with a process-wide count."""


@dataclass(frozen=True)
class Layer:
    """The unit that a config selects.

    Attributes:
        name: the name in logs, records and metrics.
        aliases: other names that select the layer: the script's own name, the path without the attribute of a
            LightningModule, and the spellings of TE's documentation.
        types: the layer's class and TE base classes, spelled as ``LayerNormLinear`` and ``layernorm_linear``.
        given: the full name from the script, passed to the constructor or assigned by ``infer_and_assign_layer_names``.
        upstream: the names of :func:`upstream_names`.
        by_number: the path with numbers that distinguish layers with equal paths on several ranks, as in Megatron:
            ``layer_number``, counted from 0, instead of the index in a pipeline stage's ModuleList; for experts the
            first and last of ``local_expert_indices`` (``experts_2_3``); otherwise a scope before the path.
        scope: prefix of the name that distinguishes ranks; see the module docstring.
    """

    name: str
    aliases: tuple[str, ...]
    types: tuple[str, ...]
    given: str = ""
    upstream: tuple[str, ...] = ()
    by_number: str = ""
    scope: str = ""


@dataclass(frozen=True, eq=False)
class NamedModule:
    """A Transformer Engine module with observable GEMMs, or attention; ``name`` is its path without wrapper parts."""

    module: torch.nn.Module
    name: str
    layers: tuple[Layer, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)


def modules_by_layer(modules: Iterable[NamedModule]) -> dict[str, torch.nn.Module]:
    return {name: named.module for named in modules for name in named.names}


def snake_case(class_name: str) -> str:
    """Return TE's spelling of a class in names: ``layernorm_mlp`` for ``LayerNormMLP``."""
    words = class_name.replace("LayerNorm", "Layernorm").replace("MLP", "Mlp").replace("RMSNorm", "Rmsnorm")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()


def named_te_modules(
    model: Model, layer_names: LayerNames = "path", *, by_number: bool = False, scope: Scope = ""
) -> tuple[NamedModule, ...]:
    """Find and name the Transformer Engine modules of a model, in the order of the module tree.

    The name is the path in the tree without the parts of wrappers (DDP, FSDP, torch.compile, checkpoint wrappers,
    PEFT). A shared module has its first path. Prefixes are ``chunk0.``, ``chunk1.`` and so on for a list of models, the
    keys of a mapping, and the class of a root from Transformer Engine: ``transformer_layer.layernorm_mlp``.

    Args:
        layer_names: ``"upstream"`` for names of :func:`upstream_names`; a count distinguishes equal names.
        by_number: with ``"path"``, whether to use :attr:`Layer.by_number`.
        scope: the user's scope for this rank's layers, which becomes a prefix of the names.

    Raises:
        OptionError: ``scope`` is a function and does not return a scope.
    """
    named: dict[int, NamedModule] = {}
    used_names: set[str] = set()
    names_upstream = upstream_names(model)
    for node, root in _named_places(model):
        module = node.module
        row = te_modules.find(type(module))
        if row is None or row.is_operation or id(module) in named:
            continue
        upstream = names_upstream[id(module)]
        users_scope = resolve_scope(scope, node.path)
        numbered_scope = users_scope or _detect_scope(node)
        layer_scope = numbered_scope if by_number else users_scope
        path = node.by_number if by_number else node.path
        first_name = path if layer_names == "path" else upstream[0]
        name = first_name
        count = 1
        while _joined(layer_scope, name) in used_names:
            count += 1
            name = f"{first_name}_{count}"
        whole = _joined(layer_scope, name)
        used_names.add(whole)
        module_name = str(getattr(module, "name", None) or "")
        without_attribute = name.partition(".")[2] if "LightningModule" in class_names(root) else ""
        other_names = _AUTOMATIC_NAME.sub("", module_name), without_attribute, _NUMBERED_EXPERTS.sub("experts", name)
        classes = dict.fromkeys([type(module).__name__, *te_modules.te_classes(type(module))])
        classes.pop("TransformerEngineBaseModule", None)
        types = tuple(itertools.chain.from_iterable((kind, snake_case(kind)) for kind in classes))
        layers = []
        for part in row.layers(module):
            upstream_layers = tuple(other + part for other in upstream)
            from_script = upstream_layers[0]
            numbered = ""
            if layer_names == "path":
                from_script = "" if not module_name or _AUTOMATIC_NAME.match(module_name) else module_name + part
                numbered = _joined(numbered_scope, node.by_number) + part
            aliases = _aliases(
                name, [other + part for other in other_names if other and other != name], part, layer_scope
            )
            layers.append(Layer(whole + part, aliases, types, from_script, upstream_layers, numbered, layer_scope))
        named[id(module)] = NamedModule(module, whole, tuple(layers))
    return tuple(named.values())


def _aliases(name: str, further_names: Sequence[str], part: str, scope: str) -> tuple[str, ...]:
    """Return names that select a part of a module besides ``name``: ``further_names``, and TE's spellings of all."""
    aliases = list(further_names)
    for old, new in _OLD_SPELLINGS:
        aliases += [alias.replace(old, new) for alias in (name + part, *aliases) if re.search(rf"\b{old}\b", alias)]
    if scope:
        aliases = [name + part, *aliases]  # a selector without a scope selects the layers of all scopes
    return tuple(dict.fromkeys(alias for alias in aliases if alias != _joined(scope, name) + part))


def module_names(model: Model, *, by_number: bool = False, scope: Scope = "") -> dict[int, str]:
    """Return id -> name of all modules, as in :func:`named_te_modules`.

    A root without a prefix has its class in snake case as name.
    """
    names: dict[int, str] = {}
    for node, root in _named_places(model):
        path = (node.by_number if by_number else node.path) or snake_case(_own_class(root))
        names.setdefault(id(node.module), _joined(resolve_scope(scope, node.path), path))
    return names


def named_attention(model: Model, names: Mapping[int, str]) -> dict[int, str]:
    """Return id -> name of Transformer Engine's attention modules and subclasses, for modules in ``names``."""
    attention = filter(te_modules.is_attention, modules_of(model))
    return {id(module): names[id(module)] for module in attention if id(module) in names}


class NamedOperation(NamedTuple):
    """An operation of ``te.ops`` with GEMMs; ``names`` are the names of its layers."""

    module: torch.nn.Module
    names: tuple[str, ...]


Named = NamedModule | NamedOperation


def modules_with_gemms(modules: Iterable[NamedModule], operations: Iterable[NamedOperation]) -> list[Named]:
    return [*modules, *operations]


def named_operations(model: Model, *, by_number: bool = False, scope: Scope = "") -> list[NamedOperation]:
    """Find and name the operations of ``te.ops`` with GEMMs in a model.

    The name is the path of the ``BasicLinear``, or of the ``te.ops.Linear`` around it. The groups of a
    ``GroupedLinear`` are layers: ``.gemm_0`` and so on.
    """
    names = module_names(model, by_number=by_number, scope=scope)
    operations = []
    for module in modules_of(model):
        row = te_modules.find(type(module))
        if row is not None and row.is_operation:
            name = names[id(module)].removesuffix(".basic_ops.0")
            operations.append(NamedOperation(module, tuple(name + part for part in row.layers(module))))
    return operations


def is_adapted(parent: torch.nn.Module, child_name: str) -> bool:
    return child_name == "base_layer" and _is_of_peft(parent, child_name)


def _is_of_peft(module: torch.nn.Module, child_name: str) -> bool:
    """Return whether a module is PEFT's wrapper of its child of this name."""
    names = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("peft.")}
    return not names.isdisjoint(_PEFT_WRAPPERS[child_name])


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is a wrapper: DDP, FSDP, torch.compile, a checkpoint wrapper, or PEFT."""
    return any(is_wrapper_part(module, child_name) for child_name, _ in module.named_children())


def is_wrapper_part(parent: torch.nn.Module, child_name: str) -> bool:
    """Return whether a module wraps its child of this name, which then adds no part to paths."""
    if child_name in ("base_model", "model"):
        return _is_of_peft(parent, child_name)
    return _is_process_wrapper_part(parent, child_name)


def _is_process_wrapper_part(parent: torch.nn.Module, child_name: str) -> bool:
    if child_name in _WRAPPER_CHILDREN:
        return True
    return child_name == "module" and not _MODULE_WRAPPERS.isdisjoint(class_names(parent))


def upstream_names(model: Model) -> dict[int, tuple[str, ...]]:
    """Return id -> names that nvidia-dlfw-inspect's ``infer_and_assign_layer_names(model)`` assigns to a module.

    Read from nvidia-dlfw-inspect 0.2.2, ``api.py``: each root is ``model``; children of a ModuleList have their
    ``layer_number`` instead of the index; a shared module has its last path. Since scripts call the function before or
    after they wrap the model, a module has a second name without wrappers such as DDP. If the script has already called
    the function, a module has only the name from that call.
    """
    roots = roots_of(model)
    # The script has called the function for the model, or for the model inside its wrappers.
    wrapped = itertools.chain.from_iterable(map(_wrapped, roots))
    was_called = any(vars(module).get("name") == "model" for module in wrapped)
    names: dict[int, tuple[str, ...]] = {}
    # Visit children from last to first, so that the first path that reaches a module is its last one.
    stack = [(root, "model", "model") for root in roots]
    while stack:
        module, name, plain = stack.pop()
        if id(module) in names:
            continue
        module_name = vars(module).get("name")
        if was_called and isinstance(module_name, str) and f"{module_name}.".startswith("model."):
            names[id(module)] = (module_name,)
        else:
            names[id(module)] = tuple(dict.fromkeys((name, plain)))
        for child_name, child in module.named_children():
            number = child_name
            plain_number = child_name
            if isinstance(module, torch.nn.ModuleList):
                number = getattr(child, "layer_number", child_name)
                plain_number = getattr(_inside(child), "layer_number", child_name)
            plain_name = plain
            if not _is_process_wrapper_part(module, child_name):
                plain_name += f".{plain_number}"
            stack.append((child, f"{name}.{number}", plain_name))
    return names


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    return _wrapped(module)[-1]


def _wrapped(
    module: torch.nn.Module, is_part: Callable[[torch.nn.Module, str], bool] = _is_process_wrapper_part
) -> list[torch.nn.Module]:
    """Return a module and the modules that it wraps, outermost first.

    Args:
        is_part: returns whether a module wraps its child of a given name; by default for DDP and similar wrappers.
    """
    modules: list[torch.nn.Module] = []
    while module not in modules:
        modules.append(module)
        parts = (child for name, child in module.named_children() if is_part(module, name))
        module = next(parts, module)
    return modules


def find_ambiguous_names(layers: Iterable[Layer]) -> dict[str, list[str]]:
    """Return name by path -> names by number, for names that belong to different layers on several ranks."""
    by_name = group_by_key(dict.fromkeys((layer.name, layer.by_number) for layer in layers))
    return {name: numbered for name, numbered in by_name.items() if len(numbered) > 1}


def group_by_given_name(layers: Iterable[Layer]) -> dict[str, list[str]]:
    """Return the script's name -> our names of its layers, without script names that are our names of other layers."""
    by_name = {layer.name: layer for layer in layers}
    return group_by_key(
        (layer.given, layer.name)
        for layer in by_name.values()
        if layer.given and by_name.get(layer.given, layer).given == layer.given
    )


def module_tree(model: Model) -> list[tuple[object, ...]]:
    """Return a snapshot of a model's module tree, including wrappers.

    It is unequal after a change, also of a parameter, and after a module was compiled. Parameters are compared by id:
    tensors would be compared element by element.
    """
    return [
        (module, id(compiled_call(module)), *module._modules.keys(), *map(id, module._parameters.values()))
        for module in modules_of(model)
    ]


SURROUNDS = "te_precision_surrounds"
"""Attribute of a wrapper around a module's call, with the wrapped function, or None."""


def compiled_call(module: torch.nn.Module) -> Any:
    """Return the compiled call of ``torch.nn.Module.compile``; None if the module is not compiled."""
    call = module._compiled_call_impl
    return getattr(call, SURROUNDS, call)


def named_roots(model: object) -> list[NamedTorchModule] | None:
    """Return the models with the prefixes of their names: empty, ``chunk0`` and so on, or the keys.

    None if ``model`` is not a :data:`Model`.
    """
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    if isinstance(model, Mapping):
        roots = list(model.items())
    elif isinstance(model, (list, tuple)):
        roots = [(f"chunk{index}", chunk) for index, chunk in enumerate(model)]
    else:
        return None
    fits = all(isinstance(key, str) and isinstance(root, torch.nn.Module) for key, root in roots)
    if fits:
        return roots
    return None


def roots_of(model: Model) -> list[torch.nn.Module]:
    return [root for _, root in named_roots(model) or ()]


def modules_of(model: Model) -> list[torch.nn.Module]:
    """Return all modules of a model, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(root.modules() for root in roots_of(model))))


def parameters_of(model: Model) -> list[torch.nn.Parameter]:
    """Return all parameters of a model, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(root.parameters() for root in roots_of(model))))


def module_paths(
    root: torch.nn.Module,
    prefix: str = "",
    *,
    opaque: Callable[[torch.nn.Module], bool] = lambda module: False,
) -> Iterator[NamedTorchModule]:
    """Yield path and module for each module below ``root`` once, parents first; paths have no wrapper parts.

    Args:
        opaque: returns whether to skip everything below a module.
    """
    for node in _places(root, prefix, opaque=opaque):
        yield node.path, node.module


class _Node(NamedTuple):
    """A module in the tree.

    Attributes:
        path: its path without wrapper parts.
        by_number: :attr:`Layer.by_number` without a scope.
        has_number, has_experts: whether numbers in ``by_number`` show the module's stage, and its experts.
    """

    path: str
    by_number: str
    module: torch.nn.Module
    has_number: bool = False
    has_experts: bool = False


def _named_places(model: Model) -> Iterator[tuple[_Node, torch.nn.Module]]:
    for prefix, root in named_roots(model) or ():
        for node in _places(root, prefix, through_adapters=True):
            yield node, root


def _places(
    root: torch.nn.Module,
    prefix: str,
    *,
    opaque: Callable[[torch.nn.Module], bool] = lambda module: False,
    through_adapters: bool = False,
) -> Iterator[_Node]:
    """Yield the nodes of the tree; see :func:`module_paths`.

    Args:
        root: a root from Transformer Engine adds its class to ``prefix``.
        through_adapters: whether a layer with PEFT adapters has the path of the module that replaced it.
    """
    seen: set[int] = set()
    root = _wrapped(root, lambda parent, name: is_wrapper_part(parent, name) and not opaque(parent))[-1]
    if te_modules.te_classes(type(root)):
        prefix = _joined(prefix, snake_case(_own_class(root)))
    stack = [_Node(prefix, prefix, root)]
    while stack:
        node = stack.pop()
        module = node.module
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield node
        if opaque(module):
            continue
        children = []
        for child_name, child in module.named_children():
            if is_wrapper_part(module, child_name) or (through_adapters and is_adapted(module, child_name)):
                children.append(node._replace(module=child))
            else:
                number = _layer_number(module, child)
                experts = _expert_numbers(module, child_name)
                children.append(
                    _Node(
                        _joined(node.path, child_name),
                        _joined(node.by_number, number or experts or child_name),
                        child,
                        has_number=node.has_number or bool(number),
                        has_experts=node.has_experts or bool(experts),
                    )
                )
        stack.extend(reversed(children))


def _layer_number(module: torch.nn.Module, child: torch.nn.Module) -> str:
    """Return the number of a ModuleList's child in the whole model, or empty. Read from Megatron Core 0.16."""
    number = getattr(_inside(child), "layer_number", None) if isinstance(module, torch.nn.ModuleList) else None
    if isinstance(number, int) and number > 0:
        return str(number - 1)
    return ""


def _expert_numbers(module: torch.nn.Module, child_name: str) -> str:
    """Return ``experts_<first>_<last>`` for Megatron's experts, or empty. Read from Megatron Core 0.16."""
    experts = getattr(module, "local_expert_indices", None) if child_name == "experts" else None
    if experts:
        return f"{child_name}_{experts[0]}_{experts[-1]}"
    return ""


def _own_class(module: torch.nn.Module) -> str:
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch.distributed.")).__name__


def _joined(path: str, name: str) -> str:
    if path:
        return f"{path}.{name}"
    return name
