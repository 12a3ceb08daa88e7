"""CUDA graphs: a step that is captured while a session and overflow detection are attached trains as without them.

Nothing of this project may end a capture with an error, nor be recorded into the graph. A capture that fails without a
session too, as on the reference backend, is left out.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_parts.rows import CannotRunHereError, Rows, Settings, in_one_line, run_part
from te_precision_callbacks.session import InspectSession

WIDTH, TOKENS, HEADS, REPLAYS = 256, 128, 4, 3
_LAYERS = {"layer_name_regex_pattern": ".*"}
_FEATURES = {
    "LogTensorStats": {"enabled": True, "tensors": ["activation", "weight", "gradient"], "stats": ["max", "std"]}
}
CONFIG: dict[str, Any] = {"of_all": {"enabled": True, "layers": _LAYERS, "transformer_engine": _FEATURES}}

Make = Callable[[], torch.nn.Module]


class Packed(torch.nn.Module):
    """Attention of packed sequences with lengths on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, device=device, dtype=torch.bfloat16)
        self.register_buffer("bounds", torch.tensor([0, TOKENS // 4, TOKENS], dtype=torch.int32, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.reshape(1, TOKENS, HEADS, -1) for one in self.qkv(inputs).chunk(3, -1))
        found: torch.Tensor = torch.ops.aten._efficient_attention_forward(
            query, key, value, None, self.bounds, self.bounds, TOKENS, TOKENS, 0.0, 0, True
        )[0]
        return found.reshape(inputs.shape)


def models(settings: Settings) -> dict[str, Make]:
    """Return the models to capture."""
    te = settings.transformer_engine()
    sizes: dict[str, Any] = {"device": settings.device, "dtype": torch.bfloat16}
    te_sizes: dict[str, Any] = {"device": settings.device, "params_dtype": torch.bfloat16}
    return {
        "torch": lambda: torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH, **sizes), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH, **sizes)
        ),
        "packed sequences": lambda: Packed(settings.device),
        "Transformer Engine": lambda: torch.nn.Sequential(
            te.Linear(WIDTH, WIDTH, **te_sizes), te.LayerNormLinear(WIDTH, WIDTH, **te_sizes)
        ),
    }


class _Step:
    """A step with tensors that stay where they are, as a graph needs it."""

    def __init__(self, settings: Settings, model: torch.nn.Module) -> None:
        self.inputs = torch.randn(TOKENS, WIDTH, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        self._model(self.inputs).float().square().mean().backward()
        self._optimizer.step()


@contextlib.contextmanager
def _watched(model: torch.nn.Module, *, watched: bool) -> Iterator[Callable[[], object]]:
    """A session with everything on; gives what ends a step."""
    if not watched:
        yield lambda: None
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        InspectSession(
            CONFIG, model=model, log_dir=folder, debug="activation_overflow", allow_unmatched=True
        ) as session,
    ):
        yield session.step


def _trained(settings: Settings, make: Make, *, watched: bool, warm: bool) -> list[torch.Tensor]:
    """The weights after a capture and some replays.

    Args:
        settings: where.
        make: makes the model.
        watched: whether a session is attached.
        warm: whether the warm-up before the capture, too, runs in the session.
    """
    torch.manual_seed(0)
    model = make()
    step = _Step(settings, model)
    side = torch.cuda.Stream(settings.device)  # type: ignore[no-untyped-call]

    def warm_up(end: Callable[[], object]) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
                end()
        torch.cuda.current_stream().wait_stream(side)

    if not warm:
        warm_up(lambda: None)
    with _watched(model, watched=watched) as end:
        if warm:
            warm_up(end)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(REPLAYS):
            graph.replay()
            end()
    torch.cuda.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check(settings: Settings, rows: Rows) -> None:
    if not settings.on_gpu:
        raise CannotRunHereError("needs a GPU")
    logging.getLogger("te_precision_callbacks").setLevel(logging.CRITICAL)
    for name, make in models(settings).items():
        for warm in (True, False):
            when = "after steps in the session" if warm else "in the first step"
            with rows.of(f"{name}, captured {when}"):
                try:
                    alone = _trained(settings, make, watched=False, warm=warm)
                except Exception as error:
                    why = f"it cannot be captured without a session: {in_one_line(error)}"
                    raise CannotRunHereError(why) from error
                found = _trained(settings, make, watched=True, warm=warm)
                same = all(torch.equal(one, other) for one, other in zip(alone, found, strict=True))
                rows.equal(f"{name}, captured {when}: the weights", "same" if same else "other", "same")


if __name__ == "__main__":
    run_part("capture", check)
