"""Blackwell, which has every recipe."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def blackwell() -> Iterator[None]:
    from tests.capability import any_capability, stand_for

    with any_capability():
        stand_for((10, 0))
        yield
