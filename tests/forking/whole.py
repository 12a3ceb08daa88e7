"""Further imports of a "whole" process: Transformer Engine and this project."""

# ruff: noqa: E402, F401, I001  # imported to be there; the reference backend before Transformer Engine

from tests.preparing import prepare

prepare()

import te_precision_callbacks.accelerate
import te_precision_callbacks.lightning
import te_precision_callbacks.transformers
import transformer_engine.pytorch
