"""One of several gloo processes; a rank runs out of memory: python injecting_script.py RANK WORLD FOLDER EVERY

At every EVERY-th place of step() and attach() in turn, on each rank in turn, an exception is raised. Behind each step
come collectives of the training, and their results are compared with the expected ones. The test runs a sample;
with INJECT_EVERY=1 it runs all places, some 6,000 on two ranks in 20 minutes and 12,000 on four ranks. All are tried in
the same processes and process group, one after another, and FOLDER/RANK.jsonl has what came of each as soon as it is
known.
"""

import ast
import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from tests.preparing import prepare

prepare()  # before anything imports Transformer Engine

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te

import te_precision_callbacks
from te_precision_callbacks.base import garbage, ranks
from te_precision_callbacks.base.ranks import messages, together
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.session import InspectSession, run, session
from te_precision_callbacks.session.model import ObservedModel
from tests.conftest import Keeper, statistics

logger = logging.getLogger("te_precision_callbacks.injecting")

PACKAGE = str(Path(te_precision_callbacks.__file__).parent)
FEATURES = str(Path(PACKAGE).parent / "features")
Place = tuple[str, int]  # a file and a line

_GUARDS = {
    *((session.__file__, name) for name in ("step", "attach", "_running")),
    *((run.__file__, name) for name in ("step", "attach")),
    *((together.__file__, name) for name in ("meet", "settle", "several", "together", "_agree")),
    *((ranks.__file__, name) for name in ("is_distributed", "is_initialized")),
    *((messages.__file__, name) for name in ("open",)),
    (garbage.__file__, "without_collections"),  # else the collector rests in all further runs
}
"""The functions that guard the others, by file and name, with what they ask before that.

Places in the body of a ``try`` or a ``with`` of theirs are places as others. In the few other lines there is nothing
that could fail.
"""


def _bare_lines(file: str, name: str) -> set[int]:
    """The lines of a function that are in no body of a ``try`` or ``with``."""
    function = next(
        node
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )

    def lines(node: ast.stmt | ast.expr) -> set[int]:
        return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    guards = [node for node in ast.walk(function) if isinstance(node, ast.Try | ast.With)]
    bodies: set[int] = set().union(*(lines(statement) for guard in guards for statement in guard.body))
    return lines(function) - bodies


_BARE = {(file, line) for file, name in _GUARDS for line in _bare_lines(file, name)}


class Injection:
    """Notes the lines of this package that run in this thread, or raises at the first visit of one of them."""

    def __init__(self, at: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self.raised = False
        self._at = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        left_out = (str(Path(PACKAGE) / "reference"), str(Path(PACKAGE) / "base" / "numerics"))
        return self._line if name.startswith((PACKAGE, FEATURES)) and not name.startswith(left_out) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in _BARE:
            self.places[place] = None
            if place == self._at and not self.raised:
                self.raised = True
                raise (torch.OutOfMemoryError if self._at[1] % 2 else MemoryError)(f"injected at {place}")
        return self._line

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def trained(rank: int, world: int, step: int) -> bool:
    """Collectives of the training, of the sizes that messages of ours have; whether their results are right."""
    right = True
    for size in (1, 3, 8, 57):
        gradient = torch.full((size,), float(rank + 1 + step), dtype=torch.float64)
        dist.all_reduce(gradient)
        right &= bool((gradient == sum(other + 1 + step for other in range(world))).all())
    return right


class Training:
    def __init__(self, folder: Path, **keywords: Any) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.net = torch.nn.Sequential(te.Linear(16, 16), te.Linear(16, 16))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        options = {"require": {"share": {"fp32": 1}, "by_step": 2, "on_broken": "warn"}, "records": "off", **keywords}
        self.session = InspectSession(statistics(), log_dir=folder, statistics_log="off", **options)
        self.session.start()
        self.right, self.slowest, self.steps = True, 0.0, 0

    def attach(self, injection: Injection | None = None) -> str:
        return self._timed(lambda: self.session.attach(self.net), injection)

    def step(self, injection: Injection | None = None) -> str:
        self.net(torch.ones(16, 16) * (self.rank + 1)).sum().backward()
        self.optimizer.step()
        error = self._timed(lambda: self.session.step(), injection)
        self.steps += 1
        return error

    def _timed(self, call: Callable[[], Any], injection: Injection | None) -> str:
        begun, error = time.monotonic(), ""
        try:
            with injection.on() if injection else nullcontext():
                call()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        self.slowest = max(self.slowest, time.monotonic() - begun)
        self.right &= trained(self.rank, self.world, self.steps)
        return error


def everywhere(value: str) -> list[str]:
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, value)
    return result


def one(folder: Path, where: str, victim: int, place: Place | None) -> tuple[dict[str, Any], Injection]:
    """A run with a failure on one rank, at a place in attach(), or in the first or the third step."""
    begun = time.monotonic()
    faulthandler.dump_traceback_later(_SLOW)  # writes to stderr where a rank waits
    injection = Injection(place)
    own = injection if dist.get_rank() == victim else None
    running = Training(folder)
    errors = {"attach": running.attach(own if where == "attach" else None)}
    try:
        if not any(everywhere(errors["attach"])):
            for number in range(4 if where == "step 2" else 2):
                error = running.step(own if where == f"step {number}" else None)
                errors["step"] = errors.get("step") or error
    finally:
        running.session.stop()
    right = everywhere("" if running.right else "wrong")
    faulthandler.cancel_dump_traceback_later()
    logger.info("%s, rank %d, %s: %.1f s", where, victim, place, time.monotonic() - begun)
    return {"errors": errors, "right": right, "slowest": running.slowest}, injection


def meet_again(folder: Path) -> dict[str, Any]:
    """Something fails on rank 1 in the third step: the ranks part, and meet again within 40."""
    keeper = Keeper()
    running = Training(folder, require=None, sinks=[keeper])
    errors = [running.attach()]
    for number in range(50):
        with failing(ObservedModel, "note_step", dist.get_rank() == 1 and number == 2):
            errors.append(running.step())
    running.session.stop()
    local = [records.local for records in keeper.steps]
    return {"errors": errors, "right": running.right, "local": local, "iterations": keeper.iterations}


def failing(owner: type, method: str, fails: bool) -> AbstractContextManager[object]:
    no_room = torch.OutOfMemoryError("no room")
    return mock.patch.object(owner, method, side_effect=no_room) if fails else nullcontext()


def strict(folder: Path) -> dict[str, Any]:
    running = Training(folder, require=None, strict=True)
    errors = [running.attach(), running.step()]
    with failing(ForwardHooks, "begin", dist.get_rank() == 1):
        errors.append(running.step())
    running.session.stop(RuntimeError("the loop has ended"))
    return {"errors": errors, "right": running.right}


def slow(folder: Path) -> list[bool]:
    """Rank 1 takes longer for its first step than ranks wait in a message of a step, then for its second one; whether
    the ranks are together after each."""
    running = Training(folder, require=None)
    running.attach()
    together = []
    with mock.patch.object(messages, "EXCHANGING", 0.2):
        for _ in range(2):
            time.sleep(dist.get_rank() == 1)
            running.step()
            together.append(running.session._run.context.ranks.are_connected)
    running.session.stop()
    return together


_SLOW = 12.0  # seconds

WHERE = ("attach", "step 0", "step 2")


def places(where: str, folder: Path, every: int) -> Iterator[dict[str, Any]]:
    for victim in range(dist.get_world_size()):
        _, injection = one(folder, where, victim, None)
        shared: list[Any] = [list(injection.places)]
        dist.broadcast_object_list(shared, src=victim)
        for place in shared[0][victim % every :: every]:
            result, injected = one(folder, where, victim, tuple(place))
            yield {**result, "where": where, "victim": victim, "place": place, "raised": injected.raised}


def main(rank: int, world: int, folder: Path, every: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    logging.basicConfig(filename=folder / f"rank-{rank}.log", level=logging.INFO)
    results: dict[str, Any] = {"places": []}
    try:
        results["meet again"] = meet_again(folder / "again")
        results["strict"] = strict(folder / "strict")
        results["slow"] = slow(folder / "slow")
        with (folder / f"{rank}.jsonl").open("w", buffering=1) as lines:
            for result in (result for where in WHERE for result in places(where, folder / "log", every)):
                lines.write(f"{json.dumps(result)}\n")
                results["places"].append(result)
    except BaseException:
        results["failed"] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
