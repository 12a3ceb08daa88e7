"""Comparison of configs, also between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.base.ranks import format_by_rank
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.config.planning import NamespacedFeatures, Section
from te_precision_callbacks.config.problems import ConfigError

FlatConfig = Mapping[str, str]
"""The values of a config, key by key: ``"stats.transformer_engine.LogTensorStats.freq"`` -> ``"10"``."""


def flat_config(sections: Sequence[Section], features: Sequence[NamespacedFeatures]) -> FlatConfig:
    """Flatten enabled sections, with registered names of features, to text that is the same in every process."""
    flat: dict[str, str] = {}
    for section, resolved in zip(sections, features, strict=True):
        layers = {key: sorted(map(str, entries)) for key, entries in section.selector.entries.items()}
        flat.update(_flat(section.name, {"layers": layers, **resolved}))
    return flat


def config_hash(config: FlatConfig) -> str:
    return hashlib.sha256(repr(sorted(config.items())).encode("utf-8", "surrogatepass")).hexdigest()


def difference(first: FlatConfig, other: FlatConfig) -> str:
    """Describe the first difference between two configs: ``stats...freq is 1 in one and 2 in the other``."""
    for key in {**first, **other}:
        if first.get(key) != other.get(key):
            return f"{key} is {first.get(key, 'missing')} on one rank and {other.get(key, 'missing')} on another"
    return "none"


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield path, repr(value)
        return
    for key, inner in value.items():
        yield from _flat(f"{path}.{key}", inner)


def require_equal(config: FlatConfig, iteration: int, ranks: Ranks) -> None:
    """Require equal configs and first iterations on all ranks. Otherwise all ranks raise a ConfigError or a
    SessionError.
    """
    begun = ranks.differing((int(config_hash(config)[:13], 16), iteration), "configs")  # 52 bits of the hash
    hashes = list(dict.fromkeys(number for number, _ in begun.values()))
    if len(hashes) > 1:
        configs = ranks.pool([tuple(config.items())], "texts of configs", tuple[tuple[str, Any], ...])
        if len(configs) < 2:  # a rank was lost in the meantime
            return
        names = {rank: f"config {1 + hashes.index(number)}" for rank, (number, _) in begun.items()}
        raise ConfigError(
            f"The ranks have different configs: {format_by_rank(names)}."
            f" First difference: {difference(dict(configs[0]), dict(configs[-1]))}. Give all ranks the same config,"
            " or set reduce=False."
        )
    if begun:
        raise SessionError(
            "The ranks start at different iterations:"
            f" {format_by_rank({rank: f'iteration {first}' for rank, (_, first) in begun.items()})}. Give all ranks"
            " the same start_step, or resume them from the same checkpoint."
        )
