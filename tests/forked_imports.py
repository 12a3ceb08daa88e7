"""What the process imports that the scripts of tests/forked.py are forked from."""

# ruff: noqa: F401  # imported to be there

from __future__ import annotations

import accelerate
import lightning.pytorch
import torch.distributed.run
import transformer_engine.pytorch
import transformers.trainer

import te_precision_callbacks.transformers
import tests.conftest  # it installs the reference backend
