"""Docstrings of the package as Markdown: the roles of Sphinx become links, and what follows `::` a block of code.

An extension of griffe, by which mkdocstrings reads the sources.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from public_names import PACKAGE, public_names

ROOT = Path(__file__).parents[2]

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?(?P<target>[\w.]+)`")


class AsMarkdown(griffe.Extension):  # type: ignore[misc]  # griffe is not installed where types are checked
    """Rewrites each docstring when the package was read."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Rewrite all docstrings; what a role names is linked where it is public."""
        if pkg.path != PACKAGE:
            return
        public: dict[str, str] = {}
        for module, names in sorted(public_names(ROOT).items(), reverse=True):
            public[module] = module
            for name in names:
                found = loader.modules_collection[f"{module}.{name}"]
                target = found.final_target if found.is_alias else found
                home = public.setdefault(target.path, f"{module}.{name}")
                public[f"{module}.{name}"] = home
                attributes = target.all_members if target.is_class else {}
                for path in (target.path, f"{module}.{name}"):
                    public |= {f"{path}.{member}": f"{home}.{member}" for member in attributes if member[0] != "_"}
        _rewrite(pkg, public)


def _rewrite(parent: griffe.Object, public: dict[str, str]) -> None:
    if parent.docstring is not None:
        text = _ROLE.sub(lambda role: _link(role["target"], parent, public), parent.docstring.value)
        parent.docstring.value = _with_blocks(text)
    for member in parent.members.values():
        if not member.is_alias and isinstance(member, griffe.Object):
            _rewrite(member, public)


def _link(target: str, place: griffe.Object, public: dict[str, str]) -> str:
    """A role's target as a link, or as code where it is not public.

    Args:
        target: a whole path, or a name as it is written in the place.
        place: whose docstring it stands in.
        public: path -> the path under which the reference has it.
    """
    shown = f"`{target.rsplit('.', 1)[-1] if target.startswith(PACKAGE) else target}`"
    first, _, rest = target.partition(".")
    try:
        path = target if first == PACKAGE else ".".join(filter(None, (place.resolve(first), rest)))
    except griffe.NameResolutionError:
        return shown
    return f"[{shown}][{public[path]}]" if path in public else shown


def _with_blocks(text: str) -> str:
    """Literal blocks of reStructuredText as fenced ones."""

    def block(found: re.Match[str]) -> str:
        code = textwrap.dedent(found["code"]).strip("\n")
        heading = "" if found["before"] in ("Usage", "Example") else f"{found['before']}:"
        return f"{heading}\n\n```{_language(code)}\n{code}\n```\n\n"

    return re.sub(r"(?m)^(?P<before>.*)::\n\n(?P<code>(?:(?: {4,}.*)?\n|(?: {4,}.+)\Z)+)", block, text)


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"
