"""Events of Transformer Engine's GEMMs and attention, and the tensors that features observe.

Transformer Engine frees operands right after a GEMM and reuses their memory, so they must be read or copied during the
call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from te_precision_callbacks.base.vocabulary import GemmName, OperandName
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.te.tensors import gemm_operand, has_scale


class GemmOperand(NamedTuple):
    """An operand of a GEMM.

    Attributes:
        tensor: ``activation``, ``weight`` or ``gradient``.
        given: the object that Transformer Engine's Python code passed: a plain or quantized tensor, or the wrapper of
            its debug path.
        columnwise: whether the GEMM reads columnwise data.
        high: the tensor before quantization, if it exists and a feature requested it.
        first: whether this is the first GEMM of the forward and its backward that reads the tensor.
    """

    tensor: OperandName
    given: Any
    columnwise: bool
    high: torch.Tensor | None = None
    first: bool = True

    @property
    def data(self) -> Any:
        """The plain or quantized tensor or storage that the extension reads; None if it lacks this direction."""
        return gemm_operand(self.given, columnwise=self.columnwise)


class Kept(TypedDict, total=False):
    """Data that is kept from the forward of a layer until its backward.

    Attributes:
        iteration: the iteration of the forward.
        probed: (layer, GEMM) -> the products of operand A with the probes.
        sums: (layer, GEMM) -> a copy of the tensor that the GEMM adds to.
    """

    iteration: int
    probed: dict[tuple[str, str], Any]
    sums: dict[tuple[str, str], torch.Tensor]


@dataclass(eq=False)  # not frozen, since creating a frozen object takes three times as long
class GemmEvent:
    """A GEMM that has run.

    Attributes:
        layer: the name of the layer.
        expert: index of the expert in its module; None outside of grouped GEMMs.
        a, b: the operands, as the extension names them: it multiplies B by A.
        out: the result, in high precision or quantized, including a sum that it was added to. None if a grouped GEMM
            wrote the results of all experts into one buffer.
        recipe: the recipe of the forward, as spelled in names of statistics; empty in high precision.
        arguments: all arguments of the call (``transformer_engine/pytorch/cpp_extensions/gemm.py``).
        gelu_input: the result before GELU, if the GEMM applies it.
        before: the return value of :data:`BeforeSum`; None if the GEMM does not accumulate.
        kept: data that is kept from the forward until its backward.
        watchers: tensor -> features that observe it.
        key: of the prepared launch that the GEMM leaves; empty if it leaves none.
    """

    layer: str
    gemm: GemmName
    expert: int | None
    a: GemmOperand
    b: GemmOperand
    out: Any
    kind: ForwardKind
    recipe: str
    arguments: Mapping[str, Any]
    gelu_input: Any = None
    before: Any = None
    kept: Kept = field(default_factory=Kept)
    watchers: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    key: tuple[object, ...] = ()

    @property
    def operands(self) -> tuple[GemmOperand, GemmOperand]:
        return self.a, self.b

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int]:
        """n, m and k: the result has n rows of m elements, each a sum of k products. Read it while the event is new."""
        layout = self.arguments["layout"]
        rows = _matrix(self.a.data)
        columns = _matrix(self.b.data)
        m, k = rows if layout[0] == "T" else rows[::-1]
        return columns[1] if layout[1] == "T" else columns[0], m, k


BeforeSum = Callable[[str, GemmName, Any, Kept], Any]
"""Called before a GEMM accumulates, with the layer, the GEMM, the sum so far, and ``kept`` of the forward; its
return value becomes ``before`` of the event."""


def _matrix(data: Any) -> tuple[int, int]:
    shape = tuple(data.size()) if hasattr(data, "size") else ()
    return math.prod(shape[:-1]), shape[-1] if shape else 1


class Watched(NamedTuple):
    """A tensor while a layer computes with it.

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
        """Return the quantized tensor that the GEMM of a direction reads, else the other direction's, if any."""
        first, second = (self.columnwise, self.rowwise) if columnwise else (self.rowwise, self.columnwise)
        if has_scale(first):
            return first
        if second is not first and has_scale(second):
            return second
        return None
