"""The steps of a config's features: the early steps of the default config, and features that never acted.

Early steps are additional collection steps at the start of a run. They are not a key of configs, because configs must
stay valid for Transformer Engine. Steps count from the start of the training, so a resumed run collects in the same
steps as an uninterrupted run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from te_precision_callbacks.base.counts import first_of
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.keys import GemmSampling, LoggedTensor
from te_precision_callbacks.config.levels import Target
from te_precision_callbacks.config.loading import Config
from te_precision_callbacks.config.planning import Section
from te_precision_callbacks.statistics.schedule import EVERY_STEP

_MOST_NAMED = 3

EARLY_STEPS = (1, 2, 5, 10, 20, 50)
"""Denser at the start, where most defects begin: rules that need three collection steps are checked after step 2. The
default config continues with every 100th step, at a cost below 2 % of a training of 1,000 steps."""


def with_early_steps(config: Config) -> Config:
    """Add :data:`EARLY_STEPS` to the schedules of all statistics of the default config."""
    if not config.is_default:
        return config
    return replace(config, sections=tuple(map(_with_early_steps, config.sections)))


def _with_early_steps(section: Section) -> Section:
    features = dict(section.features.get(NAMESPACE, {}))
    for name, options in features.items():
        if isinstance(options, ReadOptions):
            schema = options.schema.model_copy()
            vars(schema)["targets"] = tuple(map(_early, schema.targets))  # a cached property
            features[name] = ReadOptions(options, schema)
    if not features:
        return section
    return replace(section, features={**section.features, NAMESPACE: features})


def _early(target: Target[Any]) -> Target[Any]:
    if not isinstance(target.options, (LoggedTensor, GemmSampling)):
        return target
    item = target.options.model_copy()
    vars(item)["schedule"] = item.schedule.with_early(EARLY_STEPS)  # a cached property
    return replace(target, options=item)


def describe_never_due(config: Config, last: int) -> str:
    """Return a warning about features that begin after the ``last`` step of a run; empty without such features."""
    never_due = []
    for section in config.enabled_sections:
        for feature, options in section.features.get(NAMESPACE, {}).items():
            if isinstance(options, ReadOptions) and options.schema.enabled:
                for target in options.schema.every_target:
                    schedule = getattr(target.options, "schedule", EVERY_STEP)
                    first = schedule.at(-1)[1]
                    if first is None or first > last:
                        never_due.append(f"{section.place(NAMESPACE, feature)}: {feature}, {schedule}")
    if not never_due:
        return ""
    return (
        f"The run ended after step {last}, before these features became active:"
        f" {'; '.join(first_of(dict.fromkeys(never_due), _MOST_NAMED))}. Choose steps up to {last}, or run longer;"
        " steps start at 0."
    )
