"""Functions as modules."""

from collections.abc import Callable
from typing import Any

import torch


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(*inputs, **keywords)


class Net(Function):
    """Its function gets the module too."""

    def forward(self, *given: Any, **keywords: Any) -> Any:
        return self.function(self, *given, **keywords)
