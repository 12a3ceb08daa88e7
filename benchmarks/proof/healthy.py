"""Healthy trainings of many shapes."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from models import BLOCK_COUNTS, BLOCKS, FLOAT32_NORMS, MODELS, RECIPES, Built, ModelName, Precision, RecipeName, build
from running import capability_of, start_process, with_statistics_every

from te_precision_callbacks.session import InspectSession

Shape = Literal[
    "plain", "lora", "moe", "grouped", "warmup-decay", "accumulation", "ema", "resumed", "two-ranks", "long"
]


@dataclass(frozen=True)
class Healthy:
    """A healthy training.

    Attributes:
        shape: kind of training.
        freq: every how many steps there are statistics; None: as the default config has it.
        count: of blocks in the model.
    """

    shape: Shape
    model: ModelName
    recipe: RecipeName
    precision: Precision
    steps: int
    seed: int
    freq: int | None = None
    count: int = BLOCKS

    @property
    def name(self) -> str:
        """Of its folder."""
        often = "" if self.freq is None else f"-every{self.freq}"
        blocks = "" if self.count == BLOCKS else f"-{self.count}blocks"
        return f"{self.shape}-{self.model}-{self.recipe}-{self.precision}-{self.steps}{often}{blocks}-{self.seed}"


def all_healthy() -> Sequence[Healthy]:
    """The trainings of the proof."""
    trainings: list[Healthy] = []
    lengths = (31, 21, 41, 31)
    for at, model in enumerate(MODELS):
        for recipe_at, recipe in enumerate((*RECIPES, "none")):
            turn = at + recipe_at
            precision = _precision(model, recipe, turn)
            freq = 2 if turn % 2 else None
            trainings.append(Healthy("plain", model, recipe, precision, lengths[turn % 4], len(trainings), freq))
    for at, model in enumerate(MODELS):
        for count_at, count in enumerate(count for count in BLOCK_COUNTS if count != BLOCKS):
            for twice in range(2):
                recipe = RECIPES[(at + count_at + 2 * twice) % len(RECIPES)]
                precision = _precision(model, recipe, count_at + twice)
                trainings.append(
                    Healthy("plain", model, recipe, precision, 31, len(trainings), (None, 2)[twice], count)
                )
    shapes: tuple[tuple[Shape, int], ...] = (
        ("lora", 31),
        ("moe", 31),
        ("grouped", 31),
        ("warmup-decay", 61),
        ("accumulation", 21),
        ("ema", 31),
        ("resumed", 40),
    )
    for shape, steps in shapes:
        for at in range(4):
            turn = len(trainings)
            recipe = RECIPES[(turn + at) % (3 if shape == "grouped" else 5)]
            model = MODELS[(turn + at // 2) % len(MODELS)]
            precision = _precision(model, recipe, at)
            if shape in ("moe", "grouped"):
                model = "bytes"
            trainings.append(Healthy(shape, model, recipe, precision, steps, turn, 2 if at % 2 else None))
    trainings.append(Healthy("plain", "bytes", "current", "bfloat16", 31, len(trainings)))
    trainings.append(Healthy("plain", "gpt", "mxfp8", "bfloat16", 31, len(trainings), 2))
    trainings.append(Healthy("two-ranks", "bytes", "delayed", "float32", 31, len(trainings)))
    trainings.append(Healthy("two-ranks", "gpt", "mxfp8", "autocast", 21, len(trainings), 2))
    trainings.append(Healthy("long", "bytes", "delayed", "float32", 500, len(trainings)))
    trainings.append(Healthy("long", "vit", "current", "autocast", 300, len(trainings)))
    trainings.append(Healthy("long", "gpt", "delayed", "autocast", 200, len(trainings)))
    trainings.append(Healthy("long", "llama", "blocks", "float32", 150, len(trainings)))
    return trainings


def _precision(model: ModelName, recipe: RecipeName, turn: int) -> Precision:
    if model in FLOAT32_NORMS and recipe == "nvfp4":
        return "bfloat16"
    return "autocast" if recipe == "nvfp4" or turn % 2 else "float32"


class Lora(torch.nn.Module):
    """A frozen layer with a trained low-rank product, initialized at zero."""

    def __init__(self, layer: torch.nn.Module, rank: int = 32) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.base_layer: Any = layer.requires_grad_(False)
        dtype = self.base_layer.weight.dtype
        inputs, outputs = self.base_layer.in_features, self.base_layer.out_features
        self.lora_a = te.Linear(inputs, rank, bias=False, params_dtype=dtype)
        self.lora_b = te.Linear(rank, outputs, bias=False, params_dtype=dtype)
        torch.nn.init.zeros_(self.lora_b.weight)

    @property
    def name(self) -> str | None:
        """Name of the layer, read by Transformer Engine."""
        return cast("str | None", self.base_layer.name)

    def forward(self, x: torch.Tensor, *others: Any, **options: Any) -> Any:
        beside = 2.0 * self.lora_b(self.lora_a(x))
        out = self.base_layer(x, *others, **options)
        return (out[0] + beside, *out[1:]) if isinstance(out, tuple) else out + beside


class Experts(torch.nn.Module):
    """A router and experts; most tokens go to the first experts, so others get none in many steps."""

    def __init__(self, hidden: int, count: int, dtype: torch.dtype, *, grouped: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.count, self.grouped = count, grouped
        self.router = torch.nn.Linear(hidden, count, dtype=dtype)
        with torch.no_grad():
            self.router.bias.copy_(2.5 * torch.arange(count, 0, -1))
        if grouped:
            self.fc1 = te.GroupedLinear(count, hidden, 2 * hidden, params_dtype=dtype)
            self.fc2 = te.GroupedLinear(count, 2 * hidden, hidden, params_dtype=dtype)
        else:
            self.up = torch.nn.ModuleList(te.Linear(hidden, 2 * hidden, params_dtype=dtype) for _ in range(count))
            self.down = torch.nn.ModuleList(te.Linear(2 * hidden, hidden, params_dtype=dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        shares = self.router(tokens).softmax(-1)
        share, expert = shares.max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.count).tolist()
        padded = [-(-count // 32) * 32 for count in counts]  # as FP8 needs them
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
            for part, size in zip(torch.split(tokens[order], counts), padded, strict=True)
        ]
        if self.grouped:
            together: torch.Tensor = self.fc2(torch.nn.functional.gelu(self.fc1(torch.cat(parts), padded)), padded)
            mixed = list(torch.split(together, padded))
        else:
            mixed = [
                self.down[at](torch.nn.functional.gelu(self.up[at](part))) if len(part) else part
                for at, part in enumerate(parts)
            ]
        joined = torch.cat([part[:count] for part, count in zip(mixed, counts, strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        out: torch.Tensor = (joined[back] * share[:, None]).view(x.shape)
        return out


class _WithNorm(torch.nn.Module):
    """Experts behind a norm."""

    def __init__(self, hidden: int, dtype: torch.dtype, *, grouped: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden, dtype=dtype)
        self.experts = Experts(hidden, 4, dtype, grouped=grouped)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        if torch.is_autocast_enabled("cpu"):
            normed = normed.to(torch.get_autocast_dtype("cpu"))  # as NVFP4 needs it
        out: torch.Tensor = self.experts(normed)
        return out


def _shaped(training: Healthy) -> Built:
    built = build(training.model, training.recipe, training.precision, training.seed, count=training.count)
    if training.shape == "lora":
        built.model.requires_grad_(False)
        for block in built.blocks:
            for path in block.linears[:2]:
                parent, _, name = path.rpartition(".")
                setattr(built.module(parent), name, Lora(built.module(path)))
        built.optimizer = torch.optim.AdamW(
            [weight for weight in built.model.parameters() if weight.requires_grad], lr=3e-3
        )
    if training.shape in ("moe", "grouped"):
        dtype = next(built.model.parameters()).dtype
        for block in built.blocks[1::2]:
            parent, _, name = block.mlp.rpartition(".")
            experts = _WithNorm(64, dtype, grouped=training.shape == "grouped")
            setattr(built.module(parent), name, experts)
        built.optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-3)
    if training.shape == "accumulation":
        built.accumulate = 4
    if training.shape == "ema":
        _average(built)
    if training.shape == "warmup-decay":
        _warm_up_and_decay(built, training.steps)
    return built


def _average(built: Built) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(
        torch.nn.ParameterList(built.model.parameters()),
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99),  # type: ignore[no-untyped-call]
    )
    weights = torch.nn.ParameterList(built.model.parameters())
    built.after_step.append(lambda: averaged.update_parameters(weights))


def _warm_up_and_decay(built: Built, steps: int) -> None:
    def rate(step: int) -> float:
        if step < 10:
            return step / 10
        return 0.5 * (1 + math.cos(math.pi * (step - 10) / (steps - 11)))

    schedule = torch.optim.lr_scheduler.LambdaLR(built.optimizer, rate)
    built.after_step.append(schedule.step)


def _steps(built: Built, session: InspectSession, count: int) -> None:
    for _ in range(count):
        rate = built.optimizer.param_groups[0]["lr"]
        session.log({"loss": built.train_step(), "lr": rate})
        session.step()


def train_healthy(training: Healthy, log_dir: Path) -> dict[str, Any]:
    """Train, and return the training's description."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if training.shape == "two-ranks":
        _on_two_ranks(training, log_dir)
    elif training.shape == "resumed":
        _resumed(training, log_dir)
    else:
        built = _shaped(training)
        config = with_statistics_every(training.freq)
        with InspectSession(config, model=built.model, log_dir=log_dir, statistics_log="off") as session:
            _steps(built, session, training.steps)
    FP8GlobalStateManager.reset()
    return dataclasses.asdict(training)


def _resumed(training: Healthy, log_dir: Path) -> None:
    """Half of the steps, a checkpoint, and the other half in a new model."""
    import os

    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    config = with_statistics_every(training.freq)
    half = training.steps // 2
    built = _shaped(training)
    with InspectSession(config, model=built.model, log_dir=log_dir, statistics_log="off") as session:
        _steps(built, session, half)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            parts = {"model": built.model.state_dict(), "optimizer": built.optimizer.state_dict()}
            torch.save({**parts, "session": session.state_dict()}, path)
            saved = torch.load(path, weights_only=False)
    again = _shaped(training)
    for _ in range(half):
        next(again.batches)
    again.step = half
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    with InspectSession(config, model=again.model, log_dir=log_dir, statistics_log="off") as session:
        session.load_state_dict(saved["session"])
        _steps(again, session, training.steps - half)


def _on_two_ranks(training: Healthy, log_dir: Path) -> None:
    """Two processes over gloo, with gradients averaged."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = training, log_dir, Path(folder) / "store"
        torch.multiprocessing.spawn(_rank, arguments, 2)  # type: ignore[attr-defined,no-untyped-call]


def _rank(rank: int, training: Healthy, log_dir: Path, store: Path) -> None:
    import torch.distributed as dist

    start_process(capability_of(training.recipe))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    built = _shaped(training)
    other = build(training.model, training.recipe, training.precision, training.seed + rank)
    built.batches = other.batches

    def average() -> None:
        for parameter in built.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

    built.after_backward.append(average)
    config = with_statistics_every(training.freq)
    with InspectSession(config, model=built.model, log_dir=log_dir, statistics_log="off") as session:
        _steps(built, session, training.steps)
    dist.destroy_process_group()
