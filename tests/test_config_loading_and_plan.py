"""Configs: loading, schemas of features, layers and plans. Mistakes raise before the run, with their place."""

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from nvdlfw_inspect.config_manager import ConfigSpec, is_layer_in_cfg

from te_precision_callbacks import PrecisionDebugError
from te_precision_callbacks.base.suggestions import nearest
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.check.factory import CHOICES
from te_precision_callbacks.config import Config, ConfigError, Plan, load_config
from te_precision_callbacks.config.loading import DEFAULT_CONFIG, notes_of
from te_precision_callbacks.config.schemas import FEATURES, schema_of
from te_precision_callbacks.config.selection import LayerIndex, LayerSelector
from te_precision_callbacks.config.yaml_text import MOST_BYTES
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.statistics.table import QUANTIZED_STATISTICS, TENSOR_STATISTICS
from tests.conftest import feature
from tests.engine.exact import BLOCK_STATISTICS
from tests.te_debug_features import EXAMPLES
from tools import features_page

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


def plan(layers: dict[str, Any], of: Sequence[Any] = LAYERS, *, allow_unmatched: bool = False, **keys: Any) -> Plan:
    section = {"enabled": True, "layers": layers, "transformer_engine": {"DisableFP8Layer": {"enabled": True}}}
    return load_config({"section": section, **keys}).plan(of, REGISTERED, allow_unmatched=allow_unmatched)


GEMM = (
    "s: {{enabled: True, layers: {{layer_types: [x]}}, transformer_engine: {{DisableFP8GEMM: {{enabled: True,"
    " gemms: [{}]}}}}}}"
)


def test_parts_of_names_are_suggested() -> None:
    assert nearest("fp8", CHOICES) == ["fp8_delayed_scaling", "fp8_current_scaling", "fp8_block_scaling"]
    with pytest.raises(ConfigError, match=r"Similar names: .*'layernorm_qkv'"):
        plan({"layer_types": ["qkv_proj"]}, [Layer(f"0.{name}") for name in ("layernorm_qkv", "proj", "fc1")])
    spelt_as_in_the_documentation = load_config({"s": feature("DisableFp8Gemm", ["all"], gemms=["fprop"])})
    planned = spelt_as_in_the_documentation.plan(LAYERS, REGISTERED).layers[0].features
    assert planned == {"transformer_engine": {"DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]}}}


MALFORMED = [
    ("a:\n  b: [*head]", r"not valid YAML: found undefined alias .*line 2, column 7"),
    ("a: [1, 2", r"not valid YAML: while parsing a flow sequence in line 1, .* line 2, column 1"),
    ("a:\n\tenabled: True", r"not valid YAML: .*cannot start any token in line 2, column 1"),
    (
        "LogTensorStats:\n  enabled: True\n  tensors: [weight]\n  freq: 3",
        r"^[^\n]*line 1 .*'LogTensorStats' is a feature, not a section[^\n]*$",
    ),
    (GEMM.format("forward"), r"'forward' is not in this list\. Did you mean 'fprop'\?"),
    (GEMM.format("backward"), r"'backward' is not in this list\. Did you mean 'dgrad' or 'wgrad'\?"),
    (GEMM.format("wgradd"), r"'wgradd' is not in this list\. Did you mean 'wgrad' or 'dgrad'\?"),
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
    ("a:\n  enable: True\n  layers: {layer_types: [x]}", r"'enabled' is missing. Is 'enable' a misspelling"),
    ("a:\n  enabled: maybe\n  layers: {layer_types: [x]}", r"line 2.*'enabled' must be True or False, not 'maybe'"),
    ("a:\n  enabled: True\n  layers: {layer_type: [x]}", r"line 3.*'layer_type'.*Did you mean 'layer_types'"),
    ("a:\n  enabled: True\n  layers: {}", r"'layers' is empty"),
    ("a:\n  enabled: True\n  layers: {layer_types: []}", r"'layer_types' must be a list of names"),
    ("a:\n  enabled: True\n  layers: {layer_name_regex_pattern: '(x'}", r"not a regular expression"),
    ("a:\n  enabled: True\n  layers: {layer_numbers: [5-2]}", r"ends before it starts"),
    ("a:\n  enabled: True\n  layers: {layer_numbers: [x]}", r"takes numbers"),
    ("a:\n  enabled: True\n  layers: {layer_types: [x]}\n  transformer_engine: 3", r"line 4.*mapping of features"),
    ("a:\n  x: 1\na:\n  x: 2\n", r"line 3: 'a' is already defined in line 1"),
]


def test_a_malformed_file_is_refused_with_its_place(tmp_path: Path) -> None:
    for text, message in MALFORMED:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(path)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, PrecisionDebugError)


NO_FILES = [
    ("config.yml", r"config\.yml' does not exist.*Did you mean 'config\.yaml'"),
    ("nosuch.yaml", r"nosuch\.yaml' does not exist \(looked in '[^']*'\)\.$"),
    ("nowhere/config.yaml", r"nowhere'\)\.$"),
    (".", r"^The config '[^']+' is a folder\. Give the path of a YAML file\.$"),
    ("..", r"^The config '[^']+' is a folder\. Give the path of a YAML file\.$"),
    ("/dev/zero", rf"'/dev/zero' has more than {MOST_BYTES:,} bytes"),  # a file without end
    ("", "path is empty"),
    (3, ""),
    (["config.yaml"], ""),
]


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that does not exist with similar files that do."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").touch()
    for path, message in NO_FILES:
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


SELECTED = [
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
]


def test_selectors_select_the_expected_layers() -> None:
    for layers, indexes in SELECTED:
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
        assert message.endswith("layer_names: path in the config keeps selecting by path.")
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
    for candidate in range(20):
        selector = LayerSelector.parse({"layer_numbers": [candidate]}, lambda *keys: "here")
        assert bool(selector.select(LayerIndex([Layer(name)]))) == (candidate == number)


def test_a_section_without_a_layer_can_be_allowed_or_be_off(caplog: pytest.LogCaptureFixture) -> None:
    assert plan({"layer_types": ["fc11"]}, allow_unmatched=True).unmatched == ("section",)
    assert "matches none" in caplog.text
    off = {**feature("DisableFP8Layer", ["zzzzz"]), "enabled": False}
    assert load_config({"off": off}).plan(LAYERS, REGISTERED).unmatched == ()
    for body in ({}, {"layers": None}, {"Own": 3}):
        assert load_config({"off": {"enabled": False, **body}}).enabled_sections == ()


SUGGESTED = [
    ({"exact_layer_names": ["fc1"]}, r"'fc1' is a part of the name of 2 layers\. .* write layer_types: \[fc1\]"),
    ({"exact_layer_names": ["LayerNormMLP"]}, r"'LayerNormMLP' is a class of 2 layers\. .*: \[LayerNormMLP\]"),
    ({"exact_layer_names": ["model.hed"]}, r"Similar names: 'model\.head'"),
    ({"exact_layer_names": ["model.head", "model.hea"]}, r"no layer 'model\.hea'. Did you mean 'model\.head'"),
    ({"layer_types": ["fc11"]}, r"the selector matches none of the 5 layers.*'fc1'"),
    ({"layer_types": ["layernorm_kqv"]}, r"'layernorm_qkv'"),
    ({"layer_types": ["zzzzz"]}, r"The layers are: 'model\.layers\.0"),
    ({"layer_types": ["z0"]}, r"none of the 5 layers\. The layers are: 'model\.layers\.0"),
    ({"layer_name_regex_pattern": "^LayerNormMLP"}, r"'LayerNormMLP' is a class of 2 layers\."),
    ({"layer_name_regex_pattern": r"\d+\.layernorm_mpl\.fc."}, r"Similar names: 'layernorm_mlp'"),
    ({"layer_types": ["LayerNormMPL"]}, r"Similar names: .*'LayerNormMLP'"),
]


def test_a_suggestion_is_valid_for_its_selector() -> None:
    for block, told in SUGGESTED:
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
        ({"layer_numbers": ["0-20"]}, r"'0-20' exceeds the layer numbers\. The numbers go from 0 to 10"),
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


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["exact_layer_names:", "- model.head", "- model.hed"], r"no layer 'model\.hed'\. Did you mean 'model\.head'"),
        (["layer_types:", "- fc1", "- fc9"], None),
    ],
)
def test_the_line_of_an_entry_that_no_layer_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entries: list[str], told: str | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("s:\n  enabled: True\n  layers:\n    " + "\n    ".join(entries))
    if told is not None:
        with pytest.raises(ConfigError, match=rf"config\.yaml, line 6 .*{told}"):
            load_config(path).plan(LAYERS, REGISTERED)
    load_config(path).plan(LAYERS, REGISTERED, allow_unmatched=told is not None)
    assert [message.split(":")[0].rpartition(", ")[2] for message in caplog.messages] == ["line 6 (section 's')"]


UNKNOWN = [
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
        r"'DisableFP8Layer' has no 'enabled'.*Is 'enable' a misspelling",
    ),
]


def test_unknown_features_are_refused_with_near_names() -> None:
    for body, message in UNKNOWN:
        with pytest.raises(ConfigError, match=message):
            load_config({"s": {"enabled": True, "layers": {"layer_types": ["all"]}, **body}}).plan(LAYERS, REGISTERED)


class WaitingFeature:
    """Stands for a user's class: a config needs only its name."""


def test_names_of_features_are_checked_where_all_features_are_known() -> None:
    """Transformer Engine's own tests have configs of a TestDummyFeature."""
    loaded = load_config({"s": feature("WaitingFeature", ["all"])})
    assert load_config(loaded, features=[WaitingFeature]) is loaded
    for unknown in (lambda: load_config(loaded, features=()), lambda: SessionOptions.from_keywords(loaded)):
        with pytest.raises(ConfigError, match="there is no feature 'WaitingFeature' in 'transformer_engine'"):
            unknown()
    assert SessionOptions.from_keywords(loaded, features=[WaitingFeature]).config == loaded


def test_a_feature_of_nvidia_dlfw_inspect_beside_transformer_engine_loads_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in stats_collection_test_config.yaml of Transformer Engine's tests; plain nvidia-dlfw-inspect loads it."""
    own = {"LogTensorStats": {"enabled": True, "stats": ["l2_norm"], "tensors": ["activation"]}}
    section = feature("LogTensorStats", ["all"], tensors=["activation"], stats=["max"])
    config = load_config({"s": {**section, **own}}, features=())
    (note,) = notes_of(config)
    assert note.startswith("the config mapping (section 's'")
    assert "nvidia-dlfw-inspect's own feature" in note
    with InspectSession(config, model=torch.nn.Sequential(te.Linear(32, 32)), log_dir=tmp_path) as session:
        session.step()
    (warning,) = [text for text in caplog.messages if "nvidia-dlfw-inspect's own feature" in text]
    assert warning == note


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
    with pytest.raises(
        ConfigError, match=r"section 'b'.*the layer .*10.*fc1' already has 'DisableFP8Layer' from .*section 'a'"
    ):
        planned(a=on, b=feature("DisableFP8Layer", ["layers.10"]))
    on["transformer_engine"]["DisableFp8Layer"] = {"enabled": True}
    with pytest.raises(ConfigError, match="'DisableFP8Layer' is given twice"):
        planned(s=on)


def test_upstream_finds_in_the_plan_exactly_the_layers_that_were_planned() -> None:
    """Compared with nvidia-dlfw-inspect's own selection, with names that contain other names."""
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


def test_configs_as_others_write_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A GEMM among tensors is left out: Transformer Engine never looks for it, and does not report it."""
    path = tmp_path / "config.yaml"
    loaded = []
    for text in OTHERS.values():
        path.write_text(text)
        loaded.append(load_config(path).sections[0].features["transformer_engine"])
    read = loaded[0]["LogTensorStats"]
    assert read["tensors"] == ["dgrad", "wgrad"]
    assert [target.tensor for target in read.schema.targets] == ["dgrad", "wgrad"]
    (message,) = caplog.messages
    assert re.fullmatch(
        r".*config.yaml, line 11 .*'tensors' of 'LogTensorStats' has 'fprop', which is a GEMM, not a tensor: it is"
        r" ignored, as in Transformer Engine\. Its result is 'output'\.",
        message,
    )


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


ROOT = Path(__file__).parents[1]


class Own:
    """A user's own feature."""


def load(folder: Path, name: str, options: str) -> Config:
    """Load a section with one feature; its options start in line 7."""
    lines = [
        *("my_section:", "  enabled: True", "  layers: {layer_types: [fc1]}", "  transformer_engine:"),
        *(f"    {name}:", "      enabled: True", *(f"      {line}" for line in options.splitlines())),
    ]
    (folder / "config.yaml").write_text("\n".join(lines))
    return load_config(folder / "config.yaml", features=[Own])


def handed_over(folder: Path, name: str, options: str) -> Any:
    return (
        load(folder, name, options)
        .plan(LAYERS, {"transformer_engine": (*FEATURES, "Own")})
        .layers[0]
        .features["transformer_engine"][name]
    )


def test_the_documented_examples_load_and_are_handed_over_as_written() -> None:
    written = yaml.safe_load("".join(EXAMPLES))
    loaded = {section.name: section.features["transformer_engine"] for section in load_config(written).sections}
    assert loaded == {name: body["transformer_engine"] for name, body in written.items()}
    default = load_config(None).sections[0].features["transformer_engine"]
    assert default == DEFAULT_CONFIG["default_statistics"]["transformer_engine"]
    for name, schema in FEATURES.items():
        (section,) = load_config(yaml.safe_load(schema.example)).sections
        assert list(section.features["transformer_engine"]) == [name], "an example of this feature"
        for spelling in (name.lower(), name.replace("FP8", "Fp8").replace("GEMM", "Gemm")):
            assert schema_of(spelling) is schema
    page = (ROOT / "docs" / "features.md").read_text()
    for part in (features_page.selectors(), features_page.sections()):
        assert part in page, "the schemas have changed; python -m tools.features_page prints these parts of the page"


def test_a_bare_name_is_handed_over_as_a_list_and_no_default_is_filled_in(tmp_path: Path) -> None:
    assert handed_over(tmp_path, "LogTensorStats", "tensors: activation\nstats: max") == {
        "enabled": True,
        "tensors": ["activation"],
        "stats": ["max"],
    }
    assert handed_over(tmp_path, "DumpTensors", "tensors_struct: [{tensor: weight, quantized_tensor: True}]") == {
        "enabled": True,
        "tensors_struct": [{"tensor": "weight", "quantized_tensor": True}],
    }
    assert handed_over(tmp_path, "PerTensorScaling", "gemms_struct: [{gemm: fprop, tensors: weight}]") == {
        "enabled": True,
        "gemms_struct": [{"gemm": "fprop", "tensors": ["weight"]}],
    }


VALID = [
    ("LogTensorStats", f"tensors: [output]\nstats: [{', '.join(TENSOR_STATISTICS)}, max_blockwise_dynamic_range]"),
    ("LogTensorStats", "tensors: dgrad\nstats: [max_blockwise_dynamic_range: {block_size: 16, dims: 2}]"),
    ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_step: 5\nend_step: -1\nfreq: 3"),
    ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_step:\nend_step:\nstart_end_list:"),
    ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_end_list: [[3, 3], [4, 8], [20, -1]]"),
    ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_end_list: [[0, 4], [5, 25], [26, 26]]"),
    ("DisableFP8GEMM", "gemms: fprop\nstart_step: 7\nstart_end_list: [[0, 5]]"),
    ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_step: 9\nend_step: 1\nstart_end_list: [[0, 2]]"),
    (
        "LogTensorStats",
        "stats: [max]\nend_step: 3\ntensors_struct: [{tensor: weight, start_step: 9, end_step: 10}]",
    ),
    (
        "LogTensorStats",
        "tensors_struct:\n  - {tensor: weight, stats: [max], end_step: 5}\n"
        "  - {tensor: weight, stats: [min], start_step: 6}",
    ),
    ("LogFp8TensorStats", f"tensors: [weight]\nstats: [{', '.join(QUANTIZED_STATISTICS)}]"),
    ("LogFp8TensorStats", f"tensors: [weight]\nstats: [{', '.join(f'{recipe}_mse' for recipe in RECIPES)}]"),
    ("LogFp8TensorStats", "tensors: [weight]\nstats: [mxfp8_mse_columnwise, delayed_scaling_underflows%]"),
    ("LogFp8TensorStats", "tensors: [weight]\nstats: [mxfp8_e4m3_mse_columnwise, fp8_current_e5m2_underflows%]"),
    ("LogNvfp4TensorStats", "tensors: [weight]\nstats: [mse, nvfp4_mse, underflows%_columnwise]"),
    ("LogNvfp4TensorStats", f"tensors: [weight]\nstats: [{', '.join(QUANTIZED_STATISTICS)}]"),
    ("LogFp8TensorStats", f"tensors: [weight]\nstats: [{', '.join(f'mxfp8_{s}' for s in BLOCK_STATISTICS)}]"),
    ("LogFp8TensorStats", "tensors: [weight]\nstats: [nvfp4_block_underflows%_max_columnwise, zero_blocks%]"),
    ("DisableQuantizationGEMM", "gemms_struct: [{gemm: fprop}, {gemm: wgrad}]"),
    ("PerTensorScaling", "tensors: [weight]\nmargin: -2\ngemms_struct: [{gemm: fprop}, {gemm: dgrad, margin: 0}]"),
    ("PerTensorScaling", "gemms: [fprop]\ntensors: [weight, gradient]"),
    ("FakeQuant", "gemms: fprop\ntensors_struct: [{tensor: output, quant_format: FP8E5M2, margin: 1}]"),
    ("FakeQuant", "quant_format: MXFP8E4M3\nmargin: 0\ngemms: [wgrad]\ntensors: [wgrad, activation]"),
    ("FakeQuant", "quant_format: FP8E4M3\ngemms_struct: [{gemm: dgrad, tensors_struct: [{tensor: dgrad}]}]"),
]


def test_valid_keys_load(tmp_path: Path) -> None:
    for name, options in VALID:
        assert load(tmp_path, name, options).enabled_sections


def test_disabled_and_custom_features_are_not_checked(tmp_path: Path) -> None:
    assert handed_over(tmp_path, "Own", "frequency: 3") == {"enabled": True, "frequency": 3}
    off = {"FakeQuant": {"enabled": False, "frequency": 3}}
    load_config({"s": {**feature("LogTensorStats", ["fc1"], frequency=3), "enabled": False}})
    load_config({"s": {**feature("Own", ["fc1"]), "transformer_engine": off}})


STATS = "stats: [max]\n"
TENSORS = "tensors: [activation]\n"
DUMPED = TENSORS + "high_precision_tensor: True\n"
LOGGED = STATS + TENSORS
SCALED = "gemms: [fprop]\ntensors: [weight]\n"


INVALID = [
    # names
    ("LogTensorStats", TENSORS + "stats: [min, maxx]", 8, "'stats' of N has 'maxx': there is no .*mean 'max'"),
    ("LogTensorStats", TENSORS + "stats: [zzz]", 8, "has 'zzz': .* The statistics are: cur_amax, dynamic_range"),
    ("LogTensorStats", TENSORS + "stats: [underflows%]", 8, "Move it to LogFp8TensorStats"),
    ("LogTensorStats", TENSORS + "stats: [mxfp8_mse]", 8, "Move it to LogFp8TensorStats"),
    ("LogNvfp4TensorStats", TENSORS + "stats: [std]", 8, "Move it to LogTensorStats"),
    ("LogTensorStats", TENSORS + "stats: [3]", 8, "has 3: .* The statistics are: cur_amax"),
    ("LogTensorStats", TENSORS + "stats: [max: {dims: 1}]", 8, r"only 'max_blockwise.*' takes .*, not 'max'\.$"),
    (
        "LogTensorStats",
        TENSORS + "stats: [max_blockwise_dynamic_range: {block_size: 0}]",
        8,
        r"block_size of .* must be an integer above 0, not 0\.$",
    ),
    ("LogFp8TensorStats", TENSORS + "stats: [mxfp8_mean]", 8, "'mxfp8_mean': there is no .*'mxfp8_mse'"),
    (
        "LogFp8TensorStats",
        TENSORS + "stats: [max]",
        8,
        r"'max': there is no .* Move it to LogTensorStats\.$",
    ),
    (
        "LogFp8TensorStats",
        TENSORS + "stats: [fp8_current_scaling_mse_columnwise]",
        8,
        "N has 'fp8_current_scaling_mse_columnwise': fp8_current_scaling has one scale.*'fp8_current_scaling_mse'",
    ),
    ("LogFp8TensorStats", TENSORS + "stats: [mxfp8_e4m2_mse]", 8, "no statistic 'e4m2_mse'.*'mxfp8_e4m3_mse'"),
    ("LogFp8TensorStats", TENSORS + "stats: [mxfp8_E5M2_mse]", 8, "no statistic 'E5M2_mse'.*'mxfp8_e5m2_mse'"),
    ("LogFp8TensorStats", TENSORS + "stats: [nvfp4_e4m3_mse]", 8, "nvfp4 has E2M1 elements only.*'nvfp4_mse'"),
    (
        "LogNvfp4TensorStats",
        TENSORS + "stats: [mse, mxfp8_mse]",
        8,
        "has 'mxfp8_mse', .*only nvfp4 statistics. Use LogFp8Tensor",
    ),
    ("LogNvfp4TensorStats", TENSORS + "stats: [nvfp4_msee]", 8, "has 'nvfp4_msee': .*'nvfp4_mse'"),
    (
        "LogFp8TensorStats",
        TENSORS + "stats: [mxfp8_underflow_block%]",
        8,
        "has 'mxfp8_underflow_block%': .*'mxfp8_underflow_blocks%'",
    ),
    (
        "LogFp8TensorStats",
        TENSORS + "stats: [current_scaling_zero_blocks%]",
        8,
        "has 'current_scaling_zero_blocks%': fp8_current_scaling has one scale .*'mxfp8_'",
    ),
    ("LogNvfp4TensorStats", TENSORS + "stats: [scale_inv_mxx]", 8, "has 'scale_inv_mxx': .*'scale_inv_max'"),
    (
        "LogTensorStats",
        STATS + "tensors: [weight, activations]",
        8,
        "'activations' is not in this list.*'activation'",
    ),
    (
        "LogTensorStats",
        STATS + "tensors: activations",
        8,
        "'tensors' of N must be a list .*'activations' is not in",
    ),
    ("LogTensorStats", STATS + "tensors: [fprop]", 8, "'fprop' is not in this list"),  # nothing would be left
    ("LogTensorStats", STATS + "tensors: fprop", 8, "'fprop' is not in this list"),
    ("LogTensorStats", STATS + "tensors: [dgrad, forward]", 8, "'forward' is not in this list"),
    (
        "LogFp8TensorStats",
        "tensors:\n  - weight\n  - output\nstats: mse",
        9,
        "a list of activation, weight, gradient; 'output'",
    ),
    ("DisableFP8GEMM", "gemms: [fprob]", 7, "'gemms' of N must be a list of fprop, .*'fprob' is not in .*'fprop'"),
    ("DisableFp8Gemm", "gemms_struct:\n  - gemm: prop", 8, "'gemm' in item 1 of 'gemms_struct' of N .*'fprop'"),
    (
        "FakeQuant",
        SCALED + "quant_format: E4M3",
        9,
        "'quant_format' of N must be one of FP8E4M3, .* not 'E4M3'. Did you",
    ),
    # what is needed
    ("LogTensorStats", TENSORS, 5, "N has no 'stats', a list of statistics: min, max"),
    ("LogTensorStats", TENSORS + "stats: []", 8, r"'stats' of N must be a list of statistics: .*, not \[\]"),
    (
        "LogTensorStats",
        "tensors_struct:\n  - tensor: weight\n    stats: max\n  - tensor: output",
        10,
        "item 2 of 'tensors_struct' of N has no 'stats'",
    ),
    ("LogTensorStats", STATS, 5, r"N has neither 'tensors' nor 'tensors_struct'. Write .* tensors: \[activation"),
    ("LogTensorStats", STATS + "tensors:", 8, "'tensors' of N must be a list of activation, .* not None"),
    (
        "LogTensorStats",
        LOGGED + "tensors_struct: [{tensor: weight}]",
        9,
        "'tensors_struct' of N is given together with 'ten",
    ),
    (
        "LogTensorStats",
        STATS + "tensors_struct: [{freq: 3}]",
        8,
        "item 1 of 'tensors_struct' of N has no 'tensor', o",
    ),
    (
        "LogTensorStats",
        STATS + "tensors_struct: [weight]",
        8,
        "a list of mappings with 'tensor'; 'weight' is not in",
    ),
    (
        "DisableQuantizationGEMM",
        "",
        5,
        r"N has neither 'gemms' nor 'gemms_struct'. Write for example gemms: \[fprop",
    ),
    ("DisableQuantizationGEMM", "gemms: fprop\ngemms_struct: [{gemm: dgrad}]", 8, "'gemms_struct' of N is given"),
    (
        "PerTensorScaling",
        "gemms_struct:\n  - gemm: fprop",
        8,
        "item 1 of 'gemms_struct' of N has neither 'tensors'",
    ),
    ("FakeQuant", SCALED, 5, "N has no 'quant_format', one of FP8E4M3, FP8E5M2, MXFP8E4M3, MXFP8E5M2"),
    (
        "FakeQuant",
        "gemms: fprop\ntensors_struct:\n  - {tensor: weight, quant_format: FP8E4M3}\n  - tensor: activation",
        10,
        "item 2 of 'tensors_struct' of N has no 'quant_format'",
    ),
    ("DumpTensors", TENSORS, 5, "N would write nothing: neither high_precision_tensor nor quantized_tensor is set"),
    # keys
    ("LogTensorStats", LOGGED + "frequency: 3", 9, r"N has no key 'frequency' \(given: 3\). Did you mean 'freq'"),
    (
        "LogTensorStats",
        STATS + "tensor: weight",
        8,
        "no key 'tensor' .* in the items of 'tensors_struct'.*'tensors'",
    ),
    ("LogTensorStats", TENSORS + "stat: [max]", 8, "N has no key 'stat' .*'stats'"),
    ("LogTensorStats", LOGGED + "7: 3", 9, "N has no key '7'. Its keys are: enabled, end_step, freq"),
    (
        "LogTensorStats",
        STATS + "tensors_struct:\n  - tensr: weight\n    freq: 1",
        9,
        "item 1 of 'tensors_struct' of N has no key 'tensr' .*'tensor'",
    ),
    (
        "LogTensorStats",
        STATS + "tensors_struct:\n  - tensor: weight\n    enabled: True",
        10,
        "item 1 of .* of N has no key 'enabled' .* belongs to 'LogTensorStats' itself",
    ),
    ("DisableFP8GEMM", "gemm: fprop", 7, "N has no key 'gemm' .* in the items of 'gemms_struct'.*'gemms'"),
    (
        "DisableFP8GEMM",
        "gemms: fprop\nmargin: 3",
        8,
        "no key 'margin' .*Its keys are: enabled, end_step, gemms, gemms_",
    ),
    ("DisableFP8Layer", "gemms: fprop", 7, "N has no key 'gemms' .*Its keys are: enabled"),
    (
        "LogGemmError",
        "gemms: fprop\nstats: [gemm_error]",
        8,
        r"N has no key 'stats' \(given: \['gemm_error'\]\)\. Its keys are: enabled, .*start_step\."
        " 'stats' is a key of LogTensorStats, LogFp8TensorStats, LogNvfp4TensorStats",
    ),
    ("PerTensorScaling", SCALED + "quant_format: FP8E4M3", 9, "N has no key 'quant_format'"),
    (
        "PerTensorScaling",
        "gemms_struct:\n  - gemm: fprop\n    tensors_struct:\n      - tensor: weight\n        mrgin: 1",
        11,
        "item 1 of 'tensors_struct' in item 1 of 'gemms_struct' of N has no key 'mrgin' .*'margin'",
    ),
    # schedules
    *[
        ("LogTensorStats", f"{LOGGED}freq: {text}", 9, f"'freq' of N must be an integer >= 1, not {value}.")
        for text, value in [
            ("0", "0"),
            ("-2", "-2"),
            ("2.5", "2.5"),
            ("'10'", "'10'"),
            ("True", "True"),
            ("", "None"),
        ]
    ],
    (
        "LogTensorStats",
        STATS + "tensors_struct:\n  - tensor: weight\n    freq: 0",
        10,
        "'freq' in item 1 of 'tensors_struct' of N must be an integer >= 1, not 0",
    ),
    ("DumpTensors", "tensors: weight\nstart_step: -1", 8, "'start_step' of N must be an integer >= 0, not -1"),
    ("LogTensorStats", LOGGED + "end_step: soon", 9, "'end_step' of N must be an integer >= -1, not 'soon'"),
    ("LogTensorStats", LOGGED + "start_step: 5\nend_step: 4", 10, "'end_step' of N is 4, which is before 'start_s"),
    (
        "LogTensorStats",
        STATS + "end_step: 4\ntensors_struct: [{tensor: weight, start_step: 5}]",
        8,
        "'end_step' of N is 4, which is before 'start_step', 5",
    ),
    (
        "LogTensorStats",
        LOGGED + "start_step: 11\nend_step: 19\nfreq: 10",
        11,
        "'freq' of N selects no steps: there are no steps 11 to 19 that are multiples of 10",
    ),
    (
        "DumpTensors",
        DUMPED + "start_end_list: [[1, 3], [5, 7]]\nfreq: 4",
        10,
        "'freq' .*no steps 1 to 3 and 5 to 7",
    ),
    (
        "LogTensorStats",
        f"{STATS}freq: 7\ntensors_struct: [{{tensor: weight, start_step: 15, end_step: 20}}]",
        8,
        "'freq' of N selects no steps",
    ),
    *[
        ("LogTensorStats", f"{LOGGED}start_end_list: {text}", 9, f"'start_end_list' of N {message}")
        for text, message in [
            ("[[20, 10]]", r"has the pair \[20, 10\], which ends before it starts"),
            ("[0, 20]", r"has 0, which is not a \[start, end\] pair"),
            ("[[0]]", r"has \[0\], which is not a \[start, end\] pair"),
            ("[[0, 1.5]]", r"has \[0, 1.5\], which is not"),
            ("[[-1, 5]]", r"has \[-1, 5\], which is not"),
            ("[[0, 20], [10, 30]]", r"has \[10, 30\] after \[0, 20\].* ascending order that do not overlap"),
            ("[[0, 20], [20, 30]]", r"has \[20, 30\] after \[0, 20\]"),
            ("[[0, -1], [30, 40]]", r"has \[30, 40\] after \[0, -1\]"),
            ("[[20, 30], [0, 10]]", r"has \[0, 10\] after \[20, 30\]"),
            ("soon", "has 'soon', which is not"),
            ("[]", r"must be a list of \[start, end\] pairs .*, not \[\]"),
            ("7", "must be a list of .*, not 7"),
        ]
    ],
    # what GEMMs and tensors can do
    ("PerTensorScaling", SCALED + "margin: 128", 9, "'margin' of N must be an integer from -126 to 127, not 128"),
    ("PerTensorScaling", SCALED + "margin: 0.5", 9, "'margin' of N must be an integer from -126 to 127, not 0.5"),
    (
        "FakeQuant",
        SCALED + "quant_format: MXFP8E4M3\nmargin: 1",
        10,
        "'margin' of N is 1, but MXFP8E4M3 takes its scales from its blocks.* or take FP8E4M3",
    ),
    (
        "FakeQuant",
        "margin: 2\ngemms: fprop\ntensors_struct:\n  - {tensor: weight, quant_format: MXFP8E5M2}",
        7,
        "'margin' of N is 2, but MXFP8E5M2",
    ),
    (
        "PerTensorScaling",
        "gemms: [fprop]\ntensors: [gradient]",
        5,
        r"N can never act: none of its tensors \('gradient'\) .*'fprop' has 'activation', 'weight'\.$",
    ),
    (
        "FakeQuant",
        "quant_format: FP8E4M3\ngemms_struct:\n  - gemm: fprop\n    tensors: [dgrad]",
        5,
        "N can never act: .*'fprop' has 'activation', 'weight', 'output'",
    ),
    (
        "DisableFP8GEMM",
        "gemms: fprop\nfreq: 10",
        8,
        r"N has no key 'freq' \(given: 10\)\. Its keys are: .*start_step",
    ),
    ("DisableFP8GEMM", "gemms: fprop\nstart_step: 9\nend_step: 4", 9, "'end_step' of N is 4, which is before"),
    ("DisableFP8Layer", "start_step: -3", 7, "'start_step' of N must be an integer >= 0, not -3"),
    ("DisableFP8GEMM", "gemms: [fprop, qk]", 7, r"must be a list of fprop, dgrad, wgrad; 'qk' is not in this list"),
]


def test_invalid_keys_are_refused_with_their_place(tmp_path: Path) -> None:
    for name, options, line, message in INVALID:
        place = rf"config\.yaml, line {line}(?: column \d+)? \(section 'my_section'\): "
        with pytest.raises(ConfigError, match=f"{place}.*{message.replace('N', repr(name), 1)}") as caught:
            load(tmp_path, name, options)
        assert repr(name) in str(caught.value)
        assert not re.search("Input should|pydantic", str(caught.value)), "pydantic's own words"


SEVERAL = """
early:
  enabled: True
  layers:
    layer_typs: [fc1]
    layer_numbers:
      - 3
      - many
      - 5-2
  transformer_engine:
    LogTensorStats:
      enabled: True
      freq: 0
      tensors: [weight]
      stats:
        - max
        - maxx
        - min
        - minn
      end_step: soon
    LogTensorStatz:
      enabled: True
    FakeQuant:
      enabled: yes please
fine:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    DisableFP8Layer:
      enabled: True
late:
  enabled: True
  transformer_engin:
    DisableFP8Layer:
      enabled: True
  transformer_engine:
    LogTensorStats:
      enabled: True
      stats: [max]
      tensors_struct:
        - tensor: weight
        - tensr: weight
"""

PROBLEMS = [
    (5, "unknown layer selector 'layer_typs'"),
    (8, "takes numbers up to .*, not 'many'"),
    (9, "the range '5-2' in 'layer_numbers' ends before"),
    (21, "there is no feature 'LogTensorStatz'.*Did you mean 'LogTensorStats'"),
    (13, "'freq' of 'LogTensorStats' must be an integer"),
    (17, "has 'maxx'"),
    (19, "has 'minn'"),
    (20, "'end_step' of 'LogTensorStats' must be an integer"),
    (24, "'enabled' of 'FakeQuant' must be True or False"),
    (23, "'FakeQuant' has neither 'gemms' nor 'gemms_struct'"),
    (31, "the key 'layers' is missing"),
    (33, "'transformer_engin' is neither"),
    (42, "item 2 of 'tensors_struct' of 'LogTensorStats' has no 'tensor'"),
    (42, "has no key 'tensr'"),
]


def test_all_problems_of_a_file_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SEVERAL)
    with pytest.raises(ConfigError) as caught:
        load_config(path, features=())
    assert str(caught.value).startswith(f"The config has {len(PROBLEMS)} problems:\n- {path}, line ")
    results = list(caught.value.problems)
    for line, text in PROBLEMS:
        stated = [problem for problem in results if re.search(rf"config\.yaml, line {line} .*{text}", problem)]
        assert len(stated) == 1, (line, text, results)
        results.remove(stated[0])
    assert not results
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.problems) == (str(caught.value), caught.value.problems), "as between processes"


def test_a_mapping_is_checked_like_a_file_and_merged_keys_have_the_line_above(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the config mapping \(section 's'\): 'freq' of 'LogTensorStats' must be"):
        load_config({"s": feature("LogTensorStats", ["fc1"], tensors=("weight",), stats=["max"], freq=0)})
    with pytest.raises(ConfigError, match=r"'tensors' of 'LogTensorStats' must be a list of .*, not {'weight'}"):
        load_config({"s": feature("LogTensorStats", ["fc1"], tensors={"weight"}, stats=["max"])})
    with pytest.raises(ConfigError, match=r"line 5 .*'activations' is not in this list"):
        load(tmp_path, "LogTensorStats", "<<: {stats: [max], tensors: [activations]}")


FAKE = {"gemms": ["fprop", "wgrad"], "tensors": ["activation"], "quant_format": "FP8E4M3"}
SCALE = {"gemms_struct": [{"gemm": "dgrad", "tensors": ["weight"]}, {"gemm": "wgrad", "tensors": ["activation"]}]}


def test_two_features_that_modify_one_tensor_are_taken_only_where_they_never_meet() -> None:
    def load(fake: dict[str, Any], scale: dict[str, Any]) -> None:
        section = feature("FakeQuant", ["fc1"], **{**FAKE, **fake})
        section["transformer_engine"]["PerTensorScaling"] = {"enabled": True, **SCALE, **scale}
        load_config({"s": section})

    with pytest.raises(ConfigError, match="modifies the tensor 'activation' of the GEMM 'wgrad' in the layers of 's'"):
        load({}, {})
    load({"end_step": 9}, {"start_step": 10})
    load({"gemms": ["fprop"]}, {})
    load({"enabled": False}, {})
