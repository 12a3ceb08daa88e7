"""Finds parameters that are inf or nan themselves, and advises what to do about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_precision_callbacks.overflow.extreme_slots import Slot, Slots
from te_precision_callbacks.overflow.report import amax
from te_precision_callbacks.overflow.verdict import what
from te_precision_callbacks.overflow.watched_modules import is_compiled, watched_modules

_LISTED = 5


def amax_of_parameters(roots: Sequence[tuple[str, torch.nn.Module]], path: str) -> dict[str, float]:
    """The largest magnitude of each parameter of the module at ``path`` itself. The host waits for the device."""
    slots = Slots(abs_min=False)
    module = next((module for place, module in watched_modules(roots) if place == path), None)
    named = () if module is None else module.named_parameters(recurse=is_compiled(module))
    measured = {name: slots.measure(parameter) for name, parameter in named}
    values = slots.read()
    return {name: amax(slot, values) for name, slot in measured.items() if isinstance(slot, Slot)}


def broken_parameters(roots: Sequence[tuple[str, torch.nn.Module]], path: str) -> list[str]:
    """The parameters with an inf or nan, those of the module at ``path`` first: ``fc1.weight (nans)``.

    The host waits for the device.

    Args:
        roots: the models, each with the prefix of its paths.
        path: the path of a module.
    """
    slots = Slots(abs_min=False)
    names: dict[Slot, str] = {}
    seen: set[int] = set()
    for place, module in sorted(watched_modules(roots), key=lambda found: found[0] != path):
        for name, parameter in module.named_parameters(recurse=is_compiled(module)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                measured = slots.measure(parameter)
                if isinstance(measured, Slot):
                    names[measured] = f"{place}.{name}".removeprefix(".")
    values = slots.read()
    bad = values.not_finite()
    return [f"{name} ({what(*values.extremes(slot))})" for slot, name in names.items() if slot in bad]


def advice_on_weights(broken: Sequence[str], steps: int, optimizer: str) -> str:
    """The advice if parameters are not finite themselves.

    Args:
        broken: the parameters, such as ``fc1.weight (nans)``.
        steps: how many steps of the model's optimizers the detector has seen.
        optimizer: the class of the optimizer that stepped last.
    """
    more = f" and {len(broken) - _LISTED} more" if len(broken) > _LISTED else ""
    origin = (
        f"The detector has seen {steps} {'steps' if steps > 1 else 'step'} of the model's optimizers, the last of"
        f" {optimizer}: that step, or code that ran after it, has broken the weights. Check the optimizer's learning"
        " rate, state and eps, and go back to an earlier checkpoint."
        if steps
        else "No optimizer has stepped since the detector was made: the weights were broken by the initialization, or"
        " in the checkpoint that was loaded."
    )
    return (
        f"The weights are already broken, so another precision does not help: {', '.join(broken[:_LISTED])}{more}."
        f" {origin}"
    )
