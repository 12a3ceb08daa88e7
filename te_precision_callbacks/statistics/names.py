"""The grammar of statistics' names, in configs and in logs.

    tensor_request("std")                      # of a tensor: LogTensorStats
    quantized_request("mxfp8_mse_columnwise")  # of its quantized form: LogFp8TensorStats
    quantized_request("mxfp8_e5m2_mse")        # in another element format than the recipe's default
    named_request("mxfp8_mse")                 # any statistic, as a user writes it outside of a config
    logged_request(request.label) == request   # the label is the name in logs and records

The name of a statistic of a quantized tensor is ``[<recipe>_[<element format>_]]<statistic>[_columnwise]``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import ELEMENT_FORMATS, ONE_SCALE, RECIPES, WITH_ELEMENT_FORMAT
from te_precision_callbacks.statistics.table import (
    BLOCK_SOURCES,
    BLOCKWISE,
    GEMM_STATISTICS,
    QUANTIZED_STATISTICS,
    STATISTICS,
    TENSOR_STATISTICS,
    Statistic,
)

_ALIASES = {other: row.name for row in RECIPES.values() for other in row.other_names}

_COLUMNWISE = "_columnwise"

_SPELLINGS = sorted([*RECIPES, *_ALIASES], key=len, reverse=True)
_NAME = re.compile(
    rf"(?:({'|'.join(_SPELLINGS)})_(?:({'|'.join(ELEMENT_FORMATS)})_)?)?(.*?)({_COLUMNWISE})?\Z", re.DOTALL
)

STALE = "stale_codes%"
"""Scalar of a weight: percentage of elements whose cached codes differ by more than the format's rounding. Recorded
without being requested."""

UNCHANGED = "unchanged_weights%"
"""Scalar of a model: percentage of bfloat16 and float16 elements that an optimizer step leaves unchanged."""

BELOW_EPS = "gradients_below_eps%"
"""Scalar of a model: percentage of weights whose gradient is below the optimizer's eps."""

CLIPPED_NORM = "grad_norm_before_clipping"
"""Scalar of a model: the gradient norm that a step's largest call of ``torch.nn.utils.clip_grad_norm_`` has clipped."""

CLIPPING_LIMIT = "clipping_limit"
"""Scalar of a model: the ``max_norm`` of that call."""

OWN_RECIPE = ""
"""Placeholder for the recipe that the layer runs."""


class UnknownStatisticError(PrecisionDebugError, ValueError):
    """An unknown statistic, or invalid parameters of a statistic."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of ``max_blockwise_dynamic_range``.

    Attributes:
        size: number of elements along a side.
        dims: 1 for pieces of a row, 2 for square tiles.
        both: whether the transposed tensor is measured too.
    """

    size: int = 32
    dims: int = 1
    both: bool = False


@dataclass(frozen=True)
class Request:
    """A requested statistic of a tensor.

    Attributes:
        label: the statistic's name in logs.
        recipe: None for a statistic of the tensor itself; :data:`OWN_RECIPE`; or a recipe of :data:`RECIPES`, which is
            simulated if the layer runs another recipe.
        blocks: for :data:`BLOCKWISE` only.
        e5m2: whether elements are E5M2 instead of E4M3, for a recipe of :data:`WITH_ELEMENT_FORMAT`. None for the
            format of the layer's own quantizer if it has the recipe, else the recipe's default.
    """

    label: str
    statistic: Statistic
    recipe: str | None = None
    columnwise: bool = False
    blocks: Blocks | None = None
    e5m2: bool | None = None

    def of(self, tensor: str) -> Request:
        """Return the request for a tensor: blocks are measured in both orientations if two GEMMs read the tensor."""
        if self.blocks is None or tensor not in ("activation", "weight"):
            return self
        return replace(self, label=f"{self.label}_max_over_orientations", blocks=replace(self.blocks, both=True))

    def under(self, recipe: str) -> Request:
        """Return the request for a layer without a recipe: ``recipe`` is simulated, and becomes part of the label."""
        return replace(self, label=f"{recipe}_{self.label}", recipe=recipe)


def tensor_request(entry: object) -> Request:
    """Parse an entry of ``stats`` of LogTensorStats.

    Args:
        entry: a name of :data:`TENSOR_STATISTICS`, or :data:`BLOCKWISE`, with parameters as in
            ``{"max_blockwise_dynamic_range": {"block_size": 32, "dims": 1}}``.

    Raises:
        UnknownStatisticError: there is no such statistic.
    """
    if isinstance(entry, Mapping):
        return _blockwise_request(entry)
    if not isinstance(entry, str) or entry not in (*TENSOR_STATISTICS, BLOCKWISE):
        raise UnknownStatisticError(f"there is no tensor statistic {entry!r}")
    if entry == BLOCKWISE:
        return _blockwise_request({BLOCKWISE: {}})
    return Request(entry, STATISTICS[entry])


def _blockwise_request(entry: Mapping[Any, Any]) -> Request:
    if list(entry) != [BLOCKWISE]:
        raise UnknownStatisticError(f"only {BLOCKWISE!r} takes parameters, not {', '.join(map(repr, entry))}")
    parameters = entry[BLOCKWISE]
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise UnknownStatisticError(f"the parameters of {BLOCKWISE!r} must be block_size and dims, not {parameters!r}")
    for key in parameters:
        if key not in ("block_size", "dims"):
            raise UnknownStatisticError(f"{BLOCKWISE!r} takes block_size and dims, not {key!r}")
    size = parameters.get("block_size", 32)
    dims = parameters.get("dims", 1)
    if type(size) is not int or size < 1:
        raise UnknownStatisticError(f"block_size of {BLOCKWISE!r} must be an integer above 0, not {size!r}")
    if type(dims) is not int or dims not in (1, 2):
        raise UnknownStatisticError(f"dims of {BLOCKWISE!r} must be 1 or 2, not {dims!r}")
    return Request(f"{BLOCKWISE}_block_size_{size}_dims_{dims}", STATISTICS[BLOCKWISE], blocks=Blocks(size, dims))


def quantized_request(entry: object, default_recipe: str = OWN_RECIPE) -> Request:
    """Parse an entry of ``stats`` of LogFp8TensorStats.

    Args:
        entry: the name, ``[<recipe>_[<element format>_]]<statistic>[_columnwise]``.
        default_recipe: the recipe of a name without one; unless :data:`OWN_RECIPE`, it becomes a prefix of the label.

    Raises:
        UnknownStatisticError: there is no such statistic, or the recipe does not have the element format.
    """
    if not isinstance(entry, str):
        raise UnknownStatisticError(f"a statistic must be a name, not {entry!r}")
    recipe, element_format, name, columnwise = _parts(entry)
    label = entry
    if default_recipe and not recipe:
        recipe = default_recipe
        label = f"{recipe}_{entry}"
    if name not in QUANTIZED_STATISTICS:
        raise UnknownStatisticError(f"there is no statistic {name!r} for quantized tensors")
    if element_format is not None and recipe not in WITH_ELEMENT_FORMAT:
        raise UnknownStatisticError(
            f"{entry!r}: {RECIPES[recipe].fixed}; leave '{element_format}_' out, or choose the format of"
            f" {', '.join(WITH_ELEMENT_FORMAT[:-1])} or {WITH_ELEMENT_FORMAT[-1]}"
        )
    if STATISTICS[name].source in BLOCK_SOURCES and recipe in ONE_SCALE:
        raise UnknownStatisticError(f"{entry!r}: {no_blocks(recipe)}")
    if columnwise and recipe in ONE_SCALE:
        raise UnknownStatisticError(
            f"{entry!r}: {recipe} has one scale for the whole tensor, so columnwise and rowwise values are equal;"
            f" remove {_COLUMNWISE!r}"
        )
    return Request(label, STATISTICS[name], recipe, columnwise, e5m2=_E5M2[element_format])


_E5M2: Mapping[str | None, bool | None] = {None: None, **{name: name == "e5m2" for name in ELEMENT_FORMATS}}


def _parts(name: str) -> tuple[str, str | None, str, bool]:
    """Split ``[<recipe>_[<element format>_]]<statistic>[_columnwise]``, without checking the combination.

    Returns:
        Recipe, element format, statistic, and whether the name is columnwise.
    """
    recipe, element_format, statistic, columnwise = next(_NAME.finditer(name)).groups()
    return _ALIASES.get(recipe, recipe) or OWN_RECIPE, element_format, statistic, columnwise is not None


BLOCKWISE_LABEL = re.compile(rf"{BLOCKWISE}_block_size_(\d+)_dims_([12])(_max_over_orientations)?")
"""Name of :data:`BLOCKWISE` with its parameters, in logs."""


@lru_cache(maxsize=4096)
def logged_request(label: str) -> Request | None:
    """Parse a name in logs and records, such as ``mxfp8_underflows%_columnwise``; None for a user's own name."""
    if label in TENSOR_STATISTICS or label in GEMM_STATISTICS:
        return Request(label, STATISTICS[label])
    blocks = BLOCKWISE_LABEL.fullmatch(label)
    if blocks:
        return Request(
            label, STATISTICS[BLOCKWISE], blocks=Blocks(int(blocks[1]), int(blocks[2]), blocks[3] is not None)
        )
    recipe, element_format, name, columnwise = _parts(label)
    if name not in QUANTIZED_STATISTICS or (element_format is not None and recipe not in WITH_ELEMENT_FORMAT):
        return None
    return Request(label, STATISTICS[name], recipe, columnwise, e5m2=_E5M2[element_format])


def named_request(name: str) -> Request:
    """Parse the name of any statistic, as in a config; with parameters, as in logs.

    Raises:
        UnknownStatisticError: there is no such statistic, or the parts of the name cannot be combined.
    """
    if name == BLOCKWISE:
        return tensor_request(name)
    if _parts(name)[2] in QUANTIZED_STATISTICS:
        return quantized_request(name)
    # Other names are the same in logs.
    logged = logged_request(name)
    if logged is None:
        raise UnknownStatisticError(f"there is no statistic {name!r}")
    return logged


def quantized_names(recipes: Iterable[str] = RECIPES) -> list[str]:
    """Return the names that :func:`quantized_request` accepts: with one of these recipes, or without a recipe.

    Other spellings of recipes are not included.
    """
    formats = ["", *(f"{name}_" for name in ELEMENT_FORMATS)]
    prefixes = ["", *(f"{recipe}_" for recipe in recipes)]
    spelled = itertools.product(prefixes, formats, QUANTIZED_STATISTICS, ("", _COLUMNWISE))
    return list(filter(is_quantized_name, map("".join, spelled)))


def is_quantized_name(entry: object) -> bool:
    """Return whether :func:`quantized_request` accepts an entry."""
    try:
        quantized_request(entry)
    except UnknownStatisticError:
        return False
    return True


def no_blocks(recipe: str) -> str:
    return (
        f"{recipe} has one scale for the whole tensor, so use 'scale_inv_max' or 'underflows%'. To simulate blocks,"
        " put 'mxfp8_', 'fp8_block_scaling_' or 'nvfp4_' before the name"
    )
