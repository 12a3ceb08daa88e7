"""Contracts, sizes and schedules: their grammar, the values that satisfy them, and errors for invalid ones."""

import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks import PrecisionDebugCallback, PrecisionDebugTrainerCallback
from te_precision_callbacks.config import ConfigError, load_config
from te_precision_callbacks.config.contract import Contract, parse_share, read_contract
from te_precision_callbacks.config.fields import size_in_bytes
from te_precision_callbacks.session import PrecisionContractError
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.transformers import Trainer
from tests.conftest import feature
from tests.lightning import models as lightning
from tests.transformers import models as transformers


def test_schedules_meet_where_a_step_is_in_both() -> None:
    """Against a count of steps. All ends are below 40, and frequencies up to 7: lcm 42."""
    for seed in range(8):
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


def test_a_config_comes_whole_out_of_a_pickle() -> None:
    """A config goes to the processes of ddp_spawn."""
    dumped = {"tensors": ["weight"], "high_precision_tensor": True, "freq": 7}
    config = load_config({"a": feature("DumpTensors", ["fc1"], **dumped)})
    (section,), (own,) = pickle.loads(pickle.dumps(config)).sections, config.sections
    result, options = (item.features["transformer_engine"]["DumpTensors"] for item in (section, own))
    assert result == options == {"enabled": True, **dumped}
    assert result.schema == options.schema
    assert result.schema.targets[0].options.schedule == options.schema.targets[0].options.schedule


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_an_invalid_size_is_refused() -> None:
    for size in [
        *("much", "", "-10MB", "10 elephants", "1e400", 0, None, True, float("inf"), -3),
        *("10 Mo", "2 Kio", "1e9", 1e9, "1_000_000", "10MB and more", "10kbit", "0", "0.5"),
    ]:
        with pytest.raises(ValueError, match=rf"must be a number of bytes >= 1.*not {re.escape(repr(size))}\.$"):
            size_in_bytes(size)
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


def test_invalid_contracts() -> None:
    for case in WRONG:
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
