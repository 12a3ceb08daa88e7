"""The cost of high precision: multiply-adds in low precision, and planned milliseconds on a device."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.search.units import Choice
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import time_products


class Costs:
    """Costs of choices over all-low.

    Args:
        recipe: the name of the recipe in low precision, as of ``te-precision check``.
        device: whose times count; without one, the cost is the share of multiply-adds in high precision.
    """

    def __init__(self, products: Sequence[Product], recipe: str, device: Device | None) -> None:
        self._layers = group_by_key((product.layer, product) for product in products)
        self._macs: dict[tuple[str, str], int] = {(product.layer, product.gemm): product.macs for product in products}
        self._recipe = recipe
        self._device = device
        self._all_low: dict[str, float] = {}
        if device is not None:
            self._all_low = {layer: self._layer_ms(layer, frozenset()) for layer in self._layers}

    def low_share(self, choice: Choice) -> float:
        """Return the share of multiply-adds of the searched layers in low precision."""
        total = sum(self._macs.values())
        return 1 - sum(self._macs.get(switch, 0) for switch in choice) / total

    def extra_ms(self, choice: Choice) -> float | None:
        """Return planned milliseconds of a step over all-low; None without a device."""
        if self._device is None:
            return None
        layers = {layer for layer, _ in choice} & set(self._layers)
        return sum(self._layer_ms(layer, choice) - self._all_low[layer] for layer in layers)

    def of(self, choice: Choice) -> float:
        """Return the cost by which groups compete."""
        extra = self.extra_ms(choice)
        if extra is None:
            return 1 - self.low_share(choice)
        return extra

    def _layer_ms(self, layer: str, choice: Choice) -> float:
        assert self._device is not None  # noqa: S101
        recipes = [
            (product, "" if (layer, product.gemm) in choice else self._recipe) for product in self._layers[layer]
        ]
        return sum(time.low_ms for time in time_products(recipes, self._device))
