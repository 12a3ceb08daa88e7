"""Reading of YAML files, with the line of each key and list entry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from te_precision_callbacks.base.suggestions import nearest, shorten, shown
from te_precision_callbacks.config.problems import ConfigError, KeyPath, Problems

MOST_BYTES = 4 * 1024 * 1024

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")

_MERGE = "tag:yaml.org,2002:merge"

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is thirty times as fast, where PyYAML has it


class Mark(NamedTuple):
    """The position of a key or list entry in a file, from 1; the first entry of a line has no column."""

    line: int
    column: int | None = None

    def __str__(self) -> str:
        if self.column is None:
            return f"line {self.line}"
        return f"line {self.line} column {self.column}"


@dataclass(frozen=True)
class Places:
    name: str
    marks: Mapping[KeyPath, Mark] = field(default_factory=dict)

    def __call__(self, section: str, *keys: str | int) -> str:
        """Format the position of a key, or of the nearest enclosing key: ``a.yaml, line 7 (section 'stats')``."""
        path: KeyPath = (section, *keys)
        while path and path not in self.marks:
            path = path[:-1]
        mark = self.marks.get(path)
        where = f"{self.name}, {mark}" if mark else self.name
        return f"{where} (section {shown(section)})"


def read_yaml(path: Path, problems: Problems, what: str = "config") -> tuple[Any, Places]:
    """Read a YAML file, with the positions of its keys. Duplicate keys are added to ``problems``.

    Raises:
        ConfigError: the file is missing, unreadable or too large, or is not YAML.
    """
    text = _text_of(path, what)
    try:
        loader = _LOADER(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, Places(str(path))
            index = _Index(str(path), _LINE_BREAK.split(text), problems)
            index.enter(node, ())
            return loader.construct_document(node), Places(str(path), index.marks)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # 2026-02-30, 5,000 digits, a loop
        reason = shorten(" ".join(str(error).replace('"<unicode string>", ', "").split()))
        raise ConfigError(f"The {what} file {shown(str(path))} is not valid YAML: {reason}") from error


def _text_of(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8") if len(content) <= MOST_BYTES else None
    except FileNotFoundError:
        folder = path.absolute().parent
        present = {entry.stem: shown(entry.name) for entry in folder.glob("*.y*ml")}
        close = " or ".join(present[stem] for stem in nearest(path.stem, present))  # a common suffix does not count
        raise ConfigError(
            f"The {what} file {shown(str(path))} does not exist (looked in {shown(str(folder))})."
            + (f" Did you mean {close}?" if close else "")
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"The {what} {shown(str(path))} is a folder. Give the path of a YAML file.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The {what} file {shown(str(path))} cannot be read: {shorten(str(error))}.") from error
    if text is None:
        raise ConfigError(
            f"The {what} file {shown(str(path))} has more than {MOST_BYTES:,} bytes. Is it the right one?"
        )
    return text


class _Index:
    """Collects where each key of a YAML file stands, and the problems of its nodes.

    Attributes:
        marks: path of a key -> its place in the file.
    """

    def __init__(self, file: str, lines: Sequence[str], problems: Problems) -> None:
        self.marks: dict[KeyPath, Mark] = {}
        self._file = file
        self._lines = lines
        self._problems = problems

    def enter(self, node: yaml.Node, path: KeyPath) -> None:
        if isinstance(node, yaml.MappingNode):
            marks: dict[KeyPath, Mark] = {}
            for key_node, value_node in node.value:
                if key_node.tag == _MERGE or not isinstance(key_node, yaml.ScalarNode):
                    continue
                key_path = (*path, str(key_node.value))
                mark = self._mark(key_node)
                if key_path in marks:
                    self._problems.append(
                        f"{self._file}, {mark}: {shown(key_node.value)} is already defined in {marks[key_path]}. Rename"
                        " one: YAML would silently keep only one."
                    )
                self.marks[key_path] = mark
                marks[key_path] = mark
                self.enter(value_node, key_path)
        elif isinstance(node, yaml.SequenceNode):
            for number, child in enumerate(node.value):
                self.marks[(*path, number)] = self._mark(child)
                self.enter(child, (*path, number))

    def _mark(self, node: yaml.Node) -> Mark:
        line = node.start_mark.line
        column = node.start_mark.column
        line_start = self._lines[line][:column] if line < len(self._lines) else ""
        return Mark(line + 1, column + 1 if line_start.strip(" -?") else None)
