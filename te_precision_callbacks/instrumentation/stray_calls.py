"""Ignores, with a warning, a script's calls of nvidia-dlfw-inspect's API during a session.

A second ``step()``, for example, would silently skip every other iteration. A script's layer names count until the
session assigns its own. Read from nvidia-dlfw-inspect 0.2.2, ``api.py`` and ``debug_manager.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from te_precision_callbacks.base.notices import Notices

logger = logging.getLogger(__name__)

_INSTEAD = {
    "initialize": "The session has started nvidia-dlfw-inspect, with the session's config=.",
    "initialize_training_step": "start_step= or session.iteration sets the debug iteration.",
    "step": "The session's own step() counts the debug iterations.",
    "end_debug": "The session ends nvidia-dlfw-inspect when it stops.",
    "infer_and_assign_layer_names": "The layers have the names of session.layers; layer_names='upstream' gives them the"
    " names of this function, and names that it assigns before attach() select layers, too.",
    "set_tensor_reduction_group": "process_group= is the group over which statistics are reduced.",
}
"""Function of ``nvdlfw_inspect.api`` -> the session's replacement."""

_OF_THE_MANAGER = ("initialize_training_step", "step")
"""Functions that only call the debug manager. They are replaced there, which covers references that a script holds."""

_NAMING = "infer_and_assign_layer_names"


class StrayCalls:
    def __init__(self, manager: Any) -> None:
        import nvdlfw_inspect.api as debug_api

        self._notices = Notices()
        self._manager = manager
        self._replaced = {name: getattr(debug_api, name) for name in _INSTEAD if name not in _OF_THE_MANAGER}
        for name in _INSTEAD:
            if name != _NAMING:
                setattr(manager if name in _OF_THE_MANAGER else debug_api, name, self._ignored(name))
        manager.close = self._ignored("end_debug")  # of a reference that the script holds

    def keep_names(self) -> None:
        import nvdlfw_inspect.api as debug_api

        setattr(debug_api, _NAMING, self._ignored(_NAMING))

    def remove(self) -> None:
        """Restore the API's functions; the manager's replacements end with the manager."""
        import nvdlfw_inspect.api as debug_api

        vars(self._manager).pop("close", None)
        for name, function in self._replaced.items():
            setattr(debug_api, name, function)

    def _ignored(self, name: str) -> Callable[..., None]:
        def ignored(*_: Any, **__: Any) -> None:
            if self._notices.first(name):
                logger.warning(
                    "The script calls debug_api.%s() while the session is running. The call is ignored. %s",
                    name,
                    _INSTEAD[name],
                )

        return ignored
