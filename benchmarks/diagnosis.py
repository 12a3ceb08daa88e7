"""What judging a step costs: the rules on the numbers of a due step, by the number of series, and as a share of a step.

    python benchmarks/diagnosis.py
    python benchmarks/diagnosis.py --series 60000 --repeat 20
    python benchmarks/diagnosis.py --series --training 6

Prints the median time of a step, and the time of each series. The numbers are those of a healthy model with the default
config, so no rule fires; nothing of a model runs.

With --training N the model of benchmarks/step.py trains N due steps with the default config, with its rules and
without, each between steps without a session.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts, Settings
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.statistics.series import SeriesTable

TENSORS = {"activation": 1.0, "weight": 0.02, "gradient": 1e-5}
OF_TENSORS = ("min", "max", "mean", "std", "cur_amax", "nonfinite_num")
OF_LOSSES = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max")
PARTS = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")


def measured(series: int, repeat: int) -> tuple[int, float, float]:
    """How many series there are, and the median seconds of judging a step and of the engine's own split alone."""
    layers = -(-series // (len(TENSORS) * (len(OF_TENSORS) + len(OF_LOSSES))))
    names = [f"decoder.layers.{layer // len(PARTS)}.{PARTS[layer % len(PARTS)]}" for layer in range(layers)]
    formats = {"activation": "FP8 E4M3", "weight": "FP8 E4M3", "gradient": "FP8 E5M2"}
    facts = Facts(
        {
            name: LayerFacts(
                name, "Linear", place, layers - place, formats, "fp8_delayed_scaling", low=frozenset({"fprop"})
            )
            for place, name in enumerate(names)
        },
        settings=Settings(ranks=2),
    )
    table = SeriesTable()
    generator = np.random.default_rng(0)
    numbers: list[int] = []
    values: list[float] = []
    for name in names:
        for tensor, size in TENSORS.items():
            for statistic in (*OF_TENSORS, *OF_LOSSES):
                numbers.append(table.intern(name, tensor, statistic))
                spread = float(generator.lognormal(0, 0.2))
                values.append(0.0 if "%" in statistic or statistic == "nonfinite_num" else size * spread)
    splitter, diagnosis = Splitter(table.__getitem__), Diagnosis()
    diagnosis.know(facts, 0)
    ids, found = np.array(numbers, np.int32), np.array(values)
    largest = np.array([table[number].statistic == "scale_inv_max" for number in numbers])
    least = np.array([table[number].statistic == "scale_inv_min" for number in numbers])
    took: list[float] = []
    split: list[float] = []
    for step in range(repeat + 2):
        noise = generator.lognormal(0, 0.05, len(found))
        now = found * noise
        now[largest] = now[least]  # as ranks with one scale have it
        begun = time.perf_counter()
        given = splitter.step(step, ids, now)
        between = time.perf_counter()
        diagnosis.step(given)
        took.append(time.perf_counter() - begun)
        split.append(between - begun)
    return len(numbers), statistics.median(took[2:]), statistics.median(split[2:])


@contextlib.contextmanager
def default_session(model: torch.nn.Module, *, rules: bool) -> Iterator[Callable[[], object]]:
    """A session with the default config, whose first three steps are due, with its rules or without any."""
    from te_precision_callbacks.session import InspectSession

    chosen = contextlib.nullcontext() if rules else mock.patch.object(Diagnosis.__init__, "__defaults__", ((),))
    with (
        tempfile.TemporaryDirectory() as log_dir,
        chosen,
        InspectSession(None, model=model, log_dir=log_dir, quiet=True) as session,
    ):
        yield session.step


def train(seconds: float, layers: int) -> None:
    """Print what the default config adds to a due step, and its rules to that."""
    from in_turn import LEAST_PAIRS
    from step import Run, Training, measure

    from te_precision_callbacks import reference

    reference.install_where_needed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(layers, 256, 256, 8, device)
    names = {"default config": True, "default config without rules": False}
    runs: dict[str, Run] = {
        name: functools.partial(default_session, training.model, rules=rules) for name, rules in names.items()
    }
    print("| | without a session, ms | a due step takes, times | of processor time |")
    print("|---|---|---|---|")
    for name, found in measure(training, runs, seconds, LEAST_PAIRS).items():
        print(f"| {name} | {found.base()} | {found.ratio()} | {found.ratio('processor')} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--series", type=int, nargs="*", default=[2000, 20000, 60000], help="how many; %(default)s")
    parser.add_argument("--repeat", type=int, default=10, help="steps; %(default)s")
    parser.add_argument(
        "--training", type=float, default=0, metavar="S", help="train a model, too, for at most S seconds"
    )
    parser.add_argument("--layers", type=int, default=2, help="its layers; %(default)s")
    options = parser.parse_args()
    if options.training:
        train(options.training, options.layers)
    if not options.series:
        return
    print("| series | a due step | a series | of it splitting |")
    print("|---|---|---|---|")
    for wanted in options.series:
        count, seconds, split = measured(wanted, options.repeat)
        print(
            f"| {count:,} | {1000 * seconds:.1f} ms | {1e6 * seconds / count:.2f} us | {100 * split / seconds:.0f} % |"
        )


if __name__ == "__main__":
    main()
