"""Checks one tensor at once."""

from __future__ import annotations

import logging
import math

import torch

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.overflow.errors import DetectionFailedError, OverflowOptionError, text_of
from te_precision_callbacks.overflow.extreme_slots import Slot, Slots
from te_precision_callbacks.overflow.grad_scaler import journals

logger = logging.getLogger(__name__)


@outside_of_dynamo
def detect_overflow(tensor: torch.Tensor, label: str) -> bool:
    """Check a tensor for inf and nan between two operations inside a forward, and log a find as an error.

        forwarded_states = self.layer_norm(hidden_states)
        detect_overflow(forwarded_states, "after layer_norm")

    If a :class:`DebugActivationOverflow` watches the running forward, its report gets a frame with the label. The host
    waits for the tensor.

    Args:
        tensor: any shape, dtype and device.
        label: the tensor's name in the log and the report.

    Returns:
        Whether there is an inf, of either sign, or a nan; False for a tensor whose elements cannot be read.

    Raises:
        OverflowOptionError: ``tensor`` is not a tensor.
        DetectionFailedError: the check itself has failed.
    """
    if not isinstance(tensor, torch.Tensor):
        raise OverflowOptionError(
            f"detect_overflow(tensor, label) takes a tensor first, not a {type(tensor).__name__}."
        )
    for journal in journals():
        journal.label(tensor, label)
    slots = Slots(abs_min=False)
    try:
        measured = slots.measure(tensor)
        if not isinstance(measured, Slot):
            return False
        low, high = slots.read().extremes(measured)
    except Exception as error:
        raise DetectionFailedError(text_of(error), rank=own_rank()) from error
    if math.isfinite(low) and math.isfinite(high):
        return False
    logger.error("%s has %s", label, "nans" if math.isnan(high) else "infs")
    return True
