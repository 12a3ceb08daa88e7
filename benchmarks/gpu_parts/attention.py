"""Attention by every kernel that there is: training goes on unchanged in a session, and its products are counted.

torch's own by each of its backends, packed sequences (``varlen_attn``), FlexAttention, and flash-attn where it is
installed. The first step, in which a session sees every operator, must give the same output to the last bit as without
a session, and gradients that differ by no more than two runs without one. The multiply-adds are those of the sizes.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.rows import CannotRunHereError, Rows, Settings, in_one_line, run_part
from te_precision_callbacks.session import InspectSession

BATCH, LENGTH, HEADS, SIZE = 2, 128, 4, 64
WIDTH = HEADS * SIZE
BOUNDS = (0, 96, 160, BATCH * LENGTH)
"""Of packed sequences."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of query, key and value as [batch, length, heads, size]; the result has the same shape."""


class Attention(torch.nn.Module):
    """Attention of one sequence to itself."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self._compute = compute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = (one.reshape(BATCH, LENGTH, HEADS, SIZE) for one in self.qkv(inputs).chunk(3, -1))
        result: torch.Tensor = self.out(self._compute(*parts).reshape(inputs.shape))
        return result


def _of_torch(backend: SDPBackend) -> Compute:
    def compute(*operands: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.transpose(1, 2) for one in operands)
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    return compute


def _packed(device: torch.device) -> torch.Tensor:
    return torch.tensor(BOUNDS, dtype=torch.int32, device=device)


def _varlen(device: torch.device) -> Compute:
    from torch.nn.attention.varlen import varlen_attn

    def compute(*operands: torch.Tensor) -> torch.Tensor:
        bounds = _packed(device)
        longest = max(end - begin for begin, end in itertools.pairwise(BOUNDS))
        query, key, value = (one.reshape(-1, HEADS, SIZE) for one in operands)
        found: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest)
        result: torch.Tensor = found.reshape(operands[0].shape)
        return result

    return compute


def _flash_attn(device: torch.device, *, packed: bool) -> Compute:
    flash_attn: Any = importlib.import_module("flash_attn")

    def compute(*operands: torch.Tensor) -> torch.Tensor:
        if not packed:
            found: torch.Tensor = flash_attn.flash_attn_func(*operands)
            return found
        bounds = _packed(device)
        flat = (one.reshape(-1, HEADS, SIZE) for one in operands)
        found = flash_attn.flash_attn_varlen_func(*flat, bounds, bounds, LENGTH, LENGTH)
        return found.reshape(operands[0].shape)

    return compute


def _flex(*, compiled: bool) -> Compute:
    from torch.nn.attention.flex_attention import flex_attention

    function: Any = torch.compile(flex_attention) if compiled else flex_attention

    def compute(*operands: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = function(*(one.transpose(1, 2) for one in operands))
        return found.transpose(1, 2)

    return compute


def _needs_gpu(settings: Settings, make: Callable[[], Compute]) -> Compute:
    if not settings.on_gpu:
        raise CannotRunHereError("needs a GPU")
    return make()


def _needs_flash_attn(make: Callable[[], Compute]) -> Compute:
    if importlib.util.find_spec("flash_attn") is None:
        raise CannotRunHereError("flash-attn is not installed")
    return make()


def kernels(settings: Settings) -> dict[str, tuple[Callable[[], Compute], bool | None]]:
    """Name -> what makes it, and whether its sequences are packed; None where operators do not tell the products."""
    device = settings.device
    found: dict[str, tuple[Callable[[], Compute], bool | None]] = {
        "torch, math": (lambda: _of_torch(SDPBackend.MATH), False),
        "torch, flash": (lambda: _of_torch(SDPBackend.FLASH_ATTENTION), False),
        "torch, efficient": (lambda: _needs_gpu(settings, lambda: _of_torch(SDPBackend.EFFICIENT_ATTENTION)), False),
        "torch, cuDNN": (lambda: _needs_gpu(settings, lambda: _of_torch(SDPBackend.CUDNN_ATTENTION)), False),
        "torch, varlen": (lambda: _needs_gpu(settings, lambda: _varlen(device)), True),
        "flash-attn": (lambda: _needs_flash_attn(lambda: _flash_attn(device, packed=False)), False),
        "flash-attn, varlen": (lambda: _needs_flash_attn(lambda: _flash_attn(device, packed=True)), True),
        "flex, eager": (lambda: _flex(compiled=False), None),
        "flex, compiled": (lambda: _needs_gpu(settings, lambda: _flex(compiled=True)), None),
    }
    return found


def expected(*, packed: bool) -> int:
    """The multiply-adds of forward and backward: two products, and two more for each."""
    lengths = [end - begin for begin, end in itertools.pairwise(BOUNDS)] if packed else [LENGTH] * BATCH
    return 6 * HEADS * SIZE * sum(length * length for length in lengths)


def _step(settings: Settings, compute: Compute, *, watched: bool, backward: bool) -> tuple[list[torch.Tensor], int]:
    """The output and the gradients of a first step, and the multiply-adds of attention that a session has counted."""
    torch.manual_seed(0)
    model = Attention(compute).bfloat16().to(settings.device).requires_grad_(backward)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, device=settings.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        InspectSession(model=model, log_dir=folder) if watched else nullcontext() as session,
    ):
        output = model(inputs)
        if backward:
            output.float().square().mean().backward()
        counted = 0
        if session is not None:
            session.step()
            counted = sum(one.macs for one in session.coverage() if one.gemm in ("qk", "pv"))
    return [
        output.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ], counted


def _apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def check(settings: Settings, rows: Rows) -> None:
    settings.transformer_engine()
    for name, (make, packed) in kernels(settings).items():
        with rows.of(name):
            compute = make()
            backward = settings.on_gpu or packed is not None  # torch has no backward of FlexAttention on a CPU
            try:
                alone, _ = _step(settings, compute, watched=False, backward=backward)
            except Exception as error:  # of torch's, for this GPU or these sizes
                raise CannotRunHereError(f"it does not run without a session: {in_one_line(error)}") from error
            again, _ = _step(settings, compute, watched=False, backward=backward)
            found, counted = _step(settings, compute, watched=True, backward=backward)
            rows.equal(f"{name}: the output with a session", _apart(found[:1], alone[:1]), _apart(again[:1], alone[:1]))
            # A kernel that adds in no fixed order may give the same twice, and something else the third time.
            noise = 4 * _apart(again, alone)
            if settings.on_gpu:
                noise += 2.0**-6 * max(float(one.abs().max()) for one in alone)
            rows.at_most(f"{name}: gradients with a session, difference", _apart(found, alone), noise)
            if packed is None:
                rows.measured(f"{name}: multiply-adds that are counted", counted)
            else:
                rows.equal(f"{name}: multiply-adds", counted, expected(packed=packed))


if __name__ == "__main__":
    run_part("attention", check)
