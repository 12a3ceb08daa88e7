"""The lengths of sequences, which only the device knows, read at the end of a step.

Attention of packed sequences takes where each begins and ends as a tensor on the device. Reading it in the forward
would make the host wait for the device, and would end the capture of a CUDA graph with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from te_precision_callbacks.base.devices import current_stream, follow, is_capturing
from te_precision_callbacks.coverage.matrix_products import Bounds, MatrixProduct

logger = logging.getLogger(__name__)


class Lengths:
    """The bounds of sequences that were seen in a step."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._streams: dict[torch.cuda.Stream | None, list[torch.Tensor]] = {}
        self._said = False

    def keep(self, products: Iterable[MatrixProduct]) -> list[MatrixProduct]:
        """The products of a call, with bounds that training does not change any more; none where they are unknown."""
        copies: dict[int, torch.Tensor] = {}
        return [
            product if product.bounds is None else product._replace(bounds=self._own(product.bounds, copies))
            for product in products
        ]

    def _own(self, bounds: Bounds, copies: dict[int, torch.Tensor]) -> Bounds | None:
        if bounds.queries.is_meta:
            return None
        if is_capturing():
            self._say_unknown()
            return None
        for tensor in bounds[:2]:
            if id(tensor) not in copies:
                copy = copies[id(tensor)] = tensor.detach().clone()
                self._kept[id(copy)] = copy
                self._streams.setdefault(current_stream(copy.device), []).append(copy)
        return bounds._replace(queries=copies[id(bounds.queries)], keys=copies[id(bounds.keys)])

    def _say_unknown(self) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "The first step captures a CUDA graph. The lengths of the sequences that its attention takes together"
                " are then unknown. The sequences count as one, so coverage has too many multiply-adds of attention."
                " Capture after the first step to have the lengths counted."
            )

    def read(self) -> dict[int, Sequence[int]]:
        """The id of each tensor of kept bounds -> its numbers, with one copy from each device."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for stream, tensors in self._streams.items():
            follow(stream, tensors)
        for tensor in self._kept.values():
            by_device.setdefault(tensor.device, []).append(tensor)
        found: dict[int, Sequence[int]] = {}
        for tensors in by_device.values():
            numbers = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors]).tolist()
            for tensor in tensors:
                found[id(tensor)], numbers = numbers[: tensor.numel()], numbers[tensor.numel() :]
        return found
