"""Arrow arrays that are made without pandas are those of pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from te_precision_callbacks.runs.arrays import arrow_array

NAMES = pa.list_(pa.string())
TIME = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, 3], pa.int64()),
        ([None, None], pa.int32()),
        ([1.5, None, float("nan")], pa.float64()),
        ([1_700_000_000_000_000, None], TIME),
        ([True, None, False] * 7, pa.bool_()),
        (["a", None, "", "\u00f6x"], pa.string()),
        ([["a", "b"], None, [], [None, "c"]], NAMES),
        (np.arange(6, dtype=np.int32)[::2], pa.int32()),
        (np.arange(3), pa.int16()),
        *(([], kind) for kind in (pa.uint8(), pa.string(), pa.bool_(), NAMES, TIME)),
    ],
    ids=str,
)
def test_as_of_pyarrow(values: Sequence[Any], kind: pa.DataType) -> None:
    found = arrow_array(values, kind)
    found.validate(full=True)
    expected = pa.array(values, kind)
    # as text, since nan is not equal to itself
    assert (str(found), found.type, found.null_count) == (str(expected), expected.type, expected.null_count)
