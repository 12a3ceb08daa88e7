"""Cost of debugging in a training step: this project's session and Transformer Engine's own features.

    python benchmarks/step.py [--json] [--layers 4 --hidden 256 --sequence 256 --batch 8] [--seconds 900]
    python benchmarks/step.py --default [--hidden 128 --sequence 128 --batch 4]

The model of examples/byte_lm.py trains in FP8, with all of its Transformer Engine layers and all six tensors of each
watched in every step. Columns:
  none       the step without debugging.
  ours       the step in an InspectSession with observe="debug", from the forward to the end of session.step().
  fused      the step in an InspectSession with observe="fused", with the statistics of the tensors that can be had on
             the fused path: all but the output of fc1 and the dgrad of fc2. The results of norms and of activation
             functions, which are written in FP8 alone, are computed once more.
  te         the step with the same YAML under plain nvidia-dlfw-inspect and Transformer Engine's feature folder, to the
             end of debug_api.step(); its torch.compile on or off, whichever is faster (te_mode). Both write their
             statistics to a file.
  *_added_*  added to a step without debugging: one process and one model; a step of each, after one that warms up,
             paired with a step of `none`. The median of the pairs with its interval, see in_turn.py.
  *_processor_percent  the same by processor time.
  *_ns_per_element  the added time over the elements of the watched high-precision tensors of a step.
Two cases have nothing to compute: a session without collection steps in this range, and a session without features.

With --default, the cost of the default config for a whole training instead. A Llama of transformers trains, converted
by Accelerate. The parts of a training are measured in pairs with steps without a session: start, first step and stop
together; a collection step; another step. The cost of 200 and of 1,000 steps is their sum.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import yaml
from in_turn import Interval, Pairs, Way, add_arguments, in_turn
from measuring import (
    FP8_STATISTICS,
    MODES,
    TENSOR_STATISTICS,
    Mode,
    Spent,
    arguments,
    as_in_a_long_run,
    llama,
    machine,
    progress,
    report,
    spent,
    upstream_functions,
)

from te_precision_callbacks import reference
from te_precision_callbacks.base.vocabulary import Observe
from te_precision_callbacks.config.loading import DEFAULT_CONFIG
from te_precision_callbacks.config.steps import EARLY_STEPS
from te_precision_callbacks.statistics.schedule import Schedule

TENSORS = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
QUANTIZED_TENSORS = TENSORS[:3]
QUIET = ("nothing due", "layers without features")
FUSED = {"fused, tensor statistics": False, "fused, tensor and FP8 statistics": True}
"""The cases on the fused path, and whether they have FP8 statistics."""
COLUMNS = (
    "case",
    "none_ms",
    "ours_added_percent",
    "ours_processor_percent",
    "claim",
    "te_added_percent",
    "te_mode",
    "ratio",
    "ours_ns_per_element",
    "te_ns_per_element",
)

DEFAULT_COLUMNS = ("case", "none_processor_ms", "ours_processor_percent", "claim", "collection_steps", "pairs")

CLAIMS = {"fused, tensor statistics": 3.0, "fused, tensor and FP8 statistics": 4.0}
"""What ours adds at most, in percent of a step without debugging."""

_SHARE = 0.02
"""Half of the interval of a way that is resolved, of the ratio."""

DEFAULT_CLAIMS = {200: 5.0, 1000: 2.0}
"""Steps of a training -> what the default config adds at most, in percent."""

_STEPS = 5
"""Other steps whose median is one side of a pair."""

_EXAMPLE = Path(__file__).parent.parent / "examples" / "byte_lm.py"

Config = dict[str, Any]
EndOfStep = Callable[[], object]
Run = Callable[[], AbstractContextManager[EndOfStep]]


def config(*, fp8: bool = False, **schedule: int) -> Config:
    """The statistics of all tensors of all layers."""
    return {"statistics": _section(".*", TENSORS, fp8=fp8, **schedule)}


def fused_config(*, fp8: bool = False) -> Config:
    """The statistics of the tensors of all layers that can be had on the fused path."""
    from te_precision_callbacks.instrumentation.fused import HIGH_PRECISION_ON_FUSED_PATH

    of_class = HIGH_PRECISION_ON_FUSED_PATH
    has = {
        "layernorm_qkv": of_class["LayerNormLinear"][0],
        "proj": of_class["Linear"][0],
        **dict(zip(("fc1", "fc2"), of_class["LayerNormMLP"], strict=True)),
    }
    return {layer: _section(f"{layer}$", sorted(tensors), fp8=fp8) for layer, tensors in has.items()}


def _section(layers: str, tensors: list[str], *, fp8: bool, **schedule: int) -> Config:
    features: Config = {"LogTensorStats": {"tensors": tensors, "stats": list(TENSOR_STATISTICS)}}
    if fp8:
        operands = [tensor for tensor in tensors if tensor in QUANTIZED_TENSORS]
        features["LogFp8TensorStats"] = {"tensors": operands, "stats": [*FP8_STATISTICS, "overflows%"]}
    return {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": layers},
        "transformer_engine": {name: {"enabled": True, **keys, **schedule} for name, keys in features.items()},
    }


class Training:
    """The model of the example, trained by a plain loop.

    Args:
        layers, hidden, sequence, batch: the sizes.
        device: where it trains.
    """

    def __init__(self, layers: int, hidden: int, sequence: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = self._model(layers, hidden, sequence)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        data = _example().StandardLibraryBytes(window=sequence, count=16 * batch)
        self._batches = list(torch.utils.data.DataLoader(data, batch_size=batch))
        self._next = 0

    def step(self, end: EndOfStep) -> None:
        """One optimizer step, and what comes at its end."""
        batch = self._batches[self._next % len(self._batches)].to(self.device)
        self._next += 1
        logits = self._logits(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        end()

    def _model(self, layers: int, hidden: int, sequence: int) -> torch.nn.Module:
        model: Any = _example().ByteLanguageModel(layers=layers, hidden=hidden, window=sequence).to(self.device)
        model.configure_model()
        return model  # type: ignore[no-any-return]

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits

    @contextlib.contextmanager
    def within(self, run: Run) -> Iterator[Callable[[], None]]:
        """A step in a way to run."""
        with run() as end:
            yield lambda: self.step(end)


class LlamaTraining(Training):
    """A Llama of transformers, converted to Transformer Engine by Accelerate."""

    def _model(self, layers: int, hidden: int, sequence: int) -> torch.nn.Module:
        from accelerate import Accelerator
        from accelerate.utils.transformer_engine import convert_model

        Accelerator(cpu=self.device.type == "cpu")  # the conversion needs its state
        model: torch.nn.Module = llama(layers, hidden, sequence, vocabulary=256)
        with torch.no_grad():
            convert_model(model)
        return model.to(self.device)

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=True):
            logits: torch.Tensor = self.model(tokens).logits
        return logits


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("byte_lm", _EXAMPLE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(_EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the ways to run -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without() -> Iterator[EndOfStep]:
    """No debugging at all."""
    yield lambda: None


@contextlib.contextmanager
def with_ours(
    model: torch.nn.Module, path: Path | None, observe: Observe = "auto", **keywords: Any
) -> Iterator[EndOfStep]:
    """A session of this project."""
    from te_precision_callbacks.session import InspectSession

    with (
        tempfile.TemporaryDirectory() as log_dir,
        InspectSession(path, model=model, log_dir=log_dir, observe=observe, quiet=True, **keywords) as session,
    ):
        yield session.step


@contextlib.contextmanager
def with_upstream(model: torch.nn.Module, path: Path, mode: Mode) -> Iterator[EndOfStep]:
    """Plain nvidia-dlfw-inspect with Transformer Engine's own features, in a state as if nothing had run before."""
    import nvdlfw_inspect.api as debug_api
    import transformer_engine.debug.features as upstream_features
    from nvdlfw_inspect.registry import Registry
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    from te_precision_callbacks.instrumentation.upstream import Snapshot, reset_schedule
    from te_precision_callbacks.layers.naming import named_te_modules

    snapshot = Snapshot()
    modules = named_te_modules(model)
    with tempfile.TemporaryDirectory() as log_dir, upstream_functions(mode):
        try:
            Registry.data.clear()  # this project's features among them
            debug_api.initialize(str(path), feature_dirs=[str(upstream_features.__path__[0])], log_dir=log_dir)
            if any(type(feature).__module__.startswith("te_precision_callbacks") for feature in _features(debug_api)):
                raise RuntimeError("Transformer Engine's side runs with features of this project.")
            TEDebugState.debug_enabled = None
            TEDebugState.initialize()
            for named in modules:
                # infer_and_assign_layer_names gives all layers one name: their layer_number is 1.
                snapshot.remember_module(named.module)
                named.module.__dict__["name"] = named.name
                reset_schedule(named.module)
            yield debug_api.step
        finally:
            debug_api.end_debug()
            snapshot.restore()


def _features(debug_api: Any) -> list[Any]:
    api = debug_api.DEBUG_MANAGER._namespace_apis["transformer_engine"]
    return [api, *api.namespace_features.values()]


def watched_elements(training: Training, counting: Config, folder: Path) -> int:
    """The elements of the tensors that are watched in a step, counted by a statistic of this project."""
    from te_precision_callbacks.session import InspectSession

    for section in counting.values():
        section["transformer_engine"]["LogTensorStats"]["stats"] = ["numel"]
    with InspectSession(counting, model=training.model, log_dir=folder) as session:
        training.step(lambda: None)
        records = session.step()
    return round(sum(row.value for row in records or ()))


# --- the measurement -------------------------------------------------------------------------------------------------


def measure(training: Training, runs: Mapping[str, Run], seconds: float, least: int) -> dict[str, Pairs]:
    """Time steps of all configurations, each paired with a step without debugging."""
    ways: dict[str, Way] = {name: functools.partial(training.within, run) for name, run in runs.items()}
    base = functools.partial(training.within, without)
    return in_turn(ways, base, training.device, share=_SHARE, seconds=seconds, least=least)


def _compared(key: str, times: dict[str, Pairs], elements: int) -> dict[str, Any]:
    """A case with both sides."""
    ours = times[f"ours, {key}"]
    by_mode = {mode: times[f"te, {key}, {mode}"] for mode in MODES}
    added = {mode: pairs.added() for mode, pairs in by_mode.items()}
    mode = min(MODES, key=lambda mode: added[mode].value)
    te = added[mode]
    return {
        **_alone(key, ours, elements),
        "te_added_ms": te,
        "te_added_percent": by_mode[mode].ratio().scaled(100, -1),
        "te_mode": mode,
        "te_eager_added_ms": added["eager"],
        "te_compile_added_ms": added["torch.compile"],
        "ratio": te.value / ours.added().value,
        "te_ns_per_element": 1e6 * te.value / elements,
    }


def _alone(name: str, ours: Pairs, elements: int = 0) -> dict[str, Any]:
    """Return a case without Transformer Engine's side."""
    added, percent = ours.added(), ours.ratio().scaled(100, -1)
    return {
        "case": name,
        "none_ms": ours.base(),
        "none_processor_ms": ours.base("processor"),
        "ours_added_ms": added,
        "ours_added_percent": percent,
        "ours_processor_percent": ours.ratio("processor").scaled(100, -1),
        "claim": percent.beside(CLAIMS.get(name), " %"),
        "pairs": len(ours.ways),
        **({"watched_elements": elements, "ours_ns_per_element": 1e6 * added.value / elements} if elements else {}),
    }


def run_all(training: Training, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All cases."""
    disabled = config()
    disabled["statistics"]["enabled"] = False
    configs = {
        "tensor statistics": config(),
        "tensor and FP8 statistics": config(fp8=True),
        QUIET[0]: config(fp8=True, start_step=10**9),
        QUIET[1]: disabled,
    }
    model = training.model
    runs: dict[str, Run] = {}
    for key, sections in configs.items():
        path = folder / f"{key.replace(' ', '_')}.yaml"
        path.write_text(yaml.safe_dump(sections))
        runs[key if key in QUIET else f"ours, {key}"] = functools.partial(with_ours, model, path, "debug")
        for mode in () if key in QUIET else MODES:
            runs[f"te, {key}, {mode}"] = functools.partial(with_upstream, model, path, mode)
    for key, fp8 in FUSED.items():
        path = folder / f"{key.replace(' ', '_')}.yaml"
        path.write_text(yaml.safe_dump(fused_config(fp8=fp8)))
        runs[key] = functools.partial(with_ours, model, path, "fused")
    elements = watched_elements(training, config(), folder)
    on_fused_path = watched_elements(training, fused_config(), folder)
    progress(f"{elements:,} elements of watched tensors a step, {on_fused_path:,} on the fused path")
    times = measure(training, runs, options.seconds, options.least)
    return [
        *(_compared(key, times, elements) for key in configs if key not in QUIET),
        *(_alone(key, times[key], on_fused_path) for key in FUSED),
        *(_alone(key, times[key]) for key in QUIET),
    ]


def run_default(training: Training, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure the parts of a training with the default config, and sum them to whole trainings."""
    session = functools.partial(with_ours, training.model, None)

    @contextlib.contextmanager
    def whole() -> Iterator[Callable[[], None]]:
        def run() -> None:
            with session() as end:
                training.step(end)

        yield run

    once: dict[str, Way] = {
        "start, first step and stop": whole,
        "a collection step": functools.partial(training.within, session),
    }
    base, others = functools.partial(training.within, without), Pairs()
    results = in_turn(once, base, training.device, share=_SHARE, seconds=options.seconds, least=options.least)
    for number in range(3 * options.least):
        sides: list[tuple[list[Spent], Run]]
        sides = [(others.ways, functools.partial(session, early_steps=False)), (others.bases, without)]
        for times, run in sides if number % 2 else sides[::-1]:
            with training.within(run) as step:
                step()
                times.append(_middle([spent(step, training.device) for _ in range(_STEPS)]))
        progress(f"another step, pair {number + 1}: {others.latest:.3f}")
    results["another step"] = others
    first, collection, other = (pairs.ratio("processor").scaled(100, -1) for pairs in results.values())
    schedule = Schedule.of(
        DEFAULT_CONFIG["default_statistics"]["transformer_engine"]["LogTensorStats"]["freq"]
    ).with_early(EARLY_STEPS)
    wholes = []
    for steps, claim in DEFAULT_CLAIMS.items():
        collected = sum(schedule.at(iteration)[0] for iteration in range(1, steps))
        counts = ((first, 1), (collection, collected), (other, steps - 1 - collected))
        low, high, value = (
            sum(getattr(part, end) * count for part, count in counts) / steps for end in ("low", "high", "value")
        )
        added = Interval(value, low, high)
        wholes.append(
            {
                "case": f"{steps} steps",
                "ours_processor_percent": added,
                "claim": added.beside(claim, " %"),
                "collection_steps": collected + 1,
            }
        )
    parts = zip(results.items(), (first, collection, other), strict=True)
    return [*(_alone(name, pairs) | {"ours_processor_percent": part} for (name, pairs), part in parts), *wholes]


def _middle(times: list[Spent]) -> Spent:
    """The median by each clock."""
    return Spent(statistics.median(time.wall for time in times), statistics.median(time.processor for time in times))


def _options(given: list[str] | None, description: str | None, layers: int, seconds: float) -> argparse.Namespace:
    parser = arguments(description)
    parser.add_argument("--layers", type=int, default=layers, help=f"Transformer layers (default: {layers})")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64 (default: 256)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence (default: 256)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a batch (default: 8)")
    parser.add_argument("--default", action="store_true", help="what the default config adds to a whole training")
    add_arguments(parser, seconds, "it may take")
    return parser.parse_args(given)


def of_training(
    given: list[str] | None,
    description: str | None,
    cases_of: Callable[[Training, argparse.Namespace, Path], list[dict[str, Any]]],
    *,
    layers: int,
    seconds: float,
) -> tuple[list[dict[str, Any]], bool]:
    """A benchmark of training steps: its cases, with sizes and machine, and whether they are wanted as JSON.

    Args:
        given: of the command line; None: the process's.
        description: of the benchmark.
        cases_of: the training, the options and a folder for files -> cases.
        layers, seconds: where nothing else is given.
    """
    options = _options(given, description, layers, seconds)
    reference.install_where_needed()
    import transformer_engine.pytorch  # noqa: F401

    # What a session without features says, and what Lightning says of a model that it does not train.
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = machine(device)
    progress(described) if options.json else print(described, end="\n\n")
    kind = LlamaTraining if options.default else Training
    training = kind(options.layers, options.hidden, options.sequence, options.batch, device)
    with tempfile.TemporaryDirectory() as folder, as_in_a_long_run():
        cases = (run_default if options.default else cases_of)(training, options, Path(folder))
    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "sequence", "batch")}
    return [{**case, **sizes, "machine": described} for case in cases], options.json


def main(given: list[str] | None = None) -> None:
    cases, as_json = of_training(given, __doc__, run_all, layers=4, seconds=900)
    if "watched_elements" not in cases[0]:
        report(
            cases, DEFAULT_COLUMNS, "Added: percent of a step without a session, and of the training.", as_json=as_json
        )
        return
    notes = (
        f"{cases[0]['watched_elements']:,} elements of watched tensors a step. Added: medians of pairs of steps, with"
        " their 95 % intervals. te: the\nfaster of its two modes."
    )
    report(cases, COLUMNS, notes, as_json=as_json)


if __name__ == "__main__":
    main()
