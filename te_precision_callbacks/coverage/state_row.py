"""What a model and its optimizers keep, apart from the operands of its products, and in which types.

for row in session.coverage().state:
    print(row.subject, row.dtype, row.bytes, row.tensors)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateRow:
    """The tensors of one subject and type.

    Attributes:
        subject: one of :data:`te_precision_callbacks.base.vocabulary.SUBJECTS`.
        dtype: their type, as torch names it: ``float32``; of quantized parameters the format: ``FP8 E4M3``.
        tensors: how many there are; of ``reduce``, ``norm``, ``softmax``, ``residual`` and ``logits`` in a step.
        bytes: the memory of all of them; of ``reduce`` that of the reduced buffers; 0 of ``norm`` and ``softmax``.
    """

    subject: str
    dtype: str
    tensors: int
    bytes: int
