"""Whether Transformer Engine is compiled, replaced by the reference backend, or missing, and the recipes that run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.base.installed import installed_version
from te_precision_callbacks.cli.doctor.asking import NoAnswerError
from te_precision_callbacks.cli.doctor.runnable_recipes import Recipes, ask_for_recipes
from te_precision_callbacks.reference import ReferenceBackendError, inherited
from te_precision_callbacks.reference.launch import Backend, plan_launch

_PACKAGES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")


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
        recipes = ask_for_recipes(environment)
    except NoAnswerError as error:
        why = str(error)
    else:
        return TransformerEngine(installed, "compiled", "the compiled Transformer Engine", "", "", recipes)
    try:
        plan = plan_launch(Backend.REFERENCE)
    except ReferenceBackendError as error:
        return TransformerEngine(installed, "none", "no Transformer Engine that can be used", why, str(error), ())
    try:
        recipes = ask_for_recipes(environment | plan.environment)
    except NoAnswerError as error:
        recipes = (Recipes("reference backend", chosen=True, failure=str(error)),)
    return TransformerEngine(installed, "reference", plan.description, why, "", recipes)
