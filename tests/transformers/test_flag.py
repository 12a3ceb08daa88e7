"""The drop-in pair: --debug activation_overflow and te_precision, with all values that transformers takes."""

import copy
import dataclasses
import json
import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.linear as te_linear
import transformers
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformers import HfArgumentParser
from transformers.debug_utils import DebugOption

from te_precision_callbacks import PrecisionDebugTrainerCallback
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.debug_options import UnknownDebugOptionError
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.overflow import ActivationOverflowError
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import Reason, SessionError
from te_precision_callbacks.transformers import PrecisionDebugOption, Trainer, TrainingArguments
from te_precision_callbacks.transformers.callback import DataParallelError
from tests.conftest import statistics
from tests.lightning.models import largest_inputs, logged_lines
from tests.transformers.models import Net, arguments, llama, trainer

OVERFLOW, PRECISION = PrecisionDebugOption
UPSTREAM = tuple(DebugOption)
EVERY = [*UPSTREAM, OVERFLOW, PRECISION]


def parsed(*flags: str) -> TrainingArguments:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--output_dir", "run", "--use_cpu", *flags], look_for_args_file=False
    )
    return args


# ---------------------------------------------------------------------- the arguments


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], []),
        (["--debug", "activation_overflow"], [OVERFLOW]),
        (["--debug", "te_precision", "activation_overflow"], [PRECISION, OVERFLOW]),
        (["--debug", "activation_overflow te_precision"], [OVERFLOW, PRECISION]),
        (["--debug", "underflow_overflow", "te_precision"], [DebugOption.UNDERFLOW_OVERFLOW, PRECISION]),
        (["--debug", "tpu_metrics_debug te_precision", "te_precision"], [DebugOption.TPU_METRICS_DEBUG, PRECISION]),
    ],
)
def test_the_command_line(flags: list[str], expected: list[Any]) -> None:
    args = parsed(*flags)
    assert args.debug == expected
    assert [type(option) for option in args.debug] == [type(option) for option in expected]
    assert args.te_precision_config is None


@pytest.mark.parametrize("value", ["", "underflow_overflow", "tpu_metrics_debug underflow_overflow", None])
def test_what_upstream_takes_is_as_in_upstream(value: Any) -> None:
    ours, upstream = (
        arguments(Path("run"), kind, debug=value) for kind in (TrainingArguments, transformers.TrainingArguments)
    )
    assert ours.debug == upstream.debug
    assert [type(option) for option in ours.debug] == [type(option) for option in upstream.debug]
    assert ours.to_dict()["debug"] == upstream.to_dict()["debug"]
    assert ours.to_sanitized_dict()["debug"] == upstream.to_sanitized_dict()["debug"]


def test_values_survive() -> None:
    names = ["te_precision", "underflow_overflow", "activation_overflow"]
    args = arguments(Path("run"), TrainingArguments, debug=names, te_precision_config="my.yaml")
    values = args.to_dict()
    assert values["debug"] == names
    assert {type(name) for name in values["debug"]} == {str}
    assert args.to_sanitized_dict()["debug"] == str(names)
    copies = [
        pickle.loads(pickle.dumps(args)),
        copy.copy(args),
        copy.deepcopy(args),
        dataclasses.replace(args, max_steps=7),
        TrainingArguments(**json.loads(args.to_json_string())),
    ]
    for other in copies:
        assert other.debug == [PRECISION, DebugOption.UNDERFLOW_OVERFLOW, OVERFLOW]
        assert [type(option) for option in other.debug] == [type(option) for option in args.debug]
        assert other.te_precision_config == "my.yaml"
    assert "te_precision" in str(args)


def test_a_path_and_a_mapping_are_configs_too(tmp_path: Path) -> None:
    args = arguments(Path("run"), TrainingArguments, debug="te_precision", te_precision_config=tmp_path / "my.yaml")
    assert json.loads(args.to_json_string())["te_precision_config"] == str(tmp_path / "my.yaml")
    args = arguments(Path("run"), TrainingArguments, debug="te_precision", te_precision_config=statistics())
    assert json.loads(args.to_json_string())["te_precision_config"] == statistics()
    with pytest.raises(OptionError, match=r"te_precision_config= must be the path .* not int 3"):
        arguments(Path("run"), TrainingArguments, debug="te_precision", te_precision_config=3)


@pytest.mark.parametrize("value", ["activation_overflov", ["te_precision", "activation_overflov"], True], ids=repr)
def test_an_unknown_value_lists_all_valid_ones(value: Any) -> None:
    for construct in (
        lambda: arguments(Path("run"), TrainingArguments, debug=value),
        lambda: trainer(arguments(Path("run")), kind=Trainer, debug=value),
    ):
        with pytest.raises(UnknownDebugOptionError) as caught:
            construct()
        assert isinstance(caught.value, ValueError)
        assert all(repr(option.value) in str(caught.value) for option in EVERY)


def test_a_config_that_nothing_reads_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"my.yaml.*--debug te_precision"):
        parsed("--debug", "activation_overflow", "--te_precision_config", "my.yaml")


# ---------------------------------------------------------------------- the trainer


def test_te_precision_without_a_config_is_statistics_of_every_layer(tmp_path: Path) -> None:
    made = trainer(arguments(tmp_path, TrainingArguments, debug="te_precision"), model=llama(), kind=Trainer)
    with pytest.raises(SessionError, match="debug='te_precision'"):
        _ = trainer(arguments(tmp_path), kind=Trainer).debug_session
    made.train()
    names = [layer.name for layer in made.debug_session.layers]  # type: ignore[attr-defined]
    assert (names[0], names[-1], len(names)) == ("model.layers.0.self_attn.q_proj", "lm_head", 8)
    # Steps 0, 1 and 2; min, max, mean, std, cur_amax, nonfinite_num of three tensors; and gradients_below_eps%.
    assert len(logged_lines(tmp_path)) == 3 * (8 * 3 * 6 + 1)


class Lost(Net):
    """Its loss is nan in one of the micro-batches, and its gradients never."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        made = super().forward(inputs, labels)
        return {**made, "loss": made["loss"] + (math.nan if len(self.trained_on) == 6 else 0.0)}


@pytest.mark.parametrize("filters", [True, False])
def test_a_loss_that_the_trainer_does_not_log_is_found(tmp_path: Path, filters: bool) -> None:
    keywords = {"debug": "te_precision", "logging_nan_inf_filter": filters, "gradient_accumulation_steps": 2}
    args = arguments(tmp_path, TrainingArguments, learning_rate=0.0, **keywords)
    made = trainer(args, model=Lost(), kind=Trainer, te_precision_config=statistics())
    made.train()
    findings = made.debug_session.findings.wrong  # type: ignore[attr-defined]
    until = 2 if filters else 3  # the Trainer's sum of losses stays nan
    assert [(finding.rule, finding.since, finding.until) for finding in findings] == [("nonfinite", 2, until)]
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, logged)) == filters
    scalars = open_run(tmp_path).scalars.to_pylist()
    of_steps = {row["iteration"]: row["value"] for row in scalars if row["name"] == "loss_step"}
    assert sorted(of_steps) == ([0, 1, 2, 3] if filters else []), "else the trainer logs it"
    assert [of_steps[step] for step in of_steps if step != 2] == pytest.approx(
        [logged[step] for step in of_steps if step != 2], rel=1e-3
    )


class OwnBackward(transformers.Trainer):
    """Calls backward() itself, so the unfiltered loss cannot be had."""

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("filters", [True, False])
def test_a_filtered_loss_is_not_checked_for_nan(tmp_path: Path, filters: bool) -> None:
    callback = PrecisionDebugTrainerCallback(statistics())
    trainer(arguments(tmp_path, logging_nan_inf_filter=filters), callback, kind=OwnBackward).train()
    for verdict in (callback.session.findings, diagnose(tmp_path)):
        reasons = [item.why for item in verdict.not_checked if item.rule == "nonfinite"]
        assert any("logging_nan_inf_filter=False" in why for why in reasons) == filters
        assert not (filters and verdict.healthy)


class Overflows(Net):
    """Its first layer gives an inf in the training forward of a number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.net[1].register_forward_pre_hook(self.spoil)

    def spoil(self, _: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0] * float("inf") if self.training and len(self.trained_on) == self.at else inputs[0]


@pytest.mark.parametrize("debug", ["activation_overflow", "activation_overflow te_precision"])
def test_an_overflow_ends_the_training_before_the_weights_are_touched(tmp_path: Path, debug: str) -> None:
    model = Overflows(at=5)
    args = arguments(tmp_path, TrainingArguments, debug=debug, gradient_accumulation_steps=2)
    made = trainer(args, model=model, kind=Trainer)
    with pytest.raises(ActivationOverflowError, match=r"\[5\] net.1: LayerNormLinear: input\[0\] has"):
        made.train()
    assert made.state.global_step == 2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    assert [len(hook) for hook in hooks if hook] == [1], "the one of the model itself"


def test_the_callback_alone_takes_the_option_too(tmp_path: Path) -> None:
    callback = PrecisionDebugTrainerCallback(statistics(), debug="activation_overflow")
    with pytest.raises(ActivationOverflowError):
        trainer(arguments(tmp_path), callback, model=Overflows(at=1)).train()
    with pytest.raises(UnknownDebugOptionError, match="'activation_overflow', 'te_precision'"):
        PrecisionDebugTrainerCallback(debug="underflow_overflow")


@pytest.mark.slow
@pytest.mark.parametrize("ours", ["first", "last"])
def test_another_trainer_and_its_arguments_in_any_order(tmp_path: Path, ours: str) -> None:
    order = slice(None, None, 1 if ours == "first" else -1)
    bases = (TrainingArguments, transformers.Seq2SeqTrainingArguments)[order]
    args_class = dataclasses.dataclass(type("Seq2SeqArguments", bases, {}))
    trainer_class: Any = type("Seq2SeqTrainer", (Trainer, transformers.Seq2SeqTrainer)[order], {})
    flags = ["--output_dir", str(tmp_path), "--debug", "te_precision", "activation_overflow", "--use_cpu"]
    (parsed_args,) = HfArgumentParser(args_class).parse_args_into_dataclasses([*flags, "--predict_with_generate"])
    assert parsed_args.debug == [PRECISION, OVERFLOW]
    assert parsed_args.predict_with_generate
    args = arguments(tmp_path, args_class, debug=parsed_args.debug, eval_on_start=True)
    made = trainer(args, model=llama(), kind=trainer_class)
    made.train()
    assert len(made.debug_session.layers) == 8
    with pytest.raises(ActivationOverflowError):
        trainer(args, model=Overflows(at=1), kind=trainer_class).train()
    assert not made.debug_session.running


def test_two_sessions_at_once_are_refused(tmp_path: Path) -> None:
    callback = PrecisionDebugTrainerCallback(statistics())
    with pytest.raises(OptionError, match="Remove one"):
        trainer(arguments(tmp_path), kind=Trainer, debug="te_precision", callbacks=[callback])


def test_options_of_the_trainer_add_to_the_arguments(tmp_path: Path) -> None:
    """``te_precision_config`` replaces the argument, and leaves the user's arguments as they are."""
    config = tmp_path / "my.yaml"
    config.write_text(json.dumps(statistics()))  # JSON is YAML
    args = arguments(tmp_path, TrainingArguments, debug=["te_precision"], te_precision_config="none.yaml")
    model = Net()
    made: Any = trainer(args, model=model, kind=Trainer, debug="activation_overflow", te_precision_config=str(config))
    made.train()
    assert (args.debug, made.args.debug) == ([PRECISION], [PRECISION, OVERFLOW])
    assert largest_inputs(tmp_path) == {step: model.largest(step) for step in range(4)}


@pytest.mark.parametrize("debug", ["activation_overflow", "te_precision"])
def test_data_parallel_is_refused(tmp_path: Path, debug: str) -> None:
    args = arguments(tmp_path, TrainingArguments, debug=debug)
    args._n_gpu = 2
    with pytest.raises(DataParallelError, match=r"n_gpu is 2.*torchrun"):
        trainer(args, kind=Trainer)


# --- gradient checkpointing in FP8, as in docs/transformers.md


class LoRA(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, 16, bias=False)
        self.lora_B = torch.nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def with_adapters(model: Any) -> Any:
    model.requires_grad_(False)
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return model


def checkpointing(folder: Path, *, reentrant: bool | None, lora: bool = False) -> Any:
    args = arguments(
        folder,
        TrainingArguments,
        debug="te_precision",
        max_steps=1,
        gradient_checkpointing=reentrant is not None,
        gradient_checkpointing_kwargs=None if reentrant is None else {"use_reentrant": reentrant},
    )
    model = llama(of_te=False)
    return trainer(args, model=with_adapters(model) if lora else model, kind=Trainer)


def warnings_of_checkpoints(caplog: pytest.LogCaptureFixture) -> list[str]:
    results = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in results if text.startswith("Gradient checkpointing")]


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_a_reentrant_checkpoint_trains_and_recomputes_without_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the products of the seven checkpointed layers only the first forward's are FP8; `precision` reports both."""
    run: Counter[tuple[str, bool]] = Counter()
    multiply = te_linear.general_gemm

    def spy(first: Any, second: Any, *arguments: Any, **options: Any) -> Any:
        parts = [getattr(first, f"{way}_gemm_tensor", first) for way in ("rowwise", "columnwise")]  # of a debug tensor
        run[options.get("layout", "TN"), any(isinstance(part, Float8TensorStorage) for part in parts)] += 1
        return multiply(first, second, *arguments, **options)

    monkeypatch.setattr(te_linear, "general_gemm", spy)
    made = checkpointing(tmp_path, reentrant=True)
    made.train()
    assert made.state.global_step == 1
    assert run == {
        ("TN", True): 7 + 1,  # and the head, which no checkpoint computes again
        ("TN", False): 7,
        ("NN", True): 1,
        ("NN", False): 7,
        ("NT", True): 1,
        ("NT", False): 7,
    }
    stated = list(made.debug_session.precision)
    assert len(stated) == 8 * 3
    for entry in stated:
        checkpointed = {"FP8 E4M3 -> BF16"} if entry.gemm == "fprop" else {"BF16"}
        formats = {"FP8 E4M3", "FP8 E5M2"} if entry.layer == "lm_head" else checkpointed
        assert set(entry.operands.values()) <= formats, entry
        assert entry.seen, entry
    coverage = made.debug_session.coverage()
    of_te = [product for product in coverage if product.family == "te" and not product.is_low]
    assert {product.reason for product in of_te} == {Reason.RECOMPUTED}
    assert len({product.layer for product in of_te}) == 7
    [text] = warnings_of_checkpoints(caplog)
    assert text.startswith("Gradient checkpointing (use_reentrant=True) recomputes the forward of 7 layers outside")
    assert "use transformer_engine.pytorch.checkpoint" in text
    assert "(a checkpoint recomputes it outside of te.autocast)" in str(coverage)


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_adapters_on_a_checkpointed_model_have_the_true_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = checkpointing(tmp_path, reentrant=True, lora=True)
    made.train()
    coverage = made.debug_session.coverage()
    reasons = {product.layer: product.reason for product in coverage if product.family == "te" and product.macs}
    assert reasons.pop("lm_head") is None
    assert len(reasons) == 11
    assert set(reasons.values()) == {Reason.RECOMPUTED}
    assert coverage.share("fp8") < 0.2
    [text] = warnings_of_checkpoints(caplog)
    assert "of 11 layers" in text


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_the_checkpoint_that_the_warning_names_recomputes_in_fp8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = checkpointing(tmp_path, reentrant=None)
    forwards: list[str] = []
    made.model.model.layers[0].mlp.register_forward_hook(lambda *_: forwards.append("mlp"))
    made.model.gradient_checkpointing_enable()
    made.model._set_gradient_checkpointing(gradient_checkpointing_func=te.checkpoint)
    made.train()
    assert len(forwards) == 2, "the layer was computed again"
    entries = list(made.debug_session.precision)
    assert len(entries) == 8 * 3
    assert all(text.startswith("FP8 ") and "->" not in text for entry in entries for text in entry.operands.values())
    assert not warnings_of_checkpoints(caplog)
