"""The difference of per-token log-probabilities between a trainer and a rollout engine, on the same tokens.

With d = log p_trainer - log p_rollout of tokens that the rollout sampled, two estimates of KL(rollout || trainer) are
the means of -d (k1) and of exp(d) - 1 - d (k3), as in http://joschu.net/blog/kl-approx.html.

    table = read_logprobs("tokens.parquet")
    table.difference(limit=0.1).mean                          # of |d|, in nats
    dict(table.by_position())                                 # "0 to 63" -> the same of these positions
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
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
from te_precision_callbacks.config.problems import shown, suggestion

SAMPLE = "sample"
TOKEN = "token"
SIDES = ("trainer", "rollout")

_LIMIT = 0.1
_BINS = 8
_SUFFIXES = (".parquet", ".jsonl", ".safetensors")


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
        worst: sample and position of the largest difference.
    """

    tokens: int
    mean: float
    largest: float
    probability: float
    k1: float
    k3: float
    beyond: float
    worst: tuple[Any, int]


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of both sides, one row a token.

    Attributes:
        sample: the sample of each token.
        position: its position in the sample.
        columns: the other columns, such as a group or a step.
    """

    source: str
    sample: npt.NDArray[Any]
    position: npt.NDArray[np.int64]
    trainer: npt.NDArray[np.float64]
    rollout: npt.NDArray[np.float64]
    columns: Mapping[str, npt.NDArray[Any]]

    def difference(self, limit: float = _LIMIT, rows: npt.NDArray[Any] | slice = slice(None)) -> TokenDifference:
        """Return the difference of some or all tokens; ``limit``: of |d|, in nats."""
        difference = self.trainer[rows] - self.rollout[rows]
        distance = np.abs(difference)
        worst = int(distance.argmax())
        probability = np.abs(np.exp(self.trainer[rows]) - np.exp(self.rollout[rows]))
        return TokenDifference(
            tokens=len(difference),
            mean=float(distance.mean()),
            largest=float(distance.max()),
            probability=float(probability.mean()),
            k1=float(-difference.mean()),
            k3=float((np.expm1(difference) - difference).mean()),
            beyond=float((distance > limit).mean()),
            worst=(self.sample[rows][worst].item(), int(self.position[rows][worst])),
        )

    def by_position(self, limit: float = _LIMIT) -> Iterator[tuple[str, TokenDifference]]:
        """Yield (first to last position, difference) of up to eight equal ranges of positions."""
        edges = np.unique(np.linspace(0, self.position.max() + 1, _BINS + 1).astype(np.int64))
        for first, end in itertools.pairwise(edges):
            rows = (self.position >= first) & (self.position < end)
            if rows.any():
                yield f"{first} to {end - 1}", self.difference(limit, rows)

    def by(self, column: str, limit: float = _LIMIT) -> Iterator[tuple[str, TokenDifference]]:
        """Yield (value, difference) of each value of a column, such as a group or a step; raises LogProbsError."""
        if column not in self.columns:
            raise LogProbsError(f"{self.source} has no column {column!r}.{suggestion(column, self.columns)}")
        values = self.columns[column]
        for value in np.unique(values):
            yield str(value), self.difference(limit, values == value)


def read_logprobs(path: str | os.PathLike[str], names: Mapping[str, str] | None = None) -> LogProbs:
    """Read a table with the columns ``sample``, ``token``, ``trainer`` and ``rollout``.

    In safetensors, ``trainer`` and ``rollout`` are samples x positions, with an optional ``mask`` of the tokens that
    count. In a table, ``token`` is the position.

    Args:
        names: column -> its name in the file, such as ``{"trainer": "old_log_probs"}``.

    Raises:
        LogProbsError: an unknown format, a missing column or value, tensors of different shapes, or a number that is
            not finite or above 0.
    """
    file = Path(path).expanduser()
    if file.suffix not in _SUFFIXES:
        raise LogProbsError(f"{file}: known formats are {', '.join(_SUFFIXES)}, not {shown(file.suffix)}.")
    given = {name: name for name in (SAMPLE, TOKEN, *SIDES)} | dict(names or {})
    try:
        table = _tensors(file, given) if file.suffix == ".safetensors" else _table(file, given)
    except (OSError, pa.ArrowException) as error:
        raise LogProbsError(f"{file} cannot be read: {error}.") from error
    for side in SIDES:
        values = getattr(table, side)
        wrong = np.flatnonzero(~(np.isfinite(values) & (values <= 0)))
        if len(wrong):
            place = f"sample {shown(table.sample[wrong[0]].item())}, position {table.position[wrong[0]]}"
            raise LogProbsError(
                f"{file}: {len(wrong)} values of {given[side]!r} are no log-probabilities (finite, at most 0), first"
                f" {values[wrong[0]]} at {place}."
            )
    if not len(table.trainer):
        raise LogProbsError(f"{file} has no tokens.")
    return table


def _require(file: Path, known: Any, *names: str) -> None:
    for name in names:
        if name not in known:
            raise LogProbsError(f"{file}: there is no {name!r}.{suggestion(name, known)} Rename columns with --column.")


def _tensors(file: Path, given: Mapping[str, str]) -> LogProbs:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(regular_file(file))
    except SafetensorError as error:
        raise LogProbsError(f"{file} cannot be read: {error}.") from error
    _require(file, tensors, *(given[side] for side in SIDES))
    trainer, rollout = (tensors[given[side]].double().numpy() for side in SIDES)
    mask = tensors["mask"].bool().numpy() if "mask" in tensors else np.ones(trainer.shape, bool)
    if trainer.ndim != 2 or not trainer.shape == rollout.shape == mask.shape:
        shapes = f"{list(trainer.shape)}, {list(rollout.shape)} and {list(mask.shape)}"
        raise LogProbsError(f"{file}: trainer, rollout and mask must be equal samples x positions, not {shapes}.")
    sample, position = np.nonzero(mask)
    return LogProbs(str(file), sample, position, trainer[mask], rollout[mask], {})


def _table(file: Path, given: Mapping[str, str]) -> LogProbs:
    read = pyarrow.parquet.read_table if file.suffix == ".parquet" else pyarrow.json.read_json
    table: pa.Table = read(regular_file(file))
    _require(file, table.column_names, *given.values())
    for name in (given[TOKEN], *(given[side] for side in SIDES)):
        if not (pa.types.is_floating(table[name].type) or pa.types.is_integer(table[name].type)):
            raise LogProbsError(f"{file}: {name!r} must hold numbers, not {table[name].type}.")
    columns = {name: _column(file, table, name) for name in table.column_names}
    trainer, rollout = (columns[given[side]].astype(np.float64) for side in SIDES)
    position = columns[given[TOKEN]].astype(np.int64)
    return LogProbs(str(file), columns[given[SAMPLE]], position, trainer, rollout, columns)


def _column(file: Path, table: pa.Table, name: str) -> npt.NDArray[Any]:
    column = table[name]
    if column.null_count:
        raise LogProbsError(f"{file}: {column.null_count} of {len(column)} rows have no {name!r}.")
    return np.asarray(column.to_pylist())
