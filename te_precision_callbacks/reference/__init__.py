"""The reference backend: Transformer Engine's own Python on any torch device, without its compiled extension.

Usage::

    from te_precision_callbacks import reference

    reference.install()  # before the first import of transformer_engine
    import transformer_engine.pytorch as te

The backend is slow and exact. Scripts that call ``.cuda()`` need ``reference.install(pretend_cuda=True)``, or
``te-precision run SCRIPT``. docs/reference-backend.md has the details.
"""

from te_precision_callbacks.reference.errors import (
    InstallError,
    MissingFunctionError,
    ReferenceBackendError,
    TransformerEngineVersionError,
    UnsupportedRecipeError,
)
from te_precision_callbacks.reference.install import (
    Installation,
    install,
    install_where_needed,
    installed,
    is_installed,
)

__all__ = [
    "InstallError",
    "Installation",
    "MissingFunctionError",
    "ReferenceBackendError",
    "TransformerEngineVersionError",
    "UnsupportedRecipeError",
    "install",
    "install_where_needed",
    "installed",
    "is_installed",
]
