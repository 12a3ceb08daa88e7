"""Scripts that are watched without a change: their models, steps and losses are found, and their numbers stay."""

import copy
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.reference import inherited
from te_precision_callbacks.runs.reading import open_run
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.startup import watch_environment
from te_precision_callbacks.watch import ScriptWatch, read_options
from tests.forked import executable, launched
from tests.reference.processes import run

STEPS = 6
BACKWARDS = 8


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = te.Linear(16, 32), te.Linear(32, 16)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.first(tensor)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    with te.autocast():
        return (model(batch(step)) - batch(step)).pow(2).mean()


def update(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, micro_batches: int = 1) -> list[float]:
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for micro_batch in range(micro_batches):
            loss = loss_of(model, step * micro_batches + micro_batch)
            update(loss, *(optimizers if micro_batch == micro_batches - 1 else ()))
            losses[-1] += loss.item() / micro_batches
        model.eval()
        with torch.no_grad():
            loss_of(model, 99)
        model.train()
    return losses


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@contextmanager
def watched(folder: Path, **options: Any) -> Iterator[ScriptWatch]:
    watch = ScriptWatch({"log_dir": str(folder), **options})
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [dict(of_optimizers) for of_optimizers in hooks]
    watch.begin()
    try:
        yield watch
    finally:
        watch.finish()
        watch.end()
        for of_optimizers, others in zip(hooks, before, strict=True):
            of_optimizers.clear()
            of_optimizers.update(others)


def losses_of(folder: Path) -> list[float]:
    return list(open_run(folder).metrics["loss"].values)


# ---------------------------------------------------------------------- loops


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_model_step_and_loss_are_found(tmp_path: Path, micro_batches: int) -> None:
    plain, model = Model(), Model()
    expected = train(plain, sgd(plain), micro_batches=micro_batches)
    with watched(tmp_path) as watch:
        assert train(model, sgd(model), micro_batches=micro_batches) == expected
        assert watch.session.iteration == STEPS
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert losses_of(tmp_path) == pytest.approx(expected, rel=1e-6)
    run = open_run(tmp_path)
    assert sorted(run.ordered_layers) == ["first", "last"]
    assert run.segments[-1].status == "ended"
    assert {0, 1, 2, 5} <= set(run.steps.column("iteration").to_pylist())


def by_matrices_and_vectors(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    parts = ([value for value in parameters if (value.dim() > 1) == matrix] for matrix in (True, False))
    return [torch.optim.SGD(part, lr=0.01) for part in parts]


@pytest.mark.parametrize("kind", ["two optimizers", "one that never steps", "made after the first forward"])
def test_optimizers_of_a_model_step_it_once(tmp_path: Path, kind: str) -> None:
    model = Model()
    loss_of(model, 0).backward()
    with watched(tmp_path) as watch:
        if kind == "made after the first forward":
            loss_of(model, 0).backward()
        unused = sgd(model) if kind == "one that never steps" else None
        train(model, *(by_matrices_and_vectors(model) if kind == "two optimizers" else [sgd(model)]))
        assert watch.session.iteration == STEPS
        del unused


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model(tmp_path: Path, in_place: bool) -> None:
    class Plain(torch.nn.Sequential):
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:  # Dynamo does not compile the method of torch itself
            return self[1](self[0](tensor))

    model = Plain(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    called = model if in_place else torch.compile(model, backend="eager", fullgraph=True)
    with watched(tmp_path) as watch:
        train(called, sgd(model))  # type: ignore[arg-type]
        assert watch.session.iteration == STEPS


def test_a_generator_and_a_discriminator(tmp_path: Path) -> None:
    generator, critic = Model(), Model()
    of_generator, of_critic = sgd(generator), sgd(critic)
    with watched(tmp_path) as watch:
        for step in range(STEPS):
            with te.autocast():
                loss = critic(generator(batch(step)).detach()).mean() - critic(batch(step)).mean()
            update(loss, of_critic)
            with te.autocast():
                loss = -critic(generator(batch(step))).mean()
            update(loss, of_generator)
            critic.zero_grad()
        assert watch.session.iteration == STEPS
    assert sorted(open_run(tmp_path).ordered_layers) == ["first", "last", "model1.first", "model1.last"]


def test_the_loss_before_a_grad_scaler(tmp_path: Path) -> None:
    model, losses = Model(), []
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with watched(tmp_path) as watch:
        for step in range(STEPS):
            loss = loss_of(model, step)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert watch.session.iteration == STEPS
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-6)


def test_stages_of_a_pipeline_of_torch_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers of several stages may have equal names, whose statistics would be merged."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = PipelineStage(Model(), 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
        with watched(tmp_path / "logs") as watch:
            optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
            for step in range(2):
                schedule.step(batch(step), target=batch(step))
                optimizer.step()
            assert watch.session is None
        assert [record.message.partition(":")[0] for record in caplog.records] == ["--watch stops"]
        assert not (tmp_path / "logs").exists()
    finally:
        dist.destroy_process_group()


RANKS = """
import sys
from collections import OrderedDict
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformer_engine.common.recipe import Float8CurrentScaling
from te_precision_callbacks.watch import ScriptWatch
folder, kind = sys.argv[1:]
ScriptWatch({"log_dir": folder}).begin()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(OrderedDict({f"layer{rank if kind == 'pipeline' else 0}": te.Linear(16, 16)}))
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
counted = []
register_optimizer_step_pre_hook(lambda *_: counted.append(rank))
for step in range(4):
    received = torch.full([16, 16], 1.0 + (kind == "apart") * rank, requires_grad=True)
    if kind == "pipeline" and rank:
        dist.recv(received.detach(), 0)
    with te.autocast(recipe=Float8CurrentScaling()):  # delayed scaling would reduce amax over all ranks
        output = model(received)
    if kind == "pipeline" and not rank:
        dist.send(output.detach(), 1)
        gradient = torch.empty(16, 16)
        dist.recv(gradient, 1)
        output.backward(gradient)
    else:
        output.pow(2).mean().backward()
        if kind == "pipeline":
            dist.send(received.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
assert counted == [rank] * 4
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "steps", "layers"),
    [("pipeline", [1, 2], ["layer0", "layer1"]), ("ddp", [0, 1, 2], ["layer0"]), ("apart", [1, 2], ["layer0"])],
)
def test_ranks_attach_where_none_waits_for_another(
    tmp_path: Path, kind: str, steps: list[int], layers: list[str]
) -> None:
    """In a pipeline, a stage's first forward waits for the one before, which must not wait for it in turn."""
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    for ended in launched(script, [str(tmp_path / "logs"), kind]):
        assert ended.returncode == 0, ended.stderr
    run = open_run(tmp_path / "logs")
    assert run.segments[-1].status == "ended"
    assert sorted(run.ordered_layers) == layers
    values = run.values(run.select(tensor="activation", statistic="max"))
    assert sorted(set(values["iteration"].to_pylist())) == steps
    told = [finding.since for finding in diagnose(run) if finding.rule == "no-reduction"]
    assert told == [0] * (kind == "apart"), "ranks are compared with what they had before the first step"


def test_neither_the_output_of_a_stage_nor_a_penalty_is_a_loss(tmp_path: Path) -> None:
    model = Model()
    optimizer = sgd(model)
    backward = torch.autograd.backward
    with watched(tmp_path):
        for step in range(STEPS):
            with te.autocast():
                output = model(batch(step))
            penalty = output.pow(2).mean()
            torch.autograd.grad(penalty, output, retain_graph=True)
            torch.autograd.backward([output], [torch.ones(32, 16)])
            optimizer.step()
    assert "loss" not in open_run(tmp_path).metrics
    assert torch.autograd.backward is backward


def test_a_schedule_that_rises_again_in_a_function(tmp_path: Path) -> None:
    """The optimizer is gone when the run ends."""

    def run() -> None:
        model = Model()
        optimizer = sgd(model)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * STEPS)
        for step in range(5 * STEPS):
            update(loss_of(model, step), optimizer)
            rates.step()

    with watched(tmp_path):
        run()
        gc.collect()
    (finding,) = (finding for finding in diagnose(tmp_path) if finding.rule == "learning-rate")
    assert finding.since == 3 * STEPS


def test_a_second_training_is_a_run_of_its_own(tmp_path: Path) -> None:
    """It is in evaluation mode, which is checked by itself."""
    with watched(tmp_path):
        model = Model()
        train(model, sgd(model))
        del model
        later = Model().eval()
        optimizer = sgd(later)
        for step in range(BACKWARDS + 5):
            update(loss_of(later, step), optimizer)
    records = sorted((tmp_path / "precision_records").iterdir())
    assert [open_run(record).segments[-1].status for record in records] == ["ended", "ended"]
    assert [len(losses_of(record)) for record in records] == [STEPS, BACKWARDS + 4], "found after its first step"
    assert [[finding.rule for finding in diagnose(record).wrong] for record in records] == [[], ["evaluation-mode"]]


def test_the_run_ends_before_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, running = Model(), []
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda *_: running.append(watch.session is not None)
    )
    with watched(tmp_path) as watch:
        train(model, sgd(model))
        torch.distributed.destroy_process_group(object())  # type: ignore[arg-type]
        torch.distributed.destroy_process_group()
        assert open_run(tmp_path).segments[-1].status == "ended"
    assert running == [True, False]
    assert len(losses_of(tmp_path)) == STEPS


# ---------------------------------------------------------------------- scripts that cannot be watched


@pytest.mark.parametrize("later", [False, True])
def test_a_session_of_the_script_wins(tmp_path: Path, later: bool) -> None:
    """One that starts later replaces the watch."""
    model = Model()
    optimizer = sgd(model)
    with watched(tmp_path / "watch") as watch:
        if later:
            train(model, optimizer)
        with InspectSession(model=model, log_dir=tmp_path / "own") as session:
            update(loss_of(model, 0), optimizer)
            session.step()
        assert watch.session is None
    assert open_run(tmp_path / "own").segments[-1].status == "ended"
    assert (tmp_path / "watch").exists() == later
    assert not later or open_run(tmp_path / "watch").segments[-1].status == "ended"


def test_an_optimizer_that_does_not_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = sgd(model)
    with watched(tmp_path), caplog.at_level(logging.WARNING, "te_precision_callbacks.watch"):
        for step in range(3):
            loss_of(model, step).backward()
    (text,) = caplog.messages
    assert "After 3 backward passes no optimizer of the model stepped" in text
    assert "after the last 3 backward passes" in diagnose(tmp_path).summary
    assert optimizer.param_groups, "it is kept"


@pytest.mark.parametrize(
    ("backwards", "has_optimizer", "words"),
    [
        (-1, False, "After 1 backward pass no model with parameters"),  # of a tensor without a module
        (0, False, "After 0 backward passes no model with parameters"),
        (2, False, "After 2 backward passes no model with parameters"),
        (3 * BACKWARDS, False, f"After {3 * BACKWARDS - 1} backward passes no model with parameters"),
        (2 * BACKWARDS, True, f"After {2 * BACKWARDS} backward passes no optimizer of the model stepped"),
        (3 * BACKWARDS, True, f"After {3 * BACKWARDS - 1} backward passes no optimizer of the model stepped"),
    ],
)
def test_a_warning_without_a_training(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    backwards: int,
    has_optimizer: bool,
    words: str,
) -> None:
    monkeypatch.setattr("te_precision_callbacks.watch.MOST_BACKWARDS", 3 * BACKWARDS - 1)
    model = Model()
    optimizers = [sgd(model)] * has_optimizer
    with watched(tmp_path), caplog.at_level(logging.WARNING, "te_precision_callbacks.watch"):
        if backwards < 0:
            torch.ones(4, requires_grad=True).sum().backward()
        else:
            with torch.no_grad():
                loss_of(model, 0)
        for step in range(backwards):
            loss_of(model, step).backward()
    (text,) = caplog.messages
    assert words in text
    assert len(optimizers) == has_optimizer, "it is kept"


@pytest.mark.parametrize("kind", ["accumulation", "LBFGS"])
def test_many_backwards_in_the_first_step_are_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model = Model()
    with watched(tmp_path), caplog.at_level(logging.WARNING, "te_precision_callbacks.watch"):
        if kind == "accumulation":
            train(model, sgd(model), micro_batches=2 * BACKWARDS)
        else:
            optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=BACKWARDS, tolerance_change=0.0)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
    assert not caplog.messages


def test_a_failure_of_the_watch_does_not_reach_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_precision_callbacks.watch.optimizers_of_process", lambda: 1 / 0)
    model = Model()
    with watched(tmp_path):
        train(model, sgd(model))
    assert [record.message.partition(";")[0] for record in caplog.records] == ["--watch failed and stops"]


def test_an_error_that_the_user_asked_for_ends_the_training(tmp_path: Path) -> None:
    config = {"all": {"enabled": True, "layers": {"layer_types": ["absent"]}, "transformer_engine": {}}}
    model = Model()
    with watched(tmp_path, config=config), pytest.raises(ConfigError, match="matches none of the 2 layers"):
        train(model, sgd(model))


@pytest.mark.parametrize(
    ("settings", "message"), [(["on_finding"], "NAME=VALUE"), (["nonsense=1"], "nonsense"), (["strict=2"], "strict=")]
)
def test_wrong_settings(settings: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_options(None, None, settings)


# ---------------------------------------------------------------------- processes

SCRIPT = """
import sys
from sys import exit
import torch
import transformer_engine.pytorch as te
torch.manual_seed(0)
model = torch.nn.Sequential(te.Linear(16, 32), te.Linear(32, 16)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    with te.autocast():
        loss = model(torch.ones(32, 16).cuda()).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item().hex(), sys.argv[1:], flush=True)
if sys.argv[1] == "exits with 2":
    exit(2)
"""


def call(
    folder: Path, command: list[str], python: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return run([python or executable(), *command], cwd=folder, TE_PRECISION_QUIET="0", **variables)


RUN = ["-m", "te_precision_callbacks", "run"]
WATCH = ["-m", "te_precision_callbacks.watch"]


@pytest.mark.processes
def test_watched_processes_end_as_unwatched_ones(tmp_path: Path) -> None:
    """The variable alone watches nothing; and options of the watch without it are refused."""
    plain = call(tmp_path, [*RUN, "train.py", "ends"], TE_PRECISION_WATCH="1")
    assert plain.returncode == 0, plain.stderr
    assert "te-precision run --watch" in plain.stderr
    assert not (tmp_path / "precision_debug").exists()
    ways: dict[str, tuple[list[str], int, str]] = {
        "ends": ([*RUN, "--watch", "--log-dir", "ends"], 0, "ended"),
        "exits with 2": ([*WATCH, "--set", "log_dir=exits with 2"], 2, "failed"),
    }
    for name, (command, status, outcome) in ways.items():
        result = call(tmp_path, [*command, "train.py", name])
        assert result.returncode == status, result.stderr
        assert (f"stopped: SystemExit: {status}" in result.stderr) == name.startswith("exits")
        assert result.stdout == plain.stdout.replace("ends", name)
        (segment,) = open_run(tmp_path / name).segments
        assert segment.status == outcome
    refused = call(tmp_path, [*RUN, "--log-dir", "logs", "train.py", "ends"])
    assert refused.returncode == 2
    assert "--watch" in refused.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.extended
@pytest.mark.parametrize(
    ("runner", "stopped", "state"),
    [
        (["-m", "te_precision_callbacks.startup"], "SystemExit: 2", "problems found"),
        ([], "the end of the process (exit status not known)", "not enough checked"),
    ],
)
def test_an_exit_status_in_a_python_of_its_own(tmp_path: Path, runner: list[str], stopped: str, state: str) -> None:
    """Without the runner, as in a script that torchrun starts, Python shows it to no hook."""
    variables = inherited.environment(inherited.Inherited(True, (9, 0), always=False))
    variables |= watch_environment({"log_dir": "logs"})
    result = call(tmp_path, [*runner, "train.py", "exits with 2"], sys.executable, **variables)
    assert result.returncode == 2
    assert f"te-precision: stopped: {stopped}" in result.stderr
    assert diagnose(tmp_path / "logs").state == state


@pytest.mark.processes
@pytest.mark.extended
def test_a_process_that_only_imports_torch_is_silent() -> None:
    """At Python's own end, where no module can be imported any more that starts threads."""
    result = run([sys.executable, "-W", "ignore", "-c", "import torch"], **watch_environment({}))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# ---------------------------------------------------------------------- optimizers without the model's parameters


class Plain(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16))


class Convolutional(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(1, 4, 3, padding=1)
        self.linear = te.Linear(64, 16)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.linear(self.convolution(tensor.unsqueeze(1)).flatten(1))


def stale(model: torch.nn.Module) -> torch.optim.Optimizer:
    return sgd(copy.deepcopy(model))


def frozen(model: torch.nn.Module) -> torch.optim.Optimizer:
    last = list(model.children())[-1]
    return sgd(last.requires_grad_(False))


def in_evaluation(model: torch.nn.Module) -> torch.optim.Optimizer:
    return sgd(model.eval())


@pytest.mark.parametrize(
    ("make", "wrong", "rules"),
    [
        (Model, stale, ["frozen-weight"]),
        (Convolutional, frozen, ["missing-gradient"]),
        (Plain, frozen, ["missing-gradient"]),
        (Model, in_evaluation, ["evaluation-mode"]),
        (Plain, in_evaluation, []),
    ],
)
def test_a_model_without_an_optimizer_is_a_run_with_its_finding(
    tmp_path: Path,
    make: Callable[[], torch.nn.Module],
    wrong: Callable[[torch.nn.Module], torch.optim.Optimizer],
    rules: list[str],
) -> None:
    model = make()
    optimizer = wrong(model)
    has_te = make is not Plain
    with watched(tmp_path):
        for step in range(10):
            with te.autocast() if has_te else nullcontext():
                loss = (model(batch(step)) - batch(step)).pow(2).mean()
            update(loss, optimizer)
    verdict = diagnose(open_run(tmp_path))
    assert [finding.rule for finding in verdict.wrong] == rules
    assert "no-low-precision" not in [finding.rule for finding in verdict]
    run = open_run(tmp_path)
    assert run.segments[-1].status == "ended"
    assert len(run.metrics["loss"].values) >= 9


def test_a_teacher_in_evaluation_mode_is_not_the_model(tmp_path: Path) -> None:
    model, teacher = Model(), Model().eval()
    optimizer = sgd(model)
    with watched(tmp_path) as watch:
        for step in range(4):
            update((model(batch(step)) - teacher(batch(step))).square().mean(), optimizer)
        assert watch.session.iteration == 4
    assert len(open_run(tmp_path).ordered_layers) == 2
