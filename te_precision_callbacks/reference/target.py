"""The GPU that the reference backend emulates: (9, 0), the default, or (10, 0).

The compute capability determines which recipes Transformer Engine supports, its default recipe, and the memory layout
of Float8 data, which the backend follows. Hopper (9, 0): delayed scaling is the default, columnwise Float8 data is a
stored transpose. Blackwell (10, 0): MXFP8 is the default, NVFP4 is supported, Float8 data is never stored transposed.
"""

from __future__ import annotations

import os

from te_precision_callbacks.reference.errors import InstallError

ENVIRONMENT_VARIABLE = "TE_PRECISION_REFERENCE_CAPABILITY"
DEFAULT: tuple[int, int] = (9, 0)
ALLOWED: tuple[tuple[int, int], ...] = ((9, 0), (10, 0))

_chosen: tuple[int, int] | None = None


def capability() -> tuple[int, int]:
    """The compute capability from :func:`choose`, else from the environment, else (9, 0).

    Raises:
        InstallError: the environment variable is neither ``9.0`` nor ``10.0``.
    """
    if _chosen is not None:
        return _chosen
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    allowed = {"{}.{}".format(*pair): pair for pair in ALLOWED}
    if not text:
        return DEFAULT
    if text.strip() not in allowed:
        raise InstallError(
            f"{ENVIRONMENT_VARIABLE}={text!r} in the environment: the reference backend emulates "
            f"{' or '.join(allowed)}. Set one of these, or unset it for {DEFAULT[0]}.{DEFAULT[1]}."
        )
    return allowed[text.strip()]


def choose(value: tuple[int, int]) -> None:
    """Set the capability for this process."""
    global _chosen
    _chosen = value


def validate(value: tuple[int, int]) -> tuple[int, int]:
    """Return a capability.

    Raises:
        InstallError: ``value`` is neither (9, 0) nor (10, 0).
    """
    if value not in ALLOWED:
        raise InstallError(
            f"install(capability={value!r}): the reference backend emulates {' or '.join(map(str, ALLOWED))}. Give one"
            " of these."
        )
    return value
