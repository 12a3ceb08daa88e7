"""Compare the spy's notes of two runs, and the debugger's statistics with the spy's.

Usage::

    plain, watched = Notes.read(run_without.record), Notes.read(run_with.record)
    compare_losses(plain, watched), compare_gemms(plain, watched)
    check_statistics(watched, run_with.logs)
"""

from __future__ import annotations

import collections
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE = re.compile(r"INFO - (?P<name>\S+)\s+iteration=(?P<iteration>\d+)\s+value=(?P<value>\S+)$")
STATISTICS = ("min", "max", "mean", "std", "l1_norm", "underflows%", "scale_inv_min", "scale_inv_max", "mse")
TENSORS = ("activation", "weight", "gradient", "output", "wgrad", "dgrad")
NAME = re.compile(f"(.+)_({'|'.join(TENSORS)})_({'|'.join(STATISTICS)})")  # as encoder.fc1_activation_max
# A statistic may be off by this, relative to the larger of the tensor's mean magnitude and the value itself.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Notes:
    ranks: tuple[tuple[dict[str, Any], ...], ...]

    @classmethod
    def read(cls, folder: Path) -> Notes:
        files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
        return cls(tuple(tuple(json.loads(line) for line in path.open(encoding="utf-8")) for path in files))

    def of(self, kind: str, rank: int) -> list[dict[str, Any]]:
        return [note for note in self.ranks[rank] if note["kind"] == kind]

    def count(self, kind: str) -> int:
        return sum(len(self.of(kind, rank)) for rank in range(len(self.ranks)))


def compare_losses(plain: Notes, watched: Notes) -> str:
    """Empty if losses and parameters after each step are the same to the last digit; else the first difference."""
    if len(plain.ranks) != len(watched.ranks):
        return f"{len(plain.ranks)} ranks without, {len(watched.ranks)} with"
    if not plain.count("step"):
        return "no step of an optimizer was seen"
    for rank in range(len(plain.ranks)):
        for kind, key in (("loss", "value"), ("step", "parameters")):
            pairs = zip(plain.of(kind, rank), watched.of(kind, rank), strict=False)
            for without, having in pairs:
                if without[key] != having[key]:
                    values = [_readable(note[key]) for note in (without, having)]
                    return f"{kind} {without['step']} of rank {rank}: {values[0]} without, {values[1]} with"
            counts = len(plain.of(kind, rank)), len(watched.of(kind, rank))
            if counts[0] != counts[1]:
                return f"rank {rank}: {counts[0]} times a {kind} without, {counts[1]} with"
    return ""


def _readable(value: str) -> str:
    return repr(float.fromhex(value)) if value.startswith(("0x", "-0x")) else value


def compare_gemms(plain: Notes, watched: Notes) -> str:
    """Empty if every GEMM of each rank read and gave the same bytes in the same order; else the first difference."""
    for rank in range(len(plain.ranks)):
        without, having = plain.of("gemm", rank), watched.of("gemm", rank)
        for index, (first, second) in enumerate(zip(without, having, strict=False)):
            for part in ("layout", "A", "B", "D"):
                if _identity(first[part]) != _identity(second[part]):
                    where = f"GEMM {index} of rank {rank} (step {first['step']}, {first['layer'] or 'backward'})"
                    return f"{where}: {part} {_shown(first[part])} without, {_shown(second[part])} with"
        if len(without) != len(having):
            return f"rank {rank}: {len(without)} GEMMs without, {len(having)} with"
    return ""


def _identity(part: Any) -> Any:
    return part if isinstance(part, str) else (part.get("kind"), part["read"])


def _shown(part: Any) -> str:
    return part if isinstance(part, str) else f"{part.get('kind', '')} {part['read']}".strip()


# ---------------------------------------------------------------------------------------------- statistics


@dataclass
class Checked:
    """Comparison of the debugger's log with the spy's statistics.

    Attributes:
        equal: how many were within the tolerance.
        different: the others: name, iteration, the debugger's value, the spy's.
        unlinked: how many are of tensors that the spy did not see in high precision, by why.
        largest: the largest deviation, relative.
    """

    equal: int = 0
    different: list[tuple[str, int, float, float]] = field(default_factory=list)
    unlinked: collections.Counter[str] = field(default_factory=collections.Counter)
    largest: float = 0.0


def check_statistics(watched: Notes, logs: Path) -> Checked:
    """Compare every line of the statistics logs with figures of the tensors that the spy took.

    The spy records the tensors of a layer's GEMMs: in the forward, the layer whose forward runs; in the backward, the
    only layer with that weight, that gradient, or that activation, by the bytes of the tensors in high precision.
    Figures of all micro-batches and ranks are put together; of a weight the first micro-batch counts.
    """
    checked = Checked()
    first_step = 0
    for log_dir in sorted(logs.iterdir(), key=lambda path: int(path.name)) if logs.is_dir() else ():
        lines = list(read_log(log_dir))
        steps = 1 + max((iteration for _, iteration, _ in lines), default=-1)
        seen = _tensors(watched, range(first_step, first_step + steps))
        for name, iteration, value in lines:
            _check_line(checked, seen, first_step, name, iteration, float(value))
        first_step += steps
    return checked


def read_log(log_dir: Path) -> Iterator[tuple[str, int, str]]:
    """Name, iteration and value, as it is written, of each line of a statistics log."""
    path = log_dir / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    for line in path.open(encoding="utf-8") if path.is_file() else ():
        if match := LINE.search(line.rstrip()):
            yield match["name"], int(match["iteration"]), match["value"]


Key = tuple[int, str, str]
"""Step, layer, tensor."""


@dataclass
class Figures:
    parts: list[dict[str, Any]] = field(default_factory=list)
    quantized: list[dict[str, float]] = field(default_factory=list)


def _tensors(watched: Notes, steps: Iterable[int]) -> dict[Key, Figures]:
    result: dict[Key, Figures] = collections.defaultdict(Figures)
    owners: dict[tuple[Key, str], int] = {}
    wanted = set(steps)
    for rank in range(len(watched.ranks)):
        by_step: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
        for note in watched.of("gemm", rank):
            if note["step"] in wanted:
                by_step[note["step"]].append(note)
        for step, notes in by_step.items():
            _add(functools.partial(_put, result, owners, rank), step, notes)
    return result


def _put(
    result: dict[Key, Figures], owners: dict[tuple[Key, str], int], rank: int, key: Key, operand: Mapping[str, Any]
) -> None:
    """Add a rank's tensor to the other ranks' tensors. Tensors equal bit for bit on several ranks count once."""
    figures, source = result[key], operand["source"]
    if source is not None and owners.setdefault((key, source["hash"]), rank) == rank:
        figures.parts.append(source)
        if operand.get("quantized") is not None:
            figures.quantized.append(operand["quantized"])


def _add(put: Callable[[Key, Mapping[str, Any]], None], step: int, notes: list[dict[str, Any]]) -> None:
    forwards: collections.Counter[str] = collections.Counter()
    weights: set[str] = set()
    owners: dict[tuple[str, str], set[str]] = collections.defaultdict(set)

    def owns(tensor: str, source: Mapping[str, Any] | None, layer: str) -> None:
        if source is not None:
            owners[tensor, source["hash"]].add(layer)

    def owners_of(tensor: str, source: Mapping[str, Any] | None) -> set[str]:
        return set() if source is None else owners.get((tensor, source["hash"]), set())

    for note in notes:
        if note["layout"] != "TN" or not note["trains"]:
            continue
        layer = _strip(note["layer"] or "?") + ("" if note["expert"] is None else f".gemm_{note['expert']}")
        forwards[layer] += 1
        if note["of"] == "LayerNormMLP" and forwards[layer] % 2 == 0:
            layer += "#2"
        put((step, layer, "activation"), note["B"])
        put((step, layer, "output"), note["D"])
        if layer not in weights:
            put((step, layer, "weight"), note["A"])
        weights.add(layer)
        owns("weight", note["A"]["source"], layer)
        owns("activation", note["B"]["source"], layer)
    for note in notes:  # layers with the same bytes, such as LoRA's zeros, cannot be distinguished
        first, second = (note[part]["source"] for part in ("A", "B"))
        if note["layout"] == "NN":
            for layer in _the_one(owners_of("weight", first)):
                put((step, layer, "gradient"), note["B"])
                put((step, layer, "dgrad"), note["D"])
                owns("gradient", second, layer)
        elif note["layout"] == "NT":
            by_gradient, by_activation = owners_of("gradient", second), owners_of("activation", first)
            for layer in _the_one(by_gradient & by_activation or by_gradient or by_activation):
                if layer not in by_gradient:
                    put((step, layer, "gradient"), note["B"])
                if not note["accumulate"]:
                    put((step, layer, "wgrad"), note["D"])


def _the_one(layers: set[str]) -> Iterable[str]:
    return layers if len(layers) == 1 else ()


def _strip(name: str) -> str:
    return re.sub(
        r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module|base_layer|base_model\.model)(?=\.|$)",
        "",
        name,
    ).lstrip(".")


def _check_line(
    checked: Checked, seen: Mapping[Key, Figures], first_step: int, name: str, iteration: int, value: float
) -> None:
    match = NAME.fullmatch(name)
    if match is None:
        checked.unlinked["another statistic"] += 1
        return
    layer, tensor, statistic = match.groups()
    figures = seen.get((first_step + iteration, _spied_name(layer), tensor))
    wanted = None if figures is None else expected(figures, statistic)
    if wanted is None:
        checked.unlinked[tensor] += 1
        return
    scale = max(abs(wanted), _magnitude(figures) if statistic in ("mean", "min", "max") else 0.0)
    deviation = 0.0 if value == wanted else abs(value - wanted) / scale if scale else math.inf
    checked.largest = max(checked.largest, deviation)
    if deviation <= TOLERANCE:
        checked.equal += 1
    else:
        checked.different.append((name, iteration, value, wanted))


def _spied_name(layer: str) -> str:
    """A LayerNormMLP is one module with two GEMMs in its forward."""
    match = re.fullmatch(r"(?:(.+)\.)?fc([12])", layer)
    return layer if match is None else (match[1] or "") + {"1": "", "2": "#2"}[match[2]]


def _magnitude(figures: Figures | None) -> float:
    parts = figures.parts if figures is not None else []
    count = sum(part["n"] for part in parts)
    return sum(part.get("l1", 0.0) for part in parts) / count if count else 0.0


def expected(figures: Figures, statistic: str) -> float | None:
    """The statistic of all parts together; None if it cannot be computed from them."""
    parts = [part for part in figures.parts if part["n"]]
    count = sum(part["n"] for part in parts)
    if statistic in ("underflows%", "mse", "scale_inv_min", "scale_inv_max"):
        quantized = figures.quantized
        if not quantized or len(quantized) != len(figures.parts):
            return None
        scales = [part["scale_inv"] for part in quantized]
        return {
            "underflows%": 100 * sum(part["underflows"] for part in quantized) / count,
            "mse": sum(part["squared_error"] for part in quantized) / count,
            "scale_inv_min": min(scales),
            "scale_inv_max": max(scales),
        }[statistic]
    if not parts:
        return None
    mean = math.fsum(part["mean"] * part["n"] for part in parts) / count
    if statistic == "std":
        about = math.fsum(part["m2"] + part["n"] * (part["mean"] - mean) ** 2 for part in parts)
        return math.sqrt(about / (count - 1)) if count > 1 else 0.0
    return {
        "min": min(part["min"] for part in parts),
        "max": max(part["max"] for part in parts),
        "mean": mean,
        "l1_norm": math.fsum(part["l1"] for part in parts),
    }[statistic]
