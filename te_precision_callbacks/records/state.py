"""What a model and its optimizers keep beside the operands of its products, and in which types.

for row in session.coverage().state:
    print(row.subject, row.dtype, row.bytes, row.tensors)
"""

from __future__ import annotations

from dataclasses import dataclass

SUBJECTS = (
    "parameter",
    "gradient",
    "main_grad",
    "reduce",
    "optimizer_state",
    "master_weight",
    "norm",
    "softmax",
    "residual",
    "logits",
)
"""What is kept: ``parameter``, ``gradient``: those of the model. ``main_grad``: Megatron's gradients, which accumulate
over micro-batches. ``reduce``: what ranks sum of the gradients. ``optimizer_state``: tensors of the optimizer as large
as a parameter. ``master_weight``: those of them, or of its parameters, that hold a weight in another type than the
model does. ``norm``, ``softmax``: results of torch's norms and of softmax. ``residual``: what goes from block to block.
``logits``: what the model returns, or what cross entropy takes."""


@dataclass(frozen=True)
class StateRow:
    """The tensors of one subject and type.

    Attributes:
        subject: one of :data:`SUBJECTS`.
        dtype: their type, as torch names it: ``float32``; of quantized parameters the format: ``FP8 E4M3``.
        tensors: how many there are; of ``reduce``, ``norm``, ``softmax``, ``residual`` and ``logits`` in a step.
        bytes: the memory of all of them; of ``reduce`` that of the reduced buffers; 0 of ``norm`` and ``softmax``.
    """

    subject: str
    dtype: str
    tensors: int
    bytes: int
