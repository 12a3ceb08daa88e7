"""What watching costs the host, part by part: for 6 to 60,000 tensors of a step, with eight statistics each.

    python benchmarks/host.py [--json] [--tensors 6 600 60000] [--repeats 3]
    python benchmarks/host.py --layers 10 500 2000 20000 [--json]    # a session of a model of so many layers

The tensors have 16 x 16 elements, so that next to nothing is the arithmetic of large tensors.
  note        microseconds a tensor: the statistics of a tensor are asked for.
  measure     microseconds a tensor: what is wanted is found, and the columns are added to the slots of the step.
  pass        microseconds a tensor: it is read, by the compiled pass.
  flush       microseconds a number: the slots become numbers.
  records     microseconds a number: the records of the step, and the worst value of each series.
  log         microseconds a number: it is handed to the thread of the statistics log.
  log_thread  microseconds a number of the processor's time: that thread writes it.
  metrics     microseconds a number: the selection of metrics, under their names, as all loggers get them.
  tensorboard microseconds a number: TensorBoard's writer, as a trainer calls it.
Of several steps the fastest, behind one that interns series and makes names.

With --layers: what a session costs a model of so many te.Linear, with the maximum of each activation as a statistic.
  step      microseconds of session.step() where nothing is due: the median, and the smallest, of many.
  stop      seconds of session.stop(), with the summary and the records.
  stop_cpu  seconds of the processor's time of it, in all threads.
  changed_stop, changed_stop_cpu   the same of another session, in whose last step a layer has changed its precision.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from measuring import TENSOR_STATISTICS, arguments, as_in_a_long_run, machine, progress, report

from te_precision_callbacks import reference

if TYPE_CHECKING:
    from te_precision_callbacks.session import InspectSession

COLUMNS = (
    "tensors",
    "note_us",
    "measure_us",
    "pass_us",
    "flush_us",
    "records_us",
    "log_us",
    "log_thread_us",
    "metrics_us",
    "tensorboard_us",
)
SESSION_COLUMNS = (
    "layers",
    "step_us",
    "least_step_us",
    "stop_s",
    "stop_cpu_s",
    "changed_stop_s",
    "changed_stop_cpu_s",
)
SIDE = 16
QUIET_STEPS = 400


def case_of(tensors: int, repeats: int, folder: Path) -> dict[str, Any]:
    """The cost of each part, with so many tensors."""
    from torch.utils.tensorboard import SummaryWriter

    from te_precision_callbacks.engine import kernels
    from te_precision_callbacks.engine.engine import StatisticsEngine
    from te_precision_callbacks.layers.watched import Watched
    from te_precision_callbacks.sinks import MetricSelection, RunInfo, StatisticsLog, StepRecords, writer_thread
    from te_precision_callbacks.sinks.worst import RunStatistics
    from te_precision_callbacks.statistics.names import tensor_request

    engine = StatisticsEngine()
    worst, log, select = RunStatistics(engine.series), StatisticsLog(), MetricSelection()
    log.start(RunInfo(folder, 0, 1, 0, (), {}, ""))
    writer = SummaryWriter(str(folder / "board"))
    requests = tuple(tensor_request(name) for name in TENSOR_STATISTICS)  # as features ask
    values = torch.randn(SIDE, SIDE, dtype=torch.bfloat16)
    best: dict[str, float] = {}

    def timed(part: str, count: int, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        best[part] = min(best.get(part, float("inf")), 1e6 * (time.perf_counter() - start) / count)
        return result

    spent: dict[str, float] = {}

    def timed_pass(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **keywords)
            spent["pass_us"] += time.perf_counter() - start
            return result

        return timed

    writer_thread.FLUSH_SECONDS = 0.02  # the wait for the thread is short
    for iteration in range(1 + repeats):
        if iteration == 1:
            best.clear()
        spent |= {"note_us": 0.0, "measure_us": 0.0, "pass_us": 0.0}
        with mock.patch.object(kernels, "add", timed_pass(kernels.add)), torch.no_grad():  # as in an autograd Function
            for number in range(tensors):
                layer, tensor = f"layers.{number // 3}.fc1", ("activation", "weight", "gradient")[number % 3]
                start = time.perf_counter()
                engine.note(Watched(layer, tensor, 0, values), requests)
                middle = time.perf_counter()
                engine.measure()
                spent["note_us"] += middle - start
                spent["measure_us"] += time.perf_counter() - middle
        spent["measure_us"] -= spent["pass_us"]
        for part, seconds in spent.items():
            best[part] = min(best.get(part, float("inf")), 1e6 * seconds / tensors)
        numbers = tensors * len(requests)
        measured = timed("flush_us", numbers, lambda: engine.flush(reduce=False))

        def make(iteration: int = iteration, measured: Any = measured) -> StepRecords:
            records = StepRecords(
                iteration, iteration, measured.table, measured.series, array("d", measured.values.tobytes())
            )
            worst.add(records)
            return records

        records = timed("records_us", numbers, make)
        timed("log_us", numbers, functools.partial(log.write, records))
        processor = time.process_time()
        while log.waiting:
            time.sleep(0.01)
        in_thread = 1e6 * (time.process_time() - processor) / numbers
        best["log_thread_us"] = min(best.get("log_thread_us", float("inf")), in_thread)
        metrics = timed("metrics_us", numbers, functools.partial(select, records))

        def board(iteration: int = iteration, metrics: Any = metrics) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, iteration)

        timed("tensorboard_us", numbers, board)
    log.close(None)
    writer.close()
    return {"tensors": tensors, "numbers": numbers, **best}


def session_case(layers: int) -> dict[str, Any]:
    """The cost of a step in which nothing is due, and of the end of two sessions."""
    import transformer_engine.pytorch as te

    from te_precision_callbacks.session import InspectSession

    net = torch.nn.Sequential(*(te.Linear(SIDE, SIDE) for _ in range(layers)))
    log = {"enabled": True, "tensors": ["activation"], "stats": ["max"], "freq": 10**9}
    config = {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": {"LogTensorStats": log}}}
    found: dict[str, Any] = {"layers": layers}
    for changes in (False, True):
        with (
            tempfile.TemporaryDirectory() as folder,
            InspectSession(config, model=net, log_dir=folder) as session,
        ):
            _train(net, fp8=True)
            session.step()
            session.step()  # without forwards, as those that are timed
            if changes:
                _train(net[0], fp8=False)
                session.step()
                found["changed_stop_s"], found["changed_stop_cpu_s"] = _timed_stop(session)
            else:
                times = [_timed_step(session) for _ in range(QUIET_STEPS)]
                found["step_us"], found["least_step_us"] = statistics.median(times), min(times)
                found["stop_s"], found["stop_cpu_s"] = _timed_stop(session)
    return found


def _train(net: torch.nn.Module, *, fp8: bool) -> None:
    import transformer_engine.pytorch as te

    with te.autocast(enabled=fp8):
        out = net(torch.randn(SIDE, SIDE))
    out.sum().backward()


def _timed_step(session: InspectSession) -> float:
    start = time.perf_counter()
    session.step()
    return 1e6 * (time.perf_counter() - start)


def _timed_stop(session: InspectSession) -> tuple[float, float]:
    start, processor = time.perf_counter(), time.process_time()
    session.stop()
    return time.perf_counter() - start, time.process_time() - processor


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", help="time a session of a model of so many layers")
    parser.add_argument("--tensors", type=int, nargs="+", default=[6, 60, 600, 6_000, 60_000], help="watched in a step")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps (default: 3)")
    options = parser.parse_args(given)
    reference.install_where_needed()
    described = machine(torch.device("cpu"))
    progress(described) if options.json else print(described, end="\n\n")
    if options.layers:
        cases = []
        for layers in options.layers:
            cases.append({**session_case(layers), "machine": described})
            progress(f"{layers} layers")
        title = "Microseconds of a step in which nothing is due; seconds of stop()."
        report(cases, SESSION_COLUMNS, title, as_json=options.json)
        return
    cases = []
    for tensors in options.tensors:
        with tempfile.TemporaryDirectory() as folder, as_in_a_long_run():
            cases.append({**case_of(tensors, options.repeats, Path(folder)), "machine": described})
        progress(f"{tensors} tensors")
    report(cases, COLUMNS, "Microseconds: note and measure a tensor, the others a number.", as_json=options.json)


if __name__ == "__main__":
    main()
