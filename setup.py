"""What pyproject.toml cannot express.

On an index page the links of the README lead to the repository, at this version. An installed package has a .pth file,
with which ``TE_PRECISION_WATCH=1`` reaches any Python process.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

WATCH = (
    "import os; os.environ.get('TE_PRECISION_WATCH', '0') != '0' and "
    "__import__('te_precision_callbacks.startup', fromlist=['startup']).install_when_needed()\n"
)


class BuildWithWatch(build_py):
    """Adds the .pth file beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "te_precision_watch.pth").write_text(WATCH)


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
    cmdclass={"build_py": BuildWithWatch},
)
