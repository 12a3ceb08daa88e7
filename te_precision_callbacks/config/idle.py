"""Warnings about parts of a config without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.levels import Level, Target
from te_precision_callbacks.config.loading import Config
from te_precision_callbacks.config.planning import NamespacedFeatures, Section, resolve_features
from te_precision_callbacks.config.schemas import LogGemmErrorItem, known_features
from te_precision_callbacks.statistics.schedule import EVERY_STEP

_MOST_NAMED = 3


def notes_of(config: Config) -> list[str]:
    known = known_features()
    return idle_in_words(config, [resolve_features(section, known) for section in config.enabled_sections])


def idle_in_words(config: Config, features: Sequence[NamespacedFeatures]) -> list[str]:
    sections = config.enabled_sections
    if not sections:
        return [f"The config ({config.name}) has no enabled section, so nothing is done."]
    idle = (section for section, own in zip(sections, features, strict=True) if not any(own.values()))
    return [f"{section.place()}: the section has no enabled feature, so it does nothing." for section in idle]


def never_due_in_words(config: Config, last: int) -> str:
    """Return a warning about features that begin after the ``last`` step of a run; empty without any."""
    never_due: dict[str, None] = {}
    for section, feature, target in _all_targets(config):
        schedule = getattr(target.options, "schedule", EVERY_STEP)
        first = schedule.at(-1)[1]
        if first is None or first > last:
            never_due[f"{section.place(NAMESPACE, feature)}: {feature}, {schedule}"] = None
    if not never_due:
        return ""
    more = [f"and {len(never_due) - _MOST_NAMED} more"] if len(never_due) > _MOST_NAMED else []
    return (
        f"The run ended after step {last}, before these features acted for the first time:"
        f" {'; '.join([*list(never_due)[:_MOST_NAMED], *more])}. Choose steps up to {last}, or run longer; steps count"
        " from 0."
    )


def why_gemm_error_not_due(config: Config, begin: int, last: int, *, ended: bool) -> str:
    """Return why LogGemmError was not due from the first to the last step so far; empty if it was, or is not
    configured.
    """
    items = [target.options for *_, target in _all_targets(config)]
    schedules = [item.schedule for item in items if isinstance(item, LogGemmErrorItem)]
    if not schedules:
        return ""
    due = [first for schedule in schedules if (first := schedule.at(begin - 1)[1]) is not None]
    if not due:
        return f"the run began at iteration {begin}, after the last one in which it is due"
    if min(due) <= last:
        return ""
    first_due = f"it is first due at iteration {min(due)}"
    return f"the run ended at iteration {last}, and {first_due}" if ended else first_due


def _all_targets(config: Config) -> Iterator[tuple[Section, str, Target[Level]]]:
    for section in config.enabled_sections:
        for feature, options in section.features.get(NAMESPACE, {}).items():
            for target in _targets(options):
                yield section, feature, target


def _targets(options: object) -> tuple[Target[Level], ...]:
    return options.schema.every_target if isinstance(options, ReadOptions) and options.schema.enabled else ()
