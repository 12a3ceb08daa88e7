"""Plant drifts that leave the model's function unchanged, and check that te-precision compare names them.

    python benchmarks/planted.py [--draws 20] [--json]

A training is one of a small network of ``te.Linear`` in FP8, with ReLU between them: both keep powers of two, so that a
planted drift does not change the loss. Behind a planted drift training goes on as it would have: where a parameter is
scaled by s, its learning rate is by s^2. Each drawn drift is planted in a training with its own seed, and that is
compared with a healthy one. A second healthy one, with another seed, is the noise floor. A drift is found if its layer
and tensor come first, made there, and every other layer is called inherited or not named.

The exit code is 1 if fewer than 19 of 20 are found, or if a healthy training has a finding.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from te_precision_callbacks import reference

if __name__ == "__main__":
    reference.install_where_needed()

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.views.compare import Comparison, compare

Kind = Literal["weights", "channel", "gradient"]
KINDS: tuple[Kind, ...] = ("weights", "channel", "gradient")

HIDDEN, ROWS, LAYERS, RATE = 64, 64, 8, 0.05
STEPS, FIRST = 60, 30
"""The steps of a training, and that from which on a drift is there."""

CONFIG = {
    "all": {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["cur_amax", "std", "l2_norm", "dynamic_range", "mean"],
                "freq": 1,
            },
            "LogFp8TensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["underflows%", "mse", "scale_inv_max"],
                "freq": 1,
            },
        },
    }
}


@dataclass(frozen=True)
class Drift:
    """A planted drift.

    Attributes:
        kind: a pair of adjacent weights scaled by 2^12 and 2^-12; a channel of an activation that grows to 2^6 times
            its size, which the next weight takes back; a gradient scaled by 2^10 in a layer, and unscaled behind it.
        layer: the first layer that shows it.
    """

    kind: Kind
    layer: int

    @classmethod
    def drawn(cls, seed: int) -> Drift:
        """Any kind, in any place."""
        draw = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        return cls(kind, draw.randrange(LAYERS - 1 if kind == "weights" else LAYERS))

    @property
    def name(self) -> str:
        """The layer's name."""
        return f"layers.{self.layer}.linear"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors of the drift's first layer."""
        return {"weights": ("weight",), "channel": ("activation", "weight"), "gradient": ("gradient",)}[self.kind]


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a view with a scaled gradient."""
    same = x.view_as(x)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return same


class Block(torch.nn.Module):
    """A gain per channel, and a linear layer with a scaled gradient."""

    gain: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(HIDDEN))
        self.linear = te.Linear(HIDDEN, HIDDEN, bias=False)
        self.rates = torch.ones(HIDDEN)
        self.factor = 1.0
        self.alive = torch.ones(HIDDEN, dtype=torch.bool)
        self.channel = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.alive = (x != 0).any(0)
        return _scaled(self.linear(_scaled(x * self.gain, 1 / self.factor)), self.factor)

    @property
    def weight(self) -> torch.Tensor:
        """The linear layer's."""
        weight: torch.Tensor = self.linear.weight
        return weight

    @torch.no_grad()
    def learn(self) -> None:
        """Do a step of gradient descent, equal to the step without the drift."""
        if self.weight.grad is not None:
            self.weight.sub_(RATE * self.rates * self.weight.grad / self.factor)
        self.weight.grad = None


class Network(torch.nn.Module):
    """Blocks with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block() for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = torch.relu(block(x))
        out: torch.Tensor = self.blocks[-1](x)
        return out


@torch.no_grad()
def _plant(network: Network, drift: Drift, since: int, seed: int) -> None:
    """Bring the drift into the network.

    Args:
        since: the number of steps since it began.
        seed: chooses the channel.
    """
    block = network.blocks[drift.layer]
    if drift.kind == "weights":
        if since == 0:
            after = network.blocks[drift.layer + 1]
            block.weight.mul_(2.0**12)
            after.weight.mul_(2.0**-12)
            block.rates, after.rates = block.rates * 2.0**24, after.rates * 2.0**-24
    elif drift.kind == "channel":
        if since == 0:  # what ReLU leaves at 0 for the whole batch does not grow
            block.channel = random.Random(seed).choice(block.alive.nonzero().flatten().tolist())
        if since < 6:
            block.gain[block.channel] *= 2
            block.weight[:, block.channel] /= 2
            block.rates[block.channel] /= 4
    else:
        block.factor = 2.0**10


@contextmanager
def _reset() -> Iterator[None]:
    try:
        yield
    finally:
        FP8GlobalStateManager.reset()


def train(seed: int, folder: Path, drift: Drift | None = None, *, rows: int = ROWS) -> RecordedRun:
    """Train under a recording session.

    Args:
        seed: of the data, and of the network's weights.
        folder: the log folder.
        drift: the drift to plant.
        rows: of a batch.
    """
    torch.manual_seed(seed)
    network = Network()
    data = torch.Generator().manual_seed(seed)
    target = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5
    with _reset(), InspectSession(CONFIG, model=network, log_dir=folder, strict=True) as session:
        for step in range(STEPS):
            if drift is not None and step >= FIRST:
                _plant(network, drift, step - FIRST, seed)
            x = torch.randn(rows, HIDDEN, generator=data)
            with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                loss = (network(x) - torch.relu(x @ target)).square().mean()
            loss.backward()
            for block in network.blocks:
                block.learn()
            session.log({"loss": loss})
            session.step()
    return open_run(folder)


@dataclass(frozen=True)
class Outcome:
    """Result of the comparison for a planted drift.

    Attributes:
        seed: of the training.
        kind, layer, tensors: the drift, and the place where it begins.
        first: what comes first, with its step and origin.
        inherited: the tensors that are called inherited.
        found: whether it is first, made there, and no other layer is blamed.
    """

    seed: int
    kind: str
    layer: str
    tensors: tuple[str, ...]
    first: str
    inherited: tuple[str, ...]
    found: bool


def judge(seed: int, drift: Drift, comparison: Comparison) -> Outcome:
    """Judge whether a comparison names the drift."""
    first = comparison.first
    inherited = tuple(parting.name for parting in comparison.parted if parting.origin == "inherited")
    own = {drift.name, f"layers.{drift.layer + 1}.linear"} if drift.kind == "weights" else {drift.name}
    blamed = {parting.layer for parting in comparison.parted if parting.origin == "made here" and parting.layer} - own
    is_first = first is not None and first.layer == drift.name and first.tensor in drift.tensors
    return Outcome(
        seed,
        drift.kind,
        drift.name,
        drift.tensors,
        "nothing" if first is None else f"step {first.iteration}: {first.name}, {first.origin}",
        inherited,
        first is not None and is_first and first.origin == "made here" and not blamed,
    )


def measure(draws: int, folder: Path) -> tuple[list[Outcome], list[str], str]:
    """Return the outcomes of all draws, the findings in healthy trainings, and how many of their pairs differ without a
    noise floor."""
    healthy, noise = train(0, folder / "healthy"), train(1, folder / "noise")
    outcomes = []
    for seed in range(2, 2 + draws):
        drift = Drift.drawn(seed)
        run = train(seed, folder / f"drift-{seed}", drift)
        outcomes.append(judge(seed, drift, compare(healthy, run, noise=[noise])))
        print(f"{seed - 1} of {draws}: {outcomes[-1].first}", file=sys.stderr, flush=True)
    wrong = []
    others = [train(seed, folder / f"healthy-{seed}") for seed in range(1000, 1000 + draws)]
    for seed, run in enumerate(others, 1000):
        first = compare(healthy, run, noise=[noise]).first
        if first is not None:
            wrong.append(f"seed {seed}, step {first.iteration}: {first.name}, {first.strongest.statistic}")
    pairs = list(combinations([healthy, noise, *others], 2))
    found = sum(bool(compare(one, other).parted) for one, other in pairs)
    return outcomes, wrong, f"{found} of {len(pairs)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 if too few drifts are found, or any where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="planted drifts, and healthy trainings (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcomes, wrong, without_floor = measure(options.draws, Path(folder))
    if options.json:
        told = {
            "drifts": [dataclasses.asdict(each) for each in outcomes],
            "findings_in_healthy": wrong,
            "without_floor": without_floor,
        }
        print(json.dumps(told, indent=1))
    else:
        table = Table("seed", "planted", "in", "first", "inherited", "found")
        for each in outcomes:
            told_of = ", ".join(each.inherited)
            table.add_row(str(each.seed), each.kind, each.layer, each.first, told_of, "yes" if each.found else "NO")
        Console(width=160).print(table)
        found = sum(each.found for each in outcomes)
        print(f"{found} of {len(outcomes)} found; findings in healthy trainings: {'; '.join(wrong) or 'none'}")
        print(f"pairs of healthy trainings with a finding without a noise floor: {without_floor}")
    return 0 if 20 * sum(each.found for each in outcomes) >= 19 * len(outcomes) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
