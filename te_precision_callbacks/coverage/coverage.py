"""Which of a model's matrix products run in low precision, and why the others do not.

coverage = session.coverage()
coverage.share("fp8")                          # 0.914, of all multiply-adds
coverage.share("fp8", gemm="wgrad")
print(coverage)                                # FP8 in 91.4 % of the multiply-adds (fprop 94.2, ...); ...
for product in coverage:
    print(product.layer, product.gemm, product.precision, product.macs, product.reason)
for row in coverage.state:
    print(row.subject, row.dtype, row.bytes, row.tensors)
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from te_precision_callbacks.base.vocabulary import GEMMS, LOW_PRECISION, PRECISIONS
from te_precision_callbacks.layers.folding import in_sentence

ProductName = Literal["fprop", "dgrad", "wgrad", "qk", "pv", "other", "lookup"]
Family = Literal["te", "te_ops", "torch", "functional", "attention", "lookup"]
Runs = Literal["seen", "planned", "never", "uncounted"]

_LOW_NAMES = ("NVFP4", "MXFP8", "FP8 block", "FP8")
"""The names of low precision, the narrowest first."""

_ORDER = ("nvfp4", "mxfp8", "fp8", "bf16", "fp16", "fp32", "fp64")


class Reason(enum.Enum):
    """Why a product does not run in low precision."""

    SECTION = "a feature of the config"
    NOT_TE = "not a TE layer"
    NOT_CONVERTED = "left out by the trainer's conversion"
    NO_AUTOCAST = "runs outside of te.autocast"
    RECOMPUTED = "a checkpoint computes it again outside of te.autocast"
    RECIPE_EXCEPTION = "the recipe excepts it"
    BACKWARD_OVERRIDE = "the recipe's backward_override"
    ATTENTION = "attention without FP8"
    ENVIRONMENT = "an environment variable"
    UNKNOWN = "for a reason that is not known"


REMEDIES: Mapping[Reason, str] = {
    Reason.SECTION: "take the GEMM or the layer out of that section",
    Reason.NOT_TE: "make it a layer of Transformer Engine, or leave it out of what the contract demands",
    Reason.NOT_CONVERTED: "convert it by hand: te.Linear in place of the layer",
    Reason.NO_AUTOCAST: "run its forward inside te.autocast(enabled=True, recipe=...)",
    Reason.RECOMPUTED: "checkpoint it with transformer_engine.pytorch.checkpoint, called inside of te.autocast; or keep"
    " torch's checkpoint, and enter te.autocast inside of what is checkpointed. With delayed scaling, doing both would"
    " leave the scales at 1",
    Reason.RECIPE_EXCEPTION: "use a recipe that quantizes all of its tensors",
    Reason.BACKWARD_OVERRIDE: "leave backward_override out of the recipe, and NVTE_BACKWARD_OVERRIDE unset",
    Reason.ENVIRONMENT: "unset the variable",
    Reason.ATTENTION: "give the recipe fp8_dpa=True, on a GPU whose fused attention has FP8",
}
"""Reason -> what makes the product run in low precision."""

_WITH_VALUE = (Reason.NOT_TE, Reason.NOT_CONVERTED)
"""The reasons that say more than what exactly it is."""


@dataclass(frozen=True)
class Product:
    """A matrix product of a layer, in a step.

    Attributes:
        layer: the path of the module, as in ``session.layers``; followed by the name of the weight where a module has
            several, or keeps it under another name than ``weight``.
        family: ``te`` and ``te_ops`` for layers of Transformer Engine, ``torch`` for torch's own linear and convolution
            layers, ``attention`` for the two products of attention, ``lookup`` for embeddings, and ``functional`` for
            all others.
        gemm: ``fprop``, ``dgrad`` and ``wgrad`` of a product with a weight; ``qk`` and ``pv`` of attention; ``lookup``;
            ``other`` for a product without a weight.
        backward: whether it belongs to the backward. Of ``qk``, ``pv`` and ``other`` these are two products each.
        n, m, k: the result has n rows of m elements, each a sum of k products; of its first call in the step.
        batch: the number of products of a call.
        calls: the calls in a step, over its micro-batches. What an activation checkpoint computes again is not counted.
        macs: the multiply-adds of a step.
        operands: tensor -> its format.
        runs: ``seen`` if it has run, ``planned`` if nothing has run, ``never`` if the step left it out; ``uncounted``
            for what has run and may have multiplied matrices, of which no multiply-adds are counted.
        not_run: why the step left it out, as in ``session.precision``; what is not counted, and why.
        reason: why it does not run in low precision; None if it does, or does not run.
        reason_ref: what exactly: the section with its file and line, the dimension, the variable.
        mask_share: of attention, the share of the multiply-adds that its mask leaves, such as (S + 1) / (2 S) of a
            causal mask over S tokens; 1 without a mask, None where that is not known. ``macs`` has all of them.
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
    mask_share: float | None = None

    @classmethod
    def left_out(cls, layer: str, family: Family, gemm: ProductName, why: str) -> Product:
        """A product that the step has left out."""
        return cls(layer, family, gemm, gemm != "fprop", 0, 0, 0, 1, 0, 0, {}, "never", why)

    @classmethod
    def uncounted(cls, layer: str, family: Family, what: str, *, backward: bool = False) -> Product:
        """What has run in a layer and is not counted: what, and why."""
        return cls(layer, family, "other", backward, 0, 0, 0, 1, 0, 0, {}, "uncounted", what)

    @functools.cached_property
    def precision(self) -> str:
        """The precision that it computes in, which is that of its widest operand: ``fp8``, ``mxfp8``, ``nvfp4``,
        ``bf16``, ``fp32``, ...; of any other format that format in lower case, empty for a look-up."""
        return _widest(tuple(self.operands.values()))

    @property
    def format_name(self) -> str:
        """The precision as a line names it: ``FP8``, ``FP8 block``, ``MXFP8``, ``NVFP4``, ``BF16``, ..."""
        return _format_name(tuple(self.operands.values()))

    @property
    def why(self) -> str:
        """Why it does not run in low precision, or at all, in words; empty if it runs in low precision."""
        if self.not_run:
            return self.not_run
        if self.reason is None or self.reason_ref in ("", self.reason.value):
            return "" if self.reason is None else self.reason.value
        return f"{self.reason.value}: {self.reason_ref}" if self.reason in _WITH_VALUE else self.reason_ref

    @property
    def is_low(self) -> bool:
        """Whether it runs in low precision."""
        return self.precision in LOW_PRECISION["quantized"]


def is_low(operands: Mapping[str, str]) -> bool:
    """Whether a product of these operands, tensor -> format, runs in low precision."""
    return _widest(tuple(operands.values())) in LOW_PRECISION["quantized"]


@functools.cache
def _widest(formats: tuple[str, ...]) -> str:
    found = [precision_of(text) for text in formats if text]
    return max(found, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER), default="")


@functools.cache
def _format_name(formats: tuple[str, ...]) -> str:
    widest = _widest(formats)
    of_fp8 = [text for text in formats if precision_of(text) == "fp8"]
    return "FP8 block" if widest == "fp8" and all(text.startswith("FP8 block") for text in of_fp8) else widest.upper()


@functools.cache
def precision_of(text: str) -> str:
    """The precision of an operand's format, such as ``FP8 block E4M3``: one of :data:`PRECISIONS`, or the format in
    lower case. Of several formats in one step it is the widest."""
    names = [part.strip().partition(" ")[0].lower() for part in text.split("->")]
    return max(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


@dataclass(frozen=True)
class StateRow:
    """The tensors of one subject and type that a model and its optimizers keep, apart from the operands of products.

    Attributes:
        subject: one of :data:`te_precision_callbacks.base.vocabulary.SUBJECTS`.
        dtype: their type, as torch names it: ``float32``; of quantized parameters the format: ``FP8 E4M3``.
        tensors: their number; for ``reduce``, in a step.
        bytes: the memory of all of them; for ``reduce``, of the reduced buffers.
    """

    subject: str
    dtype: str
    tensors: int
    bytes: int


class Coverage(tuple[Product, ...]):
    """All matrix products of a model in a step, in the order in which they ran first.

    Its text is one line that says how much runs in low precision, and what does not.

    Attributes:
        state: what the model and its optimizers keep, and in which types, after the first step.
        steps: the steps that it holds for, where others had other products: ``steps 4 to 19``; else empty.
    """

    state: tuple[StateRow, ...]
    steps: str

    def __new__(
        cls, products: Iterable[Product] = (), *, state: tuple[StateRow, ...] = (), steps: str = ""
    ) -> Coverage:
        made = super().__new__(cls, products)
        made.state, made.steps = state, steps
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (tuple(self),), {"state": self.state, "steps": self.steps}

    def macs(self, precision: str | None = None, *, gemm: str | None = None, backward: bool | None = None) -> int:
        """The multiply-adds of a step, of all products or of some.

        Args:
            precision: one of :data:`PRECISIONS`.
            gemm: as ``Product.gemm``.
            backward: those of the backward, or of the forward.

        Raises:
            KeyError: there is no such precision.
        """
        meant = None if precision is None else PRECISIONS[precision]
        return sum(
            macs
            for (of_precision, of_gemm, of_backward), macs in self._sums.items()
            if (meant is None or of_precision in meant) and gemm in (None, of_gemm) and backward in (None, of_backward)
        )

    @functools.cached_property
    def _sums(self) -> Mapping[tuple[str, str, bool], int]:
        """Precision, GEMM, and whether it belongs to the backward -> multiply-adds."""
        sums: dict[tuple[str, str, bool], int] = defaultdict(int)
        for product in self:
            sums[product.precision, product.gemm, product.backward] += product.macs
        return sums

    def share(self, precision: str, *, gemm: str | None = None, backward: bool | None = None) -> float:
        """The share of the multiply-adds in a precision, from 0 to 1; nan where there are none. Arguments and errors
        are those of :meth:`macs`."""
        whole = self.macs(gemm=gemm, backward=backward)
        return self.macs(precision, gemm=gemm, backward=backward) / whole if whole else float("nan")

    @property
    def has_backward(self) -> bool:
        """Whether products of a backward have run, counted or not."""
        return any(product.backward and product.runs != "never" for product in self)

    @property
    def in_high_precision(self) -> list[Product]:
        """The products that run, and not in low precision; the largest first."""
        return sorted((product for product in self if product.macs and not product.is_low), key=lambda p: -p.macs)

    @property
    def is_estimate(self) -> bool:
        """Whether the shares are an estimate, since something has run and is not counted."""
        return any(product.runs == "uncounted" for product in self)

    @property
    def is_incomplete(self) -> bool:
        """Whether calls were not counted that may be counted in later steps."""
        return any(product.not_run.startswith(ESTIMATED) for product in self if product.runs == "uncounted")

    @property
    def not_counted(self) -> dict[str, list[str]]:
        """What has run and is not counted, and why -> the layers; the shares leave it out."""
        found: dict[str, list[str]] = {}
        for product in self:
            if product.runs == "uncounted" and product.layer not in found.setdefault(product.not_run, []):
                found[product.not_run].append(product.layer)
        return found

    def __str__(self) -> str:
        whole = self.macs()
        left = [f"not counted: {text}" for text in left_out_in_words(self)]
        left += [] if self.has_backward or not whole else [_NO_BACKWARD]
        if not whole:
            return "; ".join(["No matrix product has been seen", *left])
        held = f" in {self.steps}" if self.steps else ""
        held += ", an estimate" if self.is_estimate else ""
        low: dict[str, dict[str, int]] = {}
        for product in self:
            if product.macs and product.is_low:
                low.setdefault(product.format_name, defaultdict(int))[product.gemm] += product.macs
        texts = []
        for name in sorted(low, key=_LOW_NAMES.index) or ["FP8"]:
            of_gemm = low.get(name, {})
            share = percent(sum(of_gemm.values()) / whole)
            wholes = {gemm: self.macs(gemm=gemm) for gemm in GEMMS}
            apart = [f"{gemm} {percent(of_gemm.get(gemm, 0) / each)}" for gemm, each in wholes.items() if each]
            listed = f" ({', '.join(apart)})" if apart else ""
            texts.append(f"{name} in {share} % of the multiply-adds{held}{listed}")
        high = self.in_high_precision
        for precision in dict.fromkeys(product.precision for product in high):
            of_precision = [product for product in high if product.precision == precision]
            share = percent(sum(product.macs for product in of_precision) / whole)
            texts.append(f"{share} % in {precision.upper()}: {', '.join(_causes(of_precision))}")
        return "; ".join([*texts, *left])


def left_out_in_words(coverage: Coverage) -> list[str]:
    """What is not counted, each with its layers."""
    found = coverage.not_counted
    texts = [f"{what} ({in_sentence(*layers, most=2)})" for what, layers in found.items()]
    return texts[:_MOST_CAUSES] + ([f"and {len(texts) - _MOST_CAUSES} more"] if len(texts) > _MOST_CAUSES else [])


NOTHING = Coverage()
"""That of a run without products."""

MOST_WITHOUT_BACKWARD = 10
"""So many steps without a backward, as of batches that a script skips, count as steps before the first one."""

ESTIMATED = "estimated: "
"""The beginning of the text on calls that were not counted, and may be in later steps."""

_NO_BACKWARD = "no product of a backward has been seen, so these are those of a forward alone"

_MOST_CAUSES = 3


def percent(share: float) -> str:
    """A share in percent: 100 only for everything, and 0 only for nothing."""
    text = f"{100 * share:.1f}"
    if text == "100.0" and share < 1:
        return "99.9"
    return "0.1" if text == "0.0" and share > 0 else text.removesuffix(".0") if share in (0, 1) else text


def _causes(products: Iterable[Product]) -> list[str]:
    """The layers of some products with their reason, the largest first."""
    layers: dict[str, dict[str, None]] = {}
    for product in products:
        why = product.reason.value if product.reason is Reason.NOT_TE else product.why
        layers.setdefault(why, {})[product.layer] = None
    texts = [f"{in_sentence(*names, most=2)}{f' ({why})' if why else ''}" for why, names in layers.items()]
    more = len(texts) - _MOST_CAUSES
    return texts[:_MOST_CAUSES] + ([f"and {more} more reason{'s' if more > 1 else ''}"] if more > 0 else [])
