"""Plant faults of one step at random, between collection steps, which the watch of every step must report.

    python benchmarks/proof/every_step.py [--kinds input spike] [--folder FOLDER]

Each draw has a model, a recipe, a random place and a random step, and the default config. An inf or nan is right if the
first finding has the step, and the layer that was the first to read it: hooks of this script note that layer. Another
fault is right if a finding of a right rule, also a note, begins in its step. ``--draws`` draws of each kind; ``--page``
writes the table into benchmarks/proof/README.md.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from checking import has_layer, write_into_page
from models import FLOAT32_NORMS, MODELS, RECIPES, Built, ModelName, RecipeName, build
from running import proof_parser, record

from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.te import modules as te_modules

NONFINITE: Mapping[str, str] = {
    "input": "an element of a layer's input is inf or nan, in one micro-batch of one or two",
    "output": "an element of the result of a layer is inf or nan",
    "block": "an element of the result of a block is nan",
    "weight": "an element of a weight is set to inf or nan after an update",
    "gradient": "an element of a weight's gradient is inf or nan",
    "update": "the optimizer's state of a weight gets a nan",
    "loss": "the loss is nan",
}
SHORT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "spike": ("the input of a layer is 2^8 to 2^14 times as large", ("growth", "stale-scale", "overflow")),
    "result": ("an element of the result of a layer is 2^16 times the largest", ("growth", "stale-scale", "overflow")),
    "overwritten": ("a weight gets its values of the start, or a quarter of them", ("weight-jump",)),
    "high": ("a step runs outside of te.autocast", ("hole",)),
    "garbage": ("the gradient of the loss is 2^12 times as large", ("growth", "gradient-norm", "stale-scale")),
}
KINDS = (*NONFINITE, *SHORT)
STEPS_AFTER = {"high": 12, "overwritten": 30}
"""Precision must be low again, and weights are compared in the collection step 50; 4 steps for others."""


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    seed: int
    model: ModelName
    recipe: RecipeName
    count: int
    start: int
    accumulate: int
    number: float

    @classmethod
    def drawn(cls, kind: str, seed: int) -> Fault:
        draw = random.Random(f"{kind} {seed}")
        recipes: Sequence[RecipeName] = RECIPES if kind in ("high", "overwritten") else (*RECIPES, "none")
        recipe = draw.choice(recipes)
        start = draw.randrange(21, 45)
        of_steps = draw.choice((1, 2))
        number = draw.choice((float("nan"), float("inf")))
        if recipe == "nvfp4" or kind == "block":  # an inf in a block of FP4 is a large number from there on
            number = float("nan")
        model = draw.choice([name for name in MODELS if recipe != "nvfp4" or name not in FLOAT32_NORMS])
        count = draw.choice((2, 4))
        return cls(f"{kind}-{seed}", kind, seed, model, recipe, count, start, of_steps, number)


def train(fault: Fault, log_dir: Path) -> dict[str, Any]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    built = build(fault.model, fault.recipe, "autocast", fault.seed, count=fault.count)
    built.accumulate = fault.accumulate
    plant = _Plant(fault, built)
    with InspectSession(None, model=built.model, log_dir=log_dir, statistics_log="off") as session:
        for _ in range(fault.start + STEPS_AFTER.get(fault.kind, 4)):
            plant.begin()
            session.log({"loss": built.train_step()})
            session.step()
    FP8GlobalStateManager.reset()
    return {**asdict(fault), "number": str(fault.number), "layer": plant.layer, "first": plant.first}


class _Plant:
    """The fault, and what is known of it.

    Attributes:
        layer: the layer with the fault; empty if it is in all.
        first: the first module with inf or nan in its input in the fault's step, or in the gradient of its result.
    """

    def __init__(self, fault: Fault, built: Built) -> None:
        draw = random.Random(fault.seed)
        self._fault = fault
        self._built = built
        self._micro_batch = -1
        self._bad_batch = draw.randrange(fault.accumulate)
        self.first = ""
        block = draw.choice(built.blocks)
        self.layer = draw.choice(block.linears)
        self._module = cast(Any, built.model.get_submodule(self.layer))
        self._begun = self._module.weight.detach().clone()
        if fault.kind == "block":
            self.layer = ""
            self._module = built.model.get_submodule(block.path)
        if fault.kind in ("loss", "result", "high", "garbage"):
            self.layer = ""
        for name, module in built.model.named_modules():
            if (
                type(module).__module__.startswith("transformer_engine.")
                and type(module).__name__ in te_modules.MODULES
            ):
                module.register_forward_pre_hook(self._noting(name))
                module.register_full_backward_pre_hook(self._noting(name))
        built.model.register_forward_pre_hook(self._count)
        self._module.register_forward_pre_hook(self._change_input)
        self._module.register_forward_hook(self._change_output)
        built.after_backward.append(self._after_backward)
        built.after_step.append(self._after_step)
        self._recipe = built.recipe
        self._scale = built.loss_scale

    def begin(self) -> None:
        is_now = self._built.step == self._fault.start
        self._micro_batch = -1
        self._built.recipe = None if is_now and self._fault.kind == "high" else self._recipe
        self._built.loss_scale = self._scale
        if is_now and self._fault.kind == "loss":
            self._built.loss_scale = float("nan")
        if is_now and self._fault.kind == "garbage":
            self._built.loss_scale = 2.0**12

    def _is_now(self) -> bool:
        return self._built.step == self._fault.start and self._micro_batch == self._bad_batch

    def _count(self, *_: Any) -> None:
        self._micro_batch += 1

    def _noting(self, name: str) -> Callable[..., None]:
        """Return a hook that gets a module's inputs, or the gradients of its results."""

        def note(module: Any, tensors: Any) -> None:
            if not self.first and tensors[0] is not None and not bool(tensors[0].isfinite().all()):
                self.first = name

        return note

    def _with(self, tensor: torch.Tensor, number: float) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1, changed.shape[-1])[-1, 3] = number
        return changed

    def _change_input(self, module: Any, given: Any) -> Any:
        if not self._is_now() or self._fault.kind not in ("input", "spike"):
            return None
        x, *rest = given
        if self._fault.kind == "spike":
            return x * 2.0 ** random.Random(self._fault.seed).randint(8, 14), *rest
        changed = self._with(x, self._fault.number)
        self.first = self.layer
        return changed, *rest

    def _change_output(self, module: Any, given: Any, result: Any) -> Any:
        if not self._is_now() or self._fault.kind not in ("output", "block", "result"):
            return None
        tensor = result[0] if isinstance(result, tuple) else result
        number = self._fault.number
        if self._fault.kind == "result":
            number = float(tensor.detach().abs().max()) * 2.0**16
        changed = self._with(tensor, number)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed

    def _after_backward(self) -> None:
        if self._built.step == self._fault.start and self._fault.kind == "gradient":
            self._module.weight.grad.view(-1)[3] = self._fault.number
            self.first = self.layer

    def _after_step(self) -> None:
        if self._built.step != self._fault.start:
            if self._built.step == self._fault.start - 1 and self._fault.kind == "update":
                state = self._built.optimizer.state[self._module.weight]
                state["exp_avg"].view(-1)[3] = self._fault.number
                self.first = self.layer
            return
        with torch.no_grad():
            if self._fault.kind == "weight":
                self._module.weight.view(-1)[3] = self._fault.number
                self.first = self.layer
            if self._fault.kind == "overwritten":
                self._module.weight.copy_(self._begun / random.Random(self._fault.seed).choice((1, 4)))


def check(log_dir: Path, truth: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the fault was reported rightly, and the first finding from its step on."""
    verdict = diagnose(log_dir)
    start = truth["start"]
    since_then = [finding for finding in verdict.findings if finding.since in (start, start + 1)]
    shown = "nothing"
    for finding in since_then[:1]:
        shown = f"{finding.rule} in {', '.join(finding.layers[:1]) or 'all'} from step {finding.since} on"
    if truth["kind"] in NONFINITE:
        first = verdict[0] if verdict else None
        right = first is not None and first.rule == "nonfinite" and first.since == start
        return right and has_layer(verdict[0], [truth["first"]]), shown
    rules = SHORT[truth["kind"]][1]
    reported = [finding for finding in since_then if finding.rule in rules]
    return any(not truth["layer"] or has_layer(finding, [truth["layer"]]) for finding in reported), shown


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    options = parser.parse_args()
    faults = [Fault.drawn(kind, seed) for kind in options.kinds for seed in range(options.draws)]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        truths = record(train, faults, folder, processes=options.processes)
        rows = {name: check(folder / name, truth) for name, truth in truths.items()}
    lines = ["| fault of one step | what is planted | draws | right |", "|---|---|---|---|"]
    for kind in options.kinds:
        of_kind = [rows[name] for name, truth in truths.items() if truth["kind"] == kind]
        about = NONFINITE[kind] if kind in NONFINITE else SHORT[kind][0]
        lines.append(f"| {kind} | {about} | {len(of_kind)} | {sum(right for right, _ in of_kind)} |")
    misses = []
    for name, (right, shown) in rows.items():
        if not right:
            planted = "{model} of {count} blocks, {recipe}, step {start}".format_map(truths[name])
            if truths[name]["first"]:
                planted += ", {number} first in {first}".format_map(truths[name])
            misses.append(f"- {name} ({planted}): {shown}")
    text = "\n".join([*lines, "", *misses])
    print(text)
    if options.page:
        write_into_page("every-step", text)


if __name__ == "__main__":
    main()
