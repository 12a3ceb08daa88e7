"""The matrix products of a recorded run.

for row, product in recorded_products(run.gemms, run.operands):
    print(product.layer, product.precision, row["since"], row["until"])
print(*other_steps_of_run(run))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from te_precision_callbacks.coverage.coverage import Product, Reason
from te_precision_callbacks.coverage.other_steps import ProductSpan, in_lines, other_steps
from te_precision_callbacks.runs.recorded import RecordedRun


def recorded_products(gemms: pa.Table, operands: pa.Table) -> Iterator[tuple[Mapping[str, Any], Product]]:
    """The products of rows of ``run.gemms`` and ``run.operands``. With several scopes, the names of layers include the
    scope."""
    formats: dict[int, dict[str, str]] = defaultdict(dict)
    for row in operands.to_pylist():
        formats[row["gemm_id"]][row["tensor"]] = row["format"] or ""
    rows = gemms.to_pylist()
    has_scopes = len({row["scope"] or "" for row in rows if row["macs"]}) > 1
    for row in rows:
        name = f"{row['scope']}: {row['layer']}" if has_scopes and row["scope"] else row["layer"]
        yield row, _product(row, name, formats.get(row["gemm_id"], {}))


def other_steps_of_run(run: RecordedRun) -> list[str]:
    if run.gemms["until"].null_count == run.gemms.num_rows:
        return []  # as of most runs, of which thousands of products need not be gone through
    products = recorded_products(run.gemms, run.operands)
    return in_lines(
        other_steps(
            ProductSpan(product, row["order"] or 0, None, row["since"] or 0, row["until"]) for row, product in products
        )
    )


def _product(row: Mapping[str, Any], name: str, operands: Mapping[str, str]) -> Product:
    reason = row["reason"]
    return Product(
        name,
        row["family"] or "functional",
        row["gemm"],
        bool(row["backward"]),
        row["n"] or 0,
        row["m"] or 0,
        row["k"] or 0,
        row["batch"] or 1,
        row["calls"] or 0,
        row["macs"] or 0,
        operands,
        row["runs"] or "seen",
        row["not_run"] or "",
        Reason[reason] if reason in Reason.__members__ else Reason.UNKNOWN if reason else None,
        row["reason_ref"] or "",
        row["mask_share"],
    )
