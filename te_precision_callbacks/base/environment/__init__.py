"""The environment variables that change precision or numerics, and what is wrong with those that are set.

Usage::

    environment = read_environment(os.environ)
    environment.settings  # name -> value
    environment.problems  # bad values, contradictions, misspelled names

Most variables are read once, when a library is imported: setting one later has no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.environment.variables import VARIABLES, WITHOUT_INFLUENCE

_PREFIXES = ("NVTE_", "NVDLFW_INSPECT_", "TE_PRECISION_")


@dataclass(frozen=True)
class Problem:
    """Something wrong with the variables that are set.

    Attributes:
        names: the variables.
        what: what is wrong, and what the library makes of it.
        remedy: what to do.
        stops: whether a run ends with an exception; otherwise a setting has no effect, or another one than it seems.
    """

    names: tuple[str, ...]
    what: str
    remedy: str
    stops: bool


@dataclass(frozen=True)
class Environment:
    """What the environment sets.

    Attributes:
        settings: the variables of :data:`VARIABLES` that are set, with their values.
        problems: what is wrong with them.
    """

    settings: Mapping[str, str]
    problems: tuple[Problem, ...]


def read_environment(environ: Mapping[str, str]) -> Environment:
    """The variables of :data:`VARIABLES` that are set, and what is wrong with them.

    Of a name that nobody reads, the name is reported, but not its value. No other variable is looked at.

    Args:
        environ: such as ``os.environ``.
    """
    settings = {name: environ[name] for name in VARIABLES if name in environ}
    return Environment(settings, (*_bad_values(settings), *_conflicts(settings), *_unknown(environ)))


def _bad_values(settings: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in settings.items():
        fault = VARIABLES[name](value)
        if fault is not None:
            yield Problem((name,), f"{name}={value!r}: {fault.what}", "Give another value, or unset it.", fault.stops)


_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def _conflicts(settings: Mapping[str, str]) -> Iterator[Problem]:
    """The contradictions that users have run into."""
    if all(settings.get(name) == "0" for name in _ATTENTION):  # NVIDIA/TransformerEngine, issue 1821
        yield Problem(
            _ATTENTION,
            f"{', '.join(_ATTENTION[:-1])} and {_ATTENTION[-1]} are all 0, so no attention kernel is left:"
            " DotProductAttention raises ValueError",
            "Allow one of them.",
            stops=True,
        )
    if tuple(map(settings.get, _TF32)) == ("0", "1"):  # Project-MONAI/MONAI, issue 6754
        yield Problem(
            _TF32,
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 asks for TF32, which NVIDIA_TF32_OVERRIDE=0 forbids: float32 matmuls"
            " run without TF32",
            "Unset one of them.",
            stops=False,
        )


def _unknown(environ: Mapping[str, str]) -> Iterator[Problem]:
    known = WITHOUT_INFLUENCE | VARIABLES.keys()
    for name in sorted(name for name in environ if name.startswith(_PREFIXES) and name not in known):
        what = (
            f"{name} has no effect: neither Transformer Engine 2.20, nvidia-dlfw-inspect 0.2 nor this package reads it"
        )
        nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
        remedy = f"Is {nearest[0]} meant?" if nearest else "Check its spelling, or unset it."
        yield Problem((name,), what, remedy, stops=False)
