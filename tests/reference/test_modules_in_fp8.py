"""Modules training in FP8: every byte, scale and amax that they make, against a computation of its own.

Each write of FP8 data is recorded on its way through the backend: what was quantized, and what came out. What must come
out is computed here from the formulas of the recipes (numpy float32 and torch's own float8 casts).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

from te_precision_callbacks.reference.extension import float8
from tests.combinations import half
from tests.reference import training
from tests.reference.training import MODULES

MAX = {"E4M3": np.float32(448), "E5M2": np.float32(57344)}
CAST = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


class Write(training.Write):
    @property
    def format(self) -> str:
        return str(self.quantizer.dtype.name).removeprefix("kFloat8")

    @property
    def amax(self) -> np.float32:
        return np.float32(self.source.double().abs().max().item())

    @property
    def slot(self) -> tuple[int, int]:
        """Which of a module's scales this is: they are views of one tensor a module and direction."""
        return self.quantizer.scale.untyped_storage().data_ptr(), self.quantizer.scale.storage_offset()

    def check(self, scale: np.float32) -> None:
        """The data is the saturating cast of source times scale, the transpose the data's, scale_inv 1 / scale."""
        data, transpose, largest = self.buffers["data"], self.buffers["transpose"], float(MAX[self.format])
        expected = (self.source.float() * torch.tensor(scale)).clamp(-largest, largest).to(CAST[self.format])
        assert torch.equal(data, expected.view(torch.uint8))
        assert self.buffers["scale_inv"].item() == np.float32(1) / scale
        if transpose is not None:
            matrix = data.reshape(-1, data.shape[-1])
            assert torch.equal(transpose.reshape(matrix.shape[1], -1), matrix.t())


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Write]:
    te.quantization.FP8GlobalStateManager.reset()
    return training.recorded(monkeypatch, Write, float8.DelayedScaling, float8.CurrentScaling)


def inputs(steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Inputs of very different sizes, so that scales change."""
    for index in range(steps):
        torch.manual_seed(index)
        yield (torch.randn(32, 64) * 4.0 ** ((index % 3) - 1)).to(dtype).requires_grad_()


class History:
    """The amax history and scale of one tensor, by the rules of the delayed scaling recipe."""

    def __init__(self, length: int) -> None:
        self.amaxes = np.zeros(length, dtype=np.float32)
        self.scale = np.float32(1)

    def update(self, amax: np.float32, fp8_max: np.float32, algorithm: str, margin: int) -> None:
        recent = np.append(self.amaxes[1:], amax)
        self.amaxes = np.append(np.float32(0), recent[1:])
        chosen = recent.max() if algorithm == "max" else amax
        if chosen > 0 and np.isfinite(chosen):
            self.scale = np.float32(fp8_max * np.float32(2.0**-margin)) / chosen


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    half(
        MODULES,
        [("max", 0, Format.HYBRID), ("most_recent", 1, Format.E4M3)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_delayed_scaling(name: str, options: tuple[str, int, Format], dtype: torch.dtype, writes: list[Write]) -> None:
    algorithm, margin, fp8_format = options
    length = 3
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin, fp8_format=fp8_format)
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    histories: dict[tuple[int, int], History] = {}
    for x in inputs(6, dtype):
        writes.clear()
        training.step(module, recipe, x)
        assert {write.format for write in writes} == ({"E4M3", "E5M2"} if fp8_format is Format.HYBRID else {"E4M3"})
        for write in writes:
            write.check(histories.setdefault(write.slot, History(length)).scale)
        for key in {write.slot for write in writes}:
            of_slot = [write for write in writes if write.slot == key]
            amax = max(write.amax for write in of_slot)
            histories[key].update(amax, MAX[of_slot[0].format], algorithm, margin)
    stored = {}
    for part in module.modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            meta = getattr(part, "fp8_meta", {}).get(direction)
            for index, scale in enumerate([] if meta is None else meta.scale.tolist()):
                place = meta.scale.untyped_storage().data_ptr(), index
                stored[place] = meta.amax_history[:, index].tolist(), scale
    assert histories
    for key, history in histories.items():
        assert stored[key] == (history.amaxes.tolist(), history.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_current_scaling(name: str, dtype: torch.dtype, writes: list[Write]) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    for x in inputs(3, dtype):
        writes.clear()
        training.step(module, Float8CurrentScaling(), x)
        assert len(writes) >= 3
        for write in writes:
            scale = MAX[write.format] / write.amax
            if write.measured_before and dtype is not torch.float32:
                # An MLP's activation is measured before it is rounded to the input's type, as upstream's kernels do.
                assert write.buffers["scale_inv"].item() == pytest.approx(1 / scale, rel=2**-7)
            else:
                write.check(scale)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()])
def test_the_tensors_of_a_linear_are_its_input_weight_and_output_gradient(recipe: Any, writes: list[Write]) -> None:
    torch.manual_seed(0)
    module = te.Linear(64, 96)
    for x, first in zip(inputs(4, torch.float32), (True, False, True, False), strict=True):
        writes.clear()
        training.step(module, recipe, x, is_first_microbatch=first)
        sources = [write.source for write in writes]
        assert torch.equal(sources[0], x)
        assert [torch.equal(source, module.weight) for source in sources if source.shape == module.weight.shape] == (
            [True] if first else []
        ), "in later micro-batches the weight is the cached one"
        assert sources[-1].shape == (32, 96)
