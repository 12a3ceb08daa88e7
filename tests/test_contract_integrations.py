"""A broken contract ends the training of an integration at its third step, or at the end of a shorter run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_precision_callbacks import (
    PrecisionDebugCallback,
)
from te_precision_callbacks.debug_options import add_debug_options, debugging
from te_precision_callbacks.session import Coverage, PrecisionContractError
from te_precision_callbacks.transformers import Trainer, TrainingArguments
from tests.lightning import models as lightning
from tests.transformers import models as transformers

BROKEN = "fp8 >= 95%"


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


def by_lightning(folder: Path, require: Any) -> Callable[[], Coverage]:
    callback = PrecisionDebugCallback(require=require)
    fit = lightning.trainer(folder, callbacks=[callback], max_steps=5).fit
    return lambda: (fit(lightning.Plain(), lightning.loader(8)), callback.session.coverage())[1]


def by_transformers_flag(folder: Path, require: Any) -> Callable[[], Coverage]:
    keywords = {"debug": "te_precision", "te_precision_require": require}
    args = transformers.arguments(folder, TrainingArguments, **keywords)
    trainer: Any = transformers.trainer(args, model=transformers.llama(), kind=Trainer)
    return lambda: (trainer.train(), trainer.debug_session.coverage())[1]


def by_argparse(folder: Path, require: Any) -> Callable[[], Coverage]:
    parser = argparse.ArgumentParser()
    add_debug_options(parser)
    arguments = parser.parse_args(["--debug", "te_precision", "--te_precision_require", require])
    model = torch.nn.Linear(8, 8)

    def train() -> Coverage:
        with debugging(arguments, model, log_dir=folder) as session:
            for _ in range(5):
                model(torch.ones(4, 8)).sum().backward()
                session.step()
        return session.coverage()  # type: ignore[attr-defined, no-any-return]

    return train


INTEGRATIONS = {
    "Lightning": by_lightning,
    "Transformers, by the flag": by_transformers_flag,
    "argparse": by_argparse,
}


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_a_broken_contract_ends_the_training(integration: str, tmp_path: Path) -> None:
    train = INTEGRATIONS[integration](tmp_path, BROKEN)
    with pytest.raises(PrecisionContractError, match=r"checked after step 2:\n- fp8 >= 95%: it is 0 %"):
        train()
