"""The file of a search: each measurement as soon as it is there, to resume from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from te_precision_callbacks.runs.run_files import read_json
from te_precision_callbacks.search.errors import SearchError
from te_precision_callbacks.search.measuring import GradientEffect

_SCHEMA = 1


class Results:
    """Measurements by choice, and final losses by arm and seed; kept in a file if there is one.

    Attributes:
        effects: hash of a choice -> its effect.
        losses: arm and seed -> final loss.
    """

    def __init__(self, path: Path | None) -> None:
        self.effects: dict[str, GradientEffect] = {}
        self.losses: dict[str, float] = {}
        self.summary: dict[str, Any] = {}
        self._path = path
        self._state: dict[str, Any] = {}

    def resume(self, state: dict[str, Any]) -> None:
        """Read the file, if there is one; raises a SearchError if it is damaged, or of another state of training."""
        self._state = json.loads(json.dumps(state))
        if self._path is None or not self._path.exists():
            return
        try:
            data = read_json(self._path)
            before = data["state"]
            effects = {key: GradientEffect(*values) for key, values in data["effects"].items()}
            losses = dict(data["losses"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SearchError(f"{self._path} cannot be read: {error!r}. Delete it to start again.") from error
        if (data.get("schema"), before) != (_SCHEMA, self._state):
            differing = [key for key in self._state if before.get(key) != self._state[key]] or ["schema"]
            raise SearchError(
                f"{self._path} is of another search: {differing[0]} is {before.get(differing[0])!r} there, and"
                f" {self._state.get(differing[0])!r} now. Delete it to start again, or choose another folder."
            )
        self.effects = effects
        self.losses = losses

    def save(self) -> None:
        if self._path is None or not is_first_rank():
            return
        data = {"schema": _SCHEMA, "state": self._state, "effects": self.effects, "losses": self.losses, **self.summary}
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data, indent=1))
        os.replace(temporary, self._path)

    def stop_in(self, what: str) -> None:
        kept = f" {self._path} keeps {len(self.effects)} measurements: run again to continue." if self._path else ""
        raise SearchError(f"max_time= was over before {what} were measured, so nothing can be chosen.{kept}")


def is_first_rank() -> bool:
    import torch

    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0
