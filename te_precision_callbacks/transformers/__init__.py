"""Precision debugging for the Hugging Face Trainer: a callback, or drop-in classes with a ``--debug`` flag.

Usage::

    import transformers
    from te_precision_callbacks.transformers import PrecisionDebugTrainerCallback

    callback = PrecisionDebugTrainerCallback("config.yaml")
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])

    from te_precision_callbacks.transformers import Trainer, TrainingArguments

    args = TrainingArguments("run", debug="te_precision activation_overflow", te_precision_config="config.yaml")
    trainer = Trainer(model, args, train_dataset=data)  # or with --debug te_precision activation_overflow
"""

from __future__ import annotations

from te_precision_callbacks.base.errors import MissingExtraError, TransformerEngineUnavailableError
from te_precision_callbacks.te.package import transformer_engine_error

try:
    import accelerate  # noqa: F401  # the Trainer misses it late, when constructed
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError("te_precision_callbacks.transformers", "transformers") from error

try:
    from transformers import Trainer as _  # noqa: F401  # which imports PEFT, and that Transformer Engine
except ImportError as error:
    if (cause := transformer_engine_error(error)) is None:
        raise
    needed_by = "Transformer Engine, which PEFT imports for transformers' Trainer where both are installed,"
    raise TransformerEngineUnavailableError(cause, needed_by) from error

from te_precision_callbacks.accelerate import convert_to_te
from te_precision_callbacks.transformers.callback import PrecisionDebugTrainerCallback
from te_precision_callbacks.transformers.trainer import PrecisionDebugOption, Trainer, TrainingArguments

__all__ = ["PrecisionDebugOption", "PrecisionDebugTrainerCallback", "Trainer", "TrainingArguments", "convert_to_te"]
