"""Every matrix product of a model, against lists written from the model's configuration, and why it is not in FP8."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.utils.checkpoint
import transformer_engine.pytorch as te
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import convert_model
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor.nvfp4_tensor import get_rht_matrix

from te_precision_callbacks.accelerate import unconverted_layers
from te_precision_callbacks.coverage.coverage import Coverage, Reason
from te_precision_callbacks.coverage.micro_batches import NOT_CALLED
from te_precision_callbacks.coverage.operator_products import OperatorProducts
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import feature
from tests.fused_attention import emulate_kernel

BATCH, LENGTH, WIDTH, INNER, HEADS, WORDS = 16, 16, 64, 128, 4, 96
TOKENS = BATCH * LENGTH

WRITES_NOTHING: dict[str, Any] = {"statistics_log": "off", "records": "off", "strict": True}

Macs = dict[tuple[str, str, bool], int]
"""Layer, GEMM and whether it belongs to the backward -> multiply-adds."""


def linear(
    layer: str, inputs: int, outputs: int, *, rows: int = TOKENS, dgrad: bool = True, wgrad: bool = True
) -> Macs:
    """A layer with a weight: three products of the same size."""
    results = {(layer, "fprop", False): rows * inputs * outputs}
    results |= {(layer, "dgrad", True): rows * inputs * outputs} if dgrad else {}
    return results | ({(layer, "wgrad", True): rows * inputs * outputs} if wgrad else {})


def attention(layer: str, length: int = LENGTH, *, backward: bool = True) -> Macs:
    """Two products, and in the backward two for each of them."""
    first = BATCH * HEADS * length * length * (WIDTH // HEADS)
    results = {(layer, "qk", False): first, (layer, "pv", False): first}
    return results | ({(layer, "qk", True): 2 * first, (layer, "pv", True): 2 * first} if backward else {})


def lookup(*layers: str) -> Macs:
    return {(layer, "lookup", False): 0 for layer in layers}


def found(coverage: Coverage) -> Macs:
    """The products that have run, each of them once."""
    ran = [product for product in coverage if product.runs == "seen"]
    macs = {(product.layer, product.gemm, product.backward): product.macs for product in ran}
    assert len(macs) == len(ran)
    return macs


class Case:
    """A model, its input, and its products.

    Args:
        make: makes the model.
        batch: its input.
        products: written by hand.
        converted: whether Accelerate makes its linear layers Transformer Engine's.
    """

    def __init__(
        self, make: Callable[[], torch.nn.Module], batch: Callable[[], Any], products: Macs, *, converted: bool = True
    ) -> None:
        self.make, self.batch, self.products, self.converted = make, batch, products, converted

    def loss(self, model: torch.nn.Module) -> torch.Tensor:
        batch = self.batch()
        result: torch.Tensor = model(**batch).loss if isinstance(batch, Mapping) else model(batch).square().mean()
        return result


def words() -> torch.Tensor:
    return torch.arange(TOKENS).reshape(BATCH, LENGTH) % WORDS


def llama(layers: int = 2, **more: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            vocab_size=WORDS,
            **more,
        )
    )


def llama_attention(layer: str, *, backward: bool = True) -> Macs:
    parts: dict[str, bool] = {"dgrad": backward, "wgrad": backward}
    return {
        **linear(f"{layer}.q_proj", WIDTH, WIDTH, **parts),
        **linear(f"{layer}.k_proj", WIDTH, WIDTH // 2, **parts),
        **linear(f"{layer}.v_proj", WIDTH, WIDTH // 2, **parts),
        **attention(layer, backward=backward),
        **linear(f"{layer}.o_proj", WIDTH, WIDTH, **parts),
    }


def llama_layer(layer: str, *, backward: bool = True) -> Macs:
    parts: dict[str, bool] = {"dgrad": backward, "wgrad": backward}
    return {
        **llama_attention(f"{layer}.self_attn", backward=backward),
        **linear(f"{layer}.mlp.gate_proj", WIDTH, INNER, **parts),
        **linear(f"{layer}.mlp.up_proj", WIDTH, INNER, **parts),
        **linear(f"{layer}.mlp.down_proj", INNER, WIDTH, **parts),
    }


def mixtral_layer(layer: str) -> Macs:
    """Two experts for each token; their weights are one parameter, of which grouped products read a part each."""
    return {
        **llama_attention(f"{layer}.self_attn"),
        **linear(f"{layer}.mlp.gate", WIDTH, 4),
        **linear(f"{layer}.mlp.experts.gate_up_proj", WIDTH, 2 * INNER, rows=2 * TOKENS),
        **linear(f"{layer}.mlp.experts.down_proj", INNER, WIDTH, rows=2 * TOKENS),
    }


def small(**more: Any) -> dict[str, Any]:
    """The sizes of a model, under the names that most configurations have for them."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    return sizes | more


def text(labels: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    return lambda: {"input_ids": words(), "labels": labels()}


def mixtral() -> transformers.PreTrainedModel:
    sizes = small(num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def bert() -> transformers.PreTrainedModel:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**small(vocab_size=WORDS)))


def gpt2() -> transformers.PreTrainedModel:
    sizes = {"n_embd": WIDTH, "n_inner": INNER, "n_layer": 1, "n_head": HEADS, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def vit() -> transformers.PreTrainedModel:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**small(image_size=32, patch_size=8)))


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.ones(BATCH, 3, 32, 32), "labels": torch.zeros(BATCH, dtype=torch.int64)}


BERT, GPT2, PATCHES = "bert.encoder.layer.0", "transformer.h.0", 16 + 1

HUGGING_FACE = {
    "Llama": Case(
        llama,
        text(words),
        lookup("model.embed_tokens")
        | llama_layer("model.layers.0")
        | llama_layer("model.layers.1")
        | linear("lm_head", WIDTH, WORDS),
    ),
    "Mixtral": Case(
        mixtral,
        text(words),
        lookup("model.embed_tokens") | mixtral_layer("model.layers.0") | linear("lm_head", WIDTH, WORDS),
    ),
    "BERT": Case(
        bert,
        text(lambda: torch.zeros(BATCH, dtype=torch.int64)),
        {
            **lookup(*(f"bert.embeddings.{what}_embeddings" for what in ("word", "position", "token_type"))),
            **linear(f"{BERT}.attention.self.query", WIDTH, WIDTH),
            **linear(f"{BERT}.attention.self.key", WIDTH, WIDTH),
            **linear(f"{BERT}.attention.self.value", WIDTH, WIDTH),
            **attention(f"{BERT}.attention.self"),
            **linear(f"{BERT}.attention.output.dense", WIDTH, WIDTH),
            **linear(f"{BERT}.intermediate.dense", WIDTH, INNER),
            **linear(f"{BERT}.output.dense", INNER, WIDTH),
            **linear("bert.pooler.dense", WIDTH, WIDTH, rows=BATCH),
            **linear("classifier", WIDTH, 2, rows=BATCH),
        },
    ),
    "GPT-2": Case(
        gpt2,
        text(words),
        {
            **lookup("transformer.wte", "transformer.wpe"),
            **linear(f"{GPT2}.attn.c_attn", WIDTH, 3 * WIDTH),
            **attention(f"{GPT2}.attn"),
            **linear(f"{GPT2}.attn.c_proj", WIDTH, WIDTH),
            **linear(f"{GPT2}.mlp.c_fc", WIDTH, INNER),
            **linear(f"{GPT2}.mlp.c_proj", INNER, WIDTH),
            **linear("lm_head", WIDTH, WORDS),  # its weight is that of the embedding
        },
    ),
    "ViT": Case(
        vit,
        images,
        {
            **linear("vit.embeddings.patch_embeddings.projection", 3 * 8 * 8, WIDTH, rows=BATCH * 16, dgrad=False),
            **linear("vit.layers.0.attention.q_proj", WIDTH, WIDTH, rows=BATCH * PATCHES),
            **linear("vit.layers.0.attention.k_proj", WIDTH, WIDTH, rows=BATCH * PATCHES),
            **linear("vit.layers.0.attention.v_proj", WIDTH, WIDTH, rows=BATCH * PATCHES),
            **attention("vit.layers.0.attention", PATCHES),
            **linear("vit.layers.0.attention.o_proj", WIDTH, WIDTH, rows=BATCH * PATCHES),
            **linear("vit.layers.0.mlp.fc1", WIDTH, INNER, rows=BATCH * PATCHES),
            **linear("vit.layers.0.mlp.fc2", INNER, WIDTH, rows=BATCH * PATCHES),
            **linear("classifier", WIDTH, 2, rows=BATCH),
        },
    ),
}


def trained(
    case: Case,
    tmp_path: Path,
    model: torch.nn.Module | None = None,
    config: Any = None,
    *,
    steps: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unconverted: Mapping[str, str] | None = None,
) -> Coverage:
    """What a model's steps cover under a session."""
    model = case.make() if model is None else model
    with InspectSession(config, model=model, log_dir=tmp_path, **WRITES_NOTHING) as session:
        session.unconverted = unconverted or {}
        for _ in range(steps):
            with around():
                loss = case.loss(model)
            loss.backward()
            session.step()
        return session.coverage()


@pytest.mark.parametrize("name", ["Mixtral", "ViT"])
def test_products_of_a_model_without_transformer_engine(name: str, tmp_path: Path) -> None:
    case = HUGGING_FACE[name]
    coverage = trained(case, tmp_path)
    assert found(coverage) == case.products
    assert coverage.share("fp8") == 0
    assert coverage.share("fp32") == 1
    assert {product.reason for product in coverage if product.macs} == {Reason.NOT_TE}
    assert str(coverage).startswith("FP8 in 0 % of the multiply-adds")


@pytest.fixture
def accelerate_runs() -> Iterator[None]:
    """What its functions ask for."""
    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("accelerate_runs")
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT-2"])
def test_products_of_a_model_that_accelerate_has_converted(name: str, tmp_path: Path) -> None:
    """The products are the same, and exactly those of the layers that it converted run in FP8."""
    case = HUGGING_FACE[name]
    model = case.make()
    with torch.no_grad():
        convert_model(model)
    left = unconverted_layers(model)
    around = lambda: te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling())  # noqa: E731
    coverage = trained(case, tmp_path, model, around=around, unconverted=left)
    assert found(coverage) == case.products
    for product in coverage:
        linears = isinstance(dict(model.named_modules()).get(product.layer), te.Linear)
        assert product.is_low == linears, product
        if product.layer in left:
            assert (product.reason, product.reason_ref) == (Reason.NOT_CONVERTED, left[product.layer])
        elif product.macs and not linears:
            assert product.reason is Reason.NOT_TE


@pytest.mark.parametrize("name", ["BERT", "GPT-2"])
def test_torchs_own_counter_counts_as_many(name: str, tmp_path: Path) -> None:
    """It does not know the CPU's fused attention, nor grouped products."""
    case = HUGGING_FACE[name]
    model = case.make()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    coverage = trained(case, tmp_path, model)
    assert found(coverage) == case.products
    with FlopCounterMode(display=False) as counter:
        case.loss(model).backward()
    assert counter.get_total_flops() == 2 * coverage.macs()


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    torch._dynamo.reset()
    result: torch.nn.Module = torch.compile(model, backend="aot_eager")
    return result


@pytest.mark.slow
def test_a_compiled_model_has_the_same_products_and_stays_compiled(tmp_path: Path) -> None:
    case = HUGGING_FACE["GPT-2"]
    torch._dynamo.utils.counters.clear()
    model = compiled(case.make())
    coverage = trained(case, tmp_path, model)
    assert {key: macs for key, macs in found(coverage).items() if key[1] not in ("qk", "pv", "other")} == {
        key: macs for key, macs in case.products.items() if key[1] not in ("qk", "pv")
    }
    assert coverage.macs() == sum(case.products.values())
    frames = dict(torch._dynamo.utils.counters["frames"])
    assert frames["ok"] == frames["total"] > 0, "torch has compiled under the session"
    case.loss(model).backward()
    assert dict(torch._dynamo.utils.counters["frames"]) == frames, "and does not compile again after it"


class Layers(torch.nn.Module):
    """A GPT of Transformer Engine's layers, between an embedding and a head of torch's.

    Args:
        block: how each layer is called.
    """

    def __init__(self, recipe: Any = None, block: Callable[..., torch.Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.recipe, self.block = recipe, block
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                WIDTH, INNER, HEADS, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal"
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).transpose(0, 1).contiguous()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for layer in self.layers:
                x = self.block(layer, x)
        result: torch.Tensor = self.head(x)
        return result


def te_layer(layer: str) -> Macs:
    return {
        **linear(f"{layer}.self_attention.layernorm_qkv", WIDTH, 3 * WIDTH),
        **attention(f"{layer}.self_attention.core_attention"),
        **linear(f"{layer}.self_attention.proj", WIDTH, WIDTH),
        **linear(f"{layer}.layernorm_mlp.fc1", WIDTH, INNER),
        **linear(f"{layer}.layernorm_mlp.fc2", INNER, WIDTH),
    }


GPT = lookup("embedding") | te_layer("layers.0") | te_layer("layers.1") | linear("head", WIDTH, WORDS)
CURRENT = recipes.Float8CurrentScaling


def gpt(**more: Any) -> Case:
    return Case(lambda: Layers(CURRENT(), **more), words, GPT)


def in_fp8(macs: Macs) -> float:
    """The share of those products of Transformer Engine's linear layers."""
    low = sum(count for (layer, gemm, _), count in macs.items() if "layers" in layer and gemm not in ("qk", "pv"))
    return low / sum(macs.values())


def test_a_gpt_of_transformer_engine(tmp_path: Path) -> None:
    coverage = trained(gpt(), tmp_path)
    assert found(coverage) == GPT
    assert coverage.share("fp8") == in_fp8(GPT)
    assert coverage.share("fp8", gemm="wgrad", backward=True) == pytest.approx(
        1 - GPT["head", "wgrad", True] / sum(macs for (_, gemm, _), macs in GPT.items() if gemm == "wgrad")
    )
    reasons = {product.layer: product.reason for product in coverage if product.macs and not product.is_low}
    assert reasons == {
        "head": Reason.NOT_TE,
        **{f"layers.{number}.self_attention.core_attention": Reason.ATTENTION for number in (0, 1)},
    }
    assert [product.layer for product in coverage][:2] == ["embedding", "layers.0.self_attention.layernorm_qkv"]


def again(layer: Any, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    return result


def nested(layer: Any, x: torch.Tensor, *, outer: bool, inner: bool) -> torch.Tensor:
    return again(lambda given: again(layer, given, reentrant=inner), x, reentrant=outer)


TE_BLOCKS: dict[str, Callable[..., torch.Tensor]] = {
    "te.checkpoint": lambda layer, x: te.checkpoint(layer, x, use_reentrant=False),
    "te.checkpoint, reentrant": lambda layer, x: te.checkpoint(layer, x),
}
BLOCKS: dict[str, Callable[..., torch.Tensor]] = {
    **TE_BLOCKS,
    "reentrant": lambda layer, x: again(layer, x, reentrant=True),
    "not reentrant": lambda layer, x: again(layer, x, reentrant=False),
    "reentrant in reentrant": lambda layer, x: nested(layer, x, outer=True, inner=True),
    "reentrant in not reentrant": lambda layer, x: nested(layer, x, outer=False, inner=True),
    "not reentrant in reentrant": lambda layer, x: nested(layer, x, outer=True, inner=False),
    "not reentrant in not reentrant": lambda layer, x: nested(layer, x, outer=False, inner=False),
}


class Taught(torch.nn.Module):
    """A student, and a teacher that runs without gradients in the same forward: of Transformer Engine, and of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.student = torch.nn.ModuleList([te.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)])
        self.teacher = torch.nn.ModuleList([te.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher[1](self.teacher[0](x))
        result: torch.Tensor = self.student[1](self.student[0](x)) - wanted
        return result


def test_modules_of_a_model_that_is_not_called_itself(tmp_path: Path) -> None:
    """What torch computes between them is not seen, which the coverage says."""
    model = torch.nn.Sequential(te.Linear(32, 32), torch.nn.Linear(32, 32))
    with InspectSession(log_dir=tmp_path) as session:
        session.attach(model)
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
            first = model[0](torch.randn(32, 32))
        model[1](first).sum().backward()
        session.step()
        coverage = session.coverage()
    assert list(coverage.not_counted) == [NOT_CALLED]
    assert "not the model itself" in str(coverage)


def test_what_runs_without_gradients_in_a_step_is_not_counted(tmp_path: Path) -> None:
    coverage = trained(Case(Taught, lambda: torch.ones(TOKENS, WIDTH), {}), tmp_path)
    assert found(coverage) == {**linear("student.0", WIDTH, WIDTH, dgrad=False), **linear("student.1", WIDTH, WIDTH)}


@pytest.mark.usefixtures("backward_thread")
@pytest.mark.parametrize("block", TE_BLOCKS)
def test_what_a_checkpoint_computes_again_is_not_counted_again(block: str, tmp_path: Path) -> None:
    assert found(trained(gpt(block=BLOCKS[block]), tmp_path)) == GPT


class TorchLayers(torch.nn.Module):
    """Blocks of torch's layers, with a product without a weight, a loop over an autograd Function, and no checkpoint
    around the head.

    Args:
        block: how each block is called.
    """

    def __init__(self, block: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.block = block
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.GELU(), Scores(), torch.nn.Linear(INNER, WIDTH))
            for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.block(block, x)
        result: torch.Tensor = self.head(x)
        return result


class Gram(torch.autograd.Function):
    """``x @ x.T @ x``, with a backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x.t() @ x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ (x.t() @ x)


class Scores(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.t(), -1) @ x + Gram.apply(x)  # type: ignore[no-untyped-call]


def torch_block(path: str) -> Macs:
    """A linear layer, attention to itself, the Function, and another linear layer."""
    pairs = TOKENS * TOKENS * INNER
    return {
        **linear(f"{path}.0", WIDTH, INNER),
        **{(f"{path}.2", role, False): pairs for role in ("qk", "pv")},
        **{(f"{path}.2", role, True): 2 * pairs for role in ("qk", "pv")},
        (f"{path}.2", "other", False): 2 * pairs,
        (f"{path}.2", "other", True): 2 * TOKENS * INNER * INNER,
        **linear(f"{path}.3", INNER, WIDTH),
    }


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("block", ["none", *BLOCKS])
def test_torchs_layers_in_checkpoints_of_every_kind(block: str, tmp_path: Path) -> None:
    case = Case(lambda: TorchLayers(BLOCKS.get(block, lambda layer, x: layer(x))),
                lambda: torch.ones(TOKENS, WIDTH, requires_grad=True), {})  # fmt: skip
    expected = torch_block("blocks.0") | torch_block("blocks.1") | linear("head", WIDTH, WORDS)
    assert found(trained(case, tmp_path)) == expected


def test_operations_and_experts(tmp_path: Path) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ops = te.ops.Sequential(te.ops.Linear(WIDTH, INNER), te.ops.GELU(), te.ops.Linear(INNER, WIDTH))
            self.experts = te.GroupedLinear(2, WIDTH, INNER)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=CURRENT()):
                result: torch.Tensor = self.experts(self.ops(x), [16, TOKENS - 16])
                return result

    case = Case(Experts, lambda: torch.ones(TOKENS, WIDTH), {})
    coverage = trained(case, tmp_path)
    assert found(coverage) == {
        **linear("ops.0", WIDTH, INNER),  # te.ops computes the gradient of an input that needs none, too
        **linear("ops.2", INNER, WIDTH),
        **linear("experts.gemm_0", WIDTH, INNER, rows=16),
        **linear("experts.gemm_1", WIDTH, INNER, rows=TOKENS - 16),
    }
    assert coverage.share("fp8") == 1
    assert str(coverage) == "FP8 in 100 % of the multiply-adds (fprop 100, dgrad 100, wgrad 100)"
    assert {product.layer: product.family for product in coverage}["ops.2"] == "te_ops"


def test_frozen_parts(tmp_path: Path) -> None:
    """The first layer has no backward, the next one no dgrad where it begins, and the head a dgrad alone."""
    case = HUGGING_FACE["Llama"]
    model = case.make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.1") and "norm" not in name)
    coverage = trained(case, tmp_path, model)
    first = llama_layer("model.layers.0", backward=False)
    second = llama_layer("model.layers.1")
    for name in ("q_proj", "k_proj", "v_proj"):
        del second[f"model.layers.1.self_attn.{name}", "dgrad", True]
    head = linear("lm_head", WIDTH, WORDS, wgrad=False)
    assert found(coverage) == lookup("model.embed_tokens") | first | second | head
    never = {(product.layer, product.gemm): product.not_run for product in coverage if product.runs == "never"}
    assert never["lm_head", "wgrad"] == "frozen weight"
    assert never == {(product.layer, product.gemm): product.why for product in coverage if product.runs == "never"}
    assert never["model.layers.1.self_attn.q_proj", "dgrad"] == "input needs no gradient"
    assert never["model.layers.0.mlp.up_proj", "wgrad"] == "frozen weight"


Schedule = Callable[[torch.nn.Module, Callable[[int], Any]], None]
"""Runs the micro-batches of a step, of which it is given the inputs."""


def one_by_one(model: torch.nn.Module, batch: Callable[[int], Any]) -> None:
    for number in range(4):
        model(batch(number)).square().mean().backward()


def interleaved(model: torch.nn.Module, batch: Callable[[int], Any]) -> None:
    """As the first stage of a pipeline with one forward and one backward in turn."""
    waiting = [model(batch(number)).square().mean() for number in range(2)]
    for number in range(2, 4):
        waiting.append(model(batch(number)).square().mean())
        waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()


def backwards_in_the_other_order(model: torch.nn.Module, batch: Callable[[int], Any]) -> None:
    for loss in reversed([model(batch(number)).square().mean() for number in range(4)]):
        loss.backward()


def together(model: torch.nn.Module, batch: Callable[[int], Any]) -> None:
    """One backward for several forwards."""
    for first in (0, 2):
        sum(model(batch(first + number)).square().mean() for number in range(2)).backward()  # type: ignore[union-attr]


def with_a_forward_that_is_thrown_away(model: torch.nn.Module, batch: Callable[[int], Any]) -> None:
    model(batch(0))
    for number in range(1, 4):
        model(batch(number)).square().mean().backward()


SCHEDULES: dict[str, Schedule] = {
    schedule.__name__: schedule
    for schedule in (
        one_by_one,
        interleaved,
        backwards_in_the_other_order,
        together,
        with_a_forward_that_is_thrown_away,
    )
}


def counted(
    model: torch.nn.Module, run: Callable[[], None], folder: Path, looked: list[str] | None = None, **more: Any
) -> Coverage:
    """What a step covers in which ``run`` trains; with the operators of torch that were looked at."""
    with (
        pytest.MonkeyPatch.context() as patch,
        InspectSession(None, model=model, log_dir=folder, **WRITES_NOTHING, **more) as session,
    ):
        if looked is not None:
            look = OperatorProducts.look
            patch.setattr(
                OperatorProducts, "look", lambda self, name, *given: (looked.append(name), look(self, name, *given))
            )
        run()
        session.step()
        return session.coverage()


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize(
    ("schedule", "block"),
    [*((schedule, "reentrant") for schedule in SCHEDULES), ("interleaved", "none"),
     ("backwards_in_the_other_order", "not reentrant")],
)  # fmt: skip
def test_one_micro_batch_is_looked_at_and_counts_for_all(schedule: str, block: str, tmp_path: Path) -> None:
    def batch(number: int) -> torch.Tensor:
        return torch.full((TOKENS, WIDTH), float(number), requires_grad=True)

    model = TorchLayers(BLOCKS.get(block, lambda layer, x: layer(x)))
    first: list[str] = []
    counted(model, lambda: model(batch(0)).square().mean().backward(), tmp_path / "one", first)
    looked: list[str] = []
    coverage = counted(model, lambda: SCHEDULES[schedule](model, batch), tmp_path / "all", looked)
    expected = torch_block("blocks.0") | torch_block("blocks.1") | linear("head", WIDTH, WORDS)
    thrown = schedule == with_a_forward_that_is_thrown_away.__name__
    assert found(coverage) == {key: (3 if thrown and key[2] else 4) * macs for key, macs in expected.items()}
    assert not coverage.not_counted
    most = 2 if thrown or schedule == together.__name__ else 1
    assert looked.count("aten::addmm") <= most * first.count("aten::addmm")


@pytest.mark.parametrize("checkpoint", ["none", *TE_BLOCKS])
def test_layers_of_transformer_engine_in_several_micro_batches(checkpoint: str, tmp_path: Path) -> None:
    """Their GEMMs are counted each time, their attention in torch once."""
    block = TE_BLOCKS.get(checkpoint, lambda layer, x: layer(x))
    case, model = gpt(), Layers(CURRENT(), block)
    looked: list[str] = []
    coverage = counted(model, lambda: [case.loss(model).backward() for _ in range(3)] and None, tmp_path, looked)
    assert found(coverage) == {key: 3 * macs for key, macs in GPT.items()}
    assert looked.count("aten::embedding") == 1


class Experts(torch.nn.Module):
    """Sends each row to one of two layers, by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, INNER) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:, 0] > 0
        return self.experts[0](x[first]).sum() + self.experts[1](x[~first]).sum()


def test_sizes_that_depend_on_values_are_looked_at_in_each_micro_batch(tmp_path: Path) -> None:
    model, rows = Experts(), [3, 7, 5]

    def run() -> None:
        for count in rows:
            model(torch.ones(10, WIDTH) * torch.where(torch.arange(10) < count, 1, -1)[:, None]).backward()

    expected = linear("experts.0", WIDTH, INNER, rows=sum(rows), dgrad=False)
    expected |= linear("experts.1", WIDTH, INNER, rows=30 - sum(rows), dgrad=False)
    assert found(counted(model, run, tmp_path)) == expected


def test_models_that_follow_each_other_and_one_that_is_called_twice(tmp_path: Path) -> None:
    """As of a generator and a discriminator, whose parameters are frozen in turn."""
    first, second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, INNER)
    model = torch.nn.ModuleDict({"first": first, "second": second})

    def run() -> None:
        for _ in range(2):
            made = first(torch.ones(TOKENS, WIDTH))
            (second(made.detach()).sum() + second(torch.ones(TOKENS, WIDTH)).sum()).backward()
            second.requires_grad_(False)
            second(made).sum().backward()
            second.requires_grad_(True)

    coverage = counted({"a": first, "b": second}, run, tmp_path)  # type: ignore[arg-type]
    names = {layer for layer, _, _ in found(coverage)}
    assert len(names) == 2, model
    macs = {(gemm, backward): 0 for _, gemm, backward in found(coverage)}
    for (layer, gemm, backward), count in found(coverage).items():
        if layer.startswith("b"):
            macs[gemm, backward] = count // (TOKENS * WIDTH * INNER)
    assert macs == {("fprop", False): 6, ("wgrad", True): 4, ("dgrad", True): 2}
    [wgrad] = [
        count for (layer, gemm, _), count in found(coverage).items() if layer.startswith("a") and gemm == "wgrad"
    ]
    assert wgrad == 2 * TOKENS * WIDTH * WIDTH


REASONS: dict[str, tuple[Any, Any, Reason, str]] = {
    "a feature": (
        CURRENT(),
        {"kept": feature("DisableFP8GEMM", ["layers.0.self_attention.proj"], gemms=["dgrad"])},
        Reason.SECTION,
        "DisableFP8GEMM in the config mapping (section 'kept')",
    ),
    "a feature that replaces": (
        CURRENT(),
        {"fake": feature("FakeQuant", ["layers.0.self_attention.proj"], quant_format="FP8E4M3", gemms=["dgrad"],
                         tensors=["gradient"])},
        Reason.SECTION,
        "FakeQuant in the config mapping (section 'fake')",
    ),
    "no autocast": (None, None, Reason.NO_AUTOCAST, "runs inside te.autocast(enabled=False)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_why_a_gemm_is_not_in_low_precision(case: str, tmp_path: Path) -> None:
    recipe, config, reason, ref = REASONS[case]
    config = config or {
        "watched": feature("LogTensorStats", ["layers.1.self_attention.proj"], tensors=["weight"], stats=["max"])
    }
    coverage = trained(gpt(), tmp_path, Layers(recipe), config)
    [dgrad] = [
        product for product in coverage if product.layer == "layers.0.self_attention.proj" and product.gemm == "dgrad"
    ]
    assert (dgrad.precision, dgrad.reason, dgrad.reason_ref) == ("fp32", reason, ref)


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_recipe_with_a_backward_in_high_precision(
    by_environment: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = te.Linear(WIDTH, INNER)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=CURRENT(backward_override="high_precision")):
                result: torch.Tensor = self.fc(x)
                return result

    config = {"watched": feature("LogTensorStats", ["fc"], tensors=["activation"], stats=["max"])}
    coverage = trained(Case(Net, lambda: torch.ones(TOKENS, WIDTH, requires_grad=True), {}), tmp_path, config=config)
    stated = {product.gemm: (product.precision, product.reason, product.reason_ref) for product in coverage}
    override = ("fp32", Reason.BACKWARD_OVERRIDE, "backward_override='high_precision'")
    if by_environment:
        override = ("fp32", Reason.ENVIRONMENT, "NVTE_BACKWARD_OVERRIDE=high_precision")
    assert stated == {"fprop": ("fp8", None, ""), "dgrad": override, "wgrad": override}


def test_it_is_seen_once_and_torch_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    look = OperatorProducts.look
    monkeypatch.setattr(
        OperatorProducts, "look", lambda self, name, *given: (looked.append(name), look(self, name, *given))
    )
    case, model = HUGGING_FACE["BERT"], HUGGING_FACE["BERT"].make()
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off") as session:
        case.loss(model).backward()
        assert looked
        session.step()
        looked.clear()
        case.loss(model).backward()
        session.step()
        assert not looked
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_copies_of_a_model_run_as_themselves(tmp_path: Path) -> None:
    """A copy that is made before the first step's end, as of averaged weights."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).sum()

    model, x = Module(), torch.ones(TOKENS, WIDTH)
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off"):
        other = copy.deepcopy(model)
        weights = torch.optim.swa_utils.AveragedModel(model)
    assert torch.equal(weights(x), model(x))
    torch.nn.init.zeros_(other.fc.weight)
    torch.nn.init.zeros_(other.fc.bias)
    assert other(x).abs().sum() == other.training_step(x) == 0
    assert model.training_step(x) != 0


def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [HUGGING_FACE["Mixtral"].make()]
    models.append(copy.deepcopy(models[0]))
    case = HUGGING_FACE["Mixtral"]
    with InspectSession(None, model=models[1], log_dir=tmp_path, statistics_log="off") as session:
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            case.loss(model).backward()
            optimizer.step()
        session.step()
    assert session.coverage()
    for first, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, other)


def test_an_evaluation_before_the_first_step_is_not_counted(tmp_path: Path) -> None:
    case, model = HUGGING_FACE["Llama"], HUGGING_FACE["Llama"].make()
    with InspectSession(None, model=model, log_dir=tmp_path, **WRITES_NOTHING) as session:
        with torch.no_grad():
            case.loss(model)
        session.observing = False
        case.loss(model)
        session.observing = True
        case.loss(model).backward()
        session.step()
    assert found(session.coverage()) == case.products


def test_other_peoples_modes_and_autocast(tmp_path: Path) -> None:
    """A cast weight is still that weight, and what surrounds the model still works."""
    case, model = HUGGING_FACE["Llama"], HUGGING_FACE["Llama"].make()
    with InspectSession(None, model=model, log_dir=tmp_path, **WRITES_NOTHING) as session:
        with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
            case.loss(model).backward()
        session.step()
    assert found(session.coverage()) == case.products
    assert session.coverage().share("bf16") == 1
    assert counter.get_total_flops() > 0


def test_products_outside_of_any_layer_and_with_no_weight(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(WIDTH, INNER))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = functional.linear(x, self.table.t())
            return torch.einsum("nd,md->nm", hidden, hidden)

    coverage = trained(Case(Odd, lambda: torch.ones(TOKENS, WIDTH), {}), tmp_path)
    pairs = TOKENS * TOKENS * INNER
    assert found(coverage) == {
        **linear("odd.table", WIDTH, INNER, dgrad=False),
        ("odd", "other", False): pairs,
        ("odd", "other", True): 2 * pairs,
    }


FUSED = {
    "delayed scaling": ((10, 0), recipes.DelayedScaling, "FP8"),
    "MXFP8": ((10, 0), recipes.MXFP8BlockScaling, "MXFP8"),
}


@pytest.mark.parametrize("name", FUSED)
def test_attention_in_low_precision(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Transformer Engine's fused attention, in the forward and in the backward."""
    emulate_kernel(monkeypatch)
    capability, recipe, word = FUSED[name]
    length = 128  # a block of MXFP8
    with any_capability():
        stand_for(capability)
        layer = te.MultiheadAttention(
            WIDTH, HEADS, kv_channels=32, attention_dropout=0.0, params_dtype=torch.bfloat16, fuse_qkv_params=True
        )
        config = {"watched": feature("LogTensorStats", ["qkv"], tensors=["weight"], stats=["max"])}
        with InspectSession(config, model=layer, log_dir=tmp_path, statistics_log="off") as session:
            inputs = torch.ones(length, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(enabled=True, recipe=recipe(fp8_dpa=True)):
                out = layer(inputs, attn_mask_type="no_mask")
            out.sum().backward()
            session.step()
    first = BATCH * HEADS * length * length * 32
    coverage = [product for product in session.coverage() if product.family == "attention"]
    assert {(product.gemm, product.backward): product.macs for product in coverage} == {
        ("qk", False): first,
        ("pv", False): first,
        ("qk", True): 2 * first,
        ("pv", True): 2 * first,
    }
    assert {product.layer for product in coverage} == {"multihead_attention.core_attention"}
    assert all(text.startswith(word) for product in coverage for text in product.operands.values()), coverage
    assert {product.reason for product in coverage} == {None}


def test_the_first_nvfp4_of_a_process_has_no_product_of_its_own_making(tmp_path: Path) -> None:
    """Transformer Engine multiplies once for the matrix of the Hadamard transform, in the first forward."""
    get_rht_matrix.cache_clear()
    with any_capability():
        stand_for((10, 0))
        layer = te.Linear(WIDTH, INNER, params_dtype=torch.bfloat16)
        with InspectSession(model=layer, log_dir=tmp_path, require="nvfp4 >= 100%", **WRITES_NOTHING) as session:
            with te.autocast(enabled=True, recipe=recipes.NVFP4BlockScaling()):
                out = layer(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16))
            out.sum().backward()
            session.step()
    assert get_rht_matrix.cache_info().misses
    assert {product.gemm for product in session.coverage() if product.macs} == {"fprop", "wgrad"}


def test_attention_of_a_derived_class(tmp_path: Path) -> None:
    """As Megatron Core derives one: its parts have its name too."""

    class Attention(te.DotProductAttention):
        pass

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = Attention(HEADS, WIDTH // HEADS, attention_dropout=0.0, attn_mask_type="no_mask")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.core(x, x, x)
            return result

    inputs = torch.ones(LENGTH, BATCH, HEADS, WIDTH // HEADS, requires_grad=True)
    assert found(trained(Case(Net, lambda: inputs, {}), tmp_path)) == attention("core")


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("checkpoint", ["none", *TE_BLOCKS])
def test_attention_by_a_kernel_that_tells_nothing(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted by the sizes of its input, as that of flash-attn, whose kernels call no operator of torch's."""
    look = OperatorProducts.look

    def see_no_attention(self: OperatorProducts, name: str, arguments: Any, result: Any) -> None:
        if name not in ("aten::bmm", "aten::baddbmm"):
            look(self, name, arguments, result)

    monkeypatch.setattr(OperatorProducts, "look", see_no_attention)
    case, model = gpt(), Layers(CURRENT(), TE_BLOCKS.get(checkpoint, lambda layer, x: layer(x)))
    coverage = counted(model, lambda: [case.loss(model).backward() for _ in range(2)] and None, tmp_path)
    assert found(coverage) == {key: 2 * macs for key, macs in GPT.items()}
    [product] = [item for item in coverage if item.layer.startswith("layers.1") and item.gemm == "pv" and item.backward]
    assert (product.precision, product.reason) == ("fp32", Reason.ATTENTION)
    assert "counted by its sizes" in product.reason_ref


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("second_thread", "one_rank")
@pytest.mark.parametrize("block", ["none", "not reentrant"])
def test_tensor_parallel_layers_of_torch(block: str, tmp_path: Path) -> None:
    """Their operators are those of a DTensor, which runs others on its shards."""
    around = BLOCKS.get(block, lambda layer, x: layer(x))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, WIDTH))
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.blocks:
                x = around(part, x)
            return x

    model = Net()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for part in model.blocks:
        parallelize_module(part, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    coverage = counted(
        model, lambda: one_by_one(model, lambda _: torch.ones(TOKENS, WIDTH, requires_grad=True)), tmp_path
    )
    expected: Macs = {}
    for number in (0, 1):
        expected |= linear(f"blocks.{number}.0", WIDTH, INNER) | linear(f"blocks.{number}.2", INNER, WIDTH)
    assert found(coverage) == {key: 4 * macs for key, macs in expected.items()}


def test_micro_batches_of_other_sizes_are_looked_at_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER))
    rows = [4, 8, 4, 8, 8]
    looked: list[str] = []

    def run() -> None:
        for count in rows:
            model(torch.ones(count, WIDTH)).sum().backward()

    coverage = counted(model, run, tmp_path, looked)
    assert found(coverage) == linear("0", WIDTH, INNER, rows=sum(rows), dgrad=False)
    assert looked.count("aten::addmm") == 2
    assert {product.calls for product in coverage if product.macs} == {len(rows)}


class Skipping(torch.nn.Module):
    """Leaves a layer out if a number in its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if float(x.detach().sum()) > 0 else x


def test_another_way_through_the_model_is_noticed(tmp_path: Path) -> None:
    model = Skipping()
    torch.nn.init.eye_(model.layers[0].weight)
    torch.nn.init.zeros_(model.layers[0].bias)

    def run(*signs: int) -> None:
        for sign in signs:
            model(sign * torch.ones(TOKENS, WIDTH)).sum().backward()

    coverage = counted(model, lambda: run(1, -1, -1, 1), tmp_path)
    assert found(coverage)["layers.1", "fprop", False] == 2 * TOKENS * WIDTH * WIDTH
    assert not coverage.not_counted
    coverage = counted(model, lambda: run(1, -1), tmp_path)
    [what] = coverage.not_counted
    assert "1 of 2 micro-batches took another way" in what
    assert what in str(coverage)
    assert "% of the multiply-adds, an estimate" in str(coverage)
