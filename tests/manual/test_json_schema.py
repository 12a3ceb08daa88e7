"""The JSON Schema of configs says what ``load_config`` says: of configs as they are, and with one thing changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import tests.test_schemas as schema_cases
from te_precision_callbacks.cli.manual.json_schema import config_schema
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.byte_sizes import size_in_bytes
from te_precision_callbacks.config.conditions import parse_condition
from te_precision_callbacks.config.contract import CONTRACT
from te_precision_callbacks.config.loading import DEFAULT_CONFIG
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.statistics.names import UnknownStatisticError, quantized_request
from te_precision_callbacks.statistics.table import QUANTIZED_STATISTICS
from tests.conftest import feature
from tests.docs.pages import PAGES, ROOT, blocks
from tests.manual.json_schema import is_valid, problems
from tests.te_debug_features import EXAMPLES

SCHEMA = config_schema()


def refusal(config: Any) -> str | None:
    """What ``load_config`` says against a config."""
    try:
        load_config(config)
    except ConfigError as error:
        return str(error)
    return None


def configs() -> Iterator[Any]:
    """Those of Transformer Engine's documentation, of ours, and of the examples."""
    files = [*(ROOT / "examples").glob("*.yaml"), ROOT / "tests" / "clients" / "watched.yaml"]
    texts = [
        *EXAMPLES,
        *(path.read_text() for path in files),
        *(block for page in PAGES for block in blocks(page, "yaml") if CONTRACT not in block),
        *(model.example for model in FEATURES.values()),
    ]
    for text in texts:
        written = yaml.safe_load(text)
        if all(isinstance(body, dict) and "layers" in body for key, body in written.items() if key != "layer_names"):
            yield written


def test_configs_that_load_are_valid() -> None:
    found = [DEFAULT_CONFIG, *configs()]
    assert len(found) > 25
    schema = config_schema(own=["ClipOutliers"])  # of docs/custom-features.md
    for config in found:
        load_config(config, feature_dirs=["of users"])
        assert list(problems(config, schema)) == []


BEYOND = (
    r"has no 'quant_format', ",
    r"has no 'stats', ",
    r"has neither 'tensors' nor",
    r"which ends before it starts",
    r"which are not in increasing order",
    r"which overlap",
    r"an end of -1",
    r"is \d+, which is before 'start_step'",
    r"leaves no step to act in",
    r"takes its scales from its blocks",
    r"can never act",
    r"would write nothing",
    r"a second time; put all keys",
    r"they contradict each other",
    r"must be a number of bytes up to 2\^63",
)
"""What takes more than one key to find, or a number in a text."""


def agree(config: Any) -> bool:
    """Whether schema and ``load_config`` are of one mind; the schema may accept what is :data:`BEYOND` it."""
    said, valid = refusal(config), is_valid(config, SCHEMA)
    return valid == (said is None) or (valid and said is not None and any(re.search(what, said) for what in BEYOND))


def of_schema_tests(test: Any) -> list[dict[str, Any]]:
    """The configs of a test of the schemas of features."""
    (mark,) = test.pytestmark
    found = []
    for name, options, *_ in mark.args[1]:
        written = yaml.safe_load(options) or {}
        found.append({"s": feature(name, ["fc1"], **{str(key): value for key, value in written.items()})})
    return found


def test_the_cases_of_the_features_schemas() -> None:
    allowed = of_schema_tests(schema_cases.test_valid_keys_load)
    refused = of_schema_tests(schema_cases.test_invalid_keys_are_refused_with_their_place)
    assert [config for config in allowed if not is_valid(config, SCHEMA)] == []
    assert [config for config in refused if not agree(config)] == []
    assert sum(not is_valid(config, SCHEMA) for config in refused) > 60


VALUES: tuple[Any, ...] = (None, True, False, 0, 3, -7, 1.5, "zz", "12", [], {}, [[]], [{}], ["zz"], [3])


def changed(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config with one key misspelt or taken away, or one value replaced."""
    for path in places(config):
        for value in VALUES:
            made, around = copy_at(config, path)
            around[path[-1]] = copy.deepcopy(value)
            yield made
        made, around = copy_at(config, path)
        value = around.pop(path[-1])
        yield made
        if isinstance(path[-1], str):
            made, around = copy_at(made, path)
            around[f"{path[-1]}x"] = value
            yield made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield (*path, key)
        yield from places(entry, (*path, key))


def copy_at(config: dict[str, Any], path: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """A copy, and what in it is around the last key of a path."""
    made = around = copy.deepcopy(config)
    for key in path[:-1]:
        around = around[key]
    return made, around


@pytest.mark.parametrize("name", FEATURES)
def test_an_example_with_one_thing_changed(name: str) -> None:
    example = yaml.safe_load(FEATURES[name].example)
    found = list(changed(example))
    assert [config for config in found if not agree(config)] == []
    assert 10 < sum(is_valid(config, SCHEMA) for config in found) < len(found) / 2


SELECTORS: tuple[dict[str, Any], ...] = (
    {"layer_types": ["all"]},
    {"layer_types": "fc1", "layer_numbers": [0, "4-7", " 3 - 5 ", "all"]},
    {"layer_numbers": 3, "exact_layer_names": "a.b"},
    {"layer_name_regex_pattern": ".*(fc1|fc2)"},
    {"exact_layer_names": ["a", "b"]},
)


@pytest.mark.parametrize("layers", SELECTORS, ids=str)
def test_selectors_with_one_thing_changed(layers: dict[str, Any]) -> None:
    config = {"s": {"enabled": True, "layers": layers, "transformer_engine": {"DisableFP8Layer": {"enabled": True}}}}
    assert is_valid(config, SCHEMA)
    assert [made for made in changed(config) if not agree(made)] == []


def test_what_is_off_is_not_read_and_features_have_any_case() -> None:
    for config, valid in (
        ({"s": {"enabled": False, "anything": 3}}, True),
        ({"s": {"enabled": "no", "anything": 3}}, False),
        ({"s": {"layers": {}}}, False),
        (
            {"s": feature("FakeQuant", ["fc1"]) | {"transformer_engine": {"FakeQuant": {"enabled": False, "x": 1}}}},
            True,
        ),
        ({"s": feature("disablefp8layer", ["fc1"])}, True),
        ({"s": feature("DisableFp8Layer", ["fc1"], gemms=["fprop"])}, False),
        ({"s": feature("DisableFp8Layers", ["fc1"])}, False),
        ({"layer_names": "upstream"}, True),
        ({"layer_names": "paths"}, False),
        ({"layer_names": feature("DisableFP8Layer", ["fc1"])}, True),
        ({}, True),
        ([], False),
        (None, False),
    ):
        assert is_valid(config, SCHEMA) == valid, config
        if isinstance(config, dict):
            assert (refusal(config) is None) == valid, config


def test_a_users_own_feature_is_known_where_it_is_named() -> None:
    class ClipOutliers:
        """A feature with keys of its own."""

    config = {"s": feature("ClipOutliers", ["fc1"], sigmas=3)}
    assert refusal(config) is not None
    assert not is_valid(config, SCHEMA)
    load_config(config, features=[ClipOutliers])
    assert is_valid(config, config_schema(own=["ClipOutliers"]))
    assert not is_valid({"s": feature("ClipOutlier", ["fc1"])}, config_schema(own=["ClipOutliers"]))


SPELLINGS = (
    *("", "fp8_delayed_scaling", "fp8_current_scaling", "mxfp8", "fp8_block_scaling", "nvfp4"),
    *("delayed_scaling", "current_scaling", "block_scaling", "fp8_current", "fp8_block", "mxfp4", "fp8"),
)


def test_names_of_statistics() -> None:
    """Every recipe and format before every statistic, in both directions."""
    pattern = SCHEMA["$defs"]["LogFp8TensorStatsItem"]["properties"]["stats"]["anyOf"][0]["anyOf"][1]["pattern"]
    for spelling in SPELLINGS:
        for element_format in ("", "e4m3_", "e5m2_", "e2m1_"):
            for statistic in (*QUANTIZED_STATISTICS, "max", "scaling_mse"):
                for end in ("", "_columnwise", "_rowwise"):
                    name = f"{spelling}_{element_format}{statistic}{end}".lstrip("_")
                    try:
                        quantized_request(name)
                        known = True
                    except UnknownStatisticError:
                        known = False
                    assert (re.search(pattern, name) is not None) == known, name


@pytest.mark.parametrize(
    "text",
    [
        *(
            "nonfinite",
            "activation_overflow",
            "underflows% > 5",
            " max<=-1e3 ",
            "mse >= inf",
            "mse < .5",
            "std > 1_000.",
        ),
        *("mxfp8_e5m2_mse_columnwise>1", "max_blockwise_dynamic_range > 8", "zeros%>=+3e-2"),
        *(
            "max_blockwise_dynamic_range_block_size_32_dims_1 > 8",
            "max_blockwise_dynamic_range_block_size_32_dims_3 > 8",
        ),
        *("exponent_histogram > 1", "mse > nan", "mse > soon", "mse = 3", "> 5", "underflow > 5", "NonFinite", ""),
        *("scale_inv_histogram > 1", "mse > 1 ", "mse > 1_", "mse > 1 2", "fp8_delayed_scaling_mse_columnwise > 1"),
    ],
)
def test_conditions(text: str) -> None:
    shape = SCHEMA["$defs"]["DumpTensorsItem"]["properties"]["when"]
    try:
        parse_condition(text)
    except ValueError:
        assert not is_valid(text, shape)
    else:
        assert is_valid(text, shape)


@pytest.mark.parametrize(
    "size",
    [
        *(1, 10**9, 2**63 - 1, "10MB", "2GiB", "2gib", " 3 kB ", "7", "0.5kB", "1.5 TiB", "00.5MB"),
        *(0, -1, 2**63, True, 1.5, None, "10M", "1e9", "10 Mo", "0", "0.0kB", "-1MB", "MB", "1 iB", "1.MB", [3]),
    ],
)
def test_sizes(size: object) -> None:
    shape = SCHEMA["$defs"]["DumpTensors"]["else"]["properties"]["max_bytes"]
    try:
        size_in_bytes(size)
    except ValueError:
        assert not is_valid(size, shape)
    else:
        assert is_valid(size, shape)
