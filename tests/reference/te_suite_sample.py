"""A pytest plugin: runs a share of the collected tests, drawn with a fixed seed. For ``te_suite.py``.

Usage::

    pytest -p te_suite_sample --sample=0.1 test_file.py
"""

import math
import random

import pytest

SEED = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=float, default=1.0, help="the share of the tests that runs, of 1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = math.ceil(len(items) * config.getoption("--sample"))
    drawn = {item.nodeid for item in random.Random(SEED).sample(sorted(items, key=lambda item: item.nodeid), count)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in drawn])
    items[:] = [item for item in items if item.nodeid in drawn]
