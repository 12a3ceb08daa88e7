"""The keywords that every front door takes, in one frozen object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from te_precision_callbacks.config.loading import Config, ConfigSource, load_config
from te_precision_callbacks.config.problems import suggestion
from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.records.metrics import LogFilter, MetricSelection
from te_precision_callbacks.records.model import Sink

if TYPE_CHECKING:
    import torch.distributed

StrPath = str | os.PathLike[str]


class OptionError(PrecisionDebugError, TypeError):
    """A keyword that does not exist, or a value that it does not take."""


class SessionKeywords(TypedDict, total=False):
    """The keywords of :class:`SessionOptions`, for the signatures of the front doors."""

    log_dir: StrPath | None
    feature_dirs: StrPath | Sequence[StrPath]
    features: Sequence[type]
    sinks: Sequence[Sink]
    process_group: torch.distributed.ProcessGroup | None
    reduce: bool
    start_step: int | None
    prefix: str
    log_filter: LogFilter
    precision_features_in_eval: bool
    allow_unmatched: bool
    strict: bool


@dataclass(frozen=True)
class SessionOptions:
    """What a session does.

    Attributes:
        config: the loaded config.
        log_dir: where logs go. None: the trainer's folder, or the current one.
        feature_dirs: folders of a user's own features; every ``.py`` file below them is executed.
        features: a user's own features, as classes.
        sinks: more receivers of a step's records, beside the statistics log and the trainer's loggers.
        process_group: the group over which statistics are reduced. None: all ranks.
        reduce: False keeps the statistics of each rank, without a collective.
        start_step: the debug iteration at start. None: 0, or the resumed step.
        prefix: first part of every metric name.
        log_filter: which metrics go to the trainer's loggers; see :mod:`te_precision_callbacks.records.metrics`.
        precision_features_in_eval: whether features that change precision act in evaluation as they do in training.
        allow_unmatched: a section that matches no layer warns instead of raising.
        strict: a failure in observation raises instead of being reported once.
    """

    config: Config
    log_dir: Path | None = None
    feature_dirs: tuple[Path, ...] = ()
    features: tuple[type, ...] = ()
    sinks: tuple[Sink, ...] = ()
    process_group: torch.distributed.ProcessGroup | None = None
    reduce: bool = True
    start_step: int | None = None
    prefix: str = "te"
    log_filter: LogFilter = None
    precision_features_in_eval: bool = True
    allow_unmatched: bool = False
    strict: bool = False

    @classmethod
    def from_keywords(cls, config: ConfigSource, **keywords: Any) -> SessionOptions:
        """Check the keywords of a front door, and load the config.

        Raises:
            OptionError: an unknown keyword, or a value that it does not take.
            ConfigError: the config cannot be used.
        """
        known = {entry.name for entry in fields(cls)} - {"config"}
        for key in keywords:
            if key not in known:
                raise OptionError(f"There is no option {key!r}.{suggestion(key, known)}")
        for key in ("reduce", "precision_features_in_eval", "allow_unmatched", "strict"):
            if not isinstance(keywords.get(key, True), bool):
                raise OptionError(f"{key}= is True or False, not {keywords[key]!r}.")
        start_step = keywords.get("start_step")
        if start_step is not None and (not isinstance(start_step, int) or start_step < 0):
            raise OptionError(f"start_step= is a step from 0 on, not {start_step!r}.")
        log_dir = keywords.pop("log_dir", None)
        directories = keywords.pop("feature_dirs", ())
        if isinstance(directories, (str, os.PathLike)):
            directories = (directories,)
        sinks = tuple(keywords.pop("sinks", ()))
        for sink in sinks:
            if not isinstance(sink, Sink):
                raise OptionError(f"sinks= takes objects with the methods start, write and close, not {sink!r}.")
        options = cls(
            config=load_config(config),
            log_dir=None if log_dir is None else Path(log_dir),
            feature_dirs=tuple(_folder(directory) for directory in directories),
            features=tuple(keywords.pop("features", ())),
            sinks=sinks,
            **keywords,
        )
        MetricSelection(options.prefix, options.log_filter)
        return options


def _folder(directory: StrPath) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise OptionError(f"feature_dirs= names {str(path)!r}, which is not a folder.")
    return path.absolute()
