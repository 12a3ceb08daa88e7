"""A broken contract ends the training of an integration at its third step, or at the end of a shorter run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks import PrecisionDebugCallback, PrecisionDebugTrainerCallback
from te_precision_callbacks.session import Coverage, PrecisionContractError
from te_precision_callbacks.transformers import Trainer
from tests.lightning import models as lightning
from tests.transformers import models as transformers

BROKEN = "fp8 >= 95%"


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


def by_lightning(folder: Path, require: Any) -> Callable[[], Coverage]:
    callback = PrecisionDebugCallback(require=require)
    fit = lightning.trainer(folder, callbacks=[callback], max_steps=5).fit
    return lambda: (fit(lightning.Plain(), lightning.loader(8)), callback.session.coverage())[1]


def by_transformers(folder: Path, require: Any) -> Callable[[], Coverage]:
    callback = PrecisionDebugTrainerCallback(require=require)
    trainer = transformers.trainer(transformers.arguments(folder), callback, model=transformers.llama(), kind=Trainer)
    return lambda: (trainer.train(), callback.session.coverage())[1]


INTEGRATIONS = {
    "Lightning": by_lightning,
    "Transformers": by_transformers,
}


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_a_broken_contract_ends_the_training(integration: str, tmp_path: Path) -> None:
    train = INTEGRATIONS[integration](tmp_path, BROKEN)
    with pytest.raises(PrecisionContractError, match=r"checked after step 2:\n- fp8 >= 95%: it is 0 %"):
        train()
