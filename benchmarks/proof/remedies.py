"""Apply each remedy to its planted defect, in three families of models: does the loss recover, and is the finding gone?

    python benchmarks/proof/remedies.py [--names PART ...] [--folder FOLDER]

Each training has the same data and the same seed without the defect, with it, and with it and the remedy. Where the
remedy is to take the defect out, the remedied training is the healthy one.

``--folder`` keeps the recorded trainings; a further call judges them without training. ``--page`` writes the table
into docs/proof.md.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
import yaml
from defects import Defect, Kind, planted, scale_input
from judging import write_into_page
from mechanisms import MECHANISMS
from models import Built, ModelName, Precision, RecipeName, build, recipe_of
from running import proof_parser, record, with_statistics_every
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.session import InspectSession

FAMILIES: Mapping[ModelName, str] = {"bytes": "language model", "gpt": "GPT", "vit": "vision transformer"}
STEPS, LASTS, FREQ, SEED, RATE = 24, 4, 3, 7, 3e-3
NEAR = 0.1
"""A loss is near the healthy one if it is at most this share of the healthy training's progress above it."""

Change = Callable[[Built], object]
"""Changes a training; may return a context that the steps run in, or a section for the config."""


@dataclass(frozen=True)
class Case:
    """A planted defect, and the remedies of the rule that finds it; a healthy training without a rule.

    Attributes:
        remedies: parts of the rule's remedy, in a few words; None: the defect is taken out.
        recipe: and the others: of all its trainings.
    """

    rule: str
    about: str
    plant: Change
    remedies: Mapping[str, Change | None]
    recipe: RecipeName = "current"
    precision: Precision = "float32"
    count: int = 2
    gemms: bool = False

    @property
    def healthy(self) -> str:
        """The name of the training without the defect."""
        return f"healthy-{self.recipe}-{self.precision}-{self.count}"


def of(kind: Kind, start: int, *, variant: int = 0, block: int = 0) -> Change:
    """A defect of defects.py."""
    draw = functools.partial(Defect, kind, SEED, block=block, start=start, variant=variant, freq=FREQ)
    return lambda built: planted(
        draw(model=built.name, recipe="current", precision=built.precision, count=len(built.blocks)), built
    )


def with_recipe(name: RecipeName, **options: Any) -> Change:
    def change(built: Built) -> None:
        built.recipe = recipe_of(name)
        vars(built.recipe).update(options)

    return change


def both(*changes: Change) -> Change:
    """Make several changes; return what the last one returns."""
    return lambda built: [change(built) for change in changes][-1]


def with_rate(rate: float) -> Change:
    return lambda built: built.optimizer.param_groups[0].update(lr=rate)


def with_loss_scale(scale: float) -> Change:
    return lambda built: setattr(built, "loss_scale", scale)


def with_schedule(steps: int) -> Change:
    return lambda built: built.after_step.append(CosineAnnealingLR(built.optimizer, steps).step)


def clipped(built: Built) -> None:
    built.after_backward.append(lambda: cast(Any, clip_grad_norm_)(built.model.parameters(), 1.0))


def scaled_weights(factor: float, *, names: Callable[[Built], Sequence[str]], step: int | None = None) -> Change:
    """Multiply weights after each step, or after one."""

    def change(built: Built) -> None:
        weights = [built.model.get_parameter(name) for name in names(built)]

        def scale() -> None:
            for weight in weights if step in (None, built.step) else ():
                weight.data.mul_(factor)

        built.after_step.append(scale)

    return change


def growing_input(built: Built) -> None:
    scale_input(built, built.blocks[0].linears[0], lambda step: 4.0 ** min(max(step - 3, 0), 10))


def larger_rate(built: Built) -> None:
    built.after_step.append(lambda: with_rate(100 * RATE)(built) if built.step == 8 else None)


def new_optimizer(built: Built, *, without: str = "none") -> None:
    held = [weight for name, weight in built.model.named_parameters() if not name.startswith(without)]
    built.optimizer = torch.optim.AdamW(held, lr=RATE, weight_decay=0.01)


def first_microbatch(built: Built) -> None:
    """After the hooks of the defect, in the only micro-batch of each step."""
    import transformer_engine.pytorch as te

    for module in built.model.modules():
        if isinstance(module, (te.Linear, te.LayerNormLinear, te.LayerNormMLP)):
            module.register_forward_pre_hook(
                lambda _, inputs, options: (inputs, {**options, "is_first_microbatch": True}), with_kwargs=True
            )


def resumed_without_scales(built: Built) -> None:
    while built.step < STEPS // 3:
        built.train_step()
    state = {key: part for key, part in built.model.state_dict().items() if "_extra_state" not in key}
    optimizer = built.optimizer.state_dict()
    built.model = build(built.name, "none", built.precision, SEED, count=len(built.blocks)).model
    built.model.load_state_dict(state, strict=False)
    new_optimizer(built)
    built.optimizer.load_state_dict(optimizer)


def autocast_around_checkpoints(built: Built) -> None:
    import transformer_engine.pytorch as te

    built.recipe = recipe_of("delayed")
    for block in cast(Any, built.model).blocks:
        block.forward = functools.partial(te.checkpoint, type(block).forward.__get__(block), use_reentrant=True)


def separate_autocasts(built: Built) -> None:
    """One for each block, so that the first block's, which has no backward, is another one."""
    import transformer_engine.pytorch as te

    recipe, built.recipe = built.recipe, None

    def inside(forward: Callable[..., Any], x: torch.Tensor) -> Any:
        with te.autocast(enabled=True, recipe=recipe):
            return forward(x)

    for block in cast(Any, built.model).blocks:
        block.forward = functools.partial(inside, block.forward)


def squeezed_gradients(built: Built) -> None:
    from transformer_engine.common.recipe import Format

    LONG(built)
    built.recipe.fp8_format = Format.E4M3
    for block in range(len(built.blocks)):
        of("squeezed-gradient", 4, block=block)(built)


def mlps_in_high_precision(built: Built) -> Any:
    names = (block.down.removesuffix("fc2") + name for block in built.blocks for name in ("fc1", "fc2"))
    return yaml.safe_load(keep_high(*names))


def target_in_high_precision(built: Built) -> Any:
    return yaml.safe_load(keep_high(built.blocks[0].linears[0]))


def with_eps(eps: float) -> Change:
    return lambda built: built.optimizer.param_groups[0].update(eps=eps)


CURRENT, TAKEN_OUT = with_recipe("current"), None
LONG = with_recipe("delayed", amax_history_len=1024)
SHORT = with_recipe("delayed", amax_history_len=1)
RECENT = with_recipe("delayed", amax_history_len=1024, amax_compute_algo="most_recent")


CASES: Mapping[str, Case] = {
    "overflow": Case(
        "overflow", "the input of a layer is 4 times as large in each step, up to 2^20", growing_input,
        {"current scaling": CURRENT, "margin 2": with_recipe("delayed", margin=2), "an amax history of 1": SHORT},
        "delayed",
    ),
    "spike": Case(
        "stale-scale", "the input of a layer is 2^18 times as large in one step, with an amax history of 1024",
        both(LONG, of("spike", 4, variant=3)),
        {"current scaling": CURRENT, "an amax history of 1": SHORT, "most_recent": RECENT}, "delayed",
    ),
    "underflow": Case(
        "underflow", "the gradients of the MLPs shrink by 2^-18, in E4M3 with an amax history of 1024",
        squeezed_gradients,
        {"the layers in high precision": mlps_in_high_precision, "a block recipe": with_recipe("blocks")}, "delayed",
    ),
    "growth": Case(
        "growth", "the weights before an MLP's second product grow by half in each step",
        scaled_weights(1.5, names=lambda built: built.blocks[0].grows),
        {"end the growth": TAKEN_OUT, "the layers in high precision": mlps_in_high_precision},
    ),
    "large-weight": Case(
        "sibling", "a weight is initialized 1000 times too large", of("large-weight", 0),
        {"initialize it as in similar layers": TAKEN_OUT},
    ),
    "tiny-loss": Case(
        "below-eps", "the loss is scaled by 1e-12", of("tiny-loss", 0),
        {"do not scale the loss": with_loss_scale(1.0), "eps=1e-15": with_eps(1e-15), "eps=1e-20": with_eps(1e-20)},
    ),
    "lost-updates": Case(
        "lost-updates", "weights in bfloat16, and a learning rate of 3e-7", with_rate(3e-7),
        {"the usual learning rate": with_rate(RATE), "weights in float32": lambda built: built.model.float()},
        precision="bfloat16",
    ),
    "detached": Case(
        "dead-gradient", "the output of a block's MLP is detached", of("detached", 0), {"no detach()": TAKEN_OUT}
    ),
    "no-optimizer": Case(
        "missing-gradient", "the optimizer lacks a block's parameters",
        lambda built: new_optimizer(built, without=built.blocks[1].path), {"pass all parameters": TAKEN_OUT},
    ),
    "stale-optimizer": Case(
        "frozen-weight", "the optimizer holds the parameters from before the model was copied",
        lambda built: MECHANISMS["stale-optimizer"].plant(built, True), {"create it afterwards": new_optimizer},
    ),
    "no-zero-grad": Case(
        "kept-gradient", "gradients are not cleared", lambda built: MECHANISMS["no-zero-grad"].plant(built, True),
        {"optimizer.zero_grad()": lambda built: vars(built.optimizer).pop("zero_grad")},
    ),
    "first-detached": Case(
        "scale-never-updated", "the first block is detached", of("unmoved-scales", 0, variant=1),
        {
            "current scaling": CURRENT,
            "a separate te.autocast": separate_autocasts,
            "freeze the block": lambda built: cast(Any, built.model).blocks[0].requires_grad_(False),
        },
        "delayed",
    ),
    "checkpoint": Case(
        "scale-never-updated", "te.autocast is entered inside of a reentrant te.checkpoint", of("unmoved-scales", 0),
        {"te.autocast around it": autocast_around_checkpoints}, "delayed",
    ),
    "stale-weights": Case(
        "stale-weights", "is_first_microbatch is False from step 1 on", of("stale-weights", 1),
        {"is_first_microbatch=True": first_microbatch},
    ),
    "wrong-tile": Case(
        "gemm-kernel", "an FP8 GEMM of a layer zeroes a tile", of("wrong-kernel", 4),
        {"the layer in high precision": target_in_high_precision}, gemms=True,
    ),
    "half": Case(
        "gemm-gain", "an FP8 GEMM of a layer halves its result", of("wrong-kernel", 4, variant=2),
        {"the layer in high precision": target_in_high_precision}, gemms=True,
    ),
    "nan": Case(
        "nonfinite", "an element of a layer's input is NaN in one step", of("nan", 9),
        {"resume from before, without the NaN": TAKEN_OUT},
    ),
    "no-autocast": Case(
        "no-low-precision", "te.autocast is not enabled", with_recipe("none"), {"te.autocast": TAKEN_OUT}
    ),
    "not-fp8": Case(
        "hole", "a layer is called outside of te.autocast", of("not-fp8", 0, variant=1, block=1),
        {"call it inside": TAKEN_OUT}, count=4,
    ),
    "lost-scales": Case(
        "lost-scales", "a resume restores neither scales nor amax histories", resumed_without_scales,
        {"load the whole state_dict()": TAKEN_OUT}, "delayed",
    ),
    "schedule": Case(
        "learning-rate", "the cosine schedule is half as long as the training", with_schedule(STEPS // 2),
        {"a schedule of all steps": both(lambda built: built.after_step.clear(), with_schedule(STEPS))},
    ),
    "sum": Case(
        "gradient-size", "the loss is a sum over 128 tokens, and clipped", both(clipped, with_loss_scale(128.0)),
        {"a mean": with_loss_scale(1.0)},
    ),
    "rate": Case(
        "diverging-loss", "the learning rate is 100 times as large from step 8 on", larger_rate,
        {"lower the learning rate": TAKEN_OUT, "clip the gradients": clipped},
    ),
    "jump": Case(
        "weight-jump", "code multiplies all weights by 16 after step 9",
        scaled_weights(16.0, names=lambda built: list(dict(built.model.named_parameters())), step=9),
        {"remove the code": TAKEN_OUT},
    ),
    "margin": Case(
        "margin", "a margin of 12", with_recipe("delayed", margin=12), {"no margin": TAKEN_OUT}, "delayed"
    ),
}  # fmt: skip

ALL = {
    case.healthy: Case("", "", lambda _: None, {}, case.recipe, case.precision, case.count) for case in CASES.values()
}
ALL |= CASES


@dataclass(frozen=True)
class Training:
    case: str
    model: ModelName

    @property
    def name(self) -> str:
        return f"{self.case}-{self.model}"

    @property
    def recipe(self) -> RecipeName:
        return ALL[self.case].recipe


def train(training: Training, log_dir: Path) -> dict[str, Any]:
    """Train with the defect, and with it and each remedy; or healthy."""
    case = ALL[training.case]
    changes = [None, *(change for change in case.remedies.values() if change is not TAKEN_OUT)]
    return {"done": [_run(case, training.model, change, log_dir / str(at)) for at, change in enumerate(changes)]}


def _run(case: Case, model: ModelName, remedy: Change | None, log_dir: Path) -> dict[str, Any]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    built = build(model, case.recipe, case.precision, SEED, rate=RATE, count=case.count)
    inside = case.plant(built)
    config = with_statistics_every(FREQ, gemms=case.gemms) or {}
    section = None if remedy is None else remedy(built)
    config |= section if isinstance(section, dict) else {}
    gc.collect()  # an optimizer that was replaced
    losses: list[float] = []
    options: Any = {"log_dir": log_dir, "statistics_log": "off", "report": False}
    context = inside if isinstance(inside, contextlib.AbstractContextManager) else contextlib.nullcontext()
    with context, InspectSession(config, model=built.model, **options) as session:
        while built.step < STEPS:
            losses.append(built.train_step())
            session.log({"loss": losses[-1], "lr": built.optimizer.param_groups[0]["lr"]})
            session.step()
    FP8GlobalStateManager.reset()
    return {"first": losses[0], "last": mean(losses[-LASTS:]), "rules": [finding.rule for finding in session.findings]}


Row = dict[str, Any]
"""A remedy in a family: ``healthy``, ``broken`` and ``remedied`` are last losses; ``found`` and ``gone`` tell of the
rule's finding; ``hurts`` and ``holds`` compare the losses with the healthy one."""


def judge(name: str, model: ModelName, truths: Mapping[str, Any]) -> Sequence[Row]:
    """A row for each remedy."""
    case = CASES[name]
    healthy, (broken, *remedied) = truths[f"{case.healthy}-{model}"]["done"][0], truths[f"{name}-{model}"]["done"]
    most = healthy["last"] + NEAR * (healthy["first"] - healthy["last"])
    rows = []
    for about, change in case.remedies.items():
        done = healthy if change is TAKEN_OUT else remedied.pop(0)
        row = {"case": name, "remedy": about, "model": model, "hurts": not broken["last"] <= most}
        row |= {
            "first": healthy["first"],
            "healthy": healthy["last"],
            "broken": broken["last"],
            "remedied": done["last"],
        }
        row |= {"found": case.rule in broken["rules"], "gone": case.rule not in done["rules"]}
        rows.append({**row, "holds": done["last"] <= most})
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each remedy, in Markdown."""
    heads = ["rule", "what is planted", "remedy", *FAMILIES.values(), "loss", "finding"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for case, remedy in dict.fromkeys((row["case"], row["remedy"]) for row in rows):
        group = [row for row in rows if (row["case"], row["remedy"]) == (case, remedy)]
        losses = ["{healthy:.2f} / {broken:.2f} / {remedied:.2f}".format_map(row) for row in group]
        hurt, held = ([row["model"] for row in group if row[key]] for key in ("hurts", "holds"))
        loss = f"recovers in {len({*hurt} & {*held})} of {len(hurt)}" if hurt else "is not hurt"
        loss += f"; **worse** in {harmed}" if (harmed := len(group) - len({*hurt} | {*held})) else ""
        found = sum(row["found"] for row in group)
        gone = sum(row["found"] and row["gone"] for row in group)
        cells = [CASES[case].rule, CASES[case].about, remedy, *losses, loss, f"gone in {gone} of {found}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = proof_parser(__doc__)
    parser.add_argument("--names", nargs="+", default=[""], help="only defects whose name contains one of these")
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a remedy and family")
    options = parser.parse_args()
    names = [name for name in CASES if any(part in name for part in options.names)]
    needed = dict.fromkeys([*(CASES[name].healthy for name in names), *names])
    trainings = [Training(name, model) for name in needed for model in options.models]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        truths = record(train, trainings, folder, processes=options.processes)
        rows = [row for name in names for model in options.models for row in judge(name, model, truths)]
    text = table(rows)
    print(json.dumps(rows, indent=1) if options.json else text)
    if options.page:
        write_into_page("remedies", text)


if __name__ == "__main__":
    main()
