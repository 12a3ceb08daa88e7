"""Per-token log-probabilities of a trainer and a rollout engine."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from te_precision_callbacks.maps import LogProbsError, read_logprobs
from tests.manual.test_command import one_line
from tests.maps.test_command import command
from tests.maps.test_command import folder as folder

SAMPLES, LENGTH, WORDS = 16, 32, 8


def sampled(seed: int = 0, noise: float = 0.2) -> tuple[dict[str, npt.NDArray[Any]], float]:
    """Tokens sampled from random distributions, and the mean of the exact KL(rollout || trainer) over the positions."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(SAMPLES * LENGTH, WORDS))
    rollout = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    moved = logits + noise * random.normal(size=logits.shape)
    trainer = moved - np.log(np.exp(moved).sum(1, keepdims=True))
    exact = float((np.exp(rollout) * (rollout - trainer)).sum(1).mean())
    tokens = np.array([random.choice(WORDS, p=np.exp(row)) for row in rollout])
    rows = np.arange(len(tokens))
    table = {
        "sample": rows // LENGTH,
        "token": rows % LENGTH,
        "trainer": trainer[rows, tokens],
        "rollout": rollout[rows, tokens],
        "group": np.array(["easy", "hard"])[rows % 2],
    }
    return table, exact


def written(folder: Path, table: Mapping[str, npt.NDArray[Any]], name: str = "tokens.parquet") -> Path:
    path = folder / name
    rows = pa.table(dict(table))
    if path.suffix == ".parquet":
        pq.write_table(rows, path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows.to_pylist()))
    return path


def test_differences_of_logprobs_equal_their_definitions(tmp_path: Path) -> None:
    table, exact = sampled()
    result = read_logprobs(written(tmp_path, table)).difference(limit=0.3)
    apart = [ours - theirs for ours, theirs in zip(table["trainer"].tolist(), table["rollout"].tolist(), strict=True)]
    count = SAMPLES * LENGTH
    assert result.tokens == count
    assert result.mean == pytest.approx(math.fsum(map(abs, apart)) / count)
    assert result.largest == max(map(abs, apart))
    assert result.k1 == pytest.approx(-math.fsum(apart) / count)
    assert result.k3 == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in apart) / count)
    assert result.beyond == sum(abs(d) > 0.3 for d in apart) / count
    assert result.k3 == pytest.approx(exact, rel=0.2), "the estimate with the small variance is near the exact value"


def test_by_position_and_by_group(tmp_path: Path) -> None:
    table, _ = sampled()
    table["trainer"] = np.where(table["token"] >= 24, table["rollout"] - 1.0, table["rollout"])
    read = read_logprobs(written(tmp_path, table))
    means = {label: part.mean for label, part in read.by("token").items()}
    assert list(means) == [f"{first} to {first + 3}" for first in range(0, LENGTH, 4)]
    assert [round(mean, 6) for mean in means.values()] == [0] * 6 + [1] * 2
    groups = read.by("group")
    assert {name: part.tokens for name, part in groups.items()} == {"easy": 256, "hard": 256}
    with pytest.raises(LogProbsError, match=r"has no column 'grop' of plain values\. Did you mean 'group'"):
        read.by("grop")


def test_columns_of_other_kinds_do_not_matter(tmp_path: Path) -> None:
    table = {"sample": ["a", "a"], "token": [0.0, 1.0], "trainer": [-1.0, -1.0], "rollout": [-1.0, -2.0]}
    others = {"ids": [[1], [1, 2]], "reward": [None, 1.0], "group": ["x", "y"]}
    pq.write_table(pa.table({**table, **others}), tmp_path / "t.parquet")
    read = read_logprobs(tmp_path / "t.parquet")
    assert set(read.columns) == {*table, "group"}
    assert {value: part.mean for value, part in read.by("group").items()} == {"x": 0.0, "y": 1.0}
    with pytest.raises(LogProbsError, match="has no column 'reward' of plain values"):
        read.by("reward")


def test_every_format_is_the_same_table(tmp_path: Path) -> None:
    table, _ = sampled()
    expected = read_logprobs(written(tmp_path, table)).difference()
    assert read_logprobs(written(tmp_path, table, "tokens.jsonl")).difference() == expected
    sides = {side: table[side].reshape(SAMPLES, LENGTH) for side in ("trainer", "rollout")}
    save_file({side: torch.from_numpy(values) for side, values in sides.items()}, tmp_path / "a.safetensors")
    assert read_logprobs(tmp_path / "a.safetensors").difference() == expected
    mask = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    mask[3, 5:] = True
    tensors = {side: torch.from_numpy(values) for side, values in sides.items()} | {"mask": mask}
    save_file(tensors, tmp_path / "b.safetensors")
    masked = read_logprobs(tmp_path / "b.safetensors")
    assert masked.columns["sample"].tolist() == [3] * (LENGTH - 5)
    assert masked.columns["token"].tolist() == [*range(5, LENGTH)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer": None}, "there is no 'trainer'"),
        ({"trainer": [-1.0, float("nan")]}, "1 values of 'trainer' .* first nan at sample 0, position 1"),
        ({"rollout": [0.5, -1.0]}, r"first 0.5 at sample 0, position 0"),
        ({"rollout": [None, -1.0]}, "1 of 2 rows have no 'rollout'"),
        ({"trainer": [[-1.0], [-1.0]]}, "'trainer' cannot be read: .* from list"),
        ({"token": ["a", "b"]}, "'token' cannot be read: Failed to parse string"),
        ({"token": [0.5, 1.0]}, "'token' cannot be read: .* 0.5"),
        ({"token": [-1, 1]}, "'token' cannot be read: .* -1"),
        ({"step": [1.0, float("nan")]}, "'step' cannot be read: .* nan"),
        ({"token": None}, "there is no 'token'"),
    ],
)
def test_wrong_tables(tmp_path: Path, changed: Mapping[str, Any], message: str) -> None:
    table = {"sample": [0, 0], "token": [0, 1], "trainer": [-1.0, -1.0], "rollout": [-1.0, -1.0], **changed}
    pq.write_table(
        pa.table({name: column for name, column in table.items() if column is not None}), tmp_path / "t.parquet"
    )
    with pytest.raises(LogProbsError, match=message):
        read_logprobs(tmp_path / "t.parquet")


def test_wrong_files(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.csv", b"", "known formats are .parquet, .jsonl, .safetensors"),
        ("a.parquet", b"damaged", "cannot be read"),
        ("a.safetensors", b"damaged", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LogProbsError, match=message):
            read_logprobs(tmp_path / name)
    with pytest.raises(LogProbsError, match="cannot be read"):
        read_logprobs(tmp_path / "none.parquet")
    save_file({"trainer": torch.zeros(2, 3), "rollout": torch.zeros(2, 4)}, tmp_path / "b.safetensors")
    with pytest.raises(LogProbsError, match=r"must be equal samples x positions, not .*\[2, 4\].*\[2, 3\]"):
        read_logprobs(tmp_path / "b.safetensors")


def test_the_command(folder: Path) -> None:
    table, _ = sampled()
    written(folder, table)
    written(folder, sampled(noise=0.02)[0], "bf16.parquet")
    text = one_line(command("logprobs tokens.parquet --noise bf16.parquet --by group --limit 0.3"))
    assert "all 512" in text
    assert "verl, pull request 7519" in text
    data = json.loads(command("logprobs tokens.parquet --noise bf16.parquet --by group --json"))
    assert 5 < data["all"]["mean"] / data["noise floor"]["mean"] < 20, "ten times the noise"
    assert set(data["by"]) == {"token", "group"}
    assert "Without --noise" in one_line(command("logprobs tokens.parquet"))
    assert "greater than or equal to 0" in one_line(command("logprobs tokens.parquet --limit=-1", 2))
