"""Paired seeds: intervals and decisions, against simulated losses, and ``te-precision compare --a ... --b ...``."""

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.views.compare.paired import paired_difference
from tests.compare.recorded import record
from tests.compare.test_command import command, refusal
from tests.docs.pages import blocks

SIMULATIONS = 1000


T = {2: (4.3027, 2.9200), 3: (3.1824, 2.3534), 4: (2.7764, 2.1318), 29: (2.0452, 1.6991)}
"""Degrees of freedom -> the published quantiles of Student's t for intervals of 95 % and 90 %."""


@pytest.mark.parametrize(("freedom", "most"), [(2, 0.041), (3, 0.012), (4, 0.005), (29, 1e-4)])
def test_intervals_are_those_of_students_t_or_a_little_wider(freedom: int, most: float) -> None:
    losses = [1 + 0.001 * (number % 2) for number in range(freedom + 1)]
    paired = paired_difference([1.0] * len(losses), losses)
    error = np.std(losses, ddof=1) / math.sqrt(len(losses))
    for (low, high), quantile in zip((paired.interval, paired.test_interval), T[freedom], strict=True):
        assert 0 <= (high - low) / 2 / error / quantile - 1 < most


@pytest.mark.parametrize("pairs", [3, 6])
def test_intervals_cover_the_true_difference(pairs: int) -> None:
    """95 % and 90 %, within three standard deviations of a binomial; seeds shift both sides alike."""
    random = np.random.default_rng(pairs)
    covered = np.zeros(2)
    for _ in range(SIMULATIONS):
        a = 2.0 + 0.1 * random.standard_normal(pairs)
        b = a + 0.004 + 0.003 * random.standard_normal(pairs)
        paired = paired_difference(a.tolist(), b.tolist())
        truth = 0.004 / paired.a
        covered += [low < truth < high for low, high in (paired.interval, paired.test_interval)]
    shares = covered / SIMULATIONS
    for share, nominal in zip(shares, (0.95, 0.9), strict=True):
        assert abs(share - nominal) < 3 * math.sqrt(nominal * (1 - nominal) / SIMULATIONS), shares


@pytest.mark.parametrize(("pairs", "sign"), [(2, -1), (3, 1), (6, -1)])
def test_a_difference_beyond_the_tolerance_rarely_passes(pairs: int, sign: int) -> None:
    """At the tolerance itself, the worst case, two one-sided tests pass in 5 %, up to the binomial's error."""
    random = np.random.default_rng(10 + pairs)
    passed = {1.0: 0, 1.2: 0}
    for factor in passed:
        for _ in range(SIMULATIONS):
            a = np.full(pairs, 2.0)
            b = a * (1 + sign * factor * 0.0025 + 0.0005 * random.standard_normal(pairs))
            passed[factor] += paired_difference(a.tolist(), b.tolist()).decision == "within"
    assert passed[1.0] / SIMULATIONS < 0.05 + 2 * math.sqrt(0.05 * 0.95 / SIMULATIONS)
    assert passed[1.2] / SIMULATIONS < 0.05


def test_a_small_difference_is_shown_to_be_within() -> None:
    paired = paired_difference([2.0, 2.1, 2.2], [2.0004, 2.1006, 2.2005])
    assert (paired.decision, paired.pairs_needed) == ("within", None)
    assert paired_difference([2.0, 2.1, 2.2], [2.04, 2.14, 2.2402]).decision == "beyond"


def test_the_stated_number_of_seeds_decides() -> None:
    a = [2.0, 2.1, 2.2]
    b = [2.002, 2.0995, 2.2045]
    paired = paired_difference(a, b)
    assert paired.decision == "undecided"
    count = paired.pairs_needed
    assert count is not None
    # Pairs with the same mean and spread: half of them above, half below.
    mean = paired.difference
    spread = (paired.interval[1] - mean) / T[2][0] * math.sqrt(3)

    def decision(pairs: int) -> str:
        side = spread * math.sqrt((pairs - 1) / pairs) if pairs % 2 == 0 else spread
        losses = [1 + mean + side * (1 - 2 * (n % 2)) * (n < pairs - pairs % 2) for n in range(pairs)]
        return paired_difference([1.0] * pairs, losses).decision

    assert decision(count + count % 2) == "within"
    assert decision(count // 2) == "undecided"


def test_wrong_pairs_and_tolerances_are_refused() -> None:
    with pytest.raises(OptionError, match="same number of runs on both sides, not 1 and 2"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(OptionError, match=r"tolerance=2 must be a share"):
        paired_difference([1.0], [1.0], 2)


def runs(folder: Path, name: str, offsets: list[float]) -> list[Path]:
    paths = []
    for seed, offset in enumerate(offsets):
        curve = 3 * np.exp(-np.arange(40) / 10) + 2 + 0.01 * seed + offset
        record(folder / f"{name}{seed}", {}, scalars={"loss": curve})
        paths.append(folder / f"{name}{seed}")
    return paths


def test_the_command_takes_several_runs_a_side(tmp_path: Path) -> None:
    a = runs(tmp_path, "a", [0, 0, 0])
    b = runs(tmp_path, "b", [0.001, 0.0012, 0.0008])
    result = command("--a", *a, "--b", *b)
    assert result.exit_code == 0
    assert "mean of 3 paired seeds" in result.output
    assert "Within the tolerance of 0.25 % (two one-sided tests at 5 %)." in " ".join(result.output.split())
    lower = command("--a", *b, "--tolerance", 0.0001, "--b", *a)
    assert "of 0.01 % (two one-sided tests at 5 %): B is lower." in " ".join(lower.output.split())
    result = command("--a", *a, "--tolerance", 0.0001, "--b", *b, "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert found["paired"]["decision"] == "beyond"
    assert found["losses_b"][1] - found["losses_a"][1] == pytest.approx(0.0012)
    assert found["since"] == [30, 30, 30]


def test_one_seed_a_side_decides_nothing(tmp_path: Path) -> None:
    a = runs(tmp_path, "a", [0])
    b = runs(tmp_path, "b", [0.001])
    result = command("--a", *a, "--b", *b)
    assert result.exit_code == 1
    assert "Cannot decide with 1 seed" in result.output


def test_pairs_of_different_lengths_are_said(tmp_path: Path) -> None:
    record(tmp_path / "short", {}, scalars={"loss": np.linspace(3, 2, 12)})
    result = command("--a", *runs(tmp_path, "a", [0, 0]), "--b", tmp_path / "short", *runs(tmp_path, "b", [0]))
    assert "these means are not from the same steps" in " ".join(result.output.split())


def test_a_lost_run_is_in_the_table_and_beyond(tmp_path: Path) -> None:
    a = runs(tmp_path, "a", [0, 0, 0])
    b = runs(tmp_path, "b", [0.001, math.nan, 0.001])
    result = command("--a", *a, "--b", *b)
    assert result.exit_code == 1, result.output
    output = " ".join(result.output.split())
    assert "2 2.1102 nan 30" in output
    assert "b1 is nan from step 0 on" in output
    assert "In B, a loss is inf or nan: NOT within the tolerance of 0.25 %." in output
    found = json.loads(command("--a", *a, "--b", *b, "--json").output)
    assert found["paired"]["decision"] == "beyond"
    assert found["losses_b"][1] == "nan"
    reverse = command("--a", *b, "--b", *a)
    assert reverse.exit_code == 1
    assert "In A, a loss is inf or nan, so B cannot be compared with it." in " ".join(reverse.output.split())


def test_wrong_use_names_the_remedy(tmp_path: Path) -> None:
    a = runs(tmp_path, "a", [0, 0])
    b = runs(tmp_path, "b", [0, math.nan])
    assert "a1 is given twice" in refusal("--a", *a, "--b", b[0], a[1])
    assert "not 2 and 1" in refusal("--a", *a, "--b", b[0])
    assert "a tolerance is for several" in refusal(*a, "--tolerance", 0.1)
    assert "A, B, --noise, --run" in refusal("--a", *a, "--b", *a, "--noise", b[0])


def test_the_command_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, offsets in (("bf16_", [0, 0, 0, 0]), ("fp8_", [0, 0.001, 0.0012, 0.0008])):
        runs(Path(), name, offsets)
    (code,) = blocks("docs/diverging.md", "bash", "te-precision compare --a")
    result = command(*shlex.split(code)[2:])
    assert result.exit_code == 0
    assert "+0.0472 %" in result.output
