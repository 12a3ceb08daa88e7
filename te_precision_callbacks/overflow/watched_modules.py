"""The watched modules of a model, and their paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from te_precision_callbacks.layers.naming import compiled_call, is_wrapper, module_paths


def watched_modules(
    roots: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each watched module once, with its path without wrapper parts, parents first.

    Wrappers are replaced by the modules that they wrap. A compiled module is watched only from outside.

    Args:
        roots: the models, each with the prefix of its paths.
    """
    found: set[int] = set()
    for prefix, root in roots:
        for path, module in module_paths(root, prefix, opaque=is_compiled):
            if id(module) not in found and (is_compiled(module) or not is_wrapper(module)):
                found.add(id(module))
                yield path, module


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module runs as compiled or scripted code, into which no hook reaches."""
    if isinstance(module, torch.jit.ScriptModule) or compiled_call(module) is not None:
        return True
    return any(base.__name__ == "OptimizedModule" for base in type(module).__mro__)


def class_name(module: torch.nn.Module) -> str:
    """The name of a module's original class, under ``torch.compile``'s wrapper or ``fully_shard``'s subclass."""
    module = getattr(module, "_orig_mod", module)
    names = [base.__name__ for base in type(module).__mro__]
    return names[names.index("FSDPModule") + 1] if "FSDPModule" in names[:-1] else names[0]
