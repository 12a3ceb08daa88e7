"""Coverage from step to step: contracts, loops that change, and steps that ran other products in low precision."""

import json
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.base.vocabulary import recipe_of
from te_precision_callbacks.cli import app
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.coverage import other_steps as module
from te_precision_callbacks.coverage.other_steps import other_steps_of_run
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession, PrecisionContractError, context, running_session
from te_precision_callbacks.speed import device_named, estimate_step
from tests import training
from tests.conftest import feature
from tests.coverage.test_coverage import counted, found
from tests.functions import Net
from tests.instrumentation.steps import stepped
from tests.training import observed

CONFIG = {"watched": feature("LogTensorStats", ["fc"], tensors=["activation"], stats=["max"])}


def two_layers() -> Net:
    """A layer of Transformer Engine's and one of torch's, with as many multiply-adds."""

    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=net.fp8, recipe=Float8CurrentScaling()):
            x = net.fc(x)
        return net.head(x)

    return Net(forward, fc=te.Linear(32, 96), head=torch.nn.Linear(96, 32), fp8=True)


def run(
    tmp_path: Path,
    require: Any,
    *,
    steps: int = 5,
    off: tuple[int, ...] = (),
    skipped: Collection[int] = (),
    config: Any = CONFIG,
    calls_step: bool = True,
    **keywords: Any,
) -> int:
    net = two_layers()
    optimizer = torch.optim.AdamW(net.parameters())
    ended = 0
    with InspectSession(config, model=net, log_dir=tmp_path, require=require, **keywords) as session:
        for step in range(steps):
            net.fp8 = step not in off
            loss = net(torch.ones(16, 32, requires_grad=True)).sum()
            if step not in skipped:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not calls_step:
                continue
            try:
                session.step()
            except PrecisionContractError as error:
                raise PrecisionContractError(f"{step}: {error}") from error
            ended += 1
    return ended


@pytest.mark.parametrize(
    ("require", "skipped"),
    [
        ("fp8 >= 50%", ()),
        ("fp8 wgrad >= 45%", (1, 2)),
        ({"share": ["fp8 wgrad >= 45%", "fp32 < 60%", "fp8 backward > 10%"]}, ()),
        ({"layers": {"fc$": "fp8", "head": "fp32"}, "state": {"optimizer": "float32", "gradient": "float32"}}, ()),
    ],
)
def test_a_satisfied_contract(require: Any, skipped: Collection[int], tmp_path: Path) -> None:
    assert run(tmp_path, require, skipped=skipped) == 5


@pytest.mark.parametrize(("skipped", "checked"), [((1, 2), "2:\n- .* is 50.0 %"), (range(30), "12:\n- .*: no such")])
def test_it_is_checked_on_a_step_with_a_backward(skipped: Collection[int], checked: str, tmp_path: Path) -> None:
    """Batches that the script skips have no backward. A run without any is checked all the same."""
    with pytest.raises(PrecisionContractError, match=f"at step {checked}"):
        run(tmp_path, "fp8 wgrad >= 95%", steps=14, skipped=skipped)


def test_a_broken_share_names_the_share_the_layers_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PrecisionContractError) as caught:
        run(tmp_path, "fp8 >= 95%")
    assert isinstance(caught.value.__cause__, PrecisionContractError)
    assert caught.value.__cause__.coverage.share("fp8") == 0.5
    lines = str(caught.value).splitlines()
    assert lines[0] == "2: The run breaks its precision contract (require=) at step 2:"
    assert lines[1] == "- fp8 is 50.0 %, required: >= 95 %."
    assert lines[3] == (
        "- head fprop, dgrad, wgrad: 50.0 % in FP32 (not a TE layer: torch.nn.Linear). Remedy: replace it"
        " with a Transformer Engine layer, such as te.Linear, if one exists."
    )


@pytest.mark.parametrize(
    ("require", "told"),
    [
        ({"layers": {"fc": "mxfp8"}}, "'fc' must run in mxfp8: fc fprop runs in fp8, and 2 more GEMMs."),
        ({"state": {"optimizer": "bfloat16"}}, "optimizer_state must be bfloat16: some are float32."),
        ({"state": {"main_grad": "float32"}}, "main_grad must be float32: no such tensor was found."),
        ({"state": {"parameter": "bfloat16"}}, "parameter must be bfloat16: some are float32."),
        ({"share": "fp8 qk >= 10%"}, "fp8 qk: no such products ran, required: >= 10 %."),
    ],
)
def test_what_is_broken(require: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(PrecisionContractError) as caught:
        run(tmp_path, require)
    assert f"- {told}" in str(caught.value).splitlines()


@pytest.mark.parametrize("step", [0, 4])
def test_the_step_at_which_it_is_checked(step: int, tmp_path: Path) -> None:
    with pytest.raises(PrecisionContractError, match=rf"^{step}: .* at step {step}"):
        run(tmp_path, {"share": "fp8 >= 95%", "by_step": step + 1})


def events(folder: Path) -> list[tuple[str, str]]:
    rows = open_run(folder).events.to_pylist()
    return [(row["severity"], row["text"]) for row in rows if row["kind"] == "contract_checked"]


def test_a_run_that_ends_before_is_checked_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(PrecisionContractError) as caught:
        run(tmp_path, "fp8 >= 95%", steps=2)
    assert str(caught.value).splitlines()[:2] == [
        "The run breaks its precision contract (require=), checked at the end of the run, after step 1:",
        "- fp8 is 50.0 %, required: >= 95 %.",
    ]
    assert caught.value.coverage.share("fp8") == 0.5
    assert not running_session()
    assert events(tmp_path) == [("warning", str(caught.value))]


def test_a_run_whose_loop_calls_no_step_is_checked_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(
        PrecisionContractError, match=r"checked at the end of the run, without any step\(\):\n.*is 50.0 %"
    ):
        run(tmp_path, "fp8 >= 95%", calls_step=False)


def test_a_check_at_the_end_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = two_layers()
    with (
        pytest.raises(KeyError, match="the loop's own"),
        InspectSession(CONFIG, model=net, log_dir=tmp_path, require="fp8 >= 95%") as session,
    ):
        training.train(session, net, 2, x=torch.ones(16, 32, requires_grad=True))
        raise KeyError("the loop's own")
    assert sum("checked at the end of the run, after step 1" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("how", ["no model", "no training"])
def test_one_that_is_never_checked_says_why(how: str, tmp_path: Path) -> None:
    why = {
        "no model": "the session has no model. Call attach",
        "no training": "the model did not run a training forward and backward",
    }[how]
    net = two_layers()
    session = InspectSession(CONFIG, log_dir=tmp_path, require="fp8 >= 95%")
    with pytest.raises(PrecisionContractError, match=rf"was never checked: {why}"), session:
        if how != "no model":
            session.attach(net)
        if how == "no training":
            with torch.no_grad():
                net(torch.ones(16, 32))
            session.step()


@pytest.mark.parametrize(("freq", "off"), [(1, (3,)), (100, (3, 4))])
def test_a_change_is_checked_again(freq: int, off: tuple[int, ...], tmp_path: Path) -> None:
    """Also the precision of a layer that no feature watches in that step."""
    config = {"kept": feature("LogTensorStats", ["fc"], tensors=["activation"], stats=["max"], freq=freq)}
    with pytest.raises(PrecisionContractError, match=r"^3: .*\n- fp8 is 0 %, required: >= 50 %") as caught:
        run(tmp_path, "fp8 >= 50%", off=off, config=config)
    why = "fc fprop, dgrad, wgrad: 50.0 % in FP32 (runs inside te.autocast(enabled=False)). Remedy: run"
    assert why in str(caught.value)


def test_one_that_only_warns_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path, {"share": "fp8 >= 95%", "on_broken": "warn"}) == 5
    assert sum("breaks its precision contract" in record.getMessage() for record in caplog.records) == 1


def test_each_output_says_first_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    run(tmp_path, {"share": "fp8 >= 95%", "on_broken": "warn"}, steps=3)
    broken = "The run breaks its precision contract (require=) at step 2: fp8 is 50.0 %, required: >= 95 %"
    for first, second in (
        [line.removeprefix("te-precision: ") for line in capsys.readouterr().err.splitlines()[:2]],
        CliRunner().invoke(app, ["diagnose", str(tmp_path)], env={"COLUMNS": "200"}).output.split("\n\n")[:2],
    ):
        assert first.startswith("Problems found: 1 error")
        assert f"error: {broken}" in second


def test_a_pattern_of_no_layer_is_refused_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"no layer matches 'fcc', .* 'fp8'. Did you mean 'fc'"):
        run(tmp_path, {"layers": {"fcc": "fp8"}})
    assert "checked" not in caplog.text


def test_a_pattern_of_norms_alone_is_refused_at_once(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.LayerNormLinear(32, 32), torch.nn.LayerNorm(32), te.RMSNorm(32))
    with (
        pytest.raises(
            ConfigError, match=r"'\^\[12\]\$', .* 'fp32', matches only modules .* such as '1', whose precision"
        ),
        InspectSession(None, model=net, log_dir=tmp_path, require={"layers": {"0": "fp8", "^[12]$": "fp32"}}),
    ):
        pass


def test_without_a_change_nothing_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = context.RunResults.coverage_at
    monkeypatch.setattr(
        context.RunResults, "coverage_at", lambda self, iteration: (asked.append(iteration), own(self, iteration))[1]
    )
    assert run(tmp_path, "fp8 >= 50%", steps=8) == 8
    assert [iteration for iteration in asked if iteration < 7] == [2], "the last one is asked at the end"


pytestmark = pytest.mark.filterwarnings("ignore:Recipe type changed")

CURRENT = Float8CurrentScaling()
ALL_GEMMS = "FP8 in 100 % of the multiply-adds (fprop 100, dgrad 100, wgrad 100)"
ONE_LAYER = "FP8 in 50.0 % of the multiply-adds (fprop 50.0, dgrad 50.0, wgrad 50.0)"


def trained(folder: Path, sections: dict[str, Any], recipes: list[Any]) -> InspectSession:
    return stepped(torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)), folder, recipes, sections)


def other_steps(session: InspectSession) -> list[str]:
    results = session._results
    return list(map(str, module.other_steps(results.coverage.by_span())))


def high(*intervals: list[int]) -> dict[str, Any]:
    return {"s": feature("DisableQuantizationLayer", ["1"], start_end_list=[list(interval) for interval in intervals])}


def test_a_step_that_an_error_ends_halfway_is_no_other_precision(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))

    def fail(gradient: torch.Tensor) -> None:
        if session.iteration == 2:
            raise ValueError("the script's own")

    with (
        pytest.raises(ValueError, match="the script's own"),
        InspectSession(None, model=model, log_dir=tmp_path) as session,
    ):
        while True:
            with te.autocast(enabled=True, recipe=CURRENT):
                hidden = model[0](torch.randn(16, 32, requires_grad=True))
                hidden.register_hook(fail)
                out = model[1](hidden)
            out.sum().backward()
            session.step()
    assert other_steps(session) == other_steps_of_run(open_run(tmp_path)) == []


ONE_LAYER_OF_TE = f"{ONE_LAYER}; 50.0 % in FP32: head (not a TE layer)"


def of_steps(
    session: InspectSession, *, steps: int = 5, skipped: Collection[int] = (), raises: BaseException | None = None
) -> set[str]:
    """Train for some steps, a few without backward; with an error, that in another one after its forward. The
    optimizer steps in all of them, with gradients of 0 where there is no backward. Returns each step's coverage."""
    net = two_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with session:
        session.attach(net)
        for step in range(steps + (raises is not None)):
            out = net(torch.ones(16, 32, requires_grad=True))
            if step == steps and raises:
                raise raises
            if step not in skipped:
                out.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            session.step()
    return {str(session.coverage(at=step)) for step in range(steps)}


@pytest.mark.few
@pytest.mark.parametrize(("sections", "skipped"), [(None, (0, 1, 2)), (None, (2, 3)), (CONFIG, (0,)), (CONFIG, (4,))])
def test_a_batch_that_is_skipped_is_no_other_precision(
    skipped: Collection[int], sections: dict[str, Any] | None, tmp_path: Path
) -> None:
    session = InspectSession(sections, log_dir=tmp_path)
    assert of_steps(session, skipped=skipped) == {ONE_LAYER_OF_TE}
    assert other_steps(session) == other_steps_of_run(open_run(tmp_path)) == []
    last = {entry.gemm: (entry.operands, entry.not_run, entry.until) for entry in session.precision(at=4)}
    assert last["wgrad"] == ({"gradient": "FP8 E5M2", "activation": "FP8 E4M3"}, "", None)


def test_a_backward_that_comes_after_many_skipped_batches(tmp_path: Path) -> None:
    session = InspectSession(CONFIG, log_dir=tmp_path / "none")
    of_steps(session, steps=13, skipped=range(13))
    assert str(session.coverage()) == (
        "FP8 in 50.0 % of the multiply-adds (fprop 50.0); 50.0 % in FP32: head (not a TE layer); no backward has"
        " run, so only products of the forward are counted"
    )
    session = InspectSession(CONFIG, log_dir=tmp_path / "two")
    assert of_steps(session, steps=15, skipped=range(13)) == {ONE_LAYER_OF_TE}


@pytest.mark.parametrize("skipped", [(0,), (0, 2)], ids=str)
def test_micro_batches_that_are_skipped_in_the_first_step(skipped: Collection[int], tmp_path: Path) -> None:
    """If it is the step counted for the others, the next step is counted instead."""
    net = two_layers()
    with InspectSession(None, model=net, log_dir=tmp_path) as session:
        for step in range(2):
            for micro_batch in range(3):
                out = net(torch.ones(16, 32, requires_grad=True))
                if step or micro_batch not in skipped:
                    out.sum().backward()
            session.step()
    for coverage, backwards in ((session.coverage(at=0), 3 - len(skipped)), (session.coverage(at=1), 3)):
        assert {product.gemm: product.calls for product in coverage if product.layer == "head"} == {
            "fprop": 3,
            "dgrad": backwards,
            "wgrad": backwards,
        }
        assert (coverage.is_estimate, coverage.share("fp8")) == (False, 0.5)


@pytest.mark.parametrize(("error", "sections"), [(ValueError(), CONFIG), (KeyboardInterrupt(), None)])
def test_a_step_that_an_error_ends_after_its_forward_changes_nothing(
    error: BaseException, sections: dict[str, Any] | None, tmp_path: Path
) -> None:
    session = InspectSession(sections, log_dir=tmp_path)
    with pytest.raises(type(error)):
        of_steps(session, raises=error)
    assert str(session.coverage()) == str(session.coverage(at=4)) == ONE_LAYER_OF_TE
    assert other_steps(session) == other_steps_of_run(open_run(tmp_path)) == []


@pytest.mark.parametrize("has_masters", [False, True])
def test_a_layer_that_no_backward_reaches_any_more_is_told(tmp_path: Path, has_masters: bool) -> None:
    """Unlike in a step without a backward; the step of an optimizer shows that there was one, of torch's layer alone,
    also where it steps copies of the weights in float32."""
    net = two_layers()
    net.head.register_forward_pre_hook(lambda _, given: (given[0].detach(),) if session.iteration > 0 else None)
    masters = [parameter.detach().clone() if has_masters else parameter for parameter in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with InspectSession(CONFIG, model=net, log_dir=tmp_path) as session:
        for step in range(4):
            loss = net(torch.ones(16, 32)).sum()
            if step != 1:  # a batch that is skipped, with the same forward
                loss.backward()
            for master, parameter in zip(masters, net.parameters(), strict=True):
                master.grad = parameter.grad
            optimizer.step()
            net.zero_grad()
            session.step()
    last = {entry.gemm: (entry.not_run, entry.since) for entry in session.precision(at=3)}
    assert last["wgrad"] == ("no backward has reached it", 2)


def test_every_output_has_the_steps_in_which_a_section_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    trained(tmp_path, high([1, 2], [4, 4]), [CURRENT] * 6)
    line = f"In steps 1 to 2 and 4: {ONE_LAYER}; 50.0 % in FP32: '1' (DisableQuantizationLayer in "
    closing = capsys.readouterr().err.splitlines()
    place = closing.index(f"  {ALL_GEMMS}.")
    assert closing[place + 1].startswith(f"  {line}")
    assert closing[place + 1].count("1 to 2 and 4") == 1
    result = json.loads(CliRunner().invoke(cli.app, ["show", str(tmp_path), "--json"]).output)
    assert [item.startswith(line) for item in result["other_steps"]] == [True]


def test_a_run_in_one_precision_has_no_such_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TE_PRECISION_QUIET")
    trained(tmp_path / "fixed", {}, [CURRENT] * 3)
    assert "In step" not in capsys.readouterr().err
    assert other_steps(trained(tmp_path / "recipes", {}, [CURRENT, DelayedScaling(), CURRENT])) == []


def test_many_spans_are_short(tmp_path: Path) -> None:
    session = trained(tmp_path, high(*([step, step] for step in range(1, 12, 2))), [CURRENT] * 13)
    [line] = other_steps(session)
    assert line.startswith(f"In steps 1 and 3 and 5 and 7 and 2 more spans: {ONE_LAYER}")
    assert other_steps(session) == other_steps_of_run(open_run(tmp_path))


def test_what_was_before_the_changes_that_are_kept_is_not_told(tmp_path: Path) -> None:
    """The history has the last changes of a layer; earlier ones are not known, and not guessed."""
    session = trained(tmp_path, high(*([step, step] for step in range(1, 70, 2))), [CURRENT] * 71)
    rows = [row for row in open_run(tmp_path).gemms.to_pylist() if row["layer"] == "1"]
    for at in range(71):
        known = {
            row["precision"] for row in rows if row["since"] <= at and (row["until"] is None or at <= row["until"])
        }
        assert known == (set() if at < 7 else {"fp32"} if at % 2 else {"fp8"})
    [line] = other_steps(session)
    assert line.startswith(f"In steps 7 and 9 and 11 and 13 and 28 more spans: {ONE_LAYER}")


WIDTH, WIDE = 64, 1024
WRITES_NOTHING: dict[str, Any] = {"statistics_log": "off", "records": "off", "strict": True}


class Changing(torch.nn.Module):
    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        self.first = te.Linear(WIDTH, WIDTH)
        self.second = te.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDE)
        self.small = torch.nn.Linear(WIDTH, WIDTH)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDE))
        self.uses_head = False

    def forward(self, x: torch.Tensor, *, fp8: bool = True, columns: int = 0, task: Any = None) -> torch.Tensor:
        with te.autocast(enabled=fp8):
            x = self.first(x)
            if self.uses_head:
                x = self.second(x)
        if columns:
            return (x @ self.weight[:, :columns]).sum()
        if self.uses_head or task == 1:
            return self.head(x).sum()
        if task == 2:
            return self.small(x).sum()
        return x.sum()


def share_by_hand(*products: tuple[int, int, int, bool], backward_of_first: bool = False) -> float:
    """The share of FP8: rows, inputs and outputs of each layer, and whether it is in FP8; fprop, dgrad and wgrad, but
    for the dgrad of the first: its input needs no gradient."""
    low = whole = 0
    for place, (rows, inputs, outputs, is_low) in enumerate(products):
        macs = rows * inputs * outputs * (3 if place or backward_of_first else 2)
        whole += macs
        low += macs * is_low
    return low / whole


def train(
    steps: int,
    batches: Callable[[Changing, int], list[dict[str, Any]]],
    **options: Any,
) -> InspectSession:
    model = Changing()
    with InspectSession(model=model, **{**WRITES_NOTHING, **options}) as session:
        for step in range(steps):
            for keywords in batches(model, step):
                model(torch.randn(keywords.pop("rows", 16), WIDTH), **keywords).backward()
            session.step()
    return session


WITH_HEAD = share_by_hand((16, WIDTH, WIDTH, True), (16, WIDTH, WIDTH, True), (16, WIDTH, WIDE, False))


def from_step_4(model: Changing, step: int) -> list[dict[str, Any]]:
    model.uses_head = step >= 4
    return [{}]


def only_step_0(model: Changing, step: int) -> list[dict[str, Any]]:
    model.uses_head = step == 0
    return [{}]


@pytest.mark.parametrize(
    ("batches", "with_head", "without"), [(from_step_4, None, 3), (only_step_0, 0, None)], ids=["begins", "has ended"]
)
def test_a_path_that_begins_later_or_has_ended(
    tmp_path: Any, batches: Any, with_head: int | None, without: int | None
) -> None:
    session = train(8, batches, log_dir=tmp_path)
    assert session.coverage(with_head).share("fp8") == pytest.approx(WITH_HEAD)
    assert session.coverage(without).share("fp8") == 1
    assert ("steps 0 to 3" if without else "step 0") in "".join(other_steps(session))
    if without:
        with pytest.raises(PrecisionContractError, match=r"fp8 is 9\.4 %"):
            train(16, batches, log_dir=tmp_path / "contract", require="fp8 >= 95%")


def test_other_lengths(tmp_path: Any) -> None:
    def attend(net: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True):
            q = net.qkv(x)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).sum()

    model = Net(attend, qkv=te.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"loss": lambda step: model(torch.randn(1, 16 if step < 4 else 256, WIDTH))}
    session = observed(tmp_path, net=model, steps=8, **options, **WRITES_NOTHING)
    for at, length in ((None, 256), (2, 16)):
        low, high = 2 * length * WIDTH * WIDTH, 6 * length * length * WIDTH
        assert session.coverage(at).share("fp8") == pytest.approx(low / (low + high))


TASKS = [{"task": 0}, {"task": 1}]
COLUMNS = [{"columns": 16}, {"columns": WIDE}]


@pytest.mark.few
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("batches", "right"),
    [
        (TASKS, share_by_hand((32, WIDTH, WIDTH, True), (16, WIDTH, WIDE, False))),
        (COLUMNS, share_by_hand((32, WIDTH, WIDTH, True), (16, WIDTH, WIDE + 16, False))),
        (
            [{"task": 1}, {"task": 2}],
            share_by_hand((32, WIDTH, WIDTH, True), (16, WIDTH, WIDE + WIDTH, False)),
        ),
    ],
)
def test_micro_batches_that_take_different_paths(
    tmp_path: Any, batches: list[dict[str, Any]], right: float, *, reverse: bool
) -> None:
    order = batches[::-1] if reverse else batches
    session = train(4, lambda model, step: [dict(item) for item in order], log_dir=tmp_path)
    assert session.coverage().share("fp8") == pytest.approx(right)
    assert not session.coverage().not_counted


@pytest.mark.parametrize("reverse", [False, True])
def test_micro_batches_that_the_host_routes(tmp_path: Any, *, reverse: bool) -> None:
    def batches(model: Changing, step: int) -> Any:
        for part in (0, 1):
            model.uses_head = (part == 1) is not reverse
            yield {}

    session = train(8, batches, log_dir=tmp_path)
    products = (32, WIDTH, WIDTH, True), (16, WIDTH, WIDTH, True), (16, WIDTH, WIDE, False)
    assert session.coverage().share("fp8") == pytest.approx(share_by_hand(*products))
    assert not session.coverage().not_counted


@pytest.mark.parametrize("odd", [13, 15])
def test_one_step_in_high_precision(tmp_path: Any, odd: int) -> None:
    session = train(16, lambda model, step: [{"fp8": step != odd}], log_dir=tmp_path)
    assert session.coverage(at=odd).share("fp8") == 0
    assert session.coverage(at=12).share("fp8") == session.coverage(at=14 if odd != 14 else 12).share("fp8") == 1


@pytest.mark.few
@pytest.mark.parametrize(
    ("second", "rows", "fp8"),
    [
        (Float8BlockScaling(), 64, 1.0),
        (None, 256, 0.2),
        (None, 64, 0.5),
        (Float8CurrentScaling(), 256, 1.0),
    ],
)
@pytest.mark.parametrize("since", [0, 3])
def test_micro_batches_of_different_precision(tmp_path: Path, second: Any, rows: int, fp8: float, since: int) -> None:
    """Each GEMM counts with its own size and formats. The share is counted by hand."""
    net = torch.nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))

    def around(number: int) -> Any:
        is_low = number < 2 * since or number % 2 == 0 or second is not None
        return te.autocast(enabled=is_low, recipe=second if number % 2 and second else Float8CurrentScaling())

    options = {"micro_batches": 2, "loss": lambda number: net(torch.randn((64, rows)[number % 2], 64)).sum()}
    session = observed(tmp_path, net=net, steps=6, around=around, **options)
    coverage, before = session.coverage(at=5), session.coverage(at=0)
    assert not coverage.is_estimate
    assert coverage.share("fp8") == fp8
    assert before.share("fp8") == (1 if since else fp8)
    assert coverage.macs() == before.macs() == (64 + rows) * 64 * 64 * 5  # the first layer's input needs no gradient
    assert {product.recipe for product in coverage if product.macs} == {
        "fp8_current_scaling",
        "none" if second is None else recipe_of(second),
    }


def test_a_contract_about_micro_batches_of_different_precision(tmp_path: Path) -> None:
    """A fifth of the multiply-adds are in FP8, and half of the calls."""
    net = te.Linear(64, 64)
    options: dict[str, Any] = {
        "micro_batches": 2,
        "around": lambda number: te.autocast(enabled=number % 2 == 0),
        "loss": lambda number: net(torch.randn((64, 256)[number % 2], 64)).sum(),
    }
    with pytest.raises(PrecisionContractError, match=r"quantized is 20\.0 %, required: >= 45 %"):
        observed(tmp_path, net=net, require="quantized >= 45%", **options)


@pytest.mark.few
@pytest.mark.parametrize(("outside", "after"), [((10,), 1), ((10, 11), 1), (range(10, 16), 2 / 3), (range(16), 2 / 3)])
def test_a_micro_batch_in_high_precision(tmp_path: Any, outside: Collection[int], after: float) -> None:
    """Step 10 collects statistics, and so does step 20."""
    session = train(
        16, lambda model, step: [{}, {"fp8": step not in outside}, {}], log_dir=tmp_path, require="fp8 >= 60%"
    )
    assert session.coverage(at=10).share("fp8") == pytest.approx(2 / 3, abs=1e-3)
    assert session.coverage(at=14).share("fp8") == pytest.approx(after, abs=1e-3)
    products = session.coverage(at=10).in_high_precision
    (high,) = {(product.calls, product.why) for product in products if product.layer == "first"}
    assert high == (1, "runs inside te.autocast(enabled=False)")


def test_a_layernorm_mlp_that_computes_its_forward_again(tmp_path: Any) -> None:
    plain, again = (
        counted(model, lambda model=model: model(torch.randn(32, WIDTH)).sum().backward(), tmp_path)
        for checkpoint in (False, True)
        for model in [torch.nn.Sequential(te.LayerNormMLP(WIDTH, 4 * WIDTH, checkpoint=checkpoint))]
    )
    assert found(plain) == found(again)


def test_a_path_of_one_step_that_was_not_counted_is_an_estimate(tmp_path: Any) -> None:
    def batches(model: Changing, step: int) -> list[dict[str, Any]]:
        model.uses_head = step == 9
        return [{}]

    session = train(16, batches, log_dir=tmp_path / "without")
    assert "% of the multiply-adds in step 9, an estimate" in str(session.coverage(at=9))
    assert "estimate" not in str(session.coverage())
    session = train(16, batches, log_dir=tmp_path / "with", require="fp8 >= 95%")
    assert any("contract (require=) was not checked in step 9" in rule.why for rule in session.findings.not_checked)


def test_numbers_that_decide_nothing_are_counted_a_few_times(tmp_path: Any) -> None:
    counted: list[int] = []
    model = Net(lambda net, x, number: (net.layer(x) * number).sum(), layer=te.Linear(WIDTH, WIDTH))
    with InspectSession(model=model, log_dir=tmp_path, **WRITES_NOTHING) as session:
        for step in range(12):
            with te.autocast(enabled=True):
                loss = model(torch.randn(16, WIDTH), step)
            loss.backward()
            counted.append(session._run.hooks.products.counting)  # type: ignore[union-attr]
            session.step()
            assert not session.coverage().is_estimate
    assert counted == [True] * 4 + [False] * 8
    assert str(session.coverage()) == "FP8 in 100 % of the multiply-adds (fprop 100, wgrad 100)"


def test_more_sizes_than_are_counted_are_an_estimate(tmp_path: Any) -> None:
    session = train(60, lambda model, step: [{"rows": 16 * (step + 1), "task": step % 2}], log_dir=tmp_path)
    assert session.coverage().is_estimate
    assert "an estimate" in str(session.coverage())
    assert not session.coverage(at=20).is_estimate


def test_the_mean_of_more_changes_than_are_kept(tmp_path: Any) -> None:
    session = train(81, lambda model, step: [{"rows": 16 * (step + 1)}], log_dir=tmp_path)
    assert "in step 63" in str(session.coverage(at=63))
    coverage = session.coverage()
    assert "in the mean of steps 64 to 80" in str(coverage)
    assert coverage.macs() == 2 * 16 * WIDTH * WIDTH * sum(range(65, 82)) / 17


@pytest.mark.extended
def test_steps_in_turn_are_known_however_many(tmp_path: Any) -> None:
    session = train(160, lambda model, step: [{"task": step % 2, "fp8": step % 3 > 0}], log_dir=tmp_path)
    with_head = share_by_hand((16, WIDTH, WIDTH, True), (16, WIDTH, WIDE, False))
    for step in (0, 7, 8, 9, 100, 101, 155, 157, 158):
        right = with_head if step % 2 else 1
        assert session.coverage(at=step).share("fp8") == pytest.approx(right if step % 3 else 0)


def experts_time(rows: tuple[tuple[int, int], ...]) -> dict[str, float]:
    model = Net(lambda net, x, splits: net.experts(x, splits).sum(), experts=te.GroupedLinear(2, WIDTH, WIDTH))
    options: dict[str, Any] = {
        "micro_batches": len(rows),
        "around": lambda _: te.autocast(),
        "loss": lambda number: model(torch.randn(sum(rows[number]), WIDTH), list(rows[number])),
    }
    session = observed(Path(tempfile.mkdtemp()), net=model, steps=1, **options, **WRITES_NOTHING)
    times = estimate_step(session.coverage(), device_named("H100")).times
    return {f"{time.product.layer} {time.product.gemm}": time.high_ms for time in times}


def test_an_expert_without_rows_in_the_first_micro_batch() -> None:
    rows = (0, 64), (48, 16)
    result = experts_time(rows)
    assert result == pytest.approx(experts_time(rows[::-1]))
    assert all(time > 0 for time in result.values())
