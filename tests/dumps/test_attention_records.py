"""Records of attention: what a session writes, against attention in float64 of what is in the record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.dumps import Dump, load
from te_precision_callbacks.dumps.contents import operand_of
from te_precision_callbacks.dumps.dump_files import write
from te_precision_callbacks.dumps.errors import LaterVersionError, NotADumpError
from te_precision_callbacks.dumps.header import Header
from tests.capability import any_capability
from tests.dumps.attentions import HEADS, train


@pytest.fixture(autouse=True)
def any_gpu() -> Iterator[None]:
    with any_capability():
        yield


def decoded(dump: Dump, name: str) -> torch.Tensor:
    found = operand_of(dump, name)
    return (found.dequantized() if isinstance(found, Stored) else found).double()


def in_float64(dump: Dump, lengths: list[int]) -> dict[str, torch.Tensor]:
    """The output, or the gradients by torch's autograd, of causal attention: [batch, heads, tokens, size]. Sequences of
    these lengths follow one another in a batch."""
    q, k, v = (decoded(dump, name).requires_grad_() for name in ("query", "key", "value"))
    outs = []
    for queries, keys, values in zip(*(each.split(lengths, 2) for each in (q, k, v)), strict=True):
        keys, values = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (keys, values))
        scores = queries @ keys.mT / math.sqrt(q.shape[3])
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        outs.append(torch.softmax(scores, -1) @ values)
    out = torch.cat(outs, 2)
    if dump.header.tensor == "attention_forward":
        return {"output": out.detach()}
    found = torch.autograd.grad(out, (q, k, v), decoded(dump, "gradient"))
    return dict(zip(("query_gradient", "key_gradient", "value_gradient"), found, strict=True))


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "unfused, sbhd": ({}, 0.01),
    "unfused, bshd, few heads of keys": ({"form": "bshd", "keys": 2}, 0.01),
    "unfused, thd": ({"form": "thd", "mask": "padding_causal"}, 0.01),
    "current": ({"recipe": "current"}, 0.08),
    "delayed, few heads of keys": ({"recipe": "delayed", "keys": 2}, 0.3),
    "mxfp8": ({"recipe": "mxfp8", "gemms": ["fprop"]}, 0.05),
}
"""The error of the kernel; the first scale of delayed scaling is 1, and makes much of S 0."""


@pytest.mark.parametrize("case", CASES)
def test_the_operands_give_the_results(tmp_path: Path, case: str) -> None:
    options, most = CASES[case]
    files = train(tmp_path, **options)
    backward = ["core.attention_backward.safetensors"] if "recipe" in options and "gemms" not in options else []
    assert [file.name for file in files] == ["core.attention_forward.safetensors", *backward]
    for file in files:
        dump = load(file)
        what = dump.header.attention
        assert what is not None
        packed = what.layout.startswith("thd")
        exact = in_float64(dump, dump.tensors["lengths_q"].diff().tolist() if packed else [what.longest[0]])
        assert set(exact) == set(what.results)
        for name, expected in exact.items():
            assert float((decoded(dump, name) - expected).norm() / expected.norm()) < most
        assert what.scale == pytest.approx(decoded(dump, "query").shape[3] ** -0.5)
        assert what.why_not == ""
        assert what.kernel == ("unfused" if "recipe" not in options else "fused, FP8")
        assert ("softmax_stats" in dump.tensors) != ("softmax_stats" in what.absent)
        for name in ("query", "key", "value"):
            assert (f"{name}.high_precision" in dump.tensors) == (file is files[0] and "recipe" in options)
        if "recipe" in options and "mxfp8" not in case:
            assert what.probabilities.numbers == "E4M3"
            assert dump.tensors["probabilities.scale"].shape == (1,)


def test_what_is_absent_is_said(tmp_path: Path) -> None:
    (file,) = train(tmp_path, dropout=0.1)
    what = load(file).header.attention
    assert what is not None
    assert "dropout" in what.why_not
    assert set(what.absent) == {"softmax_stats", "dropout_mask", "backward"}


@pytest.mark.parametrize(("condition", "written"), [("gemm_kernel_ratio > 2", 0), ("gemm_format_error > 0.01", 2)])
def test_conditions_on_the_output_hold_for_both_passes(tmp_path: Path, condition: str, written: int) -> None:
    assert len(train(tmp_path, "current", when=condition, measures=True)) == written


def test_what_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"measure the GEMM of 'output' in the layer 'core'\. Add LogGemmError"):
        train(tmp_path, when="gemm_kernel_ratio > 2")
    with pytest.raises(ConfigError, match="DumpTensors does not look"):
        train(tmp_path, attention=False)
    assert train(tmp_path, when="nonfinite") == []
    assert train(tmp_path, start_step=1) == []


def test_a_budget_holds_for_attention(tmp_path: Path) -> None:
    assert train(tmp_path, max_bytes=1000) == []


def test_what_is_no_record(tmp_path: Path) -> None:
    (file,) = train(tmp_path)
    dump = load(file)
    text = json.loads(dump.header.to_json())
    text["attention"]["version"] = 99
    with pytest.raises(LaterVersionError, match="record of attention has the version 99"):
        Header.from_json(json.dumps(text))
    for broken, message in (
        ({name: each for name, each in dump.tensors.items() if name != "key.values"}, "has no 'key.values'"),
        ({**dump.tensors, "key.values": dump.tensors["key.values"][:, : HEADS - 1]}, "'key.values' is bfloat16"),
    ):
        write(dataclasses.replace(dump, tensors=broken), tmp_path / "broken.safetensors")
        with pytest.raises(NotADumpError, match=message):
            load(tmp_path / "broken.safetensors")
        (tmp_path / "broken.safetensors").unlink()
