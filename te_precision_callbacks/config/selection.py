"""Which layers a section of a config means: its ``layers`` block, checked and applied.

The keys and their precedence are nvidia-dlfw-inspect's (``config_manager.py`` 0.2.2): ``exact_layer_names``, else
``layer_name_regex_pattern``, else ``layer_numbers`` and ``layer_types`` together. Unlike there, every selector is
applied to the model's real layers before the run, so that none can raise inside a forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from te_precision_callbacks.config.problems import ConfigError, suggestion

SELECTOR_KEYS = ("exact_layer_names", "layer_name_regex_pattern", "layer_numbers", "layer_types")

_NUMBER = re.compile(r"(?<!\d)(?<!fc)(?<!gemm_)\d+")
_NEGATIVE = re.compile(r"\(\?<?!")


class SelectableLayer(Protocol):
    """What a selector looks at: :class:`te_precision_callbacks.naming.Layer` has it."""

    @property
    def name(self) -> str:
        """The layer's name, as in logs."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that select it."""

    @property
    def types(self) -> tuple[str, ...]:
        """Its class, in each spelling that ``layer_types`` takes."""


@dataclass(frozen=True)
class LayerSelector:
    """One ``layers`` block.

    Attributes:
        exact_names: names, compared whole.
        pattern: a regular expression, searched in the name.
        numbers: layer numbers; an empty set means any number. None where the block has none.
        types: parts of a name, or class names. ``all`` selects every layer. None where the block has none.
        place: where the block stands, for messages.
    """

    exact_names: frozenset[str] | None
    pattern: re.Pattern[str] | None
    numbers: frozenset[int] | None
    types: tuple[str, ...] | None
    place: str

    @classmethod
    def parse(cls, block: object, place: str) -> LayerSelector:
        """Check a ``layers`` block.

        Raises:
            ConfigError: an unknown key, a value of the wrong type, an invalid regular expression or range.
        """
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{place}: 'layers' must be a mapping with one of {_listed(SELECTOR_KEYS)}, not {block!r}."
            )
        for key in block:
            if key not in SELECTOR_KEYS:
                raise ConfigError(f"{place}: unknown layer selector {key!r}.{suggestion(str(key), SELECTOR_KEYS)}")
        if not block:
            raise ConfigError(f"{place}: 'layers' is empty; it needs one of {_listed(SELECTOR_KEYS)}.")
        exact, types = block.get("exact_layer_names"), block.get("layer_types")
        return cls(
            exact_names=None if exact is None else frozenset(_strings("exact_layer_names", exact, place)),
            pattern=_pattern(block.get("layer_name_regex_pattern"), place),
            numbers=_numbers(block.get("layer_numbers"), place),
            types=None if types is None else _strings("layer_types", types, place),
            place=place,
        )

    def selects(self, layer: SelectableLayer, names_in_use: Collection[str] = ()) -> bool:
        """Whether ``layer`` is meant, by its name or by one of its aliases.

        An alias that is another layer's name (``names_in_use``) means that layer.
        A pattern with a negative look-around is searched in the name alone: an alias that lacks what it excludes would
        select what the user meant to leave out.
        """
        names = (layer.name, *(alias for alias in layer.aliases if alias not in names_in_use))
        if self.exact_names is not None:
            return any(name in self.exact_names for name in names)
        if self.pattern is not None:
            if _NEGATIVE.search(self.pattern.pattern):
                names = (layer.name,)
            return any(self.pattern.search(name) for name in names)
        if self.numbers is not None and not self._number_matches(layer.name):
            return False
        if self.types is None:
            return self.numbers is not None
        return "all" in self.types or any(
            part in layer.types or any(part in name for name in names) for part in self.types
        )

    def _number_matches(self, name: str) -> bool:
        """The first part of the name that is a number, else the first number in it that is not of fc or gemm_."""
        found = [int(part) for part in name.split(".") if part.isdigit()] or [int(n) for n in _NUMBER.findall(name)]
        return bool(found) and (not self.numbers or found[0] in self.numbers)

    def words(self) -> list[str]:
        """What the user wrote, to look for near names where nothing matched."""
        return [*(self.exact_names or ()), *(self.types or ()), *([self.pattern.pattern] if self.pattern else ())]


def _listed(keys: tuple[str, ...]) -> str:
    return ", ".join(repr(key) for key in keys)


def _strings(key: str, value: Any, place: str) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries or not all(isinstance(e, str) and e for e in entries):
        raise ConfigError(
            f"{place}: {key!r} must be a list of names, not {value!r}. Write for example {key}: [fc1, fc2]."
        )
    return tuple(entries)


def _pattern(value: Any, place: str) -> re.Pattern[str] | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"{place}: 'layer_name_regex_pattern' must be one regular expression, not {value!r}.")
    try:
        return re.compile(value)
    except re.error as error:
        raise ConfigError(
            f"{place}: 'layer_name_regex_pattern' {value!r} is not a regular expression: {error}."
        ) from error


def _numbers(value: Any, place: str) -> frozenset[int] | None:
    if value is None:
        return None
    numbers: set[int] = set()
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        if entry == "all":
            return frozenset()
        span = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(entry))
        if span is None or isinstance(entry, bool):
            raise ConfigError(
                f"{place}: 'layer_numbers' takes numbers, ranges such as '0-3', and 'all', not {entry!r}."
            )
        first = int(span[1])
        last = int(span[2]) if span[2] else first
        if last < first:
            raise ConfigError(f"{place}: the range {entry!r} in 'layer_numbers' ends before it starts.")
        numbers.update(range(first, last + 1))
    if not numbers:
        raise ConfigError(f"{place}: 'layer_numbers' is empty. Write for example layer_numbers: [0, '4-7'].")
    return frozenset(numbers)
