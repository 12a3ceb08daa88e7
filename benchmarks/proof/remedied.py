"""Planted defects, each with the remedies of the rule that finds it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import yaml
from defects import Defect, Kind, planted, scale_input
from mechanisms import MECHANISMS
from models import Built, Precision, RecipeName, build, recipe_of
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

from te_precision_callbacks.diagnosis.patches import keep_high

STEPS, FREQ, SEED, RATE = 24, 3, 7, 3e-3
"""Of all trainings; there are statistics in every so many steps."""

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
    def enlarge() -> None:
        if built.step == 8:
            with_rate(100 * RATE)(built)

    built.after_step.append(enlarge)


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
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipe = built.recipe
    built.recipe = None

    def inside(forward: Callable[..., Any], x: torch.Tensor) -> Any:
        state = FP8GlobalStateManager.quantization_state
        depth = state.autocast_depth
        state.autocast_depth = 0  # as if no te.autocast was around the model
        with te.autocast(enabled=True, recipe=recipe):
            y = forward(x)
        state.autocast_depth = depth
        return y

    for block in cast(Any, built.model).blocks:
        block.forward = functools.partial(inside, block.forward)


def frozen_before_detach(built: Built) -> None:
    for name, weight in built.model.named_parameters():
        weight.requires_grad_(name.startswith((built.blocks[1].path, "norm", "head")))


def squeezed_gradients(built: Built) -> None:
    """Shrink the gradients within the MLPs from step 4 on, and enlarge their results: only what rounds to 0 is lost."""
    from transformer_engine.common.recipe import Format

    LONG(built)
    built.recipe.fp8_format = Format.E4M3
    mlps = [built.model.get_submodule(block.mlp) for block in built.blocks]

    def enlarge(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (2.0**18 if built.step >= 4 else 1.0)

    def of_input(_: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
        same = inputs[0].view_as(inputs[0])
        same.register_hook(enlarge)
        return (same, *inputs[1:])

    def of_weights() -> None:
        for weight in (weight for mlp in mlps for weight in mlp.parameters()):
            weight.grad = enlarge(cast(torch.Tensor, weight.grad))

    for number, mlp in enumerate(mlps):
        of("squeezed-gradient", 4, block=number)(built)
        mlp.register_forward_pre_hook(of_input)
    built.after_backward.append(of_weights)


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
        "underflow", "the gradients within the MLPs are 2^-18 times as large, in E4M3 with an amax history of 1024",
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
        "missing-gradient", "the output of a block's MLP is detached", of("detached", 0), {"no detach()": TAKEN_OUT}
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
        "stale-scale", "the first block is detached", of("unmoved-scales", 0, variant=1),
        {
            "no detach()": TAKEN_OUT,
            "current scaling": CURRENT,
            "a separate te.autocast": separate_autocasts,
            "freeze it and all before it": frozen_before_detach,
        },
        "delayed",
    ),
    "checkpoint": Case(
        "stale-scale", "te.autocast is entered inside of a reentrant te.checkpoint", of("unmoved-scales", 0),
        {"te.autocast around it": autocast_around_checkpoints}, "delayed",
    ),
    "stale-weights": Case(
        "stale-weights", "is_first_microbatch is False from step 1 on", of("stale-weights", 1),
        {"is_first_microbatch=True": first_microbatch},
    ),
    "wrong-tile": Case(
        "wrong-gemm", "an FP8 GEMM of a layer zeroes a tile", of("wrong-kernel", 4),
        {"the layer in high precision": target_in_high_precision}, gemms=True,
    ),
    "half": Case(
        "wrong-gemm", "an FP8 GEMM of a layer halves its result", of("wrong-kernel", 4, variant=2),
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
        "resume", "a resume restores neither scales nor amax histories", resumed_without_scales,
        {"load the whole state_dict()": TAKEN_OUT}, "delayed",
    ),
    "schedule": Case(
        "learning-rate", "the cosine schedule is half as long as the training", with_schedule(STEPS // 2),
        {"a schedule of all steps": both(lambda built: built.after_step.clear(), with_schedule(STEPS))},
    ),
    "sum": Case(
        "gradient-norm", "the loss is a sum over 128 tokens, and clipped", both(clipped, with_loss_scale(128.0)),
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
        "stale-scale", "a margin of 12", with_recipe("delayed", margin=12), {"no margin": TAKEN_OUT}, "delayed"
    ),
}  # fmt: skip
