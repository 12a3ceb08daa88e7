"""Compares what a resume has restored with the fingerprints in the checkpoint.

for finding in compare(saved, now):
    print(finding)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from te_precision_callbacks.runs.fingerprints.fingerprint import (
    HIGH_PRECISION,
    Fingerprint,
    LayerFingerprint,
    Recipe,
    ScalingState,
    merged,
)

_MOST_PATTERNS = 4
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=gemm_)\d+")
"""A number that is a part of a path, or that of a GroupedLinear's GEMM."""


_WITH_STATE = frozenset({"amax_history_len", "qfactory"})
"""Fields of the recipes of Transformer Engine 2.20 that have, or may have, scales and histories."""


_MISSING = "No scales and amax histories were restored: the first step runs with scales of 1"
_UNSAVED = (
    "The checkpoint has no scales and amax histories, since it was saved after a forward outside of FP8, such as an"
    " evaluation: the first step runs with scales of 1"
)


@dataclass(frozen=True)
class Finding:
    """A difference between a checkpoint and what was restored from it.

    Attributes:
        what: the difference.
        layers: the layers that have it, in the order of the model; empty if it concerns the run.
        all_layers: whether these are all layers that were compared.
        of_rank: whether it is a difference of what this rank has restored; others follow from the code of all ranks.
    """

    what: str
    layers: tuple[str, ...] = ()
    all_layers: bool = False
    of_rank: bool = False

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.what}."
        return f"{self.what}: {_in_words(self.layers, all_layers=self.all_layers)}."


@dataclass(frozen=True)
class ResumeReport:
    """The differences that the audit of a resume has found.

    Attributes:
        iteration: the debug iteration of the checkpoint.
        run: names the session that wrote the checkpoint's fingerprint.
        rank: the rank whose state was compared.
        findings: the differences; empty after a good resume.
        not_compared: state that no audit compares, in words.
    """

    iteration: int
    run: str
    rank: int
    findings: tuple[Finding, ...]
    not_compared: ClassVar[tuple[str, ...]] = ("optimizer state", "master weights", "weights in high precision")

    def __str__(self) -> str:
        on = f" on rank {self.rank}" if self.rank else ""
        rest = f"Not compared: {', '.join(self.not_compared)}."
        if not self.findings:
            return (
                f"No differences{on} in the state of low precision since the checkpoint of iteration {self.iteration}"
                f" (run {self.run}). {rest}"
            )
        head = f"The run differs{on} from the checkpoint that it was resumed from (iteration {self.iteration}, run"
        return "\n".join([f"{head} {self.run}):", *(f"- {finding}" for finding in self.findings), rest])


def for_log(report: ResumeReport) -> ResumeReport:
    """The part of a report that its rank logs: rank 0 logs what is the same on all ranks."""
    findings = report.findings if report.rank == 0 else tuple(each for each in report.findings if each.of_rank)
    return replace(report, findings=findings)


def compare(saved: Mapping[int, Fingerprint], now: Fingerprint) -> ResumeReport:
    """Find the differences between the fingerprints of a checkpoint and the state of this rank.

    A layer is compared with this rank's own, if the checkpoint has it, and else with that of the lowest rank. A layer
    that only one side has is not compared.

    Args:
        saved: rank -> fingerprint, of at least one rank.
        now: states and weights as restored, before any forward; recipes as in the first step.
    """
    first = saved.get(now.rank) or saved[min(saved)]
    layers = merged(saved.values())
    found: dict[tuple[str, bool], list[str]] = {}
    compared = 0
    for layer in now.layers:
        of_rank = layers.get((layer.scope, layer.name), {})
        if not of_rank:
            continue
        compared += 1
        rank = now.rank if now.rank in of_rank else min(of_rank)
        fingerprint, before = of_rank[rank]
        recipes = fingerprint.recipe_of(before), now.recipe_of(layer)
        same_place = rank == now.rank and fingerprint.world_size == now.world_size
        same_scales = rank == now.rank or all(each is not None and each.fields.get("reduce_amax") for each in recipes)
        for difference in _differences(before, layer, recipes, same_scales=same_scales, same_place=same_place):
            found.setdefault(difference, []).append(layer.name)
    findings = [
        Finding(what, tuple(names), all_layers=len(names) == compared, of_rank=of_rank)
        for (what, of_rank), names in found.items()
    ]
    return ResumeReport(first.iteration, first.run, now.rank, (*findings, *_of_run(first, now)))


def _of_run(before: Fingerprint, now: Fingerprint) -> Iterator[Finding]:
    changed = [
        f"{name} {before.versions.get(name, 'none')} -> {now.versions.get(name, 'none')}"
        for name in sorted({*before.versions, *now.versions})
        if before.versions.get(name) != now.versions.get(name)
    ]
    if changed:
        yield Finding(f"Other versions: {', '.join(changed)}")
    if before.config != now.config:
        yield Finding("Another config of precision debugging")


def _differences(
    before: LayerFingerprint,
    now: LayerFingerprint,
    recipes: tuple[Recipe | None, Recipe | None],
    *,
    same_scales: bool,
    same_place: bool,
) -> Iterator[tuple[str, bool]]:
    """The differences of a layer, and whether each is one of what the rank has restored."""
    changed = _of_recipe(*recipes)
    if changed:
        yield changed, False
    if now.kept_format and now.kept_format != before.kept_format:
        yield (
            f"Transformer Engine keeps the checkpoint's fp8_format {now.kept_format}, although the recipe in the code"
            " has another one",
            False,
        )
    if recipes[1] is None or not _WITH_STATE.isdisjoint(recipes[1].fields):
        for what in _of_state(before, now, same_scales=same_scales, length_may_differ="amax_history_len" in changed):
            yield what, True
    for what in _of_weights(before, now, same_place=same_place):
        yield what, True
    if before.overrides != now.overrides:
        texts = [", ".join(overrides) or "none" for overrides in (before.overrides, now.overrides)]
        yield f"Other features that change precision: {texts[0]} -> {texts[1]}", False


def _of_recipe(before: Recipe | None, now: Recipe | None) -> str:
    """The change of a recipe; empty if there is none, or if one of the two is unknown."""
    if before is None or now is None or before == now:
        return ""
    if before.name != now.name:
        names = [("no recipe" if each.name == HIGH_PRECISION else each.name) for each in (before, now)]
        return f"Another recipe: {names[0]} -> {names[1]}"
    changes = [
        f"{name} {before.fields.get(name)} -> {now.fields.get(name)}"
        for name in sorted({*before.fields, *now.fields})
        if before.fields.get(name) != now.fields.get(name)
    ]
    return f"Other values of {now.name}: {', '.join(changes)}"


def _of_state(
    before: LayerFingerprint, now: LayerFingerprint, *, same_scales: bool, length_may_differ: bool
) -> Iterator[str]:
    """The differences of scales and histories; one that both directions have is one. Their contents are compared on the
    rank that saved them, or where ranks share them by a reduction of amax."""
    of_direction: dict[str, list[str]] = {}
    for direction, old, new in (
        ("forward", before.forward, now.forward),
        ("backward", before.backward, now.backward),
    ):
        if old is None or old.is_new:
            continue
        if new is None:
            of_direction.setdefault(_UNSAVED if before.unsaved else _MISSING, [])
            continue
        for what in _of_direction(old, new, same_scales=same_scales, length_may_differ=length_may_differ):
            of_direction.setdefault(what, []).append(direction)
    for what, directions in of_direction.items():
        yield f"{what} ({' and '.join(directions)})" if directions else what


def _of_direction(old: ScalingState, new: ScalingState, *, same_scales: bool, length_may_differ: bool) -> Iterator[str]:
    if new.has_unit_scales and not old.has_unit_scales:
        yield "The scales came back as 1"
    elif same_scales and new.scale != old.scale:
        yield "Other scales than in the checkpoint"
    if new.history.length != old.history.length:
        if not length_may_differ:
            yield f"Amax histories of {new.history.length} steps, of {old.history.length} in the checkpoint"
    elif same_scales and new.history != old.history:
        yield "Amax histories with another content than in the checkpoint"


def _of_weights(before: LayerFingerprint, now: LayerFingerprint, *, same_place: bool) -> Iterator[str]:
    old, new = before.weights, now.weights
    if (old.kind, old.name) != (new.kind, new.name):
        yield f"Other primary weights: {old.name} -> {new.name}"
        return
    if not same_place and (old.sharded or new.sharded):
        return  # each rank has a part of its own
    if any(new.hashes[direction] != found for direction, found in old.hashes.items() if direction in new.hashes):
        yield "Quantized primary weights came back with other data: they were rounded anew"


def unsaved_layers(fingerprint: Fingerprint) -> Finding | None:
    """The layers whose scales and amax histories a checkpoint lacks; None if it has all of them."""
    has_state = [layer for layer in fingerprint.layers if layer.forward is not None and not layer.forward.is_new]
    lacking = tuple(layer.name for layer in has_state if layer.unsaved)
    what = "The checkpoint does not have the scales and amax histories of these layers"
    return Finding(what, lacking, all_layers=len(lacking) == len(has_state)) if lacking else None


def _in_words(layers: Sequence[str], *, all_layers: bool) -> str:
    if all_layers and len(layers) > 1:
        return f"all {len(layers)} layers"
    counts: dict[str, list[str]] = {}
    for name in layers:
        counts.setdefault(_NUMBER.sub("*", name), []).append(name)
    shown = [
        names[0] if len(names) == 1 else f"{pattern} ({len(names)} layers)"
        for pattern, names in list(counts.items())[:_MOST_PATTERNS]
    ]
    more = sum(len(names) for names in list(counts.values())[_MOST_PATTERNS:])
    return ", ".join([*shown, *([f"and {more} more layers"] if more else [])])
