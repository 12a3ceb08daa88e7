"""The pytest plugin: unmodified GPU tests."""

from pathlib import Path

import pytest

from tests.forked import executable
from tests.reference.processes import run

PLUGIN = ["-p", "te_precision_callbacks.reference.pytest_plugin"]

GPU_TESTS = """
import pytest
import torch
import transformer_engine.pytorch as te

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fp8", [False, True])
def test_linear(fp8):
    torch.cuda.manual_seed(0)
    model = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cuda")
    with te.autocast(enabled=fp8):
        y = model(torch.randn(32, 32, dtype=torch.bfloat16, device="cuda"))
    y.sum().backward()
    assert y.is_cuda and model.weight.grad is not None

@pytest.mark.skipif(not te.is_mxfp8_available(), reason="needs Blackwell")
def test_blackwell():
    pass

def test_that_fails():
    assert torch.ones(1).cuda().item() == 2
"""


@pytest.mark.processes
def test_gpu_tests_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import transformer_engine.pytorch\n")
    (tmp_path / "test_gpu.py").write_text(GPU_TESTS)
    command = [executable(), "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-W", "ignore", "test_gpu.py"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 1
    assert "reference backend on the CPU as a pretended GPU, compute capability 9.0" in done.stdout
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr


@pytest.mark.processes
def test_wrong_use_is_a_usage_error(tmp_path: Path) -> None:
    command = [executable(), "-m", "pytest", *PLUGIN, "--collect-only"]
    done = run(command, cwd=tmp_path, TE_PRECISION_REFERENCE_CAPABILITY="11")
    assert done.returncode == 4
    assert "TE_PRECISION_REFERENCE_CAPABILITY='11'" in done.stderr
