"""``SearchAtStep`` in Lightning, the Hugging Face Trainer and Accelerate: the training goes on bit for bit."""

import logging
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from lightning.pytorch.loggers import CSVLogger

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.search import SearchAtStep
from tests.docs.pages import blocks
from tests.lightning.models import Plain, loader
from tests.search.models import RECIPES, batches, closure_of
from tests.search.models import Net as SearchNet
from tests.transformers.models import Net, arguments
from tests.transformers.models import trainer as make_trainer

CREATION, LIGHTNING, TRAINER, ACCELERATE = blocks("docs/search.md", "python")[2:]
"""The code of the page."""


def at_step(folder: Path, step: int = 4) -> SearchAtStep:
    return SearchAtStep(step, folder=folder / "search", low_share=0.5, seeds=1, steps=2, progress=False)


def callback(search: SearchAtStep) -> L.Callback:
    names: dict[str, Any] = {"at_step": search, "L": L}
    exec(LIGHTNING, names)
    made: L.Callback = names["Search"]()
    return made


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
    search = at_step(tmp_path)
    with caplog.at_level(logging.INFO):
        searched, with_search = fit(tmp_path / "searched", callback(search))
    assert any("amax_history" in name for name in plain)
    assert [name for name in plain if not torch.equal(plain[name], searched[name])] == []
    assert search.result is not None
    assert search.result.confirmation is not None
    assert search.result.confirmation.choice.pairs == 1
    assert (tmp_path / "search" / "config.yaml").exists()
    assert "In high precision: " in caplog.text
    assert with_search == metrics


def test_a_failed_search_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    search = at_step(tmp_path)
    fit(tmp_path, PrecisionDebugCallback(), callback(search))
    assert search.result is None
    assert "The precision search failed; the training goes on: A debug session is running" in caplog.text


def test_an_optimizer_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is None:  # Lightning passes one, the search does not
                raise ValueError("needs a closure")
            return super().step(closure)

    class WithOdd(Searched):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Odd(self.parameters(), lr=0.01)

    search = at_step(tmp_path)
    fit(tmp_path, callback(search), model=WithOdd)
    assert search.result is None
    assert "the training goes on: The step of optimizer= failed: ValueError: needs a closure" in caplog.text


def train(folder: Path, search: SearchAtStep | None = None) -> tuple[dict[str, Any], list[Any]]:
    import transformers

    model = Net(RECIPES["current"]())
    training = make_trainer(arguments(folder, max_steps=6, seed=1, per_device_train_batch_size=16), model=model)
    if search is not None:
        names: dict[str, Any] = {"at_step": search, "transformers": transformers}
        exec(TRAINER, names)
        training.__class__ = type("Searching", (names["SearchingTrainer"], type(training)), {})
    training.train()
    return dict(model.named_parameters()), training.state.log_history


def test_the_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plain, history = train(tmp_path / "plain")
    search = at_step(tmp_path)
    searched, with_search = train(tmp_path / "searched", search)
    assert [name for name in plain if not torch.equal(plain[name], searched[name])] == []
    assert search.result is not None
    assert search.result.confirmation is not None
    assert search.result.confirmation.choice.pairs == 1
    assert (tmp_path / "search" / "megatron.yaml").exists()
    assert [e["loss"] for e in history if "loss" in e] == [e["loss"] for e in with_search if "loss" in e]


def test_accelerate_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With Accelerate's wrapper of the optimizer."""
    parameters = []
    search = at_step(tmp_path)
    for searches in (False, True):
        accelerator = Accelerator(cpu=True)
        net = SearchNet(RECIPES["current"](), blocks=1)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        closure = closure_of(model)
        names = {"model": model, "closure": closure, "optimizer": optimizer}
        names["at_step"] = search if searches else lambda *arguments: None
        names |= {"accelerator": accelerator, "loader": [batch for batch, _ in zip(batches(), range(6), strict=False)]}
        exec(ACCELERATE, names)
        parameters.append([parameter.detach() for parameter in model.parameters()])
    assert search.result is not None
    assert search.result.confirmation is not None
    assert all(map(torch.equal, *parameters))


def test_too_few_batches_before_a_resumed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = SearchNet(RECIPES["current"](), blocks=1)
    search = at_step(tmp_path)
    for step, batch in zip((3, 4, 5), batches(), strict=False):
        search(step, batch, net, closure_of(net))
    assert search.result is not None, "without an optimizer it needs one batch"
    search = at_step(tmp_path)
    for step, batch in zip((3, 4, 5), batches(), strict=False):
        search(step, batch, net, closure_of(net), torch.optim.SGD(net.parameters()))
    assert search.result is None
    assert "the training goes on: batches= ended after 1, but the search needs 3" in caplog.text


def test_wrong_options_are_refused_before_the_training() -> None:
    exec(CREATION, {})
    with pytest.raises(OptionError, match=r"step=60: the search needs the batches of 61 steps before it"):
        SearchAtStep(60, cosine=0.9)
    with pytest.raises(OptionError, match="needs a budget"):
        SearchAtStep(60, seeds=0)
    with pytest.raises(PrecisionDebugError, match="There is no device 'h20'"):
        SearchAtStep(100, cosine=0.9, device="h20")
    with pytest.raises(TypeError, match="unexpected keyword argument 'lowshare'"):
        SearchAtStep(60, cosine=0.9, lowshare=1)
