"""The template of a self-contained HTML page, built from the scripts in ``page/``."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.terminal import plain, visible
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.run_files import replace_whole
from te_precision_callbacks.views.report.data import ReportError, page_data
from te_precision_callbacks.views.report.packing import compress

MOST_BYTES = 10_000_000

_SHARED = ("unpack", "values", "dom", "plots", "shell")

_OF_A_RUN = ("heatmap", "findings", "summary", "last_steps", "ranges", "layer", "profile", "config", "main")

FOR_FACTS = 1_200_000
"""What is kept for the facts of a run, which come beside its numbers."""


class PageTemplate:
    """A page without its data.

    Args:
        scripts: the files of the page's own script, after the shared files; the last one renders the page.
    """

    def __init__(self, scripts: Sequence[str]) -> None:
        script = "".join(_read_script(f"{name}.js") for name in (*_SHARED, *scripts))
        self._filled = {
            "STYLE": _read_script("page.css"),
            "SCRIPT": f'"use strict";\n(() => {{\n{script}}})();\n',
            "PLOTLY": _plotly(),
        }
        self._frame = _read_script("page.html")
        self.size = len(self._frame) + sum(map(len, self._filled.values()))

    def fill(self, title: str, content: Mapping[str, Any], arrays: Sequence[str]) -> str:
        content = {
            "version": version("te-precision-callbacks"),
            "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **content,
        }
        filled = {
            **self._filled,
            "TITLE": html.escape(visible(title)),
            "DATA": compress(json.dumps(plain(content), separators=(",", ":"), allow_nan=False).encode()),
            "ARRAYS": "\n".join(arrays),
        }
        return re.sub("{{(.*?)}}", lambda place: filled[place[1]], self._frame)


def write_report(
    run: RecordedRun,
    path: str | os.PathLike[str],
    *,
    most: int = MOST_BYTES,
) -> Path:
    """Write the page of a run into an ``.html`` file.

    Args:
        most: the maximum size of the page, in bytes, unless the overview alone needs more.

    Raises:
        ReportError: the run has no values, the file cannot be written, or its name does not end in ``.html``.
        MissingExtraError: plotly is not installed.
    """
    path = output_path(path)
    frame = PageTemplate(_OF_A_RUN)
    content, arrays = page_data(run, most - frame.size - FOR_FACTS)
    return write_bytes(path, frame.fill(content["run"]["name"], content, arrays).encode())


def output_path(path: str | os.PathLike[str]) -> Path:
    """Check the path of a page up front; raises ReportError for another ending or a missing folder."""
    path = Path(path)
    name = visible(str(path))
    ending = path.suffix[1:]
    if path.is_dir():
        raise ReportError(f"{name} cannot be written: it is a folder. Give the name of a file, such as report.html.")
    if ending and ending.lower() not in ("html", "htm"):
        named = visible(str(path.with_suffix(".html")))
        raise ReportError(f"{name}: not a .{visible(ending)} file. Name it {named}.")
    if not path.parent.is_dir():
        raise ReportError(f"{name} cannot be written: there is no folder {visible(str(path.parent))}.")
    return path


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file atomically."""
    path = Path(path)
    try:
        replace_whole(path, lambda file: file.write(data))
    except OSError as error:
        raise ReportError(f"{visible(str(path))} cannot be written: {error.strerror or error}.") from error
    return path


@cache
def _plotly() -> str:
    """plotly.js, compressed: cached, since compressing takes 0.2 s."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("te_precision_callbacks.views.report", "report") from None
    return compress(get_plotlyjs().encode())


def _read_script(name: str) -> str:
    return files("te_precision_callbacks.views.report").joinpath("page", name).read_text(encoding="utf-8")
