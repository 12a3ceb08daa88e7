"""Shared fixtures: the reference backend without a GPU, a sink that keeps records, checks of global state."""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked, quick
from tests.quick import (  # noqa: F401  # pytest finds them here
    no_process_is_started,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_deselected,
    pytest_terminal_summary,
    pytest_testnodedown,
)

if TYPE_CHECKING:
    import torch

    from te_precision_callbacks.sinks import RunInfo, StepRecords


def pytest_configure(config: pytest.Config) -> None:
    """Also where the tests run; who only hands them to workers imports no torch, and has them forked from one process
    that has imported all."""
    quick.pytest_configure(config)
    gc.set_threshold(20_000, 20, 20)  # imports and trees of sources are large, and there for good
    os.environ.setdefault("TE_PRECISION_QUIET", "1")  # the lines with the verdict, which few tests check
    if hasattr(config, "workerinput"):  # forked, so these are a program that forks
        sys.executable = sys.orig_argv[0]
        multiprocessing.set_executable(sys.executable)
    files_in_memory()
    if config.getoption("dist", "no") == "no":
        from tests.preparing import prepare

        prepare()
    elif not config.getoption("quick"):
        config.option.tx = [f"{spec}//python={forked.executable(whole=True)}" for spec in config.option.tx]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the test files of a whole run, each worker from another one on: where pytest has kept no rewritten
    assertions, a worker finds those that the others have just rewritten."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.option.file_or_dir:
        return
    folder = Path(__file__).parent
    files = sorted(folder.rglob("test_*.py"))
    begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in (*files[begin:], *files[:begin]):
        with suppress(pytest.skip.Exception):  # of a library that is missing: collection says so
            importlib.import_module(".".join(file.relative_to(folder.parent).with_suffix("").parts))


def files_in_memory() -> None:
    """The folders of ``tmp_path`` are in memory where it has room for them, 0.8 GB if all is kept: the end of each run
    waits until its files are on the disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 3 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


class Collections:
    """Full garbage collections: each goes through all that imports have made, which is there for good.

    Accelerate starts several in each training. Where one takes long, all that is there after the test is left out of
    the later ones.
    """

    LONG = 0.015  # seconds of the processor

    def __init__(self) -> None:
        self.was_long = True
        self._started = 0.0

    def __call__(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
        elif about["generation"] == 2 and time.thread_time() - self._started > self.LONG:
            self.was_long = True

    def leave_out(self) -> None:
        if self.was_long:
            gc.collect()
            gc.freeze()
            self.was_long = False


collections = Collections()


def pytest_collection_finish() -> None:
    gc.callbacks.append(collections)
    collections.leave_out()


def pytest_sessionfinish(session: pytest.Session) -> None:
    quick.pytest_sessionfinish(session)
    if collections in gc.callbacks:  # who only hands tests to workers collects none
        gc.callbacks.remove(collections)
        gc.unfreeze()


class Keeper:
    def __init__(self) -> None:
        self.runs: list[RunInfo] = []
        self.steps: list[StepRecords] = []
        self.closed: list[BaseException | None] = []

    def start(self, run: RunInfo) -> None:
        self.runs.append(run)

    def write(self, records: StepRecords) -> None:
        self.steps.append(records)

    def close(self, error: BaseException | None) -> None:
        self.closed.append(error)

    @property
    def iterations(self) -> list[int]:
        return [records.iteration for records in self.steps]

    def values(self, statistic: str, layer: str | None = None, tensor: str = "activation") -> dict[int, float]:
        """Iteration -> value, of the one layer that has the statistic unless another is named."""
        return {
            records.iteration: row.value
            for records in self.steps
            for row in records
            if row.statistic == statistic and row.tensor == tensor and layer in (None, row.layer)
        }


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def trusted_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine reads the state of delayed scaling, which is pickled, only where this variable permits it."""
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")


@pytest.fixture
def fresh_accelerate_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def any_gpu() -> Iterator[None]:
    from tests.capability import any_capability

    with any_capability():
        yield


def global_state() -> dict[str, Any]:
    """All that a session may change in the process and must put back, as plain comparable values."""
    import nvdlfw_inspect.api as debug_api
    import nvdlfw_inspect.logging as inspect_logging
    from nvdlfw_inspect.config_manager import ConfigManager
    from nvdlfw_inspect.logging import MetricLogger
    from nvdlfw_inspect.registry import Registry
    from nvdlfw_inspect.utils import APICacheIdentifier, SingleMessageLogger
    from transformer_engine.debug.features.utils.stats_buffer import STATS_BUFFERS
    from transformer_engine.debug.pytorch import debug_quantization
    from transformer_engine.debug.pytorch.debug_state import TEDebugState
    from transformer_engine.pytorch import cpu_offload
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    return {
        "manager": debug_api.DEBUG_MANAGER,
        "inspect logger": inspect_logging.LOGGER,
        "metric loggers": list(MetricLogger.enabled_loggers),
        "messages": set(SingleMessageLogger.logged_messages),
        "call details": APICacheIdentifier.__dict__.get("_call_details"),
        "registry": {name: (sorted(value.features), value.deferred_features) for name, value in Registry.data.items()},
        "configs": list(ConfigManager.configs),
        "layer configs": dict(ConfigManager.layer_name_to_config_cache),
        "te state": (TEDebugState.debug_enabled, TEDebugState.weight_tensor_tp_group_reduce),
        "te layers": dict(TEDebugState.layers_initialized),
        "buffers": (dict(STATS_BUFFERS.buffers), "log_stats" in vars(STATS_BUFFERS)),
        "seams": (
            TransformerEngineBaseModule.is_debug_iter,
            TransformerEngineBaseModule.no_debug_features_active,
            debug_quantization.DebugQuantizer,
            cpu_offload.TEDebugState,
        ),
        "loggers": {
            name: (list(item.handlers), item.level, item.propagate)
            for name in ("nvdlfw_inspect", "Default Statistics", "te_precision_callbacks")
            for item in [logging.getLogger(name)]
        },
        "open files": sorted(target for target in map(_target, _descriptors()) if "nvdlfw" in target),
        "environment": {key: os.environ[key] for key in os.environ if key.startswith("NVDLFW")},
    }


def module_state(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The debug attributes of each module of a model."""
    names = ("name", "next_iter_when_debug_should_be_run", "debug_last_iteration", "debug_enabled_in_this_iteration")
    return {
        path: {name: module.__dict__[name] for name in names if name in module.__dict__}
        for path, module in model.named_modules()
    }


def _descriptors() -> list[str]:
    return os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Each test begins with the same random numbers, and leaves the process as it was."""
    import torch

    torch.manual_seed(0)
    # The first import of these is not a change that a session makes.
    import transformer_engine.debug.features.api  # noqa: F401
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    before = global_state()
    yield
    after = global_state()
    # Building TE modules sets the flag by itself, session or not.
    before["te state"] = after["te state"] if after["te state"][0] in (None, False) else before["te state"]
    assert after == before
    # Delayed scaling updates the amax histories of all layers that there have ever been in the process.
    FP8GlobalStateManager.reset()
    # A checkpoint leaves its kind here, and LayerNormMLP fuses GELU and rounds otherwise after one of the other kind.
    distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = True
    collections.leave_out()


@pytest.fixture(params=["one thread", "two threads"])
def backward_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """The backward runs in the thread of the forward, and in another one, as on a GPU."""
    from tests.backward_thread import in_a_second_thread

    with in_a_second_thread() if request.param == "two threads" else nullcontext():
        yield


@pytest.fixture
def second_thread() -> Iterator[None]:
    """The backward runs in another thread than the forward, as on a GPU."""
    from tests.backward_thread import in_a_second_thread

    with in_a_second_thread():
        yield


def warnings_of(caplog: pytest.LogCaptureFixture, text: str = "") -> list[str]:
    """The warnings and errors that have been logged, with this text."""
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in logged if text in message]


def statistics(*, tensors: list[str] | None = None, layers: list[str] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "stats": {
            "enabled": True,
            "layers": {"layer_types": layers or ["all"]},
            "transformer_engine": {
                "LogTensorStats": {
                    "enabled": True,
                    "tensors": tensors or ["activation"],
                    "stats": ["max", "l1_norm"],
                    "freq": 1,
                    **options,
                }
            },
        }
    }


def feature(name: str, layers: list[str], **options: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "layers": {"layer_types": layers},
        "transformer_engine": {name: {"enabled": True, **options}},
    }
