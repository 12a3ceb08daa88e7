"""Options of all integrations, in one frozen object."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import torch.distributed
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict, get_type_hints

from te_precision_callbacks.base.debug_values import DebugValue, parse_debug
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.files import StrPath
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.base.vocabulary import Observe
from te_precision_callbacks.config.contract import Contract, ContractSource
from te_precision_callbacks.config.fields import size_in_bytes
from te_precision_callbacks.config.loading import Config, ConfigSource, load_config
from te_precision_callbacks.config.steps import with_early_steps
from te_precision_callbacks.coverage.spans import whole_number
from te_precision_callbacks.diagnosis.engine import OnFinding, read_on_finding
from te_precision_callbacks.layers.naming import Scope, check_scope
from te_precision_callbacks.maps.comparing import read_requirements
from te_precision_callbacks.runs.run_files import DEFAULT_LIMIT, LEAST_LIMIT
from te_precision_callbacks.sinks.metrics import LogFilter, MetricSelection
from te_precision_callbacks.sinks.statistics_log import DEFAULT_LIMIT as LOG_LIMIT
from te_precision_callbacks.sinks.step_records import Sink

__all__ = ["SessionKeywords", "SessionOptions", "StepOn"]

StepOn = Literal["optimizer_step", "batch"]
"""Length of a debug iteration, for loops in which a step may have several batches."""


StatisticsLogRanks = Literal["rank0", "all", "off"]
"""Ranks that log statistics reduced over ranks."""

StatisticsLogValue = StatisticsLogRanks | bool | int | str
"""Values of ``statistics_log=``: the only bool is False, as which YAML reads ``off``."""

Records = bool | int | str


def record_limit(records: object) -> int:
    """Parse ``records=``: the maximum bytes that a rank records; 0 without records. Raises OptionError."""
    word = records.strip().lower() if isinstance(records, str) else records
    if word is True or word == "on":
        return DEFAULT_LIMIT
    if word is False or word == "off":
        return 0
    with contextlib.suppress(ValueError):
        limit = size_in_bytes(records)
        if limit >= LEAST_LIMIT:
            return limit
    raise OptionError(
        f"records= must be 'on' or True, 'off' or False, or a size of at least 1MiB, such as '64GiB', not {records!r}."
    )


class LogChoice(NamedTuple):
    """The ranks that write the statistics log, and the maximum bytes of a rank's log; 0 for no limit."""

    ranks: StatisticsLogRanks
    limit: int


def read_statistics_log(statistics_log: object) -> LogChoice:
    """Parse ``statistics_log=``: ranks, a size, or both, such as ``"rank0, 4GiB"``; False for ``"off"``.

    Raises:
        OptionError: invalid value.
    """
    text = "off" if statistics_log is False else statistics_log
    words = [word.strip() for word in text.split(",")] if isinstance(text, str) else [text]
    ranks = [cast(StatisticsLogRanks, word) for word in words if word in get_args(StatisticsLogRanks)]
    sizes = [word for word in words if word not in ranks]
    limit = LOG_LIMIT
    try:
        if len(ranks) > 1 or len(sizes) > 1 or (ranks == ["off"] and sizes):
            raise ValueError
        for size in sizes:
            limit = 0 if size == "unlimited" else size_in_bytes(size)
    except ValueError:
        raise OptionError(
            f"statistics_log= must be one of {', '.join(map(repr, get_args(StatisticsLogRanks)))}, a maximum log size"
            f" per rank, such as '4GiB' or 'unlimited', or both, such as 'rank0, 4GiB', not {statistics_log!r}."
        ) from None
    return LogChoice(ranks[0] if ranks else "rank0", limit)


def step_number(what: str, step: object) -> int:
    """Convert the number of a step, which may be a numpy integer, to int. ``what``: the keyword, such as
    ``start_step=``.

    Raises:
        OptionError: not an integer, or negative.
    """
    number = whole_number(step)
    if number is None or number < 0:
        raise OptionError(f"{what} must be a whole number >= 0, not {step!r}.")
    return number


class SessionKeywords(TypedDict, total=False):
    """Keywords of :class:`SessionOptions`, for the integrations' signatures."""

    log_dir: StrPath | None
    feature_dirs: StrPath | Sequence[StrPath]
    features: Sequence[type]
    sinks: Sequence[Sink]
    process_group: torch.distributed.ProcessGroup | None
    reduce: bool
    statistics_log: StatisticsLogValue
    records: Records
    start_step: int | None
    scope: Scope
    prefix: str
    log_filter: LogFilter
    debug: DebugValue
    observe: Observe
    every_step: bool
    precision_features_in_eval: bool
    allow_unmatched: bool
    strict: bool
    require: ContractSource
    on_finding: OnFinding
    quiet: bool


@functools.cache
def _hints() -> Mapping[str, Any]:
    return get_type_hints(SessionKeywords)


_PLAIN = (
    "process_group",
    "reduce",
    "prefix",
    "observe",
    "every_step",
    "precision_features_in_eval",
    "allow_unmatched",
    "strict",
    "quiet",
)
"""Keywords without a parser of their own."""

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def check_value(key: str, value: object) -> None:
    """Check the value of a keyword against its type, if it has no parser.

    Raises:
        OptionError: invalid value.
    """
    if key not in _PLAIN:
        return
    try:
        TypeAdapter(_hints()[key], config=_STRICT).validate_python(value)
    except ValidationError as error:
        expected = " or ".join(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
        raise OptionError(f"{key}= must be {expected}, not {value!r}.") from None


@dataclass(frozen=True)
class SessionOptions:
    """The options of a session.

    Attributes:
        config: a path, a mapping, or a loaded config. None: statistics of every layer in steps 0, 1, 2, 5, 10, 20, 50
            and every 100th step (docs/statistics.md#the-default-config).
        log_dir: the folder for logs. None: the trainer's folder, or the current one.
        feature_dirs: folders of your own features; every ``.py`` file below them is executed.
        features: your own features, as classes.
        sinks: receivers of each step's records, besides the statistics log and the trainer's loggers.
        process_group: the group that reduces statistics. None: all ranks.
        reduce: reduce statistics over the ranks. False: keep local values, without collectives.
        statistics_log: ranks and size limit of the statistics log. ``"rank0"``: the group's first rank writes all
            values, the others local values. ``"all"``: every rank writes all values. ``"off"`` or False: no log.
            ``"4GiB"``, ``"rank0, 4GiB"`` or ``"rank0, unlimited"`` replaces the limit of 1 GiB; then the log ends.
        records: record the run in ``<log_dir>/precision_records``: ``"on"`` (16 GiB), ``"off"``, or a rank's size limit
            such as ``"64GiB"``; from then on statistics are no longer recorded (docs/records.md#the-size-limit).
        start_step: the debug iteration at start. None: 0, or the resumed step.
        scope: prefix of this rank's layer names, if ranks have different layers at the same path: a text such as
            ``"pp1"``, or a function of a module's path. Empty: derived from Megatron's parallel state or device meshes
            (docs/statistics.md#aggregation).
        prefix: first part of every metric name.
        log_filter: metrics for the trainer's loggers: patterns with ``*`` and ``?``, or a function of the name. None:
            all, up to a limit (docs/statistics.md#in-the-loggers).
        debug: ``"activation_overflow"`` stops where an activation or a gradient becomes inf or nan
            (docs/activation-overflow.md). ``"te_precision"`` is accepted without effect.
        observe: call path of observed layers (docs/observing.md). ``"fused"``: TE's fused path, with bit-identical
            training; other features are refused. ``"debug"``: TE's unfused debug path. ``"auto"``: the fused path where
            a layer's features allow it.
        every_step: watch the largest magnitude of each GEMM's tensors in every step (docs/observing.md#in-every-step).
        precision_features_in_eval: whether features that change precision also act in evaluation.
        allow_unmatched: warn instead of raising about sections that match no layer.
        strict: raise instead of warning about a failed observation, a layer refused by TE's debug path, or a difference
            found by the audit of a resume (docs/session.md#the-audit).
        require: a requirement on the run, such as ``"fp8 >= 95%"``, or a contract (docs/coverage.md#contract).
        on_finding: the reaction to a finding of a rule (docs/diagnosis.md#stop-on-a-finding). ``"warn"``: log each
            finding once. ``"stop"``, ``"stop: nonfinite, dead-gradient"``: raise a PrecisionFindingError on all ranks.
            A function of the finding, or a mapping of rules to ``"warn"``, ``"stop"`` or a function.
        quiet: omit the lines printed to stderr when the run ends, as does the environment variable
            TE_PRECISION_QUIET=1.
    """

    config: Config
    log_dir: Path | None = None
    feature_dirs: tuple[Path, ...] = ()
    features: tuple[type, ...] = ()
    sinks: tuple[Sink, ...] = ()
    process_group: torch.distributed.ProcessGroup | None = None
    reduce: bool = True
    statistics_log: StatisticsLogValue = "rank0"
    records: Records = "on"
    start_step: int | None = None
    scope: Scope = ""
    prefix: str = "te"
    log_filter: LogFilter = None
    debug: tuple[str, ...] = ()
    observe: Observe = "auto"
    every_step: bool = True
    precision_features_in_eval: bool = True
    allow_unmatched: bool = False
    strict: bool = False
    require: Contract | None = None
    on_finding: OnFinding = "warn"
    quiet: bool = False

    @classmethod
    def from_keywords(cls, config: ConfigSource, **keywords: Any) -> SessionOptions:
        """Check the keywords of an integration, and load the config.

        Raises:
            OptionError: an unknown keyword, or an invalid value.
            ConfigError: the config cannot be used.
        """
        option_names = {entry.name for entry in fields(cls)}
        for key, value in keywords.items():
            if key == "step_on":
                raise OptionError("step_on= is only an option of PrecisionDebugCallback and PrecisionDebugger.")
            if key not in option_names:
                raise OptionError(f"There is no option {key!r}.{suggestion(key, option_names)}")
            check_value(key, value)
        start_step = keywords.get("start_step")
        if start_step is not None:
            keywords["start_step"] = step_number("start_step=", start_step)
        read_statistics_log(keywords.get("statistics_log", "rank0"))
        record_limit(keywords.get("records", "on"))
        check_scope(keywords.get("scope", ""))
        on_finding = keywords.get("on_finding", "warn")
        if isinstance(on_finding, Mapping) and [*on_finding] == ["stop"]:  # as YAML reads "stop: error"
            on_finding = f"stop: {on_finding['stop']}"
            keywords["on_finding"] = on_finding
        read_on_finding(on_finding)
        log_dir = keywords.pop("log_dir", None)
        directories = keywords.pop("feature_dirs", ())
        if isinstance(directories, (str, os.PathLike)):
            directories = (directories,)
        feature_dirs = tuple(_folder(directory) for directory in _sequence("feature_dirs", directories))
        features = _sequence("features", keywords.pop("features", ()))
        for feature in features:
            if not isinstance(feature, type):
                raise OptionError(f"features= takes feature classes, not {feature!r}.")
        loaded = load_config(config, features=features, feature_dirs=feature_dirs)
        options = cls(
            config=with_early_steps(loaded),
            log_dir=None if log_dir is None else _path("log_dir", log_dir),
            feature_dirs=feature_dirs,
            features=features,
            sinks=_sequence("sinks", keywords.pop("sinks", ())),
            debug=parse_debug(keywords.pop("debug", ())),
            require=read_requirements(keywords.pop("require", None)),
            **keywords,
        )
        for sink in options.sinks:
            if not isinstance(sink, Sink) or isinstance(sink, type):
                raise OptionError(f"sinks= takes objects with the methods start, write and close, not {sink!r}.")
        MetricSelection(options.prefix, options.log_filter)
        return options


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def spelled_out(constructor: FunctionT) -> FunctionT:
    """Give an integration's ``__init__`` a signature that names every option instead of ``**keywords``.

    LightningCLI reads it by jsonargparse. Annotations contain only types that YAML can represent: str for a path, list
    for a sequence. With ``os.PathLike`` in an annotation, jsonargparse 4.52 and later converts every mapping and list
    to text, and the path of a file to its content.
    """
    signature = inspect.signature(constructor)
    hints = get_type_hints(constructor)
    defaults = {entry.name: entry.default for entry in fields(SessionOptions)}
    parameters = []
    for name, entry in signature.parameters.items():
        if entry.kind is not entry.VAR_KEYWORD:
            annotation = _yaml_type(hints[name]) if name in hints else entry.annotation
            parameters.append(entry.replace(annotation=annotation))
    option = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    for name, hint in _hints().items():
        annotation = _yaml_type(hint)
        parameters.append(option(name, default=defaults[name], annotation=annotation))
    constructor.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return constructor


_ONLY_IN_PYTHON = (os.PathLike, Config, Contract, Callable)


def _yaml_type(hint: Any) -> Any:
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        yaml_types = [_yaml_type(entry) for entry in arguments if (get_origin(entry) or entry) not in _ONLY_IN_PYTHON]
        return Union[tuple(yaml_types)]  # noqa: UP007  # made at run time
    if origin in (Iterable, Sequence):
        return list[_yaml_type(arguments[0])]  # type: ignore[misc]
    # jsonargparse requires the annotations of a protocol's methods; from_keywords() checks classes without them.
    if hint is Sink:
        return Sink | Any
    return hint


def read_step_on(step_on: object) -> StepOn:
    """Check the keyword ``step_on`` of an integration.

    Raises:
        OptionError: not a :data:`StepOn`.
    """
    if step_on not in get_args(StepOn):
        raise OptionError(f"step_on= must be one of {', '.join(map(repr, get_args(StepOn)))}, not {step_on!r}.")
    return cast(StepOn, step_on)


def _sequence(key: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"{key}= must be a list, not {value!r}.")
    return tuple(value)


def _path(key: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{key}= must be a path, not {value!r}.")
    return Path(value).expanduser()


def _folder(directory: Any) -> Path:
    path = _path("feature_dirs", directory)
    if not path.is_dir():
        raise OptionError(f"feature_dirs= names {str(path)!r}, which is not a folder.")
    return path.absolute()
