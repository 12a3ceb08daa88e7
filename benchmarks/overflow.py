"""Cost of activation overflow detection in a training step, compared with transformers' DebugUnderflowOverflow.

    python benchmarks/overflow.py [--json] [--layers 4 --hidden 256 --sequence 512 --batch 4] [--seconds 240]

A Llama of transformers, built from a config, trains with AdamW on random tokens, in float32 and in bfloat16. A step is
forward, backward and optimizer step. Columns:
  none       the step without detection.
  ours       with DebugActivationOverflow, which watches gradients too.
  upstream   with transformers.debug_utils.DebugUnderflowOverflow, which watches forwards, and the parameters.
  *_added_percent  added to a paired step of none: the median of the pairs with its interval, see in_turn.py.
             One process, one model. *_processor_percent is the same by processor time.
  claim      whether the default adds at most 3 % of wall time.
  *_host_waits     how often a step waits for the device: reads of one element (``_local_scalar_dense``, which is what
             ``.item()`` and ``bool()`` do) and checks of this project, one copy each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from gpu_parts.waits import HostWaits
from in_turn import Way, add_arguments, in_turn, plainly
from measuring import arguments, as_in_a_long_run, llama, machine, progress, report
from transformers.debug_utils import DebugUnderflowOverflow

from te_precision_callbacks.overflow import DebugActivationOverflow, extreme_slots

COLUMNS = (
    "case",
    "none_ms",
    "ours_added_percent",
    "ours_processor_percent",
    "claim",
    "upstream_added_percent",
    "ours_host_waits",
    "upstream_host_waits",
)


VOCABULARY = 8192


class Training:
    """A Llama and its optimizer.

    Args:
        layers, hidden, sequence, batch: the sizes.
        dtype: of the parameters.
        device: where it trains.
    """

    def __init__(
        self, layers: int, hidden: int, sequence: int, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = llama(layers, hidden, sequence, VOCABULARY).to(device, dtype)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(0, VOCABULARY, (batch, sequence), device=device)

    def step(self) -> None:
        """Forward, backward and optimizer step."""
        loss = self.model(input_ids=self._tokens, labels=self._tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


@contextlib.contextmanager
def with_upstream(model: torch.nn.Module) -> Iterator[None]:
    """Attach transformers' detector, and remove its hooks, which it cannot do itself."""
    before = {module: dict(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


Detection = Callable[[torch.nn.Module], AbstractContextManager[object]]

CLAIM = 3.0
"""What ours adds at most, in percent."""

WAYS: dict[str, Detection] = {
    "ours": DebugActivationOverflow,
    "upstream": with_upstream,
}


@contextlib.contextmanager
def detected(training: Training, way: Detection) -> Iterator[Callable[[], None]]:
    """A step that is looked at; what detection prints goes to memory."""
    with way(training.model), contextlib.redirect_stdout(io.StringIO()):
        yield training.step


def host_waits(training: Training, way: Detection) -> int:
    """Count the waits for the device in a step."""
    copies = mock.Mock(side_effect=extreme_slots.to_host)
    with detected(training, way) as step:
        step()
        with mock.patch.object(extreme_slots, "to_host", copies), HostWaits(training.device) as waits:
            step()
    return waits.total + copies.call_count


def measure(training: Training, seconds: float, least: int, name: str) -> dict[str, Any]:
    """One case."""
    progress(name)
    ways: dict[str, Way] = {way: functools.partial(detected, training, start) for way, start in WAYS.items()}
    timed = in_turn(ways, plainly(training.step), training.device, share=0.02, seconds=seconds, least=least)
    without = host_waits(training, lambda model: contextlib.nullcontext())
    case: dict[str, Any] = {"case": name, "none_ms": timed["ours"].base(), "pairs": len(timed["ours"].ways)}
    for way, pairs in timed.items():
        case[f"{way}_added_percent"] = pairs.ratio().scaled(100, -1)
        case[f"{way}_processor_percent"] = pairs.ratio("processor").scaled(100, -1)
        case[f"{way}_host_waits"] = host_waits(training, WAYS[way]) - without
    return case | {"claim": case["ours_added_percent"].beside(CLAIM, " %")}


def _options(given: list[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="Transformer layers (default: 4)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64 (default: 256)")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a batch (default: 4)")
    add_arguments(parser, 240, "that a case may take")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = _options(given)
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = machine(device)
    progress(described) if options.json else print(described, end="\n\n")
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "sequence", "batch")}
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        training = Training(**sizes, dtype=dtype, device=device)
        name = str(dtype).removeprefix("torch.")
        with as_in_a_long_run():
            measured = measure(training, options.seconds, options.least, name)
        cases.append({**measured, **sizes, "machine": described})
    notes = "Medians of pairs of steps with their 95 % intervals. Host waits: those that detection adds to a step."
    report(cases, COLUMNS, notes, as_json=options.json)


if __name__ == "__main__":
    main()
