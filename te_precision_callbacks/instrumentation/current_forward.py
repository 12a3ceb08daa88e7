"""What the hooks know of the forward that a thread runs."""

from __future__ import annotations

import threading
from typing import Any

from te_precision_callbacks.layers.forwards import ForwardKind


class CurrentForward(threading.local):
    """The forward of an armed module that was asked last in this thread.

    Attributes:
        kind: its kind.
        module: its module.
        input_needs_gradient: whether its backward is going to run dgrad, as far as its input tells.
        has_quantized_input: whether its input is quantized already.
        dgrad: the quantizer of the dgrad that was built last, until it is paired with another one.
    """

    kind: ForwardKind
    module: Any
    input_needs_gradient: bool = True
    has_quantized_input: bool = False
    dgrad: Any = None
