from __future__ import annotations

from te_precision_callbacks.base.errors import PrecisionDebugError


class ReferenceBackendError(PrecisionDebugError, RuntimeError):
    """Base class of the exceptions that the reference backend raises on purpose."""


class InstallError(ReferenceBackendError):
    """The reference backend cannot be installed here, or not with these arguments."""


class TransformerEngineVersionError(InstallError):
    """No Transformer Engine is installed, or not one of the versions that the reference backend was written for."""


class MissingFunctionError(ReferenceBackendError, NotImplementedError):
    """A function of Transformer Engine's compiled extension that the reference backend does not provide."""


class UnsupportedRecipeError(ReferenceBackendError, NotImplementedError):
    """A quantizer, or a format of a tensor, that the reference backend does not provide."""
