"""Plant drifts that leave the model's function unchanged, and check that te-precision compare names them.

    python benchmarks/planted.py [--draws 20]

A training is one of a small network of ``te.Linear`` in FP8, with ReLU between them: both keep powers of two, so that a
planted drift does not change the loss. Behind a planted drift training goes on as it would have: where a parameter is
scaled by s, its learning rate is by s^2. Each drawn drift is planted in a training with its own seed, and that is
compared with a healthy one. A second healthy one, with another seed, is the noise floor. A drift is found if its layer
and tensor come first, made there, and every other layer is called inherited or not named.

The exit code is 1 if fewer than 19 of 20 are found, or if a healthy training has a finding.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch

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
        kind = KINDS[seed % len(KINDS)]
        return cls(kind, random.Random(seed).randrange(LAYERS - 1 if kind == "weights" else LAYERS))

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.linear"

    @property
    def tensors(self) -> tuple[str, ...]:
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

    @torch.no_grad()
    def learn(self) -> None:
        """Do a step of gradient descent, equal to the step without the drift."""
        if self.linear.weight.grad is not None:
            self.linear.weight.sub_(RATE * self.rates * self.linear.weight.grad / self.factor)
        self.linear.weight.grad = None


class Network(torch.nn.Module):
    """Blocks with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block() for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.blocks)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks[:-1]:
            x = torch.relu(block(x))
        return self.blocks[-1](x)


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
            block.linear.weight.mul_(2.0**12)
            after.linear.weight.mul_(2.0**-12)
            block.rates, after.rates = block.rates * 2.0**24, after.rates * 2.0**-24
    elif drift.kind == "channel":
        if since == 0:  # what ReLU leaves at 0 for the whole batch does not grow
            block.channel = random.Random(seed).choice(block.alive.nonzero().flatten().tolist())
        if since < 6:
            block.gain[block.channel] *= 2
            block.linear.weight[:, block.channel] /= 2
            block.rates[block.channel] /= 4
    else:
        block.factor = 2.0**10


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
    with InspectSession(CONFIG, model=network, log_dir=folder, strict=True) as session:
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
    FP8GlobalStateManager.reset()
    return open_run(folder)


def is_named(drift: Drift, comparison: Comparison) -> bool:
    """Return whether a comparison names the drift first, made there, and blames no other layer."""
    first = comparison.first
    own = {drift.name, f"layers.{drift.layer + 1}.linear"} if drift.kind == "weights" else {drift.name}
    blamed = {parting.layer for parting in comparison.parted if parting.origin == "made here" and parting.layer}
    if first is None or blamed - own:
        return False
    return first.layer == drift.name and first.tensor in drift.tensors and first.origin == "made here"


def main() -> int:
    """Return 1 if too few drifts are found, or any where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="planted drifts, and healthy trainings (default: 20)")
    draws = parser.parse_args().draws
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        healthy, noise = train(0, folder / "healthy"), train(1, folder / "noise")
        named = 0
        for seed in range(2, 2 + draws):
            drift = Drift.drawn(seed)
            comparison = compare(healthy, train(seed, folder / f"drift-{seed}", drift), noise=[noise])
            named += is_named(drift, comparison)
            print(f"seed {seed}: {drift.kind} in {drift.name}; first: {_first(comparison)}", flush=True)
        others = [train(seed, folder / f"healthy-{seed}") for seed in range(1000, 1000 + draws)]
        firsts = [_first(compare(healthy, other, noise=[noise])) for other in others]
        pairs = list(combinations([healthy, noise, *others], 2))
        without_floor = sum(bool(compare(a, b).parted) for a, b in pairs)
    wrong = [first for first in firsts if first != "nothing"]
    print(f"{named} of {draws} drifts are named; healthy trainings with a finding: {'; '.join(wrong) or 'none'}")
    print(f"pairs of healthy trainings with a finding without a noise floor: {without_floor} of {len(pairs)}")
    return 0 if 20 * named >= 19 * draws and not wrong else 1


def _first(comparison: Comparison) -> str:
    first = comparison.first
    return "nothing" if first is None else f"step {first.iteration}: {first.name}, {first.origin}"


if __name__ == "__main__":
    sys.exit(main())
