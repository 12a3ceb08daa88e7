"""Calls of nvidia-dlfw-inspect's own API that a script makes while a session runs: left out, and said.

A script that was written for nvidia-dlfw-inspect initializes it, names the layers, sets a group and steps by itself.
In a session all of that is done, and a second ``step()`` would skip every other iteration without a word. Read from
nvidia-dlfw-inspect 0.2.2, ``api.py`` and ``debug_manager.py``. ``end_debug`` is not among them: it ends the
observation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_INSTEAD = {
    "initialize": "The session has started nvidia-dlfw-inspect. The config that counts is the session's, config=.",
    "initialize_training_step": "start_step= or session.iteration sets the debug iteration.",
    "step": "The session's own step() counts the debug iterations.",
    "infer_and_assign_layer_names": "The layers have the names of session.layers, from the module tree.",
    "set_tensor_reduction_group": "process_group= is the group over which statistics are reduced.",
}
"""Function of ``nvdlfw_inspect.api`` -> what is there in its place."""

_OF_THE_MANAGER = ("initialize_training_step", "step")
"""Those that only call the debug manager. They are caught there, so that a function that a script has kept is, too."""


class StrayCalls:
    """Stands in the place of the functions while a session runs.

    Args:
        manager: the session's debug manager.
    """

    def __init__(self, manager: Any) -> None:
        import nvdlfw_inspect.api as debug_api

        self._said: set[str] = set()
        self._replaced = {name: getattr(debug_api, name) for name in _INSTEAD if name not in _OF_THE_MANAGER}
        for name in _INSTEAD:
            setattr(manager if name in _OF_THE_MANAGER else debug_api, name, self._ignored(name))

    def remove(self) -> None:
        """Put the functions back; the manager has ended with the session."""
        import nvdlfw_inspect.api as debug_api

        for name, function in self._replaced.items():
            setattr(debug_api, name, function)

    def _ignored(self, name: str) -> Callable[..., None]:
        def ignored(*_: Any, **__: Any) -> None:
            if name not in self._said:
                self._said.add(name)
                logger.warning(
                    "The script calls debug_api.%s() while the session is running. The call is ignored. %s",
                    name,
                    _INSTEAD[name],
                )

        return ignored
