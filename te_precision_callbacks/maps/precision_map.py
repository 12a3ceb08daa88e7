"""The formats of a model's modules, and where they are said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import HIGH_PRECISION, OPERANDS, GemmName
from te_precision_callbacks.config.problems import shown

SCHEMA = 1
"""Version of the JSON; readers refuse other versions."""

_KEY = "te_precision_map"

FindingKind = Literal["unmatched", "disabled", "shadowed", "no_effect", "part_of_a_name", "fused", "checkpoint"]

Use = Literal["", "high", "quantized", "mixed"]


class MapError(PrecisionDebugError, ValueError):
    """A source of a map cannot be read, or the names of two maps cannot be aligned."""


class ModuleFormats(NamedTuple):
    """The formats of a module's tensors, such as ``FP8 E4M3`` or ``BF16``; empty if the source does not say.

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
            ``part_of_a_name``: an entry that matches within a word of a name; ``fused``: parts of a fused layer that
            differ; ``checkpoint``: stored tensors that contradict the config.
        modules: the affected modules.
    """

    kind: FindingKind
    text: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrecisionMap:
    """Module name -> its formats.

    Attributes:
        source: the path or the function from which the map was made.
        notes: what the source does not say.
    """

    source: str
    modules: Mapping[str, ModuleFormats]
    findings: tuple[MapFinding, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            _KEY: SCHEMA,
            "source": self.source,
            "modules": {name: formats._asdict() for name, formats in self.modules.items()},
            "findings": [vars(finding) for finding in self.findings],
            "notes": self.notes,
        }


def is_map(data: Mapping[str, Any]) -> bool:
    return _KEY in data


def map_from_json(data: Mapping[str, Any], place: str) -> PrecisionMap:
    """Read the result of ``te-precision map --json``; raises a MapError that names the entry."""
    from pydantic import TypeAdapter, ValidationError

    if data[_KEY] != SCHEMA:
        raise MapError(f"{place}: {_KEY} is {shown(data[_KEY])}, but this version reads only {SCHEMA}.")
    try:
        return TypeAdapter(PrecisionMap).validate_python({**data, "source": place})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise MapError(f"{place}: {key}: {first['msg']}, not {shown(first['input'])}.") from None


def use_of(text: str) -> Use:
    """Return whether a format is quantized; ``mixed`` if a run had both, empty if it is unknown."""
    parts = {part.strip().partition(" ")[0].lower() in HIGH_PRECISION for part in text.split("->") if part.strip()}
    if len(parts) == 2:
        return "mixed"
    if not parts:
        return ""
    return "high" if True in parts else "quantized"


def from_operands(operands: Mapping[tuple[GemmName, str], str], said: str) -> ModuleFormats:
    """Return the formats of a layer from (GEMM, tensor) -> format."""

    def text(*places: tuple[GemmName, str]) -> str:
        formats = (part.strip() for place in places for part in operands.get(place, "").split("->"))
        return " -> ".join(dict.fromkeys(filter(None, formats)))

    gradients = [(gemm, "gradient") for gemm, tensors in OPERANDS.items() if "gradient" in tensors]
    return ModuleFormats(text(("fprop", "weight")), text(("fprop", "activation")), text(*gradients), said)


def from_products(products: Iterable[Any], source: str) -> PrecisionMap:
    """Return the map of matrix products with weights, as of ``session.coverage()`` or ``te-precision check``."""
    operands: dict[str, dict[tuple[GemmName, str], str]] = {}
    said: dict[str, dict[str, None]] = {}
    for product in products:
        if product.gemm in OPERANDS and product.operands:
            formats = operands.setdefault(product.layer, {})
            formats.update({(product.gemm, tensor): text for tensor, text in product.operands.items()})
            said.setdefault(product.layer, {})[product.why] = None
    modules = {
        layer: from_operands(formats, "; ".join([source, *filter(None, said[layer])]))
        for layer, formats in operands.items()
    }
    return PrecisionMap(source, modules)
