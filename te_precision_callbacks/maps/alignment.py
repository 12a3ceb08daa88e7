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
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain, product, starmap
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from te_precision_callbacks.maps.precision_map import MapError, nearest_names, read_file, validated

_BLOCK = re.compile(r"(?:^|(?P<tower>.*)\.)(?:layers|h|blocks|layer)\.(?P<block>\d+)\.(?P<rest>.*)")
_EXPERT = re.compile(r"(?:^|\.)experts\.(?:local_experts\.)?(?:(\d+)\.)?")
_GEMM = re.compile(r"\.(?:gemm_|weight)(\d+)$")

_WRAPPER = re.compile(r"^base_model\.model\.|\.(base_layer|to_wrap)\b")
"""Part of a name that PEFT, NeMo and Megatron-Bridge add for LoRA."""

_GENERIC = {"model", "module", "decoder", "transformer", "language_model", "base_model", "backbone", "text_model"}
"""Parts of a path above the blocks that distinguish no tower."""

_PROJECTIONS = {
    "q": "q_proj query layernorm_query linear_q linear_q_proj",
    "k": "k_proj key",
    "v": "v_proj value",
    "k v": "key_value linear_kv",
    "q k v": "qkv qkv_proj linear_qkv layernorm_qkv query_key_value c_attn",
    "q_a": "q_a_proj linear_q_down_proj",  # Megatron-Core 0.16.1's MLA
    "q_b": "q_b_proj linear_q_up_proj",
    "kv_a": "kv_a_proj_with_mqa linear_kv_down_proj",
    "kv_b": "kv_b_proj linear_kv_up_proj",
    "q_a kv_a": "fused_qkv_a_proj",
    "gate": "gate_proj w1",
    "up": "up_proj w3",
    "gate up": "gate_up_proj linear_fc1 fc1 c_fc dense_h_to_4h",
    "down": "down_proj linear_fc2 fc2 w2 dense_4h_to_h mlp.c_proj",
    "o": "self_attn.o_proj self_attn.out_proj self_attention.linear_proj self_attention.proj self_attention.dense"
    " attn.c_proj",
    "router": "mlp.gate mlp.router block_sparse_moe.gate",
}
"""Projections -> ends of the paths, in a block, of modules that contain them."""

_ATOMS = {end: projections.split() for projections, ends in _PROJECTIONS.items() for end in ends.split()}

_OUTSIDE = {
    "embed_tokens": "embedding",
    "word_embeddings": "embedding",
    "wte": "embedding",
    "lm_head": "head",
    "output_layer": "head",
}
"""Last part of a name outside of blocks -> what it is."""

_KINDS = {"shared_expert": "shared", "cross_att": "cross", "inter_attention": "cross"}
"""Part of a name -> the kind of a block's part that has projections of its own; routed experts are another kind."""


Atom = tuple[tuple[str, ...], str]
"""The place of a block, and a projection in it or the part of a name that an alignment file gives."""


class Alignment(BaseModel):
    """The content of an alignment file: pattern of A -> patterns of B; and patterns of modules that may differ."""

    model_config = ConfigDict(extra="forbid")

    names: dict[str, list[str]] = {}
    allow: list[str] = []

    def allows(self, *names: str) -> bool:
        return any(starmap(fnmatchcase, product(names, self.allow)))


def read_alignment(path: str | os.PathLike[str] | None) -> Alignment:
    """Read an alignment file; raises a MapError, or a ConfigError for a file that is not YAML."""
    if path is None:
        return Alignment()
    return validated(Alignment, read_file(Path(path).expanduser()), str(path))


def align(a: Collection[str], b: Collection[str], alignment: Alignment) -> dict[str, list[str]]:
    """Return the partners in B of each name in A.

    Raises:
        MapError: two names of a side are the same projection, or a name of the alignment file does not exist.
    """
    for pattern, partner_names in alignment.names.items():
        _check_exists(pattern, pattern, a, "A")
        for alias in partner_names:
            _check_exists(pattern, alias, b, "B")
    in_a = _index(a, alignment.names)
    aliases = chain(*alignment.names.values())
    in_b = _index(b, {alias: [alias] for alias in aliases})
    partners: dict[str, dict[str, None]] = {name: {} for name in a}
    for atom, ours in in_a.items():
        for expert, name in ours.items():
            for other_expert, other in in_b.get(atom, {}).items():
                if expert == other_expert or not expert or not other_expert:
                    partners[name][other] = None
    return {name: list(partner_names) for name, partner_names in partners.items()}


def _check_exists(key: str, pattern: str, names: Iterable[str], side: str) -> None:
    if not any(_parts(pattern, name) for name in names):
        raise MapError(f"names.{key} of the alignment: {pattern} is no name of {side}.{nearest_names(pattern, names)}")


def _parts(pattern: str, name: str) -> re.Match[str] | None:
    """Match a name against a pattern; ``*`` stands for a part between dots."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "([^.]*)"), name)


def _index(names: Iterable[str], aliases: Mapping[str, list[str]]) -> dict[Atom, dict[str, str]]:
    """Return atom -> number of an expert -> module; the number is empty for all experts, and elsewhere.

    Raises:
        MapError: two modules are the same projection.
    """
    index: dict[Atom, dict[str, str]] = {}
    for name in names:
        expert, atoms = _atoms(name)
        in_file: list[Atom] = [
            (match.groups(), f"names: {other}")
            for pattern, alias_names in aliases.items()
            if (match := _parts(pattern, name)) is not None
            for other in alias_names
        ]
        for atom in in_file or atoms:
            same = index.setdefault(atom, {})
            if expert in same:
                raise MapError(
                    f"{same[expert]} and {name} both look like the same projection, so names cannot be aligned. Name"
                    " the partner of each below names in an alignment file (--alignment)."
                )
            same[expert] = name
    return index


def _atoms(name: str) -> tuple[str, list[Atom]]:
    """Return the number of the expert, and the projections that a module contains."""
    name = _WRAPPER.sub("", name)
    match = _BLOCK.fullmatch(name)
    if match is None:
        last = name.rpartition(".")[2]
        return "", [((), _OUTSIDE.get(last, name))]
    parts = (match["tower"] or "").split(".")
    towers = [part for part in parts if part not in ("", *_GENERIC)]
    rest = match["rest"]
    number = _GEMM.search(rest) or _EXPERT.search(rest)
    rest = _GEMM.sub("", rest)
    kind = next((kind for part, kind in _KINDS.items() if part in rest), "")
    expert = ""
    if number and not kind:
        kind = "experts"
        expert = number[1] or ""
    projections = _projections(rest) or [rest]
    return expert, [((*towers, match["block"], kind), projection) for projection in projections]


def _projections(name: str) -> list[str]:
    parts = name.split(".")
    return _ATOMS.get(".".join(parts[-2:])) or _ATOMS.get(parts[-1], [])


def is_projection(name: str) -> bool:
    """Return whether a module is a known projection of attention, an MLP or an expert, and no router."""
    return _projections(name) not in ([], ["router"])
