"""Links, public names, the pages' statements about the code, and the outputs of docs/start.md."""

import ast
import importlib
import inspect
import re
import runpy
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import te_precision_callbacks
from tests.docs.pages import PAGES, ROOT, blocks, tokens
from tests.public_api import PACKAGE, listed, public_names
from tools import options_page, rules_table, tour


def anchors(page: str) -> set[str]:
    titles = [inline.content for opened, inline in pairwise(tokens(page)) if opened.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def relative_links(page: str) -> list[str]:
    inside = [child for token in tokens(page) for child in token.children or ()]
    links = [str(child.attrs["href"]) for child in inside if child.type == "link_open"]
    return [link for link in links if not link.startswith(("http://", "https://"))]


def test_relative_links_lead_to_files_and_anchors() -> None:
    for page in PAGES:
        for link in relative_links(page):
            target, _, anchor = link.partition("#")
            path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
            assert path.exists(), link
            if anchor:
                assert anchor in anchors(path.relative_to(ROOT).as_posix()), link


def test_the_site_has_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").as_posix()
        assert re.search(rf" {re.escape(page)}$", navigation, re.MULTILINE), f"mkdocs.yml: nav has no {page}"


LINKS = [
    ("README.md", "![a map](docs/images/map.png)", "![a map](images/map.png)"),
    ("docs/records.md", "![a map](images/map.png)", "![a map](images/map.png)"),
    ("docs/parts/2.md", "![a map](../images/map.png)", "![a map](../images/map.png)"),
    ("README.md", "[a report](docs/records.md#report)", "[a report](records.md#report)"),
    ("docs/parts/2.md", "[records.md](../records.md)", "[Recorded runs](../records.md)"),
    ("docs/records.md", "[the rules](../CONTRIBUTING.md)", "[the rules](contributing.md)"),
    ("docs/records.md", "[a test](../tests/conftest.py)", "a test"),
]


def test_links_and_images_of_the_site() -> None:
    pages = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "docs/records.md": "records.md",
        "docs/parts/2.md": "parts/2.md",
    }
    between_pages = runpy.run_path(str(ROOT / "docs" / "site" / "links.py"))["between_pages"]
    for page, text, on_the_site in LINKS:
        assert between_pages(text, page, pages) == on_the_site


# ------------------------------------------------------------------------- public names, by the rule of docs/options.md


@pytest.fixture(scope="module")
def public() -> dict[str, tuple[str, ...]]:
    return public_names(ROOT)


def test_the_list_is_that_of_the_package() -> None:
    remedy = "a change of the public API: python -m tests.public_api > tests/public_api.txt"
    assert listed().splitlines() == (ROOT / "tests" / "public_api.txt").read_text().splitlines(), remedy


def test_every_public_class_and_function_has_a_docstring(public: dict[str, tuple[str, ...]]) -> None:
    for module, names in public.items():
        result = importlib.import_module(module)
        assert result.__doc__, module
        for name in names:
            value = getattr(result, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                assert inspect.getdoc(value), f"{module}.{name}"


def test_the_page_names_every_public_module(public: dict[str, tuple[str, ...]]) -> None:
    page = (ROOT / "docs" / "options.md").read_text().partition("\n## Public names\n")[2]
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert {PACKAGE + name if name.startswith(".") else name for name in named} == set(public)


def test_imports_of_pages_are_public(public: dict[str, tuple[str, ...]]) -> None:
    for page in [page for page in PAGES if page == "README.md" or page.startswith("docs/")]:
        text = PAGES[page].read_text()
        for module, names in re.findall(rf"^ *from ({PACKAGE}[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            for name in re.split(", *", names):
                assert module in public, f"{module} is not public"
                assert name in public[module] or f"{module}.{name}" in public, f"{module}.{name} is not public"
        for module in re.findall(rf"^ *import ({PACKAGE}[\w.]*)$", text, re.MULTILINE):
            assert module in {*public, f"{PACKAGE}.features"}, f"{module} is not public"


# ------------------------------------------------------------------------------------------------- docs/architecture.md


def paths() -> list[list[str]]:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Call paths\n")[2].partition("\n## ")[0]
    return [block.splitlines() for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL)]


@cache
def functions(file: str) -> set[str]:
    folder = ROOT if file.startswith("features/") else ROOT / "te_precision_callbacks"
    results: set[str] = set()
    for node in ast.parse((folder / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            results.add(node.name)
        elif isinstance(node, ast.ClassDef):
            results |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return results


def test_each_function_of_a_call_path_exists() -> None:
    for path in paths():
        assert len(path) <= 15
        named = [match.groups() for line in path if (match := re.match(r" *(\S+\.py) +(\S+)", line))]
        assert len(named) >= len(path) - 2, "all lines but those of Transformer Engine"
        assert [(file, name) for file, name in named if name not in functions(file)] == []


def test_there_are_call_paths() -> None:
    assert len(paths()) == 3


# ------------------------------------------------------------------------------------------------- tables that are made


def test_the_table_of_options_is_made_from_the_code() -> None:
    remedy = "the code has changed; python -m tools.options_page prints the table"
    assert options_page.table() in (ROOT / "docs" / "options.md").read_text(encoding="utf-8"), remedy


def test_the_tables_of_rules_are_made_from_the_code() -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    remedy = "the code has changed; python -m tools.rules_table prints the tables"
    assert [
        heading for heading, table in rules_table.tables().items() if f"## {heading}\n\n{table}\n" not in page
    ] == [], remedy


# ---------------------------------------------------------------------------------------------- docs/support.md


def test_the_quoted_messages_are_in_the_sources() -> None:
    texts = [
        node.value
        for path in Path(te_precision_callbacks.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    symptoms = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    quoted = [part.strip() for cell in symptoms for text in re.findall('"([^"]+)"', cell) for part in text.split("...")]
    assert len(quoted) > 15
    assert [part for part in quoted if not any(part in text for text in texts)] == []


# -------------------------------------------------------------------------------------------------------- docs/start.md


@pytest.mark.slow  # three small trainings
def test_the_outputs_of_the_first_page_are_current(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with tour.surroundings(tmp_path):
        results = tour.run(tour.PAGE)
    torch.set_num_threads(threads)
    sys.modules.pop("small_model", None)
    assert len(results) == len(blocks("docs/start.md", "text")) > 0
    for output in results:
        remedy = "if the page should show this now: .venv/bin/python tools/tour.py"
        assert output.is_true, f"the page shows\n{output.shown}\nand there came\n{output.renewed}\n{remedy}"


ALIKE = [
    ("loss 2.61", "loss  2.58", True),
    ("loss 2.61", "loss 5.3", False),
    ("loss 2.61", "lost 2.61", False),
    ("first at step 10", "first at step 11", False),
    ("layers.0.fc1 12.5", "layers.1.fc1 12.5", False),
    ("std 1.44e-03", "std 1.41e-03", True),
    ("std 1.44e-03", "std 1.44e-04", False),
    ("[5.6, nan]", "[5.6, 5.6]", False),
    ("one", "one\ntwo", False),
]


def test_similar_outputs() -> None:
    for shown, came, is_alike in ALIKE:
        assert tour.alike(shown, came) is is_alike


def test_lines_that_are_left_out() -> None:
    came = ["head", "a 1", "noise", "b 1", "b 2", "tail", "end"]
    assert tour.cut(["head", "...", "b 1", "-", "...", "end"], came) == ["head", "...", "b 1", "b 2", "...", "end"]
    assert tour.cut(["head"], came) == came
    with pytest.raises(LookupError, match="gone"):
        tour.cut(["...", "gone", "..."], came)
