"""Distance of each recipe's loss from BF16 for a TransformerLayer, and the distance that its format explains.

    python benchmarks/recipes.py [--capability 10.0] [--steps 50] [--draws 3] [--json]

A language model of one TransformerLayer learns bytes, from the same start and on the same data, in BF16 and in each
recipe. Beside each recipe it learns in BF16 with every GEMM's operands rounded to the recipe's format in a few lines of
plain torch: to nearest, with a scale for each of the recipe's blocks, lowered by a random factor, up to 2 where the
recipe has powers of two and a little elsewhere, so that several draws round to several grids. It does not use
Transformer Engine's quantizers, of Hadamard transforms, of stochastic rounding. A recipe that is much further away has
something wrong in it.

The distance is the mean over the steps of the absolute difference to the loss in BF16. Two passes without a step come
first, for the scales of delayed scaling. The reference backend stands for a GPU of the given compute capability.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Case, arguments, report

from te_precision_callbacks import reference
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, FloatFormat
from te_precision_callbacks.session import InspectSession

HIDDEN, HEADS, WINDOW, BATCH = 128, 4, 64, 4
WARMUP = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS = {
    "recipe": "recipe",
    "last loss": "last_loss",
    "in BF16": "last_loss_bf16",
    "distance": "distance",
    "explained, from": "least_explained",
    "to": "most_explained",
    "is explained": "is_explained",
}
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

    torch.manual_seed(0)
    layer = te.TransformerLayer(
        HIDDEN,
        4 * HIDDEN,
        HEADS,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=DEVICE,
    )
    embedding, head = torch.nn.Embedding(256, HIDDEN, device=DEVICE), torch.nn.Linear(HIDDEN, 256, device=DEVICE)
    model = torch.nn.ModuleDict({"embedding": embedding, "layer": layer, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    drawn = torch.Generator().manual_seed(0)
    made = recipe.make() if recipe is not None and rounding_seed is None else None
    results = []
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
            tokens = torch.stack([text[start : start + WINDOW + 1] for start in starts]).to(DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16), te.autocast(enabled=made is not None, recipe=made):
                logits = head(layer(embedding(tokens[:, :-1])))
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if step >= 0:
                optimizer.step()
                results.append(loss.item())
            if session is not None:
                session.step()
    return results


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


def measure(recipe: Recipe, steps: int, in_bf16: Sequence[float], draws: int) -> Case:
    """Compare a recipe, and BF16 with operands rounded to its format, with BF16."""

    def distance(results: Sequence[float]) -> float:
        return sum(abs(loss - other) for loss, other in zip(results, in_bf16, strict=True)) / steps

    quantized = losses(steps, recipe)
    rounded = [distance(losses(steps, recipe, seed)) for seed in range(1, draws + 1)]
    return {
        "recipe": recipe.name,
        "last_loss": quantized[-1],
        "last_loss_bf16": in_bf16[-1],
        "distance": distance(quantized),
        "least_explained": min(rounded),
        "most_explained": max(rounded),
        "is_explained": distance(quantized) <= TOLERATED * max(rounded),
    }


def main() -> int:
    """Return 1 if a recipe is further away than its format explains."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: 50)")
    parser.add_argument("--draws", type=int, default=3, help="grids that operands are rounded to (default: 3)")
    parser.add_argument("--capability", choices=("9.0", "10.0"), default="9.0", help="of the GPU (default: 9.0)")
    options = parser.parse_args()
    major, minor = map(int, options.capability.split("."))
    reference.install(capability=(major, minor))
    in_bf16 = losses(options.steps)
    recipes = [recipe for recipe in RECIPES if recipe.capability == options.capability]
    cases = [measure(recipe, options.steps, in_bf16, options.draws) for recipe in recipes]
    report(cases, COLUMNS, DEVICE, as_json=options.json)
    return 0 if all(case["is_explained"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
