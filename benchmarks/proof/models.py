"""Twelve small models that learn, for planted defects and for healthy trainings.

    built = build("llama", "delayed", "autocast", seed=3)
    for _ in range(30):
        loss = built.train_step()

Each has alike blocks, a task with a loss that falls within some tens of steps, and AdamW. A step takes about a tenth of
a second on one core.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

ModelName = Literal[
    "bytes",
    "gpt",
    "llama",
    "vit",
    "mixer",
    "parallel",
    "post-norm",
    "sandwich",
    "linear-attention",
    "recurrent",
    "convolution",
    "neox",
]
RecipeName = Literal["delayed", "current", "blocks", "mxfp8", "nvfp4", "none"]
Precision = Literal["float32", "autocast", "bfloat16"]
MODELS: tuple[ModelName, ...] = get_args(ModelName)
HELD_BACK: tuple[ModelName, ...] = MODELS[4:]
"""Models by which no threshold was chosen."""

FLOAT32_NORMS: tuple[ModelName, ...] = ("llama", "mixer", "post-norm")
"""Models whose norms give float32 under autocast, which NVFP4 does not take."""

RECIPES: tuple[RecipeName, ...] = ("delayed", "current", "blocks", "mxfp8", "nvfp4")

HIDDEN, HEADS, BLOCKS = 64, 4, 8
BLOCK_COUNTS = (2, 4, 6, 8, 24)
VOCABULARY, WINDOW, BATCH = 64, 32, 4
CLASSES, PATCHES, PATCH = 16, 16, 32


def recipe_of(name: RecipeName, *, history: int | None = None) -> Any:
    """The recipe; None for none. ``history`` is the length of delayed scaling's history of largest magnitudes."""
    from transformer_engine.common import recipe

    classes: dict[RecipeName, Callable[[], Any]] = {
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=history or 16),
        "current": recipe.Float8CurrentScaling,
        "blocks": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
        "none": lambda: None,
    }
    return classes[name]()


@dataclass(frozen=True)
class Block:
    """One of the model's equal blocks.

    Attributes:
        path: of its module in the model; names of its layers begin with it.
        linears: the paths of its ``te.Linear`` that take the layer's activation as input.
        mlp: the path of the module that returns the MLP's output.
        grows: names of the weights that make the input of the MLP's second product.
        down: the name of the layer that has this product.
    """

    path: str
    linears: tuple[str, ...]
    mlp: str
    grows: tuple[str, ...]
    down: str


@dataclass
class Built:
    """A model with its data, optimizer and recipe.

    Attributes:
        blocks: its equal blocks, in execution order.
        loss_of: the loss of the model's output of a batch.
        after_backward: called between the backward and the optimizer's step.
        after_step: called after the optimizer's step.
        step: the number of the step that runs.
    """

    name: ModelName
    model: torch.nn.Module
    blocks: Sequence[Block]
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    optimizer: torch.optim.Optimizer
    recipe: Any
    precision: Precision
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    loss_scale: float = 1.0
    accumulate: int = 1
    step: int = 0

    def loss(self) -> torch.Tensor:
        import transformer_engine.pytorch as te

        device = next(self.model.parameters()).device
        inputs, targets = (tensor.to(device) for tensor in next(self.batches))
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "autocast"):
            with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                outputs = self.model(inputs)
        outputs = getattr(outputs, "logits", outputs)
        return torch.nn.functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())

    def train_step(self) -> float:
        """A step of the optimizer; gives the loss of its last batch."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(self.accumulate):
                loss = self.loss()
                (loss * (self.loss_scale / self.accumulate)).backward()  # type: ignore[no-untyped-call]
        for action in self.after_backward:
            action()
        self.optimizer.step()
        for action in self.after_step:
            action()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()


class _Attention(torch.nn.Module):
    """Attention of torch between two layers of Transformer Engine; ``first``: the class of the first."""

    def __init__(self, te: Any, dtype: torch.dtype, *, causal: bool, first: str = "LayerNormLinear") -> None:
        super().__init__()
        self.causal = causal
        self.qkv = getattr(te, first)(HIDDEN, 3 * HIDDEN, params_dtype=dtype)
        self.proj = te.Linear(HIDDEN, HIDDEN, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = self.mix(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))

    def mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


class _LinearAttention(_Attention):
    """Causal attention with positive features instead of a softmax."""

    def mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        features, of_keys = (torch.nn.functional.elu(part) + 1 for part in (query, key))
        shares = (features @ of_keys.transpose(-1, -2)).tril()
        return shares / shares.sum(-1, keepdim=True) @ value


class _Recurrence(torch.nn.Module):
    """A gated linear recurrence over the tokens, between two layers of Transformer Engine."""

    def __init__(self, te: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.gates = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, params_dtype=dtype)
        self.proj = te.Linear(HIDDEN, HIDDEN, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        keep, value, out = self.gates(x).chunk(3, -1)
        keep = keep.sigmoid()
        state = torch.zeros_like(value[:, 0])
        states = []
        for at in range(x.shape[1]):
            state = torch.lerp(value[:, at], state, keep[:, at])
            states.append(state)
        return self.proj(torch.stack(states, 1) * torch.nn.functional.silu(out))


class _Convolution(torch.nn.Module):
    """A convolution of each channel over the patches, and a product over the channels."""

    def __init__(self, te: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.across = torch.nn.Conv1d(HIDDEN, HIDDEN, 7, padding=3, groups=HIDDEN, dtype=dtype)
        self.proj = te.Linear(HIDDEN, HIDDEN, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.proj(self.across(x.transpose(1, 2)).transpose(1, 2).contiguous())


class _Block(torch.nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, attention: torch.nn.Module, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(x)
        return x + self.mlp(x)


class _PostNormBlock(torch.nn.Module):
    """Attention and an MLP, each with a norm behind its residual connection, as in BERT."""

    def __init__(self, te: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = _Attention(te, dtype, causal=False, first="Linear")
        self.mlp = _Mlp(te, dtype, first="Linear")
        self.norms = torch.nn.ModuleList(te.LayerNorm(HIDDEN, dtype=dtype) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norms[0](x + self.attention(x))
        return self.norms[1](x + self.mlp(x))


class _Mlp(torch.nn.Module):
    def __init__(self, te: Any, dtype: torch.dtype, first: str = "LayerNormLinear") -> None:
        super().__init__()
        self.fc1 = getattr(te, first)(HIDDEN, 4 * HIDDEN, params_dtype=dtype)
        self.fc2 = te.Linear(4 * HIDDEN, HIDDEN, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class _ParallelBlock(torch.nn.Module):
    """Grouped-query attention and an MLP in parallel behind one norm, as in GPT-J and PaLM."""

    def __init__(self, te: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = te.RMSNorm(HIDDEN, dtype=dtype)
        self.query = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=dtype)
        self.key_value = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=dtype)
        self.proj = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=dtype)
        self.mlp = torch.nn.Sequential(
            te.Linear(HIDDEN, 4 * HIDDEN, bias=False, params_dtype=dtype),
            torch.nn.SiLU(),
            te.Linear(4 * HIDDEN, HIDDEN, bias=False, params_dtype=dtype),
        )

    def forward(self, x: torch.Tensor) -> Any:
        behind = self.norm(x)
        heads = [
            projected.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for projected in (self.query(behind), self.key_value(behind))
        ]
        key, value = (half.repeat_interleave(2, 1) for half in heads[1].chunk(2, 1))
        mixed = torch.nn.functional.scaled_dot_product_attention(heads[0], key, value, is_causal=True)
        return x + self.proj(mixed.transpose(1, 2).flatten(2)) + self.mlp(behind)


class _GptBlock(torch.nn.Module):
    """A TransformerLayer, for inputs with the batch first."""

    def __init__(self, te: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(
            HIDDEN,
            2 * HIDDEN,
            HEADS,
            self_attn_mask_type="causal",
            attn_input_format="bshd",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class _Language(torch.nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], torch.nn.Module], count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(WINDOW, HIDDEN, dtype=dtype))
        self.blocks = torch.nn.ModuleList(block() for _ in range(count))
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=dtype)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Mixer(torch.nn.Module):
    """Mixes the patches of an image, without attention."""

    def __init__(self, te: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=dtype)
        self.up = te.Linear(2 * PATCHES, 4 * PATCHES, params_dtype=dtype)
        self.down = te.Linear(4 * PATCHES, 2 * PATCHES, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        across = self.norm(x).to(x.dtype).transpose(1, 2).contiguous()
        return self.down(torch.nn.functional.gelu(self.up(across))).transpose(1, 2)


class _Vision(torch.nn.Module):
    """Blocks over the patches of an image; the mean of the patches is classified."""

    def __init__(self, block: Callable[[], torch.nn.Module], count: int, patches: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.patches = torch.nn.Linear(PATCH, HIDDEN, dtype=dtype)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(patches, HIDDEN, dtype=dtype))
        self.blocks = torch.nn.ModuleList(block() for _ in range(count))
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=dtype)
        self.head = torch.nn.Linear(HIDDEN, CLASSES, dtype=dtype)

    def forward(self, images: torch.Tensor) -> Any:
        x = self.patches(images.to(self.positions.dtype)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def _converted(family: str, count: int, dtype: torch.dtype, **more: Any) -> torch.nn.Module:
    """A language model of transformers, converted to Transformer Engine by Accelerate."""
    import transformers
    from accelerate import Accelerator
    from accelerate.utils.transformer_engine import convert_model

    Accelerator(cpu=True)  # the conversion needs its state
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=count,
        num_attention_heads=HEADS,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=False,
        use_cache=False,
        **more,
    )
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        convert_model(model)
    return model


def _sequences(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens that follow a fixed permutation, except for 10 % of them."""
    draw = torch.Generator().manual_seed(seed)
    following = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed % 7))
    while True:
        tokens = torch.empty(BATCH, WINDOW + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(VOCABULARY, (BATCH,), generator=draw)
        for at in range(WINDOW):
            tokens[:, at + 1] = following[tokens[:, at]]
        noise = torch.rand(tokens.shape, generator=draw) < 0.1
        tokens = torch.where(noise, torch.randint(VOCABULARY, tokens.shape, generator=draw), tokens)
        yield tokens[:, :-1], tokens[:, 1:]


def _images(seed: int, patches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A pattern for each class, under noise."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, patches, PATCH, generator=torch.Generator().manual_seed(seed % 7))
    while True:
        classes = torch.randint(CLASSES, (2 * BATCH,), generator=draw)
        yield patterns[classes] + torch.randn(2 * BATCH, patches, PATCH, generator=draw), classes


_LLAMA_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)

_PARTS: Mapping[ModelName, tuple[str, tuple[str, ...], str, tuple[str, ...], str]] = {
    "bytes": ("blocks.{}", ("attention.proj",), "mlp", ("mlp.fc1_weight",), "mlp.fc2"),
    "gpt": (
        "blocks.{}.layer",
        ("self_attention.proj",),
        "layernorm_mlp",
        ("layernorm_mlp.fc1_weight",),
        "layernorm_mlp.fc2",
    ),
    "llama": (
        "model.layers.{}",
        _LLAMA_LINEARS,
        "mlp",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.down_proj",
    ),
    "vit": ("blocks.{}", ("attention.proj", "mlp.fc2"), "mlp", ("mlp.fc1.weight",), "mlp.fc2"),
    "mixer": (
        "blocks.{}",
        ("attention.up", "attention.down", "mlp.fc2"),
        "mlp",
        ("mlp.fc1.weight",),
        "mlp.fc2",
    ),
    "parallel": ("blocks.{}", ("query", "key_value", "proj", "mlp.2"), "mlp", ("mlp.0.weight",), "mlp.2"),
    "post-norm": (
        "blocks.{}",
        ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"),
        "mlp",
        ("mlp.fc1.weight",),
        "mlp.fc2",
    ),
    "sandwich": ("blocks.{}", ("attention.0.proj",), "mlp.0", ("mlp.0.fc1_weight",), "mlp.0.fc2"),
    "linear-attention": ("blocks.{}", ("attention.proj", "mlp.fc2"), "mlp", ("mlp.fc1.weight",), "mlp.fc2"),
    "recurrent": ("blocks.{}", ("attention.proj",), "mlp", ("mlp.fc1_weight",), "mlp.fc2"),
    "convolution": ("blocks.{}", ("attention.proj", "mlp.fc2"), "mlp", ("mlp.fc1.weight",), "mlp.fc2"),
    "neox": (
        "gpt_neox.layers.{}",
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "mlp",
        ("mlp.dense_h_to_4h.weight",),
        "mlp.dense_4h_to_h",
    ),
}
"""Model -> path of a block, and the rest of :class:`Block` below it."""


def _block_of(name: ModelName, number: int) -> Block:
    path, linears, mlp, grows, down = _PARTS[name]
    block = path.format(number)
    paths, weights = (tuple(f"{block}.{part}" for part in parts) for parts in (linears, grows))
    return Block(block, paths, f"{block}.{mlp}", weights, f"{block}.{down}")


def build(
    name: ModelName,
    recipe: RecipeName,
    precision: Precision,
    seed: int,
    *,
    rate: float = 1e-3,
    count: int = BLOCKS,
    history: int | None = None,
    device: str = "cpu",
) -> Built:
    """Build a model, its data and its optimizer from the seed.

    Args:
        precision: of the weights and of all operations outside FP8: ``autocast`` has weights in float32, and the rest
            in bfloat16.
        count: of blocks.
        history: see :func:`recipe_of`.
        device: where it trains.
    """
    import transformer_engine.pytorch as te

    torch.manual_seed(seed)
    random.seed(seed)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    makers: dict[ModelName, Callable[[], torch.nn.Module]] = {
        "bytes": lambda: _Language(
            lambda: _Block(
                mlp=te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", params_dtype=dtype),
                attention=_Attention(te, dtype, causal=True),
            ),
            count,
            dtype,
        ),
        "gpt": lambda: _Language(lambda: _GptBlock(te, dtype), count, dtype),
        "llama": lambda: _converted("Llama", count, dtype, num_key_value_heads=HEADS),
        "vit": lambda: _Vision(
            lambda: _Block(_Attention(te, dtype, causal=False), _Mlp(te, dtype)), count, PATCHES, dtype
        ),
        "mixer": lambda: _Vision(lambda: _Block(_Mixer(te, dtype), _Mlp(te, dtype)), count, 2 * PATCHES, dtype),
        "parallel": lambda: _Language(lambda: _ParallelBlock(te, dtype), count, dtype),
        "post-norm": lambda: _Vision(lambda: _PostNormBlock(te, dtype), count, PATCHES, dtype),
        "sandwich": lambda: _Language(
            lambda: _Block(
                torch.nn.Sequential(_Attention(te, dtype, causal=True), te.RMSNorm(HIDDEN, dtype=dtype)),
                torch.nn.Sequential(
                    te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="geglu", params_dtype=dtype),
                    te.RMSNorm(HIDDEN, dtype=dtype),
                ),
            ),
            count,
            dtype,
        ),
        "linear-attention": lambda: _Language(
            lambda: _Block(_LinearAttention(te, dtype, causal=True), _Mlp(te, dtype)), count, dtype
        ),
        "recurrent": lambda: _Language(
            lambda: _Block(_Recurrence(te, dtype), te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=dtype)),
            count,
            dtype,
        ),
        "convolution": lambda: _Vision(lambda: _Block(_Convolution(te, dtype), _Mlp(te, dtype)), count, PATCHES, dtype),
        "neox": lambda: _converted("GPTNeoX", count, dtype),
    }
    model = makers[name]().to(device)
    patches = {"vit": PATCHES, "mixer": 2 * PATCHES, "post-norm": PATCHES, "convolution": PATCHES}.get(name)
    batches = _sequences(seed) if patches is None else _images(seed, patches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    blocks = [_block_of(name, number) for number in range(count)]
    return Built(name, model, blocks, batches, optimizer, recipe_of(recipe, history=history), precision)
