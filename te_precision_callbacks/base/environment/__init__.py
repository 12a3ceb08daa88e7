"""The environment variables that change precision or numerics, and what is wrong with those that are set.

Usage::

    environment = read_environment(os.environ)
    for setting in environment.settings:
        setting.variable.effect, setting.value
    environment.problems  # bad values, contradictions, misspelled names

Most variables are read once, when a library is imported: setting one later has no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.environment import others, transformer_engine
from te_precision_callbacks.base.environment.conflicts import Problem, conflicts
from te_precision_callbacks.base.environment.variable import Variable

VARIABLES: tuple[Variable, ...] = (*transformer_engine.VARIABLES, *others.VARIABLES)
"""The variables that change precision or numerics, and those of nvidia-dlfw-inspect and of this package."""

_DEFAULTS = {variable.name: variable.default for variable in VARIABLES}
_PREFIXES = ("NVTE_", "NVDLFW_INSPECT_", "TE_PRECISION_")
_KNOWN = transformer_engine.WITHOUT_INFLUENCE | set(_DEFAULTS)


@dataclass(frozen=True)
class Setting:
    """A variable of :data:`VARIABLES` that is set."""

    variable: Variable
    value: str


@dataclass(frozen=True)
class Environment:
    """What the environment sets.

    Attributes:
        settings: the variables that are set, in the order of :data:`VARIABLES`.
        problems: what is wrong with them.
    """

    settings: tuple[Setting, ...]
    problems: tuple[Problem, ...]


def read_environment(environ: Mapping[str, str]) -> Environment:
    """The variables of :data:`VARIABLES` that are set, and what is wrong with them.

    Of a name that nobody reads, the name is reported, but not its value. No other variable is looked at.

    Args:
        environ: such as ``os.environ``.
    """
    settings = tuple(Setting(variable, environ[variable.name]) for variable in VARIABLES if variable.name in environ)
    problems = [problem for setting in settings if (problem := _bad_value(setting)) is not None]
    problems += conflicts({setting.variable.name: setting.value for setting in settings}, _DEFAULTS)
    problems += [_unknown(name) for name in sorted(environ) if name.startswith(_PREFIXES) and name not in _KNOWN]
    return Environment(settings, tuple(problems))


def markdown() -> str:
    """The table of docs/doctor.md; ``python -m te_precision_callbacks.base.environment`` prints it."""
    lines = ["| variable | default | changes | effect | read in |", "|---|---|---|---|---|"]
    for name, default, _, effect, influence, source in VARIABLES:
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {shown} | {influence} | {effect} | {source} |")
    return "\n".join(lines)


def _bad_value(setting: Setting) -> Problem | None:
    variable = setting.variable
    fault = variable.fault(setting.value)
    if fault is None:
        return None
    unset = f", or unset it for {variable.default!r}" if variable.default else ", or unset it"
    what = f"{variable.name}={setting.value!r}: {fault.what}"
    return Problem((variable.name,), what, f"Give another value{unset}.", fault.stops)


def _unknown(name: str) -> Problem:
    what = f"{name} has no effect: neither Transformer Engine 2.20, nvidia-dlfw-inspect 0.2 nor this package reads it"
    nearest = difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=0.8)
    remedy = f"Is {nearest[0]} meant?" if nearest else "Check its spelling, or unset it."
    return Problem((name,), what, remedy, stops=False)
