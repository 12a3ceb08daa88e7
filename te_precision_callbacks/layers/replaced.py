"""Frozen and tied parameters that a conversion to Transformer Engine's layers loses.

before = BeforeConversion(model)
...                                     # the trainer makes new layers, with parameters that require gradients
before.lost_in(model, by="The conversion", remedy="Freeze or tie them again.")
"""

from __future__ import annotations

import weakref

import torch

from te_precision_callbacks.layers.folding import folded

_MOST_NAMES = 8


class BeforeConversion:
    """The frozen or tied parameters of a model before its layers are replaced.

    Args:
        model: the model, which is not kept alive.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._frozen: dict[str, weakref.ref[torch.nn.Parameter]] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            if not parameter.requires_grad:
                self._frozen[name] = weakref.ref(parameter)
        self._tied = [several for several in names.values() if len(several) > 1]

    def lost_in(self, model: torch.nn.Module, *, by: str, remedy: str) -> list[str]:
        """Messages about frozen parameters that now require gradients, and tied parameters that are now several.

        Args:
            model: the model after the conversion.
            by: the subject of the message.
            remedy: the remedy.
        """
        now = dict(model.named_parameters(remove_duplicate=False))
        thawed = [
            name
            for name, before in self._frozen.items()
            if name in now and now[name].requires_grad and now[name] is not before()
        ]
        untied = [names for names in self._tied if len({id(now[name]) for name in names if name in now}) > 1]
        said = []
        if thawed:
            said.append(
                f"{by} has unfrozen these parameters: {listed(thawed)}. They get gradients, and an optimizer that has"
                f" them trains them. {remedy}"
            )
        if untied:
            pairs = "; ".join(folded([" and ".join(names) for names in untied], most=_MOST_NAMES))
            said.append(f"{by} has untied {pairs}: each has its own copy of the weights. {remedy}")
        return said


def listed(names: list[str]) -> str:
    return ", ".join(folded(names, most=_MOST_NAMES))
