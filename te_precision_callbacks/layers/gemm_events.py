"""Events of GEMMs and attention of Transformer Engine, and the tensors that features look at.

Transformer Engine frees operands right after a GEMM and reuses their memory: a listener reads in its call, or copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_precision_callbacks.base.numerics.layouts import gemm_operand, has_scale
from te_precision_callbacks.base.vocabulary import GemmName, OperandName
from te_precision_callbacks.layers.forwards import ForwardKind

OUTSIDE = "outside"
"""The layer of a GEMM outside of the model's layers, such as a GEMM in a custom autograd function."""


class GemmOperand(NamedTuple):
    """One of the two operands of a GEMM.

    Attributes:
        tensor: ``activation``, ``weight`` or ``gradient``.
        given: what Transformer Engine's Python passed: a plain or quantized tensor, or the wrapper of its debug path.
        columnwise: whether the GEMM reads columnwise data.
        high: the tensor before its quantization, if it exists and a listener requested it.
        first: whether no GEMM of the same forward, or of its backward, has read the tensor before.
        recomputed: whether ``high`` was recomputed, since a fused kernel had quantized it; its codes may differ.
    """

    tensor: OperandName
    given: Any
    columnwise: bool
    high: torch.Tensor | None = None
    first: bool = True
    recomputed: bool = False

    @property
    def on_debug_path(self) -> bool:
        return hasattr(self.given, "rowwise_gemm_tensor")

    @property
    def data(self) -> Any:
        """The plain or quantized tensor or storage that the extension reads; None without data of that direction."""
        given = self.given
        if self.on_debug_path:
            given = given.columnwise_gemm_tensor if self.columnwise else given.rowwise_gemm_tensor
        return gemm_operand(given, columnwise=self.columnwise)


@dataclass(eq=False)  # not frozen, which takes three times as long to make
class GemmEvent:
    """One GEMM.

    Attributes:
        layer: the name of the layer, or :data:`OUTSIDE`.
        expert: the number of the expert in its module; None outside of grouped GEMMs.
        a, b: the operands, as the extension names them: it multiplies B by A.
        out: the result, high-precision or quantized, including the addend. None if a grouped GEMM wrote the results of
            all experts into one buffer.
        order: the number of the GEMM in the iteration, in order of execution.
        recipe: the recipe of its forward, as spelled in names of statistics; empty in high precision.
        arguments: the other arguments of the call (``transformer_engine/pytorch/cpp_extensions/gemm.py``).
        gelu_input: the result before GELU, if the GEMM applies it.
        before: the return value of the :data:`BeforeSum` listener; None without an addend.
        kept: data that listeners keep from the forward until its backward.
    """

    layer: str
    gemm: GemmName
    expert: int | None
    a: GemmOperand
    b: GemmOperand
    out: Any
    order: int
    kind: ForwardKind
    recipe: str
    arguments: Mapping[str, Any]
    gelu_input: Any = None
    before: Any = None
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[GemmOperand, GemmOperand]:
        return self.a, self.b

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """n, m and k. The result has n rows of m elements, each a sum of k products. A listener reads them first."""
        layout = self.arguments["layout"]
        rows, columns = (_matrix(operand.data) for operand in self.operands)
        m, k = rows if layout[0] == "T" else rows[::-1]
        return columns[1] if layout[1] == "T" else columns[0], m, k


class AttentionSizes(NamedTuple):
    """The sizes of attention's two products: ``batch`` products of each, sequences times heads, of ``rows`` queries by
    ``columns`` keys, with heads of ``size`` for queries and keys, and ``size_v`` for values.
    """

    batch: int
    rows: int
    columns: int
    size: int
    size_v: int

    @classmethod
    def of(cls, query: Any, key: Any, value: Any, form: str) -> AttentionSizes:
        """The sizes of operands in a format such as ``sbhd``, with one letter for each dimension. Packed sequences
        (``thd``) count as one, since their bounds are on the device.
        """
        rows, columns = (dict(zip(form, tensor.size(), strict=True)) for tensor in (query, key))
        sequences = rows.get("b", 1) * rows["h"]
        length = "s" if "s" in form else "t"
        return cls(sequences, rows[length], columns[length], rows["d"], value.size()[-1])


@dataclass(frozen=True)
class AttentionEvent:
    """The products of fused attention, in a forward or its backward.

    ``gradient`` is the gradient of the result. ``probabilities`` and ``scores`` are the quantizers of the probabilities
    and of the scores' gradient, or None. ``arguments`` are those of ``fused_attn_fwd`` or ``fused_attn_bwd``
    (``transformer_engine/pytorch/cpp_extensions/fused_attn.py``).
    """

    layer: str
    backward: bool
    query: Any
    key: Any
    value: Any
    gradient: Any
    probabilities: Any
    scores: Any
    sizes: AttentionSizes
    kind: ForwardKind
    arguments: Mapping[str, Any]


BeforeSum = Callable[[str, GemmName, Any, dict[Any, Any]], Any]
"""Listener called before a GEMM adds to its result, with the layer, the GEMM, the addend, and the data kept for the
forward; its return value is in the event."""

Listener = Callable[[GemmEvent], None]
"""Listener called after each GEMM. Its exceptions are reported and do not reach training."""


def _matrix(data: Any) -> tuple[int, int]:
    shape = tuple(data.size()) if hasattr(data, "size") else ()
    return math.prod(shape[:-1]), shape[-1] if shape else 1


class Watched(NamedTuple):
    """A tensor at the moment when a layer computes with it.

    Attributes:
        values: the tensor in high precision; None for a weight that exists only in quantized form.
        rowwise, columnwise: the operands of the two GEMMs that read the tensor, quantized or plain.
        quantizer: Transformer Engine's quantizer of the tensor, or None.
        tp_group: the tensor-parallel group, None without tensor parallelism.
    """

    layer: str
    tensor: str
    iteration: int
    values: torch.Tensor | None
    rowwise: Any = None
    columnwise: Any = None
    quantizer: Any = None
    tp_group: dist.ProcessGroup | None = None

    def quantized(self, *, columnwise: bool = False) -> Any:
        """The quantized tensor that the GEMM of a direction reads, or the one of the other direction, or None."""
        first, second = (self.columnwise, self.rowwise) if columnwise else (self.rowwise, self.columnwise)
        if has_scale(first):
            return first
        return second if second is not first and has_scale(second) else None
