"""What a dump holds: plain torch tensors with a name each, and a header that says what they are.

Usage::

    dump = dump_of(
        high_precision, quantized, internals=True, layer="fc1", tensor="activation", iteration=100
    )
    snapshot = dump.copied()  # training may go on
    write(snapshot, "fc1_activation.safetensors")  # files.py; from any thread

The names of the tensors are those of Transformer Engine's pull request 2645, as far as it has them; ``docs/dumps.md``
lists them. Scales are neither padded nor swizzled, whatever layout training used: that is the work of
:mod:`te_precision_callbacks.layouts`. Nothing here needs Transformer Engine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

import pydantic
import torch

from te_precision_callbacks.dumps.errors import DumpError, LaterVersionError, NotADumpError
from te_precision_callbacks.formats import E2M1, E4M3, E5M2, E8M0
from te_precision_callbacks.layouts import NVFP4, PER_TENSOR, Stored, is_quantized, stored, unpacked

SCHEMA = 1
"""The version of the header that this package writes. It grows when a reader of the last one would misread a dump."""

HIGH_PRECISION, QUANTIZED = "high_precision", "quantized"
"""The names of the tensor before quantization, and of what it became where that is a plain tensor."""

FLOAT32 = "float32"
_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1, E8M0)}
# torch 2.6 has no E8M0: there these scales are their bytes.
_SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8)}


@dataclass(frozen=True)
class Direction:
    """The rowwise or the columnwise data of a quantized tensor.

    Attributes:
        format: what one element is: "E4M3", "E5M2" or "E2M1".
        scaling_mode: "per_tensor", "mxfp8", "fp8_block_1d", "fp8_block_2d" or "nvfp4".
        data: the name of the tensor with the elements, in the order of memory.
        scale: the name of the tensor with a scale for each block.
        amax: NVFP4 only: the name of the tensor with the amax.
        shape: of the quantized tensor. Columnwise NVFP4 data are a matrix, whatever the leading dimensions were.
        transposed: whether the first dimension of the data is the last one of the quantized tensor.
        block: rows and columns of a block of the data, taken as a matrix: its first dimension against the others where
            it is transposed, its last one against the others where it is not.
        scale_format: "E8M0", "E4M3" or "float32".
        largest_scale: NVFP4 only: the E4M3 number that stands for the largest scale, 448 or 256.
        stored_scale_shape: of the scales in training: padded, and perhaps transposed.
        swizzled: whether the scales were, in training, in the order that a GEMM reads. In the dump they never are.
        hadamard: whether the data are of a random Hadamard transform of the tensor.
    """

    format: str
    scaling_mode: str
    data: str
    scale: str
    amax: str | None
    shape: tuple[int, ...]
    transposed: bool
    block: tuple[int, int]
    scale_format: str
    largest_scale: float | None
    stored_scale_shape: tuple[int, ...]
    swizzled: bool
    hadamard: bool


@dataclass(frozen=True)
class Plain:
    """A plain tensor: its shape, and its dtype as torch calls it ("bfloat16")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Quantized:
    """What the tensor became.

    Attributes:
        class_name: Transformer Engine's, or "Tensor" where it stayed a plain tensor, of fake quantization for example.
        shape: of the tensor.
        dtype: the nominal one, which ``dequantize()`` gives.
        quantizer: the quantizer and its settings, in words.
        rowwise, columnwise: what there is of either direction.
    """

    class_name: str
    shape: tuple[int, ...]
    dtype: str
    quantizer: str | None = None
    rowwise: Direction | None = None
    columnwise: Direction | None = None

    def direction(self, columnwise: bool) -> Direction | None:
        """One of the two."""
        return self.columnwise if columnwise else self.rowwise


@dataclass(frozen=True)
class Header:
    """What a dump is of.

    Attributes:
        layer: the layer's name in the model.
        tensor: "activation", "weight", "gradient", "output", "wgrad", "dgrad", or any other word.
        iteration: the debug iteration; None where there is none.
        micro_batch: counts the dumps of this tensor within the iteration, from 0.
        rank: of the process in the default process group.
        recipe: the quantization recipe, in words.
        high_precision: the tensor before quantization, if the dump has it.
        quantized: what it became, if the dump has it.
        versions: of "torch", "transformer_engine" and "te_precision_callbacks" where the dump was made.
        time: when, in UTC (ISO 8601).
        schema: the version of this header.
    """

    layer: str = ""
    tensor: str = ""
    iteration: int | None = None
    micro_batch: int = 0
    rank: int = 0
    recipe: str | None = None
    high_precision: Plain | None = None
    quantized: Quantized | None = None
    versions: dict[str, str] = field(default_factory=dict)
    time: str = ""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The header as a JSON object, with the names of the attributes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Header:
        """The header from :meth:`to_json`; what a later version added beside it is ignored.

        Raises:
            NotADumpError: the text is not a header.
            LaterVersionError: its schema is later than :data:`SCHEMA`.
        """
        try:
            version = _SchemaOnly.model_validate_json(text).version
        except pydantic.ValidationError as error:
            raise NotADumpError("The header is not that of a dump: it has no number under 'schema'.") from error
        if version > SCHEMA:
            raise LaterVersionError(
                f"The dump has a header of version {version}, and this te-precision-callbacks reads up to {SCHEMA}:"
                " update the package."
            )
        try:
            return _HEADER.validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise NotADumpError(f"The header of the dump is damaged at {place!r}: {first['msg']}.") from error


class _SchemaOnly(pydantic.BaseModel):
    version: int = pydantic.Field(alias="schema")


_HEADER = pydantic.TypeAdapter(Header)


@dataclass(frozen=True, eq=False)
class Dump:
    """A tensor of training, before and after quantization.

    Attributes:
        header: what it is.
        tensors: name -> plain tensor, detached; of a fresh dump they share training's memory.
        internals: whether a file gets the decoded internals too (:meth:`complete`).
        original: Transformer Engine's tensor itself, for files of the format "torch" only.
        events: of CUDA: the copies that :meth:`wait` waits for.
    """

    header: Header
    tensors: dict[str, torch.Tensor]
    internals: bool = False
    original: Any = field(default=None, repr=False)
    events: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that this object holds."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + sum(
            tensor.nbytes for tensor in _buffers(self.original).values()
        )

    @property
    def file_bytes(self) -> int:
        """The bytes of all tensors in a file of it, decoded internals and all, without the header's few thousand."""
        decoded = 0
        for direction, _ in self._directions() if self.internals else ():
            for name, elements in _decoded_sizes(direction, self.tensors).items():
                decoded += 0 if name in self.tensors else elements * 4
        return self.nbytes + decoded

    def copied(self) -> Dump:
        """A snapshot that training cannot change any more.

        On a CPU a copy. From a GPU the tensors go to page-locked host memory, behind what the current stream was given
        so far, and nothing waits: :meth:`wait` does, before they are read. ``original`` stays on its device.
        """
        devices = {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}
        tensors = {name: _snapshot(tensor) for name, tensor in self.tensors.items()}
        events = []
        for device in devices:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return dataclasses.replace(self, tensors=tensors, original=_cloned(self.original), events=tuple(events))

    def wait(self) -> None:
        """Wait until the copies of :meth:`copied` have arrived."""
        for event in self.events:
            event.synchronize()

    def part(self, *, columnwise: bool) -> Stored | None:
        """One direction of the quantized tensor, from the internals; None if the dump does not have it.

        Raises:
            NotADumpError: the tensors are not as the header says.
        """
        quantized = self.header.quantized
        direction = quantized.direction(columnwise) if quantized is not None else None
        if direction is None:
            return None
        if self.original is not None and direction.data not in self.tensors:
            return stored(self.original, columnwise=columnwise)
        return _part(direction, columnwise, self.tensors)

    def complete(self) -> dict[str, torch.Tensor]:
        """The tensors of a file: where ``internals`` is set with the decoded ones, computed if they are not there yet.

        Returns:
            name -> tensor. ``*_unpacked_values``: the numbers of FP4 codes, float32. ``*_scale_inv_values``: E8M0 and
            E4M3 scales as float32. ``*_block_factors``: of NVFP4: what the numbers of a block are multiplied by.
        """
        tensors = dict(self.tensors)
        for direction, part in self._directions() if self.internals else ():
            for name, tensor in _decoded(direction, part):
                tensors.setdefault(name, tensor)
        return tensors

    def _directions(self) -> Iterator[tuple[Direction, Stored]]:
        quantized = self.header.quantized
        for columnwise in (False, True):
            direction = quantized.direction(columnwise) if quantized is not None else None
            if direction is not None:
                yield direction, _part(direction, columnwise, self.tensors)


def dump_of(
    high_precision: torch.Tensor | None,
    quantized: Any,
    *,
    internals: bool = True,
    layer: str = "",
    tensor: str = "",
    iteration: int | None = None,
    micro_batch: int = 0,
    rank: int = 0,
    recipe: Any = None,
    columnwise_from: Any = None,
    keep_quantized: bool = False,
) -> Dump:
    """A dump of a tensor, sharing its memory where it lies there as it is written.

    Args:
        high_precision: the tensor before quantization, or None. A quantized one (a quantized model parameter) has no
            high precision: it is taken as ``quantized`` where that is None, and is left out otherwise.
        quantized: what it became, or None: a quantized tensor of Transformer Engine or its storage class, with scales
            in any layout; or a plain tensor.
        internals: whether files hold the decoded internals too.
        layer, tensor, iteration, micro_batch, rank: see :class:`Header`.
        recipe: the recipe, an object or words.
        columnwise_from: the quantized tensor whose columnwise data are meant, where that is another one.
        keep_quantized: keep the object itself, for a file of the format "torch". Its internals are then in the dump
            only with ``internals``.

    Raises:
        DumpError: neither tensor is there, or the quantized one is of a kind that is not known.
        LayoutError: the quantized tensor's buffers do not fit one another.
    """
    if high_precision is not None and _kind_is_known(high_precision):
        high_precision, quantized = None, high_precision if quantized is None else quantized
    if high_precision is None and quantized is None:
        raise DumpError(f"There is nothing to dump of {tensor or 'a tensor'!r}: neither high_precision nor quantized.")
    tensors: dict[str, torch.Tensor] = {}
    plain = None
    if high_precision is not None:
        tensors[HIGH_PRECISION] = _plain(high_precision)
        plain = Plain(tuple(high_precision.shape), dtype_name(high_precision.dtype))
    what = None
    if quantized is not None:
        what, of_quantized = _quantized(quantized, columnwise_from)
        if internals or not keep_quantized:
            tensors.update(of_quantized)
    header = Header(
        layer=layer,
        tensor=tensor,
        iteration=iteration,
        micro_batch=micro_batch,
        rank=rank,
        recipe=None if recipe is None else str(recipe),
        high_precision=plain,
        quantized=what,
        versions=dict(_versions()),
        time=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
    )
    return Dump(header, tensors, internals=internals, original=_pickled(quantized, what) if keep_quantized else None)


def dequantize(dump: Dump, columnwise: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The quantized tensor as numbers, from the dump's internals alone.

    Bit for bit what Transformer Engine's ``dequantize()`` gives of the same data: the product in float32, then rounded
    to the nominal dtype.

    Args:
        dump: one with a quantized tensor.
        columnwise: which of its two directions; of per-tensor FP8 both are the same, and either is read. Columnwise
            NVFP4 data may be of a random Hadamard transform of the tensor: then so is the result, and the header's
            ``columnwise.hadamard`` is set.
        dtype: of the result; by default the nominal one. float32 holds each number exactly.

    Returns:
        The tensor's shape, contiguous.

    Raises:
        DumpError: the dump has no quantized tensor, or not this direction.
    """
    what = dump.header.quantized
    if what is None:
        raise DumpError(f"The dump of {dump.header.tensor or 'a tensor'!r} has no quantized tensor.")
    dtype = getattr(torch, what.dtype) if dtype is None else dtype
    if QUANTIZED in dump.tensors and what.rowwise is None and what.columnwise is None:
        return dump.tensors[QUANTIZED].to(dtype).contiguous()
    part = dump.part(columnwise=columnwise)
    if part is None:
        other = dump.part(columnwise=not columnwise)
        if other is None or other.mode != PER_TENSOR:
            has, lacks = ("rowwise", "columnwise") if columnwise else ("columnwise", "rowwise")
            raise DumpError(
                f"The dump of {dump.header.tensor or 'a tensor'!r} has no {lacks} data, only {has}:"
                f" dequantize(dump, columnwise={not columnwise}) reads those."
            )
        part = other
    return part.dequantized().to(dtype).reshape(what.shape).contiguous()


def dtype_name(dtype: torch.dtype) -> str:
    """As torch calls it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _kind_is_known(tensor: Any) -> bool:
    return is_quantized(tensor) or hasattr(tensor, "_rowwise_storage")


def _pickled(quantized: Any, what: Quantized | None) -> Any:
    """A tensor that can be unpickled, with the same buffers: storage classes cannot."""
    if what is None or isinstance(quantized, torch.Tensor):
        return quantized
    name = what.class_name.removesuffix("Storage")
    of_tensor = getattr(sys.modules.get("transformer_engine.pytorch"), name, None)
    if of_tensor is None:
        raise DumpError(f"{what.class_name}: cannot be pickled. A file of the format 'safetensors' can hold it.")
    buffers = {key: value for key, value in quantized.get_metadata().items() if key != "fake_dtype"}
    return of_tensor(shape=what.shape, dtype=getattr(torch, what.dtype), **buffers)


def _plain(tensor: Any) -> torch.Tensor:
    """The tensor without its graph, if it is one that torch alone can read."""
    # Subclasses that hold other tensors: of Transformer Engine, DTensor, ...
    holds_others = hasattr(tensor, "_quantizer") or hasattr(tensor, "__tensor_flatten__")
    if not isinstance(tensor, torch.Tensor) or holds_others or tensor.layout is not torch.strided or tensor.is_meta:
        raise DumpError(
            f"{type(tensor).__name__}: neither a plain, dense tensor nor a quantized one of a format that is known here"
            " (Float8, Float8 blockwise, MXFP8, NVFP4). Dump what its dequantize(), to_dense() or to_local() gives."
        )
    return tensor.detach().as_subclass(torch.Tensor)


def _quantized(quantized: Any, columnwise_from: Any) -> tuple[Quantized, dict[str, torch.Tensor]]:
    class_name = type(quantized).__name__
    if not _kind_is_known(quantized):
        tensor = _plain(quantized)
        return Quantized(class_name, tuple(tensor.shape), dtype_name(tensor.dtype)), {QUANTIZED: tensor}
    other = quantized if columnwise_from is None else columnwise_from
    of_columns = getattr(other, "_columnwise_storage", other)
    of_rows = getattr(quantized, "_rowwise_storage", quantized)
    tensors: dict[str, torch.Tensor] = {}
    directions: dict[bool, Direction] = {}
    for columnwise, source in ((False, of_rows), (True, of_columns)):
        part = None if source is None else stored(source, columnwise=columnwise)
        # What per-tensor FP8 has of one layout only serves both directions, and is written once.
        if part is None or (part.mode == PER_TENSOR and of_rows is of_columns and part.transposed is not columnwise):
            continue
        directions[columnwise], of_direction = _internals(part, one_object=of_rows is of_columns)
        tensors.update(of_direction)
    if not directions:
        raise DumpError(f"The {class_name} has neither rowwise nor columnwise data: they were freed, or moved away.")
    dtype = getattr(quantized, "_dtype", None) or quantized.dtype
    first = directions.get(False) or directions[True]
    described = Quantized(
        class_name=class_name,
        shape=tuple(quantized.shape) if isinstance(quantized, torch.Tensor) else first.shape,
        dtype=dtype_name(dtype),
        quantizer=_in_words(getattr(quantized, "_quantizer", None)),
        rowwise=directions.get(False),
        columnwise=directions.get(True),
    )
    return described, tensors


def _internals(part: Stored, *, one_object: bool) -> tuple[Direction, dict[str, torch.Tensor]]:
    side = "columnwise" if part.columnwise else "rowwise"
    data, scale, amax = f"{side}_data", f"{side}_block_scale_inv", None
    if part.mode == PER_TENSOR:
        scale = f"{side}_scale_inv"
        if one_object:
            data, scale = ("transpose" if part.columnwise else "data"), "scale_inv"
    tensors = {data: _elements_in_memory(part), scale: part.scales}
    if part.mode == PER_TENSOR:
        tensors[scale] = part.scales.reshape(1)
    elif part.scale_format is not None:
        tensors[scale] = part.scales.view(_SCALE_DTYPES[part.scale_format.name])
    if part.amax is not None:
        amax = f"amax_{side}"
        tensors[amax] = part.amax
    direction = Direction(
        format=part.element_format.name,
        scaling_mode=part.mode,
        data=data,
        scale=scale,
        amax=amax,
        shape=tuple(part.shape),
        transposed=part.transposed,
        block=part.block,
        scale_format=FLOAT32 if part.scale_format is None else part.scale_format.name,
        largest_scale=part.largest_scale,
        stored_scale_shape=part.stored_scale_shape,
        swizzled=part.swizzled,
        hadamard=part.hadamard,
    )
    return direction, tensors


def _elements_in_memory(part: Stored) -> torch.Tensor:
    """The codes with all dimensions: of FP8 in the format's own dtype, of FP4 two a byte."""
    shape = part.shape
    if part.transposed:
        shape = (*shape[-1:], *shape[:-1])
    if part.element_format.dtype is None:
        return part.codes.reshape(*shape[:-1], shape[-1] // 2)
    return part.codes.reshape(shape).view(part.element_format.dtype)


def _part(direction: Direction, columnwise: bool, tensors: Mapping[str, torch.Tensor]) -> Stored:
    try:
        element_format, scale_format = _FORMATS[direction.format], _FORMATS.get(direction.scale_format)
        data, scales = tensors[direction.data], tensors[direction.scale]
        amax = None if direction.amax is None else tensors[direction.amax]
    except KeyError as error:
        raise NotADumpError(f"The dump has no {error.args[0]!r}, which its header speaks of.") from error
    rows, columns = _matrix_shape(direction)
    width = columns // 2 if element_format.bits == 4 else columns
    blocks = (1, 1)
    if direction.scaling_mode != PER_TENSOR:
        blocks = (-(-rows // direction.block[0]), -(-columns // direction.block[1]))
    if data.numel() != rows * width or scales.numel() != math.prod(blocks) or data.element_size() != 1:
        raise NotADumpError(
            f"The dump's {direction.data} {tuple(data.shape)} and {direction.scale} {tuple(scales.shape)} are not those"
            f" of {direction.shape} in blocks of {direction.block}, as the header says."
        )
    return Stored(
        mode=direction.scaling_mode,
        columnwise=columnwise,
        codes=data.reshape(rows, width).view(torch.uint8),
        transposed=direction.transposed,
        element_format=element_format,
        scales=scales.reshape(blocks) if scale_format is None else scales.reshape(blocks).view(torch.uint8),
        scale_format=scale_format,
        block=direction.block,
        shape=direction.shape,
        stored_scale_shape=direction.stored_scale_shape,
        amax=amax,
        largest_scale=direction.largest_scale,
        swizzled=direction.swizzled,
        hadamard=direction.hadamard,
    )


def _matrix_shape(direction: Direction) -> tuple[int, int]:
    leading, last = math.prod(direction.shape[:-1]), math.prod(direction.shape[-1:])
    return (last, leading) if direction.transposed else (leading, last)


def _decoded(direction: Direction, part: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    if part.element_format.dtype is None:
        data = part.element_format.decode(unpacked(part.codes))
        shape = direction.shape
        in_memory = (*shape[-1:], *shape[:-1]) if part.transposed else shape
        yield f"{direction.data}_unpacked_values", data.reshape(in_memory)
    if part.scale_format is not None:
        yield f"{direction.scale}_values", part.block_scales()
    if part.mode == NVFP4:
        yield _factors_name(direction), part.factors()


def _decoded_sizes(direction: Direction, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The elements, float32, of what :func:`_decoded` gives."""
    sizes = {}
    data, scales = tensors[direction.data].numel(), tensors[direction.scale].numel()
    if _FORMATS[direction.format].dtype is None:
        sizes[f"{direction.data}_unpacked_values"] = data * 2
    if direction.scale_format != FLOAT32:
        sizes[f"{direction.scale}_values"] = scales
    if direction.scaling_mode == NVFP4:
        sizes[_factors_name(direction)] = scales
    return sizes


def _factors_name(direction: Direction) -> str:
    return direction.scale.replace("_scale_inv", "_factors")


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        # To page-locked memory, as torch does it for a copy that does not block.
        return tensor.contiguous().to("cpu", non_blocking=True)
    return tensor.clone(memory_format=torch.contiguous_format)


def _cloned(original: Any) -> Any:
    if original is None:
        return None
    if type(original) is torch.Tensor:
        return original.detach().clone()
    # Upstream's clone() shares the scale of per-tensor FP8: so buffer by buffer.
    if isinstance(original, torch.Tensor):
        copied = original.detach()
    else:
        copied = object.__new__(type(original))
        vars(copied).update(vars(original))
    for name, value in list(vars(copied).items()):
        if isinstance(value, torch.Tensor) or hasattr(value, "get_metadata"):
            setattr(copied, name, _cloned(value))
    return copied


def _buffers(original: Any) -> dict[str, torch.Tensor]:
    if original is None:
        return {}
    if hasattr(original, "get_metadata"):
        metadata = original.get_metadata()
        return {name: value for name, value in metadata.items() if isinstance(value, torch.Tensor)}
    return {QUANTIZED: original}


def _in_words(quantizer: Any) -> str | None:
    if quantizer is None:
        return None
    settings = [
        f"{name}={value.name if isinstance(value, Enum) else value}"
        for name, value in sorted(vars(quantizer).items())
        if not name.startswith("_") and isinstance(value, (bool, int, float, str, Enum))
    ]
    return f"{type(quantizer).__name__}({', '.join(settings)})"


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    versions = [("torch", str(torch.__version__))]
    for name in ("transformer_engine", "te_precision_callbacks"):
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(versions)
