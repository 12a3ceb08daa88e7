"""The benchmark runs, and its JSON says what its readers rely on. No time is asserted: machines differ."""

from __future__ import annotations

import pytest

from tests.test_benchmarks import SHORTEST, cases_of


@pytest.mark.processes
def test_overflow() -> None:
    sizes = {"layers": 1, "hidden": 64, "sequence": 16, "batch": 1}
    cases = cases_of("overflow.py", *(f"--{name}={size}" for name, size in sizes.items()), *SHORTEST)
    assert list(cases) == ["float32", "bfloat16"]
    for case in cases.values():
        for way in ("ours", "upstream"):
            added = case[f"{way}_added_percent"]
            assert -100 < added["low"] == added["value"] == added["high"], "one pair"
        assert case["claim"].startswith("3 %: ")
        assert case["ours_host_waits"] == 1
        assert case["upstream_host_waits"] > 100
        assert sizes.items() <= case.items()
        assert "torch" in case["machine"]
