"""What pyproject.toml cannot express: on an index page, the README's links lead to the repository, at this version."""

import re
from pathlib import Path

from setuptools import setup

settings = Path("pyproject.toml").read_text(encoding="utf-8")
repository, version = (
    re.search(rf'^{key} = "(.+)"$', settings, re.MULTILINE)[1]  # type: ignore[index]
    for key in ("Repository", "version")
)
files = f"{repository}/blob/v{version}"
readme = Path("README.md").read_text(encoding="utf-8")
readme = re.sub(r"(?<=\]\()(?=docs/images/)", f"{repository}/raw/v{version}/", readme)
setup(
    long_description=re.sub(r"\]\((?![a-z]+:|#)", f"]({files}/", readme),
    long_description_content_type="text/markdown",
)
