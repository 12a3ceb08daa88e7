"""What mkdocs is told beside mkdocs.yml: pages from files outside of docs/, a page for each public module, and links.

The pages of docs/ and the README link to one another as files of the repository, so that they can be read there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from links import between_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from public_names import PACKAGE, public_names

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""File of the repository outside of docs/ -> page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of modules into the navigation."""
    nav: Any = config.nav
    sections = {title: entries for section in nav for title, entries in section.items() if isinstance(entries, list)}
    sections["API reference"] += [
        {module.removeprefix(f"{PACKAGE}."): _page_of(module)} for module in public_names(ROOT)
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for module, names in public_names(ROOT).items():
        files.append(File.generated(config, _page_of(module), content="\n".join(_reference(module, names))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository as links between pages, which have titles in the place of file names.

    Links to files that are no pages are left out.
    """
    pages = dict(ELSEWHERE)
    pages |= {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()}
    own = next((path for path, target in ELSEWHERE.items() if target == page.file.src_uri), f"docs/{page.file.src_uri}")

    if own == "docs/options.md":
        before, heading, modules = markdown.partition("\n## Public names\n")
        markdown = before + heading + re.sub(r"(?m)^\| `.*?(?= \|)", _to_modules, modules)
    return "".join(
        part if part.lstrip().startswith("```") else between_pages(part, own, pages) for part in _fenced_apart(markdown)
    )


def _to_modules(cell: re.Match[str]) -> str:
    """The names of modules in a cell of the table of docs/options.md as links to their pages."""

    def link(name: re.Match[str]) -> str:
        module = PACKAGE + name[1] if name[1].startswith(".") else name[1]
        return f"[{name[0]}]({_page_of(module)})"

    return re.sub(r"`([\w.]+)`", link, cell[0])


def _fenced_apart(markdown: str) -> list[str]:
    return re.split(r"(?ms)(^ *```.*?^ *```$)", markdown)


def _page_of(module: str) -> str:
    return f"api/{module}.md"


def _reference(module: str, names: tuple[str, ...]) -> Iterator[str]:
    """The page of a module."""
    yield f"# {module} {{ #{module} }}\n"
    yield f"::: {module}\n    options: {{show_root_heading: false, show_root_toc_entry: false, members: false}}\n"
    if module == PACKAGE:
        homes = {name: home for home, found in public_names(ROOT).items() if home != PACKAGE for name in found}
        yield "Its names, each with its home:\n"
        yield from (f"- [`{name}`][{homes[name]}.{name}]" for name in names)
        return
    yield from (f"::: {module}.{name}\n" for name in names)
