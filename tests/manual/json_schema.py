"""Checks data against a JSON Schema, by the words of draft 2020-12 that the schema of configs uses, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: is_number(value) and value == int(value),
}

SAYS_NOTHING = {"$schema", "$defs", "title", "description", "default", "then", "else"}
"""Annotations, and what is read with another word."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_valid(value: Any, schema: Schema) -> bool:
    return next(problems(value, schema), None) is None


def problems(value: Any, schema: Schema, root: Schema | None = None, path: str = "") -> Iterator[str]:
    """What of a value the schema refuses, with its place.

    Raises:
        NotImplementedError: the schema has a word that is not known here.
    """
    root = schema if root is None else root

    def fits(part: Schema) -> bool:
        return next(problems(value, part, root, path), None) is None

    for word, said in schema.items():
        assert said != [] or word in ("required", "default"), f"{word} is empty, which no schema may have"
        refused = False
        match word:
            case "$ref":
                yield from problems(value, root["$defs"][said.removeprefix("#/$defs/")], root, path)
            case "type":
                refused = not any(TYPES[name](value) for name in ([said] if isinstance(said, str) else said))
            case "enum" | "const":
                among = said if word == "enum" else [said]
                refused = not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in among)
            case "minimum" | "maximum":
                refused = is_number(value) and (value < said if word == "minimum" else value > said)
            case "minLength" | "maxLength":
                refused = isinstance(value, str) and (len(value) < said if word == "minLength" else len(value) > said)
            case "minItems" | "maxItems":
                refused = isinstance(value, list) and (len(value) < said if word == "minItems" else len(value) > said)
            case "minProperties":
                refused = isinstance(value, dict) and len(value) < said
            case "pattern":
                refused = isinstance(value, str) and re.search(said, value) is None
            case "required":
                refused = isinstance(value, dict) and not set(said) <= set(value)
            case "prefixItems" | "items":
                begin = len(schema.get("prefixItems", ())) if word == "items" else 0
                for index, entry in enumerate(value[begin:] if isinstance(value, list) else (), begin):
                    if word == "items" or index < len(said):
                        part = said if word == "items" else said[index]
                        yield from problems(entry, part, root, f"{path}[{index}]")
            case "properties" | "patternProperties" | "additionalProperties":
                for key, entry in value.items() if isinstance(value, dict) else ():
                    for part in parts(str(key), schema, word):
                        if part is False:
                            yield f"{path}: there is no key {key!r}"
                        else:
                            yield from problems(entry, part, root, f"{path}.{key}")
            case "allOf":
                for part in said:
                    yield from problems(value, part, root, path)
            case "anyOf" | "oneOf":
                number = sum(map(fits, said))
                refused = number == 0 or (word == "oneOf" and number > 1)
            case "not":
                refused = fits(said)
            case "if":
                yield from problems(value, schema["then" if fits(said) else "else"], root, path)
            case _ if word not in SAYS_NOTHING:
                raise NotImplementedError(word)
        if refused:
            yield f"{path}: {value!r} is refused by {word!r}: {said!r}"


def parts(key: str, schema: Schema, word: str) -> list[Any]:
    """The schemas of the value of a key by one of the three words for keys."""
    named = [part for name, part in schema.get("properties", {}).items() if name == key]
    by_pattern = [part for name, part in schema.get("patternProperties", {}).items() if re.search(name, key)]
    if word == "additionalProperties":
        return [] if named or by_pattern else [schema[word]]
    return named if word == "properties" else by_pattern
