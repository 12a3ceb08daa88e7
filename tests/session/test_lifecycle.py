"""Start and stop: sessions in turn, a process that is left as it was, and host memory that stays flat."""

import gc
import logging
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import nvdlfw_inspect.api as debug_api
import nvdlfw_inspect.logging as inspect_logging
import pytest
import torch
import transformer_engine.pytorch as te
from nvdlfw_inspect.registry import Registry
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.instrumentation.upstream import isolate_upstream
from te_precision_callbacks.overflow import ActivationOverflowError
from te_precision_callbacks.session import FeatureLoadError, InspectSession, SessionError, running_session
from te_precision_callbacks.sinks.writer_thread import WriterThread
from tests.conftest import Keeper, feature, module_state, statistics
from tests.forked import executable
from tests.training import observed, train


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 32, name="first"), te.LayerNormMLP(32, 64))


def train_step(net: torch.nn.Module) -> None:
    with te.autocast():
        out = net(torch.randn(16, 32))
    out.sum().backward()


def run(net: torch.nn.Module, config: Any, steps: int, log_dir: Path, **keywords: Any) -> Keeper:
    keeper = Keeper()
    observed(log_dir, config, net=net, steps=steps, recipe=DelayedScaling(), sinks=[keeper], **keywords)
    return keeper


def test_modules_built_during_the_session_are_observed_once_attached(tmp_path: Path, keeper: Keeper) -> None:
    early = model()
    with InspectSession(statistics(), model=early, log_dir=tmp_path, sinks=[keeper]) as session:
        late = model()
        session.attach(late)
        for net in (late, early):
            train_step(net)
            session.step()
    assert keeper.iterations == [0]


@pytest.mark.parametrize("error", [None, ValueError("in the step"), KeyboardInterrupt()], ids=repr)
def test_a_session_puts_everything_back(tmp_path: Path, keeper: Keeper, error: BaseException | None) -> None:
    """Also in modules that were built before it, one of them registered in its own child; they are observed. Fixture
    ``nothing_left_behind`` checks the rest."""
    net = model()
    net[0].parent = net
    train_step(net)
    modules = module_state(net)
    with nullcontext() if error is None else pytest.raises(type(error)):
        with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
            train_step(net)
            session.step(40)
            train_step(net)
            if error is not None:
                raise error
    assert module_state(net) == modules
    assert net[0].name == "first"
    assert keeper.closed == [error]
    steps = [(records.iteration, records.logging_step) for records in keeper.steps]
    assert steps == [(0, 40), (1, 41)], "what was gathered for the step that failed is written, under the next number"
    assert {row.layer for row in keeper.steps[0]} == {"0", "1.fc1", "1.fc2"}


@pytest.mark.parametrize(
    "section",
    [
        feature("LogTensorStats", ["nothing like it"], tensors=["activation"], stats=["max"]),
        feature("LogTensorStatistics", ["all"]),
    ],
)
def test_a_session_that_cannot_start_puts_everything_back(tmp_path: Path, section: dict[str, Any]) -> None:
    net = model()
    modules = module_state(net)
    with pytest.raises(ValueError, match="config mapping"):
        InspectSession({"s": section}, model=net, log_dir=tmp_path).start()
    assert module_state(net) == modules


def test_logs_of_an_earlier_session_are_appended_to(tmp_path: Path) -> None:
    for iteration in range(3):
        run(model(), statistics(), 1, tmp_path, start_step=iteration)
    for folder in ("nvdlfw_inspect_statistics_logs", "nvdlfw_inspect_logs"):
        (path,) = (tmp_path / folder).iterdir()
        parts = path.read_text().split(f"Here another run begins, of process {os.getpid()}.\n")
        assert len({len(part.splitlines()) for part in parts[:-1]}) == 1
        assert len(parts) == 3
        if "statistics" in folder:
            assert [f"iteration=00000{i}" in part for i, part in enumerate(parts)] == [True] * 3


def test_another_transformer_engine_is_refused_by_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(
        "transformer_engine.debug.pytorch.debug_quantization.DebugQuantizer.get_plans_for_output_tensors"
    )
    with pytest.raises(SessionError, match="no get_plans_for_output_tensors in DebugQuantizer"):
        InspectSession(statistics(), model=model(), log_dir=tmp_path).start()


def test_two_sessions_at_once_are_refused(tmp_path: Path) -> None:
    """The first one is unharmed, though nothing refers to it any more; stop() may come twice, or without start()."""
    net = model()

    def start() -> None:
        InspectSession(statistics(), model=net, log_dir=tmp_path / "1").start()

    start()
    session = InspectSession(statistics(), model=net, log_dir=tmp_path / "2")
    session.stop()
    with pytest.raises(SessionError, match=rf"Another session is running, started at {__file__}:\d+") as raised:
        session.start()
    assert "running_session().stop()" in str(raised.value)
    first: Any = running_session()
    with pytest.raises(SessionError, match="already running"):
        first.start()
    train(first, net, 1)
    assert first.last_statistics
    for _ in range(2):
        first.stop()
    assert running_session() is None


def test_a_session_beside_a_users_own_initialize_is_refused(tmp_path: Path) -> None:
    """``end_debug`` leaves its handlers behind: a later session writes nothing into them, and puts them back."""
    isolated = isolate_upstream()
    base = {"enabled": True, "layers": {"layer_types": ["x"]}, "LogTensorStats": {"enabled": True}}
    debug_api.initialize({"s": base}, log_dir=str(tmp_path / "theirs"), default_logging_enabled=True)
    try:
        with pytest.raises(SessionError, match="end_debug"):
            InspectSession(statistics(), log_dir=tmp_path).start()
        assert debug_api.DEBUG_MANAGER is not None
        debug_api.end_debug()
        theirs = {path: path.read_text() for path in (tmp_path / "theirs").rglob("*.log")}
        left = list(logging.getLogger("nvdlfw_inspect").handlers)
        run(model(), statistics(), 2, tmp_path / "ours")
        assert {path: path.read_text() for path in theirs} == theirs
        assert logging.getLogger("nvdlfw_inspect").handlers == left != []
    finally:
        isolated.close()


def test_calls_out_of_order_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = InspectSession(statistics(), log_dir=tmp_path)
    for call in (session.step, lambda: session.attach(model()), lambda: setattr(session, "iteration", 3)):
        with pytest.raises(SessionError, match="not running"):
            call()
    with session:
        train_step(model())
    assert "ended without a model, so nothing was observed" in caplog.text


def test_scalars_that_cannot_be_recorded_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = InspectSession(statistics(), model=model(), log_dir=tmp_path)
    session.log({"loss": 1.0})
    with session:
        for _ in range(2):
            session.log({"loss": "abc", "norms": torch.ones(2), "lr": 1e-3})
        with pytest.raises(OptionError, match="takes a mapping of names to numbers"):
            session.log(3)  # type: ignore[arg-type]
    session.log({"loss": 1.0})
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("log()")]
    assert ["not running" in text for text in told] == [True, False, False]
    assert "'loss' must be a number or a one-element tensor, not 'abc'" in told[1]
    assert "'norms' must be a number or a one-element tensor, not a tensor of shape (2,)" in told[2]


@pytest.mark.parametrize("step", [-1, True], ids=repr)
def test_what_is_no_step_or_no_state_is_refused_where_it_is_given(step: Any, tmp_path: Path) -> None:
    net = model()
    with InspectSession(statistics(), model=net, log_dir=tmp_path) as session:
        train_step(net)
        for give in (
            lambda: session.step(step),
            lambda: session.log({"loss": 1.0}, step),
            lambda: session.load_state_dict({"iteration": step}),
            lambda: setattr(session, "iteration", step),
        ):
            with pytest.raises(OptionError, match=f"must be a whole number >= 0, not {step!r}"):
                give()
        session.step(np.int64(7))
        for ask in (session.precision, session.coverage):
            with pytest.raises(LookupError, match="this session did not observe"):
                ask(at=step)
        assert session.precision(at=np.int64(0)) == session.precision(at=0)
        for state in (5, {"a": 1}, {"model": {}, "session": {"iteration": 4}}):
            with pytest.raises(SessionError, match=r"takes a result of state_dict\(\), not (5|keys '(a|model)')"):
                session.load_state_dict(state)
        session.load_state_dict({})
    assert session.iteration == 1


def test_a_feature_file_that_fails_is_named_and_does_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(FeatureLoadError, match="a_module_that_is_not_there"):
        InspectSession(statistics(), model=model(), log_dir=tmp_path / "log", feature_dirs=tmp_path).start()


FEATURE_CLASS = """
from te_precision_callbacks import reference
reference.install()
import sys, torch, transformer_engine.pytorch as te
from nvdlfw_inspect.registry import api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper
from te_precision_callbacks import InspectSession

class Watcher(TEConfigAPIMapper):
    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True, iteration + 1
    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tensor, **_):
        print("saw", layer_name, iteration)

config = {"mine": {"enabled": True, "layers": {"layer_types": ["all"]},
    "transformer_engine": {"Watcher": {"enabled": True, "tensors": ["activation"]}}}}
for _ in range(2):
    net = te.Linear(32, 32)
    with InspectSession(config, model=net, features=[Watcher], log_dir=sys.argv[1]) as session:
        net(torch.ones(16, 32)).sum().backward()
        session.step()
"""


@pytest.mark.processes
def test_a_users_feature_class_works_in_a_fresh_process(tmp_path: Path) -> None:
    """After importing its base class, which registers Transformer Engine's API, and before anything has a logger."""
    command = [executable(whole=True), "-c", FEATURE_CLASS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split("\n")[:2] == ["saw linear 0", "saw linear 0"], result.stderr


FIRST_STEPS = """
import sys
from te_precision_callbacks import InspectSession, reference
reference.install_where_needed()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

net = te.Linear(32, 32)
with InspectSession(model=net, log_dir=sys.argv[1]) as session:
    for _ in range(2):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            net(torch.ones(32, 32)).sum().backward()
        session.step()
print([name for name in ("pandas", "setuptools", "torch._inductor.codecache") if name in sys.modules])
"""


@pytest.mark.processes
@pytest.mark.extended
def test_the_first_steps_import_nothing_large_that_they_do_not_need(tmp_path: Path) -> None:
    """pyarrow's conversions import pandas, and torch's cache of C++ most of its compiler: a second together."""
    command = [sys.executable, "-W", "ignore", "-c", FIRST_STEPS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stdout + result.stderr
    assert list(tmp_path.glob("precision_records/*/*/*/values-*"))


def test_a_session_does_not_keep_the_model_alive(tmp_path: Path) -> None:
    net = model()
    with InspectSession(statistics(), log_dir=tmp_path) as session:
        session.attach(net)
        train_step(net)
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None
    assert session.layers
    assert session.precision


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_a_compiled_model(tmp_path: Path, keeper: Keeper) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), torch.nn.Linear(32, 32))
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(16, 32)
    with InspectSession(statistics(), model=compiled, log_dir=tmp_path, sinks=[keeper]) as session:
        train(session, compiled, 2, x=x)
    assert torch.equal(compiled(x), net(x))
    assert keeper.values("max", "0") == {0: x.max().item(), 1: x.max().item()}


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_a_compiled_model_with_graph_breaks_keeps_its_graphs(tmp_path: Path, wraps: bool) -> None:
    """Other graphs would round differently."""

    def graphs(*, observed: bool) -> list[list[str]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        result: list[list[str]] = []

        def note(graph: torch.fx.GraphModule, _: Any) -> Any:
            result.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        parts = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), te.Linear(32, 32)) for _ in range(9)]
        net = torch.nn.Sequential(torch.nn.Embedding(8, 32), *parts, torch.nn.Linear(32, 32))
        compiled = torch.compile(net, backend=note)
        with InspectSession(model=compiled if wraps else net, log_dir=tmp_path) if observed else nullcontext():
            for _ in range(2):
                compiled(torch.arange(8)).sum().backward()
        return result

    assert graphs(observed=True) == graphs(observed=False)


def test_several_models_are_named_by_their_keys(tmp_path: Path, keeper: Keeper) -> None:
    models = {"gen": torch.nn.Sequential(te.Linear(32, 32)), "disc": torch.nn.Sequential(te.Linear(32, 32))}
    keywords: dict[str, Any] = {"debug": "activation_overflow", "sinks": [keeper]}
    with InspectSession(statistics(layers=["gen"]), model=models, log_dir=tmp_path, **keywords) as session:
        assert [layer.name for layer in session.layers] == ["gen.0", "disc.0"]
        train(session, models["gen"], 1)
        models["disc"][0].weight.data.fill_(float("inf"))
        with pytest.raises(ActivationOverflowError, match=r"disc\.0"):
            models["disc"](torch.ones(16, 32))
            session.step()
    assert {row.layer for row in keeper.steps[0]} == {"gen.0"}


@pytest.mark.parametrize("given", [{"gen": "no module"}, {1: torch.nn.Linear(2, 2)}, "model", [1]])
def test_what_is_no_model_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(OptionError, match=r"model= must be .* list or mapping"):
        InspectSession(statistics(), model=given, log_dir=tmp_path)
    with InspectSession(statistics(), log_dir=tmp_path) as session:
        with pytest.raises(SessionError, match="list or mapping"):
            session.attach(given)


def test_a_script_that_changes_its_directory_keeps_its_files_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    net = model()
    with InspectSession(statistics(), model=net, log_dir=Path("run")) as session:
        train(session, net, 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert session.log_dir == tmp_path / "run"
    assert list((tmp_path / "run" / "nvdlfw_inspect_statistics_logs").iterdir())
    assert (tmp_path / "run" / "precision_records").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


SIZE = 16
EVERY = 5

CONFIG: dict[str, Any] = {
    **statistics(layers=["0"], tensors=["activation", "gradient", "weight"]),
    "fp8": feature("LogFp8TensorStats", ["1"], tensors=["activation"], stats=["underflows%"]),
    "fake": feature("FakeQuant", ["2"], gemms=["fprop"], tensors=["activation", "weight"], quant_format="FP8E4M3"),
    "scaling": feature("PerTensorScaling", ["3"], gemms=["fprop"], tensors=["activation", "weight"]),
    "disabled": feature("DisableQuantizationGEMM", ["4"], gemms=["dgrad"]),
}


def sizes() -> tuple[int, int]:
    """Blocks of memory that Python has allocated, and entries and bytes of nvidia-dlfw-inspect's caches."""
    gc.collect()
    caches = [data.api._api_cache for data in Registry.data.values()]
    caches += [inspect_logging.LOGGER.logged_api_executed, inspect_logging.LOGGER.logged_api_encountered]
    in_caches = sum(sys.getsizeof(cache) + sum(sys.getsizeof(key) for key in cache) for cache in caches)
    return sys.getallocatedblocks(), in_caches


def growth(
    session: InspectSession, net: torch.nn.Module, settle: Callable[[], None], first: int, window: int
) -> tuple[int, int]:
    """By how many blocks Python's memory, and by how many bytes the caches grow in a window of steps.

    Python's memory goes up and down by some 50 blocks: of each window the least counts. Objects made once, such as a
    module that another thread imports, take more: the lesser of two growths counts.
    """
    x = torch.randn(SIZE, SIZE)
    windows: list[list[tuple[int, int]]] = [[], [], []]
    gc.collect()
    gc.freeze()  # a collection goes through new objects, not through the objects of all tests before
    try:
        for count in range(first + 3 * window):
            train(session, net, 1, x=x, recipe=DelayedScaling())
            net.zero_grad()
            if count >= first and count % EVERY == 0:
                settle()
                windows[(count - first) // window].append(sizes())
    finally:
        gc.unfreeze()
    least = [tuple(map(min, zip(*readings, strict=True))) for readings in windows]
    blocks, caches = (min(later - before for before, later in pairwise(column)) for column in zip(*least, strict=True))
    return blocks, caches


@pytest.mark.slow
@pytest.mark.extended
def test_memory_stays_flat(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*(te.Linear(SIZE, SIZE) for _ in range(5)))
    with InspectSession(CONFIG, model=net, log_dir=tmp_path) as session:
        session.step()
        writers: list[WriterThread] = [item for item in gc.get_objects() if issubclass(type(item), WriterThread)]

        def settle() -> None:
            """A step waits in memory until the threads have written it: on a machine that is busy, for long.

            A thread starts with its first job: the statistics log's after the first collected step.
            """
            running = [writer for writer in writers if writer._thread is not None and writer._thread.is_alive()]
            assert any(writer._what == "statistics log" for writer in running)
            for wait in [writer.flush_soon() for writer in running]:
                assert wait(math.inf)

        blocks, caches = growth(session, net, settle, first=30, window=40)
    assert blocks < 160, "four in a step; without a leak some 30 come and go"
    assert caches < 14_000
