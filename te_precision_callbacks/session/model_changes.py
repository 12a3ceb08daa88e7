"""Notices that a model has got other modules since the last step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.layers.naming import Model, ModuleTree


class ModelChanges:
    """Compares the modules of a model with those of before, as a whole only if something suggests a change.

    Args:
        unwatched: the modules that train, and are not watched.
    """

    def __init__(self, unwatched: Collection[torch.nn.Module]) -> None:
        self._unwatched = unwatched
        self._known_outside = 0
        self._tree: ModuleTree | None = None
        self._registrations: RemovableHandle | None = None

    def watch(self, model: Model) -> None:
        """Compare with what a model has now."""
        self._tree = ModuleTree(model)
        if self._registrations is None:
            self._registrations = register_module_module_registration_hook(self._note_registration)

    def release(self) -> None:
        """No longer follow what is registered in modules."""
        if self._registrations is not None:
            self._registrations.remove()
            self._registrations = None

    def _note_registration(self, module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if self._tree is not None:
            self._tree.note_registration(module)

    def found(self) -> bool:
        """Whether the model has other modules."""
        outside, self._known_outside = self._known_outside, len(self._unwatched)
        tree = self._tree
        if tree is None or not (tree.seems_changed() or self._known_outside != outside):
            return False
        return tree.changed()
