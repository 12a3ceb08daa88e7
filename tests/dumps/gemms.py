"""Records of GEMMs, made by small trainings with each recipe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.session import InspectSession
from tests.capability import stand_for
from tests.conftest import feature

RECIPES: Mapping[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "delayed": (recipes.DelayedScaling, (9, 0)),
    "current": (recipes.Float8CurrentScaling, (9, 0)),
    "block": (recipes.Float8BlockScaling, (9, 0)),
    "mxfp8": (recipes.MXFP8BlockScaling, (10, 0)),
    "nvfp4": (recipes.NVFP4BlockScaling, (10, 0)),
    "nvfp4 without": (lambda: recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True), (10, 0)),
}
GEMMS = ["fprop", "dgrad", "wgrad"]
ROWS, INPUTS, OUTPUTS = 128, 192, 256


def train(
    folder: Path,
    name: str,
    *,
    steps: int = 1,
    observe: str = "auto",
    accumulates: bool = False,
    measures: bool = False,
    broken: float | None = None,
    **options: Any,
) -> list[Path]:
    """Train a Linear layer with recorded GEMMs, and return the files of the last step, in the order of GEMMs.

    ``broken`` is put into an element of the input.
    """
    recipe, capability = RECIPES[name]
    stand_for(capability)
    torch.manual_seed(1)
    net: Any = te.Linear(INPUTS, OUTPUTS, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=accumulates)
    if accumulates:
        net.weight.main_grad = torch.randn(OUTPUTS, INPUTS)
    config = {"record": feature("DumpTensors", ["all"], **{"gemms": GEMMS, **options})}
    if measures:
        config["measure"] = feature("LogGemmError", ["all"], gemms=GEMMS, freq=1)
    model = torch.nn.Sequential(net)
    with InspectSession(config, model=model, log_dir=folder, observe=observe) as session:
        for _ in range(steps):
            x = torch.randn(ROWS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
            if broken is not None:
                x.data[3, 5] = broken
            with te.autocast(enabled=True, recipe=recipe()):
                out = model(x)
            (out * torch.randn_like(out)).sum().backward()
            session.step()
    last = folder / "tensor_dumps" / "rank_0" / f"iter_{steps - 1:06d}"
    return sorted(
        last.glob("*_gemm*.safetensors"), key=lambda path: GEMMS.index(path.name.split(".")[1][:5].rstrip("_"))
    )
