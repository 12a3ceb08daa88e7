"""The Transformer Engine that a script would run on, and the recipes that run there.

Transformer Engine is imported in another process, in which the import may fail, crash or hang. Its own checks
(2.20.2, ``pytorch/quantization.py``) decide which recipes run.
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
from te_precision_callbacks.base.installed import installed_version
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.reference import ReferenceBackendError, inherited, target
from te_precision_callbacks.reference.launch import Backend, plan_launch

_PACKAGES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")

_TIMEOUT = 180.0
"""Seconds after which the other process counts as hanging."""

_CACHED = ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT")
"""Where Transformer Engine caches the results of its checks."""


class NoAnswerError(Exception):
    """The process ended without an answer; the message says how."""


@dataclass(frozen=True)
class Recipes:
    """The recipes that run in one place.

    Attributes:
        place: where, in words.
        chosen: whether scripts run there.
        refusals: recipe -> why it does not run there.
        default: the class of the default recipe of ``te.autocast()``; empty if there is none.
        why_no_default: the exception that Transformer Engine raises instead; empty if it raises none.
        failure: the exception of the checks; empty if they ran.
    """

    place: str
    chosen: bool
    refusals: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    why_no_default: str = ""
    failure: str = ""


@dataclass(frozen=True)
class TransformerEngine:
    """The Transformer Engine of this machine.

    Attributes:
        installed: package -> version, of those that make up Transformer Engine.
        backend: what a script would run on: the ``compiled`` build, the ``reference`` backend, or ``none``.
        description: the same in words.
        why_not_compiled: the error of importing the compiled build; empty if it can be imported.
        why_no_reference: why the reference backend cannot replace it; empty if it can, or need not.
        recipes: which recipes run, place by place; empty if neither backend can be used.
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
    try:
        recipes = recipes_in_process(environment)
    except NoAnswerError as error:
        why = str(error)
    else:
        return TransformerEngine(installed, "compiled", "the compiled Transformer Engine", "", "", recipes)
    try:
        plan = plan_launch(Backend.REFERENCE)
    except ReferenceBackendError as error:
        return TransformerEngine(installed, "none", "no Transformer Engine that can be used", why, str(error), ())
    try:
        recipes = recipes_in_process(environment | plan.environment)
    except NoAnswerError as error:
        recipes = (Recipes("reference backend", chosen=True, failure=str(error)),)
    return TransformerEngine(installed, "reference", plan.description, why, "", recipes)


def recipes_in_process(environment: Mapping[str, str]) -> tuple[Recipes, ...]:
    """Which recipes run in a process with this environment, on the GPU or on the reference backend.

    Raises:
        NoAnswerError: the process failed, crashed or hung: Transformer Engine cannot be imported there.
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
    return tuple(Recipes(**row) for row in json.loads(done.stdout.splitlines()[-1]))  # imports may have printed before


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
        for name in _CACHED:
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
        words = " ".join(str(error).split()).partition(" [type=")[0]  # pydantic appends its input
        why_no_default = f"{type(error).__name__}: {words}"
    return Recipes(place, chosen, refusals, default, why_no_default)
