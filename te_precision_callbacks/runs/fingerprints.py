"""Fingerprints of the training state in a checkpoint, to audit whether a resume has restored it.

A fingerprint has hashes instead of tensors. Each rank has its own, as text in the state of a checkpoint, or as a file
in its folder.

Read from Transformer Engine 2.20.2: ``pytorch/module/base.py`` (the first forward replaces a restored recipe, and
creates or adapts the state), ``common/recipe``.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.base.numerics.layouts import PER_TENSOR
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.layers.naming import NamedModule, modules_by_layer
from te_precision_callbacks.runs.run_files import replace_whole
from te_precision_callbacks.runs.training_state import StateSamples, lost_state
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import (
    BACKWARD,
    FORWARD,
    delayed_state,
    is_in_checkpoints,
    meta_of,
    recipe_of_module,
)
from te_precision_callbacks.te.tensors import gemm_operand, is_quantized, read_stored, scaling_mode

__all__ = ["FILE_NAME", "Fingerprint", "FingerprintError", "ResumeFinding", "ResumeReport", "read"]

FILE_NAME = "te_precision_fingerprint.json"

SCHEMA = 2  # version of the JSON schema; other versions are not read

HIGH_PRECISION = "none"  # recipe of layers that train without FP8, as in GemmPrecision.recipe

QUANTIZED = frozenset({"QuantizedTensorStorage", "GroupedTensorStorage"})

_CHUNK_BYTES = 1 << 24  # size of the pieces that are hashed at once
_MOST_NAMES = 4
_FIELDS_WITH_STATE = frozenset({"amax_history_len", "qfactory"})  # fields of recipes that may have amax histories

_MISSING = "No scales and amax histories were restored: the first step uses scales of 1"
_ONES = "The restored scales are 1"
_UNSAVED = (
    "The checkpoint has no scales and amax histories, because it was saved after a forward outside of FP8, such as"
    " an evaluation: the first step uses scales of 1"
)


class FingerprintError(PrecisionDebugError, ValueError):
    """A fingerprint is damaged, or has another version."""


@dataclass(frozen=True)
class ScalingState:
    """The state of delayed scaling of a layer, for the forward or the backward.

    Attributes:
        scale, history: hashes of the scales and of the amax history.
        is_new: whether the state is the initial one: scales of 1, and a history of zeros.
        steps: length of the history.
    """

    scale: str
    history: str
    has_unit_scales: bool
    is_new: bool
    steps: int


@dataclass(frozen=True)
class Weights:
    """The primary weights of a layer, which the optimizer updates.

    Attributes:
        kind: ``"quantized"`` by ``quantized_model_init``, or ``"high"`` precision.
        name: class of quantized weights, or dtype of weights in high precision.
        hashes: direction (``rowwise``, ``columnwise``) -> hash of codes and scales; empty in high precision.
        sharded: whether the rank has only a part of the weights, as with FSDP2 and tensor parallelism.
    """

    kind: Literal["high", "quantized"]
    name: str
    hashes: Mapping[str, str]
    sharded: bool


@dataclass(frozen=True)
class RecipeFingerprint:
    """Class of a recipe, or :data:`HIGH_PRECISION`, and its fields; nested as in ``fp8_quant_fwd_inp.margin``."""

    name: str
    fields: Mapping[str, bool | int | float | str | None]


@dataclass(frozen=True)
class LayerFingerprint:
    """The state of a layer.

    Attributes:
        forward, backward: states of delayed scaling, if any.
        unsaved: whether these states are missing from the checkpoint: after a forward outside of FP8, Transformer
            Engine 2.20 saves an empty ``_extra_state`` (``pytorch/module/base.py: get_extra_state``).
        recipe: index of the layer's recipe in :attr:`Fingerprint.recipes`; None before it trains.
    """

    scope: str
    name: str
    weights: Weights
    forward: ScalingState | None = None
    backward: ScalingState | None = None
    unsaved: bool = False
    recipe: int | None = None


@dataclass(frozen=True)
class Fingerprint:
    """The state of a rank.

    Attributes:
        iteration: the next debug iteration.
        run: id of the session that took the fingerprint.
        config: hash of the config.
        versions: package -> version.
        recipes: the recipes of all layers, without duplicates.
        training: samples of the optimizers' tensors; None if no optimizer has stepped, and in older checkpoints.
    """

    iteration: int
    run: str
    rank: int
    world_size: int
    config: str
    versions: Mapping[str, str]
    recipes: tuple[RecipeFingerprint, ...] = ()
    layers: tuple[LayerFingerprint, ...] = ()
    schema: int = SCHEMA
    training: StateSamples | None = None

    def recipe_of(self, layer: LayerFingerprint) -> RecipeFingerprint | None:
        if layer.recipe is None:
            return None
        return self.recipes[layer.recipe]

    def to_text(self) -> str:
        """Return the fingerprint as JSON text."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Parse the result of :meth:`to_text`.

        Raises:
            FingerprintError: the text is damaged, or has another version.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise FingerprintError(f"The fingerprint is not JSON: {error}.") from error
        schema = None
        if isinstance(data, dict):
            schema = data.get("schema")
        if schema != SCHEMA:
            raise FingerprintError(
                f"The fingerprint has schema {schema!r}, but this version of te-precision-callbacks reads {SCHEMA}."
                " Resume once without the audit: the next checkpoint will have a readable fingerprint."
            )
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise FingerprintError(f"The fingerprint is damaged: {place}: {first['msg']}.") from error


# ---------------------------------------------------------------------- files


def file_name(rank: int) -> str:
    if rank == 0:
        return FILE_NAME
    return f"te_precision_fingerprint_rank-{rank}.json"


def write(fingerprint: Fingerprint, folder: Path) -> None:
    """Write a fingerprint atomically; raises OSError."""
    text = fingerprint.to_text().encode()
    replace_whole(folder / file_name(fingerprint.rank), lambda file: file.write(text))


def read(folder: Path, rank: int) -> Fingerprint | None:
    """Read the fingerprint of a rank, or else of rank 0, from a checkpoint; raises FingerprintError."""
    for path in (folder / file_name(rank), folder / FILE_NAME):
        if path.exists():
            try:
                return Fingerprint.from_text(regular_file(path).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise FingerprintError(f"{path}: {error}") from error
    return None


# ---------------------------------------------------------------------- taking


def with_layers(facts: Fingerprint, modules: Iterable[NamedModule]) -> Fingerprint:
    """Add the states and weights of this rank's modules; before the first forward, these are as restored."""
    layers: list[LayerFingerprint] = []
    for named in modules:
        count = len(named.layers)
        forward = _states(named.module, FORWARD, count)
        backward = _states(named.module, BACKWARD, count)
        unsaved = not is_in_checkpoints(named.module)
        for number, (layer, state, of_backward) in enumerate(zip(named.layers, forward, backward, strict=True)):
            weights = _weights(named.module, number)
            lacking = unsaved and state is not None
            layers.append(LayerFingerprint(layer.scope, layer.name, weights, state, of_backward, lacking))
    return replace(facts, layers=tuple(layers))


def with_recipes(
    fingerprint: Fingerprint, modules: Iterable[NamedModule], trained_in_fp8: Callable[[str], bool | None]
) -> Fingerprint:
    """Add the recipes of the layers, which their first forward sets.

    Args:
        trained_in_fp8: returns whether a layer trained in FP8 in its last step; None if unknown. The state of a module
            does not show this, since its last forward may have been an evaluation in another precision.
    """
    module_of = modules_by_layer(modules)
    recipes: list[RecipeFingerprint] = []
    layers = []
    for layer in fingerprint.layers:
        in_force = recipe_of_module(module_of[layer.name]) if layer.name in module_of else None
        if trained_in_fp8(layer.name) is False:
            recipe = RecipeFingerprint(HIGH_PRECISION, {})
        elif in_force is not None:
            recipe = recipe_fingerprint(in_force)
        else:
            layers.append(layer)
            continue
        if recipe not in recipes:
            recipes.append(recipe)
        layers.append(replace(layer, recipe=recipes.index(recipe)))
    return replace(fingerprint, recipes=tuple(recipes), layers=tuple(layers))


def recipe_fingerprint(recipe: Any) -> RecipeFingerprint:
    """Return a recipe's public attributes, of the class and the object, without methods and properties."""
    fields = []
    for name in dir(recipe):
        of_class = inspect.getattr_static(type(recipe), name, None)
        is_field = name in vars(recipe) or not (callable(of_class) or hasattr(of_class, "__get__"))
        if is_field and not name.startswith("_"):
            fields.append((name, getattr(recipe, name)))
    return RecipeFingerprint(type(recipe).__name__, dict(_flat(fields)))


def _flat(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, bool | int | float | str | None]]:
    for name, value in values:
        if isinstance(value, enum.Enum):
            yield name, value.name
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield name, value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = ((f"{name}.{entry.name}", getattr(value, entry.name)) for entry in dataclasses.fields(value))
            yield from _flat(inside)
        else:  # a user's function, whose repr has an address
            yield name, f"{type(value).__name__} {getattr(value, '__qualname__', '')}".rstrip()


def _states(module: torch.nn.Module, direction: str, layers: int) -> list[ScalingState | None]:
    state = delayed_state(meta_of(module), direction)
    if state is None:
        return [None] * layers
    states: list[ScalingState | None] = []
    scales = state.scale.detach().cpu().chunk(layers)
    histories = state.amax_history.detach().cpu().chunk(layers, 1)
    for scale, history in zip(scales, histories, strict=True):
        unit = bool((scale == 1).all())
        is_new = unit and not history.any()
        states.append(ScalingState(content_hash(scale), content_hash(history), unit, is_new, len(history)))
    return states


def _weights(module: Any, number: int) -> Weights:
    weights = te_modules.of(module).weights(module, number)
    local = [getattr(weight, "_local_tensor", weight) for weight in weights]  # a DTensor holds its shard (torch 2.13)
    quantized = [weight for weight in local if not QUANTIZED.isdisjoint(class_names(weight))]
    hashes = {}
    for direction, columnwise in (("rowwise", False), ("columnwise", True)):
        parts = itertools.chain(*(_data(weight, columnwise=columnwise) for weight in quantized))
        if tensors := list(parts):
            hashes[direction] = content_hash(*tensors)
    sharded = getattr(module, "tp_size", 1) > 1 or any(hasattr(weight, "_local_tensor") for weight in weights)
    if quantized:
        names = dict.fromkeys(type(weight).__name__ for weight in quantized)
        return Weights("quantized", ", ".join(names), hashes, sharded)
    names = dict.fromkeys(str(weight.dtype).partition(".")[2] for weight in local)
    return Weights("high", ", ".join(names), hashes, sharded)


def _data(weight: Any, *, columnwise: bool) -> list[torch.Tensor]:
    """Return codes and scales; empty for an unknown class, and for columnwise data that are a transposed copy."""
    held = gemm_operand(weight, columnwise=columnwise)
    if not is_quantized(held) or (columnwise and scaling_mode(held) == PER_TENSOR):
        return []
    part = read_stored(held, columnwise=columnwise)
    if part is None:
        return []
    return [tensor for tensor in (part.codes, part.scales, part.amax) if tensor is not None]


def content_hash(*tensors: torch.Tensor) -> str:
    """Hash the bytes of tensors on their device: 16 hexadecimal digits.

    The hash is a sum over the 64-bit words w, modulo 2^64: ``w ^ (w >> 32)`` times an odd number that depends on the
    position. A change of one word always changes the sum. Without the shift, two changed signs would cancel.
    """
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        subtotal = torch.zeros((), dtype=torch.int64, device=data.device)
        for start in range(0, data.numel(), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            words = torch.zeros(-(-chunk.numel() // 8), dtype=torch.int64, device=data.device)
            words.view(torch.uint8)[: chunk.numel()] = chunk
            first = start // 4 + 1
            odd = torch.arange(first, first + 2 * words.numel(), 2, device=data.device)
            words ^= (words >> 32) & 0xFFFFFFFF  # torch shifts negative numbers arithmetically
            subtotal += (words * odd).sum()
        total = total * 0x9E3779B97F4A7C15 + int(subtotal) + data.numel()
    return f"{total % 2**64:016x}"


# ---------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class ResumeFinding:
    """A difference between a checkpoint and the restored state.

    Attributes:
        layers: the affected layers or parameters, in model order; empty if the difference is not about these.
        all_layers: whether all compared ones are affected.
        of_rank: whether ranks may have different findings, since it is about restored data instead of the code.
        of_training: whether it is about parameters, and what their optimizer keeps.
    """

    what: str
    layers: tuple[str, ...] = ()
    all_layers: bool = False
    of_rank: bool = False
    of_training: bool = False

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.what}."
        if self.all_layers and len(self.layers) > 1:
            return f"{self.what}: all {len(self.layers)} {'parameters' if self.of_training else 'layers'}."
        return f"{self.what}: {', '.join(fold_names(self.layers, most=_MOST_NAMES))}."


@dataclass(frozen=True)
class ResumeReport:
    """The result of the audit of a resume.

    Attributes:
        iteration: the debug iteration of the checkpoint.
        run: id of the session that wrote the checkpoint's fingerprint.
        rank: the compared rank.
        findings: the differences; empty after a good resume.
        not_compared: state that was not compared.
    """

    iteration: int
    run: str
    rank: int
    findings: tuple[ResumeFinding, ...]
    not_compared: tuple[str, ...] = ()

    def __str__(self) -> str:
        on = ""
        if self.rank:
            on = f" on rank {self.rank}"
        rest = f"Not compared: {', '.join(self.not_compared)}."
        if not self.findings:
            return (
                f"No differences{on} in the compared state since the checkpoint of iteration {self.iteration}"
                f" (run {self.run}). {rest}"
            )
        head = f"The run differs{on} from the checkpoint that it was resumed from (iteration {self.iteration}, run"
        return "\n- ".join((f"{head} {self.run}):", *map(str, self.findings))) + f"\n{rest}"


def for_log(report: ResumeReport) -> ResumeReport:
    """Return the part of a report that its rank logs; findings about all ranks are logged by rank 0 only."""
    if report.rank == 0:
        return report
    return replace(report, findings=tuple(finding for finding in report.findings if finding.of_rank))


def compare(saved: Fingerprint, now: Fingerprint) -> ResumeReport:
    """Compare a checkpoint's fingerprint with the state of this rank.

    Layers in only one of them are skipped.

    Args:
        saved: the fingerprint of this rank, or of rank 0.
        now: states and weights as restored, before any forward, and the recipes of the first step.
    """
    before = {(layer.scope, layer.name): layer for layer in saved.layers}
    common = [layer for layer in now.layers if (layer.scope, layer.name) in before]
    differences = group_by_key(
        (difference, layer.name)
        for layer in common
        for difference in _differences(saved, before[layer.scope, layer.name], now, layer)
    )
    findings = []
    for (what, of_rank), names in differences.items():
        findings.append(ResumeFinding(what, tuple(names), len(names) == len(common), of_rank))
    not_compared = ["buffers", "random numbers", "the order of the data"]
    if saved.training and now.training and (saved.rank, saved.world_size) == (now.rank, now.world_size):
        saved_parameters = saved.training.parameters.keys()
        unstepped = saved_parameters - now.training.parameters.keys()
        if unstepped:
            not_compared.insert(0, f"{many(len(unstepped), 'parameter')} that no optimizer was seen to step")
        for what, names in lost_state(saved.training, now.training).items():
            is_of_all = len(names) == len(saved_parameters)
            findings.append(ResumeFinding(what, tuple(names), is_of_all, of_rank=True, of_training=True))
    else:
        not_compared[:0] = ["the optimizer's state", "master weights", "weights in high precision"]
    changed = _changes(saved.versions, now.versions, "none")
    if changed:
        findings.append(ResumeFinding(f"Other versions: {changed}"))
    if saved.config != now.config:
        findings.append(ResumeFinding("Another config of precision debugging"))
    return ResumeReport(saved.iteration, saved.run, now.rank, tuple(findings), tuple(not_compared))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], missing: Any = None) -> str:
    changes = []
    for name in sorted({*before, *now}):
        old = before.get(name, missing)
        new = now.get(name, missing)
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    return ", ".join(changes)


def _differences(
    saved: Fingerprint, before: LayerFingerprint, now: Fingerprint, layer: LayerFingerprint
) -> Iterator[tuple[str, bool]]:
    """Yield the differences of a layer, and whether each concerns restored data."""
    recipes = old, new = saved.recipe_of(before), now.recipe_of(layer)
    changed = ""
    if old is not None and new is not None and old != new:
        changed = f"Other values of {new.name}: {_changes(old.fields, new.fields)}"
        if old.name != new.name:
            names = {HIGH_PRECISION: "no recipe"}
            changed = f"Another recipe: {names.get(old.name, old.name)} -> {names.get(new.name, new.name)}"
        yield changed, False
    same_rank = saved.rank == now.rank
    if new is None or not _FIELDS_WITH_STATE.isdisjoint(new.fields):
        # Contents are compared on the rank that saved them, or if they are equal on all ranks by reduced amaxes.
        same_scales = same_rank or all(recipe is not None and recipe.fields.get("reduce_amax") for recipe in recipes)
        pairs = []
        for direction in ("forward", "backward"):
            states = getattr(before, direction), getattr(layer, direction)
            differences = _scaling_differences(*states, before.unsaved, same_scales, "amax_history_len" in changed)
            pairs += [(what, direction) for what in differences]
        for what, directions in group_by_key(pairs).items():
            if what not in (_MISSING, _UNSAVED):
                what += f" ({' and '.join(directions)})"
            yield what, True
    weights = before.weights
    restored = layer.weights
    if (weights.kind, weights.name) != (restored.kind, restored.name):
        yield f"Other primary weights: {weights.name} -> {restored.name}", True
        return
    comparable = (same_rank and saved.world_size == now.world_size) or not (weights.sharded or restored.sharded)
    if comparable and any(
        restored.hashes.get(direction, content) != content for direction, content in weights.hashes.items()
    ):
        yield "Quantized primary weights have changed: they were rounded again", True


def _scaling_differences(
    old: ScalingState | None, new: ScalingState | None, unsaved: bool, same_scales: bool, length_may_differ: bool
) -> Iterator[str]:
    if old is None or old.is_new:
        return
    if new is None:
        if unsaved:
            yield _UNSAVED
        else:
            yield _MISSING
        return
    if new.has_unit_scales and not old.has_unit_scales:
        yield _ONES
    elif same_scales and new.scale != old.scale:
        yield "The scales differ from the checkpoint"
    if new.steps != old.steps:
        if not length_may_differ:
            yield f"Amax histories of {new.steps} steps instead of {old.steps} in the checkpoint"
    elif same_scales and new.history != old.history:
        yield "The amax histories differ from the checkpoint"


def unsaved_layers(fingerprint: Fingerprint) -> ResumeFinding | None:
    with_state = [layer for layer in fingerprint.layers if layer.forward is not None and not layer.forward.is_new]
    lacking = tuple(layer.name for layer in with_state if layer.unsaved)
    if not lacking:
        return None
    what = "The checkpoint does not have the scales and amax histories of these layers"
    return ResumeFinding(what, lacking, all_layers=len(lacking) == len(with_state))
