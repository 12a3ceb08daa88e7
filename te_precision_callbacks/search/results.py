"""The file of a search: each measurement as soon as it is there, to resume from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.runs.run_files import read_json, replace_whole
from te_precision_callbacks.search.measuring import GradientEffect
from te_precision_callbacks.search.units import SearchError

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
        self.path = path
        self._state: dict[str, Any] = {}

    def resume(self, state: dict[str, Any]) -> None:
        """Read the file, if there is one; raises a SearchError if it is damaged, or of another state of training."""
        self._state = json.loads(json.dumps(state))
        if self.path is None or not self.path.exists():
            return
        try:
            data = read_json(self.path)
            before = data["state"]
            effects = {key: GradientEffect(*values) for key, values in data["effects"].items()}
            losses = dict(data["losses"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SearchError(f"{self.path} cannot be read: {error!r}. Delete it to start again.") from error
        if (data.get("schema"), before) != (_SCHEMA, self._state):
            differing = [key for key in self._state if before.get(key) != self._state[key]] or ["schema"]
            raise SearchError(
                f"{self.path} is of another search: {differing[0]} is {before.get(differing[0])!r} there, and"
                f" {self._state.get(differing[0])!r} now. Delete it to start again, or choose another folder."
            )
        self.effects = effects
        self.losses = losses

    def save(self) -> None:
        if self.path is None or own_rank() != 0:
            return
        data = {"schema": _SCHEMA, "state": self._state, "effects": self.effects, "losses": self.losses, **self.summary}
        replace_whole(self.path, lambda file: file.write(json.dumps(data, indent=1).encode()))


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
