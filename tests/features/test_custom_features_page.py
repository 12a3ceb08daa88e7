"""docs/custom-features.md: the feature in it, as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper
from tests.docs.pages import blocks
from tests.features.plain import plain
from tests.features.probes import ANYTHING
from tests.reference.processes import REPOSITORY

PAGE = (REPOSITORY / "docs" / "custom-features.md").read_text()
FEATURE, STARTS, RARELY = blocks("docs/custom-features.md", "python")[:3]
(CONFIG,) = blocks("docs/custom-features.md", "yaml")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = te.Linear(32, 32)
        self.fc2 = te.Linear(32, 32, bias=False, name="fc2")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.read_by_fc2 = self.fc1(inputs)
        return self.fc2(self.read_by_fc2)


def keywords_for(how: str, folder: Path) -> dict[str, Any]:
    if how == "folder":
        folder.mkdir()
        (folder / "clip_outliers.py").write_text(FEATURE)
        return {"feature_dirs": [folder]}
    namespace: dict[str, Any] = {}
    exec(re.sub("^@Registry.*\n", "", FEATURE, flags=re.MULTILINE), namespace)
    return {"features": [namespace["ClipOutliers"]]}


def gradient() -> torch.Tensor:
    torch.manual_seed(3)
    values = torch.randn(64, 32)
    values[5, 6], values[7, 8] = 100.0, -50.0
    return values


def clipped(values: torch.Tensor) -> torch.Tensor:
    limit = float(3 * values.double().std())
    return values.clamp(-limit, limit)


@pytest.mark.parametrize("how", ["folder", "class"])
@pytest.mark.parametrize("fp8", [False, True])
def test_in_a_session(tmp_path: Path, keeper: Keeper, how: str, fp8: bool) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    keywords = keywords_for(how, tmp_path / "my_features")
    net, inputs = Net(), torch.randn(64, 32)
    options: dict[str, Any] = {"log_dir": tmp_path, "sinks": [keeper], "strict": True, "start_step": 98}
    with InspectSession(tmp_path / "config.yaml", model=net, **options, **keywords) as session:
        for step in range(98, 103):
            net.zero_grad()
            with te.autocast(enabled=fp8, recipe=DelayedScaling()):
                output = net(inputs)
            output.backward(gradient())
            session.step()
            acts = step >= 100
            expected = (clipped(gradient()) if acts else gradient()).t() @ net.read_by_fc2
            error = (net.fc2.weight.grad - expected).norm() / expected.norm()
            assert error < (0.1 if fp8 else 1e-6)
    assert keeper.values("clipped%", "fc2", "gradient") == dict.fromkeys((100, 101, 102), 100 * 2 / (64 * 32))


def test_the_table_has_the_calls_and_their_arguments(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", PAGE, re.MULTILINE)
    described = {call: set(re.findall(r"`(\w+)`", arguments)) for call, arguments in rows}
    seen: dict[str, set[str]] = {}

    def noting(name: str) -> Any:
        def call(self: Any, config: Any, layer_name: str, **arguments: Any) -> Any:
            seen.setdefault(name, set()).update(arguments)
            if name == "modify_tensor_enabled":
                return arguments["tensor_name"] == "output"
            if name == "modify_tensor":
                return arguments["tensor"]
            return True if name.endswith("_enabled") else None

        return call

    everything = type("Everything", (), {name: noting(name) for name in ANYTHING})
    with plain({"Everything": {"enabled": True}}, tmp_path, classes=[everything]):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = te.Linear(32, 32, name="linear")(torch.randn(16, 32))
        output.sum().backward()
    assert seen == described
