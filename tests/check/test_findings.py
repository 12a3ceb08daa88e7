"""Findings of a plan: everything a run would refuse or leave undone, compared with that run where there is one."""

import json
import logging
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from transformer_engine.common import recipe as recipes
from typer.testing import CliRunner

import te_precision_callbacks
from te_precision_callbacks import cli
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.check import CheckedModel, RecipeError, check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.coverage.coverage import Reason
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.te import package as te_package
from tests.check.running import BF16, RECIPES, gpu_with
from tests.combinations import half, pairs
from tests.conftest import feature

WATCHED = {"s": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"])}


def check(model: torch.nn.Module, config: Any = None, **keywords: Any) -> CheckedModel:
    return check_model(model, load_config(config or WATCHED), **keywords)


def kinds(checked: CheckedModel) -> list[str]:
    return [finding.kind for finding in checked.findings]


def error_of(model: torch.nn.Module, x: torch.Tensor, recipe: Any, config: Any, folder: Path) -> str:
    te.quantization.FP8GlobalStateManager.reset()
    try:
        with (
            warnings.catch_warnings(),
            InspectSession(config, model=model, log_dir=folder, strict=True, records="off"),
            te.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            warnings.simplefilter("ignore")
            model(x).float().sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


SIZES = [(64, 32, 32), (40, 32, 32), (30, 32, 32), (64, 48, 32), (64, 32, 40), (64, 20, 32), (64, 32, 30), (48, 80, 96)]


@pytest.mark.few
@pytest.mark.parametrize(
    ("recipe", "config"),
    half(
        [recipe for recipe in RECIPES if recipe != "none"],
        [WATCHED, {"s": feature("DisableFP8GEMM", ["all"], gemms=["wgrad"])}],
    ),
)
def test_a_shape_is_found_where_a_run_refuses_it(recipe: str, config: Any, tmp_path: Path) -> None:
    with gpu_with(recipe):
        for tokens, in_features, out_features in SIZES:
            model = torch.nn.ModuleDict({"fc": te.Linear(in_features, out_features, bias=False, params_dtype=BF16)})
            model.forward = lambda x, model=model: model["fc"](x)
            checked = check(model, config, recipe=recipe, tokens=tokens)
            x = torch.randn(tokens, in_features, dtype=BF16, requires_grad=True)
            error = error_of(model, x, RECIPES[recipe][1](), config, tmp_path)
            results = [finding for finding in checked.findings if finding.kind == "shape"]
            assert bool(results) == bool(error), (tokens, in_features, out_features, results, error)
            assert all(finding.text.startswith("fc: ") and "(next: " in finding.text for finding in results)
            without = check(model, config, recipe=recipe)
            assert not any("tokens" in finding.text for finding in without.findings), "which are not known"


def test_equal_findings_of_many_layers_are_one() -> None:
    model = torch.nn.ModuleList(te.Linear(20, 32, device="meta") for _ in range(1000))
    [finding] = check(model, recipe="fp8_current_scaling").findings
    assert finding.text.startswith("{0-999}: fprop: in_features is 20, but must be a multiple of 16 (next: 32)")
    assert len(finding.layers) == 1000


def test_nothing_in_low_precision() -> None:
    linear = torch.nn.Sequential(te.Linear(32, 32))
    off = {"s": feature("DisableFP8Layer", ["all"])}
    assert kinds(check(linear, off)) == ["high_precision"]
    assert kinds(check(linear, recipe="none")) == [], "as it was asked for"
    assert kinds(check(linear, off, recipe="none")) == []
    [*_, finding] = check(torch.nn.Sequential(torch.nn.Linear(32, 32)), off).findings
    assert (finding.kind, finding.text) == (
        "high_precision",
        "Nothing runs in low precision: the model has no Transformer Engine layer.",
    )


def test_unmatched_sections_and_conflicts() -> None:
    config = {
        "nowhere": feature("DisableFP8Layer", ["fc9"]),
        "one": {**feature("DisableFP8Layer", []), "layers": {"exact_layer_names": ["1", "2"]}},
        "two": feature("DisableFP8Layer", ["1"]),
        "idle": feature("LogTensorStats", ["0", "zz"], tensors=["weight"], stats=["max"]),
    }
    checked = check(two(), config)
    assert sorted(kinds(checked)) == ["config", "unmatched", "unmatched"]
    texts = " ".join(finding.text for finding in checked.findings)
    for said in ("matches none of the 2 layers", "no layer '2'", "already has 'DisableFP8Layer'"):
        assert said in texts
    assert "no layer's name or class contains 'zz'" in " ".join(checked.notes)
    assert {product.layer: product.precision for product in checked.coverage} == {"0": "fp8", "1": "fp8"}


@pytest.mark.parametrize("recipe", ["fp8_current_scaling", "none", "mxfp8"])
def test_a_feature_that_needs_another_recipe(recipe: str, tmp_path: Path) -> None:
    config = {"s": feature("PerTensorScaling", ["0"], gemms=["fprop"], tensors=["weight"])}
    with gpu_with(recipe):
        model = torch.nn.Sequential(te.Linear(32, 32, params_dtype=BF16))
        [finding] = check(model, config, recipe=recipe).findings
        assert finding.kind == "recipe"
        assert "(section 's'): PerTensorScaling on 0 needs the recipe fp8_delayed_scaling" in finding.text
        error = error_of(model, torch.randn(32, 32, dtype=BF16), RECIPES[recipe][1](), config, tmp_path)
        assert "needs the recipe DelayedScaling" in error


def test_a_dtype_that_nvfp4_refuses(tmp_path: Path) -> None:
    with gpu_with("nvfp4"):
        model = torch.nn.Sequential(te.Linear(32, 32))
        [finding] = check(model, recipe="nvfp4").findings
        assert "Hadamard transform needs bfloat16" in finding.text
        assert "bfloat16" in error_of(model, torch.randn(32, 32), recipes.NVFP4BlockScaling(), WATCHED, tmp_path)
        assert check(model, recipe=recipes.NVFP4BlockScaling(disable_rht=True)).findings == ()


def test_layers_that_the_debug_path_refuses_run_without_features() -> None:
    off = {"s": feature("DisableFP8Layer", ["all"])}
    checked = check(delayed(), off)
    [finding] = checked.findings
    assert (finding.kind, finding.layers) == ("refused", ("0",))
    assert "delay_wgrad_compute" in finding.text
    assert {(p.layer, p.precision) for p in checked.coverage} == {("0", "fp8"), ("1", "fp32")}
    assert list(checked.features) == ["1"]


def test_layers_that_are_observed_on_their_own_path_are_not_refused() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32, delay_wgrad_compute=True), te.LayerNormMLP(32, 32))
    config = {"s": feature("LogTensorStats", ["all"], tensors=["output"], stats=["max"])}
    checked = check(model, config)
    assert checked.findings == ()
    assert set(checked.features) == {"0", "1.fc1", "1.fc2"}
    assert list(checked.notes) == [
        'observe="auto": 1 of 2 modules with features keep their fused path. Transformer Engine'
        "'s debug path runs 1: LogTensorStats: output of LayerNormMLP never exists in high precision on the fused path,"
        " which 'max' needs"
    ]
    [finding] = check(model, config, observe="debug").findings
    assert (finding.kind, finding.layers) == ("refused", ("0",))
    [finding] = check(model, config, observe="fused").findings
    assert (finding.kind, finding.layers) == ("refused", ())
    assert "1 cannot be observed on the fused path" in finding.text
    with pytest.raises(OptionError, match="observe= must be 'debug', 'fused' or 'auto', not 'fast'"):
        check(model, observe="fast")


def test_modules_of_any_kind() -> None:
    own, head = torch.nn.Module(), torch.nn.Linear(32, 10)
    own.table = torch.nn.Parameter(torch.zeros(4, 4))
    head.weight.requires_grad_(False)
    parts = {
        "embedding": torch.nn.Embedding(10, 32),
        "conv": torch.nn.Conv2d(4, 8, 3, groups=2),
        "attention": torch.nn.MultiheadAttention(32, 2),
        "fc": te.Linear(32, 64),
        "ops": te.ops.Sequential(te.ops.Linear(64, 32), te.ops.GELU()),
        "own": own,
        "head": head,
    }
    checked = check(torch.nn.ModuleDict(parts), recipe="fp8_current_scaling", tokens=64)
    macs = {(p.layer, p.gemm): p.macs for p in checked.coverage}
    of_forward = {
        "attention.out_proj": 64 * 32 * 32,
        "fc": 64 * 32 * 64,
        "ops.0": 64 * 64 * 32,
        "head": 64 * 32 * 10,
    }
    assert {layer: count for (layer, gemm), count in macs.items() if gemm == "fprop"} == of_forward
    assert {layer: macs[layer, "wgrad"] for layer in of_forward if layer != "head"} == {
        layer: count for layer, count in of_forward.items() if layer != "head"
    }
    [frozen] = [product for product in checked.coverage if product.not_run]
    assert (frozen.layer, frozen.gemm, frozen.not_run) == ("head", "wgrad", "frozen weight")
    assert checked.not_counted == ("conv", "attention", "own")
    reasons = {p.layer: (p.reason, p.reason_ref) for p in checked.coverage if p.gemm == "fprop" and not p.is_low}
    assert reasons["head"] == (Reason.NOT_TE, "torch.nn.Linear")
    assert {p.layer for p in checked.coverage if p.is_low} == {"fc", "ops.0"}
    assert checked.coverage.macs() == sum(macs.values())


def test_which_features_act_when() -> None:
    config = {
        "s": feature(
            "LogTensorStats",
            ["all"],
            stats=["max"],
            tensors_struct=[{"tensor": "weight", "freq": 5}, {"tensor": "gradient"}, {"tensor": "activation"}],
        ),
        "t": feature("FakeQuant", ["0"], quant_format="FP8E4M3", gemms=["fprop"], tensors=["activation", "weight"]),
        "u": feature("DisableFP8GEMM", ["1"], gemms=["dgrad", "wgrad"]),
    }
    checked = check(two(), config)
    logged = [
        "s: LogTensorStats of weight, steps that are multiples of 5",
        "s: LogTensorStats of gradient, activation, every step",
    ]
    assert {layer: list(map(str, features)) for layer, features in checked.features.items()} == {
        "0": [*logged, "t: FakeQuant of fprop (activation, weight), every step"],
        "1": [*logged, "u: DisableFP8GEMM of dgrad, wgrad, every step"],
    }


def test_features_that_act_in_a_span_are_planned_apart() -> None:
    """A layer that is high in a span alone counts as low, and the contract is checked in both."""
    config = {
        "u": feature("DisableFP8GEMM", ["0"], gemms=["fprop"], start_step=85),
        "v": feature("DisableFP8Layer", ["1"], start_end_list=[[0, 9], [85, -1]]),
    }
    checked = check(two(), config, require="fp8 >= 50%")
    assert checked.coverage.share("fp8") == 1
    assert {steps: round(span.share("fp8"), 3) for steps, span in checked.spans.items()} == {
        "steps 0 to 9": 0.5,
        "steps 85 on": round(2 / 6, 3),
    }
    assert [finding.text for finding in checked.findings] == ["In steps 85 on: fp8 is 33.3 %, required: >= 50 %."]
    assert {layer: list(map(str, features)) for layer, features in checked.features.items()} == {
        "0": ["u: DisableFP8GEMM of fprop, steps 85 on"],
        "1": ["v: DisableFP8Layer of fprop, dgrad, wgrad, steps 0 to 9 and 85 on"],
    }


def test_an_environment_variable_that_a_recipe_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        assert self.backward_override == "nothing", "NVTE_BACKWARD_OVERRIDE must be unset"

    monkeypatch.setattr(recipes.Float8CurrentScaling, "__post_init__", refuse)
    with pytest.raises(
        RecipeError, match=r"cannot run the recipe 'fp8_current_scaling': .*NVTE_BACKWARD_OVERRIDE must"
    ):
        check(torch.nn.Sequential(te.Linear(32, 32)), recipe="fp8_current_scaling")


def test_the_default_recipe_is_that_of_the_gpu() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32, params_dtype=BF16))
    assert check(model).recipe == "fp8_delayed_scaling"
    with gpu_with("mxfp8"):
        assert check(model).recipe == "mxfp8"


def test_an_argument_of_the_recipe_without_effect() -> None:
    recipe = recipes.Float8CurrentScaling(use_power_2_scales=True)
    result = check_model(torch.nn.Sequential(te.Linear(32, 32)), load_config(), recipe=recipe, tokens=32).findings
    assert [item.text.partition(" has")[0] for item in result if item.kind == "rule"] == [
        "the model: Float8CurrentScaling: use_power_2_scales (True)"
    ]


def test_what_the_rules_find_in_a_plan() -> None:
    parts = [torch.nn.Linear(32, 32) if place == 4 else te.Linear(32, 32) for place in range(9)]
    recipe = recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID)
    with gpu_with("mxfp8"):
        result = check_model(torch.nn.Sequential(*parts), load_config(), recipe=recipe, tokens=32).findings
    by_rule = {finding.text.rpartition("(")[2]: finding.layers for finding in result if finding.kind == "rule"}
    assert by_rule == {"hole).": ("4",), "mxfp8-hybrid).": tuple(str(place) for place in range(9) if place != 4)}


# ------------------------------------------------------------------------------------------------ what is not known


class OwnRegion(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = te.Linear(32, 64), te.Linear(64, 32)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
            made = self.inside(tensor)
        return self.outside(made)


def undecided(model: torch.nn.Module, require: Any) -> tuple[list[str], str]:
    """The shares that a plan leaves undecided, and what it does not know; it never has a finding for that."""
    checked = check(model, {}, recipe="fp8_current_scaling", tokens=64, require=require)
    assert not checked.findings
    assert checked.unknown[-1].startswith("which layers the forward calls"), "always"
    return list(checked.undecided), "; ".join(checked.unknown[:-1])


def test_a_share_with_a_module_of_an_unknown_class_is_undecided() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), torch.nn.LSTM(32, 64))
    assert undecided(model, "fp8 fprop >= 99%") == (["fp8 fprop >= 99%"], "the matrix products of 1")


def test_attention_leaves_only_shares_of_all_products_undecided() -> None:
    model = te.TransformerLayer(64, 128, 4)
    shares, unknown = undecided(model, {"share": ["fp8 >= 99%", "fp8 backward >= 99%", "fp8 wgrad >= 99%"]})
    assert shares == ["fp8 >= 99%", "fp8 backward >= 99%"]
    assert unknown == "attention of transformer_layer.self_attention: its kernel, formats and multiply-adds"
    broken = check(model, {"kept": feature("DisableFP8GEMM", ["fc1"], gemms=["wgrad"])}, require="fp8 wgrad >= 99%")
    assert kinds(broken) == ["contract"]


def test_the_tokens_of_experts_are_not_known() -> None:
    shares, unknown = undecided(torch.nn.Sequential(te.GroupedLinear(2, 32, 32)), "fp8 >= 99%")
    assert shares == ["fp8 >= 99%"]
    assert unknown == "the tokens of each expert (0.gemm_{0-1}); the plan assumes equal numbers"


def test_a_forward_that_may_enter_a_region_is_not_known(tmp_path: Path) -> None:
    """Its layers inside run with its own recipe, and those outside in high precision."""
    for recipe, assumed in (("fp8_current_scaling", 1.0), ("none", 0.0)):
        contract = {"share": "fp8 >= 90%", "layers": {"outside": "fp8"}}
        checked = check(OwnRegion(), tokens=64, recipe=recipe, require=contract)
        assert checked.coverage.share("fp8") == assumed
        assert (kinds(checked), checked.undecided) == ([], ("fp8 >= 90%", "outside: fp8"))
        assert checked.unknown[0] == "the recipe inside own_region, whose forward may enter te.autocast itself"
    model = OwnRegion()
    with InspectSession(WATCHED, model=model, log_dir=tmp_path, records="off") as session:
        model(torch.randn(64, 32, requires_grad=True)).sum().backward()
        session.step()
    assert session.coverage().share("fp8") == 0.5
    plain = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 64))
    assert undecided(plain, {"state": {"optimizer_state": "float32"}}) == (["optimizer_state: float32"], "")
    assert undecided(plain, "fp8 >= 90%") == ([], "")


# ------------------------------------------------------------------------------------------------ warnings of a session


LOGGED = feature("LogTensorStats", ["all"], tensors=["activation"], stats=["max"])


def two() -> torch.nn.Module:
    return torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))


def delayed() -> torch.nn.Module:
    return torch.nn.Sequential(te.Linear(32, 32, delay_wgrad_compute=True), te.Linear(32, 32))


def plain() -> torch.nn.Module:
    return torch.nn.Linear(32, 32)


Case = namedtuple("Case", "config model said_in options", defaults=({},))
"""A config and a model of which something is to be said, the function that logs it, and options of the session."""


def selected(**layers: Any) -> dict[str, Any]:
    return {"s": {**LOGGED, "layers": layers}}


GEMM = feature("LogTensorStats", ["all"], tensors=["activation", "fprop"], stats=["max"])
ATTACH = "session/model.py:attach"

CASES = {
    "no section": Case({"s": LOGGED | {"enabled": False}}, two, ATTACH),
    "no feature": Case({"s": feature("LogTensorStats", ["all"], enabled=False)}, two, ATTACH),
    "no layer": Case({"s": LOGGED}, plain, ATTACH),
    "a GEMM among tensors": Case({"s": GEMM}, two, "config/checking.py:_without_gemms"),
    "a key beside one that decides": Case(
        selected(exact_layer_names=["0"], layer_types=["linear"]), two, "config/selection.py:_warn_of_idle_keys"
    ),
    "an empty pattern": Case(selected(layer_name_regex_pattern=""), two, "config/selection.py:_warn_of_idle_keys"),
    "a type that no layer has": Case(selected(layer_types=["linear", "nothing"]), two, "config/problems.py:warn"),
    "a name that no layer has": Case(
        selected(exact_layer_names=["0", "5"]), two, "config/problems.py:warn", {"allow_unmatched": True}
    ),
    "a layer that is refused": Case(
        {"s": feature("FakeQuant", ["all"], quant_format="FP8E4M3", tensors=["weight"], gemms=["fprop"])},
        delayed,
        "instrumentation/refusals.py:warn",
        {"observe": "debug"},
    ),
    "a version that is not known": Case({"s": LOGGED}, two, "te/package.py:warn_unless_supported"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_session_warns_of_is_said_by_check(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if name == "a version that is not known":
        monkeypatch.setattr(te_package, "SUPPORTED_TE", ("1.0", "1.1"))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(case.config))
    with caplog.at_level(logging.WARNING), InspectSession(path, model=case.model(), log_dir=tmp_path, **case.options):
        pass
    stated = [record for record in caplog.records if record.name.startswith("te_precision_callbacks")]
    package = Path(te_precision_callbacks.__file__).parent
    places = {f"{Path(record.pathname).relative_to(package).as_posix()}:{record.funcName}" for record in stated}
    assert case.said_in in places
    caplog.clear()
    monkeypatch.syspath_prepend(tmp_path)
    observe = ["--observe", case.options["observe"]] if "observe" in case.options else []
    model = ["--model", f"{__name__}:{case.model.__name__}"]
    said = json.loads(CliRunner().invoke(cli.app, ["check", str(path), *model, *observe, "--json"]).stdout)
    texts = " ".join([*said["notes"], *(finding["text"] for finding in said["findings"])])
    for record in stated:
        if record.funcName == "warn":  # in other words: which layers, and why
            assert record.getMessage().partition(" (")[2].rpartition(")")[0] in texts
        else:
            assert record.getMessage() in texts
    assert not caplog.records  # said once


def test_without_a_model_the_config_alone_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"s": feature("LogTensorStats", ["all"], enabled=False), "t": GEMM}))
    done = CliRunner().invoke(cli.app, ["check", str(path)])
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "Note: " in said
    assert "has no enabled feature" in said
    assert "which is a GEMM, not a tensor" in said
    assert len(json.loads(CliRunner().invoke(cli.app, ["check", str(path), "--json"]).stdout)["notes"]) == 2


# ---------------------------------------------------------------------- what Transformer Engine refuses


@pytest.mark.parametrize(
    ("recipe", "trains", "grouped"),
    pairs(
        [recipes.DelayedScaling(), recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()],
        [True, False],
        [False, True],
    ),
)
def test_save_original_input_is_refused_where_the_run_raises(
    tmp_path: Path, recipe: Any, trains: bool, grouped: bool
) -> None:
    if grouped:
        model: Any = te.GroupedLinear(2, 32, 32, save_original_input=True)
        arguments: tuple[Any, ...] = (torch.randn(64, 32, requires_grad=True), [32, 32])
    else:
        model = te.Linear(32, 32, save_original_input=True)
        arguments = (torch.randn(64, 32, requires_grad=True),)
    if not trains:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("weight" not in name)
    with gpu_with("mxfp8"):
        planned = check(model, recipe=recipe, tokens=64)
        te.quantization.FP8GlobalStateManager.reset()
        try:
            with te.autocast(enabled=True, recipe=recipe):
                model(*arguments).sum().backward()
            error = ""
        except (AssertionError, ValueError) as raised:
            error = str(raised)
    refused = [finding for finding in planned.findings if "save_original_input" in finding.text]
    assert bool(refused) == ("save_original_input" in error)
