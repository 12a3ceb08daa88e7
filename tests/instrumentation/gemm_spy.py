"""Operands passed to the extension's GEMMs, against ``session.precision`` and the events of a tap.

The spy is at the entries of the extension, below all of Transformer Engine's Python, and independent of sessions:
the GEMM follows from the layout, and the layer from the shapes of the two tensors, which differ in all layers.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.custom_recipes import quantizer_factories, quantizer_factory_zoo

from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.coverage.spans import Iterations
from te_precision_callbacks.coverage.step_table import StepTable
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.instrumentation.tap import GemmTap
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.gemm_events import GemmEvent
from te_precision_callbacks.layers.naming import named_operations, named_te_modules
from te_precision_callbacks.session import GemmPrecision, InspectSession
from tests.conftest import feature, statistics

TENSORS = {"fprop": ("weight", "activation"), "dgrad": ("weight", "gradient"), "wgrad": ("activation", "gradient")}
CODES = {"kFloat8E4M3": "E4M3", "kFloat8E5M2": "E5M2"}
PLAIN = {torch.float32: "FP32", torch.bfloat16: "BF16"}

Handed = dict[tuple[str, str, str], set[str]]
"""(layer, GEMM, tensor) -> the formats of what the extension was handed."""

ROWS = 32


def format_of(tensor: Any) -> str:
    kind = type(tensor).__name__.removesuffix("Storage").removesuffix("Tensor")
    if kind in ("Float8", "MXFP8", "Float8BlockwiseQ"):
        text = {"Float8": "FP8", "MXFP8": "MXFP8", "Float8BlockwiseQ": "FP8 block"}[kind]
        return f"{text} {CODES[tensor._fp8_dtype.name]}"
    if kind == "NVFP4":
        return "NVFP4"
    assert type(tensor) in (torch.Tensor, torch.nn.Parameter), type(tensor)
    return PLAIN[tensor.dtype]


GEMM_OF = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
"""Whether each operand is transposed -> the GEMM."""


@contextmanager
def at_the_entries(note: Callable[[Any, bool, Any, bool, Any], None]) -> Iterator[None]:
    """Calls ``note`` behind each GEMM of the extension, with A, B, whether each is transposed, and the result; of
    grouped GEMMs None."""
    single, grouped = tex.generic_gemm, tex.te_general_grouped_gemm

    def generic_gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any, **keywords: Any) -> Any:
        result = single(a, transa, b, transb, *more, **keywords)
        note(a, transa, b, transb, result[0])
        return result

    def te_general_grouped_gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any) -> Any:
        result = grouped(a, transa, b, transb, *more)
        for first, second in zip(a, b, strict=True):
            note(first, transa, second, transb, None)
        return result

    tex.generic_gemm, tex.te_general_grouped_gemm = generic_gemm, te_general_grouped_gemm
    try:
        yield
    finally:
        tex.generic_gemm, tex.te_general_grouped_gemm = single, grouped


class Spy:
    """Notes the operands of GEMMs.

    Args:
        layers: (outputs, inputs) of a layer's weight -> its name.
        rows: of a GroupedLinear, the rows of each expert's activation -> suffix of the name.
    """

    def __init__(self, layers: dict[tuple[int, int], str], rows: dict[int, str]) -> None:
        self.handed: Handed = {}
        self.handed_in: list[Handed] = []
        self.training = True
        self._layers = layers
        self._rows = rows

    def begin_step(self) -> None:
        self.handed_in.append({})

    def note(self, a: Any, transa: bool, b: Any, transb: bool) -> None:
        if not self.training:
            return
        gemm = GEMM_OF[transa, transb]
        first, second = (torch.Size(tensor.size()) for tensor in (a, b))
        rows, shape = second[:-1].numel(), (first[0], first[1])
        if gemm == "wgrad":
            shape = (second[-1], first[-1])
        layer = self._layers[shape] + self._rows.get(rows, "")
        for name, tensor in zip(TENSORS[gemm], (a, b), strict=True):
            for handed in (self.handed, self.handed_in[-1]):
                handed.setdefault((layer, gemm, name), set()).add(format_of(tensor))

    @contextmanager
    def watching(self) -> Iterator[Spy]:
        with at_the_entries(lambda a, transa, b, transb, result: self.note(a, transa, b, transb)):
            yield self


class Grouped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped = te.GroupedLinear(2, 32, 64, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped(torch.cat([x, x, x]), [ROWS, 2 * ROWS])


BF16 = torch.bfloat16
MODULES: dict[str, tuple[Callable[[], torch.nn.Module], dict[tuple[int, int], str], dict[int, str]]] = {
    "Linear": (lambda: te.Linear(32, 64, params_dtype=BF16), {(64, 32): "linear"}, {}),
    "LayerNormLinear": (lambda: te.LayerNormLinear(32, 64, params_dtype=BF16), {(64, 32): "layernorm_linear"}, {}),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(32, 64, params_dtype=BF16),
        {(64, 32): "layernorm_mlp.fc1", (32, 64): "layernorm_mlp.fc2"},
        {},
    ),
    "GroupedLinear": (Grouped, {(64, 32): "grouped"}, {ROWS: ".gemm_0", 2 * ROWS: ".gemm_1"}),
    "TransformerLayer": (
        lambda: te.TransformerLayer(32, 64, 2, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0),
        {
            (96, 32): "transformer_layer.self_attention.layernorm_qkv",
            (32, 32): "transformer_layer.self_attention.proj",
            (64, 32): "transformer_layer.layernorm_mlp.fc1",
            (32, 64): "transformer_layer.layernorm_mlp.fc2",
        },
        {},
    ),
}

RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "current high_precision": lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
    "current dequantized": lambda: recipes.Float8CurrentScaling(backward_override="dequantized"),
    "custom current": lambda: recipes.CustomRecipe(qfactory=quantizer_factories.current_scaling_factory),
    "custom high precision": lambda: recipes.CustomRecipe(qfactory=quantizer_factories.high_precision_factory),
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_rht=True),
    "mxfp8 high_precision": lambda: recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "nvfp4 dequantized": lambda: recipes.NVFP4BlockScaling(disable_rht=True, backward_override="dequantized"),
    "mxfp8 fwd, nvfp4 bwd": lambda: recipes.CustomRecipe(qfactory=quantizer_factory_zoo.mxfp8_fwd_nvfp4_bwd_factory),
    "mxfp8 fwd, high bwd": lambda: recipes.CustomRecipe(
        qfactory=quantizer_factory_zoo.mxfp8_fwd_high_precision_bwd_factory
    ),
    "high fwd, mxfp8 bwd": lambda: recipes.CustomRecipe(
        qfactory=quantizer_factory_zoo.high_precision_fwd_mxfp8_bwd_factory
    ),
}
BLACKWELL = [name for name in RECIPES if "mxfp8" in name or "nvfp4" in name]
HOPPER = [name for name in RECIPES if name not in BLACKWELL]

FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda freq: statistics(layers=["nowhere"]),
    "LogTensorStats": lambda freq: statistics(tensors=["activation", "weight", "gradient"], freq=freq),
    "DisableFP8GEMM": lambda freq: {"s": feature("DisableFP8GEMM", ["all"], gemms=["dgrad"])},
    "DisableFP8Layer": lambda freq: {"s": feature("DisableFP8Layer", ["all"])},
    "PerTensorScaling": lambda freq: {
        "s": feature("PerTensorScaling", ["all"], gemms=["fprop"], tensors=["activation"])
    },
    "FakeQuant": lambda freq: {
        "s": feature("FakeQuant", ["all"], gemms=["fprop", "wgrad"], tensors=["activation"], quant_format="FP8E4M3")
    },
}

CHECKPOINTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "none": lambda net, x: net(x),
    "reentrant": lambda net, x: torch_checkpoint(net, x, use_reentrant=True),
    "reentrant, outside": lambda net, x: torch_checkpoint(net, x, use_reentrant=True),
    "non-reentrant": lambda net, x: torch_checkpoint(net, x, use_reentrant=False),
    "te": lambda net, x: te.checkpoint(net, x),
}
INSIDE = ("reentrant", "non-reentrant")
"""Where the backward is inside of autocast. torch's checkpoints do not bring it back when they recompute, so that the
second forward of one that is "outside" runs in high precision."""

EVERYTHING, FROZEN, FIRST, BIASES = "everything", "frozen weights", "a first layer", "a frozen first layer"
NEEDS = {EVERYTHING: (True, True), FROZEN: (False, True), FIRST: (True, False), BIASES: (False, False)}
"""Whether the weights and the input need a gradient; biases and norms always do."""

ALWAYS, LATER, EARLIER, IN_TURNS = "always", "later", "earlier", "in turns"
AUTOCAST: dict[str, Callable[[int], bool]] = {
    ALWAYS: lambda step: True,
    LATER: lambda step: step >= 4,
    EARLIER: lambda step: step < 4,
    IN_TURNS: lambda step: step % 2 == 1,
}


def can_run(module: str, recipe: str, feature: str, *varied: Any) -> bool:
    """LayerNormMLP refuses a backward in another precision, and PerTensorScaling all but delayed scaling."""
    overrides = recipe.endswith(("high_precision", "dequantized"))
    has_mlp = module in ("LayerNormMLP", "TransformerLayer")
    return not (overrides and has_mlp) and (feature != "PerTensorScaling" or (recipe == "delayed" and not varied))


def case(
    module: str,
    recipe: str,
    feature_name: str = "none",
    freq: int = 1,
    checkpoint: str = "none",
    autocast: str = ALWAYS,
    steps: int | None = None,
    evaluate: bool = False,
    needs: str = EVERYTHING,
) -> list[str]:
    """Wrong reports of one run's session: for each operand the reported format, and the one passed to the extension."""
    torch.manual_seed(0)
    te.quantization.FP8GlobalStateManager.reset()
    build, layers, rows = MODULES[module]
    net, made = build(), RECIPES[recipe]()
    of_weights, of_input = NEEDS[needs]
    for parameter in net.parameters():
        parameter.requires_grad_(of_weights or parameter.ndim == 1)
    spy = Spy(layers, rows)
    steps = steps or (2 if autocast == ALWAYS else 8)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        InspectSession(
            FEATURES[feature_name](freq), model=net, log_dir=Path(folder), allow_unmatched=True, records="off"
        ) as session,
        spy.watching(),
    ):
        warnings.simplefilter("ignore")
        for step in range(steps):
            spy.begin_step()
            shape = (ROWS, 2, 32) if module == "TransformerLayer" else (ROWS, 32)
            x = torch.randn(shape, dtype=BF16, requires_grad=of_input)
            on = made is not None and AUTOCAST[autocast](step)
            with te.autocast(enabled=on, recipe=made if on else None):
                out = CHECKPOINTS[checkpoint](net, x)
                if checkpoint in INSIDE:
                    out.float().sum().backward()
            if checkpoint not in INSIDE:
                out.float().sum().backward()
            if evaluate:
                spy.training = False
                with torch.no_grad():
                    net(x)
                spy.training = True
            session.step()
        result = wrong(session.precision, spy.handed)
        if autocast == ALWAYS and not evaluate:
            result += [f"{entry}: not seen" for entry in session.precision if entry.operands and not entry.seen]
        if checkpoint == "reentrant, outside" and autocast == EARLIER:
            return result  # of a layer that rests, only the last forward of a step is known: docs/architecture.md
        for step, handed in enumerate(spy.handed_in):
            at = session.precision(at=step)
            result += [f"{step}: {text}" for text in wrong(at, handed)]
            if any(not entry.since <= step <= (steps if entry.until is None else entry.until) for entry in at):
                result.append(f"{step}: {at}")
        return result


def wrong(precision: Sequence[GemmPrecision], handed: Handed) -> list[str]:
    stated = {(e.layer, e.gemm, tensor): (text, e.seen) for e in precision for tensor, text in e.operands.items()}
    results = []
    for operand, formats in handed.items():
        text, seen = stated.get(operand, ("nothing", True))
        said = {part.removesuffix(" (modified)") for part in text.split(" -> ")}
        if said != formats:
            results.append(f"{' '.join(operand)}: told {text}{'' if seen else ' (not seen)'}, was {sorted(formats)}")
    assert handed
    ran = {operand[:2] for operand in handed}
    return results + [
        f"{entry.layer} {entry.gemm}: told {entry.not_run or 'that it ran'}"
        for entry in precision
        if ((entry.layer, entry.gemm) in ran) == bool(entry.not_run) or bool(entry.operands) == bool(entry.not_run)
    ]


class Call:
    def __init__(self, a: Any, transa: bool, b: Any, transb: bool, out: Any) -> None:
        self.a, self.b, self.gemm, self.out = a, b, GEMM_OF[transa, transb], out
        first, second = (torch.Size(tensor.size()) for tensor in (a, b))
        rows = (first[:-1].numel(), first[-1]), (second[:-1].numel(), second[-1])
        self.m, self.k = rows[0] if transa else rows[0][::-1]
        self.n = rows[1][1] if transb else rows[1][0]


@contextmanager
def spied() -> Iterator[list[Call]]:
    calls: list[Call] = []
    with at_the_entries(lambda *handed: calls.append(Call(*handed))):
        yield calls


Report = Callable[[str, str, Exception], object]


def fail(doing: str, what: str, error: Exception) -> None:
    raise AssertionError(f"{doing} {what}") from error


@contextmanager
def tapped(
    model: torch.nn.Module, *more: Callable[[GemmEvent], Any], report: Report = fail
) -> Iterator[list[GemmEvent]]:
    events: list[GemmEvent] = []

    def consume(event: GemmEvent) -> None:
        for listener in (lambda event: event.sizes, events.append, *more):
            listener(event)

    with installed(model, consume, report):
        yield events


@contextmanager
def installed(
    model: torch.nn.Module, consume: Callable[[GemmEvent], None] = lambda _: None, report: Report = fail
) -> Iterator[StepTable]:
    """Yield the table that the tap fills, with its first step."""
    table = StepTable(Iterations())
    table.watch(list(named_te_modules(model)), named_operations(model))
    table.is_complete = True
    table.enter(0)
    every_step = EveryStep(Ring(), table, report)
    tap = GemmTap(ForwardClassifier(precision_features_in_eval=True), report, every_step, consume)
    modules = {id(named.module): named.module for named in named_te_modules(model)}
    layers = {id(named.module): [layer.name for layer in named.layers] for named in named_te_modules(model)}
    tap.watch(modules, layers, named_operations(model))
    tap.observe(layers, counts=False, attentions={})
    tap.install()
    try:
        yield table
    finally:
        tap.remove()
        assert not tap.installed


def assert_alike(events: list[GemmEvent], calls: list[Call]) -> None:
    assert [event.gemm for event in events] == [call.gemm for call in calls]
    for event, call in zip(events, calls, strict=True):
        assert event.a.data is call.a
        assert event.b.data is call.b
        assert event.arguments["layout"] == {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}[call.gemm]
        assert event.sizes == (call.n, call.m, call.k)
        if call.out is not None:
            assert event.out is call.out


def products_of(table: StepTable) -> list[Product]:
    gemms = table.step_gemms()
    assert gemms is not None
    return [product for _, product in table.products(gemms, 1)]


def layers_of(events: list[GemmEvent]) -> list[str]:
    return [f"{event.layer} {event.gemm}" for event in events]
