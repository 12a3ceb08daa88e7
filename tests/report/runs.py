"""Runs to look at, made in memory: a model of blocks with numbers that drift as in a training.

run = drifting(blocks=12, steps=200)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from te_precision_callbacks.runs import RecordedRun, Segment
from te_precision_callbacks.runs.tables import (
    EVENTS,
    GEMMS,
    LAYERS,
    OPERANDS,
    PLAN,
    SCALARS,
    SERIES,
    STATES,
    STEPS,
)
from te_precision_callbacks.statistics.series import family_of
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS

PARTS = ("self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2")
TENSORS = ("activation", "weight", "gradient")
STATISTICS = ("underflows%", "sqnr_db", "cur_amax", "mean", "dynamic_range", "scale_inv_max")
BAD_STEP = 0.6
"""The share of the run after which one layer drifts."""


@dataclass(frozen=True)
class Plan:
    blocks: int = 6
    steps: int = 60
    tensors: Sequence[str] = TENSORS
    statistics: Sequence[str] = STATISTICS
    ranks: Sequence[int | None] = (None,)
    histograms: bool = True
    names: Sequence[str] = ()
    notes: tuple[str, ...] = ()
    seed: int = 0

    @property
    def layers(self) -> list[str]:
        return [*self.names, *(f"decoder.layers.{block}.{part}" for block in range(self.blocks) for part in PARTS)]


class _Made:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scalars = [
            (layer, tensor, statistic, rank)
            for tensor in plan.tensors
            for statistic in plan.statistics
            for layer in plan.layers
            for rank in plan.ranks
        ]
        self.vectors = [
            (layer, tensor, "exponent_histogram", rank)
            for tensor in plan.tensors
            for layer in plan.layers
            for rank in plan.ranks
            if plan.histograms
        ]
        self.subjects = [*self.scalars, *self.vectors]
        self.place = {layer: place for place, layer in enumerate(plan.layers)}
        self.bad = plan.layers[len(plan.layers) * 2 // 3]

    def curve(self, number: int) -> np.ndarray[Any, Any]:
        layer, tensor, statistic, rank = self.subjects[number]
        plan, place = self.plan, self.place[layer]
        random = np.random.default_rng((plan.seed, number))
        time = np.linspace(0, 1, plan.steps)
        depth = place / max(len(plan.layers) - 1, 1)
        part = place % len(PARTS)
        noise = random.normal(0, 1, plan.steps)
        drift = np.clip((time - BAD_STEP) / (1 - BAD_STEP), 0, 1) if layer == self.bad else np.zeros(plan.steps)
        shift = {"activation": 0.0, "weight": -3.0, "gradient": -14.0}.get(tensor, 0.0)
        amax = np.exp2(3 + shift + 2 * depth + part * 0.7 + 0.6 * time + 0.15 * noise + 6 * drift + (rank or 0) * 0.3)
        curves = {
            "cur_amax": amax,
            "mean": amax * 1e-3 * (noise + 4 * drift + np.sin(7 * depth)),
            "dynamic_range": 18 + 3 * depth + 0.4 * noise + 6 * drift,
            "sqnr_db": 31 - 3 * depth - part - 1.5 * time + 0.3 * noise - 12 * drift,
            "scale_inv_max": np.roll(amax, 1) / 448,
            "nonfinite_num": np.where(drift > 0.98, 3.0, 0.0),
        }
        base = np.exp2(-6 + 5 * depth + part + 0.4 * noise + 9 * drift)
        return curves.get(statistic, np.minimum(np.where(noise < -1.5, 0.0, base), 100.0))

    def _columns(self, numbers: Sequence[int], each: int) -> dict[str, Any]:
        return {
            "segment": pa.array(np.zeros(len(numbers) * each, np.int16)),
            "iteration": pa.array(np.tile(np.arange(self.plan.steps, dtype=np.int64), len(numbers))),
            "series": pa.array(np.repeat(np.array(numbers, np.int32), each)),
        }

    def values(self, wanted: list[int] | None) -> pa.Table:
        numbers = [n for n in (range(len(self.subjects)) if wanted is None else wanted) if n < len(self.scalars)]
        result = np.concatenate([self.curve(number) for number in numbers]) if numbers else np.empty(0)
        columns = self._columns(numbers, self.plan.steps)
        return pa.table({**columns, "value": result, "flags": pa.array(np.zeros(len(result), np.uint8))})

    def histograms(self, wanted: list[int] | None) -> pa.Table:
        numbers = [n for n in (range(len(self.subjects)) if wanted is None else wanted) if n >= len(self.scalars)]
        bins, counts = [], []
        powers = np.arange(len(EXPONENT_COLUMNS)) - 127
        for number in numbers:
            layer, tensor, _, rank = self.subjects[number]
            of_amax = next(n for n, s in enumerate(self.scalars) if s[:2] == (layer, tensor) and s[2] == "cur_amax")
            top = np.log2(self.curve(of_amax + self.plan.ranks.index(rank)))
            shape = np.exp(-0.5 * ((powers[None] - (top[:, None] - 4)) / 2.2) ** 2) * 4096
            shape = np.floor(np.where(powers[None] <= np.floor(top[:, None]), shape, 0))
            for row in shape:
                filled = np.flatnonzero(row)
                bins.append(filled.astype(np.uint16))
                counts.append(row[filled].astype(np.float32))
        return pa.table(
            {
                **self._columns(numbers, self.plan.steps),
                "bin": pa.array(bins, pa.list_(pa.uint16())),
                "count": pa.array(counts, pa.list_(pa.float32())),
            }
        )

    def series(self) -> pa.Table:
        plan = self.plan
        alike = {"scope": "", "gemm": "", "count": plan.steps, "first": 0, "last": plan.steps - 1}
        rows = [
            {**alike, "series": number, "layer": layer, "tensor": tensor, "statistic": statistic, "rank": rank}
            for number, (layer, tensor, statistic, rank) in enumerate(self.subjects)
        ]
        for row, (_, tensor, statistic, _) in zip(rows, self.scalars, strict=False):
            curve = self.curve(row["series"])
            badness = list(map(family_of(tensor, statistic).badness, curve))
            at = badness.index(max(badness))
            row |= {"worst": curve[at], "worst_at": at}
        return pa.Table.from_pylist(rows, SERIES)


BEGIN = datetime(2026, 3, 1, 9, 30, tzinfo=timezone.utc)


def drifting(**wanted: Any) -> RecordedRun:
    """A run with one layer that drifts away after :data:`BAD_STEP` of its steps; its name is the run's ``run_id``.

    Args:
        **wanted: as in :class:`Plan`.
    """
    plan = Plan(**wanted)
    made = _Made(plan)
    time = np.linspace(0, 1, plan.steps)
    loss = 2.3 + 3 * np.exp(-5 * time) + 0.03 * np.random.default_rng(plan.seed).normal(size=plan.steps)
    steps = [
        {
            "segment": 0,
            "iteration": step,
            "logging_step": step,
            "wall_time": BEGIN + timedelta(seconds=1.4 * step),
            "step_seconds": 1.4 if step else None,
            "observe_seconds": 0.04,
            "local": False,
            "ranks": 1,
        }
        for step in range(plan.steps)
    ]
    scalars = [
        {"segment": 0, "iteration": step, "logging_step": step, "name": name, "value": float(value)}
        for name, curve in (("loss", loss), ("grad_norm", 1 + loss), ("lr", 1e-3 * (1 - time)))
        for step, value in enumerate(curve)
    ]
    layers, gemms, operands = [], [], []
    for place, layer in enumerate(plan.layers):
        layers.append(
            {
                "scope": "",
                "layer": layer,
                "given": None,
                "class": "transformer_engine.pytorch.Linear",
                "family": "te",
                "exec_fwd": place,
                "exec_bwd": len(plan.layers) - place,
                "params": 4096 * 1024,
                "weight_dtype": "bfloat16",
                "primary_weights": "high",
                "refused": None,
                "sections": ["stats"],
                "since": 0,
                "until": None,
            }
        )
        for number, gemm in enumerate(("fprop", "dgrad", "wgrad")):
            low = not (gemm == "wgrad" and place % 4 == 1)
            gemms.append(
                {
                    "gemm_id": 3 * place + number,
                    "scope": "",
                    "layer": layer,
                    "gemm": gemm,
                    "family": "te",
                    "backward": gemm != "fprop",
                    "n": 4096,
                    "m": 1024,
                    "k": 1024,
                    "batch": 1,
                    "calls": 1,
                    "macs": 4096 * 1024 * 1024,
                    "order": place,
                    "runs": "seen",
                    "not_run": "",
                    "precision": "fp8" if low else "bf16",
                    "reason": None if low else "SECTION",
                    "reason_ref": "" if low else "DisableFP8GEMM in config.yaml:7",
                    "recipe": "fp8_delayed_scaling",
                    "since": 0,
                    "until": None,
                }
            )
            for tensor in {"fprop": TENSORS[:2], "dgrad": TENSORS[:0:-1], "wgrad": TENSORS[::2]}[gemm]:
                kind = "FP8 E5M2" if tensor == "gradient" else "FP8 E4M3"
                operands.append(
                    {
                        "gemm_id": 3 * place + number,
                        "layer": layer,
                        "gemm": gemm,
                        "tensor": tensor,
                        "format": kind if low else "BF16",
                        "source": "seen",
                        "since": 0,
                        "until": None,
                    }
                )
    event = {
        "segment": 0,
        "iteration": int(BAD_STEP * plan.steps),
        "kind": "observation_failed",
        "severity": "warning",
        "wall_time": BEGIN + timedelta(seconds=10),
        "scope": "",
        "layer": made.bad,
        "text": f"Failed in observing {made.bad}",
        "data": json.dumps({"before": "FP8"}),
    }
    facts = {
        "versions": {"torch": "2.9.0", "transformer-engine": "2.20.0", "te-precision-callbacks": "0.2.0"},
        "environment": {"NVTE_FUSED_ATTN": "1"},
        "config_text": "stats:\n  enabled: True\n  layers: {layer_types: [all]}\n",
        "config_hash": "4f1a",
        "recipes": ["fp8_delayed_scaling"],
        "integration": "lightning",
        "gpu": "H100",
        "capability": "9.0",
    }
    ended = BEGIN + timedelta(seconds=1.4 * plan.steps)
    return RecordedRun(
        path=Path("logs") / "a run",
        source="te-precision-callbacks",
        run_id=made.bad,
        segments=(Segment(0, "ended", BEGIN.isoformat(), ended.isoformat(), 0, max(1, len(plan.ranks)), facts),),
        layers=pa.Table.from_pylist(layers, LAYERS),
        gemms=pa.Table.from_pylist(gemms, GEMMS),
        operands=pa.Table.from_pylist(operands, OPERANDS),
        states=pa.Table.from_pylist([{"subject": "parameter", "dtype": "bfloat16", "bytes": 8, "count": 1}], STATES),
        plan=pa.Table.from_pylist(
            [{"section": "stats", "file": "config.yaml", "line": 1, "feature": "LogTensorStats", "layer": made.bad}],
            PLAN,
        ),
        series=made.series(),
        steps=pa.Table.from_pylist(steps, STEPS),
        scalars=pa.Table.from_pylist(scalars, SCALARS),
        events=pa.Table.from_pylist([event], EVENTS),
        read_values=made.values,
        read_vectors=made.histograms,
        said=dict.fromkeys(plan.notes, False),
    )


def empty() -> RecordedRun:
    run = drifting(blocks=1, steps=1)
    tables = ("layers", "gemms", "operands", "states", "plan", "series", "steps", "scalars", "events")
    changes = {name: getattr(run, name).slice(0, 0) for name in tables}
    values, vectors = run.values().slice(0, 0), run.vectors().slice(0, 0)
    return replace(run, **changes, read_values=lambda _: values, read_vectors=lambda _: vectors)
