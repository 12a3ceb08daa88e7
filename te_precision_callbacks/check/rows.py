"""The rows of a plan. Layers with the same plan share a row.

for row in rows(checked):
    print(row.names, row.gemms["fprop"], row.macs)      # ['layers.{0-31}.proj'] Product(...) 536870912
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.check.checked_model import ActingFeature, CheckedModel
from te_precision_callbacks.coverage.coverage import Product, Reason
from te_precision_callbacks.layers.folding import folded


@dataclass(frozen=True)
class PlannedLayers:
    """Layers with the same plan.

    Attributes:
        layers: their names.
        gemms: GEMM, ``lookup``, ``qk``, ``pv`` or ``other`` -> its product in the first of the layers. The last three
            are followed by ``backward`` for products of the backward.
        features: the features that act on them.
        macs: the multiply-adds of all of them in a step.
    """

    layers: tuple[str, ...]
    gemms: Mapping[str, Product]
    features: tuple[ActingFeature, ...]
    macs: int

    @property
    def family(self) -> str:
        """The family of the layers, as :attr:`Product.family`."""
        return next(iter(self.gemms.values())).family

    @property
    def names(self) -> list[str]:
        """The layers' names in short."""
        return folded(self.layers)

    @property
    def why(self) -> str:
        """The reasons for high precision, except features. A reason that does not hold for all GEMMs names them."""
        by_reason: dict[str, list[str]] = {}
        for gemm, product in self.gemms.items():
            if product.reason not in (None, Reason.SECTION):
                by_reason.setdefault(product.reason_ref or product.why, []).append(gemm)
        running = [gemm for gemm, product in self.gemms.items() if product.operands]
        texts = (why if gemms == running else f"{', '.join(gemms)}: {why}" for why, gemms in by_reason.items())
        return "; ".join(texts)


def rows(checked: CheckedModel) -> list[PlannedLayers]:
    """The rows of a plan, in the order of the model."""
    by_layer: dict[str, list[Product]] = {}
    for product in checked.coverage:
        by_layer.setdefault(product.layer, []).append(product)
    alike: dict[object, list[str]] = {}
    for layer, products in by_layer.items():
        planned = tuple(
            (p.family, _name(p), tuple(p.operands.items()), p.not_run, p.reason, p.reason_ref) for p in products
        )
        alike.setdefault((planned, checked.features.get(layer, ())), []).append(layer)
    return [
        PlannedLayers(
            tuple(layers),
            {_name(product): product for product in sorted(by_layer[layers[0]], key=_order)},
            checked.features.get(layers[0], ()),
            sum(product.macs for layer in layers for product in by_layer[layer]),
        )
        for layers in alike.values()
    ]


def _name(product: Product) -> str:
    return f"{product.gemm} backward" if product.backward and product.gemm not in GEMMS else product.gemm


def _order(product: Product) -> int:
    return GEMMS.index(product.gemm) if product.gemm in GEMMS else len(GEMMS)
