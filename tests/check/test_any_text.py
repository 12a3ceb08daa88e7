"""Whatever a config or a contract holds, loading it gives a config or our error, and takes little time."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from te_precision_callbacks.config import Config, ConfigError, load_config
from te_precision_callbacks.config.contract import Contract, read_contract
from tests.check.test_faults import CONFIGS, WORD
from tests.properties import examples

CONTRACTS = (
    "precision_contract:\n  share: {fp8: 90, fp8 wgrad: 85}\n  layers: {.*mlp.*: mxfp8}\n"
    "  state: {optimizer: float32}\n  by_step: 3\n  on_broken: warn\n",
    "precision_contract:\n  share: [fp8 >= 95%, fp32 < 5%]\n",
)

WORDS = sorted({word for text in (*CONFIGS, *CONTRACTS) for word in WORD.findall(text)})

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([10**30, -(10**30), math.nan, math.inf, -0.0, 1e-320, 0.5]),
    st.text(max_size=6),
    st.sampled_from(WORDS),
    st.sampled_from(["0-3", "3-0", "(", "[a-", "*", "1,2", "fp8 >= 95%", "fp8 >", ">= 3", "100 GB", "1e9 KiB"]),
    st.binary(max_size=3),
    st.dates(),
)

VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.integers(0, 3), st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=6,
)
"""What can stand in a mapping."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a tree."""
    yield path
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in parts:
        yield from places(value, (*path, key))


@st.composite
def changed(draw: st.DrawFn, texts: tuple[str, ...]) -> Any:
    """One of these documents, in which one or two values are others, or stand under another key."""
    tree = copy.deepcopy(yaml.safe_load(draw(st.sampled_from(texts))))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(tree))))
        if not path:
            return draw(VALUES)
        owner = tree
        for key in path[:-1]:
            owner = owner[key]
        if isinstance(owner, dict) and draw(st.booleans()):
            owner[draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)))] = owner.pop(path[-1])
        else:
            owner[path[-1]] = draw(VALUES)
    return tree


@st.composite
def garbled(draw: st.DrawFn, texts: tuple[str, ...]) -> str:
    """The text of one of these documents, in which a part is left out, doubled or written over."""
    text = draw(st.sampled_from(texts))
    start = draw(st.integers(0, len(text)))
    end = min(len(text), start + draw(st.integers(0, 12)))
    marks = st.text(alphabet="{}[]:,&*!|>-?#%@`'\"\\ \t\n\0\x85\ufeffa0=<", max_size=6)
    put = draw(st.one_of(marks, st.text(max_size=4), st.sampled_from([*WORDS, text[start:end] * 2])))
    return text[:start] + put + text[end:]


def loads(source: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(source), Config)


def reads(source: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read_contract(source), Contract | None)


@given(source=st.one_of(changed(tuple(CONFIGS)), st.dictionaries(st.text(max_size=3), VALUES, max_size=3)))
@examples(100)
def test_any_mapping(source: Any) -> None:
    loads(source if isinstance(source, dict) else {"section": source})


@given(text=st.one_of(garbled(tuple(CONFIGS)), garbled(CONTRACTS), st.text(max_size=40)))
@examples(150)
def test_any_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    loads(path)
    reads(path)


@given(content=st.binary(max_size=60))
@examples(60)
def test_any_bytes(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "bytes.yaml"
    path.write_bytes(content)
    loads(path)
    reads(path)
