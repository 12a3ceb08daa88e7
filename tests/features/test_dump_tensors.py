"""DumpTensors under plain nvidia-dlfw-inspect: the tensors of Transformer Engine's files, and nothing overwritten."""

import logging
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import dumps
from tests.features.plain import OURS, THEIRS, config_of, linear, plain, train
from tests.instrumentation.steps import stepped
from tests.quantizers import quantizer

BOTH = {"enabled": True, "tensors": ["activation"], "high_precision_tensor": True, "quantized_tensor": True}


def files(folder: Path) -> list[str]:
    root = folder / "tensor_dumps" / "rank_0"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def random(seed: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def the_dump(folder: Path) -> dumps.Dump:
    """The last one, if there are several."""
    return dumps.load(folder / "tensor_dumps" / "rank_0" / files(folder)[-1])


def quantized(x: torch.Tensor, *, rowwise: bool = True, columnwise: bool = True) -> Any:
    made_by = quantizer("fp8_current_scaling")
    made_by.set_usage(rowwise=rowwise, columnwise=columnwise)
    return made_by(x)


@pytest.mark.parametrize("folders", [[OURS], [OURS, THEIRS], [THEIRS, OURS]], ids=["ours", "ours-te", "te-ours"])
def test_the_tensors_are_those_of_transformer_engines_feature(tmp_path: Path, folders: list[str]) -> None:
    for name, listed in (("theirs", [THEIRS]), ("ours", folders)):
        torch.manual_seed(0)
        with plain({"DumpTensors": BOTH}, tmp_path / name, folders=listed, fresh=True):
            train(linear(), steps=2)
            result = files(tmp_path / name)  # a step has its files when it has ended
        ending = "linear_activation.pt" if name == "theirs" else "linear.activation.safetensors"
        assert result == [f"iter_00000{n}/{ending}" for n in range(2)]
    theirs = torch.load(tmp_path / "theirs/tensor_dumps/rank_0/iter_000001/linear_activation.pt", weights_only=False)
    ours = the_dump(tmp_path / "ours")
    assert torch.equal(ours.tensors["high_precision"], theirs["high_precision"])
    assert torch.equal(ours.tensors["data"].view(torch.uint8), theirs["quantized"]._data)
    assert torch.equal(ours.tensors["scale_inv"], theirs["quantized"]._scale_inv)
    assert torch.equal(dumps.dequantize(ours), theirs["quantized"].dequantize())


@pytest.mark.parametrize(
    "case", ["one object", "two objects", "rowwise plain", "columnwise plain", "rowwise only", "fake", "high precision"]
)
def test_both_operands(tmp_path: Path, case: str) -> None:
    """Transformer Engine's own raises where the two are not one object."""
    x, fake = random(0), random(0).round()
    whole, rows, columns = quantized(x), quantized(x, columnwise=False), quantized(x)
    operands: dict[str, tuple[Any, Any]] = {
        "one object": (whole, whole),
        "two objects": (rows, columns),
        "rowwise plain": (x, columns),
        "columnwise plain": (rows, fake),
        "rowwise only": (rows, None),
        "fake": (fake, fake),
        "high precision": (x, x),
    }
    with plain({"DumpTensors": BOTH}, tmp_path):
        rowwise, columnwise = operands[case]
        debug_api.transformer_engine.inspect_tensor(  # as Transformer Engine's modules call it
            layer_name="linear",
            tensor_name="activation",
            iteration=0,
            tp_group=None,
            tensor=x,
            quantizer=None,
            rowwise_quantized_tensor=rowwise,
            columnwise_quantized_tensor=columnwise,
        )
        debug_api.step()
    dump = the_dump(tmp_path)
    assert torch.equal(dump.tensors["high_precision"], x)
    expected = {"fake": fake, "high precision": None}.get(case, whole.dequantize())
    if expected is None:
        assert dump.header.quantized is None, "the GEMMs read the tensor itself"
    elif case == "fake":
        assert torch.equal(dump.tensors["quantized"], fake)
    else:
        assert torch.equal(dumps.dequantize(dump), expected)


def test_a_weight_that_exists_only_quantized(tmp_path: Path) -> None:
    with te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        net = linear()
    expected = net.weight.dequantize()
    config = config_of({"DumpTensors": {**BOTH, "tensors": ["weight"]}})
    stepped(net, tmp_path, [Float8CurrentScaling()], config)
    dump = the_dump(tmp_path)
    assert "high_precision" not in dump.tensors
    assert torch.equal(dumps.dequantize(dump), expected)


def test_conditions_without_a_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What can never hold is said once, since nobody has looked at the config before."""
    features = {
        "DumpTensors": {**BOTH, "quantized_tensor": False, "when": ["max > 2", "mse > 1", "activation_overflow"]},
        "LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"]},
    }
    with plain(features, tmp_path):
        net = linear()
        for number in range(4):
            net(torch.full((16, 32), float(number))).sum().backward()
            debug_api.step()
    assert files(tmp_path) == ["iter_000003/linear.activation.safetensors"]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 2
    assert "'mse > 1' of DumpTensors would never hold: its statistic is not collected for 'activation'" in errors[0]
    assert "because activation overflow detection is off" in errors[1]
