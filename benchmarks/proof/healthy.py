"""Healthy trainings of many shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from models import (
    BLOCK_COUNTS,
    BLOCKS,
    FLOAT32_NORMS,
    HEADS,
    HIDDEN,
    MODELS,
    RECIPES,
    VOCABULARY,
    WINDOW,
    Built,
    ModelName,
    Precision,
    RecipeName,
    build,
)
from running import capability_of, start_process, with_statistics_every

from te_precision_callbacks.session import InspectSession

NewShape = Literal["adaln-zero", "frozen-blocks", "unfreezing", "curriculum", "encoder-decoder", "gan"]
Shape = (
    Literal["plain", "lora", "moe", "grouped", "warmup-decay", "accumulation", "ema", "resumed", "two-ranks", "long"]
    | NewShape
)


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
        often = "" if self.freq is None else f"-every{self.freq}"
        blocks = "" if self.count == BLOCKS else f"-{self.count}blocks"
        return f"{self.shape}-{self.model}-{self.recipe}-{self.precision}-{self.steps}{often}{blocks}-{self.seed}"


def all_healthy() -> Sequence[Healthy]:
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
    others: Sequence[tuple[Shape, ModelName, RecipeName, Precision, int, int | None]] = (
        ("plain", "bytes", "current", "bfloat16", 31, None),
        ("plain", "gpt", "mxfp8", "bfloat16", 31, 2),
        ("two-ranks", "bytes", "delayed", "float32", 31, None),
        ("two-ranks", "gpt", "mxfp8", "autocast", 21, 2),
        ("long", "bytes", "delayed", "float32", 500, None),
        ("long", "vit", "current", "autocast", 300, None),
        ("long", "gpt", "delayed", "autocast", 200, None),
        ("long", "llama", "blocks", "float32", 150, None),
    )
    for shape, model, recipe, precision, steps, freq in others:
        trainings.append(Healthy(shape, model, recipe, precision, steps, len(trainings), freq))
    for shape in get_args(NewShape):
        for at, recipe in enumerate(RECIPES):
            turn = len(trainings)
            model = MODELS[turn % len(MODELS)]
            precision = _precision(model, recipe, turn)
            if shape in ("encoder-decoder", "gan"):  # models of their own
                model, precision = "bytes", "autocast"
            trainings.append(Healthy(shape, model, recipe, precision, 61, turn, 2 if at % 2 else None, BLOCKS))
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

    def forward(self, x: torch.Tensor) -> Any:
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
            together = self.fc2(torch.nn.functional.gelu(self.fc1(torch.cat(parts), padded)), padded)
            mixed = list(torch.split(together, padded))
        else:
            mixed = [
                self.down[at](torch.nn.functional.gelu(self.up[at](part))) if len(part) else part
                for at, part in enumerate(parts)
            ]
        joined = torch.cat([part[:count] for part, count in zip(mixed, counts, strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (joined[back] * share[:, None]).view(x.shape)


class _WithNorm(torch.nn.Module):
    """Experts behind a norm."""

    def __init__(self, hidden: int, dtype: torch.dtype, *, grouped: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden, dtype=dtype)
        self.experts = Experts(hidden, 4, dtype, grouped=grouped)

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(x)
        if torch.is_autocast_enabled("cpu"):
            normed = normed.to(torch.get_autocast_dtype("cpu"))  # as NVFP4 needs it
        return self.experts(normed)


class _Gated(torch.nn.Module):
    """A layer behind a gate that begins at 0, and that the mean of the tokens opens, as in adaLN-zero."""

    def __init__(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.gate = torch.nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        torch.nn.init.zeros_(self.gate.weight)
        torch.nn.init.zeros_(self.gate.bias)

    def forward(self, x: torch.Tensor, *others: Any, **options: Any) -> Any:
        out = self.layer(x, *others, **options)
        gate = self.gate(x.mean(-2, keepdim=True))
        return (gate * out[0], *out[1:]) if isinstance(out, tuple) else gate * out


class _EncoderDecoder(torch.nn.Module):
    """Encoders and decoders in one list, which restores a sequence from its reverse."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        common = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
        kinds = [("encoder", "no_mask")] * 3 + [("decoder", "causal")] * 3
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                HIDDEN, 4 * HIDDEN, HEADS, layer_number=at, layer_type=kind, self_attn_mask_type=mask, **common
            )
            for at, (kind, mask) in enumerate(kinds, 1)
        )
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        encoded = self.embedding(tokens.flip(1))
        for layer in self.layers[:3]:
            encoded = layer(encoded)
        decoded = self.embedding(tokens.roll(1, 1))
        for layer in self.layers[3:]:
            decoded = layer(decoded, encoder_output=encoded, enc_dec_attn_mask_type="no_mask")
        return self.head(decoded)  # type: ignore[no-any-return]


class _Gan(Built):
    """A generator and a critic, each with an optimizer and a backward of its own."""

    of_critic: torch.optim.Optimizer

    def train_step(self) -> float:
        import transformer_engine.pytorch as te

        generator, critic = cast("torch.nn.ModuleList", self.model)
        total = 0.0
        for optimizer, is_real in ((self.of_critic, True), (self.optimizer, False)):
            with torch.autocast("cpu", torch.bfloat16), te.autocast(enabled=True, recipe=self.recipe):
                made = generator(torch.randn(32, 32).bfloat16())
                judged = critic(made.detach() if is_real else made)
                loss = torch.nn.functional.softplus(judged if is_real else -judged).mean()
                if is_real:
                    real = 1.0 + 0.5 * torch.randn(32, HIDDEN).bfloat16()
                    loss = loss + torch.nn.functional.softplus(-critic(real)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            self.model.zero_grad()
            total += loss.item()
        self.step += 1
        return total


def _gan(built: Built) -> Built:
    import transformer_engine.pytorch as te

    nets = []
    for sizes in ((32, 4 * HIDDEN, 4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN, 4 * HIDDEN, 32)):
        layers = [te.Linear(*pair) for pair in itertools.pairwise(sizes)]
        nets.append(torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU()))))
    nets[1].append(torch.nn.Linear(32, 1))
    built.model = torch.nn.ModuleList(nets)
    built.optimizer = torch.optim.Adam(nets[0].parameters(), 1e-4)
    gan = _Gan(**{field.name: getattr(built, field.name) for field in dataclasses.fields(Built)})
    gan.of_critic = torch.optim.Adam(nets[1].parameters(), 1e-4)
    return gan


def shaped(training: Healthy) -> Built:
    built = build(training.model, training.recipe, training.precision, training.seed, count=training.count)
    if training.shape == "gan":
        return _gan(built)
    if training.shape == "encoder-decoder":
        built.model = _EncoderDecoder()
        built.optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-3)
        batches = (torch.randint(VOCABULARY, (8, WINDOW)) for _ in itertools.count())
        built.batches = ((tokens, tokens) for tokens in batches)
    if training.shape in ("frozen-blocks", "unfreezing"):
        frozen = [built.model.get_submodule(block.path) for block in built.blocks[: training.count // 2]]
        for module in frozen:
            module.requires_grad_(False)
        trained = [weight for weight in built.model.parameters() if weight.requires_grad]
        built.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        if training.shape == "unfreezing":

            def unfreeze() -> None:
                if built.step == 30:
                    for module in frozen:
                        module.requires_grad_()
                        built.optimizer.add_param_group({"params": list(module.parameters())})

            built.after_step.append(unfreeze)
    if training.shape == "adaln-zero":
        dtype = next(built.model.parameters()).dtype
        for block in built.blocks:
            built.model.set_submodule(block.mlp, _Gated(built.model.get_submodule(block.mlp), dtype))
        built.optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-3)
    if training.shape == "curriculum":
        easy = itertools.cycle([next(built.batches) for _ in range(8)])
        hard = built.batches
        built.batches = iter(lambda: next(easy if built.step < 30 else hard), None)
    if training.shape == "lora":
        built.model.requires_grad_(False)
        for block in built.blocks:
            for path in block.linears[:2]:
                built.model.set_submodule(path, Lora(built.model.get_submodule(path)))
        built.optimizer = torch.optim.AdamW(
            [weight for weight in built.model.parameters() if weight.requires_grad], lr=3e-3
        )
    if training.shape in ("moe", "grouped"):
        dtype = next(built.model.parameters()).dtype
        for block in built.blocks[1::2]:
            built.model.set_submodule(block.mlp, _WithNorm(64, dtype, grouped=training.shape == "grouped"))
        built.optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-3)
    if training.shape == "accumulation":
        built.accumulate = 4
    if training.shape == "ema":
        weights = torch.nn.ParameterList(built.model.parameters())
        ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)  # type: ignore[no-untyped-call]
        averaged = torch.optim.swa_utils.AveragedModel(weights, multi_avg_fn=ema)
        built.after_step.append(lambda: averaged.update_parameters(weights))
    if training.shape == "warmup-decay":

        def rate(step: int) -> float:
            return step / 10 if step < 10 else 0.5 * (1 + math.cos(math.pi * (step - 10) / (training.steps - 11)))

        built.after_step.append(torch.optim.lr_scheduler.LambdaLR(built.optimizer, rate).step)
    return built


def _session(training: Healthy, built: Built, log_dir: Path) -> InspectSession:
    config = with_statistics_every(training.freq)
    return InspectSession(config, model=built.model, log_dir=log_dir, statistics_log="off")


def _steps(built: Built, session: InspectSession, count: int) -> None:
    for _ in range(count):
        session.log({"lr": built.optimizer.param_groups[0]["lr"], "loss": built.train_step()})
        session.step()


def train_healthy(training: Healthy, log_dir: Path) -> dict[str, Any]:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if training.shape == "two-ranks":
        with tempfile.TemporaryDirectory() as folder:  # over gloo
            arguments = training, log_dir, Path(folder) / "store"
            torch.multiprocessing.spawn(_rank, arguments, 2)  # type: ignore[attr-defined,no-untyped-call]
    elif training.shape == "resumed":
        _resumed(training, log_dir)
    else:
        built = shaped(training)
        with _session(training, built, log_dir) as session:
            _steps(built, session, training.steps)
    FP8GlobalStateManager.reset()
    return dataclasses.asdict(training)


def _resumed(training: Healthy, log_dir: Path) -> None:
    """Half of the steps, a checkpoint, and the other half in a new model."""
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    half = training.steps // 2
    built = shaped(training)
    with _session(training, built, log_dir) as session:
        _steps(built, session, half)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            parts = {"model": built.model.state_dict(), "optimizer": built.optimizer.state_dict()}
            torch.save({**parts, "session": session.state_dict()}, path)
            saved = torch.load(path, weights_only=False)
    again = shaped(training)
    for _ in range(half):
        next(again.batches)
    again.step = half
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    with _session(training, again, log_dir) as session:
        session.load_state_dict(saved["session"])
        _steps(again, session, training.steps - half)


def _rank(rank: int, training: Healthy, log_dir: Path, store: Path) -> None:
    import torch.distributed as dist

    start_process(capability_of(training.recipe))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    built = shaped(training)
    other = build(training.model, training.recipe, training.precision, training.seed + rank)
    built.batches = other.batches

    def average() -> None:
        for parameter in built.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

    built.after_backward.append(average)
    with _session(training, built, log_dir) as session:
        _steps(built, session, training.steps)
    dist.destroy_process_group()
