"""Aligns the names of two maps: projections that one side fuses, expert layouts, and the paths of blocks.

A name is reduced to *atoms*, the projections of a block that it contains: ``model.layers.3.self_attn.q_proj`` is q of
block 3, ``decoder.layers.3.self_attention.linear_qkv`` is q, k and v. Modules with a common atom are partners. An
alignment file names the partners of other modules::

    names:
      decoder.layers.*.mixer.in_proj: [model.layers.*.mixer.x_proj, model.layers.*.mixer.z_proj]
    allow: ["*.router", lm_head]          # modules that may differ
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from te_precision_callbacks.config.problems import Problems, shown
from te_precision_callbacks.config.yaml_text import read_yaml
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.maps.matching import nearest_names
from te_precision_callbacks.maps.precision_map import MapError

_BLOCK = re.compile(r"(?:^|(?P<tower>.*)\.)(?:layers|h|blocks|layer)\.(?P<block>\d+)\.(?P<rest>.*)")
_EXPERT = re.compile(r"(?:^|\.)experts\.(?:local_experts\.)?(?:(\d+)\.)?")
_GEMM = re.compile(r"\.(?:gemm_|weight)(\d+)$")

_GENERIC = {"model", "module", "decoder", "transformer", "language_model", "base_model", "backbone", "text_model"}
"""Parts of a path above the blocks that distinguish no tower."""

_ATOMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "query", "layernorm_query", "linear_q"), ("q",)),
    **dict.fromkeys(("k_proj", "key"), ("k",)),
    **dict.fromkeys(("v_proj", "value"), ("v",)),
    **dict.fromkeys(("key_value", "linear_kv"), ("k", "v")),
    **dict.fromkeys(("qkv", "qkv_proj", "linear_qkv", "layernorm_qkv", "query_key_value", "c_attn"), ("q", "k", "v")),
    **dict.fromkeys(("gate_proj", "w1"), ("gate",)),
    **dict.fromkeys(("up_proj", "w3"), ("up",)),
    **dict.fromkeys(("gate_up_proj", "linear_fc1", "fc1", "c_fc", "dense_h_to_4h"), ("gate", "up")),
    **dict.fromkeys(("down_proj", "linear_fc2", "fc2", "w2", "dense_4h_to_h"), ("down",)),
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj", "self_attention.linear_proj"), ("o",)),
    **dict.fromkeys(("self_attention.proj", "self_attention.dense", "attn.c_proj"), ("o",)),
    **dict.fromkeys(("mlp.c_proj",), ("down",)),
    **dict.fromkeys(("mlp.gate", "mlp.router", "block_sparse_moe.gate"), ("router",)),
}
"""End of a module's path in a block -> the projections that it contains."""

_OUTSIDE = {
    **dict.fromkeys(("embed_tokens", "word_embeddings", "wte"), "embedding"),
    **dict.fromkeys(("lm_head", "output_layer"), "head"),
}
"""Last part of a name outside of blocks -> what it is."""


class Atom(NamedTuple):
    """A projection. ``expert``: its number; -1 for all experts, empty outside of experts."""

    tower: tuple[str, ...]
    block: int
    kind: str
    projection: str
    expert: int | None = None


class Alignment(NamedTuple):
    """The content of an alignment file: pattern of A -> patterns of B; and patterns of modules that may differ."""

    names: Mapping[str, Sequence[str]] = {}
    allow: Sequence[str] = ()

    def allows(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.allow)


def read_alignment(path: str | os.PathLike[str] | None) -> Alignment:
    """Read an alignment file; raises a MapError, or a ConfigError for a file that is not YAML."""
    if path is None:
        return Alignment()
    twice = Problems()
    data, _ = read_yaml(Path(path).expanduser(), twice, "alignment")
    twice.raise_any()
    if not isinstance(data, Mapping) or not data or set(data) - {"names", "allow"}:
        raise MapError(f"{path}: an alignment file has the keys names and allow, not {shown(data)}.")
    names = data.get("names", {})
    allow = data.get("allow", [])
    if not isinstance(names, Mapping) or not isinstance(allow, list):
        raise MapError(f"{path}: names must be a mapping and allow a list, not {shown(names)} and {shown(allow)}.")
    lists = {str(name): [others] if isinstance(others, str) else others for name, others in names.items()}
    for name, others in lists.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            raise MapError(f"{path}: names.{name} must be a name or a list of names, not {shown(others)}.")
    return Alignment(lists, [str(pattern) for pattern in allow])


def align(a: Iterable[str], b: Iterable[str], given: Alignment) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Return the partners in B of each name in A, and the names without a partner in A and in B.

    Raises:
        MapError: two names of a side are the same projection, or a name of the alignment file does not exist.
    """
    ours = list(a)
    theirs = list(b)
    partners = _given_partners(ours, theirs, given)
    known = {other for others in partners.values() for other in others}
    index = _index([name for name in theirs if name not in known])
    _index([name for name in ours if name not in partners])
    for name in ours:
        if name not in partners:
            found = (index[key] for atom in _atoms(name) for key in _keys(atom, index))
            partners[name] = list(dict.fromkeys(other for others in found for other in others))
    matched = {other for others in partners.values() for other in others}
    alone = [name for name in ours if not partners[name]]
    return {name: found for name, found in partners.items() if found}, alone, [n for n in theirs if n not in matched]


def _given_partners(ours: Sequence[str], theirs: Sequence[str], given: Alignment) -> dict[str, list[str]]:
    existing = set(theirs)
    partners: dict[str, list[str]] = {}
    for pattern, others in given.names.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "([^.]*)"))
        matches = [match for name in ours if (match := expression.fullmatch(name))]
        if not matches:
            raise MapError(
                f"names.{pattern} of the alignment is no name of A.{nearest_names(pattern, fold_names(ours))}"
            )
        for match in matches:
            for other in others:
                parts = iter(match.groups())
                name = re.sub(r"\*", lambda _, parts=parts: next(parts, "*"), other)  # type: ignore[misc]
                if name not in existing:
                    near = nearest_names(other, fold_names(theirs))
                    raise MapError(f"names.{pattern} of the alignment: {name} is no name of B.{near}")
                partners.setdefault(match[0], []).append(name)
    return partners


def _index(names: Iterable[str]) -> dict[Atom, list[str]]:
    """Return atom -> names; raises a MapError if two names are the same projection."""
    index: dict[Atom, list[str]] = {}
    for name in names:
        for atom in _atoms(name):
            index.setdefault(atom, []).append(name)
    twice = next((same for same in index.values() if len(same) > 1), None)
    if twice is not None:
        raise MapError(
            f"{' and '.join(twice)} both look like the same projection, so names cannot be aligned. Name the partner of"
            " each below names in an alignment file (--alignment)."
        )
    return index


def _keys(atom: Atom, index: Mapping[Atom, Any]) -> list[Atom]:
    """Return the keys that stand for an atom: a module with all experts contains each expert, and the reverse."""
    if atom in index:
        return [atom]
    if atom.expert is None:
        return []
    whole = atom._replace(expert=-1)
    if atom.expert >= 0:
        return [whole] if whole in index else []
    return [key for key in index if key.expert is not None and key._replace(expert=-1) == whole]


def _atoms(name: str) -> list[Atom]:
    match = _BLOCK.fullmatch(name)
    if match is None:
        last = name.rpartition(".")[2]
        return [Atom((), -1, "", _OUTSIDE.get(last, name))]
    tower = tuple(part for part in (match["tower"] or "").split(".") if part and part not in _GENERIC)
    block = int(match["block"])
    rest = match["rest"]
    gemm = _GEMM.search(rest)
    rest = _GEMM.sub("", rest)
    kind = ""
    expert: int | None = None
    experts = _EXPERT.search(rest)
    if "shared_expert" in rest:
        kind = "shared"
    elif experts or gemm:
        kind = "experts"
        number = gemm or experts
        expert = int(number[1]) if number and number[1] else -1
    elif "cross_att" in rest or "inter_attention" in rest:
        kind = "cross"
    last = rest.rpartition(".")[2]
    end = ".".join(rest.split(".")[-2:])
    projections = _ATOMS.get(end) or _ATOMS.get(last) or (rest,)
    return [Atom(tower, block, kind, projection, expert) for projection in projections]
