"""The Triton kernel for tensors in blocks, in Triton's interpreter, against float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from te_precision_callbacks.engine import kernels
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.kernels.columns import ColumnPlaces, Pending
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from tests.engine.forms import (
    EXTREMES,
    FORMS,
    NAMES,
    SPECIAL_SCALES,
    SUMS,
    Add,
    Form,
    Scales,
    check,
    check_form,
    check_scales,
    measured,
    pending_of,
    quantized_by,
    spread,
    storage_of,
    tensor_of,
)
from tests.engine.test_triton_kernel import (
    Compiled,
    Launch,
    Launcher,
    assert_same_launch,
    compiled_launch,
    compiles,
    disassembled,
    fresh_kernel,
    interpreted,
    loads,
    odd,
    triton_folder,
    vectors,
)

pytestmark = [
    pytest.mark.slow,  # the interpreter is
    pytest.mark.filterwarnings(
        "ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
    ),  # numpy
]

__all__ = ["compiles", "triton_folder"]  # fixtures that are used by their names


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted("triton_blocks") as module:
        yield module


@pytest.fixture
def add(kernel: ModuleType) -> Add:
    return by_kernel(kernel)


def by_kernel(kernel: ModuleType) -> Add:
    def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
        for item in pending:
            kernel.add(item, sums, maxima)

    return add


# --- every form, in every layout --------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_a_form_beside_its_tensor(add: Add, form: Form) -> None:
    check_form(add, form)


@pytest.mark.few
@pytest.mark.parametrize(("form", "scales"), SPECIAL_SCALES)
def test_scales_at_their_ends(add: Add, form: Form, scales: Scales) -> None:
    check_scales(add, form, scales)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a transpose": lambda x: x.t().contiguous().t(),
    "some columns": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "not a matrix": lambda x: x.view(8, 10, -1).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("form", "view"), [*((FORMS[3], view) for view in VIEWS), (FORMS[7], "a transpose"), (FORMS[7], "not a matrix")]
)
def test_strided_views_have_the_columns_of_their_values(add: Add, form: Form, view: str) -> None:
    """Codes and scales lie along the tensor's neighbours, or across."""
    check(add, form, VIEWS[view](spread(80, 96)))


# --- requested statistics, and impossible ones ------------------------------------------------------------------------


def test_two_tensors_are_added(add: Add) -> None:
    """As micro-batches are: with the bits of one after the other."""
    x = tensor_of(FORMS[0])
    pending = [pending_of(FORMS[0], part) for part in (x[:1], 3 * x[1:])]

    def twice(given: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
        add([replace(item, places=given[0].places) for item in pending], sums, maxima)

    both, first, second = measured(twice, pending[0]), *(measured(add, item) for item in pending)
    for place, columns in both.items():
        merged = sum if place in SUMS else max
        assert columns == {name: merged((value, second[place][name])) for name, value in first[place].items()}, place


def test_wrong_arguments(kernel: ModuleType) -> None:
    x = tensor_of(FORMS[0])
    result = pending_of(FORMS[0], x).in_blocks
    vectors = torch.zeros(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    for values, in_blocks, error, message in (
        (x[:1], result, ValueError, r"values.*\(1, 37, 150\).*\(2, 37, 150\)"),
        (x, None, ValueError, "in_blocks: must be given"),
    ):
        with pytest.raises(error, match=message):
            kernel.add(Pending(values, None, None, False, ColumnPlaces(moments=0), in_blocks), *vectors)


# --- work of the host -------------------------------------------------------------------------------------------------

TENSORS = tuple(map(tensor_request, ("mean", "std", "max")))
BLOCK_SOURCES = (
    "mse",
    "underflows%",
    "underflow_norm%",
    "scale_inv_max",
    "saturated_scales%",
    "underflow_blocks%",
    "block_dynamic_range_mean",
)


@pytest.mark.parametrize("form", FORMS[:2], ids=NAMES[:2])
def test_the_engine_with_the_kernel(add: Add, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    """In micro-batches, one of them with other magnitudes; the same as plain torch gives."""
    of_codes = tuple(quantized_request(f"{name}{'_columnwise' if form.columnwise else ''}") for name in BLOCK_SOURCES)
    quantizer = type("MXFP8Quantizer", (), {})()

    def found() -> dict[str, Any]:
        engine = StatisticsEngine(on_failure=lambda doing, of, error: pytest.fail(f"{doing} {of}: {error}"))
        for factor in (1.0, 1e-3):
            x = (tensor_of(form)[:, :20].float() * factor).bfloat16()
            storage = storage_of(form, quantized_by(form, x), x.shape)
            watched = Watched("fc1", "activation", 0, x, storage, storage, quantizer)
            engine.note(watched, TENSORS)
            engine.note(watched, of_codes)
            engine.measure()
        return {row.statistic: row.value for row in engine.flush(reduce=False)}

    in_torch = found()
    launches: list[Pending] = []

    def counted(pending: Sequence[Pending], *into: torch.Tensor) -> None:
        launches.extend(pending)
        add(pending, *into)

    monkeypatch.setattr(kernels, "_pass_for", lambda values: counted)
    assert found() == pytest.approx(in_torch, rel=1e-5)
    assert len(launches) == 2, "one for each micro-batch gives all"


# --- launches without Triton's binder ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("form", [FORMS[0], FORMS[5], FORMS[11]], ids=[NAMES[0], NAMES[5], NAMES[11]])
def test_a_direct_launch_has_all_arguments_in_order(form: Form) -> None:
    module = fresh_kernel("triton_blocks")
    function = module._measure
    compiled = Compiled(function.arg_names, launcher=Launcher)
    vars(module)["_measure"] = compiled
    first, second = (pending_of(form, spread(64, 128) * scale) for scale in (1.0, 2.0))
    into = vectors(1000)
    module.scratch(into[0].device, 1 << 12)  # not larger later
    module.add(first, *into)
    module.add(second, *into)
    assert (len(compiled.bound), len(compiled.direct)) == (1, 1)
    module._known.clear()
    module.add(second, *into)
    (direct,) = compiled.direct
    assert_same_launch(function, compiled.bound[-1], direct)


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    "change",
    [
        lambda one: pending_of(FORMS[0], spread(64, 160)),
        lambda one: pending_of(FORMS[1], spread(64, 128)),
        lambda one: replace(one, values=one.values.float()),
        lambda one: replace(one, values=odd(one.values)),
        lambda one: replace(one, values=one.values.t().contiguous().t()),
        lambda one: replace(one, places=one.places._replace(moments=500)),
        lambda one: replace(one, places=one.places._replace(limits=3)),
    ],
)
def test_other_tensors_are_not_launched_again(change: Callable[[Pending], Pending]) -> None:
    module = fresh_kernel("triton_blocks")
    compiled = Compiled(module._measure.arg_names)
    vars(module)["_measure"] = compiled
    one = pending_of(FORMS[0], spread(64, 128).to(torch.bfloat16))
    into = vectors(1000)
    for _ in range(2):
        module.add(one, *into)
    module.add(change(one), *into)
    assert (len(compiled.bound), len(compiled.direct)) == (2, 1)


@pytest.mark.usefixtures("compiles")
def test_a_direct_launch_that_fails_is_made_by_triton(caplog: pytest.LogCaptureFixture) -> None:
    module = fresh_kernel("triton_blocks")
    compiled = Compiled(module._measure.arg_names, TypeError("19 arguments"))
    vars(module)["_measure"] = compiled
    for _ in range(4):
        module.add(pending_of(FORMS[0], spread(64, 128)), *vectors(1000))
    assert (len(compiled.bound), len(compiled.direct)) == (4, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# --- what Triton compiles ---------------------------------------------------------------------------------------------

OF_ANY_RECIPE = ("moments", "maxima", "compared", "scales", "scale_maxima")


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    ("form", "capability"),
    [(FORMS[0], 100), (FORMS[5], 90), (FORMS[11], 100)],
    ids=[NAMES[0], NAMES[5], NAMES[11]],
)
@pytest.mark.extended
def test_it_compiles_without_spilling_registers(tmp_path: Path, form: Form, capability: int) -> None:
    """With the statistics that every recipe has: all block statistics together take more registers than there are."""
    made = compiled_for(form, capability, without=[name for name in (*SUMS, *EXTREMES) if name not in OF_ANY_RECIPE])
    instructions = disassembled(made["cubin"], tmp_path)
    assert "LDG" in instructions
    assert "STL" not in instructions
    assert ".ftz" not in made["ptx"], "subnormal numbers stay"
    assert "fma.rn.f32" not in made["ptx"], "the product of code and factor is rounded"
    if form == FORMS[0]:
        assert sorted(loads(made["ptx"])) == ["v2.b32"] * 2 + ["v4.b32"] * 2, "16 bytes, and their codes"


@pytest.mark.usefixtures("compiles")
@pytest.mark.extended
def test_everything_compiles() -> None:
    assert compiled_for(FORMS[7], 90)["cubin"]


def compiled_for(form: Form, capability: int, *, without: Sequence[str] = ()) -> dict[str, Any]:
    module = fresh_kernel("triton_blocks")
    function, launch = module._measure, Launch()
    vars(module)["_measure"] = launch
    measured(by_kernel(module), pending_of(form, torch.ones(128, 256, dtype=torch.bfloat16)), without=without)
    return compiled_launch(capability, function, launch)
