"""A hash of a tensor's content, computed on its device."""

from __future__ import annotations

import torch

_PIECE = 1 << 24


def content_hash(*tensors: torch.Tensor) -> str:
    """The hash of the bytes of tensors: 16 hexadecimal digits.

    It is the sum of the 64-bit words w, each as ``w ^ (w >> 32)`` times an odd number that follows from its position,
    modulo 2^64: a change of one word always changes the sum. (Without the shift, two words that change their highest
    bits, the signs of two numbers, would cancel.) Cryptographic hashes would need all weights on the host. For each
    tensor the host waits once.

    Args:
        tensors: plain tensors of any shape and dtype, on any device.
    """
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found = torch.zeros((), dtype=torch.int64, device=data.device)
        for start in range(0, data.numel(), _PIECE):
            piece = data[start : start + _PIECE]
            words = torch.zeros(-(-piece.numel() // 8), dtype=torch.int64, device=data.device)
            words.view(torch.uint8)[: piece.numel()] = piece
            first = start // 4 + 1
            odd = torch.arange(first, first + 2 * words.numel(), 2, device=data.device)
            words ^= (words >> 32) & 0xFFFFFFFF  # torch's shift of a negative number fills in ones
            found += (words * odd).sum()
        total = total * 0x9E3779B97F4A7C15 + int(found) + data.numel()
    return f"{total % 2**64:016x}"
