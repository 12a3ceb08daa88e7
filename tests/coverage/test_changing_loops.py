"""The coverage of loops that change: paths, sizes, tasks and precisions that come, go, or differ by micro-batch."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession, PrecisionContractError
from te_precision_callbacks.speed.devices import device_named
from te_precision_callbacks.speed.expected import timed, with_recipes
from tests.coverage.test_coverage import Net, counted, found

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
    for the dgrad of the first, whose input needs no gradient."""
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
    torch.manual_seed(0)
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
    assert ("steps 0 to 3" if without else "step 0") in "".join(map(str, session._results.other_steps()))


def test_a_contract_about_a_path_that_begins_later(tmp_path: Any) -> None:
    with pytest.raises(PrecisionContractError, match=r"it is 9\.4 %"):
        train(16, from_step_4, log_dir=tmp_path, require="fp8 >= 95%")


def test_other_lengths(tmp_path: Any) -> None:
    def attend(net: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True):
            q = net.qkv(x)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).sum()

    model = Net(attend, qkv=te.Linear(WIDTH, WIDTH))
    with InspectSession(model=model, log_dir=tmp_path, **WRITES_NOTHING) as session:
        for step in range(8):
            model(torch.randn(1, 16 if step < 4 else 256, WIDTH)).backward()
            session.step()
    for at, length in ((None, 256), (2, 16)):
        low, high = 2 * length * WIDTH * WIDTH, 6 * length * length * WIDTH
        assert session.coverage(at).share("fp8") == pytest.approx(low / (low + high))


TASKS = [{"task": 0}, {"task": 1}]
COLUMNS = [{"columns": 16}, {"columns": WIDE}]


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
    with pytest.raises(PrecisionContractError, match="cannot be checked"):
        train(16, batches, log_dir=tmp_path / "with", require="fp8 >= 95%")


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
    assert len(session._results.coverage.spans()) <= 64


def test_the_mean_of_more_changes_than_are_kept(tmp_path: Any) -> None:
    coverage = train(81, lambda model, step: [{"task": step % 2}], log_dir=tmp_path).coverage()
    assert "in the mean of steps 63 to 80" in str(coverage)
    right = share_by_hand((18 * 16, WIDTH, WIDTH, True), (9 * 16, WIDTH, WIDE, False))
    assert coverage.share("fp8") == pytest.approx(right, rel=1e-3)


def experts_time(rows: tuple[tuple[int, int], ...]) -> dict[str, float]:
    model = Net(lambda net, x, splits: net.experts(x, splits).sum(), experts=te.GroupedLinear(2, WIDTH, WIDTH))
    with InspectSession(model=model, log_dir=tempfile.mkdtemp(), **WRITES_NOTHING) as session:
        for splits in rows:
            with te.autocast(enabled=True):
                loss = model(torch.randn(sum(splits), WIDTH), list(splits))
            loss.backward()
        session.step()
    times = timed(with_recipes(session.coverage(), "fp8_current_scaling"), device_named("H100"))
    return {f"{time.layer} {time.gemm}": time.high_ms for time in times}


def test_an_expert_without_rows_in_the_first_micro_batch() -> None:
    rows = (0, 64), (48, 16)
    result = experts_time(rows)
    assert result == pytest.approx(experts_time(rows[::-1]))
    assert all(time > 0 for time in result.values())
