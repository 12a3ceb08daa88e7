"""The progress bar of a search, on a terminal's stderr."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

ItemT = TypeVar("ItemT")


class Progress:
    def __init__(self, *, is_shown: bool) -> None:
        self._console = Console(stderr=True)
        self._is_shown = is_shown and self._console.is_terminal

    def over(self, items: Sequence[ItemT], what: str) -> Iterator[ItemT]:
        yield from track(items, f"search: {what}", console=self._console, disable=not self._is_shown, transient=True)
