"""``PrecisionSearch`` in Lightning's and the Hugging Face Trainer: the training goes on bit for bit."""

import logging
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.loggers import CSVLogger

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.search.lightning import PrecisionSearch
from te_precision_callbacks.search.transformers import PrecisionSearch as PrecisionTrainerSearch
from tests.lightning.models import Plain, loader
from tests.search.models import RECIPES
from tests.transformers.models import Net, arguments, trainer

OPTIONS: dict[str, Any] = {"low_share": 0.5, "seeds": 1, "steps": 2, "progress": False}


class Searched(Plain):
    """In a recipe, with dropout, under Adam."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=RECIPES["delayed"]()):
            return super().training_step(torch.nn.functional.dropout(batch, 0.1), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(folder: Path, *callbacks: L.Callback, model: type[Searched] = Searched) -> tuple[dict[str, torch.Tensor], str]:
    torch.manual_seed(1)
    training = model()
    logger = CSVLogger(folder)
    fitting = L.Trainer(
        max_epochs=1,
        logger=logger,
        callbacks=list(callbacks),
        accelerator="cpu",
        precision="bf16-mixed",
        accumulate_grad_batches=1,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fitting.fit(training, loader(6, 16))
    return tensors_of(training.state_dict()), (Path(logger.log_dir) / "metrics.csv").read_text()


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters, and the scales and histories in Transformer Engine's pickled state."""
    tensors = {}
    for name, value in state.items():
        parts = pickle.loads(value.numpy().tobytes()) if name.endswith("extra_state") else {"": value}
        tensors |= {f"{name} {part}": tensor for part, tensor in parts.items() if isinstance(tensor, torch.Tensor)}
    return tensors


def test_lightning_goes_on_bit_for_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, metrics = fit(tmp_path / "plain")
    callback = PrecisionSearch(4, tmp_path / "search", **OPTIONS)
    with caplog.at_level(logging.INFO):
        searched, with_search = fit(tmp_path / "searched", callback)
    assert any("amax_history" in name for name in plain)
    assert [name for name in plain if not torch.equal(plain[name], searched[name])] == []
    assert callback.result.confirmation.choice.pairs == 1
    assert (tmp_path / "search" / "config.yaml").exists()
    assert "In high precision: " in caplog.text
    assert "te_search/low_share" in with_search.splitlines()[0]
    assert "te_search" not in metrics
    counted = [line.split(",")[0] for line in with_search.splitlines()[1:] if line.split(",")[0]]
    assert counted == [f"{number}.0" for number in range(6)]  # not those of the search


def test_a_failed_search_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = PrecisionSearch(4, tmp_path / "search", **OPTIONS)
    fit(tmp_path, PrecisionDebugCallback(), callback)
    assert callback.result is None
    assert "The precision search failed; the training goes on: A debug session is running" in caplog.text


def test_an_optimizer_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = PrecisionSearch(4, tmp_path / "search", **OPTIONS)

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is None:  # Lightning passes one, the search does not
                raise ValueError("needs a closure")
            return super().step(closure)

    class WithOdd(Searched):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Odd(self.parameters(), lr=0.01)

    fit(tmp_path, callback, model=WithOdd)
    assert callback.result is None
    assert "the training goes on: The step of optimizer= failed: ValueError: needs a closure" in caplog.text


def train(folder: Path, *callbacks: Any) -> tuple[dict[str, Any], list[Any]]:
    model = Net(RECIPES["current"]())
    training = trainer(arguments(folder, max_steps=6, seed=1, per_device_train_batch_size=16), *callbacks, model=model)
    training.train()
    return dict(model.named_parameters()), training.state.log_history


def test_the_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plain, history = train(tmp_path / "plain")
    callback = PrecisionTrainerSearch(4, tmp_path / "search", **OPTIONS)
    searched, with_search = train(tmp_path / "searched", callback)
    assert [name for name in plain if not torch.equal(plain[name], searched[name])] == []
    assert callback.result.confirmation.choice.pairs == 1
    assert (tmp_path / "search" / "megatron.yaml").exists()
    assert [entry["step"] for entry in with_search if "te_search/cosine" in entry] == [4]
    assert [e["loss"] for e in history if "loss" in e] == [e["loss"] for e in with_search if "loss" in e]


def test_a_training_that_ends_before_the_search_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "fit", PrecisionSearch(60, tmp_path / "search", **OPTIONS))
    train(tmp_path / "train", PrecisionTrainerSearch(60, tmp_path / "search", **OPTIONS))
    text = "has not run: it is due before step 60, and the training ended after 6 steps"
    assert caplog.text.count(text) == 2


def test_wrong_options_are_refused_before_the_training() -> None:
    for options, message in (
        ({}, r"step=60: the search needs the batches of 61 steps before it"),
        ({"seeds": 0}, "needs a budget"),
        ({"lowshare": 1}, "PrecisionSearch: got an unexpected keyword argument 'lowshare'"),
    ):
        budget = {} if message == "needs a budget" else {"cosine": 0.9}
        with pytest.raises(OptionError, match=message):
            PrecisionSearch(60, **budget, **options)
