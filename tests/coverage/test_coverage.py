"""Every matrix product of a model, against lists written from the model's configuration, and why it is not in FP8."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from torch.utils.flop_counter import FlopCounterMode
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor.nvfp4_tensor import get_rht_matrix

from te_precision_callbacks.accelerate import unconverted_layers
from te_precision_callbacks.coverage.coverage import Coverage, Product, Reason
from te_precision_callbacks.coverage.micro_batches import NOT_CALLED
from te_precision_callbacks.coverage.operator_products import OperatorProducts
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import feature
from tests.functions import Net
from tests.fused_attention import emulate_kernel

BATCH, LENGTH, WIDTH, INNER, HEADS, WORDS = 16, 16, 64, 128, 4, 96
TOKENS = BATCH * LENGTH

WRITES_NOTHING: dict[str, Any] = {"statistics_log": "off", "records": "off", "strict": True}

Macs = dict[tuple[str, str, bool], int]
"""Layer, GEMM and whether it belongs to the backward -> multiply-adds."""


def linear(
    layer: str, inputs: int, outputs: int, *, rows: int = TOKENS, dgrad: bool = True, wgrad: bool = True
) -> Macs:
    results = {(layer, "fprop", False): rows * inputs * outputs}
    results |= {(layer, "dgrad", True): rows * inputs * outputs} if dgrad else {}
    return results | ({(layer, "wgrad", True): rows * inputs * outputs} if wgrad else {})


def attention(layer: str, length: int = LENGTH, *, backward: bool = True) -> Macs:
    first = BATCH * HEADS * length * length * (WIDTH // HEADS)
    return {
        (layer, role, in_backward): (1 + in_backward) * first
        for role in ("qk", "pv")
        for in_backward in ([False, True] if backward else [False])
    }


def lookup(*layers: str) -> Macs:
    return {(layer, "lookup", False): 0 for layer in layers}


def found(coverage: Coverage) -> Macs:
    ran = [product for product in coverage if product.runs == "seen"]
    macs = {(product.layer, product.gemm, product.backward): product.macs for product in ran}
    assert len(macs) == len(ran)
    return macs


class Case(NamedTuple):
    make: Callable[[], torch.nn.Module]
    batch: Callable[[], Any]
    products: Any = None

    def loss(self, model: torch.nn.Module) -> torch.Tensor:
        batch = self.batch()
        return model(**batch).loss if isinstance(batch, Mapping) else model(batch).square().mean()


def ones() -> torch.Tensor:
    return torch.ones(TOKENS, WIDTH)


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
    """Two experts for each token; their weights are one parameter, and each grouped product reads a part of it."""
    return {
        **llama_attention(f"{layer}.self_attn"),
        **linear(f"{layer}.mlp.gate", WIDTH, 4),
        **linear(f"{layer}.mlp.experts.gate_up_proj", WIDTH, 2 * INNER, rows=2 * TOKENS),
        **linear(f"{layer}.mlp.experts.down_proj", INNER, WIDTH, rows=2 * TOKENS),
    }


def small(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_hidden_layers": 1, **more
    }  # fmt: skip


def text(labels: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    return lambda: {"input_ids": words(), "labels": labels()}


def mixtral() -> transformers.PreTrainedModel:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**small(num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4))
    )


def gpt2() -> transformers.PreTrainedModel:
    sizes = {"n_embd": WIDTH, "n_inner": INNER, "n_layer": 1, "n_head": HEADS, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


CLASSES = torch.zeros(BATCH, dtype=torch.int64)


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
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**small(vocab_size=WORDS))),
        text(lambda: CLASSES),
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
            **linear("lm_head", WIDTH, WORDS),  # its weight is the embedding's
        },
    ),
    "ViT": Case(
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**small(image_size=32, patch_size=8))),
        lambda: {"pixel_values": torch.ones(BATCH, 3, 32, 32), "labels": CLASSES},
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


def counted(
    model: torch.nn.Module,
    run: Callable[[], object],
    folder: Path,
    config: Any = None,
    *,
    unconverted: Mapping[str, str] | None = None,
    **options: Any,
) -> Coverage:
    with InspectSession(config, model=model, log_dir=folder, **WRITES_NOTHING, **options) as session:
        session.unconverted = unconverted or {}
        run()
        session.step()
        return session.coverage()


def trained(
    case: Case,
    tmp_path: Path,
    model: torch.nn.Module | None = None,
    config: Any = None,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Coverage:
    model = case.make() if model is None else model

    def run() -> None:
        with around():
            loss = case.loss(model)
        loss.backward()

    return counted(model, run, tmp_path, config, **options)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    look = OperatorProducts.note
    monkeypatch.setattr(
        OperatorProducts, "note", lambda self, name, *given: (names.append(name), look(self, name, *given))
    )
    return names


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
    """Arguments that its functions need."""
    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("accelerate_runs")
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT-2"])
def test_products_of_a_model_that_accelerate_has_converted(name: str, tmp_path: Path) -> None:
    case = HUGGING_FACE[name]
    model = case.make()
    with torch.no_grad():
        convert_model(model)
    left = unconverted_layers(model)
    coverage = trained(case, tmp_path, model, around=in_fp8, unconverted=left)
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
    """In the forward, for each module. It supports neither the CPU's fused attention nor grouped products."""
    case = HUGGING_FACE[name]
    model = case.make()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    coverage = trained(case, tmp_path, model)
    assert found(coverage) == case.products
    with FlopCounterMode(display=False) as counter:
        loss = case.loss(model)
    assert counter.get_total_flops() == 2 * coverage.macs(backward=False)
    forwards = [product for product in coverage if product.macs and not product.backward]
    for path in {product.layer for product in forwards}:
        of_module = counter.get_flop_counts()[f"{type(model).__name__}.{path}"]
        inside = (product.macs for product in forwards if f"{product.layer}.".startswith(f"{path}."))
        assert sum(of_module.values()) == 2 * sum(inside), path
    # Its modules are not compared in the backward: where an input needs no gradient, as in BERT's keys, its
    # ModuleTracker adds the products of other modules.
    with counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * coverage.macs(backward=True)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_products_and_stays_compiled(tmp_path: Path) -> None:
    case = HUGGING_FACE["GPT-2"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = torch.compile(case.make(), backend="aot_eager")
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
        return self.head(x)


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


def in_fp8() -> AbstractContextManager[Any]:
    return te.autocast(recipe=CURRENT())


def gpt(**more: Any) -> Case:
    return Case(lambda: Layers(CURRENT(), **more), words, GPT)


def share_in_fp8(macs: Macs) -> float:
    low = sum(count for (layer, gemm, _), count in macs.items() if "layers" in layer and gemm not in ("qk", "pv"))
    return low / sum(macs.values())


def test_a_gpt_of_transformer_engine(tmp_path: Path) -> None:
    coverage = trained(gpt(), tmp_path)
    assert found(coverage) == GPT
    assert coverage.share("fp8") == share_in_fp8(GPT)
    assert coverage.share("fp8", gemm="wgrad", backward=True) == pytest.approx(
        1 - GPT["head", "wgrad", True] / sum(macs for (_, gemm, _), macs in GPT.items() if gemm == "wgrad")
    )
    assert {product.layer: product.reason for product in coverage if product.macs and not product.is_low} == {
        "head": Reason.NOT_TE,
        **{f"layers.{number}.self_attention.core_attention": Reason.ATTENTION for number in (0, 1)},
    }
    assert [product.layer for product in coverage][:2] == ["embedding", "layers.0.self_attention.layernorm_qkv"]


def again(layer: Any, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)


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


def test_modules_of_a_model_that_is_not_called_itself(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), torch.nn.Linear(32, 32))
    coverage = counted(model, lambda: model[1](model[0](torch.randn(32, 32))).sum().backward(), tmp_path)
    assert list(coverage.not_counted) == [NOT_CALLED]
    assert "not the model itself" in str(coverage)


def test_what_runs_without_gradients_in_a_step_is_not_counted(tmp_path: Path) -> None:
    student, teacher = (torch.nn.Sequential(te.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    model = Net(lambda net, x: net.student(x) - torch.no_grad()(net.teacher)(x), student=student, teacher=teacher)
    assert found(trained(Case(lambda: model, ones), tmp_path)) == {
        **linear("student.0", WIDTH, WIDTH, dgrad=False),
        **linear("student.1", WIDTH, WIDTH),
    }


def torch_layers(block: Callable[..., torch.Tensor]) -> Net:
    def compute(net: Any, x: torch.Tensor) -> torch.Tensor:
        for part in net.blocks:
            x = block(part, x)
        return net.head(x)

    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.GELU(), Net(scores), torch.nn.Linear(INNER, WIDTH))
        for _ in range(2)
    )
    return Net(compute, blocks=blocks, head=torch.nn.Linear(WIDTH, WORDS))


class Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x.t() @ x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ (x.t() @ x)


def scores(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.t(), -1) @ x + Gram.apply(x)  # type: ignore[no-untyped-call]


def torch_block(path: str) -> Macs:
    pairs = TOKENS * TOKENS * INNER
    return {
        **linear(f"{path}.0", WIDTH, INNER),
        **{(f"{path}.2", role, False): pairs for role in ("qk", "pv")},
        **{(f"{path}.2", role, True): 2 * pairs for role in ("qk", "pv")},
        (f"{path}.2", "other", False): 2 * pairs,
        (f"{path}.2", "other", True): 2 * TOKENS * INNER * INNER,
        **linear(f"{path}.3", INNER, WIDTH),
    }


TORCH_LAYERS = torch_block("blocks.0") | torch_block("blocks.1") | linear("head", WIDTH, WORDS)


def once(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


@pytest.mark.few
@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("block", ["none", *BLOCKS])
def test_torchs_layers_in_checkpoints_of_every_kind(block: str, tmp_path: Path) -> None:
    case = Case(lambda: torch_layers(BLOCKS.get(block, once)), lambda: ones().requires_grad_())
    assert found(trained(case, tmp_path)) == TORCH_LAYERS


def test_operations_and_experts(tmp_path: Path) -> None:
    net = Net(
        lambda net, x: net.experts(net.ops(x), [16, TOKENS - 16]),
        ops=te.ops.Sequential(te.ops.Linear(WIDTH, INNER), te.ops.GELU(), te.ops.Linear(INNER, WIDTH)),
        experts=te.GroupedLinear(2, WIDTH, INNER),
    )
    coverage = trained(Case(lambda: net, ones), tmp_path, around=in_fp8)
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
    second = llama_layer("model.layers.1")
    for name in ("q_proj", "k_proj", "v_proj"):
        del second[f"model.layers.1.self_attn.{name}", "dgrad", True]
    assert found(coverage) == {
        **lookup("model.embed_tokens"),
        **llama_layer("model.layers.0", backward=False),
        **second,
        **linear("lm_head", WIDTH, WORDS, wgrad=False),
    }
    why = {(item.layer, item.gemm): (item.not_run, item.why) for item in coverage if item.runs == "never"}
    assert why["lm_head", "wgrad"] == why["model.layers.0.mlp.up_proj", "wgrad"] == ("frozen weight",) * 2
    assert why["model.layers.1.self_attn.q_proj", "dgrad"] == ("input needs no gradient",) * 2
    assert all(not_run == text for not_run, text in why.values())


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
    for first in (0, 2):
        sum(model(batch(first + number)).square().mean() for number in range(2)).backward()  # type: ignore[union-attr]


SCHEDULES = (one_by_one, interleaved, backwards_in_the_other_order, together)


@pytest.mark.few
@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize(
    ("schedule", "block"),
    [*((schedule, "reentrant") for schedule in SCHEDULES), (interleaved, "none"),
     (backwards_in_the_other_order, "not reentrant")],
)  # fmt: skip
def test_one_micro_batch_is_looked_at_and_counts_for_all(
    schedule: Callable[..., None], block: str, tmp_path: Path, looked: list[str]
) -> None:
    def batch(number: int) -> torch.Tensor:
        return torch.full((TOKENS, WIDTH), float(number), requires_grad=True)

    model = torch_layers(BLOCKS.get(block, once))
    counted(model, lambda: model(batch(0)).square().mean().backward(), tmp_path / "one")
    of_one = looked.count("aten::addmm")
    coverage = counted(model, lambda: schedule(model, batch), tmp_path / "all")
    assert found(coverage) == {key: 4 * macs for key, macs in TORCH_LAYERS.items()}
    assert not coverage.not_counted
    assert looked.count("aten::addmm") <= (3 if schedule is together else 2) * of_one


def repeated(case: Case, model: torch.nn.Module, count: int) -> Callable[[], object]:
    return lambda: [case.loss(model).backward() for _ in range(count)]


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("checkpoint", ["none", *TE_BLOCKS])
def test_layers_of_transformer_engine_in_several_micro_batches(
    checkpoint: str, tmp_path: Path, looked: list[str]
) -> None:
    model = Layers(CURRENT(), TE_BLOCKS.get(checkpoint, once))
    coverage = counted(model, repeated(gpt(), model, 3), tmp_path)
    assert found(coverage) == {key: 3 * macs for key, macs in GPT.items()}
    assert looked.count("aten::embedding") == 1


def to_experts(net: Any, x: torch.Tensor) -> torch.Tensor:
    first = x[:, 0] > 0
    return net.experts[0](x[first]).sum() + net.experts[1](x[~first]).sum()


def test_sizes_that_depend_on_values_are_looked_at_in_each_micro_batch(tmp_path: Path) -> None:
    model = Net(to_experts, experts=torch.nn.ModuleList(torch.nn.Linear(WIDTH, INNER) for _ in range(2)))
    rows = [3, 7, 5]

    def run() -> None:
        for count in rows:
            model(torch.ones(10, WIDTH) * torch.where(torch.arange(10) < count, 1, -1)[:, None]).backward()

    expected = linear("experts.0", WIDTH, INNER, rows=sum(rows), dgrad=False)
    expected |= linear("experts.1", WIDTH, INNER, rows=30 - sum(rows), dgrad=False)
    assert found(counted(model, run, tmp_path)) == expected


def test_models_that_follow_each_other_and_one_that_is_called_twice(tmp_path: Path) -> None:
    """Like a generator and a discriminator with their parameters frozen in turn."""
    first, second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, INNER)

    def run() -> None:
        for _ in range(2):
            made = first(ones())
            (second(made.detach()).sum() + second(ones()).sum()).backward()
            second.requires_grad_(False)
            second(made).sum().backward()
            second.requires_grad_(True)

    coverage = counted({"a": first, "b": second}, run, tmp_path)  # type: ignore[arg-type]
    macs = {"a": TOKENS * WIDTH * WIDTH, "b": TOKENS * WIDTH * INNER}
    assert sorted((layer[0], gemm, count / macs[layer[0]]) for (layer, gemm, _), count in found(coverage).items()) == [
        ("a", "fprop", 2),
        ("a", "wgrad", 2),
        ("b", "dgrad", 2),
        ("b", "fprop", 6),
        ("b", "wgrad", 4),
    ]


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


@pytest.mark.parametrize(
    ("environment", "reason", "text"),
    [
        ("", Reason.BACKWARD_OVERRIDE, "backward_override='high_precision'"),
        ("high_precision", Reason.ENVIRONMENT, "NVTE_BACKWARD_OVERRIDE=high_precision"),
    ],
)
def test_a_recipe_with_a_backward_in_high_precision(
    environment: str, reason: Reason, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", environment)
    coverage = trained(
        Case(lambda: te.Linear(WIDTH, INNER), lambda: ones().requires_grad_()),
        tmp_path,
        config={"watched": feature("LogTensorStats", ["linear"], tensors=["activation"], stats=["max"])},
        around=lambda: te.autocast(recipe=CURRENT(backward_override="high_precision")),
    )
    stated = {product.gemm: (product.precision, product.reason, product.reason_ref) for product in coverage}
    override = ("fp32", reason, text)
    assert stated == {"fprop": ("fp8", None, ""), "dgrad": override, "wgrad": override}


def test_it_is_seen_once_and_torch_is_left_as_it_was(tmp_path: Path, looked: list[str]) -> None:
    case, model = HUGGING_FACE["BERT"], HUGGING_FACE["BERT"].make()
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off") as session:
        for _ in range(2):
            case.loss(model).backward()
            session.step()
            assert bool(looked) is (session.iteration == 1)
            looked.clear()
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
    case = HUGGING_FACE["Mixtral"]
    alone = case.make()
    observed = copy.deepcopy(alone)

    def train(model: torch.nn.Module) -> None:
        case.loss(model).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    train(alone)
    assert counted(observed, lambda: train(observed), tmp_path)
    assert all(map(torch.equal, alone.parameters(), observed.parameters()))


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
    counter = FlopCounterMode(display=False)

    def run() -> None:
        with counter, torch.autocast("cpu", torch.bfloat16):
            case.loss(model).backward()

    coverage = counted(model, run, tmp_path)
    assert found(coverage) == case.products
    assert coverage.share("bf16") == 1
    assert counter.get_total_flops() > 0


def of_a_table(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.linear(x, net.table.t())
    return torch.einsum("nd,md->nm", hidden, hidden)


def test_products_outside_of_any_layer_and_with_no_weight(tmp_path: Path) -> None:
    pairs = TOKENS * TOKENS * INNER
    net = Net(of_a_table, table=torch.nn.Parameter(torch.ones(WIDTH, INNER)))
    assert found(trained(Case(lambda: net, ones), tmp_path)) == {
        **linear("net.table", WIDTH, INNER, dgrad=False),
        ("net", "other", False): pairs,
        ("net", "other", True): 2 * pairs,
    }


@pytest.mark.parametrize(("recipe", "word"), [(recipes.DelayedScaling, "FP8"), (recipes.MXFP8BlockScaling, "MXFP8")])
def test_attention_in_low_precision(recipe: Any, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_kernel(monkeypatch)
    length = 128  # a block of MXFP8
    with any_capability():
        stand_for((10, 0))
        layer = te.MultiheadAttention(
            WIDTH, HEADS, kv_channels=32, attention_dropout=0.0, params_dtype=torch.bfloat16, fuse_qkv_params=True
        )
        coverage = trained(
            Case(lambda: layer, lambda: torch.ones(length, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)),
            tmp_path,
            config={"watched": feature("LogTensorStats", ["qkv"], tensors=["weight"], stats=["max"])},
            around=lambda: te.autocast(recipe=recipe(fp8_dpa=True)),
        )
    products = [product for product in coverage if product.family == "attention"]
    first = BATCH * HEADS * length * length * 32
    assert {(product.layer, product.gemm, product.backward): product.macs for product in products} == {
        ("multihead_attention.core_attention", role, backward): (1 + backward) * first
        for role in ("qk", "pv")
        for backward in (False, True)
    }
    assert all(text.startswith(word) for product in products for text in product.operands.values()), coverage
    assert {product.reason for product in products} == {None}


def test_the_first_nvfp4_of_a_process_has_no_product_of_its_own_making(tmp_path: Path) -> None:
    """Transformer Engine multiplies once for the matrix of the Hadamard transform, in the first forward."""
    get_rht_matrix.cache_clear()
    with any_capability():
        stand_for((10, 0))
        layer = te.Linear(WIDTH, INNER, params_dtype=torch.bfloat16)
        coverage = trained(
            Case(lambda: layer, lambda: ones().bfloat16()),
            tmp_path,
            around=lambda: te.autocast(recipe=recipes.NVFP4BlockScaling()),
            require="nvfp4 >= 100%",
        )
    assert get_rht_matrix.cache_info().misses
    assert {product.gemm for product in coverage if product.macs} == {"fprop", "wgrad"}


class DerivedAttention(te.DotProductAttention):  # type: ignore[misc]
    """As Megatron Core derives one: its parts have its name too."""


def test_attention_of_a_derived_class(tmp_path: Path) -> None:
    core = DerivedAttention(HEADS, WIDTH // HEADS, attention_dropout=0.0, attn_mask_type="no_mask")
    inputs = torch.ones(LENGTH, BATCH, HEADS, WIDTH // HEADS, requires_grad=True)
    case = Case(lambda: Net(lambda net, x: net.core(x, x, x), core=core), lambda: inputs)
    assert found(trained(case, tmp_path)) == attention("core")


@pytest.mark.usefixtures("second_thread")
@pytest.mark.parametrize("checkpoint", ["none", *TE_BLOCKS])
def test_attention_by_a_kernel_that_tells_nothing(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted by the sizes of its input, like flash-attn's kernels, which call no operator of torch's."""
    look = OperatorProducts.note

    def see_no_attention(self: OperatorProducts, name: str, *given: Any) -> None:
        if name not in ("aten::bmm", "aten::baddbmm"):
            look(self, name, *given)

    monkeypatch.setattr(OperatorProducts, "note", see_no_attention)
    model = Layers(CURRENT(), TE_BLOCKS.get(checkpoint, once))
    coverage = counted(model, repeated(gpt(), model, 2), tmp_path)
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
    """Their operators are a DTensor's, which runs others on its shards."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    part = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, WIDTH))
    parallelize_module(part, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = Net(lambda net, x: BLOCKS.get(block, once)(net.part, x), part=part)
    coverage = counted(model, lambda: one_by_one(model, lambda _: ones().requires_grad_()), tmp_path)
    expected = linear("part.0", WIDTH, INNER) | linear("part.2", INNER, WIDTH)
    assert found(coverage) == {key: 4 * macs for key, macs in expected.items()}


def test_micro_batches_of_other_sizes_are_looked_at_too(tmp_path: Path, looked: list[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER))
    rows = [4, 8, 4, 8, 8]
    coverage = counted(model, lambda: [model(torch.ones(count, WIDTH)).sum().backward() for count in rows], tmp_path)
    assert found(coverage) == linear("0", WIDTH, INNER, rows=sum(rows), dgrad=False)
    assert looked.count("aten::addmm") == 2
    assert {product.calls for product in coverage if product.macs} == {len(rows)}


def skip_by_value(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.first(x)
    return net.second(x) if float(x.detach().sum()) > 0 else x


def test_another_way_through_the_model_is_noticed(tmp_path: Path) -> None:
    model = Net(skip_by_value, first=torch.nn.Linear(WIDTH, WIDTH, bias=False), second=torch.nn.Linear(WIDTH, WIDTH))
    torch.nn.init.eye_(model.first.weight)

    def run(*signs: int) -> Coverage:
        return counted(model, lambda: [model(sign * ones()).sum().backward() for sign in signs], tmp_path)

    both = run(1, -1, -1, 1)
    assert found(both)["second", "fprop", False] == 2 * TOKENS * WIDTH * WIDTH
    assert not both.not_counted
    coverage = run(1, -1)
    [what] = coverage.not_counted
    assert "1 of 2 micro-batches have other layers" in what
    assert what in str(coverage)
    assert "% of the multiply-adds, an estimate" in str(coverage)


@pytest.mark.parametrize("how", ["torch", "te", "autocast inside"])
def test_a_reentrant_checkpoint_outside_of_autocast(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The remedies of the message: Transformer Engine's checkpoint, and an autocast in the checkpointed function."""
    net = te.Linear(WIDTH, WIDTH)

    def part(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=CURRENT()) if how == "autocast inside" else nullcontext():
            return net(x)

    run = te.checkpoint if how == "te" else functools.partial(again, reentrant=True)
    with InspectSession(None, model=net, log_dir=tmp_path, records="off") as session:
        for _ in range(2):
            with te.autocast(enabled=how != "autocast inside", recipe=CURRENT()):
                result = run(net if how == "te" else part, torch.randn(WIDTH, WIDTH, requires_grad=True))
            result.sum().backward()
            session.step()
    for at in (0, 1):
        reasons = {product.reason for product in session.coverage(at) if product.macs}
        assert reasons == ({Reason.RECOMPUTED} if how == "torch" else {None}), at
    said = [record.getMessage() for record in caplog.records if "Gradient checkpointing" in record.getMessage()]
    assert len(said) == (how == "torch")


def test_nested_reentrant_checkpoints(tmp_path: Path) -> None:
    """The forward runs three times, and is one product; the two that are computed again are no dgrad."""
    net = te.Linear(WIDTH, WIDTH)

    def part(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=CURRENT()):
            return net(x)

    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    coverage = counted(net, lambda: nested(part, x, outer=True, inner=True).sum().backward(), tmp_path)
    assert found(coverage) == linear("linear", WIDTH, WIDTH, rows=WIDTH)


def product(macs: int, *formats: str) -> Product:
    operands = dict(zip(("activation", "weight"), formats, strict=True))
    return Product(f"layer{macs}", "te", "fprop", False, macs, 1, 1, 1, 1, macs, operands)


@pytest.mark.parametrize(
    ("products", "line"),
    [
        ([("MXFP8 E4M3", "MXFP8 E4M3")], "MXFP8 in 100 % of the multiply-adds"),
        ([("NVFP4", "NVFP4")], "NVFP4 in 100 % of the multiply-adds"),
        ([("FP8 block E4M3", "FP8 block E4M3")], "FP8 block in 100 % of the multiply-adds"),
        ([("FP8 E4M3", "FP8 E5M2")], "FP8 in 100 % of the multiply-adds"),
        (
            [("NVFP4", "NVFP4"), ("MXFP8 E4M3", "MXFP8 E4M3"), ("FP8 E4M3", "FP8 E4M3")],
            "NVFP4 in 16.7 % of the multiply-adds (fprop 16.7); MXFP8 in 33.3 % of the multiply-adds (fprop 33.3);"
            " FP8 in 50.0 % of the multiply-adds (fprop 50.0)",
        ),
    ],
)
def test_a_line_names_the_format(products: list[tuple[str, str]], line: str) -> None:
    coverage = Coverage(product(place, *formats) for place, formats in enumerate(products, 1))
    assert str(coverage).startswith(line)
    without_nvfp4 = sum(place for place, formats in enumerate(products, 1) if "NVFP4" not in formats)
    assert coverage.share("fp8") == pytest.approx(without_nvfp4 / coverage.macs()), "a contract's fp8 includes MXFP8"


def test_a_line_lists_attention_beside_the_gemms() -> None:
    attention = replace(product(2, "BF16", "BF16"), family="attention", gemm="qk")
    line = str(Coverage([product(6, "FP8 E4M3", "FP8 E4M3"), attention]))
    assert line.startswith("FP8 in 75.0 % of the multiply-adds (fprop 100, attention 0); 25.0 % in BF16")


def test_the_state_of_a_gpt(tmp_path: Path) -> None:
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off", strict=True) as session:
        for _ in range(2):
            model(words()).sum().backward()
        optimizer.step()
        session.step()
        rows = session.coverage().state
    assert not any(module._forward_pre_hooks for module in model.modules()), "the session has taken its hooks back"
    result = {(row.subject, row.dtype): (row.tensors, row.bytes) for row in rows}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    tensors = len(list(model.parameters()))
    assert result["parameter", "float32"] == result["gradient", "float32"] == (tensors, 4 * numbers)
    assert result["optimizer_state", "float32"] == (2 * tensors, 2 * 4 * numbers)
    assert not any(subject == "reduce" for subject, _ in result), "there is one rank"
