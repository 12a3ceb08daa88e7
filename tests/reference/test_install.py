"""Installing the reference backend: when it is refused, what it says, and what it costs to import."""

from __future__ import annotations

import pytest

from tests.reference.processes import answers, python

pytestmark = pytest.mark.processes

INSTALL = "from te_precision_callbacks import reference\nreference.install({})\n"


def refusal(code: str, **environment: str) -> str:
    """The message of the error of ours with which ``code`` ends."""
    done = python(code, cwd=None, **environment)
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


def test_the_same_again_does_nothing_and_anything_else_is_refused() -> None:
    message = refusal(INSTALL.format("") * 2 + INSTALL.format("capability=(10, 0)"))
    assert "InstallError: install(pretend_cuda=False, capability=(10, 0))" in message
    assert "capability=(9, 0)" in message
    assert "InstallError: install(pretend_cuda=True" in refusal(
        INSTALL.format("") + INSTALL.format("pretend_cuda=True")
    )


def test_the_environment_chooses_the_capability() -> None:
    code = INSTALL.format("") + "answer = reference.installed().capability"
    assert answers(code, TE_PRECISION_REFERENCE_CAPABILITY="10.0") == [10, 0]


@pytest.mark.parametrize(("value", "named"), [("8.9", "'8.9'"), ("ten", "'ten'")])
def test_an_unknown_capability_in_the_environment(value: str, named: str) -> None:
    message = refusal(INSTALL.format(""), TE_PRECISION_REFERENCE_CAPABILITY=value)
    assert "TE_PRECISION_REFERENCE_CAPABILITY" in message
    assert named in message
    assert "9.0 or 10.0" in message


def test_without_transformer_engine() -> None:
    message = refusal(
        """
        from importlib import metadata
        real = metadata.version
        def version(name):
            if name == "transformer-engine":
                raise metadata.PackageNotFoundError(name)
            return real(name)
        metadata.version = version
        """
        + INSTALL.format("").replace("\n", "\n        ")
    )
    assert "TransformerEngineVersionError: No Transformer Engine is installed" in message
    assert "pip install -e '.[reference]'" in message


@pytest.mark.parametrize("version", ["2.19.0", "2.21.0"])
def test_with_another_transformer_engine(version: str) -> None:
    message = refusal(
        f"from importlib import metadata\nmetadata.version = lambda name: {version!r}\n" + INSTALL.format("")
    )
    assert f"TransformerEngineVersionError: Transformer Engine {version} is installed" in message
    assert 'pip install "transformer-engine>=2.20,<2.21"' in message


def test_after_the_compiled_extension() -> None:
    message = refusal(
        "import sys, types; sys.modules['transformer_engine_torch'] = types.ModuleType('compiled')\n"
        + INSTALL.format("")
    )
    assert "InstallError: Transformer Engine's compiled extension" in message


def test_after_transformer_engine() -> None:
    message = refusal(
        "import os; os.environ['NVTE_PROJECT_BUILDING'] = '1'; import transformer_engine\n" + INSTALL.format("")
    )
    assert "InstallError: transformer_engine is imported already" in message
    assert "before the first import" in message


def test_pretended_cuda_beside_a_real_one() -> None:
    gpu = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.get_device_name = lambda: 'H200'\n"
    message = refusal(gpu + INSTALL.format("pretend_cuda=True"))
    assert "InstallError: install(pretend_cuda=True), but there is a real GPU (H200)" in message
