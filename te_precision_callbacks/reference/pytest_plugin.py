"""A pytest plugin: unmodified GPU tests on the reference backend.

``pytest -p te_precision_callbacks.reference.pytest_plugin tests/``: without CUDA, "cuda" means the CPU in the test
process. ``TE_PRECISION_REFERENCE_CAPABILITY`` (``9.0`` or ``10.0``) chooses the compute capability.
"""

from __future__ import annotations

import pytest

from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.install import install, installed


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    import torch

    try:
        install(pretend_cuda=not torch.cuda.is_available())
    except ReferenceBackendError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header() -> str | None:
    installation = installed()
    if installation is None:
        return None
    device = "a GPU emulated on the CPU" if installation.pretend_cuda else f"the device {installation.device!r}"
    return "Transformer Engine: reference backend on {}, compute capability {}.{}".format(
        device, *installation.capability
    )
