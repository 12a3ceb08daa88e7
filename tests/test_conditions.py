"""Conditions and contracts: their grammar, the values that satisfy them, and errors for invalid ones."""

import math
import pickle
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from te_precision_callbacks import PrecisionDebugCallback, PrecisionDebugTrainerCallback
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.conditions import Condition, EventCondition, Threshold, parse_condition, parse_share
from te_precision_callbacks.config.contract import Contract, read_contract
from te_precision_callbacks.config.dumping import check_conditions, collected, collected_for
from te_precision_callbacks.config.fields import size_in_bytes
from te_precision_callbacks.config.schemas import FEATURES
from te_precision_callbacks.session import PrecisionContractError
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.statistics.series import Measured, SeriesTable
from te_precision_callbacks.statistics.table import STATISTICS
from te_precision_callbacks.transformers import Trainer
from tests.conftest import feature
from tests.lightning import models as lightning
from tests.test_config_loading_and_plan import LAYERS
from tests.transformers import models as transformers


@pytest.mark.parametrize(
    ("text", "statistic", "comparison", "number"),
    [
        ("underflows% > 5", quantized_request("underflows%"), ">", 5.0),
        ("max<=-1e3", tensor_request("max"), "<=", -1000.0),
        ("mxfp8_e5m2_mse_columnwise >= inf", quantized_request("mxfp8_e5m2_mse_columnwise"), ">=", math.inf),
        ("delayed_scaling_mse < .5", quantized_request("delayed_scaling_mse"), "<", 0.5),
    ],
)
def test_a_comparison(text: str, statistic: object, comparison: str, number: float) -> None:
    result = parse_condition(text)
    assert isinstance(result, Threshold)
    assert (result.statistic, result.comparison, result.number) == (statistic, comparison, number)
    assert str(result) == text
    assert result.statistic.statistic is STATISTICS[result.statistic.statistic.name]


@pytest.mark.parametrize(
    ("comparison", "below", "at", "above"), [(">", 0, 0, 1), (">=", 0, 1, 1), ("<", 1, 0, 0), ("<=", 1, 1, 0)]
)
def test_when_it_holds(comparison: str, below: bool, at: bool, above: bool) -> None:
    result = parse_condition(f"mse {comparison} 2")
    assert [result.holds(value) for value in (1.5, 2.0, 2.5)] == [below, at, above]
    assert not result.holds(math.nan)


@pytest.mark.parametrize("event", EventCondition)
def test_an_event(event: EventCondition) -> None:
    assert parse_condition(str(event)) is event


def test_conditions_read_these_statistics() -> None:
    """The recipe may be spelled in another way, and a statistic of blocks may be of any blocks."""
    assert parse_condition("fp8_current_mse > 1").reads(quantized_request("current_scaling_mse"))
    assert not parse_condition("mse > 1").reads(quantized_request("mxfp8_mse"))
    sizes = [{"max_blockwise_dynamic_range": {"block_size": size}} for size in (16, 32)]
    of_blocks = [tensor_request(entry).of("weight") for entry in sizes]
    assert all(parse_condition("max_blockwise_dynamic_range > 1").reads(request) for request in of_blocks)
    assert [parse_condition(f"{of_blocks[0].label} > 1").reads(request) for request in of_blocks] == [True, False]
    for wrong in ("'max_blockwise_dynamic_range_of_size_3'", "'mxfp8_e5m2_msee'.*Did you mean 'mxfp8_e5m2_mse'"):
        with pytest.raises(ValueError, match=f"there is no statistic {wrong}"):
            parse_condition(f"{wrong.split(chr(39))[1]} > 1")


def test_the_numbers_of_a_step() -> None:
    table = SeriesTable()
    numbers = [table.intern("fc1", "activation", name) for name in ("max", "min")]
    table.intern("fc1", "weight", "max")
    step = Measured(table, np.array(numbers[::-1], np.int32), np.array([-2.0, 7.0]))
    assert step.value("fc1", "activation", "max") == 7.0
    assert step.value("fc1", "weight", "max") is None, "a series that this step has not"
    assert step.value("fc2", "activation", "max") is None


@pytest.mark.parametrize("condition", [parse_condition("nonfinite"), parse_condition("mxfp8_mse > 1")])
def test_it_comes_whole_out_of_a_pickle(condition: Condition) -> None:
    """A config goes to the processes of ddp_spawn."""
    assert pickle.loads(pickle.dumps(condition)) == condition
    dumped = {"tensors": ["weight"], "high_precision_tensor": True, "when": [str(condition)], "freq": 7}
    config = load_config({"a": feature("DumpTensors", ["fc1"], **dumped)})
    (section,), (own,) = pickle.loads(pickle.dumps(config)).sections, config.sections
    result, options = (item.features["transformer_engine"]["DumpTensors"] for item in (section, own))
    assert result == options == {"enabled": True, **dumped}
    assert result.schema == options.schema
    assert result.schema.targets[0].options.schedule == options.schema.targets[0].options.schedule


HEAD = """
looked_at:
  enabled: True
  layers: {exact_layer_names: [model.head]}
  transformer_engine:
    LogFp8TensorStats: {enabled: True, tensors: [activation], %s}
    DumpTensors:
      enabled: True
      high_precision_tensor: True
"""
FIRST_OPTION = HEAD.count("\n") + 1  # its line


def check(folder: Path, statistics: str, options: str, *, detects_overflow: bool = False) -> None:
    path = folder / "config.yaml"
    path.write_text(HEAD % statistics + "".join(f"      {line}\n" for line in options.splitlines()))
    config = load_config(path)
    plan = config.plan(LAYERS, {"transformer_engine": tuple(FEATURES)})
    check_conditions(plan, config.enabled_sections, detects_overflow=detects_overflow)


# --- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_schedules_meet_where_a_step_is_in_both(seed: int) -> None:
    """Against a count of steps. All ends are below 40, and frequencies up to 7: lcm 42."""
    generator = random.Random(seed)
    results = set()
    for _ in range(200):
        options: list[dict[str, Any]] = []
        for _ in range(2):
            start, end, again, last = sorted(generator.sample(range(40), 4))
            kinds: list[dict[str, Any]] = [
                {"start_end_list": [[start, end], [again, generator.choice([last, -1])]]},
                {"start_step": start, "end_step": generator.choice([end, start, -1])},
                {},
            ]
            options.append({"freq": generator.randint(1, 7), **generator.choice(kinds)})
        first, other = (Schedule.of(**keys) for keys in options)
        expected = any(first.at(step)[0] and other.at(step)[0] for step in range(40 + 2 * 42))
        assert first.meets(other) is other.meets(first) is expected, options
        results.add(expected)
    assert results == {True, False}


@pytest.mark.parametrize(
    ("statistics", "options", "words"),
    [
        ("start_step: 20", "end_step: 10", r"in steps 0 to 10, the statistic is collected in steps 20 on\."),
        (
            "start_end_list: [[1, 1], [3, 3]]",
            "freq: 2",
            "in steps that are multiples of 2, the statistic is collected in steps 1 and 3",
        ),
        ("freq: 4, start_step: 1, end_step: 11", "freq: 6", "steps 1 to 11 that are multiples of 4"),
    ],
)
def test_schedules_that_never_meet_are_refused(tmp_path: Path, statistics: str, options: str, words: str) -> None:
    text = f"{options}\ntensors: [activation]\nwhen:\n  - nonfinite\n  - mse > 1"
    place = rf"config\.yaml, line {FIRST_OPTION + 2}(?: column \d+)? \(section 'looked_at'\): "
    with pytest.raises(ConfigError, match=f"{place}the condition 'mse > 1' of DumpTensors would never .*{words}"):
        check(tmp_path, f"stats: [mse], {statistics}", text)


@pytest.mark.parametrize(
    ("statistics", "options"),
    [
        ("start_step: 10", "end_step: 10"),
        ("start_end_list: [[1, 1], [4, 4]]", "freq: 2"),
        ("freq: 4, start_step: 1, end_step: 12", "freq: 6"),
        ("freq: 100", "freq: 7"),
    ],
)
def test_schedules_that_meet_in_one_step_are_accepted(tmp_path: Path, statistics: str, options: str) -> None:
    check(tmp_path, f"stats: [mse], {statistics}", f"{options}\ntensors: [activation]\nwhen: mse > 1")


# --- places and words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("tensors: [activation]\nwhen: max > 1", 1),
        ("when:\n  - nonfinite\n  - max > 1\ntensors: [activation]", 0),
        ("tensors_struct:\n  - tensor: activation\n  - tensor: activation\n    freq: 2\n    when: [max > 1]", 4),
        ("when: max > 1\ntensors_struct:\n  - tensor: weight\n    when: nonfinite\n  - tensor: activation", 0),
        ("tensors_struct:\n  - {tensor: weight, when: nonfinite}\n  - {tensor: activation, when: max > 1}", 2),
    ],
)
def test_the_line_is_that_of_the_condition(tmp_path: Path, options: str, line: int) -> None:
    place = rf"config\.yaml, line {FIRST_OPTION + line}(?: column \d+)? \(section 'looked_at'\)"
    with pytest.raises(ConfigError, match=f"{place}: the condition 'max > 1'.* would never hold") as caught:
        check(tmp_path, "stats: [mse]", options)
    assert "nothing would be written" not in str(caught.value), "another condition may hold"


@pytest.mark.parametrize("measured", [["dgrad"], []])
def test_a_gemm_that_is_not_measured(measured: list[str]) -> None:
    config = {"s": feature("DumpTensors", ["all"], gemms=["fprop"], when="gemm_kernel_ratio > 1")}
    if measured:
        config["m"] = feature("LogGemmError", ["all"], gemms=measured)
    read = load_config(config)
    plan = read.plan(LAYERS, {"transformer_engine": tuple(FEATURES)})
    remedy = r"Add \[fprop\] to the 'gemms' of LogGemmError for those layers\."
    with pytest.raises(ConfigError, match=f"LogGemmError does not measure the GEMM of 'output' in .*{remedy}"):
        check_conditions(plan, read.enabled_sections, detects_overflow=False)


@pytest.mark.parametrize(
    ("stats", "when", "hint"),
    [
        ("fp8_current_scaling_mse", "mse", "Did you mean 'fp8_current_scaling_mse'?"),
        ("current_scaling_mse", "mse", "Did you mean 'current_scaling_mse'?"),
        ("mxfp8_mse, nvfp4_mse", "mse", "Did you mean 'mxfp8_mse' or 'nvfp4_mse'?"),
        ("mxfp8_mse, mxfp8_mse_columnwise", "mse_columnwise", "Did you mean 'mxfp8_mse_columnwise'?"),
        ("mxfp8_e5m2_mse", "mse", "Did you mean 'mxfp8_e5m2_mse'?"),
        ("mxfp8_e5m2_mse", "mxfp8_mse", "Did you mean 'mxfp8_e5m2_mse'?"),
    ],
)
def test_a_bare_name_is_not_that_of_a_recipe_and_the_recipes_is_named(
    tmp_path: Path, stats: str, when: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint) + "$"):
        check(tmp_path, f"stats: [{stats}]", f"tensors: [activation]\nwhen: {when} > 0")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stats", "label"),
    [
        ("fp8_current_scaling_mse", ["mse", "current_scaling_mse"], "current_scaling_mse"),  # in any spelling
        ("mxfp8_mse", ["mse", "mxfp8_mse"], "mxfp8_mse"),
        ("mse", ["mse", "mxfp8_mse"], "mse"),
        ("mxfp8_mse", ["mse"], None),
        ("mse", ["mxfp8_mse"], None),
        ("mxfp8_e5m2_mse", ["mxfp8_mse", "mxfp8_e4m3_mse", "mxfp8_e5m2_mse"], "mxfp8_e5m2_mse"),
        ("mxfp8_e5m2_mse", ["mxfp8_mse", "mse"], None),
        ("mxfp8_mse", ["mxfp8_e4m3_mse"], None),
    ],
)
def test_a_condition_names_a_statistic_as_in_stats(name: str, stats: list[str], label: str | None) -> None:
    """The format of the elements is a part of the name."""
    options = {"enabled": True, "tensors": ["activation"], "stats": stats}
    features = [FEATURES["LogFp8TensorStats"].model_validate(options)]
    statistic = collected_for(parse_condition(f"{name} > 0"), collected(features, "activation"))
    assert (statistic and statistic.labels[0]) == label


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [
        *("much", "", "-10MB", "10 elephants", "1e400", 0, None, True, float("inf"), -3),
        *("10 Mo", "2 Kio", "1e9", 1e9, "1_000_000", "10MB and more", "10kbit", "0", "0.5"),
    ],
)
def test_an_invalid_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=rf"must be a number of bytes >= 1.*not {re.escape(repr(size))}\.$"):
        size_in_bytes(size)


def test_a_number_of_bytes_is_taken_exactly() -> None:
    assert [size_in_bytes(size) for size in (2**63 - 1, 2**53 + 1)] == [2**63 - 1, 2**53 + 1]


WHOLE = {
    "share": {"fp8": 95, "fp8 wgrad": 90.5},
    "layers": {r".*mlp.*": "mxfp8"},
    "state": {"optimizer": "float32"},
    "by_step": 5,
    "on_broken": "warn",
}


def test_a_condition_on_a_share() -> None:
    share = parse_share(" fp8  wgrad >= 90.5 % ")
    assert (share.precision, share.part, share.comparison, share.number) == ("fp8", "wgrad", ">=", 0.905)
    assert str(share) == "fp8  wgrad >= 90.5 %"
    assert [share.holds(value) for value in (0.904, 0.905, 1.0, float("nan"))] == [False, True, True, False]
    assert parse_share("bf16 < 10%").holds(0.09)


def test_the_ways_to_write_a_contract(tmp_path: Path) -> None:
    contract = read_contract(WHOLE)
    assert [str(share) for share in contract.share.values()] == ["fp8 >= 95%", "fp8 wgrad >= 90.5%"]
    assert (contract.layers, contract.state) == ({r".*mlp.*": "mxfp8"}, {"optimizer_state": "float32"})
    assert (contract.by_step, contract.on_broken) == (5, "warn")
    file = tmp_path / "contract.yaml"
    file.write_text(
        "precision_contract:\n  share: {fp8: 95, fp8 wgrad: 90.5}\n  layers: {'.*mlp.*': mxfp8}\n"
        "  state: {optimizer: float32}\n  by_step: 5\n  on_broken: warn\n"
    )
    assert read_contract(file) == read_contract(str(file)) == read_contract({"precision_contract": WHOLE}) == contract
    assert read_contract(contract) is contract
    assert read_contract(None) is None
    assert read_contract("fp8 >= 95%") == read_contract({"share": ["fp8 >= 95%"]})
    assert Contract().by_step == 3


WRONG: dict[str, tuple[Any, str]] = {
    "a word": ("fp8", r"has 'fp8'. Write a condition such as 'fp8 >= 95%'"),
    "no precision": ("fp9 >= 95%", r"no precision 'fp9'. Did you mean 'fp8'"),
    "no part": ("fp8 wgrads >= 95%", r"there is no part 'wgrads'. Did you mean 'wgrad'"),
    "above 100 %": ("fp8 >= 950%", r"'950' is not a number from 0 to 100"),
    "below 0 %": ({"share": {"fp8": -1}}, r"\['share'\]\['fp8'\] has .*'-1' is not a number from 0 to 100"),
    "no percent sign": ("fp8 >= 0.95", r"Write a condition such as"),
    "not a number": ("nvfp4 >= most%", r"'most' is not a number"),
    "no number for a share": ({"share": {"fp8": None}}, r"has None"),
    "no key": ({"shares": {"fp8": 95}}, r"no key 'shares'. Did you mean 'share'"),
    "nothing": ({}, r"the contract is empty"),
    "a list": (["fp8 >= 95%"], r"must be a condition such as"),
    "a number": (3, r"must be a condition such as"),
    "a pattern": ({"layers": {"(": "fp8"}}, r"is not a regular expression"),
    "a precision of layers": ({"layers": {"mlp": "e4m3"}}, r"'e4m3' is not a precision"),
    "a list of precisions": ({"layers": {"mlp": ["fp8"]}}, r"\[.fp8.\] is not a precision"),
    "layers in a list": ({"layers": ["mlp"]}, r"must be a mapping from layer patterns"),
    "a subject": ({"state": {"optimiser": "float32"}}, r"there is no subject 'optimiser'. Did you mean 'optimizer"),
    "a type": ({"state": {"optimizer": "fp32"}}, r"'fp32' is not a dtype. Did you mean 'float32'"),
    "by_step": ({"share": {"fp8": 1}, "by_step": 0}, r"'by_step' must be an integer >= 1, not 0"),
    "on_broken": ({"share": {"fp8": 1}, "on_broken": "exit"}, r"'on_broken' must be 'raise' or 'warn', not 'exit'"),
    "a file": ("contracts.yaml", r"The contract file 'contracts.yaml' does not exist"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_contracts(case: str) -> None:
    source, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        read_contract(source)


def test_all_mistakes_are_reported_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "contract.yaml"
    file.write_text("precision_contract:\n  share:\n    fp9: 95\n  layer: {mlp: fp8}\n  by_step: soon\n")
    with pytest.raises(ConfigError) as caught:
        read_contract(file)
    assert sorted(re.findall(r"contract\.yaml, line (\d)", str(caught.value))) == ["3", "4", "5"]


def test_a_file_that_is_no_contract(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("stats:\n  enabled: True\n")
    with pytest.raises(ConfigError, match=r"config.yaml is not a contract: .* the key 'precision_contract'"):
        read_contract(file)


@pytest.mark.usefixtures("fresh_accelerate_state")
@pytest.mark.parametrize("integration", ["Lightning", "Transformers"])
def test_a_broken_contract_ends_the_training_of_an_integration(integration: str, tmp_path: Path) -> None:
    with pytest.raises(PrecisionContractError, match=r"at step 2:\n- fp8 is 0 %, required: >= 95 %"):
        if integration == "Lightning":
            fit = lightning.trainer(tmp_path, callbacks=[PrecisionDebugCallback(require="fp8 >= 95%")], max_steps=5).fit
            fit(lightning.Plain(), lightning.loader(8))
        else:
            callback, model = PrecisionDebugTrainerCallback(require="fp8 >= 95%"), transformers.llama()
            transformers.trainer(transformers.arguments(tmp_path), callback, model=model, kind=Trainer).train()
