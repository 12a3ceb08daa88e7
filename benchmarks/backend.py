"""What a training step costs on the reference backend: each recipe beside the same model without FP8, and plain torch.

    python benchmarks/backend.py [--json] [--layers 4 --hidden 256 --sequence 256 --batch 8] [--seconds 120]

The model is that of examples/byte_lm.py, in float32 and in bfloat16. What is counted is forward, backward and the
optimizer's step, each beside a step of what it is compared with: the median of such pairs with its interval, see
in_turn.py. Cases:
  plain torch     the same layers from torch.nn, and torch's scaled_dot_product_attention.
  without FP8     Transformer Engine's layers on the reference backend, in high precision.
  the recipes     these in FP8 or NVFP4; ``ratio`` is to "without FP8" in the same dtype and process.
The ratio of "without FP8" is to plain torch. Each compute capability has a process of its own, since the reference
backend stands for one GPU at a time. With --profile CASE the operators of one case are listed instead.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from in_turn import Interval, Pairs, add_arguments, in_turn, plainly, to_within
from measuring import arguments, machine, progress, report

from te_precision_callbacks import reference

CAPABILITIES = ("9.0", "10.0")
RECIPES = {
    "9.0": ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"),
    "10.0": ("MXFP8BlockScaling", "NVFP4BlockScaling"),
}
PLAIN, WITHOUT = "plain torch", "without FP8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOT_THERE = {("NVFP4BlockScaling", "float32")}
"""Its random Hadamard transform takes bfloat16 alone."""
COLUMNS = ("case", "dtype", "capability", "step_ms", "ratio", "processor_ratio", "to")


class PlainLayer(torch.nn.Module):
    """What te.TransformerLayer computes, from torch.nn: attention and an MLP, each after a norm, beside a residual."""

    def __init__(self, hidden: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden, dtype=dtype) for _ in range(2))
        sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        self.linears = torch.nn.ModuleList(torch.nn.Linear(*size, dtype=dtype) for size in sizes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        qkv, proj, fc1, fc2 = self.linears
        batch, sequence, hidden = inputs.shape
        heads = qkv(self.norms[0](inputs)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = torch.dropout(proj(attended.transpose(1, 2).reshape(batch, sequence, hidden)), 0.1, self.training)
        between = inputs + attended
        activated = torch.nn.functional.gelu(fc1(self.norms[1](between)), approximate="tanh")
        return between + torch.dropout(fc2(activated), 0.1, self.training)


class Training:
    """A model, its optimizer, and what its layers run in.

    Args:
        case: ``PLAIN``, ``WITHOUT`` or the name of a recipe's class.
        dtype: of parameters and activations.
        options: the sizes.
    """

    def __init__(self, case: str, dtype: torch.dtype, options: Any) -> None:
        torch.manual_seed(0)
        hidden, heads = options.hidden, 4
        if case == PLAIN:
            layers = [PlainLayer(hidden, heads, dtype) for _ in range(options.layers)]
        else:
            import transformer_engine.pytorch as te

            layers = [
                te.TransformerLayer(
                    hidden,
                    4 * hidden,
                    heads,
                    self_attn_mask_type="causal",
                    attn_input_format="bshd",
                    attention_dropout=0.0,
                    params_dtype=dtype,
                    device="cpu",
                )
                for _ in range(options.layers)
            ]
        self.model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._inputs = torch.randn(options.batch, options.sequence, hidden, dtype=dtype)
        self._recipe = _recipe(case)

    def step(self) -> None:
        """One training step."""
        with self._autocast():
            self.model(self._inputs).float().square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._recipe is None:
            return contextlib.nullcontext()
        import transformer_engine.pytorch as te

        scope: AbstractContextManager[object] = te.autocast(enabled=True, recipe=self._recipe)
        return scope


def _recipe(case: str) -> Any:
    if case in (PLAIN, WITHOUT):
        return None
    from transformer_engine.common import recipe

    return getattr(recipe, case)()


def measure(capability: str, options: Any) -> list[dict[str, Any]]:
    """The cases of one compute capability, in this process."""
    major, minor = map(int, capability.split("."))
    reference.install(capability=(major, minor))
    trainings = {
        (case, dtype): Training(case, DTYPES[dtype], options)
        for dtype in DTYPES
        for case in (PLAIN, WITHOUT, *RECIPES[capability])
        if (case, dtype) not in NOT_THERE
    }
    if options.profile:
        profile(trainings[options.profile, options.dtype])
        return []
    rows = []
    for dtype in DTYPES:
        ways = {case: plainly(training.step) for (case, of), training in trainings.items() if of == dtype}
        for base in (PLAIN, WITHOUT):
            beside = {case: way for case, way in ways.items() if _beside(case) == base}
            timed = in_turn(
                beside,
                ways[base],
                torch.device("cpu"),
                enough=to_within(0.02),
                seconds=options.seconds,
                least=options.least,
            )
            rows += [_row(case, dtype, capability, pairs, base) for case, pairs in timed.items()]
    return rows


def _beside(case: str) -> str:
    """The case to whose step a step of a case is compared."""
    return "" if case == PLAIN else PLAIN if case == WITHOUT else WITHOUT


def _row(case: str, dtype: str, capability: str, pairs: Pairs, base: str) -> dict[str, Any]:
    return {
        "name": f"{case} {dtype}",
        "case": case,
        "dtype": dtype,
        "capability": capability,
        "step_ms": pairs.way(),
        "ratio": pairs.ratio(),
        "processor_ratio": pairs.ratio("processor"),
        "to": base,
        "to_ms": pairs.base(),
        "pairs": len(pairs.ways),
        "machine": machine(torch.device("cpu")),
    }


def profile(training: Training, steps: int = 4) -> None:
    """Print the operators of a step, the longest first."""
    training.step()
    with torch.profiler.profile() as profiler:
        for _ in range(steps):
            training.step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


def _in_child(capability: str, given: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, *given, "--json", "--capability", capability]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"The recipes of compute capability {capability} could not be measured: see above.")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return [{k: Interval(**v) if isinstance(v, dict) else v for k, v in row.items()} for row in found]


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    add_arguments(parser, 120, "for a dtype and a base")
    parser.add_argument("--capability", choices=CAPABILITIES, help="only this compute capability, in this process")
    parser.add_argument("--profile", metavar="CASE", help="list the operators of a case; with --capability")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of that case")
    options = parser.parse_args(given)
    if options.profile and options.capability is None:
        parser.error("--profile needs --capability")
    if options.capability is not None:
        rows = measure(options.capability, options)
        if not options.profile:
            report(rows, COLUMNS, "", as_json=options.json)
        return
    rows = []
    for capability in CAPABILITIES:
        progress(f"Recipes of compute capability {capability}")
        rows += _in_child(capability, sys.argv[1:] if given is None else given)
    if not options.json:
        print(machine(torch.device("cpu")), end="\n\n")
    report(rows, COLUMNS, "", as_json=options.json)


if __name__ == "__main__":
    main()
