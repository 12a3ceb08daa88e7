"""``profile=``: the ranges and the trace of a session."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner

from examples.byte_lm import ByteLanguageModel
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.cli import app
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.instrumentation.profiler import StepProfiler, export, profiler_runs
from te_precision_callbacks.options import ProfileChoice, SessionOptions, read_profile
from te_precision_callbacks.runs import list_runs, traces_of
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session import profiling as profiling_module
from te_precision_callbacks.speed.trace import measure, read_trace, show

QUIET: dict[str, Any] = {"quiet": True, "statistics_log": "off"}


class Checkpointed(ByteLanguageModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            with te.autocast(enabled=True):
                hidden = te.checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)  # type: ignore[no-any-return]


def byte_lm(
    micro_batches: int = 1, *, layers: int = 1, again: bool = False
) -> tuple[torch.nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = (Checkpointed if again else ByteLanguageModel)(layers=layers, hidden=64, heads=2, window=32)
    model.configure_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(micro_batches):
            tokens = torch.randint(256, (4, 33))
            torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def tiny() -> tuple[torch.nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = te.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        with te.autocast(enabled=True):
            model(torch.randn(32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def trained(
    folder: Path, step: Callable[[], None], model: torch.nn.Module, steps: int = 4, **keywords: Any
) -> Coverage:
    with InspectSession(None, model=model, log_dir=folder, **{**QUIET, **keywords}) as session:
        for _ in range(steps):
            step()
            session.step()
    return session.coverage()


def traces(folder: Path) -> list[Path]:
    (run,) = list_runs(folder)
    return traces_of(folder / FOLDER / run)


def only_trace(folder: Path) -> Path:
    (path,) = traces(folder)
    return path


def gemms_of(folder: Path, of_pass: str) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for row in measure(read_trace(only_trace(folder))).products:
        if row.kind == "gemm" and row.gemm and row.of_pass == of_pass:
            counts[row.layer, row.gemm] += round(row.calls)
    return counts


@pytest.mark.parametrize(("micro_batches", "again"), [(2, False), (1, True)], ids=["plain", "checkpointed"])
def test_each_gemm_has_its_layer(micro_batches: int, again: bool, tmp_path: Path) -> None:
    model, step = byte_lm(micro_batches, layers=2, again=again)
    coverage = trained(tmp_path, step, model, 4, profile="3")
    for backward in (False, True):
        counted = Counter({(p.layer, p.gemm): p.calls for p in coverage if p.family == "te" and p.backward == backward})
        assert gemms_of(tmp_path, "backward" if backward else "forward") == counted
        if not backward:
            assert gemms_of(tmp_path, "recompute") == (counted if again else {})


def test_a_profile_is_the_iterations_that_were_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, step = byte_lm()
    trained(tmp_path, step, model, 8, profile="6-7")
    step_ = measure(read_trace(only_trace(tmp_path)))
    assert step_.iterations == (6, 7)
    assert all(row.layer for row in step_.products if row.kind == "gemm")
    of_head = {row.of_pass for row in step_.products if row.layer == "head" and row.kind == "gemm"}
    assert of_head == {"forward", "backward"}
    show(step_)
    assert "layers.0.layernorm_mlp.fc1" in capsys.readouterr().out


class OtherLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.operations = te.ops.Sequential(te.ops.Linear(64, 64), te.ops.GELU(), te.ops.Linear(64, 64))
        self.experts = te.GroupedLinear(2, 64, 64)
        self.late = te.Linear(64, 64, delay_wgrad_compute=True)
        self.compiled = torch.nn.Linear(64, 64)
        self.compiled.compile(backend="eager")
        self.conv = torch.nn.Conv1d(1, 4, 3, padding=1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True):
            rows = self.late(self.experts(self.operations(rows), [32, 32]))
        rows = self.compiled(rows)
        return rows + self.conv(rows.unsqueeze(1)).mean(1)


def test_other_layers_have_their_gemms_too(tmp_path: Path) -> None:
    model = OtherLayers()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    hooked = []

    def step() -> None:
        hooked.append(len(model.compiled._forward_pre_hooks))
        model(torch.randn(64, 64)).square().mean().backward()
        model.late.backward_dw()
        optimizer.step()
        optimizer.zero_grad()

    trained(tmp_path, step, model, 5, profile="3-4")
    gemms = [row for row in measure(read_trace(only_trace(tmp_path))).products if row.kind == "gemm"]
    layers = ("operations.0", "operations.2", "experts", "late")  # one kernel may run all experts
    expected = {("conv", ""), *((layer, gemm) for layer in layers for gemm in GEMMS)}
    assert {(row.layer, row.gemm) for row in gemms if row.layer} == expected
    assert {row.of_pass for row in gemms if row.layer == "conv"} == {"forward", "backward"}
    assert sum(row.calls for row in gemms if not row.layer) == 3, "of compiled"
    assert len({*hooked[1:]}) == 1, "a hook would compile the module again"


@pytest.mark.parametrize(("value", "count"), [("1", 0), ("1, all", 1)])
def test_rank_0_is_profiled_unless_all_are(
    value: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling_module, "own_rank", lambda: 1)
    model, step = tiny()
    trained(tmp_path, step, model, steps=2, profile=value)
    assert len(traces(tmp_path)) == count


def test_nothing_is_there_before_a_profile_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    model, step = byte_lm()
    runs, hooks = [], []
    with InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile=3) as session:
        for _ in range(5):
            runs.append(profiler_runs())
            hooks.append(sum(len(module._forward_pre_hooks) for module in model.modules()))
            step()
            session.step()
    assert runs == [False, False, False, True, False]
    assert hooks[1] == hooks[2] == hooks[4] < hooks[3]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_training_is_the_same_with_a_profile(tmp_path: Path) -> None:
    weights = []
    for number, keywords in enumerate(({}, {"profile": "0-2"})):
        model, step = tiny()
        trained(tmp_path / str(number), step, model, steps=3, **keywords)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("when", ["before", "waiting"])
def test_a_profiler_of_the_users_own_gets_the_ranges(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, step = tiny()
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with (
        own if when == "before" else nullcontext(),
        InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile="1-2") as session,
        caplog.at_level(logging.WARNING),
    ):
        for number in range(4):
            step()
            session.step()
            if number == 0 and when == "waiting":  # while the session's own warms up
                own.start()
    if when != "before":
        own.stop()
    own.export_chrome_trace(str(tmp_path / "own.json"))
    assert caplog.text.count("another profiler of torch") == 1
    assert traces(tmp_path) == []
    assert {row.layer for row in measure(read_trace(tmp_path / "own.json")).products if row.gemm} == {"linear"}


def test_a_trace_that_cannot_be_written_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling_module, "export", no_room)
    model, step = tiny()
    with caplog.at_level(logging.ERROR):
        trained(tmp_path, step, model, steps=3, profile=1)
    assert "writing a profile: OSError" in caplog.text


def test_a_run_that_ends_in_a_profile_writes_what_there_is(tmp_path: Path) -> None:
    model, step = tiny()
    with (
        pytest.raises(RuntimeError, match="of the script"),
        InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile="1-9") as session,
    ):
        for _ in range(2):
            step()
            session.step()
        raise RuntimeError("of the script")
    assert only_trace(tmp_path).name.endswith("iterations-000001-000001.json.gz")
    assert measure(read_trace(only_trace(tmp_path))).iterations == (1,), "without the one that has only begun"


@pytest.mark.parametrize(
    ("profile", "begins", "ran", "said"),
    [
        ("7", 0, [], "asked for iteration 7, of which none ran: the run ended before iter"),
        ("1-9", 0, ["000001-000003"], "asked for iterations 1 to 9, of which 3 ran: the run ended before"),
        ("0-3", 2, ["000002-000003"], "asked for iterations 0 to 3, of which 2 ran: the run began with"),
        ("0", 2, [], "asked for iteration 0, of which none ran: the run began with a later"),
        ("2-3", 0, ["000002-000003"], ""),
    ],
)
def test_iterations_that_the_run_does_not_have(
    profile: str, begins: int, ran: list[str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, step = tiny()
    with InspectSession(None, model=model, log_dir=tmp_path, **QUIET, profile=profile) as session:
        session.iteration = begins
        for _ in range(begins, 4):
            step()
            session.step()
    stated = [record.getMessage() for record in caplog.records if "profile= asked" in record.getMessage()]
    assert len(stated) == bool(said)
    assert said in "".join(stated)
    known = CliRunner().invoke(app, ["speed", str(tmp_path), "--device", "h200", "--json"])
    assert [note for note in json.loads(known.stdout)["notes"] if "profile= asked" in note] == stated
    names = [path.name for path in traces(tmp_path)]
    assert names == [f"seg-000.rank-00000.iterations-{numbers}.json.gz" for numbers in ran]


@pytest.mark.parametrize("when", ["it has warmed up", "it runs", "the other one has warmed up"])
def test_a_profile_that_is_given_up_leaves_the_other_one_whole(when: str, tmp_path: Path) -> None:
    first = StepProfiler()
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    if when == "the other one has warmed up":
        other.prepare_trace()
    assert first.warm_up()
    if when == "it runs":
        assert first.start()
    if when != "the other one has warmed up":
        other.prepare_trace()
    other.start_trace()
    assert first.given_up
    assert not first.start()
    torch.ones(3).add(1)
    assert first.stop() is None
    other.stop_trace()
    export(other, tmp_path / "other.json.gz")
    assert "aten::add" in {event.name for event in read_trace(tmp_path / "other.json.gz").host}


@pytest.fixture(autouse=True)
def _no_profiler_is_left() -> Iterator[None]:
    yield
    assert not profiler_runs()


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, None),
        (10, ProfileChoice(10, 10, False)),
        ("10", ProfileChoice(10, 10, False)),
        ("10-12", ProfileChoice(10, 12, False)),
        ("10 - 12, all", ProfileChoice(10, 12, True)),
        ("7,all", ProfileChoice(7, 7, True)),
    ],
)
def test_what_profile_takes(value: Any, choice: ProfileChoice | None) -> None:
    assert read_profile(value) == choice


@pytest.mark.parametrize("value", [-1, True, 1.5, "", "12-10", "10-", "a", "10, some", [10]])
def test_what_profile_does_not_take(value: Any) -> None:
    with pytest.raises(OptionError, match=r"profile= must be an iteration, such as 11, or a text"):
        SessionOptions.from_keywords(None, profile=value)
