"""Parameters that Accelerate's conversion leaves without an optimizer, since they were frozen or tied before it."""

from __future__ import annotations

import logging

from accelerate import Accelerator

from te_precision_callbacks.accelerate.unconverted import converts, is_of_transformer_engine, roots_of
from te_precision_callbacks.layers.naming import Model, module_paths
from te_precision_callbacks.layers.replaced import listed

logger = logging.getLogger(__name__)

FREEZE_AGAIN = (
    "Call accelerate.utils.convert_model(model) yourself before you make the optimizer, and freeze or tie them again"
    " after it, as docs/accelerate.md shows."
)
"""What to do about them."""


def warn_of_unheld(accelerator: Accelerator, model: Model) -> None:
    """Warn on the main process of parameters that require gradients, and that no optimizer of the accelerator holds.

    ``accelerator.prepare`` makes layers of Transformer Engine whose parameters all require gradients, and gives the
    optimizer those in whose place it had others. Read from Accelerate 1.10 to 1.15. An optimizer that was given frozen
    parameters, too, trains them, which nothing shows afterwards.

    Where the optimizer holds no parameter of the model, as under DeepSpeed, nothing is known.
    """
    if not (converts(accelerator) and accelerator.is_main_process):
        return
    groups = (group for optimizer in accelerator._optimizers for group in optimizer.param_groups)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    unheld: dict[int, str] = {}
    knows = False
    for prefix, root in roots_of(model):
        for path, module in module_paths(root, prefix):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in held:
                    knows = True
                elif parameter.requires_grad and is_of_transformer_engine(module):
                    unheld.setdefault(id(parameter), f"{path}.{name}" if path else name)
    if knows and unheld:
        logger.warning(
            "No optimizer holds these parameters of converted layers, which require gradients: %s. Their gradients take"
            " memory and count when gradients are clipped, and nothing trains them. Accelerate's conversion makes such"
            " parameters of frozen and of tied ones. If the optimizer leaves them out on purpose, set their"
            " requires_grad to False. %s",
            listed(list(unheld.values())),
            FREEZE_AGAIN,
        )
