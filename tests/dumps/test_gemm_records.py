"""Records of whole GEMMs written by a session, against Transformer Engine's result."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.dumps import load
from te_precision_callbacks.dumps.contents import operand_of
from te_precision_callbacks.dumps.dump_files import write
from te_precision_callbacks.dumps.errors import NotADumpError
from te_precision_callbacks.gemm_error.factors import factor_of
from te_precision_callbacks.replay import replay_folder
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature
from tests.dumps.gemms import GEMMS, INPUTS, OUTPUTS, RECIPES, ROWS, train

pytestmark = pytest.mark.usefixtures("any_gpu")


@pytest.mark.parametrize("observe", ["auto", "debug"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_operands_give_the_result(tmp_path: Path, name: str, observe: str) -> None:
    """In float64, with bias, and for wgrad with the sum that it was added to, within bfloat16's last bit."""
    files = train(tmp_path, name, observe=observe, accumulates=observe == "auto")
    assert [file.name for file in files] == [f"0.{gemm}_gemm.safetensors" for gemm in GEMMS]
    sizes = {"fprop": (ROWS, OUTPUTS, INPUTS), "dgrad": (ROWS, INPUTS, OUTPUTS), "wgrad": (OUTPUTS, INPUTS, ROWS)}
    orders = []
    for file, gemm in zip(files, GEMMS, strict=True):
        dump = load(file)
        what = dump.header.gemm
        orders.append(what.order)
        assert (what.gemm, what.n, what.m, what.k) == (gemm, *sizes[gemm])
        left, right = (
            factor_of(operand_of(dump, side), columnwise=operand.columnwise).matrix()
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
    assert orders == sorted(orders)


def test_what_is_no_record(tmp_path: Path) -> None:
    (file,) = train(tmp_path, "current", gemms=["fprop"])
    dump = load(file)
    lacking = {name: tensor for name, tensor in dump.tensors.items() if name != "b.rowwise_data"}
    write(dataclasses.replace(dump, tensors=lacking), tmp_path / "lacking.safetensors")
    with pytest.raises(NotADumpError, match=r"'b\.rowwise_data'"):
        load(tmp_path / "lacking.safetensors")
    assert torch.equal(load(file).tensors["out"], dump.tensors["out"])


@pytest.mark.parametrize("kind", ["GroupedLinear", "LayerNormMLP"])
def test_modules_with_several_gemms(tmp_path: Path, kind: str) -> None:
    """Each expert and each half has its own records, and their numbers follow the order of execution."""
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
    result = replay_folder(tmp_path)
    assert result.first_bad is None
    what = [(record.header.layer.rpartition(".")[2], record.gemm.gemm) for record in result.records.values()]
    if kind == "GroupedLinear":
        assert what == [("gemm_0", "fprop"), ("gemm_1", "fprop"), ("gemm_0", "wgrad"), ("gemm_1", "wgrad")]
    else:
        assert what == [("fc1", "fprop"), ("fc2", "fprop"), ("fc2", "wgrad"), ("fc1", "wgrad")]


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
