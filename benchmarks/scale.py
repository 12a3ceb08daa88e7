"""What a session sends among 1,024 and 10,000 ranks: messages, bytes and memory of rank 0, and of the other ranks.

    python benchmarks/scale.py [--json] [--ranks 1024 10000] [--stages 16] [--blocks 24]

Two real ranks train first, with statistics of every layer, a contract, overflow detection and a checkpoint. All that
they exchange is recorded. The recorded messages are then sent through the tree of ``te_precision_callbacks/ranks`` with
so many ranks, of which each pipeline stage has other layers: merged by the code that merges them in a run, and counted
on each rank. Before that, threads on real sockets exchange the same messages, and the counts must agree.

  sent      messages that a rank sends, and their bytes; it receives about as many.
  memory    the most memory that a message takes on a rank.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import pickle
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from measuring import arguments, machine, progress, report

from te_precision_callbacks import reference
from te_precision_callbacks.base.ranks import messages, tree
from te_precision_callbacks.base.ranks.meeting import Meeting, Place, connect
from te_precision_callbacks.runs.fingerprints import pooling
from te_precision_callbacks.runs.fingerprints.fingerprint import Fingerprint

COLUMNS = ("case", "ranks", "sent_0", "kib_0", "memory_0_kib", "sent", "kib", "memory_kib")

PHASES = ("attach", "first step", "step with nothing due", "due step", "checkpoint", "stop")

OF_LAYERS = ("statistics", "sizes of ")
"""The messages, by how their kind begins, whose numbers grow with the layers of all stages."""

_EVERY = 2
"""Statistics are due in every second step."""


@dataclass(frozen=True)
class Message:
    """A message that a rank has sent.

    Attributes:
        phase: one of :data:`PHASES`.
        step: how many steps had ended.
        kind: what it is.
        numbers: how many float64.
        entries: what is pooled; None where nothing is.
    """

    phase: str
    step: int
    kind: str
    numbers: int
    entries: tuple[Any, ...] | None


@dataclass
class Count:
    """What a rank has sent, and the memory of its largest message."""

    sent: int = 0
    bytes: int = 0
    memory: int = 0


# ---------------------------------------------------------------------- what two ranks exchange


def trace_of(rank: int, folder: str, blocks: int, answer: Any) -> None:
    """Train on one of two ranks; rank 0 puts its messages and its fingerprint."""
    reference.install()
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    from te_precision_callbacks.session import InspectSession

    logging.disable(logging.WARNING)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    found: list[Message] = []
    phase, steps = PHASES[0], 0
    exchange = messages.Messages._exchange

    def noting(self: Any, kind: str, why: str, numbers: Any, sums: int, text: bytes, merge: Any, *more: Any) -> bytes:
        entries = tuple(pickle.loads(text)) if text else None
        found.append(Message(phase, steps, kind, numbers.size, entries))
        return exchange(self, kind, why, numbers, sums, text, merge, *more)

    net = torch.nn.Sequential(*(te.LayerNormMLP(64, 64) for _ in range(blocks)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    config = {
        "all": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": ".*"},
            "transformer_engine": {
                "LogTensorStats": {
                    "enabled": True,
                    "stats": ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"],
                    "tensors": ["activation", "weight", "gradient"],
                    "freq": _EVERY,
                }
            },
        }
    }
    with (
        mock.patch.object(messages.Messages, "_exchange", noting),
        InspectSession(
            config, model=net, log_dir=folder, require="fp8 >= 50%", debug=("activation_overflow",)
        ) as session,
    ):
        for step in range(8):
            phase = "first step" if step == 0 else "due step" if step % _EVERY == 0 else "step with nothing due"
            with te.autocast(recipe=Float8CurrentScaling()):
                net(torch.ones(16, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            steps += 1
        phase = "checkpoint"
        fingerprint = session.state_dict(all_ranks=True)["fingerprints"][0]["fingerprint"]
        phase = "stop"
    if rank == 0:
        answer.put(([vars(message) for message in one_step(found)], fingerprint))
    dist.destroy_process_group()


def one_step(found: Sequence[Message]) -> list[Message]:
    """The messages, with those of the last step where several were alike."""
    last = {message.phase: message.step for message in found}
    return [message for message in found if message.step == last[message.phase]]


# ---------------------------------------------------------------------- among many ranks


def counts(sent: Sequence[Message], size: int, stages: int) -> list[Count]:
    """What each of ``size`` ranks sends, which are ``stages`` with layers of their own, one after another."""
    found = [Count() for _ in range(size)]
    for message in sent:
        numbers = 8 * message.numbers * (stages if message.kind.startswith(OF_LAYERS) else 1)
        texts = _Texts(message.entries)
        stages_below = [frozenset({rank * stages // size}) for rank in range(size)]
        for rank in reversed(range(1, size)):  # children have higher numbers than their parent
            parent = tree.parent_of(rank)
            stages_below[parent] |= stages_below[rank]
        whole = texts.size(stages_below[0])
        for rank, count in enumerate(found):
            children, up = len(tree.children_of(rank, size)), texts.size(stages_below[rank])
            if rank:
                count.sent += 1
                count.bytes += tree._HEAD.size + numbers + up
            count.sent += children
            count.bytes += children * (tree._HEAD.size + numbers + whole)
            count.memory = max(count.memory, (2 if children else 1) * numbers + up + whole)
    return found


class _Texts:
    """The texts that the ranks of some stages have together, of which each stage's entries differ from the others'."""

    def __init__(self, entries: tuple[Any, ...] | None) -> None:
        self._entries = entries
        self._sizes: dict[frozenset[int], int] = {}

    def of(self, stages: frozenset[int]) -> bytes:
        if self._entries is None:
            return b""
        of_each = (messages._packed((stage, entry) for entry in self._entries) for stage in sorted(stages))
        return functools.reduce(messages._union, of_each)

    def size(self, stages: frozenset[int]) -> int:
        if stages not in self._sizes:
            self._sizes[stages] = len(self.of(stages))
        return self._sizes[stages]


def counts_on_sockets(sent: Sequence[Message], size: int, stages: int) -> list[Count]:
    """As :func:`counts`, without memory: threads exchange the messages over real sockets."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    found = [Count() for _ in range(size)]
    trees: dict[int, int] = {}
    failures: list[BaseException] = []
    send = tree.Tree._send

    def counting(self: tree.Tree, neighbour: Any, parts: Any, waiting: Any) -> None:
        parts = list(parts)
        count = found[trees[id(self)]]
        count.sent += 1
        count.bytes += sum(len(part) for part in parts)
        send(self, neighbour, parts, waiting)

    def run(rank: int) -> None:
        try:
            at = Place(rank, size, "rank {}".format)
            keys, secret = Meeting(store, at).meet(60.0, "to count")
            connected = connect(keys, secret, at, 60.0)
            trees[id(connected)] = rank
            for message in sent:
                grows = message.kind.startswith(OF_LAYERS)
                numbers = np.zeros(message.numbers * (stages if grows else 1))
                text = _Texts(message.entries).of(frozenset({rank * stages // size}))
                merge = messages._first if message.entries is None else messages._union
                connected.exchange(message.kind, "to count", numbers, 0, text, merge, 60.0)
            connected.close()
        except BaseException as error:
            failures.append(error)

    with mock.patch.object(tree.Tree, "_send", counting):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return found


# ---------------------------------------------------------------------- a checkpoint


class _CountingStore:
    """A store that counts what each rank asks of it, and the bytes that it sends."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.count = Count()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*given: Any) -> Any:
            self.count.sent += 1
            answer = method(*given)
            self.count.bytes += _length((given, answer))
            return answer

        return counted


def _length(value: Any) -> int:
    """The bytes of all texts in a value."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_length, value)) if isinstance(value, (list, tuple)) else 0


def counts_of_checkpoint(text: str, size: int, stages: int) -> list[Count]:
    """What each rank asks of the store when all save together."""
    own = Fingerprint.from_text(text)
    store = _CountingStore()
    found = []
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
    ):
        for rank in reversed(range(size)):
            stage = rank * stages // size
            store.count = Count(memory=len(text) * (stages if rank == 0 else 1))
            pooling.Pool().pooled(
                Fingerprint(
                    own.iteration, own.run, rank, size, f"{own.config} {stage}", own.versions, own.recipes, own.layers
                )
            )
            found.append(store.count)
    return found[::-1]


# ---------------------------------------------------------------------- the table


def cases(sizes: Sequence[int], stages: int, blocks: int) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=trace_of, args=(rank, folder, blocks, answer)) for rank in range(2)]
        for process in processes:
            process.start()
        recorded, fingerprint = answer.get(timeout=300)  # plain values: this module may have another name there
        sent = [Message(**message) for message in recorded]
        for process in processes:
            process.join()
    for phase in PHASES:
        progress(f"{phase}: {', '.join(message.kind for message in sent if message.phase == phase) or 'no message'}")
    checked = 96
    on_sockets, counted = counts_on_sockets(sent, checked, stages), counts(sent, checked, stages)
    for rank, (real, own) in enumerate(zip(on_sockets, counted, strict=True)):
        if (real.sent, real.bytes) != (own.sent, own.bytes):
            raise SystemExit(f"rank {rank} sends {real} on sockets, but {own} was counted")
    progress(f"the counts agree with {checked} threads on sockets")
    for size in sizes:
        for phase in PHASES:
            progress(f"{size} ranks, {phase}")
            of_phase = [message for message in sent if message.phase == phase]
            found = counts(of_phase, size, stages)
            if phase == "checkpoint":
                found = counts_of_checkpoint(fingerprint, size, stages)
            yield {"case": phase, "ranks": size, "stages": stages, **_row(found)}


def _row(found: Sequence[Count]) -> Mapping[str, float]:
    first, others = found[0], found[1:]

    def most(name: str) -> float:
        return float(max(getattr(count, name) for count in others))

    return {
        "sent_0": first.sent,
        "kib_0": first.bytes / 1024,
        "memory_0_kib": first.memory / 1024,
        "sent": most("sent"),
        "sent_median": statistics.median(count.sent for count in others),
        "kib": most("bytes") / 1024,
        "kib_median": statistics.median(count.bytes for count in others) / 1024,
        "memory_kib": most("memory") / 1024,
    }


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 10_000], help="how many ranks there are")
    parser.add_argument("--stages", type=int, default=16, help="the pipeline stages (default: 16)")
    parser.add_argument("--blocks", type=int, default=24, help="LayerNormMLP of a stage, two layers each (default: 24)")
    options = parser.parse_args(given)
    described = machine(torch.device("cpu"))
    progress(described) if options.json else print(described, end="\n\n")
    found = [{**case, "machine": described} for case in cases(options.ranks, options.stages, options.blocks)]
    notes = (
        f"{options.stages} stages of {2 * options.blocks} layers. _0: of rank 0; else of the rank that has most among"
        " the others. sent: messages; at a checkpoint, requests to the store. kib: their bytes; memory_kib: of the"
        " largest."
    )
    report(found, COLUMNS, notes, as_json=options.json)


if __name__ == "__main__":
    main()
