"""A browser that opens reports, and records their console messages and requests."""

import csv
import io
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright")

import pandas  # noqa: F401  # pyarrow imports it at the first write, which the thread that writes may do for 10 s only
from playwright.sync_api import Locator, Page, sync_playwright

from tests.accelerate.conftest import offline_trackers  # noqa: F401

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@dataclass
class Look:
    """A report in the browser.

    Attributes:
        page: the browser's page.
        complaints: warnings and errors of the console, and uncaught exceptions.
        asked_for: all that was requested.
        place: where a report is opened, as a copy; None for where it is.
        opened: the report that is open: its file, when that was written, and whether the system prefers dark pages.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)
    place: Path | None = None
    opened: tuple[Path, int, bool] | None = None

    def open(self, report: Path, address: str = "", *, dark: bool = False) -> None:
        """Open a report, turn to a page, and wait until it is drawn.

        A report that is open already is only turned: its address has the whole state.

        Args:
            report: the file.
            address: the page's state.
            dark: whether the system prefers dark pages.
        """
        wanted = (report, report.stat().st_mtime_ns, dark)
        if wanted == self.opened:
            self.page.evaluate("history.replaceState(null, '', '#left'); scrollTo(0, 0)")
            self.turn(address)
            return
        self.close()
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        if self.place:
            report = Path(shutil.copyfile(report, self.place))
        self.page.goto(report.as_uri())
        self.page.wait_for_selector("body[data-shown]")
        if address:
            self.turn(address)
        self.opened = wanted

    def close(self) -> None:
        self.page.goto("about:blank")
        self.opened = None

    def turn(self, address: str) -> None:
        self.go_by(lambda: self.page.evaluate("address => { location.hash = address; }", address))

    def go(self, press: Locator) -> None:
        self.go_by(press.click)

    def go_by(self, act: Callable[[], object]) -> None:
        before = self.page.get_attribute("body", "data-shown")
        act()
        self.page.wait_for_function("before => document.body.dataset.shown !== before", arg=before)

    def everything_drawn(self, address: str = "") -> int:
        if address:
            self.turn(address)
        plots = self.page.locator(".plot")
        for plot in plots.all():
            plot.scroll_into_view_if_needed()
            plot.locator("xpath=self::*[@data-drawn='yes']").wait_for()
            assert plot.locator("svg.main-svg").count() >= 2
        return plots.count()

    def open_in_the_dark(self, report: Path, plots_of: Mapping[str, int]) -> None:
        self.open(report, "page=nowhere", dark=True)
        for address, plots in plots_of.items():
            self.turn(f"page={address}")
            assert self.everything_drawn() == plots
            background = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert sum(map(int, re.findall(r"\d+", background))) < 200
            assert self.page.locator("[role=alert]").count() == 0
            assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"

    def plot(self, script: str) -> Any:
        """A script's result for the first plot, ``plot``, when it is drawn."""
        self.page.locator(".plot").first.locator("xpath=self::*[@data-drawn]").wait_for()
        return self.page.evaluate(f"(() => {{ const plot = document.querySelector('.plot'); return {script}; }})()")

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Window coordinates of a place in the first plot's own coordinates."""
        self.page.locator(".plot").first.scroll_into_view_if_needed()
        box, left, top = (
            self.plot(script)
            for script in (
                "(({left, top}) => [left, top])(plot.getBoundingClientRect())",
                f"plot._fullLayout.xaxis._offset + plot._fullLayout.xaxis.d2p({x})",
                f"plot._fullLayout.yaxis._offset + plot._fullLayout.yaxis.d2p({y})",
            )
        )
        return box[0] + left, box[1] + top

    def saved(self, button: Locator) -> list[list[str]]:
        with self.page.expect_download() as download:
            button.click()
        return list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))

    def tip(self, x: float, y: float) -> str:
        self.page.mouse.move(*self.at(x, y))
        self.page.wait_for_timeout(150)
        self.page.wait_for_selector(".tip:not([hidden])")
        return self.page.locator(".tip").inner_text()


@pytest.fixture(scope="package")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    """A browser with one page, for all tests of this folder.

    All reports are opened at one place in a folder, where Chromium compiles plotly.js once: that takes longest.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("a report is looked at in Chromium, which is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(accept_downloads=True)
        page.set_default_timeout(60_000)
        result = Look(page, place=tmp_path_factory.mktemp("window") / "report.html")
        page.on("console", lambda said: result.complaints.append(said.text) if said.type != "log" else None)
        page.on("pageerror", lambda error: result.complaints.append(str(error)))
        page.on("dialog", lambda dialog: result.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda asked: result.asked_for.append(asked.url))
        yield result
        browser.close()


@pytest.fixture
def look(window: Look) -> Iterator[Look]:
    """A page of the browser; that nothing was complained of, and nothing requested but the file, is seen at the end."""
    window.page.set_viewport_size({"width": 1360, "height": 900})
    window.page.mouse.move(0, 0)
    yield window
    if window.opened and window.page.evaluate("localStorage.length"):
        window.page.evaluate("localStorage.clear()")
        window.close()
    complaints, asked_for = window.complaints[:], window.asked_for[:]
    window.complaints.clear()
    window.asked_for.clear()
    assert complaints == []
    assert [url for url in asked_for if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    assert len({url.partition("#")[0] for url in asked_for if url.startswith("file:")}) <= 1
