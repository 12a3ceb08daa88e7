"""What a session looks at in torch, where operators are not those of aten, and where looking itself fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import transformer_engine.pytorch as te
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformer_engine.pytorch.cpp_extensions import gemm

from te_precision_callbacks.coverage import operator_products as products_module
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.marks import NodesOfProducts
from te_precision_callbacks.coverage.micro_batches import ModelCalls
from te_precision_callbacks.coverage.model_watch import ModelWatch
from te_precision_callbacks.coverage.operator_products import OperatorProducts
from te_precision_callbacks.layers import forwards
from te_precision_callbacks.session import InspectSession, ObservationError
from tests.coverage.flash_attention import FlashAttention
from tests.coverage.test_coverage import BLOCKS, Macs, Net, found, linear, once

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


def step(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(BATCH, LENGTH, WIDTH).requires_grad_()
    model(x).square().sum().backward()
    return [tensor.grad.clone() for tensor in (x, *model.parameters()) if tensor.grad is not None]


def trained(model: torch.nn.Module, folder: Path, **keywords: Any) -> Coverage:
    """What a step covers; its gradients are those without a session."""
    alone = step(model)
    options: Any = {"strict": True, "statistics_log": "off", **keywords}
    with InspectSession(None, model=model, log_dir=folder, **options) as session:
        gradients = step(model)
        session.step()
    assert len(gradients) == len(alone)
    assert all(map(torch.equal, gradients, alone))
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


class Theirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vendor_mm(x, self.weight)


UNKNOWN = "vendor::mm gets several floating-point matrices; whether it multiplies them is not known"


def test_an_operator_that_nobody_knows_is_named_and_not_taken_for_one_of_its_name(tmp_path: Path) -> None:
    RAN.clear()
    model = Net(
        lambda net, x: net.theirs(net.known(x).view(ROWS, WIDTH)), known=torch.nn.Linear(WIDTH, WIDTH), theirs=Theirs()
    )
    coverage = trained(model, tmp_path)
    assert found(coverage) == linear("known", WIDTH, WIDTH, rows=ROWS)
    assert coverage.not_counted == {UNKNOWN: ["theirs"]}
    assert {product.backward for product in coverage if product.runs == "uncounted"} == {False, True}
    assert str(coverage).endswith(f"not counted: {UNKNOWN} (theirs)")
    assert len(RAN) == 2 * 3


# ---------------------------------------------------------------------- layers of Transformer Engine


def test_nothing_looks_at_the_operators_inside_of_layers_of_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their products there are events, and on the reference backend a layer has hundreds of operators."""
    looked: list[bool] = []
    own = ModelWatch.before

    def before(products: ModelWatch, arguments: Any, **of_operator: bool) -> None:
        looked.append(products._in_gemm_layer())
        own(products, arguments, **of_operator)

    monkeypatch.setattr(ModelWatch, "before", before)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), te.LayerNormLinear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
    )
    coverage = trained(model, tmp_path)
    assert looked
    assert not any(looked)
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
    model = torch.nn.Sequential(te.Linear(WIDTH, WIDTH), torch.nn.Flatten(0, 1), Theirs(), torch.nn.Linear(WIDTH, 1))
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
    """Two linear operations in a kernel of their own, as ``NVTE_CUTEDSL_FUSED_GROUPED_MLP`` runs them."""

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
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    def fuse(operations: list[Any], **_: Any) -> list[Any]:
        pairs = [operation for operation in operations if isinstance(operation, te.ops.BasicLinear)]
        return [FusedPair(pairs)] if len(operations) == len(pairs) == 2 else operations

    monkeypatch.setattr(FusedPair, "stray", stray)
    monkeypatch.setattr(OperationFuser, "forward_backward_fusion_functions", [fuse])
    fused = te.ops.Sequential(te.ops.BasicLinear(WIDTH, 2 * WIDTH), te.ops.BasicLinear(2 * WIDTH, WIDTH))
    model = torch.nn.Sequential(torch.nn.Flatten(0, 1), fused, te.Linear(WIDTH, WIDTH))
    coverage = trained(model, tmp_path)
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
    with InspectSession(None, model=model, log_dir=tmp_path, statistics_log="off", strict=True) as session:
        step(model)
        session.step()
    assert not session.coverage().not_counted


def test_the_reason_of_a_compiled_model_names_the_class_of_the_layer(tmp_path: Path) -> None:
    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU()), backend="aot_eager")
    with InspectSession(None, model=net, log_dir=tmp_path, statistics_log="off", strict=True) as session:  # type: ignore[arg-type]
        step(net)  # type: ignore[arg-type]
        session.step()
    assert {product.why for product in session.coverage() if product.macs} == {"not a TE layer: torch.nn.Linear"}


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
