"""Cost of debugging in a training step, beside Transformer Engine's own features and transformers' detector.

    python benchmarks/step.py [statistics | default | watch | gemms | overflow] [--json] [--layers 4 --hidden 256 ...]

A step with debugging and a step without it are timed in pairs, see measuring.py. *_added_percent is the median of the
pairs by wall time, *_processor_percent by processor time. With OMP_NUM_THREADS=1, no thread that waits for a core uses
processor time.

statistics  The model of examples/byte_lm.py trains in FP8, with all six tensors of all of its layers watched in every
            step. On the debug path, the other side is the same YAML under plain nvidia-dlfw-inspect and Transformer
            Engine's feature folder, to the end of debug_api.step(); both write their statistics to a file. On the fused
            path all tensors are watched but the output of fc1 and the dgrad of fc2; on a GPU, the results of norms and
            of activation functions, which are written in FP8 alone, are computed once more.
default     The default config, for a Llama of transformers that Accelerate has converted: start, first step and stop
            together; a collection step; five other steps.
watch       A step that is no collection step, for the same model: processor time of the session's own functions, as a
            share of the step that they are in. Unlike pairs of steps, that resolves 0.1 % on a busy machine; hooks that
            torch calls are not in it.
gemms       LogGemmError with default options, for the model of the example: a step in which all GEMMs are measured, and
            another one.
overflow    DebugActivationOverflow, which watches gradients too, and transformers' DebugUnderflowOverflow, which
            watches forwards and the parameters, for a Llama of transformers with AdamW, in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import runpy
import statistics as statistics_of
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from measuring import (
    FP8_STATISTICS,
    TENSOR_STATISTICS,
    Case,
    Pairs,
    Way,
    arguments,
    in_turn,
    llama,
    machine,
    progress,
    report,
    upstream_functions,
)

from te_precision_callbacks import reference
from te_precision_callbacks.base.vocabulary import Observe
from te_precision_callbacks.config.loading import DEFAULT_CONFIG

TENSORS = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
QUANTIZED_TENSORS = TENSORS[:3]
COLUMNS = {
    "case": "case",
    "without, ms": "none_ms",
    "here, % of the step": "ours_added_percent",
    "% of its processor time": "ours_processor_percent",
    "Transformer Engine or transformers, %": "upstream_added_percent",
}

_EXAMPLE = Path(__file__).parent.parent / "examples" / "byte_lm.py"

Config = dict[str, Any]
EndOfStep = Callable[[], object]
Run = Callable[[], AbstractContextManager[EndOfStep]]


def config(*, fp8: bool = False, **schedule: int) -> Config:
    """The statistics of all tensors of all layers."""
    return {"statistics": _section(".*", TENSORS, fp8=fp8, **schedule)}


def fused_config(*, fp8: bool = False, recomputed: bool = True) -> Config:
    """The statistics of the tensors of all layers that can be had on the fused path.

    Args:
        recomputed: also of results of norms and activation functions, which are computed once more.
    """
    from te_precision_callbacks.te.modules import MODULES

    has = {
        "layernorm_qkv": MODULES["LayerNormLinear"].high_precision[0],
        "proj": MODULES["Linear"].high_precision[0],
        **dict(zip(("fc1", "fc2"), MODULES["LayerNormMLP"].high_precision, strict=True)),
    }
    if not recomputed:
        for layer in ("layernorm_qkv", "fc1", "fc2"):
            has[layer] = has[layer] - {"activation"}
    return {layer: _section(f"{layer}$", sorted(tensors), fp8=fp8) for layer, tensors in has.items()}


def gemm_errors(freq: int) -> Config:
    feature = {"enabled": True, "gemms": ["fprop", "dgrad", "wgrad"], "freq": freq}
    layers = {"layer_types": ["all"]}
    return {"gemms": {"enabled": True, "layers": layers, "transformer_engine": {"LogGemmError": feature}}}


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


# --- trainings --------------------------------------------------------------------------------------------------------


class Training:
    """A model of bytes, trained by a plain loop.

    Args:
        options: the sizes.
        device: where it trains.
        model: sizes -> the model.
        loss: model and tokens of shape [batch, sequence + 1] -> loss.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        model: Callable[[argparse.Namespace], torch.nn.Module],
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = model(options).to(device)
        self._loss = loss
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        data = runpy.run_path(str(_EXAMPLE))["StandardLibraryBytes"](options.sequence, 16 * options.batch)
        self._batches = [batch.to(device) for batch in torch.utils.data.DataLoader(data, batch_size=options.batch)]
        self._next = 0

    def step(self, end: EndOfStep) -> None:
        tokens = self._batches[self._next % len(self._batches)]
        self._next += 1
        self._loss(self.model, tokens).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        end()

    @contextlib.contextmanager
    def within(self, run: Run, steps: int = 1) -> Iterator[Callable[[], None]]:
        """A step in a way to run, or several."""

        def call() -> None:
            for _ in range(steps):
                self.step(end)

        with run() as end:
            yield call


def byte_model(options: argparse.Namespace) -> torch.nn.Module:
    """The model of the example, which trains in FP8."""
    example = runpy.run_path(str(_EXAMPLE))
    model = example["ByteLanguageModel"](layers=options.layers, hidden=options.hidden, window=options.sequence)
    model.configure_model()
    return model  # type: ignore[no-any-return]


def next_byte_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def converted_llama(options: argparse.Namespace) -> torch.nn.Module:
    """A Llama of transformers, converted to Transformer Engine by Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils.transformer_engine import convert_model

    Accelerator(cpu=not torch.cuda.is_available())  # the conversion needs its state
    model = llama(options.layers, options.hidden, options.sequence, vocabulary=256)
    with torch.no_grad():
        convert_model(model)
    return model


def fp8_llama_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    import transformer_engine.pytorch as te

    def logits(inputs: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True):
            return model(inputs).logits  # type: ignore[no-any-return]

    return next_byte_loss(logits, tokens)


# --- the ways to run -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without() -> Iterator[EndOfStep]:
    yield lambda: None


@contextlib.contextmanager
def with_ours(
    model: torch.nn.Module, sections: Config | None, observe: Observe = "auto", **keywords: Any
) -> Iterator[EndOfStep]:
    from te_precision_callbacks.session import InspectSession

    with (
        tempfile.TemporaryDirectory() as log_dir,
        InspectSession(sections, model=model, log_dir=log_dir, observe=observe, quiet=True, **keywords) as session,
    ):
        yield session.step


def without_early_steps() -> Config:
    """The statistics of the default config, in a section of another name: collected in steps 0, 100, ..."""
    return {"statistics": DEFAULT_CONFIG["default_statistics"]}


@contextlib.contextmanager
def with_upstream(model: torch.nn.Module, sections: Config) -> Iterator[EndOfStep]:
    """Plain nvidia-dlfw-inspect with Transformer Engine's own features, in a state as if nothing had run before."""
    import nvdlfw_inspect.api as debug_api
    import transformer_engine.debug.features as upstream_features
    from nvdlfw_inspect.registry import Registry
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    from te_precision_callbacks.base.replaced import Replacements
    from te_precision_callbacks.instrumentation.upstream import begin_schedule, isolate_upstream
    from te_precision_callbacks.layers.naming import named_te_modules

    isolated = isolate_upstream()
    attributes = Replacements()
    modules = named_te_modules(model)
    with tempfile.TemporaryDirectory() as log_dir, upstream_functions():
        try:
            path = Path(log_dir, "config.yaml")
            path.write_text(yaml.safe_dump(sections))
            Registry.data.clear()  # this project's features among them
            debug_api.initialize(str(path), feature_dirs=[str(upstream_features.__path__[0])], log_dir=log_dir)
            api: Any = debug_api.DEBUG_MANAGER._namespace_apis["transformer_engine"]
            features = [api, *api.namespace_features.values()]
            if any(type(feature).__module__.startswith("te_precision_callbacks") for feature in features):
                raise RuntimeError("Transformer Engine's side runs with features of this project.")
            TEDebugState.debug_enabled = None
            TEDebugState.initialize()
            for named in modules:
                # infer_and_assign_layer_names gives all layers one name: their layer_number is 1.
                attributes.replace(named.module, "name", named.name)
                begin_schedule(named.module, attributes)
            yield debug_api.step
        finally:
            debug_api.end_debug()
            attributes.restore()
            isolated.close()


@contextlib.contextmanager
def with_detection(model: torch.nn.Module) -> Iterator[EndOfStep]:
    from te_precision_callbacks.overflow import DebugActivationOverflow

    with DebugActivationOverflow(model):
        yield lambda: None


@contextlib.contextmanager
def with_upstream_detection(model: torch.nn.Module) -> Iterator[EndOfStep]:
    """Attach transformers' detector, and remove its hooks, which it cannot do itself."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: dict(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield lambda: None
    finally:
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


# --- the measurement -------------------------------------------------------------------------------------------------


def measure(training: Training, runs: Mapping[str, Run], options: argparse.Namespace) -> dict[str, Pairs]:
    """Time steps of all runs, each paired with a step without debugging."""
    ways: dict[str, Way] = {name: functools.partial(training.within, run) for name, run in runs.items()}
    base = functools.partial(training.within, without)
    return in_turn(ways, base, training.device, share=0.02, seconds=options.seconds, least=options.least)


def case(name: str, ours: Pairs, upstream: Pairs | None = None) -> Case:
    return {
        "case": name,
        "none_ms": ours.base(),
        "ours_added_ms": ours.added(),
        "ours_added_percent": ours.ratio().scaled(100, -1),
        "ours_processor_percent": ours.ratio("processor").scaled(100, -1),
        "pairs": len(ours.ways),
        "upstream_added_percent": None if upstream is None else upstream.ratio().scaled(100, -1),
    }


def statistics(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """All statistics in every step, on both paths; and a session without collection steps in this range."""
    compared = {"tensor statistics": config(), "tensor and FP8 statistics": config(fp8=True)}
    others = {
        "fused, tensor statistics": fused_config(),
        "fused, tensor and FP8 statistics": fused_config(fp8=True),
        "nothing due": config(fp8=True, start_step=10**9),
    }
    training = Training(options, device, byte_model, next_byte_loss)
    runs: dict[str, Run] = {}
    for name, sections in (compared | others).items():
        path: Observe = "fused" if name.startswith("fused") else "debug"
        runs[name] = functools.partial(with_ours, training.model, sections, path)
    for name, sections in compared.items():
        runs[f"{name}, Transformer Engine"] = functools.partial(with_upstream, training.model, sections)
    times = measure(training, runs, options)
    return [case(name, times[name], times.get(f"{name}, Transformer Engine")) for name in compared | others]


def default(options: argparse.Namespace, device: torch.device) -> list[Case]:
    training = Training(options, device, converted_llama, fp8_llama_loss)
    session = functools.partial(with_ours, training.model, None)

    @contextlib.contextmanager
    def whole() -> Iterator[Callable[[], None]]:
        def run() -> None:
            with session() as end:
                training.step(end)

        yield run

    ways: dict[str, Way] = {
        "start, first step and stop": whole,
        "a collection step": functools.partial(training.within, session),
    }
    later = functools.partial(with_ours, training.model, without_early_steps())
    others: dict[str, Way] = {"five other steps": functools.partial(training.within, later, 5)}
    cases = []
    for timed, steps in ((ways, 1), (others, 5)):
        base = functools.partial(training.within, without, steps)
        times = in_turn(timed, base, device, share=0.02, seconds=options.seconds, least=options.least)
        cases += [case(name, pairs) for name, pairs in times.items()]
    return cases


def watch(options: argparse.Namespace, device: torch.device) -> list[Case]:
    from te_precision_callbacks.instrumentation.every_step import EveryStep
    from te_precision_callbacks.parameters.watch import ParameterWatch
    from te_precision_callbacks.session import InspectSession

    parts = {
        "GEMMs": (EveryStep, "note"),
        "gradients": (ParameterWatch, "before_step"),
        "weights and end of step": (InspectSession, "step"),
    }
    spent = dict.fromkeys(parts, 0)

    def timed(part: str, function: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
        begin = time.process_time_ns()
        try:
            return function(*given, **keywords)
        finally:
            spent[part] += time.process_time_ns() - begin

    training = Training(options, device, converted_llama, fp8_llama_loss)
    steps: list[dict[str, float]] = []
    with contextlib.ExitStack() as patches:
        for part, (owner, name) in parts.items():
            wrapped = functools.partialmethod(functools.partial(timed, part, getattr(owner, name)))
            patches.enter_context(mock.patch.object(owner, name, wrapped))
        end = patches.enter_context(with_ours(training.model, without_early_steps()))
        training.step(end)  # the first one has more to do
        for _ in range(options.least):
            spent.update(dict.fromkeys(parts, 0))
            begin = time.process_time_ns()
            training.step(end)
            whole = time.process_time_ns() - begin
            steps.append({"ms": whole / 1e6, **{part: 100 * of_part / whole for part, of_part in spent.items()}})
    medians = {name: statistics_of.median(step[name] for step in steps) for name in steps[0]}
    shares = {**{part: medians[part] for part in parts}, "all": sum(medians[part] for part in parts)}
    return [{"case": part, "none_ms": medians["ms"], "ours_processor_percent": share} for part, share in shares.items()]


def gemms(options: argparse.Namespace, device: torch.device) -> list[Case]:
    training = Training(options, device, byte_model, next_byte_loss)
    runs: dict[str, Run] = {}
    for name, freq in {"a step in which all GEMMs are measured": 1, "another step": 500}.items():
        runs[name] = functools.partial(with_ours, training.model, gemm_errors(freq))
    return [case(name, pairs) for name, pairs in measure(training, runs, options).items()]


def overflow(options: argparse.Namespace, device: torch.device) -> list[Case]:
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        progress(name)

        def model(sizes: argparse.Namespace, dtype: torch.dtype = dtype) -> torch.nn.Module:
            return llama(sizes.layers, sizes.hidden, sizes.sequence + 1, vocabulary=8192).to(dtype)

        training = Training(options, device, model, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)
        runs: dict[str, Run] = {
            "ours": functools.partial(with_detection, training.model),
            "transformers": functools.partial(with_upstream_detection, training.model),
        }
        times = measure(training, runs, options)
        cases.append(case(name, times["ours"], times["transformers"]))
    return cases


MODES: Mapping[str, tuple[Callable[[argparse.Namespace, torch.device], list[Case]], tuple[int, int, int, int]]] = {
    "statistics": (statistics, (4, 256, 256, 8)),
    "default": (default, (4, 128, 128, 4)),
    "watch": (watch, (1, 1024, 256, 8)),
    "gemms": (gemms, (1, 768, 512, 4)),
    "overflow": (overflow, (4, 256, 512, 4)),
}
"""Mode -> its cases; and its layers, hidden size, sequence and batch."""

SIZES = {
    "layers": "Transformer layers",
    "hidden": "hidden size, a multiple of 64",
    "sequence": "tokens of a sequence",
    "batch": "sequences of a batch",
}


def main() -> None:
    parser = arguments(__doc__, 900)
    parser.add_argument("mode", nargs="?", choices=MODES, default="statistics")
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=meaning)
    options = parser.parse_args()
    cases_of, sizes = MODES[options.mode]
    for name, size in zip(SIZES, sizes, strict=True):
        setattr(options, name, getattr(options, name) or size)
    reference.install_where_needed()
    import transformer_engine.pytorch  # noqa: F401

    # Warnings of a session without features, and of Lightning about a model that it does not train.
    logging.getLogger("te_precision_callbacks").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    progress(machine(device))
    cases = cases_of(options, device)
    sizes_used = {name: getattr(options, name) for name in SIZES}
    report([case | sizes_used for case in cases], COLUMNS, device, as_json=options.json)


if __name__ == "__main__":
    main()
