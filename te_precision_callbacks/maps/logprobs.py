"""The difference of per-token log-probabilities between a trainer and a rollout engine, on the same tokens.

With d = log p_trainer - log p_rollout of tokens that the rollout sampled, two estimates of KL(rollout || trainer) are
the means of -d (k1) and of exp(d) - 1 - d (k3), as in http://joschu.net/blog/kl-approx.html.

    table = read_logprobs("tokens.parquet")
    table.difference(limit=0.1).mean                          # of |d|, in nats
    table.by("token")                                         # "0 to 63" -> the same of these positions
    table.by("group")                                         # value of a column -> the same
    table.curves()                                            # over the column step, for the page of a run
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.base.suggestions import shown, suggestion
from te_precision_callbacks.runs.recorded import Curve

TOKEN = "token"
SIDES = ("trainer", "rollout")

_NEEDED = ("sample", TOKEN, *SIDES)
_TYPES = {TOKEN: pa.uint32(), "step": pa.uint32(), "trainer": pa.float64(), "rollout": pa.float64()}

_CURVES = {"mean": "mean |d|", "largest": "max |d|", "probability": "mean |dp|", "k1": "KL (k1)", "k3": "KL (k3)"}

_LIMIT = 0.1
_BINS = 8


class LogProbsError(PrecisionDebugError, ValueError):
    """A table of log-probabilities cannot be read."""


@dataclass(frozen=True)
class TokenDifference:
    """The difference of some tokens, in nats.

    Attributes:
        tokens: their number.
        mean, largest: of the absolute difference.
        probability: the mean absolute difference of the probabilities.
        k1, k3: the estimates of the KL divergence.
        beyond: the share of tokens whose absolute difference is above the limit.
    """

    tokens: int
    mean: float
    largest: float
    probability: float
    k1: float
    k3: float
    beyond: float


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of both sides, one row a token: ``sample``, ``token`` (the position), ``trainer``, ``rollout``
    and other columns, such as a group or a step."""

    source: str
    columns: Mapping[str, npt.NDArray[Any]]

    def difference(self, limit: float = _LIMIT, rows: npt.NDArray[Any] | slice = slice(None)) -> TokenDifference:
        """Return the difference of some or all tokens; ``limit``: of |d|, in nats."""
        trainer = self.columns["trainer"][rows]
        rollout = self.columns["rollout"][rows]
        difference = trainer - rollout
        distance = np.abs(difference)
        return TokenDifference(
            tokens=len(difference),
            mean=float(distance.mean()),
            largest=float(distance.max()),
            probability=float(np.abs(np.exp(trainer) - np.exp(rollout)).mean()),
            k1=float((rollout - trainer).mean()),
            k3=float((np.expm1(difference) - difference).mean()),
            beyond=float((distance > limit).mean()),
        )

    def by(self, column: str, limit: float = _LIMIT) -> dict[str, TokenDifference]:
        """Return value -> difference of a column; of ``token``, up to eight ranges. Raises LogProbsError."""
        values = self._column(column)
        if column != TOKEN:
            return {str(value): self.difference(limit, values == value) for value in np.unique(values)}
        ranges = {}
        width = int(values.max()) // _BINS + 1
        for first in range(0, int(values.max()) + 1, width):
            rows = values // width == first // width
            if rows.any():
                ranges[f"{first} to {first + width - 1}"] = self.difference(limit, rows)
        return ranges

    def curves(self) -> dict[str, Curve]:
        """Return name -> values over the column ``step``; raises LogProbsError without it."""
        values = self._column("step")
        steps = np.unique(values).astype(np.int64)
        rows = [self.difference(rows=values == step) for step in steps]
        curves = {}
        for name, label in _CURVES.items():
            column = np.array([getattr(row, name) for row in rows])
            curves[f"log-probabilities, {label}"] = Curve(steps, column)
        return curves

    def _column(self, name: str) -> npt.NDArray[Any]:
        if name not in self.columns:
            raise LogProbsError(
                f"{self.source} has no column {name!r} of plain values.{suggestion(name, self.columns)}"
            )
        return self.columns[name]


def read_logprobs(path: str | os.PathLike[str]) -> LogProbs:
    """Read a table of Parquet or JSON lines with the columns ``sample``, ``token``, ``trainer`` and ``rollout``.

    In safetensors, ``trainer`` and ``rollout`` are samples x positions, with an optional ``mask`` of the tokens that
    count.

    Other columns are kept, except with lists or missing values.

    Raises:
        LogProbsError: an unknown format, a missing column or value, tensors of different shapes, or a number that is
            not finite or above 0.
    """
    file = Path(path).expanduser()
    readers = {".parquet": pa.parquet.read_table, ".jsonl": pa.json.read_json, ".safetensors": _tensors}
    if file.suffix not in readers:
        raise LogProbsError(f"{file}: known formats are {', '.join(readers)}, not {shown(file.suffix)}.")
    try:
        table = readers[file.suffix](regular_file(file))
    except (OSError, pa.ArrowException) as error:
        raise LogProbsError(f"{file} cannot be read: {error}.") from error
    for name in _NEEDED:
        if name not in table.column_names:
            raise LogProbsError(f"{file}: there is no {name!r}.{suggestion(name, table.column_names)}")
    if not table.num_rows:
        raise LogProbsError(f"{file} has no tokens.")
    columns = {}
    for name in table.column_names:
        column = table[name]
        if name not in (*_NEEDED, *_TYPES) and (column.null_count or pa.types.is_nested(column.type)):
            continue
        if column.null_count:
            raise LogProbsError(f"{file}: {column.null_count} of {table.num_rows} rows have no {name!r}.")
        try:
            columns[name] = np.asarray(column.cast(_TYPES.get(name, column.type)).to_pylist())
        except pa.ArrowException as error:
            raise LogProbsError(f"{file}: {name!r} cannot be read: {error}.") from error
    for side in SIDES:
        wrong = np.flatnonzero(~(np.isfinite(columns[side]) & (columns[side] <= 0)))
        if len(wrong):
            row = table.slice(wrong[0], 1).to_pylist()[0]
            raise LogProbsError(
                f"{file}: {len(wrong)} values of {side!r} are no log-probabilities (finite, at most 0), first"
                f" {row[side]} at sample {shown(row['sample'])}, position {row[TOKEN]}."
            )
    return LogProbs(str(file), columns)


def _tensors(file: Path) -> pa.Table:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise LogProbsError(f"{file} cannot be read: {error}.") from error
    for side in SIDES:
        if side not in tensors:
            raise LogProbsError(f"{file}: there is no {side!r}.{suggestion(side, tensors)}")
    shape = tensors["trainer"].shape
    mask = tensors.get("mask", torch.ones(shape)).bool()
    if len(shape) != 2 or not shape == tensors["rollout"].shape == mask.shape:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise LogProbsError(f"{file}: trainer, rollout and mask must be equal samples x positions, not {shapes}.")
    sample, position = mask.nonzero(as_tuple=True)
    sides = {side: tensors[side][mask].double().numpy() for side in SIDES}
    return pa.table({"sample": sample.numpy(), TOKEN: position.numpy(), **sides})
