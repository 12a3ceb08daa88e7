"""Errors about configs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from te_precision_callbacks.base.counts import first_of
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import shorten

KeyPath = tuple[str | int, ...]
"""The path of an entry: ``("tensors_struct", 0, "freq")``."""


Where = Callable[..., str]
"""Formats the place of an entry, such as ``config.yaml, line 7 (section 'stats')``, from its path below a section or
feature; without a path, the place of the section or feature."""

MOST_SHOWN = 20
"""The most problems in a message; others are counted."""

_LONGEST_PROBLEM = 4000


class ConfigError(PrecisionDebugError, ValueError):
    """An invalid config. The message names file and line, key, value, and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*(shorten(problem, _LONGEST_PROBLEM) for problem in problems))

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        problems = first_of(self.problems, MOST_SHOWN, "... and {} more")
        return "\n- ".join([f"The config has {len(self.problems)} problems:", *problems])


class Problems(list[str]):
    """The texts of problems that are reported together."""

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self += error.problems

    def warn(self, logger: logging.Logger) -> None:
        for problem in first_of(self, MOST_SHOWN, "... and {} more of this kind."):
            logger.warning("%s", problem)

    def raise_any(self) -> None:
        if self:
            raise ConfigError(*self)
