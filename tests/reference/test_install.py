"""Installing the reference backend: when it is refused, what it says, and what it costs to import."""

import pytest

from tests.reference.processes import answers, python

pytestmark = pytest.mark.processes

INSTALL = "from te_precision_callbacks import reference\nreference.install({})\n"


def refusal(code: str, **environment: str) -> str:
    done = python(code, **environment)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("te_precision_callbacks.reference.errors."), done.stderr
    return last


def test_it_says_so_in_one_line_of_the_log() -> None:
    done = python("import logging; logging.basicConfig(level=logging.INFO)\n" + INSTALL.format("") * 2)
    lines = [line for line in done.stderr.splitlines() if "te_precision_callbacks" in line]
    assert len(lines) == 1
    assert "INFO" in lines[0]
    assert "reference backend" in lines[0]
    assert "'cpu'" in lines[0]
    assert "9.0" in lines[0]


def test_the_environment_chooses_the_capability() -> None:
    code = INSTALL.format("") + "answer = reference.installed().capability"
    assert answers(code, TE_PRECISION_REFERENCE_CAPABILITY="10.0") == [10, 0]


WITHOUT = """
from importlib import metadata
real = metadata.version
def version(name):
    if name == "transformer-engine":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""
ANOTHER = "from importlib import metadata\nmetadata.version = lambda name: {!r}\n"
COMPILED = "import sys, types; sys.modules['transformer_engine_torch'] = types.ModuleType('compiled')\n"
IMPORTED = "import os; os.environ['NVTE_PROJECT_BUILDING'] = '1'; import transformer_engine\n"
GPU = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.get_device_name = lambda: 'H200'\n"
NO_ENGINE = "TransformerEngineVersionError: No Transformer Engine is installed"
OTHER_ENGINE = "TransformerEngineVersionError: Transformer Engine {} is installed"
AGAIN = INSTALL.format("") * 2


@pytest.mark.parametrize(
    ("before", "options", "stated"),
    [
        (AGAIN, "capability=(10, 0)", ["InstallError: install(pretend_cuda=False, capability=(10, 0))", "(9, 0)"]),
        (AGAIN, "pretend_cuda=True", ["InstallError: install(pretend_cuda=True"]),
        (WITHOUT, "", [NO_ENGINE, "pip install -e '.[reference]'"]),
        *(
            (ANOTHER.format(version), "", [OTHER_ENGINE.format(version), '"transformer-engine>=2.20,<2.21"'])
            for version in ("2.19.0", "2.21.0")
        ),
        (COMPILED, "", ["InstallError: Transformer Engine's compiled extension"]),
        (IMPORTED, "", ["InstallError: transformer_engine is imported already", "before the first import"]),
        (GPU, "pretend_cuda=True", ["InstallError: install(pretend_cuda=True), but there is a real GPU (H200)"]),
    ],
    ids=["another capability", "another scope", "no TE", "older TE", "newer TE", "compiled", "imported", "a GPU"],
)
def test_what_is_refused(before: str, options: str, stated: list[str]) -> None:
    message = refusal(before + INSTALL.format(options))
    for part in stated:
        assert part in message


@pytest.mark.parametrize("value", ["8.9", "ten"])
def test_an_unknown_capability_in_the_environment(value: str) -> None:
    message = refusal(INSTALL.format(""), TE_PRECISION_REFERENCE_CAPABILITY=value)
    for part in ("TE_PRECISION_REFERENCE_CAPABILITY", repr(value), "9.0 or 10.0"):
        assert part in message
