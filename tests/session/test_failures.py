"""A failure in observation never ends a run, unless requested: it is reported once. Exceptions of a step."""

import copy
import functools
import importlib
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

import te_precision_callbacks
from te_precision_callbacks.base.errors import (
    MissingExtraError,
    OptionError,
    PrecisionDebugError,
    RaisedInTraining,
    TransformerEngineUnavailableError,
)
from te_precision_callbacks.base.files import AppendedFile
from te_precision_callbacks.base.ranks.messages import Departure, RanksLostError
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.overflow import AbortAfterBatch, ActivationOverflowError, DetectionFailedError
from te_precision_callbacks.runs import open_run, sink
from te_precision_callbacks.runs.recorded import SeveralRunsError
from te_precision_callbacks.session import InspectSession, ObservationError, SessionError, facts
from te_precision_callbacks.session.endings import ClosingReport
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.session.run import Run
from te_precision_callbacks.sinks import StepRecords, statistics_log, writer_thread
from tests.conftest import Keeper, feature, statistics, warnings_of
from tests.reference.processes import python
from tests.training import observed, train, wait_until


class BrokenSink(Keeper):
    def write(self, records: StepRecords) -> None:
        raise OSError("the disk is full")


FILES = ("nvdlfw_inspect_logs", "nvdlfw_inspect_statistics_logs", "precision_records", "tensor_dumps")


DUMPING = statistics() | {"dumps": feature("DumpTensors", ["all"], tensors=["activation"], high_precision_tensor=True)}


@pytest.mark.parametrize("file", FILES)
def test_training_goes_on_where_a_file_cannot_be_written(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    """A file stands where a folder must be: the superuser may write to a folder that is read-only. Each kind of file
    that is lost is reported once, and the others are written."""
    (tmp_path / file).touch()
    observed(tmp_path, DUMPING, sinks=[keeper])
    assert keeper.iterations == [0, 1, 2]
    said = [record.message for record in caplog.records if "failed on rank 0: " in record.message]
    assert sum(f"/{file}" in text for text in said) == 1, said
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} >= set(FILES)


@pytest.mark.parametrize("folder", ["file", "file/run/deeper", "leads nowhere/run/deeper"])
def test_a_log_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path,
    keeper: Keeper,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET", raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "leads nowhere").symlink_to(tmp_path / "gone" / "too")  # it is this that the error names
    log_dir = tmp_path / folder
    with caplog.at_level("INFO"):
        observed(log_dir, DUMPING, sinks=[keeper])
    assert keeper.iterations == [0, 1, 2]
    (said,) = [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert said.startswith(f"log_dir='{log_dir}' cannot be written to: [Errno ")
    assert "writes no records, logs, dumps or report" in said
    assert not any("te-precision report" in record.message for record in caplog.records), "there is no run"
    closing_lines = capfd.readouterr().err
    assert "te-precision: " in closing_lines
    assert f"  logs: none, because {log_dir} cannot be written to\n" in closing_lines


def test_a_strict_run_starts_in_no_folder_in_which_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "nvdlfw_inspect_logs").touch()
    with pytest.raises(SessionError, match=r"log_dir='.*' cannot be written to: .*File exists"):
        InspectSession(statistics(), log_dir=tmp_path, strict=True).start()


@pytest.mark.parametrize("deleted", [True, False])
def test_a_log_folder_that_fails_later_is_reported_once(
    tmp_path: Path,
    keeper: Keeper,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    deleted: bool,
) -> None:
    net, log = te.Linear(32, 32), tmp_path / "run" / "nvdlfw_inspect_statistics_logs"
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    with InspectSession(statistics(), model=net, log_dir=tmp_path / "run", sinks=[keeper], records="off") as session:
        if deleted:
            train(session, net, 1)
            wait_until(log.is_dir)
            shutil.rmtree(log)
        else:
            log.parent.mkdir(exist_ok=True)
            log.touch()
        while session.iteration < 500 and not warnings_of(caplog, "Precision debugging failed on"):
            train(session, net, 1)
    assert keeper.iterations == list(range(session.iteration))
    (said,) = warnings_of(caplog, "Precision debugging failed on")
    assert re.search("writing records to StatisticsLog.*nvdlfw_inspect_statistics_logs", said)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "hangs", ["write", *(pytest.param(name, marks=pytest.mark.extended) for name in ("fsync", "mkdir", "open"))]
)
def test_a_disk_that_hangs_neither_stops_the_training_nor_its_end(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """File operations of the threads do not return; those in the training's thread during a step would show."""
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(writer_thread, "LONGEST_STILL", 0.2)
    monkeypatch.setattr(statistics_log, "MAX_QUEUED", 50)
    monkeypatch.setattr(sink, "MAX_QUEUED", 50)
    well, net = threading.Event(), te.Linear(32, 32)
    before = set(threading.enumerate())

    def hanging(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread().name.startswith("te-precision"):
            well.wait(60)
        else:
            assert not in_step, f"the training's thread has called {hangs}"
        return call(*arguments, **keywords)

    owner = AppendedFile if hangs == "write" else os
    in_step, call = False, getattr(owner, hangs)
    session = InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper], strict=True).start()
    monkeypatch.setattr(owner, hangs, hanging)
    in_step = True
    train(session, net, 100)
    in_step = False
    session.stop()
    well.set()
    assert keeper.iterations == list(range(100))
    assert "The disk does not respond" in caplog.text, "the end has said what is lost"
    wait_until(lambda: not any(one.name.startswith("te-precision") for one in {*threading.enumerate()} - before))


BAD_OPTIONS = [
    ({"log_dirs": "x"}, "Did you mean 'log_dir'"),
    ({"strict": "yes"}, "strict= must be a valid boolean, not 'yes'"),
    ({"start_step": -1}, "start_step="),
    ({"statistics_log": "rank1"}, "statistics_log= must be one of 'rank0', 'all', 'off', .*, not 'rank1'"),
    ({"statistics_log": "off, 4GiB"}, "statistics_log= must be one of .*, not 'off, 4GiB'"),
    ({"statistics_log": True}, "statistics_log= must be one of .*, not True"),
    ({"sinks": [print]}, "start, write and close"),
    ({"feature_dirs": "not/there"}, "not a folder"),
    ({"feature_dirs": 5}, "feature_dirs= must be a list"),
    ({"features": [5]}, "features= takes feature classes"),
    ({"log_dir": 5}, "log_dir= must be a path"),
    ({"prefix": 7}, "prefix= must be a valid string, not 7"),
    ({"process_group": "world"}, "process_group="),
    ({"log_filter": 5}, "log_filter= takes"),
]


def test_bad_options_are_refused() -> None:
    for keywords, message in BAD_OPTIONS:
        with pytest.raises(OptionError, match=message):
            InspectSession(**keywords)


def test_a_later_failure_of_another_kind_is_reported_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def inspect_tensor_enabled(self, *_: Any, iteration: int, **__: Any) -> tuple[bool, int]:
            return True, iteration + 1

        def inspect_tensor(self, *_: Any, **__: Any) -> None:
            raise AttributeError("a slip in the feature")

    config = {"s": feature("Broken", ["linear"], tensors=["activation", "weight"]), **statistics()}
    options: dict[str, Any] = {"features": [Broken], "recipe": DelayedScaling()}
    observed(tmp_path / "a", config, **options, sinks=[BrokenSink()])
    first, also = warnings_of(
        caplog, "Precision debugging failed on"
    )  # the same failure on another tensor is not reported again
    assert re.search(
        "linear activation: FeatureError: The feature Broken failed in inspect_tensor.*a slip in the feature", first
    )
    assert "the disk is full" in also
    assert "Precision debugging failed 7 times" in caplog.text
    with pytest.raises(ObservationError, match=r"linear activation.*failed in inspect_tensor"):
        observed(tmp_path / "b", config, **options, strict=True)


@pytest.mark.processes
def test_a_disk_that_takes_nothing_from_the_start(tmp_path: Path) -> None:
    done = python(
        f"""
        import logging, resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        logging.basicConfig(format="%(message)s")
        from te_precision_callbacks import reference
        reference.install()
        import torch, transformer_engine.pytorch as te
        from te_precision_callbacks.session import InspectSession
        net = te.Linear(32, 32)
        with InspectSession(model=net, log_dir={str(tmp_path)!r}) as session:
            for _ in range(3):
                net(torch.randn(32, 32)).sum().backward()
                session.step()
        print("ended")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ended"
    assert done.stderr.count("nvidia-dlfw-inspect's log") == 1, done.stderr
    assert "--- Logging error ---" not in done.stderr


def test_facts_that_could_not_be_gathered_once_are_gathered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would have no layers, no GEMMs and no end."""
    gathered, attempts = facts.torch_facts, iter(range(100))

    def fails_once() -> object:
        if next(attempts) == 0:
            raise RuntimeError("no answer")
        return gathered()

    monkeypatch.setattr(facts, "torch_facts", fails_once)
    session = observed(tmp_path, statistics())
    (text,) = warnings_of(caplog, "Precision debugging failed on")
    assert "gathering the facts of iteration 0: RuntimeError: no answer" in text
    assert [row["gemm"] for row in open_run(tmp_path).gemms.to_pylist()] == ["fprop", "wgrad", "dgrad"]
    assert session.findings.summary.startswith("Not enough checked: observation: in step 0, gathering the facts of")


IN_TRAINING = {
    "ObservationError": "strict=True",
    "ResumeAuditError": "strict=True",
    "PrecisionContractError": 'require=, whose on_broken is "raise"',
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
    "MapError": "a file of same_as in require=, when the session is made",
    "UnknownStatisticError": "when the session is made",
    "SessionError": "a call in the wrong order, before anything of it runs",
    "FeatureLoadError": "in start()",
    "TransformerEngineUnavailableError": "in start()",
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
    "LogFileError": "a log that cannot be written",
    "RecordingError": "a run that cannot be recorded",
    "DumpError": "a tensor that cannot be dumped",
    "ReportingError": "the Trainer's logs",
}

# Of commands and functions that read a run's files, or check a config.
READERS = {
    "BudgetError",
    "SearchError",
    "KnownFindingsError",
    "CommandError",
    "ComparisonError",
    "IterationError",
    "ModelFactoryError",
    "NotADumpError",
    "NotARunError",
    "NothingToShowError",
    "RecipeError",
    "ReportError",
    "RunError",
    "SeveralRunsError",
    "SpeedError",
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

    bases_alone = (PrecisionDebugError.__name__, RaisedInTraining.__name__)
    return {name: modules[name] for name in bases if is_one(name) and name not in bases_alone}


@pytest.fixture(scope="module")
def kinds() -> dict[str, type[PrecisionDebugError]]:
    """All exceptions of the package, by name, but for an integration that takes long to import."""
    return {
        name: getattr(importlib.import_module(module), name)
        for name, module in declared().items()
        if ".transformers." not in module
    }


def made(kind: type[PrecisionDebugError]) -> PrecisionDebugError:
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
    assert sorted([*IN_TRAINING, *BEFORE, *INSIDE, *READERS]) == sorted(declared())
    assert {name for name, kind in kinds.items() if issubclass(kind, RaisedInTraining)} == set(IN_TRAINING)


def test_exceptions_survive_copies_and_pickle(kinds: dict[str, type[PrecisionDebugError]]) -> None:
    """A worker process sends its exception to the waiting process."""
    for kind in kinds.values():
        error = made(kind)
        error.add_note("on node 3")
        for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(copied), str(copied), vars(copied)) == (kind, str(error), vars(error))


@pytest.mark.parametrize(
    ("owner", "method"),
    [(ObservedModel, "note_step"), pytest.param(Ranks, "reconnect", marks=pytest.mark.extended)],
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
            with mock.patch.object(owner, method, side_effect=made(kind)):
                if name in IN_TRAINING:
                    with pytest.raises(kind):
                        session.step()
                    session.iteration = number + 1
                else:
                    session.step()
                    counted += name != "QuantizationError"
            assert session.iteration == number + 1, f"the step counts: {name}"
    assert f"Precision debugging failed {counted} times on rank 0" in caplog.text
    others = {number for number, name in enumerate(sorted(kinds)) if name not in IN_TRAINING}
    assert others <= set(keeper.iterations), "no number is lost"


class Wordless(Exception):
    def __str__(self) -> str:
        raise AttributeError("a slip")


def test_a_strict_session_raises_its_own_exception(
    tmp_path: Path, kinds: dict[str, type[PrecisionDebugError]], caplog: pytest.LogCaptureFixture
) -> None:
    """And one without a text is reported too."""
    errors = {name: made(kinds[name]) for name in ("RanksLostError", "ConfigError", "RunError")}
    for name, error in {**errors, r"Wordless \(without a message\)": Wordless()}.items():
        with mock.patch.object(ObservedModel, "note_step", side_effect=error):
            with pytest.raises(ObservationError, match=name):
                observed(tmp_path, statistics(), steps=1, records="off", strict=True)


@pytest.mark.parametrize(
    ("owner", "part", "strict"),
    [
        (Run, "_deliver_remainder", True),
        *((Run, part, False) for part in ("_send_end", "_warn_never_due", "_close_sinks", "_put_back", "_close_dumps")),
        (ClosingReport, "log_coverage", True),
        (ClosingReport, "print_verdict", False),
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
