"""Defects that are planted in a healthy training, and the truth about each.

    with planted(Defect.drawn("outlier-row", seed=4), built):
        for _ in range(31):
            built.train_step()

A defect acts on one block, or on the whole model, from its start step on. It is made with hooks, which stay on the
model, and with changes of weights between steps; nothing of it is known to what observes the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args
from unittest import mock

import torch
from models import (
    BLOCK_COUNTS,
    FLOAT32_NORMS,
    HELD_BACK,
    MODELS,
    RECIPES,
    Built,
    ModelName,
    Precision,
    RecipeName,
    build,
)
from running import with_statistics_every

from te_precision_callbacks.session import InspectSession

Kind = Literal[
    "growing-activation",
    "small-gradient",
    "large-gradient",
    "outlier-row",
    "outlier-channel",
    "not-fp8",
    "spike",
    "stale-weights",
    "lost-updates",
    "tiny-loss",
    "detached",
    "growth",
    "nan",
    "wrong-kernel",
    "large-weight",
    "unmoved-scales",
    "squeezed-gradient",
    "old-weight",
    "zeroed-weight",
    "nan-gradient",
    "kept-gradient",
    "not-in-optimizer",
    "zero-loss",
    "block-not-fp8",
    "rising-rate",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

JUDGED, CALIBRATION = 500, 1000
"""Seeds from the one on are checked, from the other on they are for choosing thresholds."""


@dataclass(frozen=True)
class Table:
    """Properties of all draws of a kind.

    Attributes:
        about: description.
        rules: right rules of the first finding.
        steps: how long the training is.
        steps_of_default: how long it is with the default config, which has statistics in steps 10, 20, 50, 100, 200.
        starts: range of the defect's first step.
        recipes: possible recipes.
        models: possible models.
        whole_model: whether there is no right layer.
        inner: whether it is in no block at either end, where alike layers may be kept in high precision on purpose.
    """

    about: str
    rules: tuple[str, ...]
    steps: int = 31
    steps_of_default: int = 51
    starts: tuple[int, int] = (3, 9)
    recipes: Sequence[RecipeName] = RECIPES
    models: Sequence[ModelName] = MODELS
    whole_model: bool = False
    inner: bool = False


TABLE: Mapping[Kind, Table] = {
    "growing-activation": Table(
        "the input of a layer grows by 1.4 to 2 in each step, under delayed scaling",
        ("overflow", "stale-scale", "growth", "sibling"),
        steps=41,
        steps_of_default=101,
        starts=(5, 15),
        recipes=("delayed",),
    ),
    "small-gradient": Table(
        "the gradient of a block's MLP is scaled by 2^-18",
        ("dead-gradient", "underflow", "sibling", "below-eps"),
        starts=(0, 9),
    ),
    "large-gradient": Table(
        "the gradient of a block's MLP is scaled by 2^14", ("sibling", "overflow", "stale-scale", "growth")
    ),
    "outlier-row": Table(  # which is written between two steps
        "a row of a weight is multiplied by 2^12", ("sibling", "underflow", "overflow", "growth", "weight-jump")
    ),
    "outlier-channel": Table(
        "a channel of a layer's input is multiplied by 2^14",
        ("sibling", "underflow", "overflow", "growth"),
        starts=(0, 9),
    ),
    "not-fp8": Table("a layer is torch's, or is called outside of te.autocast", ("hole",), starts=(0, 0), inner=True),
    "spike": Table(
        "the input of a layer is 2^12 to 2^18 times as large in one step, with an amax history of 1024 steps",
        ("stale-scale", "underflow"),
        steps_of_default=101,
        starts=(3, 18),
        recipes=("delayed",),
    ),
    "stale-weights": Table(
        "is_first_microbatch is False in all later steps, so the weights in FP8 stay as they are",
        ("stale-weights",),
        starts=(1, 3),
        whole_model=True,
    ),
    "lost-updates": Table(
        "weights in bfloat16, and a learning rate of 3e-7", ("lost-updates",), starts=(0, 0), whole_model=True
    ),
    "tiny-loss": Table("the loss is scaled by 1e-12", ("below-eps", "dead-gradient"), starts=(0, 0), whole_model=True),
    "detached": Table("the output of a block's MLP is detached", ("dead-gradient", "missing-gradient"), starts=(0, 0)),
    "growth": Table(
        "the weights before an MLP's second product grow by 10 to 20 % in each step",
        ("growth", "overflow", "stale-scale", "sibling"),
        steps=61,
        steps_of_default=201,
        starts=(0, 10),
    ),
    "nan": Table("an element of a layer's input or weight is NaN in one step", ("nonfinite",), starts=(10, 20)),
    "wrong-kernel": Table(
        "a layer's GEMM zeroes a tile, swaps two rows, halves its result, or has 1 % wrong elements; with LogGemmError"
        " in the config",
        ("wrong-gemm",),
    ),
    "large-weight": Table("a weight is initialized 1000 times too large", ("sibling",), starts=(0, 0)),
    "unmoved-scales": Table(
        "the first layer is detached, or te.autocast is entered inside of a reentrant te.checkpoint",
        ("stale-scale", "dead-gradient", "missing-gradient"),
        starts=(0, 0),
        recipes=("delayed",),
        models=("bytes", "gpt", "vit", "mixer", "parallel"),
        whole_model=True,
    ),
    "squeezed-gradient": Table(
        "the gradient of a block's MLP is scaled by 2^-18, in E4M3, with an amax history of 1024 steps",
        ("underflow", "stale-scale", "dead-gradient", "sibling"),
        recipes=("delayed",),
    ),
    "old-weight": Table(
        "a weight is overwritten with its values of the first step", ("weight-jump",), starts=(12, 25), steps=41
    ),
    "zeroed-weight": Table(
        "a weight is set to 0 in one step", ("weight-jump", "dead-gradient", "sibling"), starts=(3, 18), steps=41
    ),
    "nan-gradient": Table(
        "an element of a weight's gradient is NaN in one step, after the backward", ("nonfinite",), starts=(3, 18)
    ),
    "kept-gradient": Table("the gradients of a block are never cleared", ("kept-gradient",), starts=(0, 0)),
    "not-in-optimizer": Table(
        "the optimizer does not have the parameters of a block", ("missing-gradient",), starts=(0, 0)
    ),
    "zero-loss": Table(
        "the loss is multiplied by 0",
        ("dead-gradient", "missing-gradient", "below-eps"),
        starts=(0, 9),
        whole_model=True,
    ),
    "block-not-fp8": Table("a block is called outside of te.autocast", ("hole",), starts=(0, 0), inner=True),
    "rising-rate": Table(
        "the learning rate rises again from 0 on, as a cosine schedule does that is stepped twice as often",
        ("learning-rate",),
        starts=(20, 20),
        whole_model=True,
    ),
}
"""Most trainings are as long as the default config needs for three steps with statistics after the defect."""


@dataclass(frozen=True)
class Defect:
    """A drawn defect.

    Attributes:
        seed: of the draw, and of the training.
        count: of blocks in the model.
        block: the number of the block; None for the whole model.
        start: the defect's first step.
        variant: which of the ways of its kind.
        freq: every how many steps there are statistics; None: as the default config has it.
    """

    kind: Kind
    seed: int
    model: ModelName
    recipe: RecipeName
    precision: Precision
    count: int
    block: int | None
    start: int
    variant: int
    freq: int | None

    @classmethod
    def drawn(
        cls,
        kind: Kind,
        seed: int,
        *,
        freq: int | None = None,
        counts: Sequence[int] = BLOCK_COUNTS,
        among: Sequence[ModelName] = MODELS,
    ) -> Defect:
        """Models and recipes in turn, the number of blocks, the place and the start at random."""
        table = TABLE[kind]
        draw = random.Random(f"{kind} {seed}")
        turn = seed + KINDS.index(kind)
        models = [name for name in table.models if name in among and (seed < CALIBRATION or name not in HELD_BACK)]
        model = models[turn % len(models)]
        recipe = table.recipes[(turn + turn // len(models)) % len(table.recipes)]
        start = draw.randint(*table.starts)
        if kind == "nan":  # in a step with statistics, as otherwise all weights are nan before the next
            start = 10 * round(start / 10)
        precision: Precision = "autocast" if recipe == "nvfp4" or draw.random() < 0.5 else "float32"
        if kind == "lost-updates" or (model in FLOAT32_NORMS and recipe == "nvfp4"):
            precision = "bfloat16"
        count = draw.choice([count for count in counts if count > 2] if table.inner else counts)
        first, end = (1, count - 1) if table.inner else (0, count)
        block = None if table.whole_model else draw.randrange(first, end)
        return cls(kind, seed, model, recipe, precision, count, block, start, draw.randrange(4), freq)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"

    @property
    def steps(self) -> int:
        table = TABLE[self.kind]
        return table.steps_of_default if self.freq is None else table.steps

    def build(self, device: str = "cpu") -> Built:
        built = build(
            self.model,
            self.recipe,
            self.precision,
            self.seed,
            rate=3e-7 if self.kind == "lost-updates" else 1e-3,
            count=self.count,
            history=1024 if self.kind in ("spike", "squeezed-gradient") else None,
            device=device,
        )
        if self.kind == "squeezed-gradient":
            from transformer_engine.common.recipe import Format

            built.recipe.fp8_format = Format.E4M3
        return built

    def truth(self, built: Built) -> dict[str, Any]:
        """Return the draw, and prefixes of the right layers' names."""
        layers = None if self.block is None else [f"{built.blocks[self.block].path}."]
        return {**dataclasses.asdict(self), "right_layers": layers, "exact_layers": _exact_layers(self, built)}


def train_with_defect(defect: Defect, log_dir: Path, device: str = "cpu") -> dict[str, Any]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    built = defect.build(device)
    with planted(defect, built):
        config = with_statistics_every(defect.freq, gemms=defect.kind == "wrong-kernel")
        with InspectSession(config, model=built.model, log_dir=log_dir, statistics_log="off") as session:
            for _ in range(defect.steps):
                session.log({"loss": built.train_step(), "lr": built.optimizer.param_groups[0]["lr"]})
                session.step()
    FP8GlobalStateManager.reset()
    return defect.truth(built)


def _target(defect: Defect, built: Built) -> str:
    """Return the path of the ``te.Linear`` with the defect."""
    linears = built.blocks[cast(int, defect.block)].linears
    return linears[defect.variant % len(linears)]


def _weight(defect: Defect, built: Built) -> torch.nn.Parameter:
    return cast(torch.nn.Parameter, built.model.get_submodule(_target(defect, built)).weight)


def _exact_layers(defect: Defect, built: Built) -> list[str] | None:
    """Return the defect's first layers; a finding may name any layer of the block."""
    if defect.block is None:
        return None
    block = built.blocks[defect.block]
    if defect.kind in (
        "growing-activation",
        "outlier-row",
        "outlier-channel",
        "not-fp8",
        "spike",
        "nan",
        "wrong-kernel",
        "large-weight",
        "old-weight",
        "zeroed-weight",
        "nan-gradient",
    ):
        return [_target(defect, built)]
    if defect.kind == "growth":
        return [block.down, *(path.removesuffix(".weight").replace("fc1_weight", "fc1") for path in block.grows)]
    return [block.mlp]


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a view with a scaled gradient."""
    same = x.view_as(x)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return same


def scale_gradient(built: Built, block: int, factor: float) -> None:
    """Scale the gradient of a block's MLP in all steps."""
    _on_output(built.model.get_submodule(built.blocks[block].mlp), lambda x: _scaled(x, factor))


def planted(defect: Defect, built: Built) -> AbstractContextManager[object]:
    """The defect acts on the training; what it changes outside of the model begins and ends with the block."""
    return _PLANT[defect.kind](defect, built) or contextlib.nullcontext()


Planted = AbstractContextManager[object] | None
"""What ends a change outside of the model."""


def _on_input(layer: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first input of a layer."""
    layer.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]), *inputs[1:]))


def _on_output(layer: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor of a layer's output."""

    def after(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    layer.register_forward_hook(after)


def _on_weight(defect: Defect, built: Built, change: Callable[[torch.Tensor], object]) -> None:
    """Change a layer's weight once."""
    weight = _weight(defect, built)

    @torch.no_grad()
    def once() -> None:
        if built.step + 1 == defect.start:
            change(weight)

    built.after_step.append(once)


def scale_input(built: Built, path: str, factor: Callable[[int], float | None]) -> None:
    """The input of a layer is multiplied by a step's factor, and its output divided by it."""
    layer = built.model.get_submodule(path)

    def scaled(x: torch.Tensor, *, down: bool) -> torch.Tensor:
        scale = factor(built.step)
        if scale is None:
            return x
        return x / scale if down else x * scale

    _on_input(layer, functools.partial(scaled, down=False))
    _on_output(layer, functools.partial(scaled, down=True))


def _growing_activation(defect: Defect, built: Built) -> None:
    per_step = (1.4, 1.6, 1.8, 2.0)[defect.variant]

    def factor(step: int) -> float | None:
        return None if step < defect.start else min(per_step ** (step - defect.start + 1), 2.0**20)

    scale_input(built, _target(defect, built), factor)


def _changed_mlp(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Defect, Built], None]:
    """Change the output of a block's MLP."""

    def plant(defect: Defect, built: Built) -> None:
        mlp = built.model.get_submodule(built.blocks[cast(int, defect.block)].mlp)
        _on_output(mlp, lambda x: x if built.step < defect.start else change(x))

    return plant


def _outlier_row(defect: Defect, built: Built) -> None:
    _on_weight(defect, built, lambda weight: weight[defect.seed % len(weight)].mul_(2.0**12))


def _outlier_channel(defect: Defect, built: Built) -> None:
    layer = built.model.get_submodule(_target(defect, built))
    scale = torch.ones(cast(int, layer.in_features))
    scale[defect.seed % len(scale)] = 2.0**14
    _on_input(layer, lambda x: x if built.step < defect.start else x * scale.to(x))


def _not_fp8(defect: Defect, built: Built) -> None:
    """The layer is torch's, or it is called outside of ``te.autocast``."""
    path = _target(defect, built)
    layer: Any = built.model.get_submodule(path)
    if built.name == "gpt" or defect.variant % 2:
        _leave_autocast(layer)
        return
    bias = isinstance(getattr(layer, "bias", None), torch.nn.Parameter) and layer.bias.numel() > 0
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=bias).to(layer.weight)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
        if bias:
            plain.bias.copy_(layer.bias)
    built.model.set_submodule(path, plain)
    built.optimizer.param_groups.clear()
    built.optimizer.add_param_group({"params": list(built.model.parameters())})


def _leave_autocast(layer: torch.nn.Module) -> None:
    """As if the layer was called outside of ``te.autocast``."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    inside: list[Any] = []

    def before(*_: Any) -> None:
        state = FP8GlobalStateManager.quantization_state
        inside.append((FP8GlobalStateManager.get_autocast_state(), state.autocast_depth))
        FP8GlobalStateManager.set_autocast_state((False, *inside[-1][0][1:]))
        state.autocast_depth = 0

    def after(*_: Any) -> None:
        autocast, depth = inside.pop()
        FP8GlobalStateManager.set_autocast_state(autocast)
        FP8GlobalStateManager.quantization_state.autocast_depth = depth

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _spike(defect: Defect, built: Built) -> None:
    largest = 2.0 ** (12 + 2 * defect.variant)
    scale_input(built, _target(defect, built), lambda step: largest if step == defect.start else None)


def _stale_weights(defect: Defect, built: Built) -> None:
    """Keep ``is_first_microbatch`` False, so the weights in FP8 stay stale."""
    import transformer_engine.pytorch as te

    def before(_: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return inputs, {**options, "is_first_microbatch": built.step < defect.start}

    for module in built.model.modules():
        if isinstance(module, (te.Linear, te.LayerNormLinear, te.LayerNormMLP)):
            module.register_forward_pre_hook(before, with_kwargs=True)


def _tiny_loss(defect: Defect, built: Built) -> None:
    built.loss_scale = 1e-12


def _growth(defect: Defect, built: Built) -> None:
    """The weights before the MLP's second product grow, and with them its input."""
    weights = [built.model.get_parameter(path) for path in built.blocks[cast(int, defect.block)].grows]
    per_step = (1.1, 1.13, 1.16, 1.2)[defect.variant]

    @torch.no_grad()
    def grow() -> None:
        if built.step + 1 >= defect.start:
            for weight in weights:
                weight.mul_(per_step)

    built.after_step.append(grow)


def _nan(defect: Defect, built: Built) -> None:
    """In the input of a layer, or in its weight."""
    if defect.variant % 2:
        _on_weight(defect, built, lambda weight: weight[0, 0].fill_(torch.nan))
        return

    def hurt(x: torch.Tensor) -> torch.Tensor:
        if built.step == defect.start:
            x = x.clone()
            x[(0,) * x.ndim] = torch.nan
        return x

    _on_input(built.model.get_submodule(_target(defect, built)), hurt)


def _wrong_kernel(defect: Defect, built: Built) -> AbstractContextManager[object]:
    """In the forward of a layer, behind the extension's GEMM of quantized operands."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    layer, upstream = built.model.get_submodule(_target(defect, built)), tex.generic_gemm
    inside: list[bool] = []

    def generic_gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any, **keywords: Any) -> Any:
        result = upstream(a, transa, b, transb, *more, **keywords)
        is_forward = (transa, transb) == (True, False) and isinstance(a, QuantizedTensorStorage)
        if inside and is_forward and built.step >= defect.start:
            _hurt(result[0].view(-1, result[0].shape[-1]), defect.variant)
        return result

    layer.register_forward_pre_hook(lambda *_: inside.append(True))
    layer.register_forward_hook(lambda *_: inside.clear())
    return mock.patch.object(tex, "generic_gemm", generic_gemm)


@torch.no_grad()
def _hurt(out: torch.Tensor, variant: int) -> None:
    rows, columns = out.shape
    if variant == 0:
        out[: max(1, rows // 8), : max(1, columns // 8)] = 0
    elif variant == 1:
        out[[0, rows // 2]] = out[[rows // 2, 0]]
    elif variant == 2:
        out.mul_(0.5)
    else:
        flat = out.view(-1)
        places = torch.arange(0, flat.numel(), 100, device=out.device)
        flat[places] = flat[places].flip(0)


@torch.no_grad()
def _large_weight(defect: Defect, built: Built) -> None:
    _weight(defect, built).mul_(1000.0)


def _unmoved_scales(defect: Defect, built: Built) -> None:
    """Detach the first block, or checkpoint all blocks with te.autocast inside."""
    import transformer_engine.pytorch as te

    blocks = cast(Any, built.model).blocks
    if defect.variant % 2:
        _on_output(blocks[0], torch.Tensor.detach)
        return
    recipe, built.recipe = built.recipe, None

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(x: torch.Tensor) -> Any:
            with te.autocast(enabled=True, recipe=recipe):
                return forward(x)

        return lambda x: te.checkpoint(inside, x, use_reentrant=True)

    for block in blocks:
        block.forward = checkpointed(block.forward)


def _old_weight(defect: Defect, built: Built) -> None:
    first = _weight(defect, built).detach().clone()
    _on_weight(defect, built, lambda weight: weight.copy_(first))


def _nan_gradient(defect: Defect, built: Built) -> None:
    weight = _weight(defect, built)

    def hurt() -> None:
        if built.step == defect.start and weight.grad is not None:
            weight.grad[0, 0] = torch.nan

    built.after_backward.append(hurt)


def _block(defect: Defect, built: Built) -> torch.nn.Module:
    return built.model.get_submodule(built.blocks[cast(int, defect.block)].path)


def _without_block(defect: Defect, built: Built) -> list[torch.nn.Parameter]:
    left_out = set(map(id, _block(defect, built).parameters()))
    return [parameter for parameter in built.model.parameters() if id(parameter) not in left_out]


def _kept_gradient(defect: Defect, built: Built) -> None:
    """Only the gradients of the other parameters are cleared."""
    others = _without_block(defect, built)

    def clear() -> None:
        for parameter in others:
            parameter.grad = None

    built.optimizer.zero_grad = clear  # type: ignore[method-assign,assignment]


def _not_in_optimizer(defect: Defect, built: Built) -> None:
    built.optimizer = torch.optim.AdamW(_without_block(defect, built), lr=1e-3, weight_decay=0.01)


def _zero_loss(defect: Defect, built: Built) -> None:
    def from_start() -> None:
        if built.step + 1 >= defect.start:
            built.loss_scale = 0.0

    if defect.start == 0:
        built.loss_scale = 0.0
    built.after_step.append(from_start)


def _rising_rate(defect: Defect, built: Built) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(
        built.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / defect.start))
    )
    built.after_step.append(schedule.step)


_PLANT: Mapping[Kind, Callable[[Defect, Built], Planted]] = {
    "growing-activation": _growing_activation,
    "small-gradient": _changed_mlp(lambda x: _scaled(x, 2.0**-18)),
    "large-gradient": _changed_mlp(lambda x: _scaled(x, 2.0**14)),
    "outlier-row": _outlier_row,
    "outlier-channel": _outlier_channel,
    "not-fp8": _not_fp8,
    "spike": _spike,
    "stale-weights": _stale_weights,
    "lost-updates": lambda defect, built: None,  # the learning rate of the training is the defect
    "tiny-loss": _tiny_loss,
    "detached": _changed_mlp(torch.Tensor.detach),
    "growth": _growth,
    "nan": _nan,
    "wrong-kernel": _wrong_kernel,
    "large-weight": _large_weight,
    "unmoved-scales": _unmoved_scales,
    "squeezed-gradient": _changed_mlp(lambda x: _scaled(x, 2.0**-18)),
    "old-weight": _old_weight,
    "zeroed-weight": lambda defect, built: _on_weight(defect, built, torch.Tensor.zero_),
    "nan-gradient": _nan_gradient,
    "kept-gradient": _kept_gradient,
    "not-in-optimizer": _not_in_optimizer,
    "zero-loss": _zero_loss,
    "block-not-fp8": lambda defect, built: _leave_autocast(_block(defect, built)),
    "rising-rate": _rising_rate,
}
