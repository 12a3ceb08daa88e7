"""Operators of torch under a session: where they are not aten's, where observing itself fails; attention."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.cpp_extensions import gemm
from transformer_engine.pytorch.ops.fuser import OperationFuser

from te_precision_callbacks.coverage import matrix_products
from te_precision_callbacks.coverage import operator_products as products_module
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.marks import NodesOfProducts
from te_precision_callbacks.coverage.micro_batches import ModelCalls
from te_precision_callbacks.coverage.model_watch import ModelProducts
from te_precision_callbacks.coverage.operator_products import OperatorProducts
from te_precision_callbacks.coverage.spans import Iterations
from te_precision_callbacks.coverage.step_table import AttentionCall, StepTable
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation import tap_parts
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.instrumentation.tap import GemmTap
from te_precision_callbacks.layers import forwards
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.session import InspectSession, ObservationError
from te_precision_callbacks.te import modules as te_modules
from tests.capability import any_capability, stand_for
from tests.coverage.test_coverage import BLOCKS, Macs, counted, found, linear, once
from tests.functions import Net
from tests.fused_attention import emulate_kernel

BATCH, HEADS, LENGTH, SIZE = 2, 3, 16, 8
WIDTH = HEADS * SIZE
ROWS = BATCH * LENGTH
ONE = BATCH * HEADS * LENGTH * LENGTH * SIZE

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention_by(attend: Attend) -> Net:
    """A projection, attention of a kernel, for operands [batch, heads, length, size], and another projection."""

    def compute(net: Any, x: torch.Tensor) -> torch.Tensor:
        parts = net.qkv(x).view(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return net.out(attend(*parts).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))

    return Net(compute, qkv=torch.nn.Linear(WIDTH, 3 * WIDTH), out=torch.nn.Linear(WIDTH, WIDTH))


def projections() -> Macs:
    return linear("qkv", WIDTH, 3 * WIDTH, rows=ROWS) | linear("out", WIDTH, WIDTH, rows=ROWS)


def attention(layer: str) -> Macs:
    return {(layer, role, backward): (1 + backward) * ONE for role in ("qk", "pv") for backward in (False, True)}


def test_a_module_of_transformer_engine_without_a_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a class of a later version: the layer itself has no row, and its subclass neither."""
    layer = te.Linear(WIDTH, WIDTH)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), layer)
    monkeypatch.setattr(te_modules, "_ROWS", {})
    for cached in (te_modules.find, te_modules.is_unknown):
        cached.cache_clear()
        monkeypatch.setattr(te_modules, cached.__name__, cached.__wrapped__)
    coverage = trained(model, tmp_path)
    assert coverage.not_counted == {"GEMMs of Linear, an unknown module of Transformer Engine": ["1"]}
    assert {product.layer for product in coverage if product.runs == "seen"} == {"0"}
    assert np.isnan(coverage.share("fp8"))


def step(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(BATCH, LENGTH, WIDTH).requires_grad_()
    model(x).square().sum().backward()
    return [tensor.grad.clone() for tensor in (x, *model.parameters()) if tensor.grad is not None]


def trained(model: torch.nn.Module, folder: Path, **keywords: Any) -> Coverage:
    """Coverage of a step; its gradients equal the gradients without a session."""
    alone = step(model)
    options: Any = {"strict": True, "statistics_log": "off", **keywords}
    with InspectSession(None, model=model, log_dir=folder, **options) as session:
        gradients = step(model)
        session.step()
    assert all(torch.equal(first, other) for first, other in zip(gradients, alone, strict=True))
    return session.coverage()


@pytest.fixture
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward exists there too, but for the check of the device."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.mark.slow
@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention(masked: bool, tmp_path: Path) -> None:
    """It is a higher-order operator, which a dispatch mode has to let through."""
    torch._dynamo.reset()
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    model = attention_by(lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask if masked else None))  # type: ignore[arg-type,return-value]
    coverage = trained(model, tmp_path)
    layers = {layer for layer, gemm, _ in found(coverage) if gemm == "qk"}
    assert found(coverage) == projections() | attention(*layers), "a mask reduces nothing"
    assert not coverage.not_counted


def by_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = (item.transpose(1, 2).contiguous() for item in (q, k, v))
    result: torch.Tensor = FlashAttention.apply(*parts)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2)


@pytest.mark.parametrize("checkpoint", ["none", "reentrant", "not reentrant"])
def test_flash_attn(checkpoint: str, tmp_path: Path) -> None:
    block = BLOCKS.get(checkpoint, once)
    coverage = trained(Net(lambda net, x: block(net.model, x), model=attention_by(by_flash_attention)), tmp_path)
    products = {(layer.removeprefix("model."), *key): macs for (layer, *key), macs in found(coverage).items()}
    [layer] = {layer for layer, gemm, _ in products if gemm == "qk"}
    assert products == projections() | attention(layer)
    assert not coverage.not_counted


@torch.library.custom_op("vendor::mm", mutates_args=())
def vendor_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    RAN.append("vendor::mm")
    return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())


@vendor_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _gradients(ctx: Any, gradient: torch.Tensor) -> Any:
    a, b = ctx.saved_tensors
    return vendor_mm(gradient, b.t().contiguous()), vendor_mm(a.t().contiguous(), gradient)


vendor_mm.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

RAN: list[str] = []


def theirs() -> Net:
    return Net(lambda net, x: vendor_mm(x, net.weight), weight=torch.nn.Parameter(torch.ones(WIDTH, WIDTH)))


UNKNOWN = "vendor::mm takes several matrices and may multiply them"


def test_an_operator_that_nobody_knows_is_named_and_not_taken_for_one_of_its_name(tmp_path: Path) -> None:
    RAN.clear()
    model = Net(
        lambda net, x: net.theirs(net.known(x).view(ROWS, WIDTH)), known=torch.nn.Linear(WIDTH, WIDTH), theirs=theirs()
    )
    coverage = trained(model, tmp_path)
    assert found(coverage) == linear("known", WIDTH, WIDTH, rows=ROWS)
    assert coverage.not_counted == {UNKNOWN: ["theirs"]}
    assert {product.backward for product in coverage if product.runs == "uncounted"} == {False, True}
    assert str(coverage).startswith(f"Not counted: {UNKNOWN} (theirs); ")
    assert len(RAN) == 2 * 3


VENDOR = torch.library.Library("vendor", "FRAGMENT")
VENDOR.define("mm_by_keyword(Tensor a, *, Tensor b) -> Tensor")
VENDOR.impl("mm_by_keyword", lambda a, *, b: torch.from_numpy(a.numpy() @ b.numpy()), "CPU")
by_keyword: Any = torch.ops.vendor.mm_by_keyword


class MultiplyByKeyword(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        result: torch.Tensor = by_keyword(a.detach(), b=b.detach())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return by_keyword(gradient, b=b.t().contiguous()), by_keyword(a.t().contiguous(), b=gradient)


UNKNOWN_OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "a custom one, with a tensor by keyword": (
        MultiplyByKeyword.apply,
        "vendor::mm_by_keyword takes several matrices and may multiply them",
    ),
    "one of torch, of which the table knows nothing": (torch.mm, "aten::mm may multiply matrices"),
}


@pytest.mark.parametrize("kind", UNKNOWN_OPERATORS)
def test_the_shares_are_an_estimate_where_an_unknown_operator_may_multiply(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, why = UNKNOWN_OPERATORS[kind]
    if why.startswith("aten"):
        monkeypatch.delitem(matrix_products.OPERATORS, "aten::mm")  # type: ignore[arg-type]
    weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
    unknown = Net(lambda net, x: multiply(x.view(ROWS, WIDTH), net.weight), weight=weight)
    coverage = trained(torch.nn.Sequential(te.Linear(WIDTH, WIDTH), unknown), tmp_path)
    assert found(coverage) == linear("0", WIDTH, WIDTH, rows=ROWS)
    assert coverage.not_counted == {why: ["1"]}
    assert {product.backward for product in coverage if product.runs == "uncounted"} == {False, True}
    assert coverage.is_estimate


# ---------------------------------------------------------------------- layers of Transformer Engine


def test_nothing_looks_at_the_operators_inside_of_layers_of_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their products there are events, and on the reference backend a layer has hundreds of operators."""
    looked: list[bool] = []
    own = ModelProducts.before_operator

    def before(products: ModelProducts, arguments: Any, **of_operator: bool) -> None:
        looked.append(any("reference" in Path(frame.f_code.co_filename).parts for frame, _ in walk_stack(None)))
        own(products, arguments, **of_operator)

    monkeypatch.setattr(ModelProducts, "before_operator", before)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), te.LayerNormLinear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
    )
    coverage = trained(model, tmp_path)
    assert set(looked) == {False}
    assert {product.layer: product.family for product in coverage if product.runs == "seen"} == {
        "0": "torch",
        "1": "te",
        "2": "te",
    }


# ---------------------------------------------------------------------- failures of our own

FAILING: dict[str, tuple[Any, str]] = {
    "sizes": (products_module, "products_of"),
    "backward": (OperatorProducts, "_note_backward"),
    "begin": (ModelCalls, "begin"),
    "end": (ModelCalls, "end"),
    "begin backward": (ModelCalls, "begin_backward"),
    "binding": (NodesOfProducts, "bind"),
    "weights": (products_module.WeightMarks, "read"),
}


@pytest.mark.parametrize("place", FAILING)
def test_a_failure_while_looking_never_reaches_training(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(0)
        raise ValueError("out of luck")

    owner, name = FAILING[place]
    monkeypatch.setattr(owner, name, fail)
    model = torch.nn.Sequential(te.Linear(WIDTH, WIDTH), torch.nn.Flatten(0, 1), theirs(), torch.nn.Linear(WIDTH, 1))
    RAN.clear()
    coverage = trained(model, tmp_path, strict=False)
    assert len(RAN) == 2 * 3
    assert len(calls) == 1
    [stated] = [record for record in caplog.records if "out of luck" in record.getMessage()]
    assert "counting the matrix products" in stated.getMessage().lower()
    assert found(coverage) == linear("0", WIDTH, WIDTH, rows=ROWS), "those of Transformer Engine go on"
    [what] = coverage.not_counted
    assert "all products of torch" in what
    assert "out of luck" in what


def test_with_strict_it_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "products_of", lambda *_: 1 / 0)
    with pytest.raises(ObservationError, match="ZeroDivisionError"):
        trained(torch.nn.Linear(WIDTH, WIDTH), tmp_path)


def test_what_training_raises_passes(tmp_path: Path) -> None:
    columns = slice(1)
    model = Net(lambda net, x: net.layer(x[..., columns]), layer=torch.nn.Linear(WIDTH, WIDTH))
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off", strict=True) as session:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            step(model)
        columns = slice(None)
        step(model)
        session.step()
    assert found(session.coverage()) == linear("layer", WIDTH, WIDTH, rows=ROWS)


# ---------------------------------------------------------------------- kernels of Transformer Engine's own


class FusedPair(te.ops.FusedOperation):  # type: ignore[misc]
    """Two linear operations in one kernel, as ``NVTE_CUTEDSL_FUSED_GROUPED_MLP`` runs them."""

    def fuser_forward(self, contexts: Any, given: torch.Tensor, **more: Any) -> Any:
        first, second = (op.weight.detach() for op in self.basic_ops)
        hidden = given.detach() @ first.t()
        contexts[0].save_for_backward(given, hidden)
        if self.stray:
            gemm.general_gemm(first, given.detach())
        return hidden @ second.t(), [(), ()]

    def fuser_backward(self, contexts: Any, gradient: torch.Tensor, **more: Any) -> Any:
        first, second = (op.weight.detach() for op in self.basic_ops)
        given, hidden = contexts[0].saved_tensors
        of_hidden = gradient @ second
        return of_hidden @ first, [(of_hidden.t() @ given,), (gradient.t() @ hidden,)], [(), ()]

    stray = False


@pytest.mark.parametrize("stray", [False, True], ids=["none through the extension", "one through the extension"])
def test_operations_whose_gemms_are_in_a_kernel_of_their_own_are_named(
    stray: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fuse(operations: list[Any], **_: Any) -> list[Any]:
        pairs = [operation for operation in operations if isinstance(operation, te.ops.BasicLinear)]
        return [FusedPair(pairs)] if len(operations) == len(pairs) == 2 else operations

    monkeypatch.setattr(FusedPair, "stray", stray)
    monkeypatch.setattr(OperationFuser, "forward_backward_fusion_functions", [fuse])
    fused = te.ops.Sequential(te.ops.BasicLinear(WIDTH, 2 * WIDTH), te.ops.BasicLinear(2 * WIDTH, WIDTH))
    coverage = trained(torch.nn.Sequential(torch.nn.Flatten(0, 1), fused, te.Linear(WIDTH, WIDTH)), tmp_path)
    assert found(coverage) == linear("2", WIDTH, WIDTH, rows=ROWS)
    assert coverage.not_counted == {
        "the GEMMs of FusedPair, which runs them in a separate kernel": ["1.0", "1.1"],
    }
    assert {product.backward for product in coverage if product.runs == "uncounted"} == {False, True}


def test_operations_and_modules_that_are_seen_are_not_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        te.ops.Sequential(te.ops.Linear(WIDTH, WIDTH), te.ops.ConstantScale(2.0)),
        te.LayerNormMLP(WIDTH, 2 * WIDTH, checkpoint=True),
        te.Linear(WIDTH, WIDTH, delay_wgrad_compute=True),
    )
    model[2].weight.requires_grad_(False)
    assert not counted(model, lambda: step(model), tmp_path).not_counted


def test_the_reason_of_a_compiled_model_names_the_class_of_the_layer(tmp_path: Path) -> None:
    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU()), backend="aot_eager")
    coverage = counted(net, lambda: step(net), tmp_path)  # type: ignore[arg-type]
    assert {product.why for product in coverage if product.macs} == {"not a TE layer: torch.nn.Linear"}


def test_the_names_of_torch_that_are_used() -> None:
    """All are private, or may be without a node's own class."""
    node: Any = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert node.metadata is node.metadata
    assert node._sequence_nr() == torch._C._autograd._get_sequence_nr() - 1
    assert isinstance(node.next_functions, tuple)
    assert callable(torch._C._current_autograd_node)
    assert torch._C._current_graph_task_id() == -1
    assert _get_current_dispatch_mode_stack() == []
    assert TorchDispatchMode.supports_higher_order_operators is False
    assert callable(TorchDispatchMode.ignore_compile_internals)
    assert torch.ops.higher_order.flex_attention._name == "flex_attention"
    assert torch.Tag.dynamic_output_shape in torch.ops.aten.nonzero.default.tags
    assert forwards._MODULE_CALL.co_name == "_call_impl"
    assert forwards._ENGINE.co_name == "_engine_run_backward"


# Stand-ins for the operators of flash-attn 2.8 (``flash_attn/flash_attn_interface.py``): its schemas, on a CPU. What
# they give is of the right sizes, and no operator of torch multiplies.
@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cpu")
def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return q - v, torch.zeros(1), torch.zeros(1), torch.zeros(1)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    torch._foreach_copy_([dq, dk, dv], [dout - q, dout - k, dout - v])
    return torch.zeros(1)


class FlashAttention(torch.autograd.Function):
    """As ``FlashAttnFunc``: [batch, length, heads, size]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse, *_ = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 1.0, False, -1, -1, 0.0, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        made = [torch.empty_like(item) for item in (q, k, v)]
        rest = 0.0, 1.0, False, -1, -1, 0.0, None, False
        torch.ops.flash_attn._flash_attn_backward(dout.contiguous(), q, k, v, out, lse, *made, *rest)
        return tuple(made)


@pytest.fixture(scope="module")
def kernel_for_the_cpu() -> Iterator[None]:
    """torch has this operator on a GPU alone."""

    def forward(query: torch.Tensor, *given: Any, **keywords: Any) -> tuple[Any, ...]:
        number = torch.zeros((), dtype=torch.int64)
        return query.clone(), torch.zeros(1), number, number, 5, 5

    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", forward, "CPU")
    yield
    library._destroy()


def macs_of(micro_batches: list[list[int]]) -> list[int]:
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    attend = torch.ops.aten._efficient_attention_forward
    model = Net(lambda _, query: attend(query, query, query, None, bounds, bounds, 5, 5, 0.0, 0)[0])
    products = ModelProducts(lambda *told: pytest.fail(str(told)), lambda: False, StepTable(Iterations()))
    products.watch_model(model, {id(model): "model"})
    with torch.enable_grad():
        for places in micro_batches:
            bounds.copy_(torch.tensor(places))  # as where a loader fills the same tensor again
            model(torch.zeros(1, places[-1], HEADS, SIZE))
    result = products.take_step()
    products.close()
    counted, _ = result.kinds.products(result.parts)  # type: ignore[union-attr]
    return [product.macs for _, product in counted]


@pytest.mark.usefixtures("kernel_for_the_cpu")
def test_each_sequence_counts_with_its_length() -> None:
    assert macs_of([[0, 4, 9], [0, 1, 9]]) == [(4 * 4 + 5 * 5 + 1 * 1 + 8 * 8) * HEADS * SIZE] * 2


@pytest.mark.usefixtures("kernel_for_the_cpu")
def test_in_a_capture_sequences_count_as_one_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading the lengths would end the capture."""
    monkeypatch.setattr(matrix_products, "is_capturing", lambda: True)
    matrix_products._warn_of_capture.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert macs_of([[0, 4, 9], [0, 4, 9]]) == [2 * 9 * 9 * HEADS * SIZE] * 2
    assert caplog.text.count("overestimates the multiply-adds") == 1


SHAPE = (128, 2, 4, 32)
"""Length, batch, heads and size."""


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[int, Any]]]]:
    calls: list[tuple[str, dict[int, Any]]] = []
    for name in ("fused_attn_fwd", "fused_attn_bwd"):
        own = getattr(tex, name)

        def entry(*arguments: Any, own: Any = own, name: str = name) -> Any:
            calls.append((name, {id(value): value for value in arguments}))
            return own(*arguments)

        monkeypatch.setattr(tex, name, entry)
    yield calls


def run(attention: te.DotProductAttention, reported: list[str]) -> tuple[torch.Tensor, StepTable]:
    def report(doing: str, what: str, error: Exception) -> None:
        reported.append(f"{what}: {error}")

    table = StepTable(Iterations())
    classify = ForwardClassifier(precision_features_in_eval=True)
    tap = GemmTap(classify, report, EveryStep(Ring(), table, report), lambda event: None)
    tap.watch({}, {}, ())
    tap.install()
    tap.observe({}, counts=True, attentions={id(attention): "attention"})
    query, key, value = (
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        .bfloat16()
        .requires_grad_()
        for seed in range(3)
    )
    try:
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
            out = attention(query, key, value, attn_mask_type="no_mask")
        out.sum().backward()
    finally:
        tap.remove()
    return query.grad, table


def made() -> te.DotProductAttention:
    return te.DotProductAttention(*SHAPE[2:], attention_dropout=0.0)


def test_attention_has_the_formats_and_sizes_of_the_extensions_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[str]()
    emulate_kernel(monkeypatch)
    with any_capability(), spied(monkeypatch) as calls:
        stand_for((10, 0))
        _, table = run(made(), reported)
    assert not reported
    assert [name for name, _ in calls] == ["fused_attn_fwd", "fused_attn_bwd"]
    sizes = (128, 128, 32, 2 * 4), (128, 32, 128, 2 * 4)
    e4m3, e5m2 = "FP8 E4M3", "FP8 E5M2"
    assert table.attention == {
        AttentionCall("attention", False, (e4m3, e4m3), (e4m3, e4m3), *sizes): 1,
        AttentionCall("attention", True, (e5m2, e4m3), (e5m2, e4m3), *sizes): 1,
    }
    for (_, arguments), gradients in zip(calls, (0, 1), strict=True):
        formats = Counter(
            str(value._fp8_dtype) for value in arguments.values() if type(value).__name__.startswith("Float8Tensor")
        )
        assert formats[str(tex.DType.kFloat8E4M3)] >= 3, "queries, keys and values"
        assert bool(formats[str(tex.DType.kFloat8E5M2)]) == bool(gradients)


def test_a_failure_while_attention_is_counted_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = list[str]()
    emulate_kernel(monkeypatch)
    with any_capability():
        stand_for((10, 0))
        expected, _ = run(made(), reported)

        def fail(*_: Any) -> None:
            raise ValueError("no sizes")

        monkeypatch.setattr(tap_parts, "attention_sizes", fail)
        assert torch.equal(run(made(), reported)[0], expected)
    assert reported == ["attention: no sizes"] * 2
