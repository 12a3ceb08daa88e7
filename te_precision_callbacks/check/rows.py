"""The rows of a plan: layers in which the same is planned are one row.

for row in rows(checked):
    print(row.names, row.gemms["fprop"], row.macs)      # ['layers.{0-31}.proj'] FP8 E4M3 536870912
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.check.checked_model import ActingFeature, CheckedModel
from te_precision_callbacks.coverage.coverage import Product, Reason
from te_precision_callbacks.coverage.gemm_precision import in_short
from te_precision_callbacks.layers.folding import folded


@dataclass(frozen=True)
class PlannedGemm:
    """What is planned for a GEMM, or for a look-up.

    Attributes:
        operands: tensor -> its format; empty for a GEMM that does not run.
        precision: as :attr:`Product.precision`.
        not_run, reason, reason_ref: as in :class:`Product`.
    """

    operands: Mapping[str, str]
    precision: str
    not_run: str
    reason: str
    reason_ref: str

    @classmethod
    def of(cls, product: Product) -> PlannedGemm:
        """What is planned for a product."""
        reason = "" if product.reason is None else product.reason.value
        return cls(product.operands, product.precision, product.not_run, reason, product.reason_ref)

    def __str__(self) -> str:
        return f"not run: {self.not_run}" if self.not_run else in_short(self.operands)


@dataclass(frozen=True)
class PlannedLayers:
    """Layers in which the same is planned.

    Attributes:
        layers: their names.
        family: as :attr:`Product.family`.
        gemms: GEMM, ``lookup``, ``qk``, ``pv`` or ``other``, the last three with ``backward`` behind them for those of
            the backward -> what is planned.
        features: what acts on them.
        macs: the multiply-adds of all of them in a step.
    """

    layers: tuple[str, ...]
    family: str
    gemms: Mapping[str, PlannedGemm]
    features: tuple[ActingFeature, ...]
    macs: int

    @property
    def names(self) -> list[str]:
        """The layers' names in short."""
        return folded(self.layers)

    @property
    def why(self) -> str:
        """Why GEMMs are not in low precision, but for features of the config: each reason with its GEMMs, unless it is
        that of all."""
        of_reason: dict[str, list[str]] = {}
        for gemm, planned in self.gemms.items():
            if planned.reason not in ("", Reason.SECTION.value):
                of_reason.setdefault(planned.reason_ref or planned.reason, []).append(gemm)
        running = [gemm for gemm, planned in self.gemms.items() if planned.operands]
        texts = (why if gemms == running else f"{', '.join(gemms)}: {why}" for why, gemms in of_reason.items())
        return "; ".join(texts)


def rows(checked: CheckedModel) -> list[PlannedLayers]:
    """The rows of a plan, in the order of the model."""
    of_layer: dict[str, list[Product]] = {}
    for product in checked.coverage:
        of_layer.setdefault(product.layer, []).append(product)
    alike: dict[object, list[str]] = {}
    for layer, products in of_layer.items():
        planned = tuple(
            (p.family, _name(p), tuple(p.operands.items()), p.not_run, p.reason, p.reason_ref) for p in products
        )
        alike.setdefault((planned, checked.features.get(layer, ())), []).append(layer)
    return [
        PlannedLayers(
            tuple(layers),
            of_layer[layers[0]][0].family,
            {_name(product): PlannedGemm.of(product) for product in _in_order(of_layer[layers[0]])},
            checked.features.get(layers[0], ()),
            sum(product.macs for layer in layers for product in of_layer[layer]),
        )
        for layers in alike.values()
    ]


def _name(product: Product) -> str:
    return f"{product.gemm} backward" if product.backward and product.gemm not in GEMMS else product.gemm


def _in_order(products: list[Product]) -> list[Product]:
    """A layer's products in the order of :data:`GEMMS`."""
    return sorted(products, key=lambda product: GEMMS.index(product.gemm) if product.gemm in GEMMS else len(GEMMS))
