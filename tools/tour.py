"""Renew the outputs and pictures of docs/start.md: run the page, and insert the results.

    .venv/bin/python tools/tour.py              # outputs and pictures; pictures need chromium
    .venv/bin/python tools/tour.py --outputs    # outputs alone

tests/docs/test_pages.py runs the page in the same way, and compares.

The page is run from top to bottom, in one folder:

- ``python`` blocks share their names; a part of a function of examples/small_model.py is only shown;
- ``bash`` blocks of ``te-precision`` and ``python`` commands run; commands that install are left to
  tests/docs/test_blocks.py;
- a ``yaml`` block is written to a file if its first line is a comment with the file's name;
- a ``text`` block is the output of the code above it. A line ``...`` stands for lines that are left out; the next line
  is found by its first two words. An exception is its class and its message;
- ``<!-- picture: fp8.html#page=heatmap, 1200 x 500 from 80 -->`` is the source of the next image: a page that a
  report has been written to, an address in it, the size in pixels, and how far down it begins, if not at the top.
"""

from __future__ import annotations

import io
import math
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "start.md"

WIDTH = 130
"""Columns of the terminal that commands print to."""

LEFT_OUT = "..."

_FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(
    r"<!-- picture: (?P<report>\S+)#(?P<address>\S+), (?P<width>\d+) x (?P<height>\d+)(?: from (?P<top>\d+))? -->\n\n"
    r"!\[[^]]+\]\((?P<file>[^)]+)\)"
)
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.]*[A-Za-z_])")
_DRAWN = re.compile("[─▁-█]+")
"""Rules of tables, and curves."""

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@dataclass(frozen=True)
class Output:
    """A ``text`` block of a page, and the output of the code above it.

    Attributes:
        page: the page.
        start: where the content of the block begins in the page.
        shown: the content of the block.
        came: the output.
    """

    page: Path
    start: int
    shown: str
    came: str

    @property
    def renewed(self) -> str:
        """The output in the place of the shown lines."""
        return "".join(f"{line}\n" for line in cut(self.shown.splitlines(), self.came.splitlines()))

    @property
    def is_true(self) -> bool:
        """Whether the page shows the output."""
        return alike(self.shown, self.renewed)


def run(page: Path) -> list[Output]:
    """Run a page in the current folder."""
    results: list[Output] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    blocks = list(_FENCE.finditer(page.read_text(encoding="utf-8")))
    for number, block in enumerate(blocks):
        code = block["code"]
        match block["language"]:
            case "python" if is_excerpt(code):
                continue
            case "python":
                shows = number + 1 < len(blocks) and blocks[number + 1]["language"] == "text"
                printed = _python(code, names, f"{page.name}, block {number}", raises=shows)
            case "bash" if not code.startswith("pip "):
                printed = "".join(map(_command, code.splitlines()))
            case "yaml":
                name, _, _ = code.removeprefix("# ").partition("\n")
                Path(name).write_text(code, encoding="utf-8")
            case "text":
                results.append(Output(page, block.start("code"), code, printed))
    return results


def is_excerpt(code: str) -> bool:
    """Return whether code is a part of the script of the tour, which a page shows."""
    return indent(code, "    ") in (ROOT / "examples" / "small_model.py").read_text(encoding="utf-8")


def _python(code: str, names: dict[str, Any], where: str, *, raises: bool) -> str:
    with redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(code, where, "exec"), names)
        except Exception as error:
            if not raises:
                raise
            print(f"{type(error).__name__}: {error}")
    return out.getvalue()


def _command(line: str) -> str:
    """Output of a command; empty for a command that does not run here."""
    program, *arguments = shlex.split(line, comments=True)
    if program not in ("te-precision", "python"):
        return ""
    before = sys.argv
    with redirect_stdout(io.StringIO()) as out:
        try:
            if program == "python":
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
            else:
                from te_precision_callbacks.cli import main as te_precision

                sys.argv = [program, *arguments]
                te_precision()
        except SystemExit as ended:
            if ended.code not in (None, 0, 1):  # 1: a comparison has found something
                raise RuntimeError(f"{line} ended with {ended.code}: {out.getvalue()}") from None
        finally:
            sys.argv = before
    return out.getvalue()


def cut(shown: Sequence[str], came: Sequence[str]) -> list[str]:
    """Those of the lines that came out which a page shows.

    Raises:
        LookupError: nothing came out that begins as lines after ``...`` do.
    """
    came = [line.rstrip() for line in came]
    if LEFT_OUT not in shown:
        return list(came)
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    chosen = list(came[: len(parts[0])])
    behind = len(chosen)
    for number, part in enumerate(parts[1:], start=1):
        chosen.append(LEFT_OUT)
        if part and number == len(parts) - 1:
            behind = max(behind, len(came) - len(part))
        elif part:
            begin = part[0].split()[:2]
            places = [at for at in range(behind, len(came)) if came[at].split()[:2] == begin]
            if not places:
                raise LookupError(f"no line that begins with {' '.join(begin)!r} came out, in {came}")
            behind = places[0]
        chosen += came[behind : behind + len(part)]
        behind += len(part)
    return chosen


def alike(shown: str, came: str) -> bool:
    """Return whether texts are equal but for spaces, and decimal numbers that differ by at most half of the larger.

    Whole numbers are equal, so a page shows no step that rounding decides. Rounding differs between processors, and
    grows in a training: with other vector instructions, an underflows% of 8.25 was 11.2, and the worst of 30 steps,
    which were alike, was step 23 and not step 13.
    """
    lines, others = shown.split("\n"), came.split("\n")
    return len(lines) == len(others) and all(map(_alike, lines, others))


def _alike(line: str, other: str) -> bool:
    (words, numbers), (others, other_numbers) = _taken_apart(line), _taken_apart(other)
    return words == others and all(map(_near, numbers, other_numbers))


def _taken_apart(line: str) -> tuple[list[str], list[str]]:
    """The text between the numbers of a line, without drawings, and the numbers."""
    parts = _NUMBER.split(line)
    return [" ".join(_DRAWN.sub(" ", part).split()) for part in parts[::2]], parts[1::2]


def _near(number: str, other: str) -> bool:
    if number.isdigit() and other.isdigit():
        return number == other
    decimals = len(number.partition("e")[0].partition(".")[2])
    unit = 10.0**-decimals if "e" not in number else 0.0
    return math.isclose(float(number), float(other), rel_tol=0.5, abs_tol=1.01 * unit)


@dataclass(frozen=True)
class Picture:
    """An image of a page: its path, the page, its size in pixels, and how far down it begins."""

    file: Path
    report: str
    address: str
    width: int
    height: int
    top: int


def pictures() -> list[Picture]:
    """Those of the page."""
    return [
        Picture((PAGE.parent / item["file"]).resolve(), item["report"], item["address"], *_size(item))
        for item in _PICTURE.finditer(PAGE.read_text(encoding="utf-8"))
    ]


def _size(found: re.Match[str]) -> tuple[int, int, int]:
    return int(found["width"]), int(found["height"]), int(found["top"] or 0)


def browser() -> str | None:
    """The path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def taken(wanted: Sequence[Picture], folder: Path, executable: str) -> Iterator[tuple[Picture, Image]]:
    """The pictures of reports in a folder, with the browser at a path."""
    import PIL.Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        page = launched.new_page(color_scheme="light")
        opened = folder / "opened.html"  # all at one place: there Chromium compiles plotly.js only once
        for picture in wanted:
            shutil.copyfile(folder / picture.report, opened)
            page.set_viewport_size({"width": picture.width, "height": picture.height})
            page.goto(opened.as_uri())
            page.wait_for_selector("body[data-shown='1']")
            page.evaluate("address => { location.hash = address; }", picture.address)
            page.wait_for_selector("body[data-shown='2']")
            for plot in page.locator(".plot").all():
                plot.scroll_into_view_if_needed()
                plot.locator("xpath=self::*[@data-drawn='yes']").wait_for()
            page.evaluate("scrollTo(0, 0)")
            place: Any = {"x": 0, "y": picture.top, "width": picture.width, "height": picture.height}
            yield picture, PIL.Image.open(io.BytesIO(page.screenshot(full_page=True, clip=place))).convert("RGB")
        launched.close()


@contextmanager
def surroundings(folder: Path) -> Iterator[None]:
    """In a folder, with the modules of examples/ and a terminal of :data:`WIDTH`."""
    examples = str(ROOT / "examples")
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    sys.path.insert(0, examples)
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(examples)
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def main(arguments: Sequence[str]) -> None:
    """Rewrites the page, and the pictures unless ``--outputs`` is given."""
    with tempfile.TemporaryDirectory() as folder:
        with surroundings(Path(folder)):
            outputs = run(PAGE)
            renew(PAGE, {output.start: output for output in outputs})
            print(f"{PAGE.relative_to(ROOT)}: {sum(not output.is_true for output in outputs)} outputs had changed")
        if "--outputs" in arguments:
            return
        executable = browser()
        if executable is None:
            raise SystemExit("The pictures were not renewed: they need chromium (apt-get install chromium).")
        for picture, image in taken(pictures(), Path(folder), executable):
            image.quantize(128).save(picture.file, optimize=True)
            print(f"{picture.file.relative_to(ROOT)}: {picture.file.stat().st_size / 1000:.0f} kB")


def renew(page: Path, outputs: Mapping[int, Output]) -> None:
    """Put what came out into a page: where it differs, so that a renewal on another machine leaves the rest."""
    text = page.read_text(encoding="utf-8")
    for start, output in sorted(outputs.items(), reverse=True):
        if not output.is_true:
            text = text[:start] + output.renewed + text[start + len(output.shown) :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
