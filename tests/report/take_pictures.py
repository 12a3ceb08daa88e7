"""Take the pictures of README.md and docs/records.md: docs/images/report-*.png.

The picture of README.md shows a real training with a defect: the gradient of one block is 2^18 too small.

python -m tests.report.take_pictures
"""

import io
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

from te_precision_callbacks import reference
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.views.report import write_report
from tests.docs.pages import ROOT
from tests.report.conftest import ARGUMENTS, Look
from tests.report.runs import drifting

_LAYER = "decoder.layers.4.self_attention.qkv"
_PICTURES = {
    "finding": ("page=summary", 860, False),
    "heatmap": ("page=heatmap&statistic=sqnr_db&tensor=activation", 760, False),
    "layer": (f"page=layer&layer={_LAYER}", 1120, False),
    "profile": ("page=profile&tensor=activation&step=179", 800, True),
}
"""Name -> where in the page, its height, whether it is dark."""

_WIDTH = 1440


def _with_a_defect(folder: Path) -> RecordedRun:
    reference.install_where_needed()
    # Not above: Transformer Engine needs the reference backend on a machine without a GPU.
    from tests.diagnosis.planted import blocks, trained

    decoder = torch.nn.Sequential(OrderedDict(layers=blocks(width=64)))
    model = torch.nn.Sequential(OrderedDict(decoder=decoder, head=torch.nn.Linear(64, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch, wanted = torch.randn(64, 64), torch.randint(16, (64,))
    trained(
        folder, model, optimizer, steps=60, loss=lambda step: torch.nn.functional.cross_entropy(model(batch), wanted)
    )
    return open_run(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = {
            "drifting": drifting(steps=200),
            "finding": _with_a_defect(Path(folder) / "defect"),
        }
        reports = {
            name: write_report(replace(run, path=Path("gpt-fp8")), Path(folder) / f"{name}.html")
            for name, run in runs.items()
        }
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for name, (address, height, dark) in _PICTURES.items():
            look = Look(browser.new_page(viewport={"width": _WIDTH, "height": height}))
            look.open(reports.get(name, reports["drifting"]), address, dark=dark)
            look.everything_drawn()
            look.page.evaluate("scrollTo(0, 0)")
            taken = Image.open(io.BytesIO(look.page.screenshot())).convert("RGB")
            taken.quantize(256).save(ROOT / "docs" / "images" / f"report-{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
