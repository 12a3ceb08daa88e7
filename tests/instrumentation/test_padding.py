"""How many rows pad the tokens of experts, and how many tokens each expert gets."""

from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics


class Experts(torch.nn.Module):
    """Three experts, as Megatron Core builds them."""

    def __init__(self) -> None:
        super().__init__()
        self.padding = te.Fp8Padding(3)
        self.fc = te.GroupedLinear(3, 64, 64, bias=False)

    def forward(self, tokens: torch.Tensor, splits: list[int]) -> torch.Tensor:
        with te.autocast():
            result: torch.Tensor = self.fc(*self.padding(tokens, splits))
        return result


def test_padded_rows_and_tokens_of_experts(tmp_path: Path) -> None:
    model = Experts()
    config = statistics()
    config["stats"]["transformer_engine"]["LogTensorStats"]["stats"] = ["numel"]
    config["stats"]["transformer_engine"]["LogTensorStats"]["freq"] = 2
    with InspectSession(config, model=model, log_dir=tmp_path, early_steps=False) as session:
        for step in range(3):
            for splits in ([30, 0, 15], [16, 0, 29]):  # of a multiple of 16: 32, 0, 16 and 16, 0, 32
                model(torch.randn(45, 64), splits).sum().backward()
            with torch.no_grad():
                model(torch.randn(45, 64), [1, 1, 43])  # an evaluation, which does not count
            records = session.step()
            values = {f"{row.layer} {row.statistic}": row.value for row in records or ()}
            if step % 2:
                assert not values
            else:
                assert values.pop(" padding_padded_rows%") == pytest.approx(100 * 6 / 96)
                assert values == {"fc.gemm_0 numel": 48 * 64, "fc.gemm_1 numel": 0, "fc.gemm_2 numel": 48 * 64}
