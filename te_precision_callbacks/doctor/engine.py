"""Transformer Engine: compiled, stood in for by the reference backend, or neither, and the recipes that run.

Which recipes run is asked of Transformer Engine's own checks (2.20.2, ``pytorch/quantization.py``), in processes of
their own: on the GPU for the compiled build, and at each compute capability that the reference backend emulates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.doctor.asking import NoAnswerError, ask
from te_precision_callbacks.doctor.packages import installed_version
from te_precision_callbacks.reference import ReferenceBackendError, compiled, inherited, target
from te_precision_callbacks.reference.launch import Backend, plan_launch
from te_precision_callbacks.vocabulary import RECIPES

_PACKAGES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")

_CHECKS = {
    "fp8_delayed_scaling": "check_fp8_support",
    "fp8_current_scaling": "check_fp8_support",
    "mxfp8": "check_mxfp8_support",
    "fp8_block_scaling": "check_fp8_block_scaling_support",
    "nvfp4": "check_nvfp4_support",
}

_QUESTION = f"""
from transformer_engine.pytorch import quantization
answer = {{recipe: getattr(quantization, check)() for recipe, check in {_CHECKS}.items()}}
answer = {{"refusals": {{recipe: why for recipe, (runs, why) in answer.items() if not runs}}}}
try:
    answer["default"], answer["why_no_default"] = type(quantization.get_default_recipe()).__name__, ""
except Exception as error:
    words = " ".join(str(error).split()).partition(" [type=")[0]  # pydantic goes on with what it was given
    answer["default"], answer["why_no_default"] = "", f"{{type(error).__name__}}: {{words}}"
"""


@dataclass(frozen=True)
class Recipes:
    """Which recipes run in one place.

    Attributes:
        place: where, in words.
        chosen: whether scripts run there.
        refusals: recipe, of :data:`te_precision_callbacks.vocabulary.RECIPES` -> why it does not run there.
        default: the class of the recipe that ``te.autocast()`` takes by itself; empty if there is none.
        why_no_default: the exception with which Transformer Engine makes none; empty if it makes one.
        failure: why Transformer Engine could not be asked; empty if it could.
    """

    place: str
    chosen: bool
    refusals: Mapping[str, str]
    default: str
    why_no_default: str
    failure: str

    def runs(self, recipe: str) -> bool:
        """Whether a recipe runs here."""
        return not self.failure and recipe not in self.refusals


@dataclass(frozen=True)
class TransformerEngine:
    """The Transformer Engine of this machine.

    Attributes:
        installed: package -> version, of those that make up Transformer Engine.
        backend: what a script would run on: the ``compiled`` build, the ``reference`` backend, or ``none``.
        description: the same in words.
        why_not_compiled: the error of importing the compiled build; empty if it can be imported.
        why_no_reference: why the reference backend cannot stand in; empty if it can, or need not.
        recipes: which recipes run.
    """

    installed: Mapping[str, str]
    backend: Literal["compiled", "reference", "none"]
    description: str
    why_not_compiled: str
    why_no_reference: str
    recipes: tuple[Recipes, ...]


def transformer_engine() -> TransformerEngine:
    """Find out what a script would run on, as ``te-precision run`` does."""
    installed = {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    environment = {name: value for name, value in os.environ.items() if name != inherited.ENVIRONMENT_VARIABLE}
    why = compiled.why_unavailable()
    if why is None:
        on_gpu = _recipes("this GPU", True, environment)
        return TransformerEngine(installed, "compiled", "the compiled Transformer Engine", "", "", (on_gpu,))
    try:
        plan = plan_launch(Backend.REFERENCE)
    except ReferenceBackendError as error:
        return TransformerEngine(installed, "none", "no Transformer Engine that can be used", why, str(error), ())
    pretend_cuda = json.loads(plan.environment[inherited.ENVIRONMENT_VARIABLE])["pretend_cuda"]

    def at(capability: tuple[int, int]) -> Recipes:
        told = inherited.environment(pretend_cuda=pretend_cuda, capability=capability, always=True)
        place = "reference backend at {}.{}".format(*capability)
        return _recipes(place, capability == target.capability(), environment | told)

    with ThreadPoolExecutor() as pool:
        recipes = tuple(pool.map(at, target.ALLOWED))
    return TransformerEngine(installed, "reference", plan.description, why, "", recipes)


def _recipes(place: str, chosen: bool, environment: Mapping[str, str]) -> Recipes:
    try:
        return Recipes(place, chosen, **ask(_QUESTION, environment), failure="")
    except NoAnswerError as error:
        return Recipes(place, chosen, dict.fromkeys(RECIPES, "not known"), "", "", str(error))
