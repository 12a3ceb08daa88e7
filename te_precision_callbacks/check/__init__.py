"""Checks a config before a run, and plans what a model's matrix products will run in.

Usage::

    te-precision check config.yaml
    te-precision check config.yaml --model package.module:function --recipe mxfp8 --tokens 4096

    checked = check_model(model, load_config("config.yaml"), recipe="mxfp8", tokens=4096)
    checked.coverage.share("fp8")     # as session.coverage(), of a step that has not run
    checked.findings                  # what does not fit
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_precision_callbacks.check.factory import ModelFactoryError
    from te_precision_callbacks.check.findings import Finding
    from te_precision_callbacks.check.model import ActingFeature, CheckedModel, check_model
    from te_precision_callbacks.check.recipes import RecipeError

__all__ = ["ActingFeature", "CheckedModel", "Finding", "ModelFactoryError", "RecipeError", "check_model"]

_HERE = "te_precision_callbacks.check"
_HOMES = {
    "ActingFeature": f"{_HERE}.model",
    "CheckedModel": f"{_HERE}.model",
    "Finding": f"{_HERE}.findings",
    "ModelFactoryError": f"{_HERE}.factory",
    "RecipeError": f"{_HERE}.recipes",
    "check_model": f"{_HERE}.model",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
