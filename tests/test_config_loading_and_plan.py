"""Loading a config, selecting layers, and planning: mistakes raise before the run, with their place."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nvdlfw_inspect.config_manager import ConfigSpec, is_layer_in_cfg

from te_precision_callbacks import PrecisionDebugError
from te_precision_callbacks.check.factory import CHOICES
from te_precision_callbacks.config import Config, ConfigError, LayerSelector, Plan, load_config
from te_precision_callbacks.config.problems import nearest
from te_precision_callbacks.config.selection import LayerIndex
from te_precision_callbacks.config.yaml_text import MOST_BYTES
from tests.conftest import feature

REGISTERED = {
    "transformer_engine": ("LogTensorStats", "LogFp8TensorStats", "DisableFP8GEMM", "DisableFP8Layer"),
    "base": ("LogTensorStats",),
}


@dataclass(frozen=True)
class Layer:
    name: str
    aliases: tuple[str, ...] = ()
    types: tuple[str, ...] = ("Linear", "linear")
    scope: str = ""

    @property
    def upstream(self) -> tuple[str, ...]:
        return (f"model.{self.name}",)


LAYERS = [
    Layer("model.layers.0.self_attention.layernorm_qkv", types=("LayerNormLinear", "layernorm_linear")),
    Layer("model.layers.0.layernorm_mlp.fc1", types=("LayerNormMLP", "layernorm_mlp")),
    Layer("model.layers.10.layernorm_mlp.fc1", types=("LayerNormMLP", "layernorm_mlp")),
    Layer("model.layers.10.experts.gemm_3", types=("GroupedLinear", "grouped_linear")),
    Layer("model.head", aliases=("head", "my_head")),
]


def plan(layers: dict[str, Any], of: Sequence[Any] = LAYERS, **keywords: Any) -> Plan:
    section = {"enabled": True, "layers": layers, "transformer_engine": {"DisableFP8Layer": {"enabled": True}}}
    return load_config({"section": section}).plan(of, REGISTERED, **keywords)


GEMM = (
    "s: {{enabled: True, layers: {{layer_types: [x]}}, transformer_engine: {{DisableFP8GEMM: {{enabled: True,"
    " gemms: [{}]}}}}}}"
)


def test_parts_of_names_are_suggested() -> None:
    assert nearest("fp8", CHOICES) == ["fp8_delayed_scaling", "fp8_current_scaling", "fp8_block_scaling"]
    with pytest.raises(ConfigError, match=r"Similar names: .*'layernorm_qkv'"):
        plan({"layer_types": ["qkv_proj"]}, [Layer(f"0.{name}") for name in ("layernorm_qkv", "proj", "fc1")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: [*head]", r"not valid YAML: found undefined alias .*line 2, column 7"),
        ("a: [1, 2", r"not valid YAML: while parsing a flow sequence in line 1, .* line 2, column 1"),
        ("a:\n\tenabled: True", r"not valid YAML: .*cannot start any token in line 2, column 1"),
        (
            "LogTensorStats:\n  enabled: True\n  tensors: [weight]\n  freq: 3",
            r"^[^\n]*line 1 .*'LogTensorStats' is a feature, and not a section\. Put it into one[^\n]*$",
        ),
        (GEMM.format("forward"), r"'forward' is none of them\. Did you mean 'fprop'\?"),
        (GEMM.format("backward"), r"'backward' is none of them\. Did you mean 'dgrad' or 'wgrad'\?"),
        (GEMM.format("wgradd"), r"'wgradd' is none of them\. Did you mean 'wgrad' or 'dgrad'\?"),
        ("", r"is empty; a config is a mapping"),
        ("- a\n- b", r"holds a list"),
        ("a: 3", r"line 1 \(section 'a'\).*a section must be a mapping"),
        ("\na:\n  enabled: True\n", r"line 2 \(section 'a'\).*'layers' is missing"),
        (
            "a:\n  enabled: True\n  layers:\n    layer_types:\n",
            r"line 4.*'layer_types' must be a list of names, not None",
        ),
        (
            "a:\n  enabled: True\n  layers:\n    layer_numbers:\n    layer_types: [x]",
            r"line 4.*'layer_numbers' takes.*None",
        ),
        ("a:\n  enabled: True\n  layers:\n    layer_types:\n    - fc1\n    - 3", r"line 6.*list of names, but has 3"),
        ("a:\n  enabled: True\n  layers: {layer_numbers: ['0-99999999999']}", r"up to 999999, .* not '0-99999999999'"),
        ("a:\n  enabled: True\n  layers: {layer_numbers: [-1]}", r"takes numbers.* not -1"),
        ("a:\n  enabled: 2026-02-31\n", r"not valid YAML: day is out of range"),
        ("a:\n  enable: True\n  layers: {layer_types: [x]}", r"'enabled' is missing. Is 'enable' meant"),
        ("a:\n  enabled: maybe\n  layers: {layer_types: [x]}", r"line 2.*'enabled' must be True or False, not 'maybe'"),
        ("a:\n  enabled: True\n  layers: {layer_type: [x]}", r"line 3.*'layer_type'.*Did you mean 'layer_types'"),
        ("a:\n  enabled: True\n  layers: {}", r"'layers' is empty"),
        ("a:\n  enabled: True\n  layers: {layer_types: []}", r"'layer_types' must be a list of names"),
        ("a:\n  enabled: True\n  layers: {layer_name_regex_pattern: '(x'}", r"not a regular expression"),
        ("a:\n  enabled: True\n  layers: {layer_numbers: [5-2]}", r"ends before it starts"),
        ("a:\n  enabled: True\n  layers: {layer_numbers: [x]}", r"takes numbers"),
        ("a:\n  enabled: True\n  layers: {layer_types: [x]}\n  transformer_engine: 3", r"line 4.*mapping of features"),
        ("a:\n  x: 1\na:\n  x: 2\n", r"line 3: 'a' is given here a second time; the first is in line 1"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PrecisionDebugError)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("config.yml", r"config\.yml' does not exist.*Did you mean 'config\.yaml'"),
        ("nosuch.yaml", r"nosuch\.yaml' does not exist \(looked in '[^']*'\)\.$"),
        ("nowhere/config.yaml", r"nowhere'\)\.$"),
        (".", r"^The config '[^']+' is a folder\. Give the path of a YAML file\.$"),
        ("..", r"^The config '[^']+' is a folder\. Give the path of a YAML file\.$"),
        ("", "path is empty"),
        (3, ""),
        (["config.yaml"], ""),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, message: str) -> None:
    """A path that does not exist with similar files that do."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").touch()
    for source in (path, Path(path)) if isinstance(path, str) and path else (path,):
        with pytest.raises(ConfigError, match=message):
            load_config(source)


def test_a_loaded_config_a_mapping_and_none_are_accepted(tmp_path: Path) -> None:
    config = load_config({"s": feature("DisableFP8Layer", ["fc1"])})
    assert load_config(config) is config
    assert config.source is None
    (tmp_path / "config.yaml").write_text("s:\n  enabled: True\n  layers: {layer_types: [fc1]}\n")
    assert load_config(str(tmp_path / "config.yaml")).source == tmp_path / "config.yaml"
    default = load_config(None)
    assert isinstance(default, Config)
    assert len(default.plan(LAYERS, REGISTERED).layers) == len(LAYERS)


@pytest.mark.parametrize(
    ("layers", "indexes"),
    [
        ({"layer_types": ["fc1"]}, [1, 2]),
        ({"layer_types": ["layernorm_linear"]}, [0]),  # by the class, where no name has it
        ({"layer_types": ["LayerNormMLP"]}, [1, 2]),
        ({"layer_types": "fc1"}, [1, 2]),  # one name is not taken letter by letter
        ({"layer_types": ["all"]}, [0, 1, 2, 3, 4]),
        ({"layer_types": ["my_head"]}, [4]),  # by the name that the user gave
        ({"layer_numbers": [10]}, [2, 3]),  # neither fc1 nor gemm_3 is a layer's number
        ({"layer_numbers": ["0-3"]}, [0, 1]),
        ({"layer_numbers": 0}, [0, 1]),
        ({"layer_numbers": "all"}, [0, 1, 2, 3]),  # a layer without a number has none
        ({"layer_numbers": [10], "layer_types": ["fc1", "fc2"]}, [2]),
        ({"layer_name_regex_pattern": r".*(fc1|self_attention).*"}, [0, 1, 2]),
        ({"layer_name_regex_pattern": r"^head$"}, [4]),
        ({"layer_name_regex_pattern": r"^(?!model\.)|fc1"}, [1, 2]),  # an alias brings back nothing that is left out
        ({"exact_layer_names": ["model.head"]}, [4]),
        ({"exact_layer_names": ["model.head"], "layer_types": ["all"]}, [4]),  # as upstream: the first one rules
    ],
)
def test_selectors(layers: dict[str, Any], indexes: list[int]) -> None:
    selected = {entry.layer.name for entry in plan(layers).layers}
    assert [index for index, layer in enumerate(LAYERS) if layer.name in selected] == indexes


def test_a_config_for_upstreams_names_that_selects_other_layers_by_path_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @dataclass(frozen=True)
    class Block(Layer):
        upstream: tuple[str, ...] = ()  # type: ignore[misc]

    def plan_blocks(block: dict[str, Any], **keywords: Any) -> list[str]:
        blocks = [Block(f"model.layers.{at}.fc1", upstream=(f"model.layers.{at + 1}.fc1",)) for at in range(4)]
        return [entry.layer.name for entry in plan(block, blocks, **keywords).layers]

    for block in ({"layer_numbers": [2]}, {"layer_name_regex_pattern": r"layers\.2\."}):
        assert plan_blocks(block) == ["model.layers.2.fc1"]
        (message,) = caplog.messages
        assert (
            "(section 'section'): the section 'section' selects model.layers.2.fc1; by nvidia-dlfw-inspect's names it "
            "would select model.layers.2.fc1 (here model.layers.1.fc1)."
        ) in message
        assert message.endswith("layer_names='path' confirms that paths are meant.")
        caplog.clear()
        assert plan_blocks(block, layer_names="path") == ["model.layers.2.fc1"]
        assert plan_blocks(block, layer_names="upstream") == ["model.layers.1.fc1"]
    assert len(plan_blocks({"layer_types": ["fc1"]})) == 4
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "number"),
    [("layer12.proj", 12), ("h3.fc1", 3), ("fc10", None), ("moe.gemm_0", None), ("a.7.fc1", 7), ("b2.7.fc1", 7)],
)
def test_the_number_of_a_layer(name: str, number: int | None) -> None:
    hit = [
        candidate
        for candidate in range(20)
        if LayerSelector.parse({"layer_numbers": [candidate]}, lambda *keys: "here").select(LayerIndex([Layer(name)]))
    ]
    assert hit == ([] if number is None else [number])


def test_a_section_without_a_layer_can_be_allowed_or_be_off(caplog: pytest.LogCaptureFixture) -> None:
    assert plan({"layer_types": ["fc11"]}, allow_unmatched=True).unmatched == ("section",)
    assert "matches none" in caplog.text
    off = {**feature("DisableFP8Layer", ["zzzzz"]), "enabled": False}
    assert load_config({"off": off}).plan(LAYERS, REGISTERED).unmatched == ()
    for body in ({}, {"layers": None}, {"Own": 3}):
        assert load_config({"off": {"enabled": False, **body}}).enabled_sections == ()


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"exact_layer_names": ["fc1"]}, r"'fc1' is a part of the name of 2 layers\. .* write layer_types: \[fc1\]"),
        ({"exact_layer_names": ["LayerNormMLP"]}, r"'LayerNormMLP' is a class of 2 layers\. .*: \[LayerNormMLP\]"),
        ({"exact_layer_names": ["model.hed"]}, r"Similar names: 'model\.head'"),
        ({"exact_layer_names": ["model.head", "model.hea"]}, r"no layer 'model\.hea'. Did you mean 'model\.head'"),
        ({"layer_types": ["fc11"]}, r"'section' matches none of the 5 layers.*'fc1'"),
        ({"layer_types": ["layernorm_kqv"]}, r"'layernorm_qkv'"),
        ({"layer_types": ["zzzzz"]}, r"The layers are: 'model\.layers\.0"),
        ({"layer_name_regex_pattern": "^LayerNormMLP"}, r"'LayerNormMLP' is a class of 2 layers\."),
        ({"layer_name_regex_pattern": r"\d+\.layernorm_mpl\.fc."}, r"Similar names: 'layernorm_mlp'"),
        ({"layer_types": ["LayerNormMPL"]}, r"Similar names: .*'LayerNormMLP'"),
    ],
)
def test_a_suggestion_is_valid_for_its_selector(block: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        plan(block)
    if "layer_name_regex_pattern" in block and "class" not in told:
        assert "LayerNormMLP" not in str(caught.value)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"layer_types": ["fc1", "nope"]}, r"no layer's name or class contains 'nope'"),
        ({"layer_types": ["fc1", "layernorm_kqv"]}, r"contains 'layernorm_kqv'\. Similar: 'layernorm_qkv'"),
        ({"layer_numbers": [0, 7]}, r"no layer has a number from 7 to 7\. The numbers go from 0 to 10"),
        ({"layer_numbers": [0, "11-20"]}, r"no layer has a number from 11 to 20\."),
        ({"layer_numbers": ["0-20"]}, r"'0-20' goes beyond the layers\. The numbers go from 0 to 10"),
        ({"layer_numbers": ["0-9"]}, None),
        ({"layer_name_regex_pattern": ""}, r"is empty, which matches every name and selects all layers"),
        ({"exact_layer_names": ["model.head"], "layer_name_regex_pattern": ""}, "has no effect beside"),
        ({"layer_numbers": ["all"], "layer_types": ["fc1"]}, None),
        ({"layer_numbers": [10], "layer_types": ["fc1"]}, None),  # these two hold together
        ({"layer_name_regex_pattern": "head", "layer_types": ["fc1"]}, "'layer_types' has no effect beside"),
    ],
)
def test_a_selector_entry_without_a_match_warns(
    caplog: pytest.LogCaptureFixture, block: dict[str, Any], told: str | None
) -> None:
    """One config may be for several models, so that it is not refused."""
    assert plan(block).layers
    if told is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert re.search(rf"^the config mapping \(section 'section'\): .*{told}", message)


def test_the_line_of_an_entry_that_no_layer_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.yaml"
    lines = ["s:", "  enabled: True", "  layers:", "    exact_layer_names:", "    - model.head", "    - model.hed"]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"config\.yaml, line 6 .*no layer 'model\.hed'\. Did you mean 'model\.head'"):
        load_config(path).plan(LAYERS, REGISTERED)
    load_config(path).plan(LAYERS, REGISTERED, allow_unmatched=True)
    path.write_text("\n".join([*lines[:3], "    layer_types:", "    - fc1", "    - fc9"]))
    load_config(path).plan(LAYERS, REGISTERED)
    places = [message.split(":")[0].rpartition(", ")[2] for message in caplog.messages]
    assert places == ["line 6 (section 's')"] * 2


def test_a_selector_that_another_one_leaves_without_effect_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    plan({"exact_layer_names": ["model.head"], "layer_types": ["fc1"], "layer_numbers": [3]})
    said = [re.search(r"'(\w+)' has no effect beside '(\w+)'", text) for text in caplog.messages]
    assert [item and item[1] for item in said] == ["layer_numbers", "layer_types"]


def test_the_spelling_of_the_documentation() -> None:
    config = load_config({"s": feature("DisableFp8Gemm", ["all"], gemms=["fprop"])})
    planned = config.plan(LAYERS, REGISTERED).layers[0].features
    assert planned == {"transformer_engine": {"DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]}}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"transformer_engine": {"LogTensorStat": {"enabled": True}}},
            r"no feature 'LogTensorStat' in 'transformer_engine'.*'LogTensorStats'",
        ),
        (
            {"transformer_engin": {"LogTensorStats": {"enabled": True}}},
            r"'transformer_engin' is neither.*Did you mean 'transformer_engine'",
        ),
        ({"DisableFP8Layer": {"enabled": True}}, r"'DisableFP8Layer' is a feature of 'transformer_engine'; indent it"),
        (
            {"transformer_engine": {"DisableFP8Layer": {"enabled": "False"}}},
            r"'enabled' of 'DisableFP8Layer' must be True or False, not 'False'",
        ),
        (
            {"transformer_engine": {"DisableFP8Layer": {"enable": True}}},
            r"'DisableFP8Layer' has no 'enabled'.*Is 'enable' meant",
        ),
    ],
)
def test_unknown_features_are_refused_with_near_names(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"s": {"enabled": True, "layers": {"layer_types": ["all"]}, **body}}).plan(LAYERS, REGISTERED)


def test_sections_that_meet_in_a_layer_are_merged() -> None:
    def planned(**sections: Any) -> Plan:
        return load_config(sections).plan(LAYERS, REGISTERED)

    sections = {
        "mlp": feature("DisableFP8Layer", ["layernorm_mlp"]),
        "ten": feature("DisableFP8GEMM", ["layers.10"], gemms=["fprop"]),
    }
    assert [entry.sections for entry in planned(**sections).layers] == [("mlp",), ("mlp", "ten"), ("ten",)]
    handed_over = planned(**sections).as_inspect_config()
    assert list(handed_over) == ["mlp", "mlp + ten", "ten"]
    assert set(handed_over["mlp + ten"]["transformer_engine"]) == {"DisableFP8Layer", "DisableFP8GEMM"}
    in_the_way = {"mlp + ten": feature("DisableFP8Layer", ["head"])}
    assert len(planned(**sections, **in_the_way).as_inspect_config()) == 4, "no name is in another's way"
    on, off = feature("DisableFP8Layer", ["fc1"]), feature("DisableFP8Layer", ["fc1"])
    off["transformer_engine"]["DisableFP8Layer"]["enabled"] = False
    merged = planned(a=on, b=off).layers[0].features
    assert merged == {"transformer_engine": {"DisableFP8Layer": {"enabled": True}}}
    with pytest.raises(ConfigError, match=r"section 'b'.*gives 'DisableFP8Layer' to the layer .*10.*fc1.*section 'a'"):
        planned(a=on, b=feature("DisableFP8Layer", ["layers.10"]))
    on["transformer_engine"]["DisableFp8Layer"] = {"enabled": True}
    with pytest.raises(ConfigError, match="'DisableFP8Layer' is given here twice"):
        planned(s=on)


def test_upstream_finds_in_the_plan_exactly_the_layers_that_were_planned() -> None:
    """Held against nvidia-dlfw-inspect's own selection, with names that contain one another."""
    names = ["a.fc1", "a.fc10", "b.a.fc1", "a_fc1", "a.fc1.x", "a.fc1 "]
    planned = plan({"exact_layer_names": ["a.fc1"]}, [Layer(name) for name in names])
    (section,) = planned.as_inspect_config().values()
    spec = ConfigSpec()
    spec.initialize(section)
    assert [name for name in names if is_layer_in_cfg(name, spec)] == ["a.fc1"]


# --- configs as others write them -------------------------------------------------------------------------------------

OTHERS = {
    "BioNeMo: types that are parts of names, an item for each tensor, and a GEMM among the tensors": """
      stats:
        enabled: True
        layers: {layer_types: [layernorm_qkv, proj, fc1, fc2]}
        transformer_engine:
          LogFp8TensorStats:
            enabled: True
            tensors_struct:
            - {tensor: activation, stats: [underflows%, scale_inv_min, scale_inv_max, mse], freq: 10}
            - {tensor: gradient, stats: [underflows%, scale_inv_min, scale_inv_max, mse], freq: 10}
          LogTensorStats: {enabled: True, stats: [max, min, mean, std, l1_norm], tensors: [dgrad, wgrad, fprop],
                           freq: 1}
    """,
    "Megatron-Bridge: a pattern, and a schedule with an end": """
      fp8_tensor_stats:
        enabled: true
        layers: {layer_name_regex_pattern: ".*(fc2)"}
        transformer_engine:
          LogFp8TensorStats:
            enabled: true
            tensors: [weight,activation,gradient]
            stats: ["underflows%", "mse"]
            freq: 5
            start_step: 0
            end_step: 100
    """,
    "Transformer Engine: numbers with types, pairs of steps, a GEMM with its own tensors": """
      a:
        enabled: True
        layers: {layer_numbers: [1, 10], layer_types: [linear]}
        transformer_engine:
          FakeQuant:
            enabled: True
            gemms_struct:
            - {gemm: fprop, tensors_struct: [{tensor: activation, quant_format: FP8E4M3}]}
      b:
        enabled: False
        layers: {layer_types: [mlp]}
        transformer_engine:
          LogTensorStats: {enabled: True, tensors: weight, stats: [cur_amax], start_end_list: [[0, 20], [80, 100]]}
    """,
}


@pytest.mark.parametrize("name", OTHERS)
def test_configs_as_others_write_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(OTHERS[name])
    assert load_config(tmp_path / "config.yaml").sections


def test_a_gemm_among_tensors_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformer Engine never looks for it, and says nothing."""
    (tmp_path / "config.yaml").write_text(OTHERS[next(iter(OTHERS))])
    (section,) = load_config(tmp_path / "config.yaml").sections
    read = section.features["transformer_engine"]["LogTensorStats"]
    assert read["tensors"] == ["dgrad", "wgrad"]
    assert [target.tensor for target in read.schema.targets] == ["dgrad", "wgrad"]
    (message,) = caplog.messages
    assert re.fullmatch(
        r".*config.yaml, line 11 .*'tensors' of 'LogTensorStats' has 'fprop', which is a GEMM and no tensor: nothing is"
        r" observed for it, as in Transformer Engine\. Its result is 'output'\.",
        message,
    )


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"'/dev/zero' has more than {MOST_BYTES:,} bytes"):
        load_config("/dev/zero")


def test_a_mapping_that_is_too_large_gets_a_short_message() -> None:
    itself: dict[str, Any] = {}
    itself["s"] = itself
    for source, message in (
        (itself, r"the key 'enabled' is missing"),
        ({"s": {"enabled": "x" * 10_000_000}}, "'enabled' must be True or False"),
        ({"s": {"enabled": 1 << 100_000}}, "not an integer of 100001 bits"),
        ({"s": {"enabled": True, "layers": {"layer_numbers": [1 << 100_000]}}}, "not an integer of 100001 bits"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(source)
        assert len(str(caught.value)) < 1000
