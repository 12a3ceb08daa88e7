"""Module tree -> layer names.

    for module in named_te_modules(model):
        print(module.name, [layer.name for layer in module.layers])

A *module* is a Transformer Engine module with GEMMs that can be observed: Linear, LayerNormLinear, LayerNormMLP,
GroupedLinear. A *layer* is what a config selects and a log names: the module itself, or for the modules with several
GEMMs their parts, ``<module>.fc1`` and ``<module>.fc2`` or ``<module>.gemm_0``, ``<module>.gemm_1`` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Model = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module]
"""A model; or several, such as the chunks of one as a list, or a generator and a discriminator under their names."""

WRAPPER_CHILDREN = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
"""Attributes under which FSDP, torch.compile, torch's checkpoint wrapper and Lightning Fabric keep what they wrap."""

MODULE_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module"})
"""Classes that keep the module that they wrap under the ordinary name ``module``."""

_OLD_SPELLINGS = (
    ("self_attention", "self_attn"),
    ("inter_attention", "inter_attn"),
    ("layernorm_query", "layernorm_q"),
    ("layernorm_linear_query", "layernorm_linear_q"),
)
"""Module attributes of TE 2.20, and what TE's documentation calls them."""

_AUTOMATIC_NAME = re.compile(r"Layer_\d+(\.|\Z)")
"""TE's name for a module that was built without one: a process-wide count."""


@dataclass(frozen=True)
class Layer:
    """What a config selects.

    Attributes:
        name: its name in logs, records and metric names.
        aliases: other names that select it: the one that the user gave to the constructor, the path without a
            LightningModule's own attribute, the other paths of a shared module, and the spellings of TE's
            documentation.
        types: its class and TE base classes, as ``LayerNormLinear`` and ``layernorm_linear``.
    """

    name: str
    aliases: tuple[str, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NamedModule:
    """A Transformer Engine module with observable GEMMs, and its layers.

    Attributes:
        module: the module; its attribute ``name`` is not changed here.
        name: the path in the module tree, without wrapper parts.
        layers: one, or several for LayerNormMLP and GroupedLinear.
    """

    module: torch.nn.Module
    name: str
    layers: tuple[Layer, ...]


def snake_case(class_name: str) -> str:
    """TE's spelling of a class in names: ``LayerNormMLP`` is ``layernorm_mlp``."""
    words = class_name.replace("LayerNorm", "Layernorm").replace("MLP", "Mlp").replace("RMSNorm", "Rmsnorm")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()


def named_te_modules(model: Model) -> tuple[NamedModule, ...]:
    """Find and name the Transformer Engine modules of a model, in the order of the module tree.

    The name is the path in the tree without the parts that wrappers add (DDP, FSDP, torch.compile, checkpoint
    wrappers); the first path, where a module is shared. The modules of a list of models get ``chunk0.``, ``chunk1.``
    and so on, those of a mapping its keys. A root that is a Transformer Engine module itself lends its class:
    ``transformer_layer.layernorm_mlp``.
    """
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    found: dict[int, tuple[torch.nn.Module, str, tuple[str, ...], bool]] = {}
    taken: set[str] = set()
    others: list[tuple[str, str]] = []
    for prefix, root in named_roots(model) or ():
        is_lightning = any(base.__name__ == "LightningModule" for base in type(root).__mro__)
        for path, module in module_paths(root, prefix, others=others):
            if not isinstance(module, TransformerEngineBaseModule):
                continue
            if id(module) in found:
                others.append((found[id(module)][1], path))
                continue
            parts = _gemm_parts(module)
            if parts is None:
                continue
            found[id(module)] = module, _unique(path, taken), parts, is_lightning
    named = []
    for module, name, parts, is_lightning in found.values():
        also = [again + name[len(first) :] for first, again in others if f"{name}.".startswith(f"{first}.")]
        named.append(NamedModule(module, name, tuple(_layer(module, name, part, is_lightning, also) for part in parts)))
    return tuple(named)


class ModuleTree:
    """Which modules are the children of which, to see cheaply whether it still is so."""

    def __init__(self, model: Model) -> None:
        modules = dict.fromkeys(module for _, root in named_roots(model) or () for module in root.modules())
        self._children = [(module._modules, dict(module._modules)) for module in modules]

    def changed(self) -> bool:
        """Whether a module was added, replaced, moved or taken out since."""
        return any(now != before for now, before in self._children)


def named_roots(model: object) -> list[tuple[str, torch.nn.Module]] | None:
    """A model, or several, each with what the names in it begin with: nothing, ``chunk0`` and so on, or its key.

    None where it is not a :data:`Model`.
    """
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    if isinstance(model, Mapping):
        roots = list(model.items())
    elif isinstance(model, (list, tuple)):
        roots = [(f"chunk{index}", chunk) for index, chunk in enumerate(model)]
    else:
        return None
    fits = all(isinstance(key, str) and key and isinstance(root, torch.nn.Module) for key, root in roots)
    return roots if fits else None


def _unique(path: str, taken: set[str]) -> str:
    """``path``, with a count where leaving wrapper parts out has made two paths one."""
    name, count = path, 1
    while name in taken:
        count += 1
        name = f"{path}_{count}"
    taken.add(name)
    return name


def module_paths(
    root: torch.nn.Module,
    prefix: str = "",
    *,
    opaque: Callable[[torch.nn.Module], bool] = lambda module: False,
    others: list[tuple[str, str]] | None = None,
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module below ``root`` once, parents first, with its path without wrapper parts.

    Args:
        root: the model; where wrappers are around it, what they wrap comes first.
        prefix: what the paths begin with. A root of Transformer Engine adds its class.
        opaque: says of a module that nothing below it is wanted.
        others: takes, for each further path of a module, its first path and that one.
    """
    seen: dict[int, str] = {}
    root = _unwrapped(root, opaque)
    if any(base.__module__.startswith("transformer_engine.") for base in type(root).__mro__):
        # fully_shard puts a class of torch before the module's own.
        own = next(base for base in type(root).__mro__ if not base.__module__.startswith("torch."))
        own_name = snake_case(own.__name__)
        prefix = f"{prefix}.{own_name}" if prefix else own_name
    stack = [(prefix, root)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            if others is not None and path != seen[id(module)]:
                others.append((seen[id(module)], path))
            continue
        seen[id(module)] = path
        yield path, module
        if opaque(module):
            continue
        children = []
        for child_name, child in module._modules.items():  # named_children() leaves a second path out
            if child is None:
                continue
            transparent = is_wrapper_part(module, child_name)
            children.append((path if transparent else f"{path}.{child_name}" if path else child_name, child))
        stack.extend(reversed(children))


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module stands for another one that it wraps (DDP, FSDP, torch.compile, a checkpoint wrapper)."""
    return any(is_wrapper_part(module, child_name) for child_name, _ in module.named_children())


def _unwrapped(module: torch.nn.Module, opaque: Callable[[torch.nn.Module], bool]) -> torch.nn.Module:
    for child_name, child in module.named_children():
        if is_wrapper_part(module, child_name) and not opaque(module):
            return _unwrapped(child, opaque)
    return module


def is_wrapper_part(parent: torch.nn.Module, child_name: str) -> bool:
    """Whether a module wraps the child of this name, which then has no name of its own."""
    if child_name in WRAPPER_CHILDREN:
        return True
    return child_name == "module" and any(base.__name__ in MODULE_WRAPPERS for base in type(parent).__mro__)


def _gemm_parts(module: torch.nn.Module) -> tuple[str, ...] | None:
    """What TE appends to the module's name for each of its GEMM sets; None for a module without observable GEMMs.

    Read from ``_get_debug_quantizers`` of TE 2.20.2's module/{linear,layernorm_linear,layernorm_mlp,grouped_linear}.py.
    """
    classes = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformer_engine.")}
    if "LayerNormMLP" in classes:
        return (".fc1", ".fc2")
    if "GroupedLinear" in classes:
        return tuple(f".gemm_{index}" for index in range(int(module.num_gemms)))  # type: ignore[arg-type]
    return ("",) if classes & {"Linear", "LayerNormLinear"} else None


def _layer(module: torch.nn.Module, name: str, part: str, is_lightning: bool, also: Sequence[str]) -> Layer:
    bases = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformer_engine.pytorch")]
    classes = dict.fromkeys([type(module).__name__, *(base for base in bases if base != "TransformerEngineBaseModule")])
    given = _AUTOMATIC_NAME.sub("", str(getattr(module, "name", None) or ""))
    without_attribute = name.partition(".")[2] if is_lightning else ""
    candidates = [alias + part for alias in (given, without_attribute, *also) if alias]
    for old, new in _OLD_SPELLINGS:
        candidates += [
            alias.replace(old, new) for alias in [name + part, *candidates] if re.search(rf"\b{old}\b", alias)
        ]
    aliases = tuple(alias for alias in dict.fromkeys(candidates) if alias != name + part)
    return Layer(
        name=name + part,
        aliases=aliases,
        types=tuple(spelling for kind in classes for spelling in (kind, snake_case(kind))),
    )
