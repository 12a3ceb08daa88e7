"""Contracts as users write them, and errors for invalid contracts."""

from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks import PrecisionDebugCallback, PrecisionDebugTrainerCallback
from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.config.conditions import parse_share
from te_precision_callbacks.config.contract import Contract, read_contract
from te_precision_callbacks.session import PrecisionContractError
from te_precision_callbacks.transformers import Trainer
from tests.lightning import models as lightning
from tests.transformers import models as transformers

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
    "a word": ("fp8", r"has 'fp8'. A condition on a share is 'fp8 >= 95%'"),
    "no precision": ("fp9 >= 95%", r"no precision 'fp9'. Did you mean 'fp8'"),
    "no part": ("fp8 wgrads >= 95%", r"no products are called 'wgrads'. Did you mean 'wgrad'"),
    "above 100 %": ("fp8 >= 950%", r"'950' is not a number from 0 to 100"),
    "below 0 %": ({"share": {"fp8": -1}}, r"\['share'\]\['fp8'\] has .*'-1' is not a number from 0 to 100"),
    "no percent sign": ("fp8 >= 0.95", r"A condition on a share is"),
    "not a number": ("nvfp4 >= most%", r"'most' is not a number"),
    "no number for a share": ({"share": {"fp8": None}}, r"has None"),
    "no key": ({"shares": {"fp8": 95}}, r"no key 'shares'. Did you mean 'share'"),
    "nothing": ({}, r"demands nothing"),
    "a list": (["fp8 >= 95%"], r"must be a condition such as"),
    "a number": (3, r"must be a condition such as"),
    "a pattern": ({"layers": {"(": "fp8"}}, r"is no regular expression"),
    "a precision of layers": ({"layers": {"mlp": "e4m3"}}, r"'e4m3' is no precision"),
    "a list of precisions": ({"layers": {"mlp": ["fp8"]}}, r"\[.fp8.\] is no precision"),
    "layers in a list": ({"layers": ["mlp"]}, r"must be a mapping of patterns"),
    "a subject": ({"state": {"optimiser": "float32"}}, r"nothing is called 'optimiser'. Did you mean 'optimizer"),
    "a type": ({"state": {"optimizer": "fp32"}}, r"'fp32' is no type. Did you mean 'float32'"),
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
    with pytest.raises(ConfigError, match=r"(?s)contract.yaml, line 3.*contract.yaml, line 4.*contract.yaml, line 5"):
        read_contract(file)


def test_a_file_that_is_no_contract(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("stats:\n  enabled: True\n")
    with pytest.raises(ConfigError, match=r"config.yaml is no contract: .* one key, 'precision_contract'"):
        read_contract(file)


@pytest.mark.usefixtures("fresh_accelerate_state")
@pytest.mark.parametrize("integration", ["Lightning", "Transformers"])
def test_a_broken_contract_ends_the_training_of_an_integration(integration: str, tmp_path: Path) -> None:
    with pytest.raises(PrecisionContractError, match=r"checked after step 2:\n- fp8 >= 95%: it is 0 %"):
        if integration == "Lightning":
            fit = lightning.trainer(tmp_path, callbacks=[PrecisionDebugCallback(require="fp8 >= 95%")], max_steps=5).fit
            fit(lightning.Plain(), lightning.loader(8))
        else:
            callback, model = PrecisionDebugTrainerCallback(require="fp8 >= 95%"), transformers.llama()
            transformers.trainer(transformers.arguments(tmp_path), callback, model=model, kind=Trainer).train()
