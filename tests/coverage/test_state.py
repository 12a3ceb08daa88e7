"""What is kept, or passed on, in which type, beside the operands of products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession, PrecisionContractError
from tests.coverage.test_coverage import Layers, words


def test_a_gpt(tmp_path: Path) -> None:
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off", strict=True) as session:
        for _ in range(2):
            model(words()).sum().backward()
        optimizer.step()
        session.step()
        rows = session.coverage().state
    assert not any(module._forward_pre_hooks for module in model.modules()), "the session has taken its hooks back"
    result = {(row.subject, row.dtype): (row.tensors, row.bytes) for row in rows}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    tensors = len(list(model.parameters()))
    assert result["parameter", "float32"] == result["gradient", "float32"] == (tensors, 4 * numbers)
    assert result["optimizer_state", "float32"] == (2 * tensors, 2 * 4 * numbers)
    assert not any(subject == "reduce" for subject, _ in result), "there is one rank"


def test_a_contract_on_the_type_of_parameters(tmp_path: Path) -> None:
    model = Layers().bfloat16()
    demanded = {"state": {"parameter": "float32"}, "by_step": 1}
    with (
        pytest.raises(PrecisionContractError, match=r"parameter must be float32: some are bfloat16"),
        te.autocast(enabled=False),
        InspectSession(None, model=model, log_dir=tmp_path, require=demanded) as session,
    ):
        model(words()).sum().backward()
        session.step()
