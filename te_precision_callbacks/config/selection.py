"""Layer selection: validates and applies the ``layers`` block of a section.

Keys and precedence are nvidia-dlfw-inspect's (``config_manager.py`` 0.2.2): ``exact_layer_names``, else
``layer_name_regex_pattern``, else ``layer_numbers`` and ``layer_types`` together. Here every selector is applied to the
model's layers before the run, so it cannot raise in a forward.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.suggestions import nearest, shown, suggestion, with_common_part
from te_precision_callbacks.config.problems import MOST_SHOWN, ConfigError, Problems, Where

if TYPE_CHECKING:
    from te_precision_callbacks.layers.naming import Layer

logger = logging.getLogger(__name__)

EXACT = "exact_layer_names"
PATTERN = "layer_name_regex_pattern"
NUMBERS = "layer_numbers"
TYPES = "layer_types"

SELECTORS: Mapping[str, str] = {
    EXACT: "layers with one of these names.",
    PATTERN: "layers whose name contains a match of this regular expression.",
    NUMBERS: "layers with one of these numbers: `[0, '4-7']`, inclusive, or `all`. The number of a layer is"
    " the first part of its name that is a number: 12 in `model.layers.12.layernorm_mlp.fc1`.",
    TYPES: "layers with one of these words in their name, or of one of these classes (`LayerNormLinear`,"
    " `layernorm_linear`); `all`: every layer.",
}

SELECTOR_KEYS = tuple(SELECTORS)

_KEYS_IN_WORDS = ", ".join(map(repr, SELECTOR_KEYS))

LARGEST_NUMBER = 999_999

_NUMBER = re.compile(r"(?<!\d)(?<!fc)(?<!gemm_)\d+")
_UPSTREAM_NUMBER = re.compile(r"(?<!fc)\d+")
"""nvidia-dlfw-inspect 0.2.2, ``config_manager.py: is_layer_in_cfg``; it raises if a name has no number, or several."""

SPAN = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")

_WORD = re.compile(r"[^\W\d]\w*")

_NEGATIVE = re.compile(r"\(\?<?!")

_WITHOUT_END = LARGEST_NUMBER + 1


class LayerIndex:
    """The layers of a model, indexed for selectors. An alias that equals another layer's name refers to that layer.

    Args:
        layers: in the order of the model; look-ups return ascending indices.
        upstream: the index in ``layer.upstream`` of the name to use. Look-ups then follow nvidia-dlfw-inspect: a class
            is not a type, and a layer has a number if its name contains exactly one. None: this project's names.
    """

    def __init__(self, layers: Sequence[Layer], *, upstream: int | None = None) -> None:
        self.layers = layers
        self.layer_names = [layer.name for layer in layers]
        in_use = set(self.layer_names)
        self._names: list[tuple[str, ...]]
        self._types: list[tuple[str, ...]]
        if upstream is None:
            self._names = [(layer.name, *(name for name in layer.aliases if name not in in_use)) for layer in layers]
            self._types = [layer.types for layer in layers]
            self._numbers = [_number_of(layer.name.removeprefix(layer.scope)) for layer in layers]
        else:
            self._names = [(layer.upstream[upstream],) for layer in layers]
            self._types = [()] * len(layers)
            self._numbers = [_as_number(_UPSTREAM_NUMBER.findall(name)) for (name,) in self._names]
        self.numbers = sorted(number for number in set(self._numbers) if number is not None)

    @functools.cached_property
    def _by_name(self) -> Mapping[str, Sequence[int]]:
        return group_by_key((name, position) for position, names in enumerate(self._names) for name in names)

    def find(self, key: str, entry: Any) -> Sequence[int]:
        """Return the layers that an entry of a selector's key selects."""
        positions = range(len(self.layers))
        if key == EXACT:
            return self._by_name.get(entry, ())
        if key == NUMBERS:
            first, last = entry
            return [
                index for index, number in enumerate(self._numbers) if number is not None and first <= number <= last
            ]
        if key == PATTERN:
            end = None
            if _NEGATIVE.search(entry.pattern):  # an alias may lack the excluded text
                end = 1
            return [index for index in positions if any(map(entry.search, self._names[index][:end]))]
        if entry == "all":
            return positions
        return [
            index
            for index in positions
            if entry in self._types[index] or any(entry in name for name in self._names[index])
        ]

    def near(self, word: str, key: str) -> list[str]:
        names = self.layer_names
        if key == EXACT:
            return nearest(word, names)
        parts = dict.fromkeys(part for part in ".".join(names).split(".") if not part.isdecimal())
        if key == TYPES:
            for types in self._types:
                parts |= dict.fromkeys(types)
        near = [*nearest(word, parts), *with_common_part(word, parts)]
        if "." in word:
            near = [*nearest(word, names), *near]
        return list(dict.fromkeys(near))

    def as_type(self, word: str, key: str) -> str:
        """Return a hint if a word of another key is a class, or a part of a name; else an empty text."""
        what = ""
        if any(word in types for types in self._types):
            what = "a class"
        elif key == EXACT and any(f".{word}." in f".{name}." for name in self.layer_names):
            what = "a part of the name"
        if not what or key == TYPES:
            return ""
        layers = many(len(self.find(TYPES, word)), "layer")
        return f" {shown(word)} is {what} of {layers}. To select them, write {TYPES}: [{word}]."


def index_by_upstream_names(layers: Sequence[Layer]) -> list[LayerIndex]:
    """Index the layers by nvidia-dlfw-inspect's names; and by its names in the unwrapped model, if they differ, since
    scripts may name the layers before or after wrapping a model.
    """
    indexes = [LayerIndex(layers, upstream=0)]
    if any(len(layer.upstream) > 1 for layer in layers):
        indexes.append(LayerIndex(layers, upstream=-1))
    return indexes


@dataclass(frozen=True)
class LayerSelector:
    """A ``layers`` block: the entries of its keys that have an effect. Numbers are ranges with both ends included."""

    entries: Mapping[str, Sequence[Any]]
    place: Where

    @classmethod
    def parse(cls, block: object, locate: Where) -> LayerSelector:
        """Validate a ``layers`` block, and warn about keys that have no effect because of another key."""
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{locate()}: 'layers' must be a mapping with one of {_KEYS_IN_WORDS}, not {shown(block)}."
            )
        if not block:
            raise ConfigError(f"{locate()}: 'layers' is empty; it needs one of {_KEYS_IN_WORDS}.")
        problems = Problems()
        parsed: dict[str, Sequence[Any]] = {}
        for key, value in block.items():
            if key not in SELECTOR_KEYS:
                hint = suggestion(str(key), SELECTOR_KEYS)
                problems.append(f"{locate(key)}: unknown layer selector {shown(str(key))}.{hint}")
                continue
            with problems.collecting():
                parsed[key] = _PARSERS[key](key, value, locate)
        problems.raise_any()
        for selecting_key in (EXACT, PATTERN):
            if selecting_key in parsed:
                _warn_of_idle_keys(block, selecting_key, locate)
                return cls({selecting_key: parsed[selecting_key]}, locate)
        return cls({key: parsed[key] for key in (TYPES, NUMBERS) if key in parsed}, locate)

    def select(self, index: LayerIndex) -> Sequence[int]:
        selected = set(range(len(index.layers)))
        for key, entries in self.entries.items():
            selected &= set().union(*(index.find(key, entry) for entry in entries))
        return sorted(selected)

    def choose(self, indexes: Sequence[LayerIndex]) -> LayerIndex:
        for index in indexes:
            if self.select(index):
                return index
        return indexes[0]

    def differs(self, index: LayerIndex, upstream: LayerIndex) -> bool:
        """Return whether nvidia-dlfw-inspect's names select other layers; layers without its numbers are ignored."""
        ours = set(self.select(index))
        theirs = set(self.select(upstream))
        if NUMBERS in self.entries:
            ours &= set(upstream.find(NUMBERS, (0, LARGEST_NUMBER)))
        return bool(theirs) and ours != theirs

    def idle_entries(self, index: LayerIndex) -> Iterator[tuple[str, int, str]]:
        """Yield entries that match no layer or exceed the layer numbers: key, index in its list, and the problem."""
        for key, entries in self.entries.items():
            for number, entry in enumerate(entries):
                text = ""
                is_idle = not index.find(key, entry)
                if key == NUMBERS:
                    text = _why_no_number(entry, is_idle, index.numbers)
                elif is_idle and key == EXACT:
                    meant = "".join(f" Did you mean {close!r}?" for close in index.near(entry, EXACT)[:1])
                    text = f"there is no layer {shown(entry)}.{index.as_type(entry, EXACT) or meant}"
                elif is_idle and key == TYPES:
                    text = f"no layer's name or class contains {shown(entry)}."
                    if close := index.near(entry, TYPES)[:5]:
                        text += f" Similar: {', '.join(map(shown, close))}."
                if text:
                    yield key, number, text

    def instead(self, index: LayerIndex) -> str:
        """Return a hint for a block that selects nothing; empty if nothing is similar."""
        hint = ""
        near: dict[str, None] = {}
        for key, entries in self.entries.items():
            words = [] if key == NUMBERS else list(entries)
            if key == PATTERN:
                words = _WORD.findall(entries[0].pattern)
            for word in words[:MOST_SHOWN]:
                hint += index.as_type(word, key)
                near |= dict.fromkeys(index.near(word, key))
        if near and not hint:
            return f" Similar names: {', '.join(map(repr, list(near)[:5]))}."
        return hint


def _number_of(name: str) -> int | None:
    """Return the first part of a name that is a number, else the first number that does not follow fc or gemm_."""
    numbers = list(filter(str.isdecimal, name.split("."))) or _NUMBER.findall(name)
    return _as_number(numbers[:1])


def _as_number(numbers: Sequence[str]) -> int | None:
    if len(numbers) == 1 and len(numbers[0]) <= 6:
        return int(numbers[0])
    return None


def _why_no_number(span: tuple[int, int], is_idle: bool, numbers: Sequence[int]) -> str:
    """Return the problem of a range of layer numbers without layers, or beyond them; empty if there is none."""
    first, last = span
    what = f"no layer has a number from {first} to {last}"
    if not is_idle:
        if last >= _WITHOUT_END or last <= numbers[-1]:
            return ""
        what = f"'{first}-{last}' exceeds the layer numbers"
    if not numbers:
        return "no layer has a number in its name."
    return f"{what}. The numbers go from {numbers[0]} to {numbers[-1]}."


def _warn_of_idle_keys(block: Mapping[str, Any], selecting_key: str, locate: Where) -> None:
    for key in SELECTOR_KEYS:
        if key in block and key != selecting_key:
            logger.warning(
                "%s: %r has no effect beside %r, which takes precedence, as in nvidia-dlfw-inspect. Remove one of the"
                " two.",
                locate(key),
                key,
                selecting_key,
            )
    if selecting_key == PATTERN and not block[PATTERN]:
        logger.warning(
            "%s: %r is empty, which matches every name and selects all layers. If you want all layers, write %s:"
            " [all].",
            locate(PATTERN),
            PATTERN,
            TYPES,
        )


def _strings(key: str, value: Any, locate: Where) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    example = f"Write for example {key}: [fc1, fc2]."
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(f"{locate(key)}: {key!r} must be a list of names, not {shown(value)}. {example}")
    problems = Problems()
    for number, entry in enumerate(entries):
        if not isinstance(entry, str) or not entry:
            problems.append(
                f"{locate(key, number)}: {key!r} must be a list of names, but has {shown(entry)}. {example}"
            )
    problems.raise_any()
    return tuple(entries)


def _pattern(key: str, value: Any, locate: Where) -> tuple[re.Pattern[str]]:
    if not isinstance(value, str):
        raise ConfigError(f"{locate(key)}: {key!r} must be one regular expression, not {shown(value)}.")
    try:
        return (re.compile(value),)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{locate(key)}: {key!r} {shown(value)} is not a regular expression: {error}.") from error


def _numbers(key: str, value: Any, locate: Where) -> tuple[tuple[int, int], ...]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not entries:
        raise ConfigError(f"{locate(key)}: {key!r} is empty. Write for example {key}: [0, '4-7'].")
    spans: list[tuple[int, int]] = []
    problems = Problems()
    for number, entry in enumerate(entries):
        if entry == "all":
            spans.append((0, _WITHOUT_END))
            continue
        is_number = type(entry) is int and 0 <= entry <= LARGEST_NUMBER
        span = SPAN.fullmatch(str(entry)) if is_number or isinstance(entry, str) else None
        if span is None:
            problems.append(
                f"{locate(key, number)}: {key!r} takes numbers up to {LARGEST_NUMBER}, ranges such as '0-3', and 'all',"
                f" not {shown(entry)}."
            )
            continue
        first = int(span[1])
        last = int(span[2] or span[1])
        if last < first:
            problems.append(f"{locate(key, number)}: the range {shown(entry)} in {key!r} ends before it starts.")
        spans.append((first, last))
    problems.raise_any()
    return tuple(spans)


_PARSERS: Mapping[str, Callable[[str, Any, Where], Sequence[Any]]] = {
    EXACT: _strings,
    PATTERN: _pattern,
    NUMBERS: _numbers,
    TYPES: _strings,
}
