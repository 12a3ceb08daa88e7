"""The Transformer Engine that a script would run on, and its recipes.

It is imported in another process, since the import may fail, crash or hang. Transformer Engine's own checks (2.20.2,
``pytorch/quantization.py``) decide which recipes run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from te_precision_callbacks import reference
from te_precision_callbacks.base.environment import installed_version
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.reference import ReferenceBackendError, inherited, target
from te_precision_callbacks.reference.launch import Backend, plan_launch

_PACKAGES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")

_TIMEOUT = 180.0
"""Seconds after which the other process counts as hanging."""


class NoAnswerError(Exception):
    """The process failed, crashed or hung."""


@dataclass(frozen=True)
class Recipes:
    """The recipes that run.

    Attributes:
        place: ``this GPU``, or the emulated compute capability.
        refusals: recipe -> why it does not run.
        failure: the exception of the checks; empty without one.
    """

    place: str
    refusals: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class TransformerEngine:
    """The Transformer Engine of this machine; the reasons are empty where they do not apply.

    ``backend`` is the ``compiled`` build, the ``reference`` backend, or ``none``; ``recipes`` is None if neither can be
    used.
    """

    installed: Mapping[str, str]
    backend: Literal["compiled", "reference", "none"]
    description: str
    why_not_compiled: str
    why_no_reference: str
    recipes: Recipes | None


def transformer_engine() -> TransformerEngine:
    """Find the backend of a script, as ``te-precision run`` does."""
    installed = {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    environment = {name: value for name, value in os.environ.items() if name != inherited.ENVIRONMENT_VARIABLE}
    try:
        recipes = recipes_in_process(environment)
    except NoAnswerError as error:
        why = str(error)
    else:
        return TransformerEngine(installed, "compiled", "the compiled Transformer Engine", "", "", recipes)
    try:
        plan = plan_launch(Backend.REFERENCE)
    except ReferenceBackendError as error:
        return TransformerEngine(installed, "none", "no Transformer Engine that can be used", why, str(error), None)
    try:
        recipes = recipes_in_process(environment | plan.environment)
    except NoAnswerError as error:
        recipes = Recipes("reference backend", failure=str(error))
    return TransformerEngine(installed, "reference", plan.description, why, "", recipes)


def recipes_in_process(environment: Mapping[str, str]) -> Recipes:
    """Return the recipes that run in a process with this environment, on the GPU or on the reference backend.

    Raises:
        NoAnswerError: Transformer Engine cannot be imported there.
    """
    code = f"from {__name__} import recipes_here; import json; print(json.dumps(recipes_here()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"the process had not ended after {_TIMEOUT:.0f} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise NoAnswerError(lines[-1] if lines else f"the process ended with status {done.returncode}")
    return Recipes(**json.loads(done.stdout.splitlines()[-1]))  # imports may have printed before


def recipes_here() -> dict[str, Any]:
    """Return the recipes that run in this process, as JSON values."""
    from transformer_engine.pytorch import quantization

    emulated = "reference backend at {}.{}".format(*target.capability())
    return dataclasses.asdict(_recipes(quantization, emulated if reference.is_installed() else "this GPU"))


def _recipes(quantization: Any, place: str) -> Recipes:
    try:
        answers = {name: getattr(quantization, row.check)() for name, row in RECIPES.items()}
    except Exception as error:  # a compiled build without a GPU, for example
        return Recipes(place, failure=f"{type(error).__name__}: {error}")
    refusals = {recipe: why for recipe, (runs, why) in answers.items() if not runs}
    return Recipes(place, refusals)
