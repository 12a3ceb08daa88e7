"""The formats of a model's modules, with their sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import shown
from te_precision_callbacks.base.vocabulary import HIGH_PRECISION, OPERANDS
from te_precision_callbacks.config.problems import Problems
from te_precision_callbacks.config.yaml_text import read_yaml
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.runs.run_files import read_json

SCHEMA = 1
"""Version of the JSON; readers refuse other versions."""

KEY = "te_precision_map"

FindingKind = Literal[
    "unmatched", "disabled", "shadowed", "no_effect", "part_of_a_name", "part_of_a_layer", "checkpoint"
]

KindT = TypeVar("KindT")


class MapError(PrecisionDebugError, ValueError):
    """A source of a map cannot be read, or the names of two maps cannot be aligned."""


class ModuleFormats(NamedTuple):
    """The formats of a module's tensors, for example ``FP8 E4M3``; empty if unknown.

    Attributes:
        weight, activation: the operands of fprop. In a checkpoint, the stored weight.
        gradient: of the output, as in dgrad and wgrad.
        said: where this is said, with the rule that decides.
    """

    weight: str
    activation: str = ""
    gradient: str = ""
    said: str = ""


@dataclass(frozen=True)
class MapFinding:
    """A problem of a source.

    Attributes:
        kind: ``unmatched``, ``disabled``, ``shadowed``, ``no_effect``: a matcher that decides no module;
            ``part_of_a_name``: an entry that matches within a word of a name; ``part_of_a_layer``: entries that keep
            some parts of vLLM's fused layer; ``checkpoint``: stored tensors that
            contradict the config.
        modules: the affected modules.
    """

    kind: FindingKind
    text: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionMap:
    """Module name -> its formats.

    Attributes:
        source: the path or the function of the map.
        notes: facts that the source lacks.
    """

    source: str
    modules: Mapping[str, ModuleFormats]
    findings: tuple[MapFinding, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        modules = {name: formats._asdict() for name, formats in self.modules.items()}
        return {KEY: SCHEMA, **vars(self), "modules": modules, "findings": list(map(vars, self.findings))}


def map_from_json(data: Mapping[str, Any], source: str) -> PrecisionMap:
    """Read the result of ``te-precision map --json``; raises a MapError that names the entry."""
    if data[KEY] != SCHEMA:
        raise MapError(f"{source}: {KEY} is {shown(data[KEY])}, but this version reads only {SCHEMA}.")
    return validated(PrecisionMap, {**data, "source": source}, source)


def validated(kind: type[KindT], data: Any, source: str) -> KindT:
    """Return data as a type; raises a MapError that names the first wrong key, and its value."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise MapError(
            f"{': '.join(filter(None, (source, where)))}: {first['msg']}, not {shown(first['input'])}."
        ) from None


def read_file(path: Path) -> dict[str, Any]:
    """Read a file of YAML or JSON with a mapping; raises a MapError, or a ConfigError for a file that is not YAML."""
    if path.suffix in (".yaml", ".yml"):
        twice = Problems()
        data, _ = read_yaml(path, twice, "precision")
        twice.raise_any()
        return validated(dict[str, Any], data, str(path))
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise MapError(f"{path} cannot be read: {error}.") from error


def is_quantized(text: str) -> bool:
    """Return whether a format, or one of several joined by arrows, is quantized."""
    names = {part.partition(" ")[0] for part in text.lower().split(" -> ")}
    return not names <= {"", "high", *HIGH_PRECISION}


def from_products(products: Iterable[Any], source: str) -> PrecisionMap:
    """Return the map of matrix products with weights, as of ``session.coverage()`` or ``te-precision check``."""
    texts_of: dict[str, dict[str, list[str]]] = {}
    for product in products:
        if product.gemm not in OPERANDS or not product.operands:
            continue
        texts = texts_of.setdefault(product.layer, {"said": [source]})
        texts["said"].append(product.why)
        for tensor, text in product.operands.items():
            if product.gemm == "fprop" or tensor == "gradient":
                texts.setdefault(tensor, []).extend(text.split(" -> "))
    modules = {}
    for layer, texts in texts_of.items():
        if "weight" in texts:
            statements = "; ".join(dict.fromkeys(filter(None, texts.pop("said"))))
            formats = {tensor: " -> ".join(dict.fromkeys(filter(None, parts))) for tensor, parts in texts.items()}
            modules[layer] = ModuleFormats(**formats, said=statements)
    return PrecisionMap(source, modules)


def nearest_names(pattern: str, names: Iterable[str]) -> str:
    """Return a sentence with the names that share most words with a pattern, folded by block."""
    words = set(re.findall(r"\w{2,}", pattern))
    folded = sorted(fold_names(names), key=lambda name: (-len(words.intersection(name.split("."))), len(name)))
    return f" Nearest names: {', '.join(folded[:3]) or 'none'}."


def join_names(names: Iterable[str]) -> str:
    return ", ".join(fold_names(names, most=4))
