"""The public API as text, a line for each name and each attribute of a public class.

``python -m tests.public_api > tests/public_api.txt`` writes the list that tests/docs/test_pages.py compares with.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))

from public_names import PACKAGE, public_names  # noqa: E402


def listed() -> str:
    lines = []
    homes: dict[int, str] = {}
    for module, names in sorted(public_names(ROOT).items(), reverse=True):
        result = importlib.import_module(module)
        for name in names:
            value, path = getattr(result, name), f"{module}.{name}"
            home = homes.get(id(value)) if module in (PACKAGE, f"{PACKAGE}.debug_utils") else None
            homes[id(value)] = path
            lines.extend([f"{path} = {home}"] if home else _lines(path, value))
    return "\n".join(sorted(lines)) + "\n"


def _lines(path: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield path + (_parameters(value) if inspect.isroutine(value) else "")
        return
    yield path + _constructor(value)
    for name in _attributes(value):
        attribute = inspect.getattr_static(value, name, None)
        called = isinstance(attribute, (staticmethod, classmethod)) or inspect.isfunction(attribute)
        yield f"{path}.{name}" + (_parameters(getattr(value, name)) if called else "")


def _constructor(value: type) -> str:
    """Return the parameters, except inherited ones of a framework's class."""
    if issubclass(value, tuple):
        return _parameters(value)
    if getattr(value, "_is_protocol", False) or any(map(is_dataclass, _foreign(value))):
        return ""
    home = next(base for base in value.__mro__ if "__init__" in vars(base))
    return "" if home in _foreign(value) else _parameters(value)


def _foreign(value: type) -> list[type]:
    return [base for base in value.__mro__ if not base.__module__.startswith(PACKAGE)]


def _attributes(value: type) -> list[str]:
    """Return the names that the package defines, without overridden names of a framework's base class."""
    foreign = {name for base in _foreign(value) for name in dir(base)}
    ours = [base for base in value.__mro__ if base not in _foreign(value)]
    names = {
        name for base in ours for name in (*vars(base), *vars(base).get("__annotations__", ()), *_documented(base))
    }
    return sorted(name for name in names - foreign if not name.startswith("_"))


def _documented(value: type) -> list[str]:
    """Return the names in the docstring's section of attributes, including those set by a constructor."""
    section = inspect.cleandoc(value.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return [name for names in re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE) for name in names.split(", ")]


def _parameters(value: Any) -> str:
    shown = []
    keyword_only = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self":
            continue
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
        keyword_only = keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        shown.append(f"{star}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    from te_precision_callbacks import reference

    reference.install_where_needed()
    sys.stdout.write(listed())
