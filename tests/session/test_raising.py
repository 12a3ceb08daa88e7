"""What a step raises in the training: what somebody has asked for, and nothing else of all that the package raises."""

import copy
import functools
import importlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te

import te_precision_callbacks
from te_precision_callbacks.base.errors import (
    MissingExtraError,
    ObservationError,
    PrecisionDebugError,
    TransformerEngineUnavailableError,
)
from te_precision_callbacks.base.ranks.messages import Departure, RanksLostError
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.instrumentation import failures
from te_precision_callbacks.overflow import AbortAfterBatch, ActivationOverflowError, DetectionFailedError
from te_precision_callbacks.runs.recorded import SeveralRunsError
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session.endings import ClosingReport
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.session.run import Run
from tests.conftest import Keeper, statistics
from tests.training import observed

ASKED_FOR = {
    "ObservationError": "strict=True",
    "ResumeAuditError": "strict=True",
    "PrecisionContractError": 'require=, with on_broken="raise"',
    "PrecisionFindingError": 'on_finding="stop"',
    "ActivationOverflowError": 'debug="activation_overflow"',
    "DetectionFailedError": 'debug="activation_overflow"',
    "AbortAfterBatch": "abort_after_batch= of a detector",
}

# Raised, where something is wrong, before a step or outside of it.
BEFORE = {
    "OptionError": "a keyword, when the session is made",
    "UnknownDebugOptionError": "a keyword, when the session is made",
    "OverflowOptionError": "a keyword, when a detector is made",
    "OverflowDetectorError": "when a detector is made",
    "ConfigError": "when the session is made, and in attach()",
    "UnknownStatisticError": "when the session is made",
    "SessionError": "a call in the wrong order, before anything of it runs",
    "FeatureLoadError": "in start()",
    "TransformerEngineUnavailableError": "in start()",
    "Terminated": "given to stop(), never raised",
    "FingerprintError": "in load_state_dict()",
    "DataParallelError": "of the Trainer, before the training",
    "MissingExtraError": "at an import",
    "ReferenceBackendError": "the operators of the reference backend, in forward and backward",
    "InstallError": "when the reference backend is installed",
    "TransformerEngineVersionError": "when the reference backend is installed",
    "MissingFunctionError": "of the reference backend, in forward and backward",
    "UnsupportedRecipeError": "of the reference backend, in forward and backward",
}

# Failures in observation.
INSIDE = {
    "FactorError": "an operand of a GEMM that cannot be read, which is then not measured",
    "FeatureError": "a feature of a user; in a call that changes precision it ends the forward",
    "RanksLostError": "the ranks are apart",
    "ReductionError": "statistics could not be reduced",
    "RanksDifferError": "ranks are in different steps",
    "ProcessEnded": "the process ends before the session was stopped",
    "QuantizationError": "a statistic that a layer cannot have",
    "LayoutError": "a quantized tensor that cannot be decoded",
    "UnknownMemoryError": "a layer whose bytes are unknown; a plan lists it",
    "LogFileError": "a log that cannot be written",
    "RecordingError": "a run that cannot be recorded",
    "DumpError": "a tensor that cannot be dumped",
    "ReportingError": "the Trainer's logs",
}

# Of commands and functions that read what a run has left, or look at a config.
READERS = {
    "KnownFindingsError",
    "BatchError",
    "CalibrationError",
    "CommandError",
    "ComparisonError",
    "ConversionError",
    "DeviceError",
    "DifferentShapesError",
    "IterationError",
    "ModelFactoryError",
    "NotADumpError",
    "NotARunError",
    "NotOnMetaError",
    "NothingToCompareError",
    "NothingToShowError",
    "RecipeError",
    "ReportError",
    "RunError",
    "SeveralRunsError",
    "SpeedError",
    "TraceError",
    "UnknownFeatureError",
    "UnknownSubjectError",
}


@functools.cache
def declared() -> dict[str, str]:
    """All exceptions of the package, name -> module: read, since importing all of it takes long."""
    package = Path(te_precision_callbacks.__file__).parent
    bases: dict[str, list[str]] = {}
    modules: dict[str, str] = {}
    for path in package.rglob("*.py"):
        for name, named in re.findall(r"^class (\w+)\(([\w, ]*)\):", path.read_text(), re.MULTILINE):
            bases[name] = named.split(", ")
            modules[name] = ".".join(path.relative_to(package.parent).with_suffix("").parts)

    def is_one(name: str) -> bool:
        return name == PrecisionDebugError.__name__ or any(is_one(base) for base in bases.get(name, ()))

    return {name: modules[name] for name in bases if is_one(name) and name != PrecisionDebugError.__name__}


@pytest.fixture(scope="module")
def kinds() -> dict[str, type[PrecisionDebugError]]:
    """All exceptions of the package, by name, but those of a front door that takes long to import."""
    return {
        name: getattr(importlib.import_module(module), name)
        for name, module in declared().items()
        if ".transformers." not in module
    }


def one(kind: type[PrecisionDebugError]) -> PrecisionDebugError:
    special: dict[type[PrecisionDebugError], Callable[[], PrecisionDebugError]] = {
        AbortAfterBatch: lambda: AbortAfterBatch(3),
        DetectionFailedError: lambda: DetectionFailedError("no room", rank=0),
        ActivationOverflowError: lambda: ActivationOverflowError(
            "inf", path="0", class_name="Linear", role="output", batch=0, evaluation=False, rank=0, report=""
        ),
        MissingExtraError: lambda: MissingExtraError("a.module", "extra"),
        RanksLostError: lambda: RanksLostError(Departure(0, "no room")),
        SeveralRunsError: lambda: SeveralRunsError("no room", ()),
        TransformerEngineUnavailableError: lambda: TransformerEngineUnavailableError(ImportError("no room")),
    }
    return special[kind]() if kind in special else kind("no room")


def test_each_exception_is_known_here(kinds: dict[str, type[PrecisionDebugError]]) -> None:
    assert sorted([*ASKED_FOR, *BEFORE, *INSIDE, *READERS]) == sorted(declared())
    assert {kinds[name] for name in ASKED_FOR} == set(failures.ASKED_FOR)
    assert {name for name, kind in kinds.items() if issubclass(kind, failures.ASKED_FOR)} == set(ASKED_FOR)


def test_exceptions_survive_copies_and_pickle(kinds: dict[str, type[PrecisionDebugError]]) -> None:
    """A worker process sends its exception to the one that waits for it."""
    for kind in kinds.values():
        error = one(kind)
        error.add_note("on node 3")
        for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(copied), str(copied), vars(copied)) == (kind, str(error), vars(error))


@pytest.mark.parametrize(
    ("owner", "method"),
    [(ObservedModel, "note_order"), (Ranks, "look")],
    ids=["in the step", "after it"],
)
def test_a_step_raises_what_was_asked_for_and_nothing_else(
    tmp_path: Path,
    keeper: Keeper,
    kinds: dict[str, type[PrecisionDebugError]],
    caplog: pytest.LogCaptureFixture,
    owner: type,
    method: str,
) -> None:
    net = te.Linear(16, 16)
    counted = 0
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper], records="off") as session:
        for number, (name, kind) in enumerate(sorted(kinds.items())):
            net(torch.ones(16, 16)).sum().backward()
            with mock.patch.object(owner, method, side_effect=one(kind)):
                if name in ASKED_FOR:
                    with pytest.raises(kind):
                        session.step()
                    session.iteration = number + 1
                else:
                    session.step()
                    counted += name != "QuantizationError"
            assert session.iteration == number + 1, f"the step counts: {name}"
    assert f"Precision debugging failed {counted} times on rank 0" in caplog.text
    others = {number for number, name in enumerate(sorted(kinds)) if name not in ASKED_FOR}
    assert others <= set(keeper.iterations), "no number is lost"


def test_a_strict_session_raises_its_own_exception(tmp_path: Path, kinds: dict[str, type[PrecisionDebugError]]) -> None:
    for name in ("RanksLostError", "ConfigError", "RunError"):
        with mock.patch.object(ObservedModel, "note_order", side_effect=one(kinds[name])):
            with pytest.raises(ObservationError, match=name):
                observed(tmp_path, statistics(), steps=1, records="off", strict=True)


def test_an_exception_without_a_text_is_reported_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise AttributeError("a slip")

    with mock.patch.object(ObservedModel, "note_order", side_effect=Broken()):
        observed(tmp_path, statistics(), steps=1, records="off")
    assert "Precision debugging failed on rank 0: ending iteration 0: Broken (without a message)." in caplog.text


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("owner", "part"),
    [
        *((Run, part) for part in ("_hand_over", "_send_end", "_warn_never_due", "_close_sinks", "_put_back")),
        (Run, "_close_dumps"),
        *((ClosingReport, part) for part in ("log_coverage", "write_page", "print_verdict")),
    ],
)
def test_stop_raises_no_failure_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, owner: type, part: str, strict: bool
) -> None:
    called = getattr(owner, part)

    def fails(*arguments: Any, **keywords: Any) -> None:
        called(*arguments, **keywords)
        raise MemoryError("no room")

    with mock.patch.object(owner, part, fails):
        session = observed(tmp_path, statistics(), steps=1, records="off", strict=strict)
    assert not session.running
    assert "MemoryError: no room" in caplog.text
