"""``session.precision`` against what the extension's GEMMs are handed; :mod:`tests.instrumentation.gemm_spy` spies."""

import itertools
import json
from typing import Any

import pytest

from tests.combinations import half
from tests.forked import executable
from tests.instrumentation.gemm_spy import (
    ALWAYS,
    AUTOCAST,
    BIASES,
    BLACKWELL,
    CHECKPOINTS,
    EARLIER,
    FEATURES,
    FIRST,
    FROZEN,
    HOPPER,
    LATER,
    MODULES,
    can_run,
    case,
)
from tests.reference.processes import run

CHANGES = [name for name in AUTOCAST if name != ALWAYS]


def cases(recipes: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    """What is varied -> arguments of :func:`case`.

    Each module is in each recipe, with a feature or without; and what of it learns is varied in each pair of these.
    """
    quantized = [recipe for recipe in recipes if recipe != "none"]
    some = quantized[:2]
    results: dict[str, Any] = {
        "modules": half(MODULES, recipes, ["none", "LogTensorStats"]),
        "features": itertools.product(["LayerNormLinear"], quantized, list(FEATURES)[2:]),
        "schedules": itertools.product(["Linear"], some[:1], FEATURES, [10], ["none"], CHANGES),
        "checkpoints": itertools.product(["LayerNormLinear"], some[-1:], ["none", "LogTensorStats"], [1], CHECKPOINTS),
        "checkpoints and schedules": itertools.product(
            ["Linear"], some[:1], ["none", "LogTensorStats"], [10], list(CHECKPOINTS)[1:], [LATER, EARLIER]
        ),
        "gradients": half(
            MODULES,
            ["none", *some[-1:]],
            ["none", "LogTensorStats"],
            [10],
            ["none"],
            [ALWAYS],
            [2],
            [False],
            [FROZEN, FIRST, BIASES],
        ),
    }
    return {what: [args for args in product if can_run(*args)] for what, product in results.items()}


HERE = [(what, args) for what, item in cases(HOPPER).items() for args in item]


@pytest.mark.parametrize(("what", "args"), HERE, ids=[" ".join(map(str, args)) for _, args in HERE])
def test_no_operand_is_told_wrongly(what: str, args: tuple[Any, ...]) -> None:
    assert case(*args) == []


@pytest.mark.processes
def test_nor_under_the_recipes_of_another_gpu() -> None:
    """In a process of its own, since the reference backend stands for one GPU in a process."""
    of_kind = cases(BLACKWELL)
    every = [*of_kind["modules"][::2], *of_kind["features"][::3], *of_kind["schedules"][::3], *of_kind["checkpoints"]]
    every += of_kind["gradients"][::3]
    texts = [json.dumps(args) for args in every]
    done = run([executable(), "-m", "tests.instrumentation.gemm_spy", *texts])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == texts
    assert not {text: wrong for text, wrong in result.items() if wrong}


@pytest.mark.parametrize("freq", [1, 10])
def test_an_evaluation_in_another_precision_is_not_told(freq: int) -> None:
    """Also where it comes between a backward and ``step()``, and leaves its state in a layer that rests."""
    for feature in ("none", "LogTensorStats"):
        assert case("Linear", "current", feature, freq, "none", ALWAYS, 4, True) == []
