"""Results of PerTensorScaling and FakeQuant on a tensor, and any two features on one layer."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
import yaml
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from te_precision_callbacks import dumps
from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature
from tests.engine.recipes import quantize
from tests.features.plain import in_session, linear, plain, train
from tests.test_config_loading_and_plan import LAYERS

FP8 = {"FP8E4M3": (448.0, DType.kFloat8E4M3), "FP8E5M2": (57344.0, DType.kFloat8E5M2)}
ALL: dict[str, Any] = {
    "enabled": True,
    "gemms": ["fprop", "dgrad", "wgrad"],
    "tensors": ["activation", "weight", "gradient"],
}


@pytest.fixture
def values() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(48, 80) * torch.logspace(-6, 4, 80)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[None]:
    """Features of upstream can only be imported while it is running."""
    with plain({}, tmp_path):
        yield


def modified(
    feature: dict[str, Any],
    log_dir: Path,
    tensor: torch.Tensor,
    *,
    name: str = "activation",
    gemm: str = "fprop",
    **keywords: Any,
) -> Any:
    with plain(feature, log_dir):
        return debug_api.transformer_engine.modify_tensor(
            layer_name="linear", tensor_name=name, gemm=gemm, tensor=tensor, iteration=0, **keywords
        )


def delayed(dtype: DType = DType.kFloat8E4M3) -> Float8Quantizer:
    """A quantizer as delayed scaling has it, with a scale that fits nothing."""
    return Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), dtype)


def empty_like(tensor: torch.Tensor, dtype: DType = DType.kFloat8E4M3) -> Any:
    return delayed(dtype).make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_per_tensor_scaling_without_margin_is_transformer_engines(
    tmp_path: Path, values: torch.Tensor, started: None, dtype: DType, type_: torch.dtype
) -> None:
    from transformer_engine.debug.features.per_tensor_scaling import per_tensor_cast

    values = values.to(type_)
    theirs = per_tensor_cast(values, dtype)
    their_out = empty_like(values, dtype)
    per_tensor_cast(values, dtype, out=their_out)
    debug_api.end_debug()
    features = {"PerTensorScaling": ALL}
    ours = modified(features, tmp_path / "1", values, default_quantizer=delayed(dtype), dtype=type_)
    out = empty_like(values, dtype)
    assert modified(features, tmp_path / "2", values, default_quantizer=delayed(dtype), out=out) is None
    for mine, his in ((ours, theirs), (out, their_out)):
        assert torch.equal(mine._data, his._data)
        assert torch.equal(mine._transpose, his._transpose)
        assert torch.equal(mine._scale_inv, his._scale_inv)
        assert (mine.dtype, mine._fp8_dtype) == (his.dtype, his._fp8_dtype) == (type_, dtype)


@pytest.mark.parametrize("fp8", FP8)
def test_per_tensor_scaling_with_margin(tmp_path: Path, values: torch.Tensor, fp8: str) -> None:
    """scale = fp8_max / (amax * 2^margin), and the codes equal a saturated cast with that scale."""
    for margin in [-2, 1, 3]:
        for in_place in [False, True]:
            largest, dtype = FP8[fp8]
            out = empty_like(values, dtype) if in_place else None
            features = {"PerTensorScaling": {**ALL, "margin": margin}}
            returned = modified(features, tmp_path, values, default_quantizer=delayed(dtype), out=out)
            result = returned if out is None else out
            scale = np.float32(largest) / (np.float32(values.abs().max()) * np.float32(2.0**margin))
            assert result._scale_inv.tolist() == [float(np.float32(1) / scale)]
            codes = (values * torch.tensor(scale)).clamp(-largest, largest).to(_torch_type(fp8))
            assert torch.equal(result._data, codes.view(torch.uint8))


def test_per_tensor_scaling_under_another_recipe_says_so(tmp_path: Path, values: torch.Tensor) -> None:
    with pytest.raises(FeatureError, match=r"PerTensorScaling.*'linear'.*DelayedScaling.*no FP8 recipe"):
        modified({"PerTensorScaling": ALL}, tmp_path, values, default_quantizer=None)


def _torch_type(fp8: str) -> torch.dtype:
    return torch.float8_e4m3fn if fp8.endswith("E4M3") else torch.float8_e5m2


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quant_without_margin_is_transformer_engines(
    tmp_path: Path, values: torch.Tensor, started: None, fp8: str, type_: torch.dtype
) -> None:
    from transformer_engine.debug.features.fake_quant import fake_quantize

    values = values.to(type_)
    theirs, their_out = fake_quantize(values, fp8), torch.empty_like(values)
    fake_quantize(values, fp8, out=their_out)
    debug_api.end_debug()
    features = {"FakeQuant": {**ALL, "quant_format": fp8}}
    ours = modified(features, tmp_path / "1", values, dtype=type_)
    out = torch.empty_like(values)
    assert modified(features, tmp_path / "2", values, out=out) is None
    assert ours.dtype == type_
    assert torch.equal(ours, theirs)
    assert torch.equal(out, their_out)


@pytest.mark.parametrize("fp8", FP8)
def test_fake_quant_with_margin(tmp_path: Path, values: torch.Tensor, fp8: str) -> None:
    for margin in [-1, 2]:
        largest, _ = FP8[fp8]
        rounded = modified({"FakeQuant": {**ALL, "quant_format": fp8, "margin": margin}}, tmp_path, values)
        scale = torch.tensor(np.float32(largest) / (np.float32(values.abs().max()) * np.float32(2.0**margin)))
        codes = (values * scale).clamp(-largest, largest).to(_torch_type(fp8))
        assert torch.equal(rounded, codes.float() * (1 / scale))


ROWWISE = {("activation", "fprop"), ("weight", "fprop"), ("gradient", "dgrad")}
COLUMNWISE = {("activation", "wgrad"), ("weight", "dgrad"), ("gradient", "wgrad")}


@pytest.mark.parametrize("fp8", ["MXFP8E4M3", "MXFP8E5M2"])
def test_fake_quant_to_mxfp8(tmp_path: Path, values: torch.Tensor, fp8: str) -> None:
    """Blocks of 32 run along the dimension that the GEMM sums over; at an edge they are shorter."""
    for tensor, gemm in sorted(ROWWISE | COLUMNWISE):
        values[3] = 0.0
        features = {"FakeQuant": {**ALL, "quant_format": fp8}}
        rounded = modified(features, tmp_path, values, name=tensor, gemm=gemm, dtype=torch.float32)
        columnwise = (tensor, gemm) in COLUMNWISE
        expected = quantize("mxfp8", values.numpy(), columnwise=columnwise, e5m2=fp8.endswith("E5M2"))
        assert np.array_equal(rounded.numpy(), expected.values)


# --- pairs: both features' promises hold, or the config is refused before the run


OPERANDS = {"fprop": ("weight", "activation"), "dgrad": ("weight", "gradient"), "wgrad": ("activation", "gradient")}
"""GEMM -> the two matrices that the extension multiplies, in the order that it takes them."""

LAYOUTS = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
"""Whether the extension transposes them -> GEMM."""

EVERY_GEMM = tuple(OPERANDS)
REGISTERED = {"transformer_engine": tuple(FEATURES)}
TENSORS = ["activation", "weight", "gradient"]


@dataclass(frozen=True)
class Choice:
    """A feature with options, and its description in docs/features.md.

    Attributes:
        high: the GEMMs that it runs in high precision.
        scaled, rounded: the operands, as GEMM and tensor, that it casts to FP8, or rounds and leaves in high precision.
    """

    feature: str
    options: Mapping[str, Any] = field(default_factory=dict)
    high: tuple[str, ...] = ()
    scaled: frozenset[tuple[str, str]] = frozenset()
    rounded: frozenset[tuple[str, str]] = frozenset()

    @property
    def body(self) -> dict[str, Any]:
        return {self.feature: {"enabled": True, **self.options}}

    def __str__(self) -> str:
        return f"{self.feature} {self.options.get('gemms', '')} {self.options.get('tensors', '')}".strip()


def operands(gemms: list[str], tensors: list[str]) -> frozenset[tuple[str, str]]:
    return frozenset((gemm, tensor) for gemm in gemms for tensor in OPERANDS[gemm] if tensor in tensors)


def disabling(feature: str, *gemms: str) -> Choice:
    return Choice(feature, {"gemms": list(gemms)}, high=gemms)


def scaling(gemms: list[str], tensors: list[str]) -> Choice:
    return Choice("PerTensorScaling", {"gemms": gemms, "tensors": tensors}, scaled=operands(gemms, tensors))


def rounding(gemms: list[str], tensors: list[str]) -> Choice:
    options = {"gemms": gemms, "tensors": tensors, "quant_format": "FP8E4M3"}
    return Choice("FakeQuant", options, high=tuple(gemms), rounded=operands(gemms, tensors))


CHOICES = [
    Choice("LogTensorStats", {"tensors": TENSORS, "stats": ["max"]}),
    Choice("LogFp8TensorStats", {"tensors": TENSORS, "stats": ["mse"]}),
    Choice("LogNvfp4TensorStats", {"tensors": TENSORS, "stats": ["mse"]}),
    Choice("LogGemmError", {"gemms": list(EVERY_GEMM), "freq": 1}),
    Choice("DumpTensors", {"tensors": TENSORS, "high_precision_tensor": True}),
    Choice("DisableQuantizationLayer", high=EVERY_GEMM),
    Choice("DisableFP8Layer", high=EVERY_GEMM),
    disabling("DisableQuantizationGEMM", "fprop"),
    disabling("DisableFP8GEMM", "dgrad", "wgrad"),
    scaling(["fprop"], ["activation"]),
    scaling(["fprop"], ["activation", "weight"]),
    scaling(["wgrad"], ["gradient"]),
    rounding(["fprop"], ["weight"]),
    rounding(["dgrad"], ["weight", "gradient"]),
]
PAIRS = list(itertools.combinations(CHOICES, 2))


def test_every_feature_is_paired_with_every_other() -> None:
    assert {choice.feature for choice in CHOICES} == set(FEATURES)


def conflict(one: Choice, other: Choice) -> bool:
    """Return whether no order of operations can do what both promise."""
    changed = one.scaled | one.rounded
    by_both = bool(changed & (other.scaled | other.rounded))
    forbidden = any(gemm in other.high for gemm, _ in one.scaled) or any(gemm in one.high for gemm, _ in other.scaled)
    return by_both or forbidden


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Any]:
    """Operands passed to the extension: GEMM and tensor -> the matrix."""
    matrices: dict[tuple[str, str], Any] = {}
    multiply = tex.generic_gemm

    def spy(a: Any, transposed_a: bool, b: Any, transposed_b: bool, *rest: Any, **keywords: Any) -> Any:
        gemm = LAYOUTS[transposed_a, transposed_b]
        matrices.update({(gemm, tensor): matrix for tensor, matrix in zip(OPERANDS[gemm], (a, b), strict=True)})
        return multiply(a, transposed_a, b, transposed_b, *rest, **keywords)

    monkeypatch.setattr(tex, "generic_gemm", spy)
    return matrices


def is_rounded(matrix: torch.Tensor) -> bool:
    """Return whether all elements are numbers of E4M3, with a scale that makes 448 of the largest."""
    scaled = matrix.double() * (448 / matrix.abs().max().double())
    return torch.allclose(scaled.to(torch.float8_e4m3fn).double(), scaled, rtol=1e-6)


def sections(one: Choice, other: Choice, *, apart: bool) -> dict[str, Any]:
    head = {"enabled": True, "layers": {"layer_types": ["all"]}}
    if apart:
        return {
            "first": {**head, "transformer_engine": one.body},
            "second": {**head, "transformer_engine": other.body},
        }
    return {"first": {**head, "transformer_engine": {**one.body, **other.body}}}


ALONE = [(first, other, False) for first, other in PAIRS if first.feature != other.feature]  # a mapping has a key once
APART = [(first, other, True) for first, other in PAIRS]
REFUSED = [case for case in (*ALONE, *APART) if case[0].feature == case[1].feature or conflict(case[0], case[1])]
OBSERVING = [choice for choice in CHOICES if not choice.high and not choice.scaled]


def is_tried(one: Choice, other: Choice) -> bool:
    """Return whether a training shows that the pair holds: of features that only observe one beside each other one."""
    if one not in OBSERVING:
        return True
    return other not in OBSERVING and CHOICES.index(other) % len(OBSERVING) == CHOICES.index(one)


HOLDING = [case for case in ALONE if case not in REFUSED and is_tried(case[0], case[1])]


def named(cases: list[tuple[Choice, Choice, bool]]) -> list[str]:
    return [f"{first} + {other}{', apart' if apart else ''}" for first, other, apart in cases]


def written(folder: Path, one: Choice, other: Choice, *, apart: bool) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections(one, other, apart=apart), sort_keys=False))
    return path


@pytest.mark.parametrize(("one", "other", "apart"), REFUSED, ids=named(REFUSED))
def test_a_pair_that_cannot_hold_is_refused_with_both_places(
    tmp_path: Path, one: Choice, other: Choice, apart: bool
) -> None:
    with pytest.raises(ConfigError) as refused:
        with InspectSession(written(tmp_path, one, other, apart=apart), model=te.Linear(32, 32), log_dir=tmp_path):
            pass
    places = re.findall(r"config\.yaml, line (\d+)(?: column \d+)? \(section '(\w+)'\)", str(refused.value))
    assert {section for _, section in places} == ({"first", "second"} if apart else {"first"})
    assert len({line for line, _ in places}) == 2
    assert repr(one.feature) in str(refused.value)
    assert repr(other.feature) in str(refused.value)
    disputed = re.search(r"'(\w+)' (quantizes tensors of|runs in high precision) the GEMM", str(refused.value))
    by_both = (one.scaled | one.rounded) & (other.scaled | other.rounded)
    assert bool(disputed) == (one.feature != other.feature and not by_both)
    if disputed:
        (named,) = [choice for choice in (one, other) if choice.feature == disputed[1]]
        assert bool(named.scaled) == (disputed[2] == "quantizes tensors of")


def one_step(config: Any, folder: Path) -> InspectSession:
    torch.manual_seed(0)
    net = te.Linear(32, 32)
    with InspectSession(config, model=net, log_dir=folder, strict=True, records="off") as session:
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = net(torch.randn(16, 32, requires_grad=True))
        output.backward(torch.randn(16, 32))
        session.step()
    return session


@pytest.mark.few
@pytest.mark.parametrize(("one", "other", "apart"), HOLDING, ids=named(HOLDING))
def test_a_pair_that_is_taken_holds(
    tmp_path: Path, multiplied: dict[tuple[str, str], Any], one: Choice, other: Choice, apart: bool
) -> None:
    together = load_config(written(tmp_path, one, other, apart=False)).plan(LAYERS, REGISTERED).layers
    in_two = load_config(sections(one, other, apart=True)).plan(LAYERS, REGISTERED).layers
    assert [entry.features for entry in together] == [entry.features for entry in in_two]
    one_step(tmp_path / "config.yaml", tmp_path)
    high, scaled, rounded = (*one.high, *other.high), one.scaled | other.scaled, one.rounded | other.rounded
    assert set(multiplied) == {(gemm, tensor) for gemm in EVERY_GEMM for tensor in OPERANDS[gemm]}
    for (gemm, tensor), matrix in multiplied.items():
        if gemm in high:
            assert type(matrix) in (torch.Tensor, torch.nn.Parameter)
            assert is_rounded(matrix.detach()) == ((gemm, tensor) in rounded), (gemm, tensor)
        else:
            assert hasattr(matrix, "_scale_inv"), (gemm, tensor)
            # Delayed scaling begins with a scale of 1.
            assert (float(matrix._scale_inv) != 1.0) == ((gemm, tensor) in scaled), (gemm, tensor)


@pytest.mark.slow
def test_what_two_features_observe_is_what_each_observes_alone(tmp_path: Path) -> None:
    def observed(number: int, *choices: Choice) -> set[tuple[Any, ...]]:
        folder = tmp_path / str(number)
        bodies = {name: options for choice in choices for name, options in choice.body.items()}
        section = {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": bodies}
        session = one_step({"s": section}, folder)
        results = {(row.tensor, row.statistic, row.value) for row in session.last_statistics}
        for path in folder.rglob("*.safetensors"):
            tensors = dumps.load(path).tensors
            results |= {(path.name, name, *tensor.flatten().tolist()) for name, tensor in tensors.items()}
        return results

    alone = [observed(number, choice) for number, choice in enumerate(OBSERVING)]
    assert all(alone)
    pairs = itertools.combinations(range(len(OBSERVING)), 2)
    for number, (first, other) in enumerate(pairs, start=len(OBSERVING)):
        together = observed(number, OBSERVING[first], OBSERVING[other])
        assert together == alone[first] | alone[other], (str(OBSERVING[first]), str(OBSERVING[other]))


@pytest.mark.parametrize(
    ("feature", "options", "gemms"),
    [
        ("DisableQuantizationLayer", {}, set(EVERY_GEMM)),
        ("DisableQuantizationGEMM", {"gemms": ["dgrad"]}, {"dgrad"}),
    ],
)
def test_the_steps_in_which_gemms_run_in_high_precision(
    tmp_path: Path, multiplied: dict[tuple[str, str], Any], feature: str, options: dict[str, Any], gemms: set[str]
) -> None:
    net = te.Linear(32, 32)
    options = {"enabled": True, "start_step": 1, "end_step": 1, **options}
    config = {
        "s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": {feature: options}},
    }
    with InspectSession(config, model=net, log_dir=tmp_path, strict=True, records="off") as session:
        for step in range(3):
            multiplied.clear()
            train(net, 1, session)
            high = {gemm for (gemm, _), matrix in multiplied.items() if not hasattr(matrix, "_scale_inv")}
            assert high == (gemms if step == 1 else set())


class Forbids:
    """A user's feature, without a schema that shows that it runs GEMMs in high precision."""

    def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int) -> bool:
        return False


@pytest.mark.parametrize("tensors", [["weight"], ["activation", "weight"]])
@pytest.mark.parametrize("forbidding", ["DisableFP8Layer", "Forbids"])
def test_what_no_schema_could_tell_is_an_error_where_it_happens(
    tmp_path: Path, forbidding: str, tensors: list[str]
) -> None:
    """Alone, where no plan is made; and with a feature that no schema describes."""
    scales = {"enabled": True, "gemms": ["fprop"], "tensors": tensors}
    features = {forbidding: {"enabled": True}, "PerTensorScaling": scales}
    stated = (
        rf"PerTensorScaling quantized {tensors[0]} of 'linear' for fprop, which {forbidding} keeps in high precision"
    )
    with plain(features, tmp_path / "plain", classes=[Forbids]), pytest.raises(FeatureError, match=stated):
        train(linear())
    if forbidding == "Forbids":
        with pytest.raises(FeatureError, match=stated):
            in_session(features, tmp_path, features=[Forbids])


def test_experts_run_in_fp8_again(tmp_path: Path) -> None:
    """With delayed scaling, the quantizer of a feature must leave the recipe's quantizer as it is."""
    model = te.GroupedLinear(2, 32, 32)
    config = {"s": feature("DisableFP8Layer", ["all"], end_step=2)}
    with InspectSession(config, model=model, log_dir=tmp_path) as session:
        for _ in range(5):
            with te.autocast(enabled=True):
                model(torch.randn(64, 32), [32, 32]).sum().backward()
            session.step()
        operands = [session.precision(at=step)[0].operands["weight"] for step in range(5)]
    assert operands == ["FP32"] * 3 + ["FP8 E4M3"] * 2
