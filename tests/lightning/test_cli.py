"""The callback in the YAML of a LightningCLI: every option, for each jsonargparse from 4.40 on that is installed."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from transformer_engine.debug.features.api import TEConfigAPIMapper

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.maps.comparing import read_requirements
from te_precision_callbacks.options import LogChoice, SessionKeywords, SessionOptions, read_statistics_log, record_limit
from te_precision_callbacks.sinks.statistics_log import DEFAULT_LIMIT
from tests.conftest import Keeper, statistics
from tests.lightning.models import Plain, loader, logged_lines

OURS = "te_precision_callbacks.PrecisionDebugCallback"


class Named(Keeper):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class OfFile(TEConfigAPIMapper):  # type: ignore[misc]
    """A feature of the user's, named by its import path."""


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(2)


def command_line(folder: Path, class_path: str, **options: Any) -> PrecisionDebugCallback:
    content = {
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": str(folder),
            "callbacks": [{"class_path": class_path, "init_args": options}],
        }
    }
    text = yaml.safe_dump(content).replace("'off'", "off")  # as users write it
    (folder / "trainer.yaml").write_text(text)
    arguments = ["fit", "--config", str(folder / "trainer.yaml")]
    cli = LightningCLI(Plain, Data, args=arguments, save_config_callback=None, seed_everything_default=False)
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, PrecisionDebugCallback))


@pytest.fixture(autouse=True)
def of_pytest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.mark.parametrize(
    ("class_path", "config"),
    [
        (OURS, "path"),
        ("te_precision_callbacks.lightning.PrecisionDebugCallback", "mapping"),
        (OURS, "null"),
    ],
)
def test_the_config_is_a_path_a_mapping_or_null(tmp_path: Path, class_path: str, config: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(statistics()))
    given = {"path": str(tmp_path / "config.yaml"), "mapping": statistics(), "null": None}[config]
    callback = command_line(tmp_path, class_path, config=given, log_dir=str(tmp_path / "debug"))
    results = {name.rpartition("_")[2] for name, _ in logged_lines(tmp_path / "debug")}
    assert ("norm" in results) is (config != "null"), "l1_norm is in the config, and not in the default one"
    assert callback.session.log_dir == tmp_path / "debug"


@pytest.mark.slow
def test_every_option_reaches_the_callback(tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    rollout = tmp_path / "rollout.json"
    rollout.write_text('{"te_precision_map": 1, "modules": {"net.0": {"weight": "FP8 E4M3"}}}')
    options: dict[str, Any] = {
        "config": statistics(),
        "step_on": "batch",
        "log_dir": str(tmp_path / "debug"),
        "feature_dirs": [str(tmp_path / "features")],
        "features": [f"{__name__}.OfFile"],
        "sinks": [{"class_path": f"{__name__}.Named", "init_args": {"name": "of the YAML"}}],
        "process_group": None,
        "reduce": False,
        "statistics_log": "all",
        "records": "64GiB",
        "start_step": 5,
        "scope": "pp1",
        "prefix": "precision",
        "log_filter": ["*/net.0/*"],
        "debug": ["activation_overflow"],
        "observe": "auto",
        "every_step": False,
        "precision_features_in_eval": False,
        "allow_unmatched": True,
        "strict": True,
        "require": {
            "share": {"fp8": 95},
            "layers": {"net": "fp8"},
            "by_step": 9,
            "same_as": {"map": str(rollout)},
            "on_broken": "warn",
        },
        "on_finding": "stop: error",
        "quiet": True,
    }
    assert set(options) - {"config", "step_on"} == set(SessionKeywords.__annotations__), "every option is here"
    callback = command_line(tmp_path, OURS, **options)
    made: SessionOptions = callback._options
    assert [(type(sink), sink.name, sink.iterations) for sink in made.sinks] == [(Named, "of the YAML", [5, 6])]
    as_given = (
        "process_group",
        "reduce",
        "records",
        "start_step",
        "prefix",
        "observe",
        "every_step",
        "precision_features_in_eval",
        "allow_unmatched",
        "strict",
    )
    expected = {name: options[name] for name in as_given} | {
        "features": (OfFile,),
        "require": read_requirements(options["require"]),
        "feature_dirs": (tmp_path / "features",),
        "debug": ("activation_overflow",),
    }
    assert {name: getattr(made, name) for name in expected} == expected
    assert list(made.log_filter) == ["*/net.0/*"]  # type: ignore[arg-type]
    assert callback._step_on == "batch"


@pytest.mark.parametrize(
    ("written", "log", "recorded"),
    [
        ("off", LogChoice("off", DEFAULT_LIMIT), 0),
        (4 << 20, LogChoice("rank0", 4 << 20), 4 << 20),
    ],
)
def test_the_words_of_yaml_and_plain_numbers_of_bytes(
    tmp_path: Path, written: str | int, log: LogChoice, recorded: int
) -> None:
    """YAML 1.1 reads ``off`` as False."""
    made = command_line(tmp_path, OURS, statistics_log=written, records=written)._options
    assert (read_statistics_log(made.statistics_log), record_limit(made.records)) == (log, recorded)


def test_a_config_that_cannot_be_used_ends_the_program_with_our_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config file .* does not exist"):
        command_line(tmp_path, OURS, config=str(tmp_path / "missing.yaml"))


def test_the_signature_names_every_option_with_its_default() -> None:
    result = inspect.signature(PrecisionDebugCallback).parameters
    assert list(result) == ["config", "step_on", *SessionKeywords.__annotations__]
    for name, default in SessionOptions.__dataclass_fields__.items():
        assert name == "config" or result[name].default == default.default, name
