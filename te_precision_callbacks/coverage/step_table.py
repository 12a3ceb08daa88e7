"""The table of a step: each GEMM of Transformer Engine by layer, formats and sizes, and the products of its attention.

Formats are read from the two tensors passed to the GEMM, and sizes from its result (``tap.py``). A GEMM that a backward
skips has a reason instead.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.vocabulary import OPERANDS, GemmName
from te_precision_callbacks.coverage.coverage import Family, Product
from te_precision_callbacks.coverage.formats import dtype_name, gemms_left_out
from te_precision_callbacks.coverage.gemm_precision import (
    HIGH_PRECISION,
    NO_BACKWARD,
    Format,
    GemmFact,
    PrecisionHistory,
)
from te_precision_callbacks.coverage.matrix_products import Sizes
from te_precision_callbacks.coverage.products import (
    FUSED,
    PlacedProduct,
    SeenProduct,
    gemm_sizes,
    sum_products,
)
from te_precision_callbacks.coverage.spans import Iterations
from te_precision_callbacks.layers.naming import NamedModule, NamedOperation, modules_with_gemms
from te_precision_callbacks.te import modules as te_modules

Call: TypeAlias = tuple[str, GemmName, str, object, object, "torch.Size | None"]
"""A GEMM of a step: its layer, name and recipe (empty in high precision), the formats of operands A and B, each as a
dtype or a key of :attr:`StepTable.formats`, and the shape of the result of its layer's fprop. The shape is None for a
GEMM that is no product of its own: of a forward that is computed again."""

_A, _B = 3, 4
"""The places of the formats in a :data:`Call`."""


class AttentionCall(NamedTuple):
    """Attention in a forward or its backward, with the formats and the sizes of its two products."""

    layer: str
    backward: bool
    qk: tuple[str, str]
    pv: tuple[str, str]
    qk_sizes: Sizes
    pv_sizes: Sizes

    def products(self, kernel: str) -> list[SeenProduct]:
        """Return its products; in a backward, each stands for two, the gradients of both operands."""
        return [
            SeenProduct(self.layer, "attention", "qk", self.qk, self.qk_sizes, kernel, backward=self.backward),
            SeenProduct(self.layer, "attention", "pv", self.pv, self.pv_sizes, kernel, backward=self.backward),
        ]


def attention_sizes(query: Any, key: Any, value: Any, form: str) -> tuple[Sizes, Sizes]:
    """Return the sizes of both products of operands in a format such as ``sbhd``, with a letter per dimension.

    Packed sequences (``thd``) count as one sequence, since their bounds are on the device.
    """
    sizes = dict(zip(form, query.size(), strict=True))
    batch = sizes.get("b", 1) * sizes["h"]
    length = "s" if "s" in form else "t"
    rows = sizes[length]
    columns = key.size()[form.index(length)]
    return (rows, columns, sizes["d"], batch), (rows, value.size()[-1], columns, batch)


class Unseen(NamedTuple):
    """A layer of Transformer Engine that ran without a visible GEMM."""

    layer: str
    backward: bool
    why: str


@dataclass(frozen=True)
class StepGemms:
    """The products of Transformer Engine in a step.

    Attributes:
        excluded: the layers with a forward inside ``te.autocast(enabled=False)``.
        left_out: layer -> GEMM that the backward skipped -> the reason.
        has_backward: whether a backward of Transformer Engine's layers ran.
    """

    calls: Mapping[Call, int]
    attention: Mapping[AttentionCall, int]
    unseen: set[Unseen]
    excluded: set[str]
    left_out: Mapping[str, Mapping[GemmName, str]]
    has_backward: bool

    def plus(self, other: StepGemms) -> StepGemms:
        """Return the products of both."""
        return replace(
            self,
            calls=Counter(self.calls) + Counter(other.calls),
            attention=Counter(self.attention) + Counter(other.attention),
            unseen=self.unseen | other.unseen,
            excluded=self.excluded | other.excluded,
        )

    @property
    def forms(self) -> frozenset[object]:
        """The GEMMs without their sizes."""
        return frozenset(call[:5] for call in self.calls)

    @property
    def key(self) -> object:
        reasons = frozenset((layer, *layer_reasons.items()) for layer, layer_reasons in self.left_out.items())
        counts = frozenset(self.calls.items()), frozenset(self.attention.items())
        return *counts, frozenset(self.unseen), frozenset(self.excluded), reasons

    @property
    def recomputed_outside(self) -> frozenset[str]:
        """The layers that a reentrant checkpoint of torch, which does not restore autocast, recomputed without the
        recipe of their first forward."""
        recipes: dict[bool, dict[str, set[bool]]] = {True: defaultdict(set), False: defaultdict(set)}
        for layer, gemm, recipe, _, _, shape in self.calls:
            if gemm == "fprop":
                recipes[shape is None][layer].add(bool(recipe))
        return frozenset(
            layer for layer, first in recipes[True].items() if True in first and recipes[False].get(layer) == {False}
        )


NO_GEMMS = StepGemms({}, {}, set(), set(), {}, has_backward=False)


class StepTable:
    """Counts the GEMMs of a step by layer, formats and sizes; what differs from the step before is kept.

    Attributes:
        formats: key of an operand's format -> its text; a dtype is a key by itself.
        calls: GEMM of the step -> the number of its calls.
        attention: fused attention of the step -> the number of its calls.
        forwards: id of a module with a training forward in the step -> whether its input needs a gradient.
        excluded: the layers with a forward inside ``te.autocast(enabled=False)``.
        unseen: the layers that ran without a visible GEMM.
        modules: id of a module -> the module and its layers.
        features: layer -> its in_features and out_features on this rank.
        operations: the layers of ``te.ops``.
        is_complete: whether all GEMMs of the step are seen.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.formats: dict[object, str] = {}
        self.modules: Mapping[int, tuple[torch.nn.Module, Sequence[str]]] = {}
        self.features: dict[str, tuple[int, int]] = {}
        self.operations: frozenset[str] = frozenset()
        self.is_complete = False
        self._order: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._history = PrecisionHistory(iterations)
        self._iteration: int | None = None
        self._written: tuple[object, ...] | None = None
        self._left_out: Mapping[str, Mapping[GemmName, str]] = {}  # of the step written last
        self._gemms: StepGemms | None = None
        self.abandon()

    def watch(self, modules: Sequence[NamedModule], operations: Sequence[NamedOperation]) -> None:
        """Set the modules of Transformer Engine, and the operations of ``te.ops``, that run GEMMs in the steps."""
        self.modules = {id(named.module): (named.module, named.names) for named in modules}
        self.operations = frozenset(name for operation in operations for name in operation.names)
        self.features = {}
        for named in modules_with_gemms(modules, operations):
            sizes = te_modules.of(named.module).features(named.module)
            self.features.update(zip(named.names, sizes, strict=True))

    def enter(self, iteration: int) -> None:
        if iteration == self._iteration:
            return
        self.write()
        if self._iteration is not None and iteration < self._iteration:
            self._written = None  # the history is truncated at this iteration
        self._iteration = iteration
        self.abandon()

    def leave(self, iteration: int) -> None:
        """End an iteration, perhaps without a forward."""
        self.enter(iteration)
        self._history.ran(iteration)
        self.write()
        self.abandon()

    def abandon(self) -> None:
        """Forget the GEMMs of the step so far."""
        self.calls: defaultdict[Call, int] = defaultdict(int)
        self.attention: defaultdict[AttentionCall, int] = defaultdict(int)
        self.forwards: dict[int, bool] = {}
        self.excluded: set[str] = set()
        self.unseen: set[Unseen] = set()
        self._had_backward = False
        self._size: tuple[object, ...] | None = None  # of what the step had at the last call of write()

    @property
    def lacks_backward(self) -> bool:
        return bool(self.calls) and not self._has_backward

    @property
    def _has_backward(self) -> bool:
        # The last GEMM of most steps is one of the backward.
        return self._had_backward or any(gemm != "fprop" for _, gemm, *_ in reversed(self.calls))

    def note_backward(self) -> None:
        self._had_backward = True

    @property
    def order(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Layer -> position of its first forward, and of its first backward."""
        self.write()
        return self._order

    @property
    def changes(self) -> int:
        return self._history.changes

    @property
    def history(self) -> PrecisionHistory:
        self.write()
        return self._history

    def trained_in_fp8(self, layer: str) -> bool | None:
        """Return whether a layer ran under a recipe when it last trained; None if it is not known to have trained."""
        operands = self.history.last_fact(layer, "fprop").operands
        if not operands:
            return None
        return any(form.recipe for _, formats in operands for form in formats)

    def write(self) -> None:
        """Write the step so far, which may continue, to the history, unless it is like the last one written."""
        size = len(self.calls), len(self.forwards), len(self.excluded), self._had_backward
        if self._iteration is None or not self.calls or size == self._size:
            return
        self._size = size
        self._history.ran(self._iteration)
        has_backward = self._has_backward
        forms = {call[:5] for call in self.calls}
        if (forms, self.forwards, self.excluded, has_backward) == self._written:
            return
        self._written = forms, dict(self.forwards), set(self.excluded), has_backward
        self._left_out = self._reasons() if has_backward else {}
        for layer, gemm, *_ in self.calls:
            order = self._order[gemm != "fprop"]
            order.setdefault(layer, len(order))
        for (layer, gemm), calls in group_by_key(((call[0], call[1]), call) for call in self.calls).items():
            operands = []
            for tensor, column in zip(OPERANDS[gemm], (_B, _A), strict=True):
                formats = dict.fromkeys(Format(self.text_of(call[column]), call[2]) for call in calls)
                operands.append((tensor, tuple(formats)))
            fact = GemmFact(tuple(operands), excluded=layer in self.excluded)
            self._history.put(layer, gemm, self._iteration, fact)
        for layer in dict.fromkeys(call[0] for call in self.calls):
            for gemm, reason in self._left_out.get(layer, {}).items():
                fact = GemmFact(not_run=reason, excluded=layer in self.excluded)
                self._history.put(layer, gemm, self._iteration, fact)

    def text_of(self, key: object) -> str:
        return dtype_name(key) if isinstance(key, torch.dtype) else self.formats[key]

    def _reasons(self) -> dict[str, dict[GemmName, str]]:
        """Return layer -> GEMM that the backward of the step did not run -> the reason."""
        reasons: dict[str, dict[GemmName, str]] = {}
        for key, needs_gradient in self.forwards.items():
            module, layers = self.modules.get(key, (None, ()))
            if module is None:
                continue
            left_out = gemms_left_out(module, layers, input_needs_gradient=needs_gradient)
            for layer in layers:
                reasons[layer] = {"dgrad": NO_BACKWARD, "wgrad": NO_BACKWARD, **left_out[layer]}
        for layer, gemm, *_ in self.calls:
            reasons.get(layer, {}).pop(gemm, None)
        return reasons

    def step_gemms(self) -> StepGemms:
        """Return the products of the step so far, the same object as before if they are equal; :data:`NO_GEMMS`
        if some may be missing."""
        if not self.is_complete:
            return NO_GEMMS
        self.write()
        step = StepGemms(
            self.calls, self.attention, self.unseen, self.excluded, self._left_out, has_backward=self._has_backward
        )
        if step != self._gemms:
            self._gemms = replace(
                step,
                calls=dict(self.calls),
                attention=dict(self.attention),
                unseen=set(self.unseen),
                excluded=set(self.excluded),
            )
        return self._gemms

    def products(self, gemms: StepGemms, steps: int) -> Iterator[PlacedProduct]:
        """Yield a product for each layer, GEMM, recipe and pair of formats, as the mean over some steps; then those
        of attention."""
        seen: list[tuple[SeenProduct, float]] = []
        for order, (call, count) in enumerate(gemms.calls.items()):
            layer, gemm, recipe, a, b, shape = call
            if shape is not None:
                sizes = *gemm_sizes(math.prod(shape[:-1]), *self.features[layer])[gemm], 1
                formats = self.text_of(b), self.text_of(a)
                product = SeenProduct(
                    layer,
                    self.family(layer),
                    gemm,
                    formats,
                    sizes,
                    backward=gemm != "fprop",
                    place=order,
                    recipe=recipe or HIGH_PRECISION,
                )
                seen.append((product, count / steps))
        for attention, count in gemms.attention.items():
            times = count * (1 + attention.backward) / steps
            seen += [(replace(product, place=len(gemms.calls)), times) for product in attention.products(FUSED)]
        yield from sum_products(seen)
        for layer, reasons in gemms.left_out.items():
            for gemm, reason in reasons.items():
                yield PlacedProduct(len(gemms.calls), Product.left_out(layer, self.family(layer), gemm, reason))

    def uncounted(self, gemms: StepGemms) -> Iterator[Product]:
        for layer, backward, why in sorted(gemms.unseen):
            yield Product.uncounted(layer, self.family(layer), why, backward=backward)

    def family(self, layer: str) -> Family:
        return "te_ops" if layer in self.operations else "te"
