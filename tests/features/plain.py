"""nvidia-dlfw-inspect without a session, put back after each use, and its logs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import torch
import transformer_engine.debug.features as te_features
import transformer_engine.pytorch as te
from nvdlfw_inspect.logging import BaseLogger
from nvdlfw_inspect.registry import Registry
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.debug.pytorch.debug_state import TEDebugState

import te_precision_callbacks.features as own_features
from te_precision_callbacks.features.registration import register
from te_precision_callbacks.instrumentation.upstream import isolate_upstream
from te_precision_callbacks.session import InspectSession

OURS = str(Path(own_features.__path__[0]))
THEIRS = str(Path(te_features.__path__[0]))


class Logged(BaseLogger):  # type: ignore[misc]
    """Statistic -> iteration -> value."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, float]] = {}

    def log_scalar(self, name: str, value: Any, iteration: int, **_: Any) -> None:
        self.rows.setdefault(name, {})[iteration] = float(value)

    def iterations(self, name: str) -> list[int]:
        return sorted(self.rows.get(name, {}))


def config_of(features: dict[str, Any], layers: str = "linear") -> dict[str, Any]:
    return {"s": {"enabled": True, "layers": {"layer_types": [layers]}, "transformer_engine": features}}


@contextmanager
def plain(
    features: dict[str, dict[str, Any]],
    log_dir: Path,
    *,
    folders: Sequence[str | Path] = (OURS,),
    classes: Sequence[type] = (),
    fresh: bool = False,
    layers: str = "linear",
    files: bool = False,
) -> Iterator[Logged]:
    """nvidia-dlfw-inspect with these features on every layer called ``linear``.

    Args:
        fresh: as where Transformer Engine's features were not imported, or a run has ended: nothing is registered.
        layers: another name, or ``all``.
        files: write the files of its logger too.
    """
    logged = Logged()
    isolated = isolate_upstream()
    try:
        if fresh:
            Registry.data.clear()
        TEDebugState.debug_enabled = None
        for feature in classes:
            register(feature)
        debug_api.initialize(
            config_of(features, layers),
            feature_dirs=list(map(str, folders)),
            log_dir=str(log_dir),
            statistics_logger=logged,
            default_logging_enabled=files,
        )
        yield logged
    finally:
        debug_api.end_debug()
        debug_api.DEBUG_MANAGER = None
        isolated.close()


def in_session(features: dict[str, Any], log_dir: Path, steps: int = 1, /, **keywords: Any) -> InspectSession:
    net = te.Linear(32, 32)
    with InspectSession(config_of(features), model=net, log_dir=log_dir, **keywords) as session:
        train(net, steps, session)
    return session


def linear(size: int = 32, **keywords: Any) -> te.Linear:
    return te.Linear(size, size, name="linear", **keywords)


def train(net: torch.nn.Module, steps: int = 1, session: InspectSession | None = None) -> None:
    for _ in range(steps):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = net(torch.randn(16, 32, requires_grad=True))
        output.sum().backward()
        if session is None:
            debug_api.step()
        else:
            session.step()
