"""Distance of each recipe's loss from BF16 for a TransformerLayer, and the distance that its format explains.

    python benchmarks/recipes.py [--steps 50] [--draws 3] [--json]

A language model of one TransformerLayer learns bytes, from the same start and on the same data, in BF16 and in each
recipe. Beside each recipe it learns in BF16 with every GEMM's operands rounded to the recipe's format in a few lines of
plain torch: to nearest, with a scale for each of the recipe's blocks, lowered by a random factor, up to 2 where the
recipe has powers of two and a little elsewhere, so that several draws round to several grids. It does not use
Transformer Engine's quantizers, of Hadamard transforms, of stochastic rounding. A recipe that is much further away has
something wrong in it.

The distance is the mean over the steps of the absolute difference to the loss in BF16. Two passes without a step come
first, for the scales of delayed scaling. Each compute capability has its own process, since the reference
backend stands for one GPU at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from te_precision_callbacks import reference
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, FloatFormat
from te_precision_callbacks.session import InspectSession

HIDDEN, HEADS, WINDOW, BATCH = 128, 4, 64, 4
WARMUP = 2
TOLERATED = 3.0
"""How many times the largest distance of the draws a recipe may be away: a few draws do not know the largest one."""


@dataclass(frozen=True)
class Recipe:
    """A recipe of Transformer Engine, and its formats.

    Attributes:
        name: the class in ``transformer_engine.common.recipe``; what comes after a space is only for readers.
        capability: of the GPU that it is tried on.
        number_format: what activations and weights are rounded to.
        gradient_format: what gradients are rounded to.
        block: elements along the summed dimension that share a scale; None for the whole tensor.
        delayed: whether the scale comes from the tensor's largest magnitude in earlier passes.
        power_of_two: whether scales are powers of two, which leaves up to half of the format's range unused.
    """

    name: str
    capability: str
    number_format: FloatFormat
    gradient_format: FloatFormat
    block: int | None = None
    delayed: bool = False
    power_of_two: bool = False

    def make(self) -> Any:
        """The recipe, with its defaults."""
        from transformer_engine.common import recipe

        options: dict[str, Any] = {}
        if self.name.startswith("Float8Block"):
            for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                options[name] = recipe.QParams(power_2_scale=self.power_of_two, amax_epsilon=0.0)
        return getattr(recipe, self.name.split()[0])(**options)


RECIPES = (
    Recipe("DelayedScaling", "9.0", E4M3, E5M2, delayed=True),
    Recipe("Float8CurrentScaling", "9.0", E4M3, E5M2),
    Recipe("Float8BlockScaling", "9.0", E4M3, E4M3, 128, power_of_two=True),
    Recipe("Float8BlockScaling (float32 scales)", "9.0", E4M3, E4M3, 128),
    Recipe("MXFP8BlockScaling", "10.0", E4M3, E4M3, 32, power_of_two=True),
    Recipe("NVFP4BlockScaling", "10.0", E2M1, E2M1, 16),
)


@dataclass(frozen=True)
class Trained:
    """Result of a recipe.

    Attributes:
        recipe: its name.
        capability: of the GPU that it was tried on.
        last_loss: in the last step.
        last_loss_bf16: of BF16.
        distance: mean absolute difference to the losses in BF16.
        explained: the same of BF16 with operands rounded in plain torch, one for each draw of the grids.
    """

    recipe: str
    capability: str
    last_loss: float
    last_loss_bf16: float
    distance: float
    explained: Sequence[float]

    @property
    def holds(self) -> bool:
        """Return whether the format explains the distance."""
        return self.distance <= TOLERATED * max(self.explained)


class RoundedOperands:
    """A debug feature: operands of GEMMs rounded to a format, in plain torch."""

    def __init__(self) -> None:
        self._earlier: dict[tuple[str, str], torch.Tensor] = {}

    def modify_tensor_enabled(
        self, config: Any, layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int]:
        """In every iteration."""
        return True, iteration + 1

    def modify_tensor(
        self, config: Any, layer_name: str, gemm: str, tensor_name: str, tensor: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        """The rounded operand. A GEMM sums over its last dimension if it is the first of the two that read it."""
        recipe = RECIPES[config["recipe"]]
        number_format = recipe.gradient_format if tensor_name == "gradient" else recipe.number_format
        draws = torch.Generator().manual_seed(zlib.crc32(f"{config['seed']} {layer_name} {tensor_name}".encode()))
        room = torch.exp2(torch.rand(1, generator=draws) * (1.0 if recipe.power_of_two else 0.125)).to(tensor.device)
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        along = gemm == {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}[tensor_name]
        summed = matrix if along else matrix.t()
        blocks = summed.reshape(1, -1) if recipe.block is None else _blocks(summed, recipe.block)
        amax = blocks.abs().amax(1, keepdim=True)
        if recipe.delayed:
            largest = self._earlier.get((layer_name, tensor_name), amax)
            self._earlier[layer_name, tensor_name] = torch.maximum(largest, amax)
            amax = largest
        rounded = _rounded(blocks, amax * room, number_format).reshape(summed.shape)
        return (rounded if along else rounded.t()).reshape(tensor.shape).to(others.get("dtype") or tensor.dtype)


def _blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    return matrix.reshape(-1, min(size, matrix.shape[1]))


def _rounded(blocks: torch.Tensor, largest: torch.Tensor, number_format: FloatFormat) -> torch.Tensor:
    """Round to a format, scaled so that its largest number represents ``largest``."""
    unit = largest.clamp(min=torch.finfo(torch.float32).tiny) / number_format.max
    scaled = (blocks / unit).clamp(-number_format.max, number_format.max)
    binade = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=number_format.min_normal))))
    step = binade * 2.0**-number_format.mantissa_bits
    return torch.round(scaled / step) * step * unit


def losses(steps: int, recipe: Recipe | None = None, rounding_seed: int | None = None) -> list[float]:
    """The loss in each step: in BF16, in a recipe, or in BF16 with operands rounded in plain torch."""
    import transformer_engine.pytorch as te

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        HIDDEN,
        4 * HIDDEN,
        HEADS,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=device,
    )
    embedding, head = torch.nn.Embedding(256, HIDDEN, device=device), torch.nn.Linear(HIDDEN, 256, device=device)
    model = torch.nn.ModuleDict({"embedding": embedding, "layer": layer, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    drawn = torch.Generator().manual_seed(0)
    made = recipe.make() if recipe is not None and rounding_seed is None else None
    found = []
    with contextlib.ExitStack() as stack:
        session = None
        if recipe is not None and rounding_seed is not None:
            log_dir = stack.enter_context(tempfile.TemporaryDirectory())
            config = _rounding_config(recipe, rounding_seed)
            session = stack.enter_context(
                InspectSession(config, model=model, log_dir=log_dir, features=[RoundedOperands])
            )
        for step in range(-WARMUP, steps):
            starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=drawn).tolist()
            tokens = torch.stack([text[start : start + WINDOW + 1] for start in starts]).to(device)
            with torch.autocast(device.type, torch.bfloat16), te.autocast(enabled=made is not None, recipe=made):
                logits = head(layer(embedding(tokens[:, :-1])))
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if step >= 0:
                optimizer.step()
                found.append(loss.item())
            if session is not None:
                session.step()
    return found


def _rounding_config(recipe: Recipe, seed: int) -> dict[str, Any]:
    options = {
        "enabled": True,
        "tensors": ["activation", "weight", "gradient"],
        "gemms": ["fprop", "dgrad", "wgrad"],
        "recipe": RECIPES.index(recipe),
        "seed": seed,
    }
    return {
        "rounded_operands": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": ".*"},
            "transformer_engine": {"RoundedOperands": options},
        }
    }


def compare(recipe: Recipe, steps: int, in_bf16: Sequence[float], draws: int) -> Trained:
    """Compare a recipe, and BF16 with operands rounded to its format, with BF16."""

    def distance(found: Sequence[float]) -> float:
        return sum(abs(one - other) for one, other in zip(found, in_bf16, strict=True)) / steps

    quantized = losses(steps, recipe)
    rounded = [distance(losses(steps, recipe, seed)) for seed in range(1, draws + 1)]
    return Trained(recipe.name, recipe.capability, quantized[-1], in_bf16[-1], distance(quantized), rounded)


def measure(capability: str, steps: int, draws: int) -> list[Trained]:
    """The recipes of one capability, which the reference backend stands for where there is no such GPU."""
    major, minor = map(int, capability.split("."))
    reference.install(capability=(major, minor))
    in_bf16 = losses(steps)
    return [compare(recipe, steps, in_bf16, draws) for recipe in RECIPES if recipe.capability == capability]


def _measure_in_child(capability: str, steps: int, draws: int) -> list[Trained]:
    arguments = ["--capability", capability, "--steps", str(steps), "--draws", str(draws), "--json"]
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(f"The recipes of capability {capability} could not be measured: see above.")
    return [Trained(**row) for row in json.loads(done.stdout)]


def as_table(found: Sequence[Trained], steps: int) -> Table:
    """One row a recipe."""
    table = Table(title=f"{steps} steps of a TransformerLayer, beside BF16")
    for heading in ("recipe", "GPU", "last loss", "in BF16", "distance", "of its format", ""):
        table.add_column(heading, justify="left" if heading in ("recipe", "") else "right")
    for row in found:
        explained = f"{min(row.explained):.4f} to {max(row.explained):.4f}"
        verdict = "explained" if row.holds else "MORE THAN THE FORMAT EXPLAINS"
        numbers = (f"{row.last_loss:.3f}", f"{row.last_loss_bf16:.3f}", f"{row.distance:.4f}")
        table.add_row(row.recipe, row.capability, *numbers, explained, verdict)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 if a recipe is further away than its format explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: 50)")
    parser.add_argument("--draws", type=int, default=3, help="grids that operands are rounded to (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--capability", help="only the recipes of this compute capability, in this process")
    options = parser.parse_args(arguments)
    if options.capability is not None:
        found = measure(options.capability, options.steps, options.draws)
    else:
        capabilities = dict.fromkeys(recipe.capability for recipe in RECIPES)
        found = [
            row for capability in capabilities for row in _measure_in_child(capability, options.steps, options.draws)
        ]
    if options.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in found], indent=1) + "\n")
    else:
        Console(width=120).print(as_table(found, options.steps))
    return 0 if all(row.holds for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
