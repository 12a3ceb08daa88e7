"""A model of transformers is planned as Accelerate's conversion makes it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import convert_model
from transformer_engine.common import recipe as recipes
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.accelerate import unconverted_layers
from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.check import ConversionError
from te_precision_callbacks.coverage.coverage import Coverage, Reason
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature
from tests.coverage.test_coverage import gpt2, words
from tests.coverage.test_coverage import llama as llama_of
from tests.manual.test_command import ends

CONFIG = {"watched": feature("LogTensorStats", ["q_proj"], tensors=["activation"], stats=["max"])}
HEAD = 100
"""The words of the Llama: no multiple of 16, so that Accelerate leaves its head out."""

WHY = f"64 x {HEAD}: {HEAD} is no multiple of 16"


def llama() -> transformers.PreTrainedModel:
    model = llama_of()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, HEAD, bias=False)
    model.config.vocab_size = HEAD
    return model


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": words(), "labels": words()}


def only_queries() -> transformers.PreTrainedModel:
    model = llama_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    return model


def with_tied_words() -> transformers.PreTrainedModel:
    model = llama_of()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def with_an_adapter() -> torch.nn.Module:
    return torch.nn.Sequential(llama())


def without_a_weight() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LayerNorm(32, elementwise_affine=False), torch.nn.Linear(32, 32))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"  # which is YAML, too
    path.write_text(json.dumps(CONFIG))
    return str(path)


def check(config: str, model: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(cli.app, ["check", config, "--model", f"{__name__}:{model}", *arguments, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def gemms_of(checked: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {
        (layer, gemm): (planned["operands"], planned["reason"], planned["reason_ref"])
        for row in checked["plan"]
        for layer in row["layers"]
        for gemm, planned in row["gemms"].items()
    }


def mixtral() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=128, **sizes, **experts))


def ran(folder: Path, model: transformers.PreTrainedModel) -> Coverage:
    Accelerator(cpu=True)
    try:
        with torch.no_grad():
            convert_model(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    watched = {"watched": feature("LogTensorStats", ["all"], tensors=["activation"], stats=["max"])}
    with InspectSession(watched, model=model, log_dir=folder, statistics_log="off", strict=True) as session:
        session.unconverted = unconverted_layers(model)
        with te.autocast(enabled=True, recipe=recipes.DelayedScaling()):
            loss = model(**batch()).loss
        loss.backward()
        session.step()
        return session.coverage()


def test_the_plan_is_what_runs_after_the_conversion(config: str, tmp_path: Path) -> None:
    result = check(config, "llama", "--convert", "accelerate", "--batch", f"{__name__}:batch")
    assert (result["device"], result["convert"], result["recipe"]) == ("meta", "accelerate", "fp8_delayed_scaling")
    assert result["unconverted"] == {"lm_head": WHY}
    coverage = ran(tmp_path / "run", llama())
    assert result["macs"] == coverage.macs()
    assert result["share"]["fp8"] == pytest.approx(coverage.share("fp8"))
    planned = gemms_of(result)
    for product in coverage:
        name = f"{product.gemm} backward" if product.backward and product.gemm in ("qk", "pv") else product.gemm
        reason = "" if product.reason is None else product.reason.value
        assert planned.pop((product.layer, name)) == (dict(product.operands), reason, product.reason_ref)
    assert not planned
    assert {p.reason for p in coverage if p.layer == "lm_head"} == {Reason.NOT_CONVERTED}
    assert not AcceleratorState._shared_state
    assert not PartialState._shared_state


def test_what_was_frozen_or_tied_before_the_conversion_has_a_note(config: str) -> None:
    arguments = ("--convert", "accelerate", "--tokens", "256", "--memory")
    result = check(config, "only_queries", *arguments)
    (note,) = (note for note in result["notes"] if "unfrozen" in note)
    assert note.startswith("Accelerate's conversion has unfrozen these parameters: ")
    assert "model.layers.{0-1}.self_attn.k_proj.weight, " in note
    assert "lm_head.weight. They get gradients" in note
    assert "q_proj" not in note
    assert "convert_model(model) yourself before you make the optimizer" in note
    of_layers = sum(row["low"] for row in result["memory"]["rows"] if row["kind"] == "gradient")
    linears = [module for module in llama_of().modules() if isinstance(module, torch.nn.Linear)]
    assert of_layers == sum(4 * layer.weight.numel() for layer in linears), "the plan is of what then trains"
    (note,) = (note for note in check(config, "with_tied_words", *arguments)["notes"] if "tie" in note)
    assert note.startswith("Accelerate's conversion has untied model.embed_tokens.weight and lm_head.weight: ")


@pytest.mark.parametrize(("name", "make", "most"), [("gpt2", gpt2, 0.25), ("mixtral", mixtral, 0.3)])
def test_what_the_run_breaks_does_not_pass(
    config: str, name: str, make: Any, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has a few percent of FP8: a plan by tokens cannot pass, and one with a batch has the same share."""
    monkeypatch.setattr(sys.modules[__name__], name, make, raising=False)
    Path(config).write_text(json.dumps({"s": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"])}))
    arguments = (config, name, "--convert", "accelerate", "--require", "fp8 >= 50%")
    by_tokens = check(*arguments, "--tokens", "64", code=1)
    kinds = ["not_sized", "contract"] if name == "mixtral" else ["contract"]
    assert [finding["kind"] for finding in by_tokens["findings"]] == kinds
    assert "cannot be checked: the products of" in by_tokens["findings"][-1]["text"]
    result = check(*arguments, "--batch", f"{__name__}:batch", code=1)
    run = ran(tmp_path / "run", make())
    assert result["share"]["fp8"] == pytest.approx(run.share("fp8"))
    assert run.share("fp8") < most


@pytest.mark.parametrize("model", ["llama", "with_an_adapter"])
def test_without_conversion_a_note_names_the_option(config: str, model: str) -> None:
    result = check(config, model, code=1)
    (note,) = (note for note in result["notes"] if "no Transformer Engine layer" in note)
    assert "te-precision check --convert accelerate" in note
    assert (result["convert"], result["unconverted"]) == (None, {})


def test_a_layer_that_accelerate_fails_on(config: str) -> None:
    with pytest.raises(
        ConversionError,
        match=r"Accelerate's conversion of the model failed: \w+Error: .*NoneType.* accelerator\.prepare\(\)",
    ):
        check(config, "without_a_weight", "--convert", "accelerate")


def test_wrong_use(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--convert: it is for a plan; give --model, too" in ends(
        monkeypatch, capsys, "check", config, "--convert", "accelerate"
    )
    assert "celerate' is not one of 'accelerate'" in ends(
        monkeypatch, capsys, "check", config, "--model", "nothing:build", "--convert", "acelerate"
    )
    for name in [name for name in sys.modules if name.startswith("te_precision_callbacks.accelerate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"\[accelerate\]"):
        check(config, "llama", "--convert", "accelerate")


def on_the_cpu() -> torch.nn.Module:
    """Its making asks for a number; with a layer of Transformer Engine beside one of torch."""
    assert float(torch.ones(1)) == 1
    return torch.nn.ModuleDict({"first": te.LayerNormLinear(32, 32), "second": torch.nn.Linear(32, 32)})


def test_a_model_of_transformer_engine_that_meta_cannot_make(config: str) -> None:
    Path(config).write_text(json.dumps({"s": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"])}))
    result = check(config, "on_the_cpu", "--convert", "accelerate", "--recipe", "fp8_current_scaling")
    assert result["device"] == "cpu"
    planned = gemms_of(result)
    for layer in ("first", "second"):
        assert planned[layer, "fprop"][0] == {"activation": "FP8 E4M3", "weight": "FP8 E4M3"}
    assert [note.partition(":")[0] for note in result["notes"]] == [
        "The model has layers of Transformer Engine before Accelerate converts it",
        "--recipe fp8_current_scaling",
    ]
