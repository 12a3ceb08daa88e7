"""Accelerate's conversion of a model to layers of Transformer Engine, without FP8."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import torch
from accelerate.state import is_initialized
from accelerate.utils import transformer_engine

from te_precision_callbacks.base.errors import OptionError

Model = TypeVar("Model", bound=torch.nn.Module)


def convert_to_te(model: Model) -> Model:
    """Convert a model in place, as ``accelerator.prepare`` does with FP8, and return it.

    A run in BF16 then has the same layers as a run in FP8, so that ``te-precision compare`` has the statistics of both.
    Call this before ``accelerator.prepare`` or ``transformers.Trainer``, and before the optimizer is made: the
    parameters of converted layers are new, require gradients, and are no longer tied.

    Raises:
        OptionError: ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"convert_to_te(model): the model must be a torch.nn.Module, not a {type(model).__name__}.")
    places = {parameter.device for parameter in model.parameters()}
    gathered = transformer_engine.GatheredParameters
    # It asks an Accelerator's state whether DeepSpeed has split the weights, and making that state would meet the other
    # ranks. Read from Accelerate 1.10 to 1.15, utils/transformer_engine.py.
    if not is_initialized():
        transformer_engine.GatheredParameters = lambda *_, **__: contextlib.nullcontext()
    try:
        with torch.no_grad():
            transformer_engine.convert_model(model)
            if len(places) == 1:
                model.to(next(iter(places)))  # Transformer Engine makes its layers on the GPU
    finally:
        transformer_engine.GatheredParameters = gathered
    return model
