"""A user's own features: every call of the debug API, in every way to write it, and what goes wrong in one."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.session import InspectSession
from tests.combinations import half, pairs
from tests.conftest import Keeper
from tests.docs.pages import blocks
from tests.features import probes
from tests.features.plain import OURS, in_session, linear, plain, train
from tests.features.probes import ANYTHING
from tests.reference.processes import REPOSITORY

TENSORS = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
GEMMS = ["fprop", "dgrad", "wgrad"]
PROBE: dict[str, Any] = {"enabled": True, "tensors": TENSORS, "gemms": GEMMS, "mine": [1, 2]}
SHAPES = {"weight": (32, 32), "wgrad": (32, 32)}


@pytest.fixture(autouse=True)
def nothing_seen_yet() -> None:
    probes.SEEN.clear()


def train_with_probe(folder: Path, way: str, **how: Any) -> None:
    (folder / "probe.py").write_text(probes.source(**how, registered=True))
    if way == "alone, from a folder":
        folders = [folder, OURS] if how["api_method"] else [OURS, folder]
        with plain({"Probe": PROBE}, folder / "logs", folders=folders):
            train(linear(), 2)
    elif way == "session with a folder":
        in_session({"Probe": PROBE}, folder / "logs", 2, feature_dirs=[folder], strict=True)
    else:
        in_session({"Probe": PROBE}, folder / "logs", 2, features=[probes.made(**how)], strict=True)


@pytest.mark.parametrize(
    ("way", "api_method", "base", "signatures"),
    pairs(
        ["alone, from a folder", "session with a folder", "session with a class"],
        (True, False),
        ["TEConfigAPIMapper", "TEDefaultFeatures", ""],
        probes.SIGNATURES,
    ),
)
def test_every_call_has_the_right_arguments(
    tmp_path: Path, signatures: str, base: str, api_method: bool, way: str
) -> None:
    train_with_probe(tmp_path, way, signatures=signatures, base=base, api_method=api_method)
    seen: dict[str, list[dict[str, Any]]] = {}
    for call, arguments in probes.SEEN:
        assert arguments["layer_name"] == "linear"
        assert arguments["config"]["mine"] == [1, 2]
        seen.setdefault(call, []).append(arguments)
    assert set(seen) == set(probes.REFERENCE)
    if signatures != "anything":
        expected = {call: set(names.split(", ")) for call, names in probes.SIGNATURES[signatures].items()}
        assert {call: set(calls[0]) for call, calls in seen.items()} == expected
    for call, calls in seen.items():
        assert sorted({arguments["iteration"] for arguments in calls}) == [0, 1]
        check(call, [arguments for arguments in calls if arguments["iteration"] == 1])


PLACES: dict[str, list[tuple[str | None, str | None]]] = {
    "fp8_gemm_enabled": [(None, gemm) for gemm in GEMMS],
    "modify_tensor_enabled": [
        *(("activation", gemm) for gemm in ("fprop", "wgrad")),
        *(("weight", gemm) for gemm in ("fprop", "dgrad")),
        *(("gradient", gemm) for gemm in ("dgrad", "wgrad")),
        *zip(TENSORS[3:], ["fprop", "wgrad", "dgrad"], strict=True),
    ],
    "modify_tensor": [("activation", "fprop"), ("dgrad", "dgrad")],
    "inspect_tensor_enabled": [(tensor, None) for tensor in TENSORS],
    "inspect_tensor": [(tensor, None) for tensor in TENSORS],
}
"""Call -> the tensors and GEMMs of an iteration."""


def check(call: str, calls: list[dict[str, Any]]) -> None:
    places = [(arguments.get("tensor_name"), arguments.get("gemm")) for arguments in calls]
    if call in PLACES:
        assert set(places) == set(PLACES[call])
        assert len(places) == len(PLACES[call]) or call == "fp8_gemm_enabled"  # called for each operand
    for arguments in calls:
        assert arguments.get("tp_group") is None
        if "tensor" in arguments:
            assert tuple(arguments["tensor"].shape) == SHAPES.get(arguments["tensor_name"], (16, 32))
            assert arguments["tensor"].dtype == torch.float32
    if call == "modify_tensor":
        assert [type(arguments["default_quantizer"]) for arguments in calls] == [Float8Quantizer, type(None)]
        assert [arguments["out"] for arguments in calls] == [None, None]
    elif call in ("inspect_tensor_enabled", "inspect_tensor"):
        for arguments in calls:
            quantized = arguments["tensor_name"] in TENSORS[:3]
            assert arguments["config"]["tensor"] == arguments["tensor_name"]
            assert type(arguments.get("tensor", torch.ones(()))) in (torch.Tensor, torch.nn.Parameter)
            if "quantizer" in arguments:
                assert isinstance(arguments["quantizer"], Float8Quantizer if quantized else type(None))
                assert isinstance(arguments["rowwise_quantized_tensor"], Float8Tensor if quantized else type(None))
    elif call == "inspect_tensor_postquantize":
        # Quantized or modified, for each GEMM: wgrad is neither.
        rowwise = [arguments.get("rowwise") for arguments in calls]
        gemms = [arguments.get("gemm") for arguments in calls]
        assert [tensor for tensor, _ in places] == ["activation", "weight", "weight", "gradient"]
        assert rowwise in ([True, True, False, True], [None] * 4)
        assert gemms in (["fprop", "fprop", "dgrad", "dgrad"], [None] * 4)
        assert rowwise != gemms
        assert all(isinstance(arguments["tensor"], Float8Tensor) for arguments in calls)


def test_what_a_feature_gives_is_what_is_computed_with(tmp_path: Path) -> None:
    gradients: list[torch.Tensor] = []
    for name, enabled in (("without", False), ("with", True)):
        with plain(
            {"Probe": {**PROBE, "tensors": ["dgrad"], "enabled": enabled}},
            tmp_path / name,
            classes=[probes.made("reference", "", api_method=False)],
        ):
            torch.manual_seed(0)
            inputs = torch.ones(16, 32, requires_grad=True)
            linear()(inputs).sum().backward()
            gradients.append(inputs.grad)
    assert torch.equal(gradients[1], 2 * gradients[0])


def test_a_cached_weight_is_handed_out_to_write_into(tmp_path: Path) -> None:
    """The second time that a first micro-batch is announced, ``out`` is the weight of the first time."""
    outs: list[Any] = []

    class Halved:
        def modify_tensor_enabled(
            self, config: Any, layer_name: str, gemm: str, tensor_name: str, iteration: int
        ) -> bool:
            return True

        def modify_tensor(
            self, config: Any, layer_name: str, gemm: str, tensor_name: str, tensor: Any, iteration: int, out: Any
        ) -> Any:
            outs.append(out)
            if out is None:
                return tensor / 2
            out.copy_(tensor / 2)
            return None

    with plain({"Halved": {"enabled": True, "tensors": "weight", "gemms": "fprop"}}, tmp_path, classes=[Halved]):
        net = linear(bias=False)
        inputs = torch.randn(16, 32)
        for _ in range(2):
            with torch.no_grad():
                net.weight.mul_(2.0)
            output = net(inputs, is_first_microbatch=True)
            debug_api.step()
        torch.testing.assert_close(output, inputs @ net.weight.t() / 2)
    assert outs[0] is None
    assert outs[1].shape == (32, 32)


def watcher(name: str, answer: Callable[[int], Any]) -> tuple[type, list[int], list[int]]:
    """A class that answers so, and the iterations when it was queried and when it got a tensor."""
    asked: list[int] = []
    inspected: list[int] = []

    class Watcher:
        def inspect_tensor_enabled(self, config: Any, layer_name: str, tensor_name: str, iteration: int) -> Any:
            asked.append(iteration)
            return answer(iteration)

        def inspect_tensor(self, config: Any, layer_name: str, tensor_name: str, iteration: int) -> None:
            inspected.append(iteration)

    Watcher.__name__ = name
    return Watcher, asked, inspected


OTHERS: dict[str, Callable[[int], Any] | None] = {
    "nothing": None,
    "never, in a bool": lambda _: False,
    "never again": lambda _: (False, None),
    "every third": lambda i: (i % 3 == 0, i - i % 3 + 3),
    "a bool every third": lambda i: i % 3 == 0,
    "once": lambda i: (i == 0, None),
}


@pytest.mark.parametrize(("other", "with_session"), half(OTHERS, (False, True)))
def test_a_feature_that_answers_with_a_bool_is_asked_in_every_step(
    tmp_path: Path, other: str, with_session: bool
) -> None:
    late_class, asked, inspected = watcher("Late", lambda iteration: iteration >= 5)
    other_answer = OTHERS[other]
    other_class, _, seen_by_other = watcher("Other", other_answer or (lambda _: (False, None)))
    classes = [late_class] if other_answer is None else [other_class, late_class]
    options = {"enabled": True, "tensors": ["activation"]}
    features = {cls.__name__: options for cls in classes}
    if with_session:
        in_session(features, tmp_path, 8, features=classes, strict=True)
    else:
        with plain(features, tmp_path, classes=classes):
            train(linear(), 8)
    assert asked == list(range(8))
    assert inspected == [5, 6, 7]
    assert seen_by_other == {"every third": [0, 3, 6], "a bool every third": [0, 3, 6], "once": [0]}.get(other, [])


def test_features_that_modify_a_tensor_in_turns(tmp_path: Path) -> None:
    turns: list[tuple[str, int]] = []

    def modifying(name: str, turn: int) -> type:
        def modify_tensor_enabled(self: Any, *_: Any, iteration: int, **__: Any) -> bool:
            return iteration % 2 == turn

        def modify_tensor(self: Any, *_: Any, tensor: torch.Tensor, iteration: int) -> torch.Tensor:
            turns.append((name, iteration))
            return tensor

        return type(name, (), {"modify_tensor_enabled": modify_tensor_enabled, "modify_tensor": modify_tensor})

    classes = [modifying("Even", 0), modifying("Odd", 1)]
    options = {"enabled": True, "tensors": ["activation"], "gemms": ["fprop"]}
    with plain({"Even": options, "Odd": options}, tmp_path, classes=classes):
        net = linear()
        for _ in range(4):
            net(torch.ones(16, 32)).sum().backward()
            debug_api.step()
    assert turns == [("Even", 0), ("Odd", 1), ("Even", 2), ("Odd", 3)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_users_feature_takes_the_place_of_one_of_that_name(
    tmp_path: Path, fresh: bool, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is listed first; also where no namespace API is known yet, and upstream lets the class wait for it."""
    as_listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(as_listed(path), reverse=reverse))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text(
        "from nvdlfw_inspect.registry import Registry\n"
        "@Registry.register_feature(namespace='transformer_engine')\n"
        "class LogTensorStats:\n"
        "    mine = True\n"
    )
    with plain({}, tmp_path, folders=[tmp_path / "mine", OURS], fresh=fresh):
        features = debug_api.transformer_engine.namespace_features
        assert features["LogTensorStats"].mine
        assert not hasattr(features["LogFp8TensorStats"], "mine")


def test_without_tensors_and_gemms_a_custom_feature_acts_on_all(tmp_path: Path) -> None:
    everywhere, _, inspected = watcher("Everywhere", lambda _: True)
    with plain({"Everywhere": {"enabled": True}}, tmp_path, classes=[everywhere]):
        train(linear())
    assert inspected == [0] * len(TENSORS)


# --- what goes wrong names the feature, the call and the layer; observation does not end training


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
BROKEN_AND_STATISTICS = {"Broken": EVERYWHERE, **STATISTICS}


def giving(method: str, give: Callable[..., Any]) -> type:
    """A feature ``Broken`` with this method; the call before it returns that it is wanted."""

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
    """A feature with a method that takes an argument that does not exist."""
    broken = giving(method, slip)

    def call(self: Any, config: Any, layer_name: str, tensor_nam: str) -> None: ...

    setattr(broken, method, call)
    return broken


def wrong(method: str) -> str:
    return rf"feature Broken (failed in|returned .* from) {method} for the layer 'linear'"


ANSWERS = (1, 0, None, "yes", (True,), (True, 1, 2), (1, 2), (True, 1.5), (True, True), [True, 1])
WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    **{
        f"{method} {answer!r}": (method, lambda answer=answer, **_: answer, r"expected a bool, or a tuple")
        for method in CALLS
        if method.endswith("_enabled")
        for answer in ANSWERS[: None if method == "inspect_tensor_enabled" else 1]  # one function reads all
    },
    **{
        f"{method} raises": (method, slip, ": AttributeError: a slip in the feature")
        for method in ("fp8_gemm_enabled", "modify_tensor", "inspect_tensor", "inspect_tensor_postquantize")
    },
    "inspect_tensor tensor": ("inspect_tensor", lambda tensor, **_: tensor, "expected nothing"),
    "inspect_tensor False": ("inspect_tensor", lambda **_: False, "expected nothing"),
    "inspect_tensor_postquantize": ("inspect_tensor_postquantize", lambda **_: 1, "expected nothing"),
    "modify_tensor text": ("modify_tensor", lambda **_: "text", "expected a tensor or a quantized tensor"),
    "modify_tensor None": ("modify_tensor", lambda **_: None, "expected a tensor"),
    "modify_tensor shape": ("modify_tensor", lambda tensor, **_: tensor[:-1], "expected the shape of the tensor"),
    "modify_tensor list": ("modify_tensor", lambda tensor, **_: [tensor], "expected a tensor"),
}


def test_a_call_that_raises_or_has_an_answer_of_a_wrong_type(tmp_path: Path) -> None:
    for method, give, message in WRONG.values():
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


IMPOSSIBLE = [
    ("LogTensorStats", {"enabled": True, "tensors": ["weight"], "stats": ["maximum"]}, "'maximum'"),
    ("LogTensorStats", {"enabled": True, "stats": ["max"]}, "neither 'tensors' nor 'tensors_struct'"),
    ("LogTensorStats", {"enabled": True, "tensors": ["weight"], "stats": ["max"], "freq": 0}, "'freq' of .* not 0"),
    ("LogTensorStats", {"enabled": True, "tensors": ["weight"], "stat": ["max"]}, "no key 'stat' .*'stats'"),
    ("LogTensorStats", {"enable": True, "tensors": ["weight"], "stats": ["max"]}, "no 'enabled'"),
    ("DumpTensors", {"enabled": True, "tensors": ["weight"], "frequ": 10}, "no key 'frequ' .*'freq'"),
    ("DumpTensors", {"enabled": True, "tensors": ["weight"]}, "would write nothing"),
    ("FakeQuant", {"enabled": True, "tensors": ["weight"]}, "neither 'gemms' nor 'gemms_struct'"),
    ("DisableFP8GEMM", {"enabled": True}, "neither 'gemms' nor 'gemms_struct'"),
    ("DisableFP8Layer", None, "no 'enabled'"),
]


def test_options_that_cannot_be(tmp_path: Path) -> None:
    """Alone, where no schema checks the config before: in the first forward, not never."""
    for feature, options, message in IMPOSSIBLE:
        with plain({feature: options}, tmp_path):
            with pytest.raises(FeatureError, match=rf"feature {feature} failed in .* 'linear'.*{message}"):
                train(linear())


def test_a_typo_in_a_call(tmp_path: Path) -> None:
    with plain(STATISTICS, tmp_path):
        with pytest.raises(AttributeError, match=r"'inspect_tenser'.*fp8_gemm_enabled.*inspect_tensor,"):
            debug_api.transformer_engine.inspect_tenser(layer_name="linear", tensor_name="activation")
        assert not hasattr(debug_api.transformer_engine, "fp8_gemm")


def test_a_broken_feature_leaves_the_others_their_tensor(tmp_path: Path) -> None:
    with plain(BROKEN_AND_STATISTICS, tmp_path, classes=[giving("inspect_tensor", slip)]) as logged:
        net = linear()
        with pytest.raises(FeatureError):
            net(torch.ones(16, 32))
        debug_api.step()
    assert logged.rows == {"linear_activation_numel": {0: 512}}


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
    """Training that goes on in another precision than the config's would be worse."""
    with pytest.raises(FeatureError, match=wrong(method)):
        in_session(BROKEN_AND_STATISTICS, tmp_path, features=[make(method)])


def test_methods_that_are_never_called_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features = [type("Typo", (), {"inspect_tensr": slip}), type("Alone", (), {"modify_tensor": slip})]
    with InspectSession({}, model=te.Linear(32, 32), log_dir=tmp_path, features=features):
        pass
    assert "The feature Typo is never called" in caplog.text
    assert "modify_tensor of the feature Alone is never called: modify_tensor_enabled is missing" in caplog.text


# ---------------------------------------------------------------------- the page


PAGE = (REPOSITORY / "docs" / "custom-features.md").read_text()
FEATURE, STARTS, RARELY = blocks("docs/custom-features.md", "python")[:3]
(CONFIG,) = blocks("docs/custom-features.md", "yaml")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = te.Linear(32, 32)
        self.fc2 = te.Linear(32, 32, bias=False, name="fc2")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.read_by_fc2 = self.fc1(inputs)
        return self.fc2(self.read_by_fc2)


def keywords_for(how: str, folder: Path) -> dict[str, Any]:
    if how == "folder":
        folder.mkdir()
        (folder / "clip_outliers.py").write_text(FEATURE)
        return {"feature_dirs": [folder]}
    namespace: dict[str, Any] = {}
    exec(re.sub("^@Registry.*\n", "", FEATURE, flags=re.MULTILINE), namespace)
    return {"features": [namespace["ClipOutliers"]]}


def gradient() -> torch.Tensor:
    torch.manual_seed(3)
    values = torch.randn(64, 32)
    values[5, 6], values[7, 8] = 100.0, -50.0
    return values


def clipped(values: torch.Tensor) -> torch.Tensor:
    limit = float(3 * values.double().std())
    return values.clamp(-limit, limit)


@pytest.mark.parametrize("how", ["folder", "class"])
@pytest.mark.parametrize("fp8", [False, True])
def test_in_a_session(tmp_path: Path, keeper: Keeper, how: str, fp8: bool) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    keywords = keywords_for(how, tmp_path / "my_features")
    net, inputs = Net(), torch.randn(64, 32)
    options: dict[str, Any] = {"log_dir": tmp_path, "sinks": [keeper], "strict": True, "start_step": 98}
    with InspectSession(tmp_path / "config.yaml", model=net, **options, **keywords) as session:
        for step in range(98, 103):
            net.zero_grad()
            with te.autocast(enabled=fp8, recipe=DelayedScaling()):
                output = net(inputs)
            output.backward(gradient())
            session.step()
            acts = step >= 100
            expected = (clipped(gradient()) if acts else gradient()).t() @ net.read_by_fc2
            assert (net.fc2.weight.grad - expected).norm() < (0.1 if fp8 else 1e-6) * expected.norm()
    assert keeper.values("clipped%", "fc2", "gradient") == dict.fromkeys((100, 101, 102), 100 * 2 / (64 * 32))


def test_the_table_has_the_calls_and_their_arguments(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", PAGE, re.MULTILINE)
    described = {call: set(re.findall(r"`(\w+)`", arguments)) for call, arguments in rows}
    seen: dict[str, set[str]] = {}

    def noting(name: str) -> Any:
        def call(self: Any, config: Any, layer_name: str, **arguments: Any) -> Any:
            seen.setdefault(name, set()).update(arguments)
            if name == "modify_tensor_enabled":
                return arguments["tensor_name"] == "output"
            if name == "modify_tensor":
                return arguments["tensor"]
            return True if name.endswith("_enabled") else None

        return call

    everything = type("Everything", (), {name: noting(name) for name in ANYTHING})
    with plain({"Everything": {"enabled": True}}, tmp_path, classes=[everything]):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = te.Linear(32, 32, name="linear")(torch.randn(16, 32))
        output.sum().backward()
    assert seen == described
