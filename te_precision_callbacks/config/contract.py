"""Precision contracts: required shares of precisions, precisions of layers, and dtypes of states.

contract = read_contract("fp8 >= 95%")
contract = read_contract("contract.yaml")                 # a mapping below the key precision_contract
contract = read_contract({
    "share": {"fp8": 95, "fp8 wgrad": 90},                # at least, in percent of the multiply-adds
    "layers": {r".*mlp.*": "mxfp8"},                      # all GEMMs of these layers
    "state": {"optimizer_state": "float32"},
    "by_step": 3,
    "same_as": "rollout.json",                            # or {"map": ..., "alignment": ...}
    "on_broken": "warn",
})
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictInt,
    ValidationError,
)

from te_precision_callbacks.base.suggestions import shown, suggestion
from te_precision_callbacks.base.vocabulary import PRECISIONS, SUBJECTS
from te_precision_callbacks.config.problems import ConfigError, Problems
from te_precision_callbacks.config.yaml_text import read_yaml

CONTRACT = "precision_contract"

PARTS = ("fprop", "dgrad", "wgrad", "qk", "pv", "forward", "backward")

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

_SHARE = re.compile(r"(\w+)(?:\s+(\w+))?\s*(<=|>=|<|>)\s*(\S+?)\s*%")

_SHARE_FORM = "Write a condition such as 'fp8 >= 95%', or 'fp8 wgrad >= 90%' for a part of the products."


@dataclass(frozen=True)
class Share:
    """A condition on the share of multiply-adds in a precision.

    Attributes:
        text: the condition as written.
        number: from 0 to 1.
        precision: one of :data:`te_precision_callbacks.base.vocabulary.PRECISIONS`.
        part: one of :data:`PARTS`; empty for all products.
    """

    text: str
    comparison: str
    number: float
    precision: str
    part: str

    def holds(self, value: float) -> bool:
        return _COMPARE[self.comparison](value, self.number)

    def __str__(self) -> str:
        return self.text


def parse_share(entry: object) -> Share:
    """Parse a condition of a contract; the message of a ValueError continues a sentence that starts with the key."""
    match = isinstance(entry, str) and _SHARE.fullmatch(entry.strip())
    if not match:
        raise ValueError(f"has {entry!r}. {_SHARE_FORM}")
    precision, part, comparison, number = match.groups(default="")
    if precision not in PRECISIONS:
        raise ValueError(f"has {entry!r}: there is no precision {precision!r}.{suggestion(precision, PRECISIONS)}")
    if part and part not in PARTS:
        raise ValueError(f"has {entry!r}: there is no part {part!r}.{suggestion(part, PARTS)}")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not 0 <= percent <= 100:
        raise ValueError(f"has {entry!r}, where {number!r} is not a number from 0 to 100. {_SHARE_FORM}")
    return Share(str(entry).strip(), comparison, percent / 100, precision, part)


def _entries(data: Any) -> Mapping[Any, Any]:
    """Return conditions on shares by key: the index in a list, or the products of a percentage."""
    if not isinstance(data, Mapping):
        return dict(enumerate(data if isinstance(data, (list, tuple)) else [data]))
    entries = dict(data)
    for name, number in data.items():
        if type(number) in (int, float):
            entries[name] = f"{name} >= {number}%"
    return entries


def _one_of(words: Iterable[str], problem: str) -> PlainValidator:
    """Validate that a value is one of some words; ``problem`` has a placeholder for the value."""
    choices = list(words)

    def check(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise ValueError(f"{problem.format(shown(value))}.{suggestion(str(value), choices)}")

    return PlainValidator(check)


def _pattern(pattern: Any) -> str:
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise ValueError(f"{shown(pattern)} is not a regular expression: {error}.") from error
    return str(pattern)


_SHORT = {"optimizer": "optimizer_state"}
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16")
_Subject = Annotated[
    str, _one_of((*_SHORT, *SUBJECTS), "there is no subject {}"), AfterValidator(lambda name: _SHORT.get(name, name))
]
_Precision = Annotated[str, _one_of(PRECISIONS, "{} is not a precision")]
_Dtype = Annotated[str, _one_of(_DTYPES, "{} is not a dtype")]


class Contract(BaseModel):
    """The requirements for a run. Descriptions of keys continue "must be".

    Attributes:
        share: conditions on shares of the multiply-adds, by key or index.
        layers: pattern of layer names -> the precision of all their GEMMs.
        state: subject -> dtype, as torch names it: ``float32``.
        by_step: the contract must hold after this number of steps.
        same_as: the precision map of another side, such as a rollout engine, whose layers the run must quantize too:
            a path, or a mapping with ``map`` and ``alignment``; :mod:`te_precision_callbacks.maps.comparing` reads it.
        on_broken: raise a PrecisionContractError for a broken contract, or warn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[dict[Any, Annotated[Share, PlainValidator(parse_share)]], BeforeValidator(_entries)] = {}
    layers: dict[Annotated[str, PlainValidator(_pattern)], _Precision] = Field(
        {}, min_length=1, description="a mapping from layer patterns to precisions"
    )
    state: dict[_Subject, _Dtype] = Field({}, min_length=1, description="a mapping from kinds of state to dtypes")
    by_step: StrictInt = Field(3, ge=1, description="an integer >= 1")
    same_as: Any = Field(None, repr=False)
    on_broken: Literal["raise", "warn"] = Field("raise", description="'raise' or 'warn'")


ContractSource = str | os.PathLike[str] | Mapping[str, Any] | Contract | None


def read_contract(source: ContractSource) -> Contract | None:
    """Read and validate a contract; raises a ConfigError that lists all problems.

    Args:
        source: a condition on a share; the path of a YAML file (``.yaml``, ``.yml``) with the key
            ``precision_contract``; a mapping with or without that key; a contract; or None.
    """
    if source is None or isinstance(source, Contract):
        return source
    if isinstance(source, os.PathLike) or (isinstance(source, str) and source.endswith((".yaml", ".yml"))):
        twice = Problems()
        data, locate = read_yaml(Path(source).expanduser(), twice, "contract")
        twice.raise_any()
        if not isinstance(data, Mapping) or set(data) != {CONTRACT}:
            raise ConfigError(
                f"{locate.name} is not a contract: the file must have the key {CONTRACT!r}, and below it 'share',"
                " 'layers', 'state', 'same_as' or 'by_step'."
            )
        return _read(data[CONTRACT], lambda *keys: locate(CONTRACT, *keys))
    if isinstance(source, str):
        return _read({"share": source}, lambda *keys: "require=")
    if isinstance(source, Mapping):
        if set(source) == {CONTRACT}:
            source = source[CONTRACT]
        return _read(source, lambda *keys: f"require={''.join(f'[{key!r}]' for key in keys)}")
    raise ConfigError(
        "require= must be a condition such as 'fp8 >= 95%', the path of a YAML file, or a mapping, not"
        f" {shown(source)}."
    )


def _read(data: Any, locate: Callable[..., str]) -> Contract:
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{locate()}: a contract is a mapping of {', '.join(map(repr, Contract.model_fields))}, not {shown(data)}."
        )
    try:
        contract = Contract.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(*(_problem(details, locate) for details in error.errors(include_url=False))) from None
    if not (contract.share or contract.layers or contract.state or contract.same_as):
        raise ConfigError(f"{locate()}: the contract is empty. Add 'share', 'layers', 'state' or 'same_as'.")
    return contract


def _problem(details: Any, locate: Callable[..., str]) -> str:
    keys = [key for key in details["loc"] if key != "[key]"]
    contract_keys = Contract.model_fields
    where = locate(*keys)
    key = keys[0]
    if key not in contract_keys:
        return f"{where}: a contract has no key {shown(key)}.{suggestion(str(key), contract_keys)}"
    if details["type"] == "value_error":
        return f"{where}{' ' if key == 'share' else ': '}{details['ctx']['error']}"
    return f"{where}: {key!r} must be {contract_keys[key].description}, not {shown(details['input'])}."
