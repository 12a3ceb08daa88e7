"""Starts nvidia-dlfw-inspect and TE's debug state for a session, and restores them.

Read from nvidia-dlfw-inspect 0.2.2 and Transformer Engine 2.20.2. Upstream's ``end_debug`` leaves behind log handlers,
the set of one-time messages, modules' schedules and, if a module was built meanwhile, a state that never observes
anything. A session therefore runs upstream on copies of its global state.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import nvdlfw_inspect.logging as inspect_logging
import torch
from nvdlfw_inspect.config_manager import ConfigManager
from nvdlfw_inspect.debug_manager import DebugManager
from nvdlfw_inspect.logging import BaseLogger, get_logger
from nvdlfw_inspect.registry import Registry
from nvdlfw_inspect.utils import APICacheIdentifier, SingleMessageLogger

from te_precision_callbacks.base.errors import FeatureLoadError, ObservationError, SessionError
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.replaced import MISSING, Replacements, set_attribute
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.planning import NamespacedFeatures, RegisteredFeatures
from te_precision_callbacks.features.base import ScheduledFeature
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.sinks.statistics_log import EVENTS_FOLDER, LogFile, LogJob, log_file_name
from te_precision_callbacks.sinks.writer_thread import WriterThread
from te_precision_callbacks.te.debug import STATE, begin_debugging, drop_debug_weights, restore_log_stats
from te_precision_callbacks.te.package import feature_folders

logger = logging.getLogger(__name__)

_PYTHON_LOGGERS = ("nvdlfw_inspect", "Default Statistics")
_EVENTS = "nvidia-dlfw-inspect's log"
_NOT_RUN_YET = {
    "next_iter_when_debug_should_be_run": 0,
    "debug_last_iteration": MISSING,
    "debug_enabled_in_this_iteration": MISSING,
}
"""The attributes of a module's schedule, before its first forward."""


def isolate_upstream() -> contextlib.ExitStack:
    """Replace upstream's global state by copies, until the result is closed; its debug manager must have ended then."""
    undo = contextlib.ExitStack()
    replaced = Replacements()
    undo.callback(replaced.restore)
    registered = {name: _copy_registry_entry(entry) for name, entry in Registry.data.items()}
    replaced.replace(Registry, "data", registered)
    replaced.replace(APICacheIdentifier, "_call_details", vars(APICacheIdentifier).get("_call_details"))
    for owner, names in (
        (debug_api, ("DEBUG_MANAGER",)),
        (inspect_logging, ("LOGGER",)),
        (inspect_logging.MetricLogger, ("enabled_loggers",)),
        (SingleMessageLogger, ("logged_messages",)),
        (ConfigManager, ("configs", "layer_name_to_config_cache")),
        STATE,
    ):
        for name in names:
            replaced.replace(owner, name, copy.copy(getattr(owner, name)))
    for name in _PYTHON_LOGGERS:
        python_logger = logging.getLogger(name)
        handlers = list(python_logger.handlers)
        undo.callback(_restore_logger, python_logger, handlers, python_logger.level, python_logger.propagate)
        python_logger.handlers.clear()  # those of an earlier upstream run write into its files
    return undo


def _copy_registry_entry(namespace_data: Any) -> Any:
    entry = copy.copy(namespace_data)
    entry.features = dict(entry.features)
    entry.feat_api_to_features = copy.deepcopy(entry.feat_api_to_features)
    entry.deferred_features = list(entry.deferred_features)
    return entry


def _restore_logger(
    python_logger: logging.Logger, handlers: Sequence[logging.Handler], level: int, propagate: bool
) -> None:
    for handler in python_logger.handlers:
        if handler not in handlers:
            with contextlib.suppress(OSError):  # a full disk, reported when written to
                handler.close()
    python_logger.handlers[:] = handlers
    if python_logger.level != level:  # setting it visits all loggers of the process
        python_logger.setLevel(level)
    python_logger.propagate = propagate


class Inspector:
    """nvidia-dlfw-inspect while a session is live.

    Attributes:
        events: upstream's event log.
    """

    def __init__(self, log_dir: Path, options: SessionOptions, failures: ObservationFailures) -> None:
        self._failures = failures
        self._options = options
        self._log_dir = log_dir
        self.events = EventLog(log_dir)
        self._undo = contextlib.ExitStack()
        self._names = Replacements()
        self._schedules = Replacements()
        self._calls = Replacements()
        self._notices = Notices()
        self._manager: Any = None
        self._last_iteration = 0

    def start(self, observation: Observation, scalars: ScalarBuffer) -> None:
        """Start upstream with all features and without a config.

        Args:
            scalars: receives scalars that users' features log.

        Raises:
            SessionError: upstream already runs; or, with ``strict``, the log folder is not writable.
            FeatureLoadError: a feature cannot be loaded.
        """
        if debug_api.DEBUG_MANAGER is not None:
            raise SessionError(
                "The script has already called debug_api.initialize(). Remove its calls of initialize, step and"
                " end_debug, and pass its config as config=; add layer_names: upstream to it to select the same layers."
            )
        self._make_folder()
        self._undo = isolate_upstream()
        # A failed start has no manager to end, but may have reached the namespace's features.
        for undo in (restore_log_stats, self._names.restore, self._schedules.restore, self._end, self._calls.restore):
            self._undo.callback(undo)
        SingleMessageLogger.logged_messages.clear()
        with warnings.catch_warnings():
            # Registering TE's deprecated aliases warns, used or not; a warning as an error would end the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._initialize(scalars)
        manager: Any = debug_api.DEBUG_MANAGER
        self._manager = manager
        for name in _EXPLANATIONS:
            if name != _NAMING:
                self._calls.replace(manager if name in _MANAGER_FUNCTIONS else debug_api, name, self._ignoring(name))
        # Called by a reference to end_debug that the script has.
        self._calls.replace(manager, "close", self._ignoring("end_debug"))
        manager._tensor_reduction_group = self._options.process_group
        self._api.begin(observation, reduce=self._options.reduce)
        begin_debugging()

    def _ignoring(self, name: str) -> Callable[..., None]:
        """Return what ignores, with a warning, a script's calls of nvidia-dlfw-inspect's API during a session.

        A second ``step()``, for example, would silently skip every other iteration. A script's layer names are used
        until the session assigns its own. Read from nvidia-dlfw-inspect 0.2.2, ``api.py`` and ``debug_manager.py``.
        """

        def ignored(*_: Any, **__: Any) -> None:
            if self._notices.first(name):
                logger.warning(
                    "The script calls debug_api.%s() while the session is running. The call is ignored. %s",
                    name,
                    _EXPLANATIONS[name],
                )

        return ignored

    def _make_folder(self) -> None:
        folder = self._log_dir / EVENTS_FOLDER if self._options.strict else self._log_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"no permission to write to {str(folder)!r}")
        except OSError as error:
            if self._options.strict:
                raise SessionError(
                    f"log_dir={str(self._log_dir)!r} cannot be written to: {error}. Give a writable folder."
                ) from error
            self._failures.lose_folder(self._log_dir, error)

    def _begin_events(self) -> None:
        """Start upstream's event log as ``initialize_logger`` does, but with a writer thread."""
        inspect_logging.LOGGER = inspect_logging.FileLogger(_PYTHON_LOGGERS[0], str(self._log_dir))
        on_terminal = logging.StreamHandler()
        on_terminal.setLevel(logging.WARNING)
        on_terminal.setFormatter(logging.Formatter(f"NVDLFW INSPECT - {EVENTS_FORMAT}"))
        python_logger = logging.getLogger(_PYTHON_LOGGERS[0])
        for handler in (self.events, on_terminal):
            handler.handleError = self._report_log_failure  # type: ignore[method-assign]
            python_logger.addHandler(handler)
        python_logger.propagate = False

    def _report_log_failure(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._failures.report("writing", _EVENTS, error)

    def report_events(self) -> None:
        failure = self.events.thread.take_failure()
        if failure is not None:
            self._failures.report("writing", _EVENTS, failure)

    def _initialize(self, scalars: ScalarBuffer) -> None:
        from te_precision_callbacks.features import registration

        shipped = [str(Path(registration.__file__).parent), *feature_folders()]
        for feature in self._options.features:
            try:
                registration.register(feature)
            except Exception as error:
                raise FeatureLoadError(
                    f"The feature class {feature.__name__} could not be registered: {type(error).__name__}: {error}."
                ) from error
        self._begin_events()
        try:
            # Like debug_api.initialize(), but without a config: there is none yet, and upstream refuses an empty one.
            debug_api.DEBUG_MANAGER = DebugManager(
                None,
                feature_dirs=[*map(str, self._options.feature_dirs), *shipped],
                statistics_logger=_make_scalar_logger(scalars),
                log_dir=str(self._log_dir),
            )
        except SystemExit as error:
            cause = error.__context__ or error
            raise FeatureLoadError(
                f"A feature file could not be loaded: {type(cause).__name__}: {cause}. Looked in:"
                f" {', '.join(map(str, self._options.feature_dirs)) or 'the shipped features only'}."
            ) from cause
        except (NotImplementedError, TypeError, AssertionError) as error:
            raise FeatureLoadError(f"nvidia-dlfw-inspect could not load the features: {error}") from error

    @property
    def registered(self) -> RegisteredFeatures:
        """Namespace -> names of its features."""
        return {namespace: tuple(data.features) for namespace, data in Registry.data.items()}

    @property
    def _api(self) -> Any:
        return self._manager._namespace_apis[NAMESPACE]

    def only_observes(self, name: str) -> bool:
        """Return whether a feature is a :class:`ScheduledFeature` that does not override ``inspect_tensor``."""
        feature: Any = self._api.namespace_features.get(name)
        is_scheduled = isinstance(feature, ScheduledFeature)
        return is_scheduled and type(feature).inspect_tensor is ScheduledFeature.inspect_tensor

    def configure(self, config: Mapping[str, Any], source: str, sections: Sequence[NamespacedFeatures]) -> None:
        """Replace the config.

        Args:
            config: a plan with exact names of this rank's layers.
            sections: features of all sections, including those without a layer on this rank: all ranks need each
                statistic's schedule.
        """
        ConfigManager.reset()
        if config:  # upstream refuses an empty one
            ConfigManager._load_config(dict(config), Registry.data)
        for data in Registry.data.values():
            data.api._api_cache.clear()
        self._calls.replace(debug_api, _NAMING, self._ignoring(_NAMING))
        self._api.plan(section.get(self._api.name, {}) for section in sections)
        self.log(f"Reading config from {source}.")

    def log(self, message: str) -> None:
        get_logger().log_message(message)

    def name_module(self, module: torch.nn.Module, name: str) -> None:
        self._names.replace(module, "name", name)
        begin_schedule(module, self._schedules)
        self._undo.callback(drop_debug_weights, module)

    def forget_names(self) -> None:
        self._names.restore()

    @property
    def iteration(self) -> int:
        if self._manager is not None:
            self._last_iteration = int(self._manager._trainer_iteration_count)
        return self._last_iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        type(self._manager).initialize_training_step(
            self._manager, value
        )  # not the manager's own, which ignores a script's calls

    def step(self) -> None:
        """Advance the iteration, and let users' features log statistics, with collectives unless ``reduce=False``."""
        type(self._manager).step(self._manager)  # its attribute ignores the script's calls

    def keep(self) -> None:
        """Restore the debug manager, which a script drops by calling its own reference to ``end_debug``."""
        if self._manager is not None:
            debug_api.DEBUG_MANAGER = self._manager

    def log_local_buffers(self) -> None:
        self._api.log_local_buffers()

    def _end(self) -> None:
        self.keep()
        self._manager = None
        debug_api.end_debug()

    def stop(self) -> None:
        try:
            self._undo.close()
        finally:
            with contextlib.suppress(ObservationError):  # with strict=True; the session has ended
                self.report_events()


def begin_schedule(module: torch.nn.Module, replaced: Replacements) -> None:
    """Make a module query its features in its next forward, until its own attributes are restored."""
    for name, value in _NOT_RUN_YET.items():
        replaced.replace(module, name, value)


def reset_schedule(module: torch.nn.Module) -> None:
    """Make a module query its features in its next forward, in any iteration."""
    for name, value in _NOT_RUN_YET.items():
        set_attribute(module, name, value)


def _make_scalar_logger(scalars: ScalarBuffer) -> Any:
    class ScalarLogger(BaseLogger):  # type: ignore[misc]  # upstream is untyped
        def log_scalar(self, name: str, value: Any, iteration: int, **_: Any) -> None:
            scalars.add(name, value)

    return ScalarLogger()


_EXPLANATIONS = {
    "initialize": "The session has already started nvidia-dlfw-inspect with the session's config=.",
    "initialize_training_step": "start_step= or session.iteration sets the debug iteration.",
    "step": "The session's step() counts the debug iterations.",
    "end_debug": "The session ends nvidia-dlfw-inspect when it stops.",
    "infer_and_assign_layer_names": "Layers are named as in session.layers; layer_names: upstream in the config"
    " uses this function's names, which also select layers if assigned before attach().",
    "set_tensor_reduction_group": "process_group= is the group over which statistics are reduced.",
}
"""Function of ``nvdlfw_inspect.api`` -> what replaces it in a session, for the warning."""

_MANAGER_FUNCTIONS = ("initialize_training_step", "step")
"""Functions that only call the debug manager. They are replaced in the manager, also for references that a script has.
"""

_NAMING = "infer_and_assign_layer_names"
"""Ignored only when the session has assigned its own names."""

EVENTS_LIMIT = 256 << 20
"""Size limit of a rank's event log, in bytes: users' features may repeat lines."""

MAX_QUEUED_EVENTS = 1 << 18
"""Maximum number of queued lines; further lines are dropped."""

EVENTS_FORMAT = "%(asctime)s - %(levelname)s - %(message)s"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py: FileLogger.initialize``."""


class EventLog(logging.Handler):
    """Replaces nvidia-dlfw-inspect's log handler, which waits for the disk on every line.

    A thread writes which features act on each layer, GEMM and tensor::

        <log_dir>/nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-<rank>.log
            <time> - INFO - LAYER=fc1: Feature=LogTensorStats, API=inspect_tensor: activation

    Lines stay in memory until :meth:`begin`, since ranks may be unknown before.
    """

    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(EVENTS_FORMAT))
        self._folder = log_dir / EVENTS_FOLDER
        self._file = _EventFile(self._folder, EVENTS_LIMIT, "")
        self._lowest_level = logging.NOTSET
        self.thread: WriterThread[LogJob] = WriterThread("log of events", self._file, MAX_QUEUED_EVENTS)

    def begin(self, *, in_full: bool) -> None:
        """Start writing.

        Args:
            in_full: write all lines; otherwise only warnings and errors, so most ranks create no file.
        """
        if not self._file.is_open:
            self._lowest_level = logging.NOTSET if in_full else logging.WARNING
            self._file.begin(self._folder / log_file_name(own_rank()))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if "\n" in record.message:
                beginning = line.partition(record.message)[0]
                line = line.replace("\n", f"\n{beginning}")
        except Exception:
            self.handleError(record)
        else:
            self.thread.put(functools.partial(self._lines_of, record.levelno, f"{line}\n"), 1)

    def _lines_of(self, level: int, line: str) -> Iterable[str]:
        if level >= self._lowest_level:
            yield line

    def close(self) -> None:
        """Wait until all lines are written, or until the disk no longer responds, which is logged."""
        self.begin(in_full=own_rank() == 0)
        self.thread.finish()
        super().close()


class _EventFile(LogFile):
    """A log file that takes no lines until :meth:`begin`."""

    is_open = False

    def begin(self, path: Path) -> None:
        self._path = path
        self.is_open = True

    def take(self, job: LogJob) -> bool:
        return self.is_open and super().take(job)
