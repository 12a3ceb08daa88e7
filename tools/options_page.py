"""The table of docs/options.md, made from the docstring and the defaults of ``SessionOptions``.

python -m tools.options_page    # prints the table
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator

from te_precision_callbacks.options import SessionOptions

_STEP_ON = 'the length of a debug iteration: `"optimizer_step"` or `"batch"`; for Lightning and Accelerate only'


def table() -> str:
    """The table, in Markdown."""
    defaults = {entry.name: entry.default for entry in dataclasses.fields(SessionOptions)}
    lines = ["| keyword | default | meaning |", "|---|---|---|"]
    for name, text in _documented():
        default = "None" if defaults[name] is dataclasses.MISSING else repr(defaults[name]).replace("'", '"')
        lines.append(f"| `{name}` | `{default}` | {_as_markdown(text)} |")
        if name == "config":
            lines.append(f'| `step_on` | `"optimizer_step"` | {_STEP_ON} |')
    return "\n".join(lines)


def _documented() -> Iterator[tuple[str, str]]:
    """Each attribute with its text, from the section ``Attributes`` of the docstring."""
    attributes = (inspect.getdoc(SessionOptions) or "").partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?= {4}\w+: )", f"\n{attributes}")[1:]:
        name, _, text = entry.strip().partition(": ")
        yield name, " ".join(text.split())


def _as_markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")
    return re.sub(r"\bdocs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", text)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
