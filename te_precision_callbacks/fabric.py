"""Precision debugging for Lightning Fabric: one callback.

Usage::

    from lightning.fabric import Fabric
    from te_precision_callbacks.fabric import PrecisionDebugFabricCallback

    callback = PrecisionDebugFabricCallback("config.yaml")
    fabric = Fabric(callbacks=[callback])
    model, optimizer = fabric.setup(model, optimizer)
    with callback:
        ...  # the loop: its optimizer.step() ends a debug iteration
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self, Unpack

from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.layers.naming import Model
from te_precision_callbacks.options import SessionKeywords, SessionOptions, spelled_out
from te_precision_callbacks.session import InspectSession, SessionError
from te_precision_callbacks.sinks import MetricSelection

try:
    from lightning.fabric import Fabric
except ImportError as error:
    raise MissingExtraError("te_precision_callbacks.fabric", "lightning") from error

from te_precision_callbacks.lightning import LightningLoggerSink, scales_loss

__all__ = ["PrecisionDebugFabricCallback"]

logger = logging.getLogger(__name__)


class PrecisionDebugFabricCallback:
    """Runs Transformer Engine's precision debugging in a training loop with Fabric.

    The session starts in ``fabric.setup(model, optimizer)``, on every process, and ends with the block of ``with
    callback:``, :meth:`stop`, or the process. A step of the optimizer from ``fabric.setup`` ends a debug iteration; of
    several optimizers, the first to step counts.

    Rank 0 logs statistics to all Fabric loggers at the debug iteration, with the names of
    :class:`te_precision_callbacks.lightning.PrecisionDebugCallback`. ``log_dir`` defaults to the folder of Fabric's
    first logger. ``fabric.save`` and ``fabric.load`` take the callback as an entry of their state: ``{"model": model,
    "precision": callback}``.

    Modules in eval mode and forwards without gradients are not observed; features that change precision act there as in
    training.

    Args:
        config: a path, a mapping, a loaded config, or None for statistics on every Transformer Engine layer.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`.

    Raises:
        ConfigError: the config cannot be used; for problems that need the model, in ``fabric.setup``.
        OptionError: an option is unknown, or its value is invalid.
        TransformerEngineUnavailableError: in ``fabric.setup``, Transformer Engine cannot be imported.
    """

    @spelled_out
    def __init__(self, config: ConfigSource = None, **keywords: Unpack[SessionKeywords]) -> None:
        self._options = SessionOptions.from_keywords(config, **keywords)
        self._session: InspectSession | None = None
        self._models: list[torch.nn.Module] = []
        self._optimizer: Any = None
        self._restored: Mapping[str, Any] = {}
        self._has_started = False
        self._notices = Notices()

    @property
    def session(self) -> InspectSession:
        """Session of the current or last loop.

        Raises:
            SessionError: ``fabric.setup`` was not called with a model yet.
        """
        if self._session is None:
            raise SessionError(
                "The callback has no session yet. Pass it to Fabric(callbacks=[callback]): fabric.setup(model,"
                " optimizer) starts the session. After fabric.setup_module(model), call"
                " callback.on_after_setup(fabric, model)."
            )
        return self._session

    @property
    def _live(self) -> InspectSession | None:
        if self._session is not None and self._session.running:
            return self._session
        return None

    # ------------------------------------------------------------------ what Fabric calls

    def on_after_setup(self, fabric: Fabric, module: torch.nn.Module) -> None:
        """Start the session with the model, or attach all models set up so far.

        Fabric calls this at the end of ``setup``; after ``setup_module`` the script must call it, on every process.
        """
        if not any(module is other for other in self._models):
            self._models.append(module)
        if self._live is None:
            self._has_started = True
            select = MetricSelection(self._options.prefix, self._options.log_filter)
            self._session = InspectSession.from_options(self._options)
            self._session.start(
                log_dir=self._options.log_dir or _log_dir_of(fabric),
                sinks=[LightningLoggerSink(receiver, select) for receiver in fabric.loggers if fabric.is_global_zero],
                integration="fabric",
            )
            self._session.follow(fabric)
            restored = self._restored
            self._restored = {}
            self._session.load_state_dict(restored)
        session = self.session
        numbered_models = {f"model{number}": model for number, model in enumerate(self._models)}
        model: Model = numbered_models if len(numbered_models) > 1 else module
        try:
            session.attach(model)
        except BaseException as error:
            self.stop(error)
            raise
        if session.overflow is not None:
            session.overflow.loss_scaled = scales_loss(fabric.strategy.precision)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """End the debug iteration. Fabric calls this after each step of an optimizer that it has set up."""
        session = self._live
        if session is None:
            if self._session is None and self._notices.first("no model"):
                logger.warning(
                    "An optimizer stepped, but the session has no model, so nothing is observed. Set up the model"
                    " with fabric.setup(model, optimizer); or, after fabric.setup_module(model), call"
                    " callback.on_after_setup(fabric, model)."
                )
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            session.step()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Debug iteration and fingerprints of the low-precision state of all ranks; on every process."""
        if self._session is None:
            return {}
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a checkpoint's debug iteration, and audit the resume; before or after ``fabric.setup``."""
        if self._live is None:
            self._restored = state
        else:
            self._live.load_state_dict(state)

    # ------------------------------------------------------------------ end

    def stop(self, error: BaseException | None = None) -> None:
        """End the session, after an ``error`` if there was one, and undo everything that it changed; a no-op if it is
        not running.

        The statistics since the last step are written, from this process's own data, without a collective.
        """
        self._models = []
        self._optimizer = None
        if self._session is not None:
            self._session.stop(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and not self._has_started:
            logger.warning(
                "The 'with callback' block ended without a session, so nothing was observed. Pass the callback to"
                " Fabric(callbacks=[callback]), and call fabric.setup(model, optimizer) before or in the block."
            )
        self._has_started = False
        self.stop(error)


def _log_dir_of(fabric: Fabric) -> Path:
    """Rank 0's folder of the first logger that has a folder; else the working directory, as in a plain session."""
    folder = ""
    if fabric.is_global_zero:
        for receiver in fabric.loggers:
            getattr(receiver, "experiment", None)  # early, since a CSVLogger warns about files in its folder
            folder = folder or str(getattr(receiver, "log_dir", None) or getattr(receiver, "root_dir", None) or "")
    return Path(fabric.broadcast(folder) or ".")
