"""Which recipes run, by Transformer Engine's own checks (2.20.2, ``pytorch/quantization.py``).

Usage::

    ask_for_recipes(os.environ)             # (Recipes("this GPU", ...),) with the compiled build
    ask_for_recipes(os.environ | backend)   # one for each compute capability that the reference backend emulates
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from te_precision_callbacks import reference
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.cli.doctor.asking import ask
from te_precision_callbacks.reference import target

_REMEMBERED = ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT")
"""Where Transformer Engine keeps what its checks have found."""


@dataclass(frozen=True)
class Recipes:
    """Which recipes run in one place.

    Attributes:
        place: where, in words.
        chosen: whether scripts run there.
        refusals: recipe -> why it does not run there.
        default: the class of the recipe that ``te.autocast()`` takes by itself; empty if there is none.
        why_no_default: the exception with which Transformer Engine makes none; empty if it makes one.
        failure: why Transformer Engine could not be asked; empty if it could.
    """

    place: str
    chosen: bool
    refusals: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    why_no_default: str = ""
    failure: str = ""

    def answer(self, recipe: str) -> str:
        """Whether a recipe runs here, in words."""
        return "not known" if self.failure else self.refusals.get(recipe, "runs")


def ask_for_recipes(environment: Mapping[str, str]) -> tuple[Recipes, ...]:
    """Which recipes run in a process with this environment, on the GPU or on the reference backend.

    Raises:
        NoAnswerError: Transformer Engine cannot be imported there.
    """
    return tuple(Recipes(**answer) for answer in ask(recipes_here, environment))


def recipes_here() -> list[dict[str, Any]]:
    """Which recipes run in this process: :class:`Recipes` as JSON can hold them.

    On the reference backend, the process has changed its GPU afterwards: nothing else may run in it.
    """
    from transformer_engine.pytorch import quantization, utils

    if not reference.is_installed():
        return [dataclasses.asdict(_recipes(quantization, "this GPU", chosen=True))]
    chosen = target.capability()
    found = []
    for capability in target.ALLOWED:
        target.choose(capability)
        utils._get_device_compute_capability.cache_clear()
        for name in _REMEMBERED:
            setattr(quantization, name, None)
        place = "reference backend at {}.{}".format(*capability)
        found.append(dataclasses.asdict(_recipes(quantization, place, chosen=capability == chosen)))
    return found


def _recipes(quantization: Any, place: str, *, chosen: bool) -> Recipes:
    try:
        answers = {name: getattr(quantization, row.check)() for name, row in RECIPES.items()}
    except Exception as error:  # a compiled build without a GPU, for example
        return Recipes(place, chosen, failure=f"{type(error).__name__}: {error}")
    refusals = {recipe: why for recipe, (runs, why) in answers.items() if not runs}
    default = why_no_default = ""
    try:
        default = type(quantization.get_default_recipe()).__name__
    except Exception as error:
        words = " ".join(str(error).split()).partition(" [type=")[0]  # pydantic goes on with what it was given
        why_no_default = f"{type(error).__name__}: {words}"
    return Recipes(place, chosen, refusals, default, why_no_default)
