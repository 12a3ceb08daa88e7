"""The share of a model's matrix products in low precision, and the reasons for the others.

coverage = session.coverage()
coverage.share("fp8")                          # 0.914, of all multiply-adds
print(coverage)                                # FP8 in 91.4 % of the multiply-adds (fprop 94.2, ...); ...
for product in coverage:
    print(product.layer, product.gemm, product.precision, product.macs, product.reason)
for row in coverage.state:
    print(row.subject, row.dtype, row.bytes, row.tensors)
"""

from __future__ import annotations

import enum
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from te_precision_callbacks.base.counts import first_of, group_by_key, many
from te_precision_callbacks.base.vocabulary import GEMMS, LOW_PRECISION, PRECISIONS
from te_precision_callbacks.layers.folding import fold_for_sentence

ProductName = Literal["fprop", "dgrad", "wgrad", "qk", "pv", "other", "lookup"]
Family = Literal["te", "te_ops", "torch", "functional", "attention", "lookup"]
Runs = Literal["seen", "planned", "never", "uncounted"]

_LOW_NAMES = ("NVFP4", "MXFP8", "FP8 block", "FP8")

_WIDTHS = {"nvfp4": 0, "mxfp8": 1, "fp8": 2, "bf16": 3, "fp16": 4, "fp32": 5, "fp64": 6}


class Reason(enum.Enum):
    """Reasons for high precision."""

    SECTION = "a feature of the config"
    NOT_TE = "not a TE layer"
    NOT_CONVERTED = "left out by the trainer's conversion"
    NO_AUTOCAST = "runs outside of te.autocast"
    RECOMPUTED = "a checkpoint recomputes it outside of te.autocast"
    RECIPE_EXCEPTION = "excluded by the recipe"
    BACKWARD_OVERRIDE = "the recipe's backward_override"
    ATTENTION = "attention without FP8"
    ENVIRONMENT = "an environment variable"
    UNKNOWN = "unknown reason"


EXCLUDED = "runs inside te.autocast(enabled=False)"
"""A reason that replaces :attr:`Reason.NO_AUTOCAST` in messages."""

REMEDIES: Mapping[Reason, str] = {
    Reason.SECTION: "remove the GEMM or the layer from that section",
    Reason.NOT_TE: "replace it with a Transformer Engine layer, such as te.Linear, if one exists",
    Reason.NOT_CONVERTED: "replace it with te.Linear by hand",
    Reason.NO_AUTOCAST: "run the forward inside te.autocast(enabled=True, recipe=...)",
    Reason.RECOMPUTED: "call transformer_engine.pytorch.checkpoint inside te.autocast; or keep torch's checkpoint"
    " and enter te.autocast inside the checkpointed function. Do not do both: with delayed"
    " scaling the scales would stay at 1",
    Reason.RECIPE_EXCEPTION: "use a recipe that quantizes all of its tensors",
    Reason.BACKWARD_OVERRIDE: "leave backward_override out of the recipe, and NVTE_BACKWARD_OVERRIDE unset",
    Reason.ENVIRONMENT: "unset the variable",
    Reason.ATTENTION: "give the recipe fp8_dpa=True, on a GPU whose fused attention has FP8",
}

_WITH_VALUE = (Reason.NOT_TE, Reason.NOT_CONVERTED)
"""The reasons that precede their reference in messages."""


@dataclass(frozen=True)
class Product:
    """A matrix product of a layer, in a step.

    Attributes:
        layer: the path of the module, as in ``session.layers``; with the name of the weight if that is not ``weight``.
        family: ``te`` and ``te_ops`` for layers of Transformer Engine, ``torch`` for torch's linear and convolution
            layers, ``attention`` for the two products of attention, ``lookup`` for embeddings; else ``functional``.
        gemm: ``fprop``, ``dgrad`` and ``wgrad`` of a product with a weight; ``qk`` and ``pv`` of attention; ``lookup``;
            ``other`` for a product without a weight.
        backward: whether it belongs to the backward; ``qk``, ``pv`` and ``other`` are two products each there.
        n, m, k: the result has n rows of m elements, each a sum of k products; of the largest call in the step.
        batch: the number of products of a call.
        calls: the calls in a step, over its micro-batches, without recomputation by activation checkpoints.
        macs: the multiply-adds of a step; masks of attention do not reduce them.
        operands: tensor -> its format.
        runs: ``seen`` if it ran, ``planned`` if nothing ran, ``never`` if the step skipped it, ``uncounted`` if
            something ran that may multiply matrices and is not counted.
        not_run: the reason if the step skipped it, as in ``session.precision``, or if it is not counted.
        reason: the reason for high precision; None in low precision, and if it does not run.
        reason_ref: the details: the section with its file and line, the dimension, the variable.
        recipe: the recipe of a layer of Transformer Engine, as in :class:`GemmPrecision`; else empty.
    """

    layer: str
    family: Family
    gemm: ProductName
    backward: bool
    n: int
    m: int
    k: int
    batch: int
    calls: int
    macs: int
    operands: Mapping[str, str] = field(hash=False)
    runs: Runs = "seen"
    not_run: str = ""
    reason: Reason | None = None
    reason_ref: str = ""
    recipe: str = ""

    @classmethod
    def left_out(cls, layer: str, family: Family, gemm: ProductName, why: str) -> Product:
        return cls(layer, family, gemm, gemm != "fprop", 0, 0, 0, 1, 0, 0, {}, "never", why)

    @classmethod
    def uncounted(cls, layer: str, family: Family, what: str, *, backward: bool = False) -> Product:
        return cls(layer, family, "other", backward, 0, 0, 0, 1, 0, 0, {}, "uncounted", what)

    @functools.cached_property
    def precision(self) -> str:
        """The precision of the widest operand: ``fp8``, ``mxfp8``, ``nvfp4``, ``bf16``, ``fp32``, ...; empty for a
        look-up.
        """
        return _widest(tuple(self.operands.values()))

    @property
    def format_name(self) -> str:
        """The precision for messages: ``FP8``, ``FP8 block``, ``MXFP8``, ``NVFP4``, ``BF16``, ..."""
        return _format_name(tuple(self.operands.values()))

    @property
    def why(self) -> str:
        """The reason for high precision, or for not running; empty in low precision."""
        if self.not_run:
            return self.not_run
        if self.reason is None:
            return ""
        if self.reason_ref in ("", self.reason.value):
            return self.reason.value
        if self.reason in _WITH_VALUE:
            return f"{self.reason.value}: {self.reason_ref}"
        return self.reason_ref

    @property
    def is_low(self) -> bool:
        return self.precision in LOW_PRECISION["quantized"]


@functools.cache
def _widest(formats: tuple[str, ...]) -> str:
    return precision_of(" -> ".join(filter(None, formats)))


@functools.cache
def _format_name(formats: tuple[str, ...]) -> str:
    widest = _widest(formats)
    in_blocks = all(text.startswith("FP8 block") for text in formats if precision_of(text) == "fp8")
    if widest == "fp8" and in_blocks:
        return "FP8 block"
    return widest.upper()


@functools.cache
def precision_of(text: str) -> str:
    """The precision of a format such as ``FP8 block E4M3``: one of :data:`PRECISIONS`, or the format in lower case. Of
    several formats it is the widest.
    """
    names = [part.strip().partition(" ")[0].lower() for part in text.split("->")]
    return max(names, key=lambda name: _WIDTHS.get(name, len(_WIDTHS)))


@dataclass(frozen=True)
class StateRow:
    """Tensors of one subject and dtype that a model and its optimizers keep.

    Attributes:
        subject: one of :data:`te_precision_callbacks.base.vocabulary.SUBJECTS`.
        dtype: as torch names it, ``float32``, or the format of quantized parameters, ``FP8 E4M3``.
        tensors: the number of tensors; for ``reduce``, in a step.
        bytes: their total size; for ``reduce``, of the reduced buffers.
    """

    subject: str
    dtype: str
    tensors: int
    bytes: int


class Coverage(tuple[Product, ...]):
    """All matrix products of a model in a step, in the order of their first run.

    ``str(coverage)`` is a one-line summary.

    Attributes:
        state: the dtypes of the state of the model and its optimizers, after the first step.
        steps: the steps with these products, such as ``steps 4 to 19``; empty if all steps have them.
    """

    state: tuple[StateRow, ...]
    steps: str

    def __new__(
        cls, products: Iterable[Product] = (), *, state: tuple[StateRow, ...] = (), steps: str = ""
    ) -> Coverage:
        coverage = super().__new__(cls, products)
        coverage.state = state
        coverage.steps = steps
        return coverage

    def macs(self, precision: str | None = None, *, gemm: str | None = None, backward: bool | None = None) -> int:
        """The multiply-adds of a step.

        Args:
            precision: one of :data:`PRECISIONS`.
            gemm: as ``Product.gemm``.
            backward: True for the backward only, False for the forward only.

        Raises:
            KeyError: there is no such precision.
        """
        names = None if precision is None else PRECISIONS[precision]
        return sum(
            count
            for (row_precision, row_gemm, row_backward), count in self._sums.items()
            if (names is None or row_precision in names)
            and gemm in (None, row_gemm)
            and backward in (None, row_backward)
        )

    @functools.cached_property
    def _sums(self) -> Mapping[tuple[str, str, bool], int]:
        sums: dict[tuple[str, str, bool], int] = defaultdict(int)
        for product in self:
            sums[product.precision, product.gemm, product.backward] += product.macs
        return sums

    def share(self, precision: str, *, gemm: str | None = None, backward: bool | None = None) -> float:
        """The share of multiply-adds in a precision, 0 to 1. Arguments as in :meth:`macs`.

        nan without products, and if the step has products that are not counted or not observed.
        """
        if self.has_unknown:
            return float("nan")
        whole = self.macs(gemm=gemm, backward=backward)
        if whole:
            return self.macs(precision, gemm=gemm, backward=backward) / whole
        return float("nan")

    @property
    def has_backward(self) -> bool:
        """Return whether products of a backward ran, counted or not."""
        return any(product.backward and product.runs != "never" for product in self)

    @property
    def in_high_precision(self) -> list[Product]:
        return sorted((product for product in self if product.macs and not product.is_low), key=lambda p: -p.macs)

    @property
    def is_estimate(self) -> bool:
        """Return whether the shares are an estimate, because something uncounted ran."""
        return bool(self.not_counted)

    @property
    def is_incomplete(self) -> bool:
        return any(reason.startswith(ESTIMATED) for reason in self.not_counted)

    @property
    def has_unknown(self) -> bool:
        """Return whether products ran that are neither counted nor estimated."""
        return not all(reason.startswith(ESTIMATED) for reason in self.not_counted)

    @property
    def not_counted(self) -> dict[str, list[str]]:
        """Reason -> layers with uncounted operators or kernels."""
        return group_by_key(
            dict.fromkeys((product.not_run, product.layer) for product in self if product.runs == "uncounted")
        )

    def __str__(self) -> str:
        whole = self.macs()
        uncounted = list_uncounted(self)
        for index, text in enumerate(uncounted):
            if not text.startswith((ESTIMATED, NOT_OBSERVED)):
                uncounted[index] = f"not counted: {text}"
        first = "; ".join(uncounted)
        if not whole:
            return f"{first[:1].upper()}{first[1:]}" or "No matrix product has run"
        whole_name = "multiply-adds"
        if self.has_unknown:
            whole_name = "counted multiply-adds"
        if self.steps:
            whole_name += f" in {self.steps}"
        if self.is_incomplete:
            whole_name += ", an estimate"
        low: defaultdict[str, Counter[str]] = defaultdict(Counter)
        wholes = Counter(dict.fromkeys((*GEMMS, *_PARTS.values()), 0))
        for product in self:
            part = _PARTS.get(product.gemm, product.gemm)
            wholes[part] += product.macs
            if product.macs and product.is_low:
                low[product.format_name][part] += product.macs
        texts = []
        for name in sorted(low, key=_LOW_NAMES.index) or ["FP8"]:
            share = percent(sum(low[name].values()) / whole)
            parts = ", ".join(f"{part} {percent(low[name][part] / macs)}" for part, macs in wholes.items() if macs)
            texts.append(f"{name} in {share} % of the {whole_name} ({parts})")
        high = group_by_key((product.precision, product) for product in self.in_high_precision)
        for precision, products in high.items():
            share = percent(Coverage(products).macs() / whole)
            texts.append(f"{share} % in {precision.upper()}: {', '.join(_causes(products))}")
        if self.has_unknown:
            return f"{first[:1].upper()}{first[1:]}; {'; '.join(texts)}"
        if not self.has_backward:
            texts.append(_NO_BACKWARD)
        return "; ".join([*texts, *uncounted])


_PARTS = {"qk": "attention", "pv": "attention", "other": "other products"}


def list_uncounted(coverage: Coverage) -> list[str]:
    texts = (f"{what} ({fold_for_sentence(*layers, most=2)})" for what, layers in coverage.not_counted.items())
    return first_of(texts, _MOST_CAUSES)


NOTHING = Coverage()

MOST_WITHOUT_BACKWARD = 10
"""The most steps without a backward, such as skipped batches, that count as steps before the first one."""

ESTIMATED = "estimated: "
"""Prefix of the reason for uncounted calls that may be counted in later steps."""

NOT_OBSERVED = "not observed: "
"""Prefix of the reason for layers that ran in every step without being observed."""

_NO_BACKWARD = "no backward has run, so only products of the forward are counted"

_MOST_CAUSES = 3


def percent(share: float) -> str:
    """A share in percent: 100 only for everything, and 0 only for nothing."""
    text = f"{100 * share:.1f}"
    if text == "100.0" and share < 1:
        return "99.9"
    if text == "0.0" and share > 0:
        return "0.1"
    if share in (0, 1):
        return text.removesuffix(".0")
    return text


def _causes(products: Iterable[Product]) -> list[str]:
    pairs: dict[tuple[str, str], None] = {}
    for product in products:
        why = product.why
        if product.reason is Reason.NOT_TE:
            why = Reason.NOT_TE.value
        pairs[why, product.layer] = None
    layers = group_by_key(pairs)
    texts = [f"{fold_for_sentence(*names, most=2)} ({why})".removesuffix(" ()") for why, names in layers.items()]
    return first_of(texts, _MOST_CAUSES, f"and {many(len(texts) - _MOST_CAUSES, 'more reason')}")
