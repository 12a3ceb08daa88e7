"""Measure the times of a model's own shapes on this device, as Transformer Engine runs them.

    table = calibrate(times)       # with CUDA events
    table.write(Path("speed_calibration.json"))

``high`` is ``torch.matmul`` in BF16, ``gemm`` Transformer Engine's GEMM, ``cast`` its quantizer, and ``call`` the
forward of ``te.Linear`` under ``te.autocast``. On a CPU the same code runs on the reference backend, with the clock of
the CPU: its times say nothing about a GPU, and are never used for one.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES
from te_precision_callbacks.speed.calibration import (
    DEFAULT_FILE,
    Calibration,
    Time,
    call_key,
    cast_key,
    gemm_key,
    high_key,
)
from te_precision_callbacks.speed.costs import CallPlan, Shape, cast_users, operand_sizes
from te_precision_callbacks.speed.errors import CalibrationError
from te_precision_callbacks.speed.expected import ProductTime

logger = logging.getLogger(__name__)

_REPEATS, _CALLS = 7, 10
"""The measurements of a time, and the calls of each of them."""


def _time_of(run: Callable[[], object], device: str) -> Time:
    """Return the time of a call on a device, with all that it launches."""
    import torch

    run()
    found = []
    for _ in range(_REPEATS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            run()  # the GPU is busy with it while the timed calls are launched
            start.record()
            for _ in range(_CALLS):
                run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / _CALLS)
        else:
            begun = time.perf_counter()
            run()
            found.append((time.perf_counter() - begun) * 1e3)
    median = statistics.median(found)
    return Time(median, statistics.stdev(found) / median if median else 0.0)


def calibrate(
    times: Iterable[ProductTime],
    *,
    plan: CallPlan = "training",
    device: str = "cuda",
    table: Calibration | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Measure the times that expected times of products need, and that a table does not have yet.

    Args:
        times: expected times, whose shapes and recipes are measured.
        plan: how often operands are cast.
        device: ``cuda``, or ``cpu`` for the reference backend.
        table: the table to add to; None for a new one.
        report: called before each measurement with what is measured, its number, and how many there are.

    Raises:
        CalibrationError: there is no such device here, or the table is of another one.
    """
    from te_precision_callbacks import reference

    reference.install_where_needed()
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise CalibrationError(
            "--calibrate measures on a GPU, and torch finds none here. Run it on the machine of the training, and carry"
            f" the table ({DEFAULT_FILE}) over."
        )
    import transformer_engine
    import transformer_engine.pytorch

    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "transformer_engine": transformer_engine.__version__}
    found = Calibration(name, versions) if table is None else table
    if found.device != name:
        raise CalibrationError(f"The table has times of {found.device!r}, and this is {name!r}. Choose another file.")
    wanted = {key: run for key, run in _wanted(list(times), plan, device).items() if key not in found.times}
    for number, (key, make) in enumerate(wanted.items(), 1):
        if report is not None:
            report(key, number, len(wanted))
        try:
            found.times[key] = _time_of(make(), device)
        except (RuntimeError, AssertionError, ValueError, PrecisionDebugError) as error:  # a shape that a GEMM refuses
            text = str(error).partition("\n")[0]
            logger.warning("%s was not measured, so the model's time is taken: %s", key, text)
    return found


Make = Callable[[], Callable[[], object]]


def _wanted(times: Sequence[ProductTime], plan: CallPlan, device: str) -> dict[str, Make]:
    """What has to be measured -> what makes the function to time."""
    found: dict[str, Make] = {}
    low: dict[str, dict[str, ProductTime]] = {}
    for one in times:
        if one.shape.batch > 1 or one.gemm not in GEMMS:
            continue
        found.setdefault(high_key(one.shape), _matmul(one.shape, device))
        if one.recipe not in RECIPES:
            continue
        found.setdefault(gemm_key(one.shape, one.recipe), _gemm(one.shape, one.recipe, device))
        if plan == "benchmark":
            found.setdefault(call_key(one.shape, one.recipe), _call(one.shape, one.recipe, device))
        else:
            low.setdefault(one.layer, {})[one.gemm] = one
    for of_layer in low.values():
        for operand, first, directions in cast_users({gemm: one.recipe for gemm, one in of_layer.items()}):
            recipe = of_layer[first].recipe
            rows, columns = operand_sizes(operand, first, of_layer[first].shape)
            key = cast_key(recipe, operand, rows, columns, directions)
            found.setdefault(key, _cast(recipe, operand, rows, columns, directions, device))
    return found


def _matmul(shape: Shape, device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch

        a, b = (torch.randn(*sizes, dtype=torch.bfloat16, device=device) for sizes in (shape[:2], shape[1:3]))
        return lambda: torch.matmul(a, b)

    return make


def _quantizers(recipe: str, operand: str) -> Any:
    """The quantizer that a te.Linear has for an operand under a recipe, with the recipe's defaults."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.quantization import RecipeState

    made = getattr(recipes, RECIPES[recipe].recipe_class)()
    forward = operand != "gradient"
    mode, count = ("forward", 2) if forward else ("backward", 1)
    quantizers = RecipeState.create(made, mode=mode, num_quantizers=count).make_quantizers()
    return quantizers[1 if operand == "weight" else 0]


def _cast(recipe: str, operand: str, rows: int, columns: int, directions: tuple[bool, bool], device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch

        quantizer = _quantizers(recipe, operand)
        quantizer.set_usage(rowwise=directions[0], columnwise=directions[1])
        tensor = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
        return lambda: quantizer(tensor)

    return make


def _gemm(shape: Shape, recipe: str, device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        operands = []
        for operand, sizes in (("weight", (shape.n, shape.k)), ("activation", (shape.m, shape.k))):
            quantizer = _quantizers(recipe, operand)
            quantizer.set_usage(rowwise=True, columnwise=False)
            operands.append(quantizer(torch.randn(*sizes, dtype=torch.bfloat16, device=device)))
        weight, activation = operands
        return lambda: general_gemm(weight, activation, out_dtype=torch.bfloat16, layout="TN")

    return make


def _call(shape: Shape, recipe: str, device: str) -> Make:
    def make() -> Callable[[], object]:
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        linear = te.Linear(shape.k, shape.n, bias=False, params_dtype=torch.bfloat16, device=device)
        x = torch.randn(shape.m, shape.k, dtype=torch.bfloat16, device=device)
        made = getattr(recipes, RECIPES[recipe].recipe_class)()

        def run() -> object:
            with te.autocast(enabled=True, recipe=made):
                return linear(x)

        return run

    return make
