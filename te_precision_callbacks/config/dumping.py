"""What DumpTensors takes beside its tensors: sizes in bytes, and conditions under which a tensor is written.

    size_in_bytes("2GiB")                       # 2147483648
    condition = parse_condition("underflows% > 5")
    condition.holds(7.5)                        # True
    collected(features_of_a_layer, "activation")    # name -> under which names it is logged, and when

A condition names a statistic as the log does, without layer and tensor: ``underflows%``, ``mxfp8_mse_columnwise``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from te_precision_callbacks.config.fields import Words
from te_precision_callbacks.config.problems import ConfigError, KeyPath, suggestion
from te_precision_callbacks.statistics.names import (
    OWN_RECIPE,
    PREFIXES,
    Request,
    UnknownStatisticError,
    quantized_request,
    tensor_request,
)
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.statistics.table import BLOCKWISE, QUANTIZED_STATISTICS, TENSOR_STATISTICS
from te_precision_callbacks.vocabulary import RECIPES, TENSORS

if TYPE_CHECKING:
    from te_precision_callbacks.config.planning import Plan, Section


NONFINITE = "nonfinite"
"""The condition that a tensor has an inf or nan."""

ACTIVATION_OVERFLOW = "activation_overflow"
"""The condition that activation overflow detection has found something."""

_PREFIXES = tuple(prefix for prefixes in PREFIXES.values() for prefix in prefixes)

_NAMESPACE = "transformer_engine"
_DUMP_TENSORS = "DumpTensors"

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")

_NEARLY_A_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([a-zA-Z]*)")

_LARGEST_SIZE = (1 << 63) - 1
"""Bytes; what a file system can count."""

_COMPARISON = re.compile(r"([^\s<>=]+)\s*(<=|>=|<|>)\s*(\S+)")

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

_FORMS = (
    f"A condition is {NONFINITE!r}, {ACTIVATION_OVERFLOW!r}, or a statistic and a number with >, >=, < or <= between"
    " them, such as 'underflows% > 5'."
)


def size_in_bytes(size: object) -> int:
    """A size as written in a config: a number of bytes, or a text with a unit (kB, MB, GB, TB; KiB, MiB, GiB, TiB).

    Raises:
        ValueError: it is none, or below one byte; continues a sentence that starts with the key.
    """
    found: float | None = None
    if type(size) is int:
        found = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())) and match[2].lower() in _UNITS:
        found = float(match[1]) * _UNITS[match[2].lower()]
    if found is None or found < 1:
        raise ValueError(
            f"is a number of bytes from 1 on, or a text such as '10MB' (10 * 1000^2) or '2GiB' (2 * 1024^3), not"
            f" {size!r}.{_meant_size(size) if found is None else ''}"
        )
    if found > _LARGEST_SIZE:
        raise ValueError(f"is a number of bytes up to 2^63 - 1, not {size!r}.")
    return int(found)


def _meant_size(size: object) -> str:
    """``" Did you mean '10MB'?"`` for a size with the unit or the number of other programs: 10M, 10 Mo, 1e9."""
    given = isinstance(size, (str, float)) and _NEARLY_A_SIZE.fullmatch(str(size).strip())
    if not given:
        return ""
    number, unit = float(given[1]), given[2].lower()
    if not unit and 1 <= number <= _LARGEST_SIZE:
        return f" Did you mean {int(number)}?"
    known = f"{unit[:2] if unit[1:2] == 'i' else unit[:1]}b"
    if not unit or known not in _UNITS or not 1 <= number * _UNITS[known] <= _LARGEST_SIZE:
        return ""
    prefix = known[0] if known == "kb" else known[0].upper() + known[1:-1]
    return f" Did you mean '{number:.15g}{prefix}B'?"


@dataclass(frozen=True)
class Condition:
    """When a tensor is written.

    Attributes:
        text: as written.
        statistic: its name in the log; None for :data:`NONFINITE` and :data:`ACTIVATION_OVERFLOW`.
        comparison: ``>``, ``>=``, ``<`` or ``<=``.
        number: what the statistic is compared with.
    """

    text: str
    statistic: str | None = None
    comparison: str = ">"
    number: float = 0.0

    def holds(self, value: float) -> bool:
        """Whether a value of the statistic meets it. A nan meets none."""
        return _COMPARE[self.comparison](value, self.number)


def parse_condition(entry: object) -> Condition:
    """A condition as written in a config.

    Raises:
        ValueError: it is none; continues a sentence that starts with the key.
    """
    if entry in (NONFINITE, ACTIVATION_OVERFLOW):
        return Condition(str(entry))
    match = _COMPARISON.fullmatch(entry.strip()) if isinstance(entry, str) else None
    if match is None:
        hint = suggestion(entry, (NONFINITE, ACTIVATION_OVERFLOW)) if isinstance(entry, str) else ""
        raise ValueError(f"has {entry!r}. {_FORMS}{hint if 'Did you mean' in hint else ''}")
    try:
        number = float(match[3])
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"has {entry!r}, where {match[3]!r} is no number. {_FORMS}")
    _check_statistic(str(entry), match[1])
    return Condition(str(entry), match[1], match[2], number)


def _check_statistic(entry: str, name: str) -> None:
    """Refuse a name that no feature can log as a number.

    Raises:
        ValueError: as of :func:`parse_condition`.
    """
    if name.startswith(BLOCKWISE):
        return
    for request_of in (tensor_request, quantized_request):
        try:
            if request_of(name).statistic.value is None:
                raise ValueError(f"has {entry!r}: {name} is no number, but a histogram.")
            return
        except UnknownStatisticError:
            continue
    known = [*TENSOR_STATISTICS, BLOCKWISE, *QUANTIZED_STATISTICS]
    prefix = max((f"{one}_" for one in _PREFIXES if name.startswith(f"{one}_")), key=len, default="")
    hint = suggestion(name, [prefix + statistic for statistic in QUANTIZED_STATISTICS] if prefix else known)
    raise ValueError(f"has {entry!r}: there is no statistic {name!r}.{hint}")


def conditions_of(options: Mapping[str, Any]) -> tuple[Condition, ...]:
    """The conditions that the options of DumpTensors have for a tensor; none where it is written in any case."""
    when = options.get("when") or ()
    return tuple(parse_condition(entry) for entry in ([when] if isinstance(when, str) else when))


@dataclass(frozen=True)
class Collected:
    """A statistic that is collected of a tensor.

    Attributes:
        labels: its names in the log. One of the layer's own recipe gets that recipe's name before it in a layer that
            runs none.
        schedules: when.
        asked: the name that was asked for, which is of the layer's recipe, where a condition's name has another one.
    """

    labels: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    asked: str | None = None


def collected(features: Mapping[str, Mapping[str, Any]], tensor: str) -> dict[str, Collected]:
    """What the features of a layer collect of a tensor, by the names that were asked for.

    Args:
        features: feature -> options, of the namespace ``transformer_engine``.
        tensor: the tensor's name.
    """
    from te_precision_callbacks.features.base import matching_options

    schedules: dict[str, list[Schedule]] = {}
    own: set[str] = set()
    for feature, options in features.items():
        request_of = _REQUESTS.get(feature)
        if request_of is None or not options.get("enabled", False):
            continue
        for entry in matching_options(options, tensor=tensor, gemm=None):
            stats = entry.get("stats", ())
            for statistic in [stats] if isinstance(stats, (str, Mapping)) else stats:
                request = request_of(statistic, tensor)
                schedules.setdefault(request.label, []).append(Schedule.of(entry))
                if request.recipe == OWN_RECIPE:
                    own.add(request.label)
    found: dict[str, Collected] = {}
    for label, when in schedules.items():
        others = (f"{recipe}_{label}" for recipe in RECIPES if label in own)
        found[label] = Collected((label, *(other for other in others if other not in schedules)), tuple(when))
    return found


_REQUESTS: Mapping[str, Callable[[Any, str], Request]] = {
    "LogTensorStats": tensor_request,
    "LogFp8TensorStats": lambda entry, tensor: quantized_request(entry),
    "LogNvfp4TensorStats": lambda entry, tensor: quantized_request(entry, default_recipe="nvfp4"),
}


def find_statistic(name: str, known: Mapping[str, Collected], recipe: str | None = None) -> Collected | None:
    """The statistic of a condition among those that are collected of a tensor; None where it is not.

    ``max_blockwise_dynamic_range`` alone means that of any blocks. With the name of a recipe in front, a statistic that
    was asked for without one is meant too: where the layer runs that recipe the two are the same number.

    Args:
        name: of the statistic.
        known: as of :func:`collected`.
        recipe: the one that the tensor was quantized with; None where it was not, and before the run.
    """
    if name in known:
        return known[name]
    spelled = _with_whole_recipe(name)
    for label, found in known.items():
        if _with_whole_recipe(label) == spelled or (name == BLOCKWISE and label.startswith(BLOCKWISE)):
            return found
        if spelled in found.labels:
            own = (label,) if spelled == f"{recipe}_{label}" else ()
            return Collected((spelled, *own), found.schedules, asked=None if own else label)
    return None


def _with_whole_recipe(name: str) -> str:
    """The name of a statistic with its recipe as the log has it: ``fp8_current_scaling_mse``."""
    try:
        return quantized_request(name).spelled_out
    except UnknownStatisticError:
        return name


def check_conditions(plan: Plan, sections: Iterable[Section], *, detects_overflow: bool) -> None:
    """Refuse conditions of DumpTensors that can never hold.

    Args:
        plan: of all layers.
        sections: the enabled sections.
        detects_overflow: whether the run has activation overflow detection.

    Raises:
        ConfigError: a statistic that no feature collects of that layer and tensor, or only in steps in which the tensor
            is not looked at; or no detection.
    """
    by_name = {section.name: section for section in sections}
    for entry in plan.layers:
        features = entry.features.get(_NAMESPACE, {})
        for tensor in TENSORS if _DUMP_TENSORS in features else ():
            found = _problem(features, entry.layer.name, tensor, detects_overflow=detects_overflow)
            if found is not None:
                keys, problem = found
                raise ConfigError(f"{_place(by_name, entry.sections, keys)}: {problem}")


def _problem(
    features: Mapping[str, Mapping[str, Any]], layer: str, tensor: str, *, detects_overflow: bool
) -> tuple[KeyPath, str] | None:
    """What is wrong with the conditions of a layer's tensor, and where it stands."""
    for item, options in _items(features[_DUMP_TENSORS], tensor):
        keys = (*item, "when")
        for condition in conditions_of(options):
            if condition.text == ACTIVATION_OVERFLOW and not detects_overflow:
                return keys, no_detection()
            if condition.statistic is None:
                continue
            known = collected(features, tensor)
            found = find_statistic(condition.statistic, known)
            if found is None:
                return keys, missing_statistic(condition, known, layer, tensor)
            dumped = Schedule.of(options)
            if not any(meet(dumped, schedule) for schedule in found.schedules):
                return keys, _never_due(condition, dumped, found.schedules, layer, tensor)
    return None


def _items(options: Mapping[str, Any], tensor: str) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """The options of DumpTensors for a tensor, each with the item that its conditions stand in: () for none."""
    from te_precision_callbacks.features.base import matching_options

    struct = options.get("tensors_struct") or ()
    items: list[KeyPath] = [
        ("tensors_struct", number) if "when" in item else ()
        for number, item in enumerate(struct)
        if item.get("tensor") == tensor
    ]
    yield from zip(items or [()], matching_options(options, tensor=tensor, gemm=None), strict=False)


def meet(one: Schedule, other: Schedule) -> bool:
    """Whether there is an iteration that is in both: a multiple of both frequencies in an interval of each."""
    both = math.lcm(one.freq, other.freq)
    for start, end in one.intervals:
        for other_start, other_end in other.intervals:
            first = max(start, other_start)
            if first + -first % both <= min(end, other_end):
                return True
    return False


def _place(sections: Mapping[str, Section], hit: Sequence[str], keys: KeyPath) -> str:
    """Where a key of DumpTensors stands, in one of the sections that hit a layer."""
    for name in hit:
        for feature in sections[name].features.get(_NAMESPACE, {}):
            if feature.casefold() == _DUMP_TENSORS.casefold():
                return sections[name].place(_NAMESPACE, feature, *keys)
    return sections[hit[0]].place()


def no_detection() -> str:
    """The words about a condition on an overflow that nobody looks for."""
    return (
        f"the condition {ACTIVATION_OVERFLOW!r} of DumpTensors needs activation overflow detection, which is off, so"
        ' that it would never hold. A session with debug="activation_overflow" has it.'
    )


def missing_statistic(condition: Condition, names: Iterable[str], layer: str, tensor: str) -> str:
    """The words about a condition on a statistic that nobody collects.

    Args:
        condition: on a statistic.
        names: what is collected of the tensor.
        layer, tensor: where.
    """
    names = list(names)
    wanted = _with_whole_recipe(str(condition.statistic))
    same = [name for name in names if any(_with_whole_recipe(name) == f"{prefix}_{wanted}" for prefix in _PREFIXES)]
    hint = suggestion(str(condition.statistic), names, known_as="Collected are")
    if same:
        hint = f" Did you mean {' or '.join(map(repr, same))}?"
    return (
        f"the condition {condition.text!r} of DumpTensors is on a statistic that is not collected of {tensor!r} in the"
        f" layer {layer!r}, so that it would never hold. Add it to 'stats' of LogTensorStats, LogFp8TensorStats or"
        f" LogNvfp4TensorStats for that layer and tensor.{hint}"
    )


def _never_due(condition: Condition, dumped: Schedule, schedules: Iterable[Schedule], layer: str, tensor: str) -> str:
    due = " and ".join(dict.fromkeys(map(in_words, schedules)))
    return (
        f"the condition {condition.text!r} of DumpTensors would never hold of {tensor!r} in the layer {layer!r}: no"
        f" step is in both schedules. DumpTensors looks at the tensor in {in_words(dumped)}; the statistic is"
        f" collected in {due}. Make 'freq', 'start_step', 'end_step' or 'start_end_list' of the two meet."
    )


def in_words(schedule: Schedule) -> str:
    """``steps 0 to 10 that are multiples of 2``."""
    parts = [
        f"{start} on" if math.isinf(end) else str(start) if start == end else f"{start} to {end:.0f}"
        for start, end in schedule.intervals
    ]
    multiples = f" that are multiples of {schedule.freq}" if schedule.freq > 1 else ""
    return f"steps {' and '.join(parts)}{multiples}" if parts != ["0 on"] or multiples else "every step"


def is_of_the_layers_recipe(condition: Condition, asked: str, recipe: str | None) -> str:
    """The words about a condition on a recipe's statistic, which was asked for without a recipe.

    Args:
        condition: on a statistic with a recipe in its name.
        asked: what was asked for.
        recipe: the one that the layer runs.
    """
    name = _with_whole_recipe(str(condition.statistic))
    return (
        f"{name!r} would be had only if the layer ran {name.removesuffix(f'_{asked}')}, for {asked!r} in 'stats' is of"
        f" the recipe that the layer runs, and it runs {recipe or 'none'}; add {name!r} to 'stats'"
    )


def _checked_size(entry: Any) -> Any:
    size_in_bytes(entry)
    return entry


def _checked_condition(entry: Any) -> Any:
    parse_condition(entry)
    return entry


Size = Annotated[
    Any,
    AfterValidator(_checked_size),
    Words("a number of bytes, or a text such as `10MB` (10^7) or `2GiB` (2 * 2^30)"),
]
ConditionText = Annotated[
    Any,
    AfterValidator(_checked_condition),
    Words(f"`{NONFINITE}`, `{ACTIVATION_OVERFLOW}`, `STATISTIC > NUMBER` (or `>=`, `<`, `<=`)"),
]
