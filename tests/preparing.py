"""Set up a process of the tests."""

import torch

from te_precision_callbacks import reference


def prepare() -> None:
    """Where there is no GPU, the reference backend is installed; torch computes in one thread."""
    if not torch.cuda.is_available():
        reference.install()
    torch.set_num_threads(1)
