"""Starts nvidia-dlfw-inspect and Transformer Engine's debug state for a session, and restores them after it.

Read from nvidia-dlfw-inspect 0.2.2 and Transformer Engine 2.20.2. Upstream's own ``end_debug`` leaves behind log
handlers, the set of one-time messages, the schedule of each module and (if a module was built in between) a state in
which nothing is ever observed. Here a snapshot is taken before the first change, and restored whatever happened.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.errors import (
    FeatureLoadError,
    ObservationError,
    SessionError,
    TransformerEngineUnavailableError,
)
from te_precision_callbacks.base.threads import within
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import Effect
from te_precision_callbacks.config.planning import NamespacedFeatures, RegisteredFeatures
from te_precision_callbacks.instrumentation.event_log import FORMAT, EventLog
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.scalars import ScalarBuffer
from te_precision_callbacks.instrumentation.stray_calls import StrayCalls
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.sinks.statistics_log import EVENTS_FOLDER
from te_precision_callbacks.sinks.writer_thread import LONGEST_STILL

logger = logging.getLogger(__name__)

SUPPORTED_TE = ("2.20", "2.21")
"""The Transformer Engine versions that the seams were read from: at least the first, and below the second."""


_PYTHON_LOGGERS = ("nvdlfw_inspect", "Default Statistics")
_EVENTS = "nvidia-dlfw-inspect's log"
_TIMESTAMP_VARIABLE = "NVDLFW_INSPECT_LOG_TIMESTAMP"
_STATE_ATTRIBUTES = ("debug_enabled", "weight_tensor_tp_group_reduce", "layers_initialized")
_MODULE_ATTRIBUTES = (
    "name",
    "next_iter_when_debug_should_be_run",
    "debug_last_iteration",
    "debug_enabled_in_this_iteration",
)
_NOT_RUN_YET = {"next_iter_when_debug_should_be_run": 0}
_MISSING = object()


def import_transformer_engine() -> None:
    """Import Transformer Engine's PyTorch modules.

    Raises:
        TransformerEngineUnavailableError: no Transformer Engine, or its compiled extension is missing or broken.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.debug.pytorch.debug_quantization")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # A package without its compiled part raises RuntimeError or FileNotFoundError, not ImportError.
        raise TransformerEngineUnavailableError(error) from error


@cache
def _version_of_transformer_engine() -> str:
    """Of the one that this process has imported, whatever is installed later."""
    return importlib.metadata.version("transformer_engine")


def warn_unless_supported() -> None:
    """Warn if the seams were not read from the installed version of Transformer Engine."""
    from packaging.version import Version

    installed = _version_of_transformer_engine()
    low, high = (Version(bound) for bound in SUPPORTED_TE)
    if not low <= Version(Version(installed).base_version) < high:
        logger.warning(
            "te-precision-callbacks was made for Transformer Engine >=%s,<%s, but %s is installed. The session tries to"
            " run with it; where something differs, observation fails with a message.",
            *SUPPORTED_TE,
            installed,
        )


class Snapshot:
    """Everything global that a session changes. Taken before the first change; :meth:`restore` puts it back."""

    def __init__(self) -> None:
        import nvdlfw_inspect.logging as inspect_logging
        from nvdlfw_inspect.config_manager import ConfigManager
        from nvdlfw_inspect.logging import MetricLogger
        from nvdlfw_inspect.registry import Registry
        from nvdlfw_inspect.utils import APICacheIdentifier, SingleMessageLogger
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        self._inspect_logger = inspect_logging.LOGGER
        self._metric_loggers = list(MetricLogger.enabled_loggers)
        self._messages = set(SingleMessageLogger.logged_messages)
        self._call_details = APICacheIdentifier.__dict__.get("_call_details", _MISSING)
        self._registry = {name: _copied(data) for name, data in Registry.data.items()}
        self._configs = list(ConfigManager.configs)
        self._python_loggers = {
            name: (list(found.handlers), found.level, found.propagate)
            for name in _PYTHON_LOGGERS
            for found in [logging.getLogger(name)]
        }
        self._state = {name: copy.copy(getattr(TEDebugState, name)) for name in _STATE_ATTRIBUTES}
        self._timestamp = os.environ.get(_TIMESTAMP_VARIABLE)
        self._modules: dict[int, tuple[torch.nn.Module, dict[str, Any]]] = {}

    def detach_handlers(self) -> None:
        """Detach handlers that an ended run of upstream's has left, until :meth:`restore`: they write its files."""
        for name in self._python_loggers:
            logging.getLogger(name).handlers.clear()

    def remember_module(self, module: torch.nn.Module) -> None:
        """Note a module's debug attributes, unless that was done before."""
        if id(module) not in self._modules:
            self._modules[id(module)] = (
                module,
                {name: module.__dict__.get(name, _MISSING) for name in _MODULE_ATTRIBUTES},
            )

    def restore_module_names(self) -> None:
        """Give the modules back the names that they had, so they can be looked at again."""
        for module, attributes in self._modules.values():
            _set_attribute(module, "name", attributes["name"])

    def restore(self) -> None:
        """Put everything back. Upstream's debug manager must have ended."""
        import nvdlfw_inspect.logging as inspect_logging
        from nvdlfw_inspect.config_manager import ConfigManager
        from nvdlfw_inspect.logging import MetricLogger
        from nvdlfw_inspect.registry import Registry
        from nvdlfw_inspect.utils import APICacheIdentifier, SingleMessageLogger
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        for module, attributes in self._modules.values():
            for name, value in attributes.items():
                _set_attribute(module, name, value)
            _drop_debug_workspaces(module)
        self._modules = {}
        for name, value in self._state.items():
            setattr(TEDebugState, name, value)
        for name, (handlers, level, propagate) in self._python_loggers.items():
            found = logging.getLogger(name)
            for handler in [handler for handler in found.handlers if handler not in handlers]:
                found.removeHandler(handler)
                with contextlib.suppress(OSError):  # of a full disk, which was reported when it was written to
                    handler.close()
            found.handlers[:] = handlers
            if found.level != level:  # setting it goes through all loggers of the process
                found.setLevel(level)
            found.propagate = propagate
        inspect_logging.LOGGER = self._inspect_logger
        MetricLogger.enabled_loggers[:] = self._metric_loggers
        SingleMessageLogger.logged_messages.clear()
        SingleMessageLogger.logged_messages.update(self._messages)
        if self._call_details is _MISSING:
            if "_call_details" in APICacheIdentifier.__dict__:
                del APICacheIdentifier._call_details
        else:
            APICacheIdentifier._call_details = self._call_details
        Registry.data.clear()
        Registry.data.update(self._registry)
        ConfigManager.configs = self._configs
        ConfigManager.layer_name_to_config_cache.clear()
        if self._timestamp is None:
            os.environ.pop(_TIMESTAMP_VARIABLE, None)
        else:
            os.environ[_TIMESTAMP_VARIABLE] = self._timestamp


def _copied(namespace_data: Any) -> Any:
    """A copy of a namespace's registry entry, with copied dictionaries and lists."""
    entry = copy.copy(namespace_data)
    entry.features = dict(entry.features)
    entry.feat_api_to_features = copy.deepcopy(entry.feat_api_to_features)
    entry.deferred_features = list(entry.deferred_features)
    return entry


def _set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def _drop_debug_workspaces(module: torch.nn.Module) -> None:
    """Forget cached weights that were quantized under debugging: they keep the session's quantizers alive."""
    from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizedTensor

    workspaces: dict[str, Any] = module.__dict__.get("_fp8_workspaces", {})
    for name in [name for name, held in workspaces.items() if isinstance(held, DebugQuantizedTensor)]:
        del workspaces[name]


class Inspector:
    """nvidia-dlfw-inspect while a session is live.

    Args:
        log_dir: the folder of its log of events.
        options: the session's options.
        failures: receives failures, also that nothing can be written to the folder.

    Attributes:
        events: upstream's log of events.
    """

    def __init__(self, log_dir: Path, options: SessionOptions, failures: ObservationFailures) -> None:
        self._failures = failures
        self._options = options
        self._log_dir = log_dir
        self.events = EventLog(log_dir)
        self._snapshot: Snapshot | None = None
        self._manager: Any = None
        self._stray_calls: StrayCalls | None = None
        self._last_iteration = 0

    def start(self, observation: Observation, scalars: ScalarBuffer, before_end: Callable[[], None]) -> None:
        """Start upstream with every feature and no config yet.

        Args:
            observation: the observation of the run.
            scalars: receive each scalar that a user's feature logs.
            before_end: called before the script itself ends upstream.

        Raises:
            SessionError: upstream is running already, started here or by the script; or with ``strict``, nothing can be
                written to the folder.
            FeatureLoadError: a feature could not be loaded.
        """
        import nvdlfw_inspect.api as debug_api
        from nvdlfw_inspect.utils import SingleMessageLogger
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        if debug_api.DEBUG_MANAGER is not None:
            raise SessionError(
                "nvidia-dlfw-inspect is initialized already, by debug_api.initialize() in the script. Only one run can"
                " be active: call debug_api.end_debug() first, and leave initialize, step and end_debug to the session."
                " Pass its config as config=; with layer_names='upstream' its selectors select the same layers."
            )
        self._make_folder()
        self._snapshot = Snapshot()
        self._snapshot.detach_handlers()
        SingleMessageLogger.logged_messages.clear()
        with warnings.catch_warnings():
            # TE's deprecated aliases warn when they are registered, used or not; as an error it would end the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._initialize(debug_api, scalars)
        manager: Any = debug_api.DEBUG_MANAGER
        self._manager = manager
        self._stray_calls = StrayCalls(manager, before_end)
        manager._tensor_reduction_group = self._options.process_group
        self._api.begin(observation, reduce=self._options.reduce)
        # Modules that are built from now on must not conclude that debugging was started too late; modules that were
        # built before take part as well, since the state is an attribute of the class.
        TEDebugState.debug_enabled = True

    def _make_folder(self) -> None:
        """Make the log folder, where scripts may also put files. Where it cannot be made or written to, a
        strict run does not start. Where the disk does not answer, what writes a file reports that it is lost."""
        folder = self._log_dir / EVENTS_FOLDER if self._options.strict else self._log_dir

        def make() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"no permission to write to {str(folder)!r}")

        try:
            within(LONGEST_STILL, make)
        except OSError as error:
            if self._options.strict:
                raise SessionError(
                    f"log_dir={str(self._log_dir)!r} cannot be written to: {error}. Give a writable folder."
                ) from error
            if not isinstance(error, TimeoutError):
                self._failures.lose_folder(self._log_dir, error)

    def _begin_events(self) -> None:
        """Begin upstream's log of events, as ``initialize_logger`` does, but for the thread that writes it."""
        import nvdlfw_inspect.logging as inspect_logging

        inspect_logging.LOGGER = inspect_logging.FileLogger(_PYTHON_LOGGERS[0], str(self._log_dir))
        on_terminal = logging.StreamHandler()
        on_terminal.setLevel(logging.WARNING)
        on_terminal.setFormatter(logging.Formatter(f"NVDLFW INSPECT - {FORMAT}"))
        found = logging.getLogger(_PYTHON_LOGGERS[0])
        for handler in (self.events, on_terminal):
            handler.handleError = self._report_log_failure  # type: ignore[method-assign]
            found.addHandler(handler)
        found.propagate = False

    def _report_log_failure(self, record: logging.LogRecord) -> None:
        """Report a line that could not be made or written to the terminal, instead of logging's own traceback."""
        error = sys.exc_info()[1]
        if error is not None:
            self._failures.report("writing", _EVENTS, error)

    def report_events(self) -> None:
        """Report that the log of events could not be written, once."""
        failure = self.events.take_failure()
        if failure is not None:
            self._failures.report("writing", _EVENTS, failure)

    def _initialize(self, debug_api: Any, scalars: ScalarBuffer) -> None:
        """Start upstream."""
        import transformer_engine.debug.features as te_features
        from nvdlfw_inspect.debug_manager import DebugManager

        import te_precision_callbacks.features as own_features
        from te_precision_callbacks.features import registration

        own, upstream = ([str(Path(module.__path__[0]))] for module in (own_features, te_features))
        for feature in self._options.features:
            try:
                registration.register(feature)
            except Exception as error:
                raise FeatureLoadError(
                    f"The feature class {feature.__name__} could not be registered: {type(error).__name__}: {error}."
                ) from error
        self._begin_events()
        try:
            # Like debug_api.initialize(), except for the config: there is none yet, and upstream refuses an empty one.
            debug_api.DEBUG_MANAGER = DebugManager(
                None,
                feature_dirs=[*map(str, self._options.feature_dirs), *own, *upstream],
                statistics_logger=_logger_into(scalars),
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
        """The registered features: namespace -> names."""
        from nvdlfw_inspect.registry import Registry

        return {namespace: tuple(data.features) for namespace, data in Registry.data.items()}

    @property
    def _api(self) -> Any:
        """The namespace API."""
        import nvdlfw_inspect.api as debug_api

        from te_precision_callbacks.features import registration

        manager: Any = debug_api.DEBUG_MANAGER
        return manager._namespace_apis[registration.NAMESPACE]

    def only_looks(self, name: str) -> bool:
        """Whether a registered feature is one of this project's that look at tensors, as they do."""
        from te_precision_callbacks.features.base import ScheduledFeature

        feature: Any = self._api.namespace_features.get(name)
        own = isinstance(feature, ScheduledFeature)
        return own and type(feature).inspect_tensor is ScheduledFeature.inspect_tensor

    def that_change_precision(self, features: NamespacedFeatures) -> tuple[str, ...]:
        """The names of the features of a layer that can change what a GEMM gets, each with its steps if these are not
        all."""
        from nvdlfw_inspect.registry import Registry

        return tuple(
            f"{name}{_steps_of(options)}"
            for namespace, named in features.items()
            for name, options in named.items()
            if any(
                hasattr(Registry.data[namespace].features[name], method)
                for method in ("fp8_gemm_enabled", "modify_tensor_enabled")
            )
        )

    def configure(self, config: Mapping[str, Any], source: str, sections: Sequence[NamespacedFeatures]) -> None:
        """Replace the config.

        Args:
            config: a plan with exact layer names, of this rank's layers.
            source: the source of the config.
            sections: the features of all sections, including sections that match no layer of this rank: all ranks must
                know when a statistic is due on any rank.
        """
        from nvdlfw_inspect.config_manager import ConfigManager
        from nvdlfw_inspect.registry import Registry

        ConfigManager.reset()
        if config:  # upstream refuses an empty one
            ConfigManager._load_config(dict(config), Registry.data)
        for data in Registry.data.values():
            data.api._api_cache.clear()
        self._api.plan(section.get(self._api.name, {}) for section in sections)
        self.log(f"Reading config from {source}.")

    def log(self, message: str) -> None:
        """Write a line into nvidia-dlfw-inspect's log of events."""
        from nvdlfw_inspect.logging import get_logger

        get_logger().log_message(message)

    def name_module(self, module: torch.nn.Module, name: str) -> None:
        """Give a module its name, and the schedule of a module that has not run yet."""
        if self._snapshot is None or self._stray_calls is None:
            raise SessionError("The session is not running.")
        self._stray_calls.keep_names()
        self._snapshot.remember_module(module)
        module.__dict__["name"] = name
        reset_schedule(module)

    def forget_names(self) -> None:
        """Give all modules back their own names, to look at the model again."""
        if self._snapshot is not None:
            self._snapshot.restore_module_names()

    @property
    def ended(self) -> bool:
        """Whether the script has ended upstream by itself since the start, with ``debug_api.end_debug()``."""
        import nvdlfw_inspect.api as debug_api

        return self._manager is not None and debug_api.DEBUG_MANAGER is not self._manager

    @property
    def iteration(self) -> int:
        """The debug iteration."""
        if self._manager is not None:
            self._last_iteration = int(self._manager._trainer_iteration_count)
        return self._last_iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        type(self._manager).initialize_training_step(self._manager, value)  # see stray_calls.py

    def step(self) -> None:
        """Count the iteration, and let users' features log what they have gathered; with collectives, unless
        ``reduce=False``."""
        type(self._manager).step(self._manager)  # see stray_calls.py

    @property
    def runs(self) -> bool:
        """Whether upstream was started, and has not ended."""
        return self._manager is not None and not self.ended

    def log_local_buffers(self) -> None:
        """Let users' features log what they have gathered on this rank, without a collective."""
        self._api.log_local_buffers()

    def stop(self) -> None:
        """End upstream and put everything back. Does nothing if upstream was not started."""
        if self._snapshot is None:
            return
        import nvdlfw_inspect.api as debug_api
        from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS

        if self._stray_calls is not None:
            self._stray_calls.remove()
            self._stray_calls = None
        try:
            if not self.ended:
                debug_api.end_debug()
        finally:
            debug_api.DEBUG_MANAGER = self._manager = None
            # A start that failed has no manager to end, but may have reached the namespace's features.
            vars(STATS_BUFFERS).pop("log_stats", None)
            self._snapshot.restore()
            self._snapshot = None
            with contextlib.suppress(ObservationError):  # with strict=True; the session has ended
                self.report_events()


def _steps_of(options: Mapping[str, Any]) -> str:
    """The steps in which a feature changes precision, in brackets; empty if these are all."""
    effect = options.schema.effect() if isinstance(options, ReadOptions) else Effect()
    return f" ({effect.steps_in_words()})" if effect.schedules else ""


def reset_schedule(module: torch.nn.Module) -> None:
    """Make a module ask its features again in its next forward, at whatever iteration that is."""
    for name in _MODULE_ATTRIBUTES[1:]:
        _set_attribute(module, name, _NOT_RUN_YET.get(name, _MISSING))


def _logger_into(scalars: ScalarBuffer) -> Any:
    from nvdlfw_inspect.logging import BaseLogger

    class ScalarLogger(BaseLogger):  # type: ignore[misc]  # upstream is untyped
        """Adds scalars to those of the session."""

        def log_scalar(self, name: str, value: Any, iteration: int, **_: Any) -> None:
            scalars.add(name, value)

    return ScalarLogger()
