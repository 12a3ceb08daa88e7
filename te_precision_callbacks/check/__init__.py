"""Checks a config before a run, and plans the precision of a model's matrix products.

Usage::

    te-precision check config.yaml
    te-precision check config.yaml --model package.module:function --recipe mxfp8 --tokens 4096

    checked = check_model(model, load_config("config.yaml"), recipe="mxfp8", tokens=4096)
    checked.coverage.share("fp8")     # as session.coverage(), of a step that has not run
    checked.findings                  # problems of the plan
    checked.unknown                   # what a plan cannot show
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.check.checked_model import CheckedModel, PlanFinding, check_model
    from te_precision_callbacks.check.factory import RecipeError

__all__ = [
    "CheckedModel",
    "PlanFinding",
    "RecipeError",
    "check_model",
]

__getattr__, __dir__ = lazy_names(__name__)
