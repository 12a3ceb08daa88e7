"""Features that change precision after the end of a session: gone and said, or kept until they are released."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.session import InspectSession, running_session
from tests.conftest import Keeper, feature, global_state, module_state, statistics
from tests.forked import executable

CONFIG: dict[str, Any] = {
    "fake": feature("FakeQuant", ["0"], gemms=["fprop"], tensors=["activation"], quant_format="FP8E5M2"),
    "high": feature("DisableFP8Layer", ["1"]),
    **statistics(),
}
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 32), te.LayerNormLinear(32, 32))


def evaluate(net: torch.nn.Module) -> torch.Tensor:
    net.eval()
    with torch.no_grad(), te.autocast(enabled=True):
        out: torch.Tensor = net(X).clone()
    net.train()
    return out


def session_of(net: torch.nn.Module, folder: Path, **keywords: Any) -> tuple[InspectSession, torch.Tensor]:
    """A session that has ended, and what an evaluation during it gave."""
    with InspectSession(CONFIG, model=net, log_dir=folder, **keywords) as session:
        with te.autocast(enabled=True):
            net(X).sum().backward()
        session.step()
        during = evaluate(net)
    return session, during


def test_kept_features_act_until_they_are_released(tmp_path: Path, keeper: Keeper) -> None:
    net = model()
    evaluate(net)
    before, modules = global_state(), module_state(net)
    session, during = session_of(net, tmp_path, keep_precision=True, sinks=[keeper])
    assert not session.running
    assert running_session() is None
    assert "precision kept" in repr(session)
    assert keeper.closed == [None]
    for _ in range(2):
        assert torch.equal(evaluate(net), during), "called by hand"
    with te.autocast(enabled=False):
        net(X).sum().backward()
    assert torch.equal(evaluate(net), during), "after training by hand, with autocast off in between"
    assert keeper.iterations == [0], "nothing is observed any more"
    session.release()
    session.release()
    assert not torch.equal(evaluate(net), during)
    assert global_state() == before
    assert module_state(net) == modules


def test_the_next_session_releases_first(tmp_path: Path) -> None:
    first, second = model(), model()
    _, during = session_of(first, tmp_path / "1", keep_precision=True)
    with InspectSession(statistics(), model=second, log_dir=tmp_path / "2"):
        assert not torch.equal(evaluate(first), during)


def test_an_error_keeps_nothing(tmp_path: Path) -> None:
    net = model()
    before = global_state()
    with pytest.raises(ValueError, match="bad batch"):
        with InspectSession(CONFIG, model=net, log_dir=tmp_path, keep_precision=True):
            raise ValueError("bad batch")
    assert global_state() == before


def test_what_cannot_go_together_is_refused() -> None:
    with pytest.raises(OptionError, match="keep_precision"):
        InspectSession(keep_precision=True, precision_features_in_eval=False)


AT_EXIT = """
from te_precision_callbacks import reference
reference.install_where_needed()
import sys
from pathlib import Path
from tests.session.test_keeping import model, session_of
session_of(model(), Path(sys.argv[1]), keep_precision=True)
print("trained")
"""


@pytest.mark.processes
def test_a_process_may_end_with_what_was_kept(tmp_path: Path) -> None:
    command = [executable(whole=True), "-W", "error::ResourceWarning", "-c", AT_EXIT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert "Traceback" not in result.stderr
