"""A fingerprint: the state of low precision in one moment of a run, small enough for every checkpoint.

    text = fingerprint.to_text()                # JSON, one line
    fingerprint = Fingerprint.from_text(text)   # FingerprintError if it is not one

A fingerprint holds no tensor: of each it has length, range and hash. It belongs to one rank, and is text in a
checkpoint's state, or a file in its folder:

    te_precision_fingerprint.json          of rank 0
    te_precision_fingerprint_rank-3.json   of rank 3
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.runs.run_files import replace_whole

SCHEMA = 1
"""The version of the JSON form. Another version is not read."""

Value = bool | int | float | str | None

HIGH_PRECISION = "none"
"""The name in place of a recipe's for a layer that trains outside of FP8, as in ``GemmPrecision.recipe``."""


class FingerprintError(PrecisionDebugError, ValueError):
    """A text is not a fingerprint, or one of another version."""


@dataclass(frozen=True)
class TensorDigest:
    """A tensor in numbers.

    Attributes:
        length: its length along the first dimension.
        min, max: its smallest and its largest element.
        hash: of its content, see :func:`te_precision_callbacks.runs.fingerprints.taking.content_hash`.
    """

    length: int
    min: float
    max: float
    hash: str


@dataclass(frozen=True)
class ScalingState:
    """The state of delayed scaling of one layer, in one direction.

    Attributes:
        scale: float32, [quantizers of the layer].
        history: the amax history: float32, [steps, quantizers of the layer].
    """

    scale: TensorDigest
    history: TensorDigest

    @property
    def has_unit_scales(self) -> bool:
        """Whether all scales are 1."""
        return self.scale.min == self.scale.max == 1.0

    @property
    def is_new(self) -> bool:
        """Whether this is the state that Transformer Engine begins with."""
        return self.has_unit_scales and self.history.min == self.history.max == 0.0


@dataclass(frozen=True)
class Weights:
    """The primary weights of a layer, which the optimizer updates.

    Attributes:
        kind: ``"quantized"`` by ``quantized_model_init``, or ``"high"`` precision.
        name: the class of quantized weights; the dtype of others.
        hashes: direction (``rowwise``, ``columnwise``) -> hash of codes and scales; empty in high precision.
        sharded: whether the rank has only a part of them, as with FSDP2 and tensor parallelism.
    """

    kind: Literal["high", "quantized"]
    name: str
    hashes: Mapping[str, str]
    sharded: bool


@dataclass(frozen=True)
class Recipe:
    """A recipe, with the values of all of its fields.

    Attributes:
        name: its class, or :data:`HIGH_PRECISION`.
        fields: field -> value; those of a nested object as ``fp8_quant_fwd_inp.power_2_scale``.
    """

    name: str
    fields: Mapping[str, Value]


@dataclass(frozen=True)
class LayerFingerprint:
    """The state of one layer, which ``scope`` and ``name`` identify.

    Attributes:
        scope, name: as :class:`te_precision_callbacks.layers.naming.Layer` has them.
        recipe: the number of its recipe in :attr:`Fingerprint.recipes`; None if it is unknown, since the layer has not
            trained in this process.
        kept_format: the ``fp8_format`` by which its quantizers were made, if the recipe has another one: Transformer
            Engine 2.20 keeps the quantizers of a restored recipe (``pytorch/module/base.py: set_meta_tensor``). Empty
            otherwise.
        weights: its primary weights.
        forward, backward: its state of delayed scaling; None if it has none.
        overrides: the features of the config that can change the precision of its GEMMs.
        unsaved: whether the checkpoint lacks its state: Transformer Engine 2.20 saves an empty ``_extra_state`` after a
            forward outside of FP8 (``pytorch/module/base.py: get_extra_state``).
    """

    scope: str
    name: str
    recipe: int | None
    kept_format: str
    weights: Weights
    forward: ScalingState | None
    backward: ScalingState | None
    overrides: tuple[str, ...]
    unsaved: bool = False


@dataclass(frozen=True)
class Fingerprint:
    """The state of one rank.

    Attributes:
        iteration: the debug iteration that was next.
        run: names the session that took the fingerprint.
        rank, world_size: of torch.distributed.
        config: a hash of the config.
        versions: package -> version.
        recipes: the recipes of all layers, each once.
        layers: the layers of this rank.
        schema: :data:`SCHEMA`.
    """

    iteration: int
    run: str
    rank: int
    world_size: int
    config: str
    versions: Mapping[str, str]
    recipes: tuple[Recipe, ...] = ()
    layers: tuple[LayerFingerprint, ...] = ()
    schema: int = SCHEMA

    def recipe_of(self, layer: LayerFingerprint) -> Recipe | None:
        """The recipe of one of its layers; None if it is unknown."""
        return None if layer.recipe is None else self.recipes[layer.recipe]

    def to_text(self) -> str:
        """The fingerprint as JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Read :meth:`to_text`.

        Raises:
            FingerprintError: the text is damaged, or of another version.
        """
        # Not above: a checkpoint is read once a run.
        from pydantic import TypeAdapter, ValidationError

        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise FingerprintError(f"The fingerprint is not JSON: {error}.") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise FingerprintError(
                f"The fingerprint has schema {schema!r}, and this version of te-precision-callbacks reads {SCHEMA}."
                " Resume once without the audit: its next checkpoint has a fingerprint that can be read."
            )
        try:
            found = TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise FingerprintError(f"The fingerprint is damaged: {place}: {first['msg']}.") from error
        if any(layer.recipe is not None and not 0 <= layer.recipe < len(found.recipes) for layer in found.layers):
            raise FingerprintError("The fingerprint is damaged: a layer has a recipe that is not in 'recipes'.")
        return found


Identity = tuple[str, str]
"""Scope and name of a layer."""


def merged(fingerprints: Iterable[Fingerprint]) -> dict[Identity, dict[int, tuple[Fingerprint, LayerFingerprint]]]:
    """The layers of several ranks: identity -> rank -> the rank's fingerprint and its layer."""
    found: dict[Identity, dict[int, tuple[Fingerprint, LayerFingerprint]]] = {}
    for fingerprint in sorted(fingerprints, key=lambda entry: entry.rank):
        for layer in fingerprint.layers:
            found.setdefault((layer.scope, layer.name), {})[fingerprint.rank] = (fingerprint, layer)
    return found


# ---------------------------------------------------------------------- files in the folder of a checkpoint, one a rank

FILE_NAME = "te_precision_fingerprint.json"


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return FILE_NAME if rank == 0 else f"te_precision_fingerprint_rank-{rank}.json"


def write(fingerprint: Fingerprint, folder: Path) -> None:
    """Write a fingerprint; its file appears when it is complete, and replaces an earlier one.

    Raises:
        OSError: it cannot be written.
    """
    text = fingerprint.to_text().encode()
    replace_whole(folder / file_name(fingerprint.rank), lambda file: file.write(text))


def read(folder: Path, rank: int) -> dict[int, Fingerprint]:
    """The fingerprints of a checkpoint that a rank is compared with: its own, or those of all ranks if it has none.

    Args:
        folder: the folder of the checkpoint.
        rank: the rank.

    Returns:
        Rank -> fingerprint; empty for a checkpoint without fingerprints.

    Raises:
        FingerprintError: a file cannot be read, is damaged, or of another version.
    """
    own = folder / file_name(rank)
    found = {}
    for path in [own] if own.exists() else sorted(folder.glob("te_precision_fingerprint*.json")):
        try:
            fingerprint = Fingerprint.from_text(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FingerprintError(f"{path}: {error}") from error
        found[fingerprint.rank] = fingerprint
    return found
