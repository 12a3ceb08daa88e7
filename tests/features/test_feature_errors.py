"""What goes wrong in a feature names the feature, the call and the layer; observation does not end training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper
from tests.features.plain import in_session, linear, plain, train

CALLS = [
    "fp8_gemm_enabled",
    "modify_tensor_enabled",
    "modify_tensor",
    "inspect_tensor_enabled",
    "inspect_tensor",
    "inspect_tensor_postquantize_enabled",
    "inspect_tensor_postquantize",
]
PRECISION = CALLS[:3]
OBSERVING = CALLS[3:]

EVERYWHERE = {"enabled": True, "tensors": ["activation"], "gemms": ["fprop"]}
STATISTICS = {"LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["numel"]}}


def giving(method: str, give: Callable[..., Any]) -> type:
    """A feature ``Broken`` whose method gives this; the call before it says that it is wanted."""

    def call(self: Any, config: Any, layer_name: str, **arguments: Any) -> Any:
        return give(**arguments)

    def wanted(self: Any, config: Any, layer_name: str, iteration: int) -> bool:
        return True

    methods = {method: call}
    if not method.endswith("_enabled"):
        methods[f"{method}_enabled"] = wanted
    return type("Broken", (), methods)


def slip(**_: Any) -> None:
    raise AttributeError("a slip in the feature")


def asking(method: str) -> type:
    """A feature whose method wants an argument that there is not."""
    broken = giving(method, slip)

    def call(self: Any, config: Any, layer_name: str, tensor_nam: str) -> None: ...

    setattr(broken, method, call)
    return broken


def wrong(method: str) -> str:
    return rf"feature Broken (failed in|returned .* from) {method} for the layer 'linear'"


@pytest.mark.parametrize(
    "method", ["fp8_gemm_enabled", "modify_tensor", "inspect_tensor", "inspect_tensor_postquantize"]
)
def test_a_call_that_raises(tmp_path: Path, method: str) -> None:
    with plain({"Broken": EVERYWHERE}, tmp_path, classes=[giving(method, slip)]):
        with pytest.raises(FeatureError, match=wrong(method) + ": AttributeError: a slip in the feature"):
            train(linear())


ANSWERS = (1, 0, None, "yes", (True,), (True, 1, 2), (1, 2), (True, 1.5), (True, True), [True, 1])
WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    **{
        f"{method} {answer!r}": (method, lambda answer=answer, **_: answer, r"expected a bool, or a tuple")
        for method in CALLS
        if method.endswith("_enabled")
        for answer in ANSWERS[: None if method == "inspect_tensor_enabled" else 1]  # one function reads all
    },
    "inspect_tensor tensor": ("inspect_tensor", lambda tensor, **_: tensor, "expected nothing"),
    "inspect_tensor False": ("inspect_tensor", lambda **_: False, "expected nothing"),
    "inspect_tensor_postquantize": ("inspect_tensor_postquantize", lambda **_: 1, "expected nothing"),
    "modify_tensor text": ("modify_tensor", lambda **_: "text", "expected a tensor or a quantized tensor"),
    "modify_tensor None": ("modify_tensor", lambda **_: None, "expected a tensor"),
    "modify_tensor list": ("modify_tensor", lambda tensor, **_: [tensor], "expected a tensor"),
}


@pytest.mark.parametrize(("method", "give", "message"), WRONG.values(), ids=WRONG)
def test_an_answer_of_a_wrong_type(tmp_path: Path, method: str, give: Callable[..., Any], message: str) -> None:
    with plain({"Broken": EVERYWHERE}, tmp_path, classes=[giving(method, give)]):
        with pytest.raises(FeatureError, match=wrong(method) + ".*" + message):
            train(linear())


def test_a_tensor_of_a_wrong_dtype(tmp_path: Path) -> None:
    """Told without the numbers in it."""
    arguments = {"layer_name": "linear", "tensor_name": "activation", "gemm": "fprop", "iteration": 0}
    with plain({"Broken": EVERYWHERE}, tmp_path, classes=[giving("modify_tensor", lambda tensor, **_: tensor)]):
        with pytest.raises(FeatureError) as raised:
            debug_api.transformer_engine.modify_tensor(**arguments, tensor=torch.ones(16, 32), dtype=torch.bfloat16)
    assert "a Tensor of torch.float32 and shape (16, 32) from modify_tensor for the layer 'linear'" in str(raised.value)
    assert str(raised.value).endswith("expected a tensor of torch.bfloat16.")


def test_two_features_that_modify_one_tensor(tmp_path: Path) -> None:
    with plain({"PerTensorScaling": EVERYWHERE, "FakeQuant": {**EVERYWHERE, "quant_format": "FP8E4M3"}}, tmp_path):
        with pytest.raises(FeatureError, match=r"PerTensorScaling and FakeQuant .* activation of 'linear' in fprop"):
            train(linear())


@pytest.mark.parametrize(
    ("feature", "options", "message"),
    [
        ("LogTensorStats", {"enabled": True, "tensors": ["weight"], "stats": ["maximum"]}, "'maximum'"),
        ("LogTensorStats", {"enabled": True, "stats": ["max"]}, "neither 'tensors' nor 'tensors_struct'"),
        ("LogTensorStats", {"enabled": True, "tensors": ["weight"], "stats": ["max"], "freq": 0}, "'freq' of .* not 0"),
        ("LogTensorStats", {"enabled": True, "tensors": ["weight"], "stat": ["max"]}, "no key 'stat' .*'stats'"),
        ("LogTensorStats", {"enable": True, "tensors": ["weight"], "stats": ["max"]}, "no 'enabled'"),
        ("FakeQuant", {"enabled": True, "tensors": ["weight"]}, "neither 'gemms' nor 'gemms_struct'"),
        ("DisableFP8GEMM", {"enabled": True}, "neither 'gemms' nor 'gemms_struct'"),
        ("DisableFP8Layer", None, "no 'enabled'"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, feature: str, options: Any, message: str) -> None:
    """Alone, where no schema checks the config before: in the first forward, not never."""
    with plain({feature: options}, tmp_path):
        with pytest.raises(FeatureError, match=rf"feature {feature} failed in .* 'linear'.*{message}"):
            train(linear())


def test_a_typo_in_a_call(tmp_path: Path) -> None:
    with plain(STATISTICS, tmp_path):
        with pytest.raises(AttributeError, match=r"'inspect_tenser'.*fp8_gemm_enabled.*inspect_tensor,"):
            debug_api.transformer_engine.inspect_tenser(layer_name="linear", tensor_name="activation")
        assert not hasattr(debug_api.transformer_engine, "fp8_gemm")
        with pytest.raises(FeatureError, match=r"modify_tensor for the layer 'linear' was called without gemm"):
            debug_api.transformer_engine.modify_tensor(layer_name="linear", tensor_name="activation")


def test_a_broken_feature_leaves_the_others_their_tensor(tmp_path: Path) -> None:
    broken = giving("inspect_tensor", slip)
    with plain({"Broken": EVERYWHERE, **STATISTICS}, tmp_path, classes=[broken]) as logged:
        net = linear()
        with pytest.raises(FeatureError):
            net(torch.ones(16, 32))
        debug_api.step()
    assert logged.rows == {"linear_activation_numel": {0: 512}}


BROKEN_AND_STATISTICS = {"Broken": EVERYWHERE, **STATISTICS}


@pytest.mark.parametrize("make", [asking, lambda method: giving(method, slip)], ids=["asks", "raises"])
@pytest.mark.parametrize("method", OBSERVING)
def test_a_broken_observing_call_is_reported_once_by_a_session(
    tmp_path: Path, method: str, make: Callable[[str], type], keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    in_session(BROKEN_AND_STATISTICS, tmp_path, 3, features=[make(method)], sinks=[keeper])
    reports = [record.message for record in caplog.records if "failed on rank 0" in record.message]
    assert len(reports) == 1
    assert f"Broken failed in {method} for the layer 'linear'" in reports[0]
    if not method.endswith("_enabled"):  # the others of the tensor go on
        assert keeper.values("numel") == dict.fromkeys(range(3), 512)


@pytest.mark.parametrize("make", [asking, lambda method: giving(method, slip)], ids=["asks", "raises"])
@pytest.mark.parametrize("method", PRECISION)
def test_a_broken_precision_call_ends_the_run(tmp_path: Path, method: str, make: Callable[[str], type]) -> None:
    """Training that goes on in another precision than the config says would be worse."""
    with pytest.raises(FeatureError, match=wrong(method)):
        in_session(BROKEN_AND_STATISTICS, tmp_path, features=[make(method)])


def test_methods_that_are_never_called_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features = [type("Typo", (), {"inspect_tensr": slip}), type("Alone", (), {"modify_tensor": slip})]
    with InspectSession({}, model=te.Linear(32, 32), log_dir=tmp_path, features=features):
        pass
    assert "The feature Typo is never called" in caplog.text
    assert "modify_tensor of the feature Alone is never called: modify_tensor_enabled is missing" in caplog.text
