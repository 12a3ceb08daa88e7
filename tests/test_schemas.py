"""The features' schemas: valid keys, errors, and the generated page."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.config import Config, ConfigError, load_config
from te_precision_callbacks.config.loading import DEFAULT_CONFIG
from te_precision_callbacks.config.schemas import FEATURES, schema_of
from te_precision_callbacks.statistics.table import QUANTIZED_STATISTICS, TENSOR_STATISTICS
from tests.conftest import feature
from tests.engine.exact import BLOCK_STATISTICS
from tests.te_debug_features import EXAMPLES
from tests.test_config_loading_and_plan import LAYERS
from tools.features_page import as_markdown

ROOT = Path(__file__).parents[1]
REGISTERED = {"transformer_engine": (*FEATURES, "Own")}


class Own:
    """A user's own feature."""


def load(folder: Path, name: str, options: str) -> Config:
    """Load a section with one feature, whose options start in line 7."""
    lines = [
        *("my_section:", "  enabled: True", "  layers: {layer_types: [fc1]}", "  transformer_engine:"),
        *(f"    {name}:", "      enabled: True", *(f"      {line}" for line in options.splitlines())),
    ]
    (folder / "config.yaml").write_text("\n".join(lines))
    return load_config(folder / "config.yaml", features=[Own])


def handed_over(folder: Path, name: str, options: str) -> Any:
    return load(folder, name, options).plan(LAYERS, REGISTERED).layers[0].features["transformer_engine"][name]


def test_the_documented_examples_load_and_are_handed_over_as_written() -> None:
    written = yaml.safe_load("".join(EXAMPLES))
    loaded = {section.name: section.features["transformer_engine"] for section in load_config(written).sections}
    assert loaded == {name: body["transformer_engine"] for name, body in written.items()}
    default = load_config(None).sections[0].features["transformer_engine"]
    assert default == DEFAULT_CONFIG["default_statistics"]["transformer_engine"]


@pytest.mark.parametrize("name", FEATURES)
def test_the_example_of_each_feature_loads(name: str) -> None:
    (section,) = load_config(yaml.safe_load(FEATURES[name].example)).sections
    assert list(section.features["transformer_engine"]) == [name], "an example of this feature"
    for spelling in (name.lower(), name.replace("FP8", "Fp8").replace("GEMM", "Gemm")):
        assert schema_of(spelling) is FEATURES[name]


def test_docs_features_is_made_from_the_schemas() -> None:
    assert (ROOT / "docs" / "features.md").read_text() == as_markdown(), (
        "run: python -m tools.features_page > docs/features.md"
    )


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LogTensorStats", f"tensors: [output]\nstats: [{', '.join(TENSOR_STATISTICS)}, max_blockwise_dynamic_range]"),
        ("LogTensorStats", "tensors: dgrad\nstats: [max_blockwise_dynamic_range: {block_size: 16, dims: 2}]"),
        ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_step: 5\nend_step: -1\nfreq: 3"),
        ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_step:\nend_step:\nstart_end_list:"),
        ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_end_list: [[3, 3], [4, 8], [20, -1]]"),
        ("LogTensorStats", "tensors: [wgrad]\nstats: [max]\nstart_end_list: [[20, 30], [0, -1], [5, 25]]"),
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
    ],
)
def test_valid_keys_load(tmp_path: Path, name: str, options: str) -> None:
    assert load(tmp_path, name, options).enabled_sections


def test_disabled_and_custom_features_are_not_checked(tmp_path: Path) -> None:
    assert handed_over(tmp_path, "Own", "frequency: 3") == {"enabled": True, "frequency": 3}
    off = {"enabled": False, "frequency": 3}
    load_config({"s": {**feature("LogTensorStats", ["fc1"], frequency=3), "enabled": False}})
    load_config({"s": {**feature("Own", ["fc1"]), "transformer_engine": {"FakeQuant": off}}})
    load_config({"s": feature("Own", ["fc1"], anything=1)}, features=[Own])


STATS = "stats: [max]\n"
TENSORS = "tensors: [activation]\n"
DUMPED = TENSORS + "high_precision_tensor: True\n"
LOGGED = STATS + TENSORS
SCALED = "gemms: [fprop]\ntensors: [weight]\n"


@pytest.mark.parametrize(
    ("name", "options", "line", "message"),
    [
        # names
        ("LogTensorStats", TENSORS + "stats: [min, maxx]", 8, "'stats' of N has 'maxx': there is no .*mean 'max'"),
        ("LogTensorStats", TENSORS + "stats: [zzz]", 8, "has 'zzz': .* The statistics are: cur_amax, dynamic_range"),
        ("LogTensorStats", TENSORS + "stats: [underflows%]", 8, "a statistic of LogFp8TensorStats: write it there"),
        ("LogTensorStats", TENSORS + "stats: [mxfp8_mse]", 8, "a statistic of LogFp8TensorStats: write it there"),
        ("LogNvfp4TensorStats", TENSORS + "stats: [std]", 8, "It is a statistic of LogTensorStats: write it there"),
        ("LogTensorStats", TENSORS + "stats: [3]", 8, "has 3: .* The statistics are: cur_amax"),
        ("LogTensorStats", TENSORS + "stats: [max: {dims: 1}]", 8, r"only 'max_blockwise.*' takes .*, not 'max'\.$"),
        (
            "LogTensorStats",
            TENSORS + "stats: [max_blockwise_dynamic_range: {block_size: 0}]",
            8,
            r"block_size of .* is a number of elements above 0, not 0\.$",
        ),
        ("LogFp8TensorStats", TENSORS + "stats: [mxfp8_mean]", 8, "'mxfp8_mean': there is no .*'mxfp8_mse'"),
        (
            "LogFp8TensorStats",
            TENSORS + "stats: [max]",
            8,
            r"'max': there is no .* It is a statistic of LogTensorStats: write it there\.$",
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
        ("LogNvfp4TensorStats", TENSORS + "stats: [mse, mxfp8_mse]", 8, "has 'mxfp8_mse', .*nvfp4 only. LogFp8Tensor"),
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
            "has 'current_scaling_zero_blocks%': fp8_current_scaling has one scale .*, and no blocks; .*'mxfp8_'",
        ),
        ("LogNvfp4TensorStats", TENSORS + "stats: [scale_inv_mxx]", 8, "has 'scale_inv_mxx': .*'scale_inv_max'"),
        ("LogTensorStats", STATS + "tensors: [weight, activations]", 8, "'activations' is none of them.*'activation'"),
        ("LogTensorStats", STATS + "tensors: activations", 8, "'tensors' of N must be a list .*'activations' is none"),
        ("LogTensorStats", STATS + "tensors: [fprop]", 8, "'fprop' is none of them"),  # nothing would be left
        ("LogTensorStats", STATS + "tensors: fprop", 8, "'fprop' is none of them"),
        ("LogTensorStats", STATS + "tensors: [dgrad, forward]", 8, "'forward' is none of them"),
        (
            "LogFp8TensorStats",
            "tensors:\n  - weight\n  - output\nstats: mse",
            9,
            "a list of activation, weight, gradient; 'output'",
        ),
        ("DisableFP8GEMM", "gemms: [fprob]", 7, "'gemms' of N must be a list of fprop, .*'fprob' is none .*'fprop'"),
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
        ("LogTensorStats", STATS + "tensors_struct: [weight]", 8, "a list of mappings with 'tensor'; 'weight' is none"),
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
        ("DumpTensors", DUMPED + "max_bytes: 10 Mo", 9, "'max_bytes' of N must be a .* not '10 Mo'"),
        ("DumpTensors", DUMPED + "max_bytes: 1e9", 9, "'max_bytes' of N must be .* not '1e9'"),
        ("DumpTensors", DUMPED + "max_memory: 99999999TB", 9, r"'max_memory' of N must be .* bytes up to 2\^63"),
        ("DumpTensors", DUMPED + "max_bytes:", 9, "'max_bytes' of N must be a number .* not None"),
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
            "'freq' of N leaves no step to act in: there are no steps 11 to 19 that are multiples of 10",
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
            "'freq' of N leaves no step",
        ),
        *[
            ("LogTensorStats", f"{LOGGED}start_end_list: {text}", 9, f"'start_end_list' of N {message}")
            for text, message in [
                ("[[20, 10]]", r"has the pair \[20, 10\], which ends before it starts"),
                ("[0, 20]", r"has 0, which is not a \[start, end\] pair"),
                ("[[0]]", r"has \[0\], which is not a \[start, end\] pair"),
                ("[[0, 1.5]]", r"has \[0, 1.5\], which is not"),
                ("[[-1, 5]]", r"has \[-1, 5\], which is not"),
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
        ("DisableFP8GEMM", "gemms: [fprop, qk]", 7, r"must be a list of fprop, dgrad, wgrad; 'qk' is none of them"),
    ],
)
def test_invalid_keys_are_refused_with_their_place(
    tmp_path: Path, name: str, options: str, line: int, message: str
) -> None:
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
        load_config(path)
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
    with pytest.raises(ConfigError, match=r"line 5 .*'activations' is none of them"):
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
