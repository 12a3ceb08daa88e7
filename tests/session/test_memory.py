"""Host memory stays flat over a long run; upstream's grows with every step."""

import gc
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import nvdlfw_inspect.logging as inspect_logging
import pytest
import torch
import transformer_engine.pytorch as te
from nvdlfw_inspect.registry import Registry
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.sinks.writer_thread import WriterThread
from tests.conftest import feature, statistics
from tests.training import train

SIZE = 16
EVERY = 5

CONFIG: dict[str, Any] = {
    **statistics(layers=["0", "1"], tensors=["activation", "gradient", "weight"]),
    "fp8": feature("LogFp8TensorStats", ["2", "3"], tensors=["activation"], stats=["underflows%"]),
    "fake": feature("FakeQuant", ["4"], gemms=["fprop"], tensors=["activation", "weight"], quant_format="FP8E4M3"),
    "scaling": feature("PerTensorScaling", ["5"], gemms=["fprop"], tensors=["activation", "weight"]),
    "disabled": feature("DisableQuantizationGEMM", ["6", "7"], gemms=["dgrad"]),
}


def sizes() -> tuple[int, int]:
    """Blocks of memory that Python has allocated, and entries and bytes of nvidia-dlfw-inspect's caches."""
    gc.collect()
    caches = [data.api._api_cache for data in Registry.data.values()]
    caches += [inspect_logging.LOGGER.logged_api_executed, inspect_logging.LOGGER.logged_api_encountered]
    in_caches = sum(sys.getsizeof(cache) + sum(sys.getsizeof(key) for key in cache) for cache in caches)
    return sys.getallocatedblocks(), in_caches


def growth(
    session: InspectSession, net: torch.nn.Module, settle: Callable[[], None], first: int, window: int
) -> tuple[int, int]:
    """By how many blocks Python's memory, and by how many bytes the caches grow in a window of steps.

    Python's memory goes up and down by some 50 blocks: of each window the least counts. What is made once, such as a
    module that another thread imports, takes more: the lesser of two growths counts.
    """
    x = torch.randn(SIZE, SIZE)
    windows: list[list[tuple[int, int]]] = [[], [], []]
    gc.collect()
    gc.freeze()  # a collection goes through the objects that come now, not through those of all tests before
    try:
        for count in range(first + 3 * window):
            train(session, net, 1, x=x, recipe=DelayedScaling())
            net.zero_grad()
            if count >= first and count % EVERY == 0:
                settle()
                windows[(count - first) // window].append(sizes())
    finally:
        gc.unfreeze()
    least = [tuple(map(min, zip(*readings, strict=True))) for readings in windows]
    blocks, caches = (min(later - before for before, later in pairwise(column)) for column in zip(*least, strict=True))
    return blocks, caches


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    net = torch.nn.Sequential(*(te.Linear(SIZE, SIZE) for _ in range(8)))
    with InspectSession(CONFIG, model=net, log_dir=tmp_path) as session:
        session.step()
        writers: list[WriterThread] = [item for item in gc.get_objects() if issubclass(type(item), WriterThread)]

        def settle() -> None:
            """A step waits in memory until the threads have written it: on a machine that is busy, for long.

            A thread starts with its first job: that of the statistics log after the first collected step.
            """
            running = [writer for writer in writers if writer._thread is not None and writer._thread.is_alive()]
            assert any(writer._what == "statistics log" for writer in running)
            for is_written in [writer.hurry() for writer in running]:
                while not is_written():
                    time.sleep(0.001)

        blocks, caches = growth(session, net, settle, first=30, window=40)
    assert blocks < 160, "four in a step; without a leak some 30 come and go"
    assert caches < 14_000
