"""LogGemmError at the output of attention, against whole attention in float64 of what the kernel was handed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Tensor
from transformer_engine.pytorch.attention.dot_product_attention import backends
from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils
from transformer_engine.pytorch.cpp_extensions import fused_attn

from te_precision_callbacks.coverage.gemm_events import AttentionEvent
from te_precision_callbacks.gemm_error.attention import judged, sample
from te_precision_callbacks.gemm_error.attention_operands import HeadTensor, bytes_of_query
from te_precision_callbacks.instrumentation.attention_errors import call_of, why_not
from te_precision_callbacks.instrumentation.attention_tap import AttentionTap
from te_precision_callbacks.instrumentation.running import Forward, Running
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import Keeper, feature

BF16 = torch.bfloat16
LENGTH, BATCH, HEADS, SIZE = 128, 2, 4, 128
F16 = fused_attn.FusedAttnBackend.F16_arbitrary_seqlen


@pytest.fixture(autouse=True)
def any_gpu() -> Iterator[None]:
    with any_capability():
        yield


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked: torch.Tensor, bias: Any = 0.0) -> torch.Tensor:
    """Attention in float64: [batch, heads, tokens, size]."""
    k, v = (each.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1]) + bias
    return torch.softmax(scores.masked_fill(masked, -math.inf), -1).nan_to_num(0.0) @ v


# ------------------------------------------------------------------ fused attention as a kernel of F16 would run it


def event_of(kernel: Callable[..., Any], *operands: torch.Tensor, **more: Any) -> AttentionEvent:
    """What the tap reports of ``fused_attn_fwd`` with another kernel behind it."""
    events: list[AttentionEvent] = []

    class Listener:
        def enter_attention(self, layer: str, kind: ForwardKind) -> None: ...
        def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None: ...
        def note_attention(self, event: AttentionEvent) -> None:
            events.append(event)

    running = Running()
    running.here.running = Forward(("attention",), ForwardKind.OBSERVED, "", halves=False)
    tap = AttentionTap(lambda module: ForwardKind.OBSERVED, _raise, running, [Listener()])
    tapped = tap.around(functools.wraps(fused_attn.fused_attn_fwd)(kernel))
    lengths = more.pop("lengths")
    tapped(True, *(int(each.diff().max()) for each in lengths), *lengths, *operands, BF16, F16, **more)
    return events[0]


def _raise(doing: str, what: str, error: Exception) -> None:
    raise error


MASKS = {
    "no_mask": ("no_mask", (-1, -1), False),
    "causal": ("causal", (-1, 0), False),
    "causal, bottom right": ("causal_bottom_right", (-1, 0), True),
    "a window": ("no_mask", (8, 5), False),
    "a window, bottom right": ("no_mask", (8, 5), True),
    "a causal window": ("causal", (8, 0), False),
    "a causal window, bottom right": ("causal_bottom_right", (8, 0), True),
    "padding": ("padding", (-1, -1), False),
    "padding, causal": ("padding_causal", (-1, 0), False),
    "padding, causal, bottom right": ("padding_causal_bottom_right", (-1, 0), True),
    "padding, a window, bottom right": ("padding", (8, 5), True),
}
PADDED = [mask for mask in MASKS if "padding" in mask]  # those that Transformer Engine has for packed sequences


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mask", "form"),
    [*((mask, form) for form in ("bshd", "sbhd") for mask in MASKS), *((mask, "thd") for mask in PADDED)],
)
def test_masks_and_layouts(mask: str, form: str) -> None:
    """As Transformer Engine's own unfused attention masks the scores, with more keys than queries, and fewer heads of
    keys."""
    kind, window, at_the_end = MASKS[mask]
    queries, keys = 96, 112
    of_queries, of_keys = ([70, 96], [112, 90]) if "padding" in kind else ([96, 96], [112, 112])
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, h, s, 32).to(BF16) for h, s in ((HEADS, queries), (2, keys), (2, keys)))
    beyond = tuple(
        (torch.arange(longest) >= torch.tensor(each).unsqueeze(1)).view(BATCH, 1, 1, longest)
        for longest, each in ((queries, of_queries), (keys, of_keys))
    )
    masked = functools.reduce(torch.logical_or, (beyond[0].mT, beyond[1]))
    if "causal" in kind or window != (-1, -1):
        own = None if window == (-1, -1) else window
        given = beyond if "padding" in kind else None
        masked = dpa_utils.get_full_mask(queries, keys, kind, given, own, "cross", at_the_end)[1]
    exact = whole(q, k, v, masked)
    bounds = [torch.tensor([0, each[0], sum(each)], dtype=torch.int32) for each in (of_queries, of_keys)]
    more: dict[str, Any] = {}
    if form == "thd":  # with tokens between the sequences
        places = [torch.tensor([0, longest, 2 * longest], dtype=torch.int32) for longest in (queries, keys)]
        more = dict(zip(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), places, strict=True))
        tensors = [each.transpose(1, 2).flatten(0, 1) for each in (q, k, v, exact)]
    else:
        tensors = [each.permute(*("bhsd".index(letter) for letter in form)) for each in (q, k, v, exact)]
    *operands, out = tensors
    event = event_of(
        lambda *given, **keywords: (out.to(BF16), []),
        *operands,
        qkv_layout="_".join([form] * 3),
        o_format=form,
        attn_mask_type=kind,
        window_size=window,
        bottom_right_diagonal=at_the_end,
        lengths=bounds,
        **more,
    )
    assert not why_not(event)
    result = HeadTensor(event.output, form)
    call = call_of(event, result)
    samples = sample(call, result, 0, 1 << 20)
    assert len(samples) == BATCH * HEADS
    for (sequence, head, rows, *_), expected, run in samples:
        inside = rows < of_queries[sequence]
        assert inside.any()
        exactly = exact[sequence, head, rows.clamp(max=queries - 1)]
        sees = exactly.abs().amax(1) > 0
        assert torch.equal(expected.known, inside & sees)
        torch.testing.assert_close(
            expected.output[expected.known].double(), exactly[expected.known], rtol=1e-4, atol=1e-5
        )
        assert torch.equal(run[expected.known].to(BF16), exactly[expected.known].to(BF16))
    assert judged(call, samples, result).ratio < 1


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_a_bias(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, 32).to(BF16) for _ in range(3))
    bias = torch.randn(1, HEADS, LENGTH, LENGTH).to(BF16)
    scaled = bias.double() / math.sqrt(32) if kind == "pre_scale_bias" else bias.double()
    out = whole(q, k, v, torch.zeros(1, 1, 1, 1, dtype=torch.bool), scaled).transpose(1, 2)
    event = event_of(
        lambda *given, **keywords: (out.to(BF16), []),
        *(each.transpose(1, 2) for each in (q, k, v)),
        qkv_layout="bshd_bshd_bshd",
        o_format="bshd",
        attn_mask_type="no_mask",
        attn_bias=bias,
        attn_bias_type=kind,
        lengths=[torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)] * 2,
    )
    result = HeadTensor(event.output, "bshd")
    call = call_of(event, result)
    assert judged(call, sample(call, result, 0, 1 << 22), result).ratio < 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"softmax_type": "learnable"}, "softmax is learnable"),
        ({"attn_bias_type": "alibi"}, "bias is alibi"),
        ({"page_table_k": torch.zeros(1, 1)}, "pages"),
    ],
)
def test_what_cannot_be_computed_again(options: dict[str, Any], reason: str) -> None:
    q = torch.zeros(1, LENGTH, HEADS, 32, dtype=BF16)
    lengths = [torch.tensor([0, LENGTH], dtype=torch.int32)] * 2
    event = event_of(
        lambda *given, **keywords: (q, []),
        q,
        q,
        q,
        qkv_layout="bshd_bshd_bshd",
        o_format="bshd",
        lengths=lengths,
        **options,
    )
    assert reason in why_not(event)


# ------------------------------------------------------------------ in a session


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(HEADS * SIZE, 64, params_dtype=BF16)
        self.core = te.DotProductAttention(HEADS, SIZE, attention_dropout=0.0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.linear(self.core(q, k, v, attn_mask_type="causal"))


RECIPES: Mapping[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "delayed, Hopper": (lambda: recipes.DelayedScaling(fp8_dpa=True), (9, 0)),
    "current": (lambda: recipes.Float8CurrentScaling(fp8_dpa=True), (10, 0)),
    "mxfp8": (lambda: recipes.MXFP8BlockScaling(fp8_dpa=True), (10, 0)),
}
CURRENT = RECIPES["current"][0]


def operands(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(LENGTH, BATCH, HEADS, SIZE).to(BF16).requires_grad_() for _ in range(3)]


def step(net: torch.nn.Module, recipe: Any, given: list[torch.Tensor]) -> torch.Tensor:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = net(*given)
    out.float().square().sum().backward()
    return out.detach()


def session(net: torch.nn.Module, folder: Path, keeper: Keeper, layers: str = "all", **options: Any) -> InspectSession:
    section = {"s": feature("LogGemmError", [layers], **{"gemms": ["fprop"], "freq": 1, **options})}
    return InspectSession(section, model=net, log_dir=folder, sinks=[keeper], strict=True)


def values(keeper: Keeper, at: int = 0) -> dict[str, float]:
    return {row.statistic: row.value for row in keeper.steps[at] if (row.layer, row.tensor) == ("core", "output")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_cause_against_whole_attention(recipe: str, tmp_path: Path, keeper: Keeper) -> None:
    make, capability = RECIPES[recipe]
    stand_for(capability)
    net, given, seen = Net(), operands(), list[Any]()
    upstream = tex.fused_attn_fwd

    def entry(*arguments: Any) -> Any:
        result = upstream(*arguments)
        tensors = [each.detach() for each in (*arguments[16:19], result[0])]
        seen.append([each.dequantize().float() if hasattr(each, "dequantize") else each.float() for each in tensors])
        return result

    tex.fused_attn_fwd = entry
    try:
        with session(net, tmp_path, keeper) as running:
            step(net, make(), given)
            running.step()
    finally:
        tex.fused_attn_fwd = upstream
    value = values(keeper)
    masked = torch.ones(LENGTH, LENGTH).triu(1).bool()
    high = whole(*(each.detach().permute(1, 2, 0, 3) for each in given), masked)
    *codes, out = (each.permute(1, 2, 0, 3).double() for each in seen[0])
    assert value["gemm_error"] == pytest.approx(float((out - high).norm() / high.norm()), rel=0.1)
    if recipe != "mxfp8":  # whose own dequantize does not know that its scales are those of other rows
        decoded = whole(*codes, masked)
        assert value["gemm_kernel_error"] == pytest.approx(float((out - decoded).norm() / decoded.norm()), rel=0.1)
        assert value["gemm_format_error"] == pytest.approx(float((decoded - high).norm() / high.norm()), rel=0.1)
    assert value["gemm_kernel_ratio"] < 1
    assert value["gemm_gain"] == pytest.approx(1, abs=0.01)
    assert 0.02 < value["gemm_format_error_a"] < 0.04
    assert 0.02 < value["gemm_format_error_b"] < 0.04
    assert value["gemm_excess"] == pytest.approx(1, abs=0.2)
    for name in "ab":
        assert value[f"gemm_wrong_codes_{name}%"] == 0
        assert value[f"gemm_wrong_scales_{name}%"] == 0
    assert not running.not_measured
    assert not running.findings


@pytest.mark.parametrize(
    ("fault", "rule", "seen"),
    [
        (lambda out: out[3, 1].zero_(), "gemm-kernel", "wrong: row 7"),
        (lambda out: out.mul_(2), "gemm-gain", "gives 2 times"),
    ],
)
def test_a_fault_of_the_kernel(
    fault: Callable[[Any], Any], rule: str, seen: str, tmp_path: Path, keeper: Keeper
) -> None:
    stand_for((10, 0))
    net, upstream = Net(), tex.fused_attn_fwd

    def entry(*arguments: Any) -> Any:
        result = upstream(*arguments)
        fault(result[0])
        return result

    tex.fused_attn_fwd = entry
    try:
        with session(net, tmp_path, keeper) as running:
            for seed in range(4):  # half of the rows are sampled in each
                step(net, CURRENT(), operands(seed))
                running.step()
    finally:
        tex.fused_attn_fwd = upstream
    found = [each for each in running.findings if each.rule.startswith("gemm-")]
    assert [(each.rule, each.layers, each.tensor) for each in found] == [(rule, ("core",), "output")]
    assert seen in found[0].seen
    assert found[0].seen.startswith("the attention forward (scores QK^T, softmax, PV) ")


def rounded_towards_zero(query: Any, key: Any, value: Any) -> None:
    (key._data if hasattr(key, "_data") else key._rowwise_data).bitwise_and_(0xFE)


def scaled_twice(query: Any, key: Any, value: Any) -> None:
    if hasattr(query, "_scale_inv"):
        query._scale_inv = 2 * query._scale_inv
    else:
        query._rowwise_scale_inv.add_(1)  # E8M0


@pytest.mark.parametrize(
    ("recipe", "fault", "seen"),
    [
        *((name, rounded_towards_zero, "operand A of the attention forward") for name in RECIPES),
        *((name, scaled_twice, "operand B of the attention forward") for name in RECIPES),
    ],
)
def test_a_fault_of_the_quantizer(
    recipe: str,
    fault: Callable[..., None],
    seen: str,
    tmp_path: Path,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of K in its codes, of Q in its scales. The scale of delayed scaling does not follow from the tensor."""
    make, capability = RECIPES[recipe]
    stand_for(capability)
    upstream = backends.combine_and_quantize

    def combine_and_quantize(*arguments: Any, **keywords: Any) -> Any:
        found = upstream(*arguments, **keywords)
        fault(*found[:3])
        return found

    monkeypatch.setattr(backends, "combine_and_quantize", combine_and_quantize)
    net = Net()
    with session(net, tmp_path, keeper) as running:
        step(net, make(), operands())
        running.step()
    value, wrong = values(keeper), "b" if fault is scaled_twice else "a"
    assert value[f"gemm_wrong_codes_{wrong}%"] > 10
    has_wrong_scales = fault is scaled_twice and "delayed" not in recipe
    # In MXFP8 either of two scales is right where an amax is just at a power of two.
    assert value[f"gemm_wrong_scales_{wrong}%"] == pytest.approx(100 * has_wrong_scales, abs=1)
    assert value[f"gemm_wrong_codes_{'ab'.replace(wrong, '')}%"] == 0
    found = [each for each in running.findings if each.rule == "gemm-quantizer"]
    assert len(found) == 1 + has_wrong_scales  # of the codes, and of the scales
    for each in found:
        assert (each.layers, each.tensor) == (("core",), "output")
        assert each.seen.startswith(seen)


@pytest.mark.parametrize(
    ("recipe", "dimension"),
    [("current", None), ("current", 2), ("current", 3), ("mxfp8", 3)],
    ids=["current", "current, sb3hd", "current, sbh3d", "mxfp8, sbh3d"],
)
def test_the_largest_of_queries_keys_and_values_sets_the_scale(
    recipe: str, dimension: int | None, tmp_path: Path, keeper: Keeper
) -> None:
    """Under current scaling; one that follows from the queries, or from the keys and values, alone would be wrong.
    Packed operands of MXFP8 are quantized in another order of their dimensions than they came in."""
    stand_for((10, 0))
    net, (q, k, v) = Net(), [each.detach() for each in operands()]
    with session(net, tmp_path, keeper) as running:
        for given in ([8 * q, k, v], [q, k, 8 * v]):
            tensors = given if dimension is None else torch.stack(given, dimension).unbind(dimension)
            step(net, RECIPES[recipe][0](), [each.requires_grad_() for each in tensors])
            running.step()
    names = [f"gemm_wrong_{what}_{name}%" for what in ("codes", "scales") for name in "ab"]
    for at in range(2):
        assert {name: values(keeper, at)[name] for name in names} == dict.fromkeys(names, 0)


def test_operands_that_were_quantized_before(tmp_path: Path, keeper: Keeper) -> None:
    """As ``fp8_mha`` hands them to attention: the kernel is judged, and what is missing is said."""
    stand_for((10, 0))
    net, quantizer = Net(), Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device="cpu")
    whole_of_three = quantizer(torch.stack([each.detach() for each in operands()]))
    given = [Float8Tensor.make_like(whole_of_three, data=each) for each in whole_of_three._data.unbind()]
    with session(net, tmp_path, keeper) as running:
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)):
            net.core(*given, attn_mask_type="causal")
        running.step()
    value = values(keeper)
    assert value["gemm_kernel_ratio"] < 1
    assert not {"gemm_format_error", "gemm_wrong_codes_a%", "gemm_wrong_codes_b%"} & set(value)
    reason = running.not_measured["core", "attention"]
    assert reason == "the format and the quantizer: its operands were quantized before it"


@pytest.mark.parametrize("layers", ["DotProductAttention", "dot_product_attention", "core"])
def test_layers_selects_attention_by_name_and_class_in_due_steps(layers: str, tmp_path: Path, keeper: Keeper) -> None:
    """In other steps Transformer Engine is as it was, and training is the same as without a session."""
    stand_for((10, 0))
    net, other = Net(), Net()  # each with its own amax history of S
    other.load_state_dict(net.state_dict())
    alone, given = [operands(seed) for seed in range(4)], [operands(seed) for seed in range(4)]
    expected, before = [step(other, CURRENT(), each) for each in alone], backends.fused_attn_fwd
    with session(net, tmp_path, keeper, layers, freq=2) as running:
        for number, each in enumerate(given):
            assert (backends.fused_attn_fwd is not before) == (number in (0, 2))
            assert torch.equal(step(net, CURRENT(), each), expected[number])
            running.step()
    for with_session, without in zip(given, alone, strict=True):
        for one, other in zip(with_session, without, strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert [bool(values(keeper, at)) for at in range(len(keeper.steps))].count(True) == 2


@pytest.mark.parametrize(
    "options", [{"layers": "linear"}, {"attention": False}, {"gemms": ["wgrad"]}], ids=lambda each: next(iter(each))
)
def test_attention_that_is_not_selected(options: dict[str, Any], tmp_path: Path, keeper: Keeper) -> None:
    stand_for((10, 0))
    net = Net()
    with session(net, tmp_path, keeper, **options) as running:
        step(net, CURRENT(), operands())
        running.step()
    assert not any(row.layer == "core" for records in keeper.steps for row in records)
    assert ("core", "attention") not in running.not_measured


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_attention_is_measured_once(reentrant: bool, tmp_path: Path, keeper: Keeper) -> None:
    stand_for((10, 0))

    class Checkpointed(Net):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return self.linear(te.checkpoint(self.core, q, k, v, attn_mask_type="causal", use_reentrant=reentrant))

    net = Checkpointed()
    with session(net, tmp_path, keeper) as running:
        step(net, CURRENT(), operands())
        running.step()
    assert values(keeper)["gemm_kernel_ratio"] < 1
    assert not running.not_measured


@pytest.mark.parametrize(
    ("options", "recipe", "reason"),
    [
        ({"max_memory": "1KiB"}, CURRENT, f"max_memory is 1024 bytes, and one query needs {bytes_of_query(LENGTH)}"),
        ({}, None, "its kernel is not Transformer Engine's fused attention"),
    ],
)
def test_what_is_not_measured_is_said(
    options: dict[str, Any], recipe: Any, reason: str, tmp_path: Path, keeper: Keeper
) -> None:
    stand_for((10, 0))
    net = Net()
    with session(net, tmp_path, keeper, **options) as running:
        step(net, recipe and recipe(), operands())
        running.step()
    assert reason in running.not_measured["core", "attention"]
    assert not any(row.layer == "core" for records in keeper.steps for row in records)
    assert "core attention" in (tmp_path / "precision_summary.txt").read_text()


def test_an_error_in_attention_is_not_blamed_on_its_kernel(tmp_path: Path, keeper: Keeper) -> None:
    """In a forward that an error ends, no kernel has run; one that runs while an error is handled is measured."""
    stand_for((10, 0))
    net, upstream = Net(), tex.fused_attn_fwd

    def entry(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    with session(net, tmp_path, keeper) as running:
        tex.fused_attn_fwd = entry
        try:
            step(net, CURRENT(), operands())
        except RuntimeError:
            tex.fused_attn_fwd = upstream
            assert not running.not_measured
            step(net, None, operands())
            assert ("core", "attention") in running.not_measured
        finally:
            tex.fused_attn_fwd = upstream
        running.step()
