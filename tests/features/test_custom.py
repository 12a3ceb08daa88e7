"""A user's own features: every call of the debug API, in every way to write it, in a training step with FP8."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

from tests.combinations import half
from tests.features import probes
from tests.features.plain import OURS, in_session, linear, plain, train

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
    half(
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
        assert len(places) == len(PLACES[call]) or call == "fp8_gemm_enabled"  # asked of each operand
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
        # What is quantized or modified, for each GEMM: wgrad is neither.
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
    """A class that answers so, and the iterations in which it was asked and got a tensor."""
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
