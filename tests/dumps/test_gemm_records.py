"""Records of whole GEMMs written by a session, against Transformer Engine's result."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.dumps import DumpError, gemm_errors, load, save
from te_precision_callbacks.dumps.contents import NotADumpError, operand_of
from te_precision_callbacks.dumps.dump_files import write
from te_precision_callbacks.gemm_error import factor_of
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature
from tests.dumps.gemms import GEMMS, INPUTS, OUTPUTS, RECIPES, ROWS, train
from tests.kernel_faults import KERNEL, kernel
from tests.test_gemm_error import whole

pytestmark = pytest.mark.usefixtures("any_gpu")


@pytest.mark.parametrize(
    ("name", "observe"), [*((name, "auto") for name in RECIPES), ("current", "debug"), ("nvfp4", "debug")]
)
def test_the_operands_give_the_result(tmp_path: Path, name: str, observe: str) -> None:
    """In float64, with bias, and for wgrad with the sum that it was added to, within bfloat16's last bit."""
    files = train(tmp_path, name, observe=observe, accumulates=observe == "auto")
    assert [file.name for file in files] == [f"0.{gemm}_gemm.safetensors" for gemm in GEMMS]
    sizes = {"fprop": (ROWS, OUTPUTS, INPUTS), "dgrad": (ROWS, INPUTS, OUTPUTS), "wgrad": (OUTPUTS, INPUTS, ROWS)}
    for file, gemm in zip(files, GEMMS, strict=True):
        dump = load(file)
        what = dump.header.gemm
        assert (what.gemm, what.n, what.m, what.k) == (gemm, *sizes[gemm])
        left, right = (
            whole(factor_of(operand_of(dump, side, operand), columnwise=operand.columnwise))
            for side, operand in (("b", what.b), ("a", what.a))
        )
        product = left @ right.t()
        if what.bias is not None:
            product += dump.tensors["bias"].double()
        if what.before is not None:
            product += dump.tensors["before"].double()
        assert (what.bias is not None) == (gemm == "fprop")
        assert (what.before is not None) == (gemm == "wgrad" and observe == "auto")
        out = dump.tensors["out"].double().reshape(product.shape)
        assert (out - product).abs().amax() <= 2.0**-8 * product.abs().amax()
        assert what.a.direction is not None
        assert what.b.high_precision is not None
        assert (what.a.high_precision is not None) == (gemm != "wgrad")


def test_what_is_no_record(tmp_path: Path) -> None:
    (file,) = train(tmp_path, "current", gemms=["fprop"])
    dump = load(file)
    lacking = {name: tensor for name, tensor in dump.tensors.items() if name != "b.rowwise_data"}
    write(dataclasses.replace(dump, tensors=lacking), tmp_path / "lacking.safetensors")
    with pytest.raises(NotADumpError, match=r"'b\.rowwise_data'"):
        load(tmp_path / "lacking.safetensors")
    assert torch.equal(load(file).tensors["out"], dump.tensors["out"])


@pytest.mark.parametrize("name", RECIPES)
def test_the_errors_of_a_dumped_gemm(tmp_path: Path, name: str) -> None:
    """As LogGemmError has measured them in training, and against whole products in float64."""
    files = train(tmp_path, name, measures=True, accumulates=True)
    run = open_run(tmp_path)
    for file in files:
        gemm = load(file).header.gemm
        errors = gemm_errors(file)
        rows = [row for row in run.series.to_pylist() if row["tensor"] == gemm.result]
        live = {row["statistic"]: run.values([row["series"]])["value"].to_pylist()[-1] for row in rows}
        assert errors.kernel_ratio < 0.5
        assert errors.kernel_error == pytest.approx(live["gemm_kernel_error"], rel=0.2, abs=1e-6)
        assert errors.gain == pytest.approx(1, abs=1e-3)
        assert (errors.format_error is None) == (gemm.gemm == "wgrad")
        if errors.format_error is not None:
            assert errors.format_error == pytest.approx(live["gemm_format_error"], rel=0.2)


@pytest.mark.parametrize("fault", KERNEL)
def test_a_dumped_gemm_of_a_wrong_kernel(tmp_path: Path, fault: str) -> None:
    with kernel(KERNEL[fault]):
        files = train(tmp_path, "mxfp8")
    for file in files:
        errors = gemm_errors(file)
        assert errors.kernel_ratio > 1
        if fault.startswith("scale off"):
            assert errors.gain == pytest.approx(2.0 ** -int(fault[-1]), abs=1e-3)
        assert errors.format_error is None or errors.format_error < 0.06, "of the format, whatever the kernel does"


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_inf_and_nan_in_a_dumped_gemm(tmp_path: Path, broken: float) -> None:
    for name in ("current", "mxfp8", "nvfp4"):
        for file in train(tmp_path / name, name, broken=broken):
            assert gemm_errors(file).kernel_ratio < 1, name


def test_a_dump_of_a_tensor_has_no_gemm(tmp_path: Path) -> None:
    save(torch.ones(2, 2), tmp_path / "x.safetensors")
    with pytest.raises(DumpError, match="a single tensor, not a whole GEMM"):
        gemm_errors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("kind", ["GroupedLinear", "LayerNormMLP"])
def test_modules_with_several_gemms(tmp_path: Path, kind: str) -> None:
    """Each expert and each half has its own records."""
    torch.manual_seed(0)
    size = {"params_dtype": torch.bfloat16}
    net: torch.nn.Module
    if kind == "GroupedLinear":
        net, more = te.GroupedLinear(2, 64, 64, **size), ([32, 32],)
    else:
        net, more = te.LayerNormMLP(64, 128, **size), ()
    config = {"record": feature("DumpTensors", ["all"], gemms=["fprop", "wgrad"])}
    with InspectSession(config, model=torch.nn.ModuleDict({"net": net}), log_dir=tmp_path) as session:
        with te.autocast(enabled=True, recipe=RECIPES["current"][0]()):
            out = net(torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True), *more)
        out.float().square().sum().backward()
        session.step()
    files = sorted(tmp_path.rglob("*_gemm*.safetensors"))
    assert all(gemm_errors(file).kernel_ratio < 1 for file in files)
    headers = [load(file).header for file in files]
    names = {(header.layer.rpartition(".")[2], header.gemm.gemm) for header in headers}
    layers = ("gemm_0", "gemm_1") if kind == "GroupedLinear" else ("fc1", "fc2")
    assert names == {(layer, gemm) for layer in layers for gemm in ("fprop", "wgrad")}
    assert len(files) == 4


def test_a_gemm_that_is_not_seen_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = te.Linear(64, 64, params_dtype=torch.bfloat16)
    config = {"record": feature("DumpTensors", ["all"], gemms=["fprop"])}
    model = torch.nn.ModuleDict({"fc": net})
    with InspectSession(config, model=model, log_dir=tmp_path, strict=True) as session:
        for _ in range(2):
            with te.autocast(enabled=True, recipe=RECIPES["current"][0]()):
                out = net(torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True), fp8_output=True)
            out.dequantize().float().square().sum().backward()
            session.step()
    (stated,) = (record.getMessage() for record in caplog.records if "is not dumped" in record.getMessage())
    assert "the GEMM fprop of fc is not dumped: its result is written quantized" in stated
