"""One of several gloo processes: python ranks_script.py RANK WORLD FOLDER

It runs all cases for that number of processes, one after another, and writes their results to FOLDER/RANK.json. The
models and data are here too, for the single process that the test compares with: see tests/engine/test_ranks.py.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import te_precision_callbacks
from tests.preparing import prepare

prepare()  # before anything imports Transformer Engine

import transformer_engine.pytorch as te
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.reduction import Stamp
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.statistics.names import quantized_request, tensor_request
from tests.conftest import Keeper, feature
from tests.engine.exact import BLOCK_STATISTICS

TENSORS = ["activation", "weight", "gradient", "output", "wgrad", "dgrad"]
STATISTICS = ["l1_norm", "numel", "std", "mean", "max", "nonfinite_num"]
OPTIONS = {"tensors": TENSORS, "stats": STATISTICS, "freq": 1}
HIDDEN, FFN, ROWS = 32, 64, 32

# `"<layer> <tensor> <statistic>"` -> value.
Values = dict[str, float]

CASES: dict[int, dict[str, Callable[[Path], Any]]] = {2: {}, 4: {}}


def case(world: int) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def register(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CASES[world][run.__name__] = run
        return run

    return register


# ---------------------------------------------------------------------- observation, and where it ends


def config(layers: Sequence[str] = ("all",), **sections: Sequence[str]) -> dict[str, Any]:
    """All statistics of all tensors, of ``layers``, or a section for each keyword."""
    chosen = sections or {"all": layers}
    return {name: feature("LogTensorStats", list(types), **OPTIONS) for name, types in chosen.items()}


@contextmanager
def session(model: torch.nn.Module, folder: Path, **keywords: Any) -> Iterator[tuple[InspectSession, Keeper]]:
    keeper = Keeper()
    options = {"config": config(), "strict": True, **keywords}
    with InspectSession(model=model, log_dir=folder / "log", sinks=[keeper], **options) as running:
        yield running, keeper


def steps(keeper: Keeper) -> list[Values]:
    return [{f"{row.layer} {row.tensor} {row.statistic}": row.value for row in records} for records in keeper.steps]


def run_program(model: Any, folder: Path, program: Iterable[Iterable[Any]], **keywords: Any) -> list[Values]:
    """The statistics of each step, which is a list of the arguments of ``model.run``."""
    with session(model, folder, **keywords) as (running, keeper):
        for calls in program:
            for call in calls:
                model.run(call)
            running.step()
    return steps(keeper)


def normal(seed: int | str, *shape: int) -> torch.Tensor:
    number = seed if isinstance(seed, int) else sum(ord(letter) * 31**i for i, letter in enumerate(seed)) % 2**31
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


# ---------------------------------------------------------------------- layers that ranks run or do not run

# The layers that are run in a step, each with the seed of its batch.
Calls = Sequence[tuple[str, int]]

PROGRAMS: dict[str, list[list[Calls]]] = {
    # rank -> step -> calls
    "data parallel, two micro-batches": [
        [[("a", 0), ("b", 1), ("a", 2), ("b", 3)]],
        [[("a", 4), ("b", 5), ("a", 6), ("b", 7)]],
    ],
    "pipeline stages": [[[("a", 0), ("b", 1)], [("a", 2), ("b", 3)]], [[("c", 4), ("d", 5)], [("c", 6), ("d", 7)]]],
    "a rank without layers": [[[("a", 0)], [("a", 1)]], [[], []]],
    "another order": [[[("a", 0), ("b", 1)]], [[("b", 2), ("a", 3)]]],
    "a layer rests on a rank": [
        [[("a", 0), ("b", 1)], [("a", 2), ("b", 3)], [("a", 4), ("b", 5)]],
        [[("a", 6), ("b", 7)], [("a", 8)], [("a", 9), ("b", 1)]],
    ],
    "a layer never runs on a rank": [[[("a", 0), ("b", 1)], [("a", 2), ("b", 3)]], [[("a", 4)], [("a", 5)]]],
    "no layer runs on a rank": [[[("a", 0)], [("a", 1)], [("a", 2)]], [[("a", 3)], [], [("a", 4)]]],
    "a layer comes up late": [
        [[("a", 0)], [("a", 1)], [("a", 2)], [("a", 3)], [("a", 4), ("b", 5)]],
        [[("a", 6)], [("a", 7)], [("a", 8)], [("a", 9), ("b", 9)], [("a", 1), ("b", 2)]],
    ],
}


class Layers(torch.nn.Module):
    """Independent layers with the same weights wherever they are. The weights of each have a negative sum."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: te.Linear(16, 16, bias=False) for name in names})
        self.plain = torch.nn.Linear(16, 16)
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.weight.copy_(normal(name, 16, 16) - 0.5)

    def run(self, calls: Calls) -> None:
        for name, seed in calls:
            x = (normal(seed, 16, 16) + seed).requires_grad_()
            (self.layers[name](x) * normal(seed + 100, 16, 16)).sum().backward()


def owned(name: str, rank: int) -> list[str]:
    """The layers that a rank has: all where the case is about running them."""
    ranks = range(2) if "layer" in name and "without" not in name else [rank]
    return sorted({layer for other in ranks for calls in PROGRAMS[name][other] for layer, _ in calls})


# ---------------------------------------------------------------------- layers that are split over ranks


class Split(torch.nn.Module):
    """All kinds of layers of a tensor-parallel group; the whole of each without one."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.sequence_parallel = sequence_parallel
        keywords: dict[str, Any] = {"bias": False}
        if group is not None:
            keywords |= {"tp_group": group, "tp_size": self.size, "sequence_parallel": sequence_parallel}
        self.copied = te.Linear(HIDDEN, HIDDEN, **keywords)
        self.column = te.Linear(HIDDEN, FFN, parallel_mode="column", **keywords)
        self.row = te.Linear(FFN, HIDDEN, parallel_mode="row", **keywords)
        self.norm_column = te.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **keywords)
        self.second_row = te.Linear(FFN, HIDDEN, parallel_mode="row", **keywords)
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **keywords)
        with torch.no_grad():
            for name, shape, split in (
                ("copied.weight", (HIDDEN, HIDDEN), None),
                ("column.weight", (FFN, HIDDEN), 0),
                ("row.weight", (HIDDEN, FFN), 1),
                ("norm_column.weight", (FFN, HIDDEN), 0),
                ("second_row.weight", (HIDDEN, FFN), 1),
                ("mlp.fc1_weight", (FFN, HIDDEN), 0),
                ("mlp.fc2_weight", (HIDDEN, FFN), 1),
            ):
                weight = normal(name, *shape) / 8
                own = weight if split is None else weight.chunk(self.size, split)[self.rank]
                self.get_parameter(name).copy_(own)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.size, 0)[self.rank] if self.sequence_parallel else whole

    def run(self, seed: int) -> None:
        x = self.part(normal(seed, ROWS, HIDDEN)).clone().requires_grad_()
        x = self.row(gelu(self.column(self.copied(x))))
        x = self.mlp(self.second_row(self.norm_column(x)))
        (x * self.part(normal(seed + 100, ROWS, HIDDEN))).sum().backward()


# ---------------------------------------------------------------------- counting


_PACKAGE = str(Path(te_precision_callbacks.__file__).parent)
_CODE = _PACKAGE, str(Path(_PACKAGE).parent / "features")
_REFERENCE = str(Path(_PACKAGE, "reference"))
_NUMERICS = str(Path(_PACKAGE, "base", "numerics"))


class Counted(TorchDispatchMode):
    """Counts collectives, and calls by this project's code that make the host wait for a device.

    Every call counts, wherever the tensor is: on a machine without a GPU a copy to the host is no copy.

    Work of the reference backend, in the place of a GPU's kernels, does not count.
    """

    _WAITING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount")
    _WAITING_METHODS = ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self._kinds: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._patches: list[Any] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self._kinds[name] += 1
        elif name in self._WAITING_OPS and not self._inside and self._asks():
            self.waits[name] += 1
        elif name == "copy_" and type(args[0]) is torch.Tensor and args[0].device.type == "cpu" and self._asks():
            self.waits["copy_"] += args[0].dtype == torch.float64 and args[1].dim() == 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Counted:
        for name in self._WAITING_METHODS:
            self._patches.append(mock.patch.object(torch.Tensor, name, self._counting(name)))
        self._patches.append(mock.patch.object(Messages, "merge", self._noting(Messages.merge)))
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._patches:
            self._patches.pop().stop()

    def _counting(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
            if self._inside or not self._asks():
                return original(tensor, *args, **keywords)
            self.waits[name] += 1
            self._inside = True
            try:
                return original(tensor, *args, **keywords)
            finally:
                self._inside = False

        return call

    def _noting(self, original: Callable[..., bytes]) -> Callable[..., bytes]:
        def exchange(messages: Messages, kind: str, *arguments: Any) -> bytes:
            self._kinds[kind] += 1
            return original(messages, kind, *arguments)

        return exchange

    def _asks(self) -> bool:
        """Return whether the innermost known frame is in the code in question."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_REFERENCE):
                return False
            if frame.f_code.co_name == "__torch_dispatch__":  # another mode, through which all operators go
                frame = frame.f_back
                continue
            if name.startswith(_CODE) and not name.startswith(_NUMERICS):
                return True
            frame = frame.f_back
        return False

    @property
    def kinds(self) -> dict[str, int]:
        """Counts of our messages and of collectives of the training's process groups, by kind."""
        return dict(self._kinds)


# ---------------------------------------------------------------------- the cases


@case(2)
def programs(folder: Path) -> dict[str, list[Values]]:
    rank = dist.get_rank()
    return {
        name: run_program(Layers(owned(name, rank)), folder / name, [[calls] for calls in program[rank]])
        for name, program in PROGRAMS.items()
    }


@case(4)
def data_and_tensor_parallel(folder: Path) -> dict[str, list[Values]]:
    """Two batches in two tensor-parallel groups; in the second step one of the data-parallel replicas rests."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = {}
    for name, sequence_parallel in {"tp": False, "sp": True}.items():
        model = Split(groups[rank // 2], sequence_parallel=sequence_parallel)
        results[name] = run_program(model, folder / name, [[rank // 2], [2] * (rank < 2)])
    return results


@case(2)
def schedules(folder: Path) -> list[dict[str, int]]:
    """The collectives of six steps with a different layer on each rank, one due every 2 and one every 3 steps."""
    both = config(even=["layers.a"], third=["layers.b"])
    both["third"]["transformer_engine"]["LogTensorStats"]["freq"] = 3
    both["even"]["transformer_engine"]["LogTensorStats"]["freq"] = 2
    name = "ab"[dist.get_rank()]
    model = Layers(name)
    counts = []
    with session(model, folder, config=both) as (running, _):
        for step in range(6):
            if step != 2:  # the layer that is due in this step rests
                model.run([(name, step)])
            with Counted() as counted:
                running.step()
            counts.append(counted.kinds)
    return counts


@case(2)
def no_reduction(folder: Path) -> dict[str, Any]:
    with Counted() as counted:
        values = run_program(Layers("a"), folder, [[[("a", dist.get_rank())]]], reduce=False)
    return {"steps": values, "collectives": counted.kinds}


def joined_engine(on_failure: Any = None) -> StatisticsEngine:
    engine, messages = StatisticsEngine(on_failure=on_failure), Messages(None, "by hand")
    messages.open("to reduce by hand")
    engine.reduce_over(messages)
    return engine


@case(2)
def rows_that_differ(folder: Path) -> list[dict[str, Any]]:
    """Replicas without elements, and statistics that are due on one rank only, given to the engine by hand."""
    engine, rank = joined_engine(), dist.get_rank()
    empty, negative = torch.empty(0, 4), torch.full((2, 4), -3.0)

    def watch(layer: str, tensor: str, values: torch.Tensor, *statistics: str) -> None:
        engine.note(Watched(layer, tensor, 0, values), [tensor_request(name) for name in statistics])
        engine.measure()

    results: list[dict[str, Any]] = []
    for step in range(2):
        watch("empty on rank 0", "weight", negative if rank else empty, "mean", "max", "numel")
        watch("empty on both", "weight", empty, "mean", "max", "numel")
        watch("more on rank 1", "activation", negative, *(("min", "max") if rank else ("max",)))
        if rank == step:
            watch("in turns", "activation", negative, "numel" if step else "max")
        watch("equal", "activation", torch.full((100_003 + 7 * rank,), 0.1), "std")
        watch("histogram", "gradient", 2.0 ** torch.arange(rank, rank + 3), "exponent_histogram")
        measured = engine.flush(reduce=True)
        results.append({f"{m.layer} {m.tensor} {m.statistic}": m.value for m in measured})
    return results


BLOCK_RECIPES = ("mxfp8", "nvfp4")


def of_ranks(rank: int, step: int) -> list[torch.Tensor]:
    """The micro-batches of a rank: of many magnitudes, and rank 1 has a block of zeros."""
    results = [normal(100 * step + 10 * rank + number, 8, 64) for number in range(2)]
    results = [x * torch.exp(6 * normal(200 + number, 8, 64)) for number, x in enumerate(results)]
    results[0][:rank, :32] = 0
    return results


@case(2)
def blocks(folder: Path) -> list[dict[str, Any]]:
    """All statistics of blocks, of an activation that ranks have parts of and of a weight that they have alike."""
    engine = joined_engine()
    requests = [quantized_request(f"{recipe}_{name}") for recipe in BLOCK_RECIPES for name in BLOCK_STATISTICS]
    results: list[dict[str, Any]] = []
    for step in range(3):
        with Counted() as inside:
            for values in of_ranks(dist.get_rank(), step):
                engine.note(Watched("a", "activation", step, values), requests)
                engine.measure()
            engine.note(Watched("a", "weight", step, normal(step, 48, 32)), requests)
            engine.measure()
        with Counted() as at_end:
            measured = engine.flush(reduce=True)
        results.append({f"{m.tensor} {m.statistic}": m.value for m in measured})
    costs = {"inside": [inside.kinds, dict(inside.waits)], "at the end": [at_end.kinds, dict(at_end.waits)]}
    return [*results, costs]


@case(2)
def not_finite(folder: Path) -> list[Values]:
    """Two micro-batches a rank, with inf and nan in the second one of rank 1 only."""
    model = Layers("a")
    with session(model, folder) as (running, keeper):
        for micro_batch in range(2):
            x = normal(10 * dist.get_rank() + micro_batch, 8, 16)
            if dist.get_rank() == micro_batch == 1:
                x[0, 0], x[1, 1], x[2, 2] = torch.inf, -torch.inf, torch.nan
            model.layers["a"](x).sum().backward()
        running.step()
    return steps(keeper)


@case(2)
def costs(folder: Path) -> dict[str, Any]:
    """Collectives and waits in a step and at its end, for 6 and for 102 watched tensors."""
    results = {}
    for tensors in (6, 102):
        names = [f"layer{number}" for number in range(tensors // len(TENSORS))]
        model = Layers(names)
        with session(model, folder / str(tensors), strict=False) as (running, keeper):
            for step in range(6):  # the ranks compare parameters after the others
                with Counted() as inside:
                    model.run([(name, step) for name in names])
                with Counted() as at_end:
                    running.step()
        watched = {tuple(key.split()[:2]) for key in steps(keeper)[-1]}
        results[tensors] = {
            "watched": len(watched),
            "inside": [inside.kinds, dict(inside.waits)],
            "at the end": [at_end.kinds, dict(at_end.waits)],
        }
    return results


@case(2)
def attaching(folder: Path) -> dict[str, Any]:
    """Models with one layer on each rank, and configs that no rank can use, that one cannot, that differ."""
    rank = dist.get_rank()
    model = torch.nn.ModuleDict({f"stage{rank}": te.Linear(16, 16)})
    own = folder / "features of rank 1"
    own.mkdir(parents=True, exist_ok=True)
    wrong = {"config": {"wrong": feature("NoSuchFeature", ["all"])}, "feature_dirs": own}  # known when it starts
    exactly = config()
    exactly["all"]["layers"] = {"exact_layer_names": ["stage0", "stage7"]}
    attempts: dict[str, dict[str, Any]] = {
        "an exact name that no rank has": {"config": exactly},
        "a section for no stage": {"config": config(first=["stage0"], third=["stage2"])},
        "one rank's config is wrong": wrong if rank == 1 else {"config": config()},
        "one rank's model is wrong": {"config": config(), "model": "no model" if rank == 1 else model},
        "another freq": {"config": with_options(freq=1 + rank)},
        "one more statistic": {"config": config() if rank == 1 else with_options(stats=[*STATISTICS, "min"])},
        "other names": {"config": {"layer_names": "upstream", **config()} if rank == 1 else config()},
        "another start_step": {"config": config(), "start_step": 5 * rank},
    }
    results: dict[str, Any] = {}
    for name, keywords in attempts.items():
        attached = keywords.pop("model", model)
        running = InspectSession(log_dir=folder / name, **keywords)
        try:
            running.start()
            running.attach(attached)
        except Exception as error:
            results[name] = [type(error).__name__, str(error)]
        finally:
            running.stop()
    return results


def with_options(**options: Any) -> dict[str, Any]:
    return {"all": feature("LogTensorStats", ["all"], **{**OPTIONS, **options})}


@case(2)
def out_of_step(folder: Path) -> dict[str, Any]:
    """Rank 1 skips the step() of its second batch, or is set to another iteration after the first."""
    rank = dist.get_rank()
    results = {}
    for name in ("skips a step", "another iteration"):
        model = Layers("a")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        counts = []
        with said() as lines, session(model, folder / name, strict=False) as (running, keeper):
            for step in range(4 if name == "another iteration" else 6):
                model.run([("a", 10 * rank + step)])
                optimizer.step()
                if name == "skips a step" and (rank, step) == (1, 1):
                    continue
                if name == "another iteration" and (rank, step) == (1, 1):
                    running.iteration = 7
                with Counted() as counted:
                    running.step()
                counts.append(counted.kinds)
            running.stop()
        results[name] = {
            "steps": steps(keeper),
            "iterations": keeper.iterations,
            "local": [records.local for records in keeper.steps],
            "messages": counts,
            "said": lines,
        }
    return results


@case(2)
def other_schedules(folder: Path) -> dict[str, Any]:
    """Statistics of one iteration under different configs, given to the engine by hand: a session would not begin."""
    said: list[str] = []
    engine, rank = joined_engine(lambda doing, of, error: said.append(str(error))), dist.get_rank()
    engine.note(Watched("a", "activation", 3, torch.full((2, 4), float(rank))), [tensor_request("max")])
    engine.measure()
    measured = engine.flush(reduce=True, stamp=Stamp(3, 2**52 - 1 - rank, -1 if rank else 4))
    return {"said": said, "own": [m.value for m in measured], "local": measured.local}


@contextmanager
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("te_precision_callbacks")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@case(2)
def a_rank_leaves(folder: Path) -> dict[str, Any]:
    """Rank 1 ends in step 1. The last case: nothing can be reduced after it."""
    model = Layers("a")
    counts = []
    with session(model, folder, strict=False, process_group=dist.new_group([0, 1])) as (running, keeper):
        for step in range(4):
            model.run([("a", 10 * dist.get_rank() + step)])
            if step == 1 and dist.get_rank() == 1:
                break
            with Counted() as counted:
                running.step()
            counts.append(counted.kinds)
    return {"steps": steps(keeper), "messages": counts, "local": [records.local for records in keeper.steps]}


def main(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=90),
    )
    results: dict[str, Any] = {}
    try:
        for name in CASES[world]:
            torch.manual_seed(0)
            results[name] = CASES[world][name](folder / name)
    except BaseException:
        results["error"] = f"rank {rank}, {name}: {traceback.format_exc()}"
    (folder / f"{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit("error" in results)  # without waiting for what other ranks do


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
