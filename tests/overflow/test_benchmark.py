"""The benchmark runs, and its JSON says what its readers rely on. No time is asserted: machines differ."""

from __future__ import annotations

import pytest

from tests.test_benchmarks import cases_of


def test_overflow() -> None:
    sizes = {"layers": 1, "hidden": 64, "sequence": 16, "batch": 1}
    cases = cases_of("overflow.py", *(f"--{name}={size}" for name, size in sizes.items()), "--repeats=1")
    assert list(cases) == ["float32", "bfloat16"]
    for case in cases.values():
        for way in ("ours", "forward", "upstream"):
            assert case[f"{way}_ms"] > 0
            added = 100 * (case[f"{way}_ms"] / case["none_ms"] - 1)
            assert case[f"{way}_added_percent"] == pytest.approx(added)
        assert case["ours_host_waits"] == case["forward_host_waits"] == 1
        assert case["upstream_host_waits"] > 100
        assert sizes.items() <= case.items()
        assert "torch" in case["machine"]
