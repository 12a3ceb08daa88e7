"""Takes the pictures of docs/report.md, docs/images/report-*.png, of a page as it is now.

python -m tests.report.take_pictures
"""

from __future__ import annotations

import io
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from te_precision_callbacks.views.report import write_report
from tests.docs.pages import ROOT
from tests.report.conftest import ARGUMENTS, Look
from tests.report.runs import drifting

_LAYER = "decoder.layers.4.self_attention.qkv"
_PICTURES = {
    "heatmap": ("page=heatmap&statistic=sqnr_db&tensor=activation", 760, False),
    "layer": (f"page=layer&layer={_LAYER}", 1120, False),
    "profile": ("page=profile&tensor=activation&step=179", 800, True),
}
"""Name -> where in the page, its height, whether it is dark."""

_WIDTH = 1440


def main() -> None:
    """Overwrites the pictures."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = write_report(replace(drifting(steps=200), path=Path("gpt-fp8")), Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for name, (address, height, dark) in _PICTURES.items():
            look = Look(browser.new_page(viewport={"width": _WIDTH, "height": height}))
            look.open(report, address, dark=dark)
            look.everything_drawn()
            look.page.evaluate("scrollTo(0, 0)")
            taken = Image.open(io.BytesIO(look.page.screenshot())).convert("RGB")
            taken.quantize(256).save(ROOT / "docs" / "images" / f"report-{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
