"""A config with an unknown feature is refused by every integration where it is made, in the same words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_precision_callbacks import (
    PrecisionDebugCallback,
    PrecisionDebugFabricCallback,
    PrecisionDebugger,
    PrecisionDebugTrainerCallback,
)
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.debug_options import add_debug_options, debugging
from te_precision_callbacks.session import InspectSession

CONFIG = """
s:
  enabled: True
  layers: {layer_types: [all]}
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [maxx]
      tensors: [weight]
    Mine:
      enabled: True
  elsewhere:
    Other:
      enabled: True
"""


class Mine:
    """A user's own feature."""


def by_arguments(path: Path, **keywords: Any) -> Any:
    parser = argparse.ArgumentParser()
    add_debug_options(parser)
    arguments = parser.parse_args(["--debug", "te_precision", "--te_precision_config", str(path)])
    return debugging(arguments, torch.nn.Linear(2, 2), **keywords)


def by_accelerate(path: Path, **keywords: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return PrecisionDebugger(accelerator, accelerator.prepare(torch.nn.Linear(2, 2)), path, **keywords)


def by_trainer_arguments(path: Path, **keywords: Any) -> Any:
    from te_precision_callbacks.transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(path.parent), debug="te_precision", te_precision_config=str(path), use_cpu=True, report_to=[]
    )
    return Trainer(torch.nn.Linear(2, 2), arguments)


INTEGRATIONS: dict[str, Callable[..., Any]] = {
    "load_config": load_config,
    "InspectSession": InspectSession,
    "Lightning": PrecisionDebugCallback,
    "Fabric": PrecisionDebugFabricCallback,
    "Accelerate": by_accelerate,
    "Transformers": PrecisionDebugTrainerCallback,
    "debug_options": by_arguments,
}


@pytest.mark.parametrize("integration", [*INTEGRATIONS.values(), by_trainer_arguments], ids=[*INTEGRATIONS, "Trainer"])
def test_each_integration_reports_all_problems_of_a_config(tmp_path: Path, integration: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{CONFIG}layer_names: upstreams\n")
    with pytest.raises(ConfigError) as caught:
        integration(path)
    assert [problem.removeprefix(f"{path}, ").split(" (")[0] for problem in caught.value.problems] == [
        "line 10",
        "line 12",
        "line 8 column 15",
        "line 15",
    ]
    assert "there is no feature 'Mine'" in str(caught.value)
    assert "in features=, or its folder in feature_dirs=. te-precision check does not know" in str(caught.value)
    assert "PerTensorScaling. Give a session" in str(caught.value), "the known names, without TestDummyFeature"
