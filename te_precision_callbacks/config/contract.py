"""Precision contracts: required shares of precisions, precisions of layers, and dtypes of states.

contract = read_contract("fp8 >= 95%")
contract = read_contract("contract.yaml")                 # a mapping below the key precision_contract
contract = read_contract({
    "share": {"fp8": 95, "fp8 wgrad": 90},                # at least, in percent of the multiply-adds
    "layers": {r".*mlp.*": "mxfp8"},                      # all GEMMs of these layers
    "state": {"optimizer_state": "float32"},
    "by_step": 3,
})
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from te_precision_callbacks.base.vocabulary import PRECISIONS, SUBJECTS
from te_precision_callbacks.config.conditions import Share, parse_share
from te_precision_callbacks.config.problems import ConfigError, Problems, raise_problems, shown, suggestion
from te_precision_callbacks.config.yaml_text import read_yaml

CONTRACT = "precision_contract"

OnBroken = Literal["raise", "warn"]

_BY_STEP = 3


@dataclass(frozen=True)
class Contract:
    """The requirements for a run.

    Attributes:
        shares: conditions on shares of the multiply-adds.
        layers: pattern of layer names -> the precision of all their GEMMs.
        state: subject -> dtype, as torch names it: ``float32``.
        by_step: the number of steps after which the contract must hold, and stay valid.
        on_broken: by default the integration's keyword ``on_broken``.
    """

    shares: tuple[Share, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    by_step: int = _BY_STEP
    on_broken: OnBroken | None = None


ContractSource = str | os.PathLike[str] | Mapping[str, Any] | Contract | None


def read_contract(source: ContractSource) -> Contract | None:
    """Read and check a contract; raises a ConfigError with all problems.

    Args:
        source: a condition on a share; the path of a YAML file (``.yaml``, ``.yml``) with the key
            ``precision_contract``; a mapping with or without that key; a contract; or None.
    """
    if source is None or isinstance(source, Contract):
        return source
    if isinstance(source, os.PathLike) or (isinstance(source, str) and source.endswith((".yaml", ".yml"))):
        twice = Problems()
        data, places = read_yaml(Path(source).expanduser(), twice, "contract")
        twice.raise_any()
        if not isinstance(data, Mapping) or set(data) != {CONTRACT}:
            raise ConfigError(
                f"{places.name} is no contract: a file with a contract has one key, {CONTRACT!r}, and below it 'share',"
                " 'layers', 'state' or 'by_step'."
            )
        return _read(data[CONTRACT], lambda *keys: places(CONTRACT, *keys))
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


def _read(data: Any, place: Callable[..., str]) -> Contract:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{place()}: a contract is a mapping of {_listed(_KEYS)}, not {shown(data)}.")
    problems = Problems()
    for key in data:
        if key not in _KEYS:
            problems.add(f"{place(key)}: a contract has no key {shown(key)}.{suggestion(str(key), _KEYS)}")
    contract: dict[str, Any] = {}
    for key, read in _KEYS.items():
        if key in data:
            with problems.noted():
                contract[_FIELDS.get(key, key)] = read(data[key], lambda *inner, key=key: place(key, *inner))
    if not data.keys() & {"share", "layers", "state"}:
        problems.add(f"{place()}: the contract demands nothing. Give it {_listed(('share', 'layers', 'state'))}.")
    problems.raise_any()
    return Contract(**contract)


def _shares(data: Any, place: Callable[..., str]) -> tuple[Share, ...]:
    entries: list[tuple[Any, tuple[Any, ...]]]
    if isinstance(data, Mapping):
        entries = [(f"{name} >= {number}%" if _is_number(number) else number, (name,)) for name, number in data.items()]
    else:
        listed = [data] if isinstance(data, str) or not isinstance(data, Iterable) else list(data)
        entries = [(entry, () if isinstance(data, str) else (number,)) for number, entry in enumerate(listed)]
    problems, shares = Problems(), []
    for entry, keys in entries:
        try:
            shares.append(parse_share(entry))
        except ValueError as error:
            problems.add(f"{place(*keys)} {error}")
    problems.raise_any()
    return tuple(shares)


def _layers(data: Any, place: Callable[..., str]) -> dict[str, str]:
    def problem(pattern: Any, precision: Any) -> str:
        try:
            re.compile(str(pattern))
        except re.error as error:
            return f"{shown(pattern)} is no regular expression: {error}."
        if isinstance(precision, str) and precision in PRECISIONS:
            return ""
        return f"{shown(precision)} is no precision.{suggestion(str(precision), PRECISIONS)}"

    return _texts(data, place, "patterns of layers to precisions", problem)


def _state(data: Any, place: Callable[..., str]) -> dict[str, str]:
    def problem(key: Any, dtype: Any) -> str:
        if _SHORT.get(key, key) not in SUBJECTS:
            return f"nothing is called {shown(key)}.{suggestion(str(key), SUBJECTS)}"
        return "" if dtype in _DTYPES else f"{shown(dtype)} is no type.{suggestion(str(dtype), _DTYPES)}"

    return {_SHORT.get(key, key): dtype for key, dtype in _texts(data, place, "what is kept to types", problem).items()}


def _texts(data: Any, place: Callable[..., str], what: str, problem: Callable[[Any, Any], str]) -> dict[str, str]:
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{place()}: must be a mapping of {what}, not {shown(data)}.")
    texts = ((key, problem(key, value)) for key, value in data.items())
    raise_problems(f"{place(key)}: {text}" for key, text in texts if text)
    return {str(key): str(value) for key, value in data.items()}


def _by_step(data: Any, place: Callable[..., str]) -> int:
    if type(data) is not int or data < 1:
        raise ConfigError(f"{place()}: 'by_step' must be an integer >= 1, not {shown(data)}.")
    return data


def _on_broken(data: Any, place: Callable[..., str]) -> OnBroken:
    if data not in get_args(OnBroken):
        raise ConfigError(f"{place()}: 'on_broken' must be {_listed(get_args(OnBroken))}, not {shown(data)}.")
    return data  # type: ignore[no-any-return]


_KEYS: Mapping[str, Callable[[Any, Callable[..., str]], Any]] = {
    "share": _shares,
    "layers": _layers,
    "state": _state,
    "by_step": _by_step,
    "on_broken": _on_broken,
}
_SHORT = {"optimizer": "optimizer_state"}
_FIELDS = {"share": "shares"}

_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(words: Iterable[str]) -> str:
    *first, last = map(repr, words)
    return f"{', '.join(first)} or {last}" if first else last
