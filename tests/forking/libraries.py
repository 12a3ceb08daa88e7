"""Imports of every forked process: all libraries of the tests except Transformer Engine and this project."""

# ruff: noqa: F401  # imported to be there

import accelerate.commands.launch
import einops
import lightning.pytorch
import nvdlfw_inspect.api
import onnxscript
import pandas
import pydantic.dataclasses
import pydantic.type_adapter
import pytest
import rich.table
import safetensors.torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed._tensor
import torch.distributed.checkpoint
import torch.distributed.run
import torch.utils.cpp_extension
import torch.utils.tensorboard
import transformers.trainer
import typer.rich_utils
import yaml

if not torch.cuda.is_available():
    # A torch built for CUDA lets no forked process use the GPU.
    torch.cuda._is_in_bad_fork = lambda: False
