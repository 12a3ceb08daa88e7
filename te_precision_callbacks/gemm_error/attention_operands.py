"""What a kernel of attention was handed, and the queries of which its result is judged.

call = Call(HeadTensor(q, "sbhd"), HeadTensor(k, "sbhd"), HeadTensor(v, "sbhd", along_tokens=True), scale, ...)
places = sampled(call, seed, most_bytes)
call.query.rows(place.sequence, place.head, place.rows, torch.float32)      # [rows, size of a head], decoded
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics.formats import FloatFormat
from te_precision_callbacks.base.numerics.heads import HEADS, in_heads, to_heads
from te_precision_callbacks.base.numerics.layouts import MXFP8, PER_TENSOR, ScaleMemory, Stored, scaling_mode, stored
from te_precision_callbacks.gemm_error.accumulators import FLOAT32, Accumulator
from te_precision_callbacks.gemm_error.factors import FactorError
from te_precision_callbacks.gemm_error.probes import thin_dtype

MOST_HEADS = 8
"""The heads of sequences that are sampled."""

MOST_ROWS = 512
"""The queries that are sampled, of all heads together. A fault in 1 % of the rows is missed with a probability of
0.6 %."""

_MATRICES = 10
"""Matrices of [queries, keys] that exist at once."""


class HeadTensor:
    """Q, K, V or the result of attention, whose heads are decoded one by one.

    Args:
        tensor: a plain tensor, per-tensor FP8 or MXFP8, whose dimensions are those of ``form``; or a direction of one,
            in the format ``bhsd``.
        form: ``bshd``, ``sbhd``, ``bhsd`` or ``thd``. Sequences that are packed into one may be one sequence of
            ``bhsd``.
        along_tokens: of MXFP8, whether the blocks lie along the tokens (columnwise), not along the head.

    Attributes:
        form: the format.
        part: the codes and their scales; None for a plain tensor.
        shape: sequences (1 of ``thd``), heads, tokens and size of a head.
        device: where it is.

    Raises:
        FactorError: the tensor is of another kind, or has no data of that direction.
    """

    def __init__(self, tensor: Any, form: str, *, along_tokens: bool = False) -> None:
        self.form = form
        self.part: Stored | None = None
        mode = tensor.mode if isinstance(tensor, Stored) else scaling_mode(tensor)
        if isinstance(tensor, Stored):
            self.part, numbers, form = tensor, tensor.as_tensor(tensor.codes), HEADS
        elif mode is None and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            numbers = tensor.detach()
        elif mode == PER_TENSOR or (mode == MXFP8 and form != "thd"):
            found = tensor if mode == PER_TENSOR else in_heads(tensor, form)
            self.part = stored(found, columnwise=along_tokens and mode == MXFP8)
            if self.part is None:
                raise FactorError(f"The {type(tensor).__name__} lacks the data that attention reads")
            numbers = self.part.as_tensor(self.part.codes)
            form = form if mode == PER_TENSOR else HEADS
        else:
            raise FactorError(f"{type(tensor).__name__}: not an operand of attention of a known kind")
        self._heads = numbers.transpose(0, 1).unsqueeze(0) if form == "thd" else to_heads(numbers, form)
        self._factors = None if self.part is None else self.part.factors()
        sequences, heads, tokens, size = self._heads.shape
        self.shape = (sequences, heads, tokens, size)
        self.device = numbers.device

    @property
    def memory(self) -> Stored | torch.Tensor:
        """The codes and their scales, or the plain tensor, in the format ``bhsd``."""
        if self.part is None or self.part.mode == MXFP8:
            return self._heads if self.part is None else self.part
        return replace(self.part, codes=self._heads.reshape(-1, self.shape[3]), shape=self.shape)

    @property
    def numbers(self) -> FloatFormat | torch.dtype:
        """What its elements are rounded to."""
        return self._heads.dtype if self.part is None else self.part.element_format

    @property
    def spacing(self) -> Spacing:
        """The distance of the numbers that a result is rounded to."""
        scale = None if self.part is None else torch.reciprocal(self.part.scales.view(()))
        return Spacing.of(self.numbers, scale)

    def rows(self, sequence: int, head: int, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Tokens of a head: [tokens, size]. Where sequences are packed into one, a place is one in all of them."""
        sequence, tokens = min(sequence, self.shape[0] - 1), tokens.clamp(0, self.shape[2] - 1)
        found = self._heads[sequence, head].index_select(0, tokens)
        if self.part is None or self._factors is None:
            return found.to(dtype)
        factors = self._factors
        if self.part.mode == MXFP8:
            height, width = self.part.block
            first = (sequence * self.shape[1] + head) * self.shape[2]
            factors = factors.index_select(0, (first + tokens) // height).repeat_interleave(width, 1)
        return (self.part.element_format.decode(found) * factors).to(dtype)

    def head(self, sequence: int, head: int) -> Stored | torch.Tensor:
        """All tokens of a head, as :meth:`rows`: a view of the codes with their scales, or of the plain tensor."""
        sequences, heads, tokens, _ = self.shape
        sequence = min(sequence, sequences - 1)
        codes, part = self._heads[sequence, head], self.part
        if part is None:
            return codes
        shape = (codes.shape[0], codes.shape[1])
        if part.mode == PER_TENSOR:
            return replace(part, codes=codes, transposed=False, block=shape, shape=shape)
        first, height = (sequence * heads + head) * tokens, part.block[0]  # a head has whole blocks
        scales = part.scales[first // height : (first + tokens) // height]
        return replace(part, codes=codes, scale_memory=ScaleMemory(scales), shape=shape)

    def row_of(self, sequence: int, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of tokens in the tensor as a matrix, whose columns are those of all heads."""
        sequences, _, length, _ = self.shape
        if sequences == 1:
            return tokens
        return tokens * sequences + sequence if self.form == "sbhd" else sequence * length + tokens


class Spacing(NamedTuple):
    """The distance of the numbers of a format.

    Attributes:
        eps: relative to the number, at most.
        tiny: the least distance.
        largest: the largest number.
        scale: multiplies numbers before they are rounded: float32, without a dimension; None for 1.
    """

    eps: float
    tiny: float
    largest: float
    scale: torch.Tensor | None = None

    @classmethod
    def of(cls, kind: FloatFormat | torch.dtype, scale: torch.Tensor | None = None) -> Spacing:
        """That of a format."""
        if isinstance(kind, FloatFormat):
            eps = 2.0**-kind.mantissa_bits
            return cls(eps, kind.min_normal * eps, kind.max, scale)
        limits = torch.finfo(kind)
        return cls(limits.eps, limits.smallest_normal * limits.eps, limits.max, scale)

    def half_step(self, values: torch.Tensor) -> torch.Tensor:
        """By how much a number that is rounded to nearest is off, at most."""
        return torch.maximum(self.eps * values.abs(), self._unscaled(self.tiny, values)) / 2

    def flushed(self, values: torch.Tensor) -> torch.Tensor:
        """The numbers >= 0 that are rounded to 0; 0 for all others."""
        return torch.where(values <= self._unscaled(self.tiny / 2, values), values, 0.0)

    def clipped(self, values: torch.Tensor) -> torch.Tensor:
        """The numbers within the largest one."""
        largest = self._unscaled(self.largest, values)
        return torch.minimum(torch.maximum(values, -largest), largest)

    def _unscaled(self, number: float, like: torch.Tensor) -> torch.Tensor:
        found = torch.full((), number, dtype=like.dtype, device=like.device)
        return found if self.scale is None else found / self.scale.to(like.dtype)


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: of Transformer Engine's fused attention (TE 2.20.2, ``pytorch/cpp_extensions/
    fused_attn.py``, and ``get_full_mask`` of ``pytorch/attention/dot_product_attention/utils.py``).

    Attributes:
        left, right: how many keys to the left and to the right of its own place; -1 for all.
        at_the_end: whether the last query and the last key are at one place, not the first ones.
    """

    left: int = -1
    right: int = -1
    at_the_end: bool = False

    def sees(self, queries: torch.Tensor, keys: torch.Tensor, lengths: tuple[Any, Any]) -> torch.Tensor:
        """Which of some queries sees which key: bool, [queries, keys], from their places in a sequence."""
        of_queries, of_keys = lengths
        own = queries.unsqueeze(1) + (of_keys - of_queries if self.at_the_end else 0)
        seen: torch.Tensor = (keys < of_keys).unsqueeze(0) & (queries < of_queries).unsqueeze(1)
        if self.right >= 0:
            seen = seen & (keys.unsqueeze(0) <= own + self.right)
        if self.left >= 0:
            seen = seen & (keys.unsqueeze(0) >= own - self.left)
        return seen


@dataclass(frozen=True)
class Bounds:
    """Where sequences begin and end, on the device; int32, [sequences + 1] each.

    Attributes:
        lengths: sums of the lengths.
        places: the first tokens of the sequences that are packed into one tensor; None for one dimension each.
    """

    lengths: torch.Tensor
    places: torch.Tensor | None = None

    def length(self, sequence: int) -> torch.Tensor:
        """The tokens of a sequence."""
        return self.lengths[sequence + 1] - self.lengths[sequence]

    def first(self, sequence: int) -> torch.Tensor | int:
        """The place of the first token of a sequence."""
        return 0 if self.places is None else self.places[sequence]


@dataclass(frozen=True)
class Call:
    """What a kernel of attention was handed.

    Attributes:
        query, key, value: the operands. One head of keys may serve several heads of queries.
        scale: multiplies the scores.
        longest: the most queries and keys of a sequence.
        sequences: how many there are.
        mask: which keys a query sees.
        queries, keys: the sequences' bounds; None where all are as long as the longest.
        probabilities: the numbers that S is rounded to before it is divided by its sum: None for no rounding.
        result: the numbers that the result is rounded to.
        bias: added to the scores, [1 or sequences, 1 or heads, queries, keys]; None for none.
        bias_is_scaled: whether ``scale`` multiplies the bias too.
        accumulator: how the device sums.
        scores: the numbers that the scores are rounded to; None for float32.
        gradient_of_scores: the same of their gradient, in a backward.
    """

    query: HeadTensor
    key: HeadTensor
    value: HeadTensor
    scale: float
    longest: tuple[int, int]
    sequences: int
    mask: Mask
    queries: Bounds | None
    keys: Bounds | None
    probabilities: Spacing
    result: Spacing
    bias: torch.Tensor | None = None
    bias_is_scaled: bool = False
    accumulator: Accumulator = FLOAT32
    scores: Spacing | None = None
    gradient_of_scores: Spacing | None = None


class Place(NamedTuple):
    """Sampled queries of a head.

    Attributes:
        sequence, head: which head of queries.
        rows: int64, their places in the sequence.
        lengths: the queries and the keys of the sequence.
        first: the place of its first query and first key in the tensors.
    """

    sequence: int
    head: int
    rows: torch.Tensor
    lengths: tuple[Any, Any]
    first: tuple[Any, Any]


def bytes_of_query(keys: int) -> int:
    """The memory that one query needs with so many keys."""
    return _MATRICES * keys * thin_dtype().itemsize


def rows_within(longest: tuple[int, int], heads: int, most_bytes: int) -> int:
    """How many queries of a head are sampled; 0 if not even one fits.

    Args:
        longest: the most queries and keys of a sequence.
        heads: those of queries in all sequences.
        most_bytes: the memory for matrices of [queries, keys].
    """
    fit = most_bytes // max(1, bytes_of_query(longest[1]))
    return min(longest[0], MOST_ROWS // max(1, min(heads, MOST_HEADS)), fit)


def sampled(call: Call, seed: int, most_bytes: int) -> list[Place]:
    """The heads and queries that are computed again: the same for the same seed. Nothing waits for the device.

    Empty if not even one query fits in the memory.
    """
    heads, device = call.query.shape[1], call.query.device
    on_host, on_device = torch.Generator(), torch.Generator(device)
    on_host.manual_seed(seed)
    on_device.manual_seed(seed)
    of_sequences = torch.randperm(call.sequences, generator=on_host).tolist()
    of_heads = torch.randperm(heads, generator=on_host).tolist()
    number = rows_within(call.longest, call.sequences * heads, most_bytes)
    places = []
    for at in range(min(MOST_HEADS, call.sequences * heads) if number else 0):
        # No head of a sequence twice, and few heads twice.
        sequence = of_sequences[(at // heads + at % heads) % call.sequences]
        bounds, rows = (call.queries, call.keys), torch.arange(number, device=device)
        lengths = [
            longest if each is None else each.length(sequence)
            for each, longest in zip(bounds, call.longest, strict=True)
        ]
        if number < call.longest[0]:  # one of each of so many equal parts of the sequence
            drawn = torch.rand(number, generator=on_device, device=device, dtype=torch.float64)
            rows = ((rows + drawn) * (lengths[0] / number)).long()
            again = torch.zeros_like(rows, dtype=torch.bool)
            again[1:] = rows[1:] == rows[:-1]  # of a sequence that is shorter than that
            rows = torch.where(again, lengths[0], rows)
        first = [0 if each is None else each.first(sequence) for each in bounds]
        places.append(Place(sequence, of_heads[at % heads], rows, (lengths[0], lengths[1]), (first[0], first[1])))
    return places
