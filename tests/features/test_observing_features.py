"""Features that observe: the iterations and tensors that they act on, and the files of DumpTensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, Float8CurrentScaling
from transformer_engine.debug.features.api import TEConfigAPIMapper
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from te_precision_callbacks import dumps
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.features import base
from te_precision_callbacks.features.base import matching_options
from te_precision_callbacks.instrumentation.upstream import isolate_upstream
from te_precision_callbacks.statistics.schedule import Schedule
from tests.conftest import Keeper
from tests.features.plain import OURS, THEIRS, config_of, in_session, linear, plain, train
from tests.instrumentation.steps import stepped
from tests.quantizers import quantizer


def stats(**options: Any) -> dict[str, dict[str, Any]]:
    tensors = {} if "tensors_struct" in options else {"tensors": ["activation"]}
    return {"LogTensorStats": {"enabled": True, "stats": ["max"], **tensors, **options}}


def acted(features: dict[str, Any], steps: int, log_dir: Path, **keywords: Any) -> dict[str, list[int]]:
    """Statistic -> iterations, with Transformer Engine's own forward."""
    with plain(features, log_dir, **keywords) as logged:
        train(linear(), steps)
    return {name.removeprefix("linear_"): logged.iterations(name) for name in logged.rows}


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"freq": 3}, [0, 3, 6, 9]),
        ({"freq": 3, "start_step": 1}, [3, 6, 9]),  # not 1, 4, 7
        ({"start_step": 8, "end_step": -1}, [8, 9]),
        ({"start_step": None, "end_step": None, "freq": 5}, [0, 5]),
        ({"start_end_list": [[1, 2], [8, -1]], "start_step": 4, "end_step": 5}, [1, 2, 8, 9]),
        ({"start_end_list": [[0, 4], [7, 9]], "freq": 4}, [0, 4, 8]),
    ],
)
def test_the_keys_of_a_schedule(tmp_path: Path, keeper: Keeper, options: dict[str, Any], iterations: list[int]) -> None:
    features = stats(**options)
    assert acted(features, 10, tmp_path / "alone") == {"activation_max": iterations}
    in_session(features, tmp_path / "session", 10, sinks=[keeper])
    assert sorted(keeper.values("max")) == iterations


def test_keys_beside_the_struct_hold_for_its_entries(tmp_path: Path) -> None:
    """As LogFp8TensorStats has start_step and end_step in Transformer Engine's examples; an entry's own goes before."""
    struct = [
        {"tensor": "activation", "stats": ["max"], "freq": 1},
        {"tensor": "weight", "end_step": 2},
        {"tensor": "gradient", "start_end_list": [[0, 0], [6, 6]]},
    ]
    result = acted(stats(tensors_struct=struct, stats=["min"], start_step=1, end_step=4, freq=2), 7, tmp_path)
    assert result == {"activation_max": [1, 2, 3, 4], "weight_min": [2], "gradient_min": [0, 6]}


def test_nothing_is_asked_again_after_the_last_iteration(tmp_path: Path) -> None:
    """Transformer Engine's fused path is back for good then."""
    with plain(stats(freq=4, end_step=4), tmp_path) as logged:
        net = linear()
        runs = []
        for _ in range(8):
            train(net)
            runs.append(net.next_iter_when_debug_should_be_run)
        assert logged.iterations("linear_activation_max") == [0, 4]
    assert runs == [4, 4, 4, 4, None, None, None, None]


TENSORS = ["activation", "weight", "gradient"]
GEMMS = ["fprop", "dgrad", "wgrad"]


AS_UPSTREAM = [
    {"tensors": ["activation", "weight"], "gemms": ["fprop"], "margin": 1},
    {"tensors_struct": [{"tensor": "weight", "margin": 2}], "gemms": ["fprop", "dgrad"], "margin": 1},
    {"gemms_struct": [{"gemm": "fprop", "tensors": ["weight"], "margin": 3}, {"gemm": "dgrad", "tensors": []}]},
    {
        "quant_format": "MXFP8E4M3",
        "gemms_struct": [
            {"gemm": "fprop", "tensors": ["activation", "weight"]},
            {
                "gemm": "dgrad",
                "tensors_struct": [{"tensor": "gradient", "quant_format": "FP8E5M2"}, {"tensor": "weight"}],
            },
        ],
    },
]


def test_as_upstream_where_upstream_takes_it() -> None:
    for options in AS_UPSTREAM:
        config = {"enabled": True, **options}
        for tensor in TENSORS:
            for gemm in GEMMS:
                matches, theirs = TEConfigAPIMapper().parse_config_and_api(
                    config, gemm_parsing=True, tensor_parsing=True, tensor_name=tensor, gemm=gemm
                )
                assert matching_options(config, tensor=tensor, gemm=gemm) == ([theirs] if matches else [])
        assert config == {"enabled": True, **options}


READ = {
    "LogTensorStats": {
        "enabled": True,
        "freq": 2,
        "tensors_struct": [{"tensor": "activation", "stats": "max"}, {"tensor": "weight", "stats": "min", "freq": 1}],
    },
    "FakeQuant": {"enabled": True, "gemms": "fprop", "tensors": "weight", "quant_format": "FP8E4M3"},
    "DumpTensors": {"enabled": True, "tensors": "weight", "high_precision_tensor": True},
}


def test_options_are_read_once_for_an_entry_of_the_config(tmp_path: Path) -> None:
    """Whatever the layers, tensors and steps: of each feature the options, of each of its tensors the schedule."""
    with (
        mock.patch.object(base, "read_options", wraps=base.read_options) as read,
        mock.patch.object(Schedule, "of", wraps=Schedule.of) as scheduled,
        plain(READ, tmp_path) as logged,
    ):
        nets = torch.nn.Sequential(linear(), te.Linear(32, 32, name="linear_2"))
        train(nets, 3)
        assert sorted(call.args[1] for call in read.call_args_list) == sorted(READ)
        assert scheduled.call_count == 4
    assert logged.iterations("linear_activation_max") == logged.iterations("linear_2_activation_max") == [0, 2]
    assert logged.iterations("linear_2_weight_min") == [0, 1, 2]


@pytest.mark.parametrize("only_quantized", [False, True])
def test_a_statistic_without_a_recipe_of_a_tensor_that_is_not_quantized(
    tmp_path: Path, keeper: Keeper, only_quantized: bool
) -> None:
    options = {"tensors": ["activation"], "stats": ["mse", "mxfp8_mse"], "only_quantized": only_quantized}
    config = config_of({"LogFp8TensorStats": {"enabled": True, **options}})
    stepped(linear(), tmp_path, (None, Float8CurrentScaling()), config, sinks=[keeper])
    high, low = ({row.statistic for row in step} for step in keeper.steps)
    assert low == {"mse", "mxfp8_mse"}
    assert len(high) == (1 if only_quantized else 2)
    assert "mxfp8_mse" in high


@pytest.fixture
def weights_minimum() -> Iterator[type]:
    """Importing a feature of this project registers it in nvidia-dlfw-inspect."""
    isolated = isolate_upstream()
    from te_precision_callbacks.features.log_statistics import LogTensorStats

    class WeightsMinimum(LogTensorStats):  # type: ignore[misc]
        """A user's own feature on top of one of this project, under a name that no schema has."""

    yield WeightsMinimum
    isolated.close()


@pytest.mark.parametrize("alone", [True, False])
def test_a_feature_that_derives_from_one_of_ours_has_its_keys(
    tmp_path: Path, alone: bool, weights_minimum: type
) -> None:
    features = {"WeightsMinimum": {"enabled": True, "tensors": "weight", "stats": "min", "freq": 2}}
    if alone:
        with plain(features, tmp_path, classes=[weights_minimum]) as logged:
            train(linear(), 3)
        assert logged.iterations("linear_weight_min") == [0, 2]
        return
    session = in_session(features, tmp_path, 3, features=[weights_minimum], strict=True)
    assert [row.statistic for row in session.last_statistics] == ["min"]
    features["WeightsMinimum"]["frequency"] = 3
    with pytest.raises(ConfigError, match=r"'WeightsMinimum' has no key 'frequency'.*Did you mean 'freq'"):
        in_session(features, tmp_path, features=[weights_minimum])


# --- DumpTensors: the tensors of Transformer Engine's files, and nothing overwritten


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


def inspect_tensor(x: torch.Tensor, rowwise: Any, columnwise: Any, quantizer: Any = None) -> None:
    """As Transformer Engine's modules call it."""
    debug_api.transformer_engine.inspect_tensor(
        layer_name="linear",
        tensor_name="activation",
        iteration=0,
        tp_group=None,
        tensor=x,
        quantizer=quantizer,
        rowwise_quantized_tensor=rowwise,
        columnwise_quantized_tensor=columnwise,
    )


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
        inspect_tensor(x, *operands[case])
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


@pytest.mark.parametrize("internals", [False, True])
def test_decoded_internals_are_written_where_the_config_says_so(tmp_path: Path, internals: bool) -> None:
    x = random(0)
    whole = quantizer("nvfp4")(x)
    with plain({"DumpTensors": {**BOTH, "dump_quantized_internals": internals}}, tmp_path):
        inspect_tensor(x, whole, whole)
        debug_api.step()
    assert ("rowwise_data_unpacked_values" in the_dump(tmp_path).tensors) == internals


def test_a_weight_that_exists_only_quantized(tmp_path: Path) -> None:
    with te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        net = linear()
    expected = net.weight.dequantize()
    config = config_of({"DumpTensors": {**BOTH, "tensors": ["weight"]}})
    stepped(net, tmp_path, [Float8CurrentScaling()], config)
    dump = the_dump(tmp_path)
    assert "high_precision" not in dump.tensors
    assert torch.equal(dumps.dequantize(dump), expected)


@pytest.mark.parametrize(
    ("recipe", "collected"),
    [
        (Float8CurrentScaling(), ["mse", "mxfp8_mse"]),
        (CustomRecipe(qfactory=lambda role: IdentityQuantizer()), ["mxfp8_mse"]),
        (None, ["mxfp8_mse"]),
    ],
    ids=["FP8", "identity", "none"],
)
def test_of_a_tensor_in_high_precision_only_what_names_a_recipe(
    tmp_path: Path, recipe: Any, collected: list[str]
) -> None:
    struct = [{"tensor": "activation", "stats": ["mse", "mxfp8_mse"], "only_quantized": True}]
    with plain({"LogFp8TensorStats": {"enabled": True, "tensors_struct": struct}}, tmp_path) as logged:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            linear()(torch.randn(32, 32)).sum().backward()
        debug_api.step()
    assert sorted(logged.rows) == [f"linear_activation_{name}" for name in collected]


def test_a_hybrid_tensor_without_a_columnwise_part(tmp_path: Path) -> None:
    """As where the input needs no gradient: what fprop reads is measured."""
    x = random(0)
    e5m2 = quantizer("fp8_current_scaling", e5m2=True)
    hybrid = HybridQuantizer(rowwise_quantizer=e5m2, columnwise_quantizer=IdentityQuantizer())
    features = {"LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["scale_inv_max"]}}
    with plain(features, tmp_path) as logged:
        inspect_tensor(x, hybrid(x), None, quantizer=hybrid)
        debug_api.step()
    expected = x.abs().max().item() / torch.finfo(torch.float8_e5m2).max
    assert logged.rows["linear_activation_scale_inv_max"][0] == pytest.approx(expected, rel=1e-6)
