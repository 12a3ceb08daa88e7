"""When a feature acts, against trying every iteration, and against Transformer Engine's own."""

import itertools
import math
from typing import Any

from te_precision_callbacks.statistics.schedule import Schedule, fingerprint

LAST = 130  # of the iterations that are tried
OPTIONS: list[dict[str, Any]] = [
    {},
    {"freq": 1},
    {"freq": 7},
    {"freq": 10, "start_step": 5},
    {"start_step": 0, "end_step": 0},
    {"freq": 3, "start_step": 4, "end_step": 5},
    {"freq": 3, "start_step": 6, "end_step": 60},
    {"start_step": None, "end_step": None, "start_end_list": None},
    {"start_step": 9, "end_step": -1},
    {"freq": 50, "end_step": 49},
    {"freq": 200},
    {"start_step": 20, "end_step": 10},
    {"freq": 2, "start_end_list": [[3, 3], [5, 9], [20, 41]]},
    {"freq": 5, "start_end_list": [[80, 100], [0, 20]], "start_step": 30},
    {"start_end_list": [(0, 10), [90, -1]]},
    {"freq": 4, "start_end_list": [[0, 50], [10, 20], [40, 70]]},
    {"freq": 4, "start_end_list": [[1, 3], [5, 7]]},
    {"start_end_list": [[7, None]]},
]


def is_due(iteration: int, options: dict[str, Any]) -> bool:
    """By the words of the documentation."""
    pairs = options.get("start_end_list") or [(options.get("start_step"), options.get("end_step"))]
    within = any((start or 0) <= iteration <= (math.inf if end in (None, -1) else end) for start, end in pairs)
    return within and iteration % options.get("freq", 1) == 0


def assert_as_enumerated(options: dict[str, Any], last: int) -> None:
    schedule = Schedule.of(**options)
    due = [iteration for iteration in range(2 * last) if is_due(iteration, options)]
    for iteration in range(last):
        following = next((later for later in due if later > iteration), None)
        assert schedule.at(iteration) == (iteration in due, following), iteration


def test_every_iteration() -> None:
    for options in OPTIONS:
        assert_as_enumerated(options, LAST)


def test_all_small_schedules() -> None:
    for freq, start, length, second in itertools.product(range(1, 5), range(5), range(-1, 5), range(4, 9)):
        options = {"freq": freq, "start_end_list": [[start, start + length], [second, second + length]]}
        assert_as_enumerated(options, 20)


def test_transformer_engines() -> None:
    """The same, but for an end of -1 or None in a list, which theirs does not support."""
    for options in OPTIONS:
        from transformer_engine.debug.features.utils import next_enabled_iter

        ends = [options.get("end_step"), *(end for _, end in options.get("start_end_list") or [])]
        if -1 in ends or None in ends[1:]:
            options = {**options, "end_step": None, "start_end_list": options.get("start_end_list") and [
                (start, math.inf if end in (None, -1) else end) for start, end in options["start_end_list"]
            ]}  # fmt: skip
        start, end, pairs = (options.get(key) for key in ("start_step", "end_step", "start_end_list"))
        schedule = Schedule.of(**options)
        for iteration in range(LAST):
            theirs = next_enabled_iter(start, end, pairs, options.get("freq", 1), iteration)
            assert schedule.at(iteration) == theirs, iteration


def test_a_schedule_with_early_steps_in_words() -> None:
    assert str(Schedule.of(freq=10).with_early([1, 2, 5, 10])) == "steps that are multiples of 10, and steps 1, 2, 5"
    assert (
        str(Schedule.of(freq=10, start_step=4).with_early([1, 5])) == "steps 4 on that are multiples of 10, and step 5"
    )
    assert str(Schedule.of().with_early([1, 5])) == "every step"
    assert Schedule.of().with_early([1, 5]) == Schedule.of()


def test_ranks_with_other_early_steps_differ() -> None:
    tenth = Schedule.of(freq=10)
    assert fingerprint(frozenset([tenth])) != fingerprint(frozenset([tenth.with_early([1])]))
