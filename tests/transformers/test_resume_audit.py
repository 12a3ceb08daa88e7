"""The audit of a resume in trainings of the unmodified Trainer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from te_precision_callbacks import PrecisionDebugTrainerCallback
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs.fingerprints import FILE_NAME
from tests.capability import any_capability, stand_for
from tests.conftest import statistics
from tests.session.test_resume_audit import MISSING, RECIPES, findings, warned
from tests.transformers.models import Net, arguments, llama, trainer

WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.usefixtures("trusted_checkpoints")


def train(
    folder: Path, model: torch.nn.Module, steps: int, *, resume: bool = False, **keywords: Any
) -> PrecisionDebugTrainerCallback:
    callback = PrecisionDebugTrainerCallback(statistics(), **keywords)
    args = arguments(
        folder, per_device_train_batch_size=32, max_steps=steps, save_strategy="steps", save_steps=2, learning_rate=1e-4
    )
    trainer(args, callback, model=model).train(resume_from_checkpoint=resume)
    return callback


def resumed(folder: Path, model: torch.nn.Module, **keywords: Any) -> PrecisionDebugTrainerCallback:
    return train(folder, model, 4, resume=True, **keywords)


def in_shards(checkpoint: Path) -> None:
    """Write the weights anew as those of a large model are: in several files, with an index."""
    state = safetensors.torch.load_file(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).unlink()
    files = {key: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, key in enumerate(sorted(state))}
    for name in set(files.values()):
        part = {key: value for key, value in state.items() if files[key] == name}
        safetensors.torch.save_file(part, checkpoint / name, metadata={"format": "pt"})
    (checkpoint / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_a_good_resume_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    recipe, capability = RECIPES[name]
    with any_capability():
        stand_for(capability)
        train(tmp_path, Net(recipe), 2)
        callback = resumed(tmp_path, Net(recipe), strict=True)
    assert (tmp_path / "checkpoint-2" / FILE_NAME).exists()
    assert findings(callback.session.resume_report) == []
    assert callback.session.iteration == 4
    assert warned(caplog) == []


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_layers_that_accelerate_converts_get_the_state_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer loads before Accelerate converts, and leaves the state of all layers out as unexpected.

    From one file where it is refused here; from one file it is restored after evaluations in FP8, below.
    """
    train(tmp_path, llama(of_te=False), 2)
    checkpoint = tmp_path / "checkpoint-2"
    saved = safetensors.torch.load_file(next(checkpoint.glob("*.safetensors")))
    assert any(key.endswith("_extra_state") and state.numel() for key, state in saved.items())

    with monkeypatch.context() as untrusted:
        untrusted.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE")
        callback = resumed(tmp_path, llama(of_te=False))
    assert [text.startswith(MISSING) for text in findings(callback.session.resume_report)] == [True]
    (refused,) = [record.message for record in caplog.records if record.name.endswith("transformers.restoring")]
    assert "of 8 of 8 layers, which the Trainer loads before Accelerate converts the layers" in refused
    assert "set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1" in refused

    caplog.clear()
    shutil.rmtree(tmp_path / "checkpoint-4")
    in_shards(checkpoint)
    callback = resumed(tmp_path, llama(of_te=False), strict=True)
    assert findings(callback.session.resume_report) == []
    assert warned(caplog) == []


class Breaks(Net):
    """Its activations are NaN from a step on, which leaves the loss and the weights as they are."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if len(self.trained_on) >= 5:
            self.net[0](inputs * float("nan"))
        return super().forward(inputs, labels)


@pytest.mark.parametrize(("limit", "named"), [(None, 4), (2, None)])
def test_a_finding_names_no_deleted_checkpoint(tmp_path: Path, limit: int | None, named: int | None) -> None:
    callback = PrecisionDebugTrainerCallback(statistics(stats=["nonfinite_num"]), log_dir=tmp_path / "logs")
    args = arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=1, save_total_limit=limit)
    trainer(args, callback, model=Breaks()).train()
    (finding,) = callback.session.findings.wrong
    assert (finding.since, finding.last_good, finding.checkpoint) == (5, 4, named)
    assert diagnose(tmp_path / "logs") == callback.session.findings


@pytest.mark.usefixtures("fp8_of_accelerate")
@pytest.mark.parametrize("in_fp8", [False, True])
def test_an_evaluation_before_each_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, in_fp8: bool
) -> None:
    """Transformer Engine saves no state of a module whose last forward ran outside of FP8."""
    monkeypatch.setenv("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", str(int(in_fp8)))
    keywords: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    callback = PrecisionDebugTrainerCallback(statistics(), log_dir=tmp_path / "logs")
    trainer(arguments(tmp_path, max_steps=4, **keywords), callback, model=llama(of_te=False)).train()
    at_save = [text for text in warned(caplog) if "does not have the scales" in text]
    assert len(at_save) == (not in_fp8)
    assert all("all 8 layers" in text and "fp8_use_autocast_during_eval: true" in text for text in at_save)

    shutil.rmtree(tmp_path / "checkpoint-4")
    callback = resumed(tmp_path, llama(of_te=False))
    result = findings(callback.session.resume_report)
    assert [text.startswith("The checkpoint has no scales and amax histories") for text in result] == [True] * (
        not in_fp8
    )
