"""The content of a dump: named plain torch tensors, and a header that describes them, as JSON in the file.

The names of the tensors follow Transformer Engine's pull request 2645; ``docs/gemm-error.md`` lists them. Scales are
neither padded nor swizzled. Transformer Engine is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Annotated, Any

import pydantic
import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.numerics.blocks import block_counts
from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0
from te_precision_callbacks.base.numerics.layouts import NVFP4, PER_TENSOR, ScaleMemory, Stored, unpack_fp4
from te_precision_callbacks.base.vocabulary import direction_name
from te_precision_callbacks.te.environment import installed_version
from te_precision_callbacks.te.tensors import has_quantizer, is_hybrid, is_quantized, part_of, quantizer_of, read_stored

SCHEMA = 1
"""The version of the header. It grows when a reader of the last version would misread a header."""

HIGH_PRECISION = "high_precision"
QUANTIZED = "quantized"
"""The names of the tensor before quantization, and of a plain tensor after quantization."""

FLOAT32 = "float32"
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1, E8M0)}
"""Name in a header -> format of elements or scales."""

# torch 2.6 has no E8M0 dtype; scales are then uint8.
SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8)}
"""Format of scales -> dtype in a dump; the default is float32."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""The valid dtypes in a header."""


class DumpError(PrecisionDebugError, RuntimeError):
    """A tensor cannot be dumped, or a dump cannot be written, read or used."""


class NotADumpError(DumpError):
    """A file is not a dump: of another kind or version, truncated, or damaged."""


def _check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return name


_Dtype = Annotated[str, pydantic.AfterValidator(_check_dtype)]
_Shape = tuple[Annotated[int, pydantic.Field(ge=0)], ...]
_Length = Annotated[int, pydantic.Field(ge=1)]
_Largest = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Direction:
    """The rowwise or the columnwise data of a quantized tensor.

    Attributes:
        format: the format of an element: "E4M3", "E5M2" or "E2M1".
        scaling_mode: "per_tensor", "mxfp8", "fp8_block_1d", "fp8_block_2d" or "nvfp4".
        data: the name of the tensor with the elements, in the order of memory.
        scale: the name of the tensor with a scale for each block.
        amax: NVFP4 only: the name of the tensor with the amax.
        shape: the shape of the quantized tensor; columnwise NVFP4 data are a matrix.
        transposed: whether the first dimension of the data is the last one of the quantized tensor.
        block: rows and columns of a block of the data, viewed as a matrix: all dimensions but the first are merged if
            transposed, else all but the last.
        scale_format: "E8M0", "E4M3" or "float32".
        largest_scale: NVFP4 only: the largest E4M3 scale, 448 or 256.
        stored_scale_shape: the shape of the scales in training: padded, and perhaps transposed.
        swizzled: whether the scales were swizzled for a GEMM in training; in a dump they are not.
        hadamard: whether the data are a random Hadamard transform of the tensor.
    """

    format: Annotated[str, pydantic.Field(pattern="^(E4M3|E5M2|E2M1)$")]
    scaling_mode: Annotated[str, pydantic.Field(pattern="^(per_tensor|mxfp8|fp8_block_1d|fp8_block_2d|nvfp4)$")]
    data: str
    scale: str
    amax: str | None
    shape: _Shape
    transposed: bool
    block: tuple[_Length, _Length]
    scale_format: Annotated[str, pydantic.Field(pattern="^(E8M0|E4M3|float32)$")]
    largest_scale: _Largest | None
    stored_scale_shape: _Shape
    swizzled: bool
    hadamard: bool


@dataclass(frozen=True)
class Plain:
    """A plain tensor: its shape, and the name of its dtype in torch, such as "bfloat16"."""

    shape: _Shape
    dtype: _Dtype


@dataclass(frozen=True)
class Quantized:
    """The tensor after quantization.

    Attributes:
        class_name: Transformer Engine's class, or "Tensor" for a plain tensor, such as after fake quantization.
        dtype: the nominal dtype of ``dequantize()``.
        quantizer: the quantizer and its settings, as text.
        rowwise, columnwise: the data of each direction, if any.
    """

    class_name: str
    shape: _Shape
    dtype: _Dtype
    quantizer: str | None = None
    rowwise: Direction | None = None
    columnwise: Direction | None = None

    @property
    def directions(self) -> dict[bool, Direction]:
        """False or True (columnwise) -> the data of a direction."""
        both = {False: self.rowwise, True: self.columnwise}
        return {columnwise: direction for columnwise, direction in both.items() if direction is not None}


@dataclass(frozen=True)
class DumpedOperand:
    """An operand in a record of a GEMM.

    Attributes:
        tensor: "activation", "weight" or "gradient".
        columnwise: whether the GEMM sums over the rows of the tensor instead of its last dimension.
        direction: the data that the GEMM read; None for the plain tensor ``NAME.values``.
        high_precision: the tensor before quantization, ``NAME.high_precision``, if the record has it.
    """

    tensor: str
    columnwise: bool
    direction: Direction | None = None
    values: Plain | None = None
    high_precision: Plain | None = None


@dataclass(frozen=True)
class DumpedGemm:
    """Describes a GEMM: ``out = alpha * left @ right^T + bias + beta * before``.

    ``left`` is the operand B, [n, k], and ``right`` the operand A, [m, k], as the extension names them. Names of their
    tensors in the file begin with ``a.`` and ``b.``; the others are ``out``, ``before`` and ``bias``.

    Attributes:
        gemm: "fprop", "dgrad" or "wgrad".
        result: the resulting tensor: "output", "dgrad" or "wgrad".
        split_accumulator: as in the call.
        out: the result, before an activation function.
        before: the tensor that the product was added to, if any.
        capability: the device's compute capability; None for the reference backend.
    """

    gemm: str
    result: str
    n: int
    m: int
    k: int
    a: DumpedOperand
    b: DumpedOperand
    out: Plain
    alpha: float = 1.0
    beta: float = 1.0
    split_accumulator: bool = False
    before: Plain | None = None
    bias: Plain | None = None
    capability: tuple[int, int] | None = None

    def operands(self) -> dict[str, DumpedOperand]:
        """Return the operands by the beginning of their tensors' names, ``left`` first."""
        return {"b": self.b, "a": self.a}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {name: installed_version(name) for name in ("transformer_engine", "te_precision_callbacks")}
    return {"torch": str(torch.__version__), **{name: version for name, version in versions.items() if version}}


@dataclass(frozen=True)
class Header:
    """Describes the tensor in a dump.

    Attributes:
        tensor: "activation", "weight", "gradient", "output", "wgrad", "dgrad", or another name.
        iteration: the debug iteration; None without one.
        micro_batch: the index of the dump among the dumps of this tensor in the iteration.
        rank: the rank of the process in the default process group.
        run: the id of the session's start on this rank, sorted by time; empty without a session.
        recipe: the quantization recipe, as text.
        high_precision, quantized: the tensor before and after quantization, if the dump has it.
        gemm: the GEMM, in a record of a GEMM, which has no ``high_precision`` and ``quantized``.
        versions: the versions of "torch", "transformer_engine" and "te_precision_callbacks".
        time: the time in UTC (ISO 8601).
        schema: the version of this header.
    """

    layer: str = ""
    tensor: str = ""
    iteration: int | None = None
    micro_batch: int = 0
    rank: int = 0
    run: str = ""
    recipe: str | None = None
    high_precision: Plain | None = None
    quantized: Quantized | None = None
    gemm: DumpedGemm | None = None
    versions: dict[str, str] = field(default_factory=_versions)
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Return the header as JSON text, for a file's metadata."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Header:
        """Read the header from the text of :meth:`to_json`; unknown fields are ignored.

        Raises:
            NotADumpError: the header has another schema than :data:`SCHEMA`.
            ValueError: the text is not a header.
        """
        schema = json.loads(text)["schema"]
        if schema != SCHEMA:
            raise NotADumpError(
                f"The dump has header version {schema}, but this te-precision-callbacks reads version {SCHEMA}:"
                " update the package."
            )
        return _HEADER.validate_json(text)


_HEADER = pydantic.TypeAdapter(Header)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Tensors = dict[str, torch.Tensor]
"""Name -> plain tensor."""


@dataclass(frozen=True, eq=False)
class Dump:
    """A tensor of training, before and after quantization.

    Attributes:
        header: the description of the tensor.
        tensors: name -> plain tensor, detached; the tensors of a new dump share training's memory.
        internals: whether a file also gets the decoded internals (:meth:`complete`).
        events: CUDA events of pending copies.
    """

    header: Header
    tensors: Tensors
    internals: bool = False
    events: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def copied(self) -> Dump:
        """Return a snapshot that is independent of training.

        Tensors on a GPU are copied asynchronously to page-locked host memory, after the work queued on the current
        stream: call :meth:`wait` before reading them.
        """
        devices = {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}
        tensors = {name: _snapshot(tensor) for name, tensor in self.tensors.items()}
        # Events after all copies, since the writer's thread waits for them.
        events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
        return dataclasses.replace(self, tensors=tensors, events=events)

    def wait(self) -> None:
        """Wait until the device has computed the tensors."""
        for event in self.events:
            event.synchronize()

    def part(self, *, columnwise: bool) -> Stored | None:
        """Return one direction of the quantized tensor, if the dump has it."""
        quantized = self.header.quantized
        if quantized is None or columnwise not in quantized.directions:
            return None
        return _stored(quantized.directions[columnwise], columnwise, self.tensors)

    def complete(self) -> Tensors:
        """Return the tensors of a file; with ``internals``, including decoded tensors.

        ``*_unpacked_values`` are FP4 codes as float32, ``*_scale_inv_values`` E8M0 and E4M3 scales as float32, and
        ``*_block_factors`` (NVFP4 only) the factors of the elements of each block.
        """
        self.wait()
        quantized = self.header.quantized
        decoded: Tensors = {}
        if quantized is not None and self.internals:
            for columnwise, direction in quantized.directions.items():
                part = _stored(direction, columnwise, self.tensors)
                if part.element_format.dtype is None:
                    codes = unpack_fp4(self.tensors[direction.data])
                    decoded[f"{direction.data}_unpacked_values"] = part.element_format.decode(codes)
                if part.scale_format is not None:
                    decoded[f"{direction.scale}_values"] = part.block_scales()
                if part.mode == NVFP4:
                    decoded[f"{direction.scale.removesuffix('scale_inv')}factors"] = part.factors()
        return {**decoded, **self.tensors}


def create_dump(header: Header, high_precision: torch.Tensor | None, quantized: Any, *, internals: bool = True) -> Dump:
    """Create a dump of a tensor. It shares the tensor's memory if the layout in the file is the same.

    Args:
        header: the description, without the contents.
        high_precision: the tensor before quantization, or None. A quantized model parameter counts as ``quantized``.
        quantized: the tensor after quantization, or None: a quantized tensor of Transformer Engine or its storage
            class, with scales in any layout; or a plain tensor.
        internals: whether files also get the decoded internals.

    Raises:
        DumpError: both tensors are None, or the kind of the quantized tensor is unknown.
        LayoutError: the quantized tensor's buffers do not match each other.
    """
    if high_precision is not None and kind_is_known(high_precision):
        if quantized is None:
            quantized = high_precision
        high_precision = None
    tensors: Tensors = {}
    if high_precision is not None:
        header = dataclasses.replace(header, high_precision=add_plain(tensors, HIGH_PRECISION, high_precision))
    if quantized is not None:
        header = dataclasses.replace(header, quantized=_add_quantized(tensors, quantized, header.high_precision))
    if not tensors:
        what = header.tensor or "a tensor"
        raise DumpError(f"There is nothing to dump for {what!r}: give high_precision or quantized.")
    return Dump(header, tensors, internals=internals)


def add_plain(tensors: Tensors, name: str, tensor: Any) -> Plain:
    """Add a plain tensor to the tensors of a file, and return its description; raises DumpError for other tensors."""
    # Subclasses that wrap other tensors: Transformer Engine's, DTensor, ...
    holds_others = has_quantizer(tensor) or hasattr(tensor, "__tensor_flatten__")
    if not isinstance(tensor, torch.Tensor) or holds_others or tensor.layout is not torch.strided or tensor.is_meta:
        raise DumpError(
            f"{type(tensor).__name__}: neither a plain, dense tensor nor a quantized tensor of a known format (Float8,"
            " Float8 blockwise, MXFP8, NVFP4). Dump the result of its dequantize(), to_dense() or to_local()."
        )
    tensors[name] = tensor.detach().as_subclass(torch.Tensor)
    return Plain(tuple(tensor.shape), dtype_name(tensor.dtype))


def add_operand(
    tensors: Tensors, side: str, operand: DumpedOperand, data: Any, high: torch.Tensor | None
) -> DumpedOperand:
    """Add an operand of a GEMM to the tensors of a file, and return its description with its contents.

    Args:
        side: "a" or "b".
        operand: its description without the contents.
        data: the plain or quantized operand.
        high: the tensor before quantization, if any.

    Raises:
        DumpError: the operand is of a kind that cannot be dumped.
    """
    if not kind_is_known(data):
        return dataclasses.replace(operand, values=add_plain(tensors, f"{side}.values", data))
    part = read_stored(data, columnwise=operand.columnwise)
    if part is None:
        raise DumpError(f"The {operand.tensor} has no data of the direction that the GEMM reads.")
    if high is not None:
        operand = dataclasses.replace(operand, high_precision=add_plain(tensors, f"{side}.{HIGH_PRECISION}", high))
    return dataclasses.replace(operand, direction=_add_direction(tensors, part, prefix=f"{side}."))


def operand_of(dump: Dump, side: str, operand: DumpedOperand) -> Stored | torch.Tensor:
    if operand.direction is None:
        return dump.tensors[f"{side}.values"]
    return _stored(operand.direction, operand.columnwise, dump.tensors)


def dequantize(dump: Dump, columnwise: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Dequantize the tensor of a dump, bit-equal to Transformer Engine's ``dequantize()``: a contiguous tensor.

    Args:
        columnwise: read the columnwise data; for per-tensor FP8 both directions are equal. If the header's
            ``columnwise.hadamard`` is set, the result is a random Hadamard transform of the tensor.
        dtype: the dtype of the result; by default the nominal dtype. float32 is exact.

    Raises:
        DumpError: the dump has no quantized tensor, or not this direction; or ``dump`` is not a dump.
    """
    if not isinstance(dump, Dump):
        raise DumpError(f"A dump is expected, not {dump!r:.200}. Use a result of load(path) or save(tensor, path).")
    what = dump.header.quantized
    if what is None:
        raise DumpError(f"The dump of {dump.header.tensor or 'a tensor'!r} has no quantized tensor.")
    dtype = dtype or DTYPES[what.dtype]
    if not what.directions:
        return dump.tensors[QUANTIZED].to(dtype).contiguous()
    part = dump.part(columnwise=columnwise)
    if part is None:
        other = dump.part(columnwise=not columnwise)
        if other is None or other.mode != PER_TENSOR:
            raise DumpError(
                f"The dump of {dump.header.tensor or 'a tensor'!r} has no {direction_name(columnwise)} data, only"
                f" {direction_name(not columnwise)}: read them with dequantize(dump, columnwise={not columnwise})."
            )
        part = other
    return part.dequantized().to(dtype).reshape(what.shape).contiguous()


def kind_is_known(tensor: Any) -> bool:
    """Return whether the tensor can be dumped as a quantized tensor, of one format in each direction."""
    return is_quantized(tensor) or is_hybrid(tensor)


def _add_quantized(tensors: Tensors, quantized: Any, high_precision: Plain | None) -> Quantized:
    class_name = type(quantized).__name__
    if not kind_is_known(quantized):
        plain = add_plain(tensors, QUANTIZED, quantized)
        return Quantized(class_name, plain.shape, plain.dtype)
    directions: dict[str, Direction] = {}
    one_object = not is_hybrid(quantized)
    for columnwise in (False, True):
        source = part_of(quantized, columnwise=columnwise)
        part = None if source is None else read_stored(source, columnwise=columnwise)
        # Per-tensor FP8 data in one layout serve both directions; write them once.
        if part is None or (part.mode == PER_TENSOR and one_object and part.transposed is not columnwise):
            continue
        directions[direction_name(columnwise)] = _add_direction(tensors, part, one_object=one_object)
    if not directions:
        raise DumpError(f"The {class_name} has no rowwise or columnwise data: they were freed or moved.")
    shape = next(iter(directions.values())).shape
    if isinstance(quantized, torch.Tensor):
        shape = tuple(quantized.shape)
    elif high_precision is not None and shape == (math.prod(high_precision.shape[:-1]), *high_precision.shape[-1:]):
        shape = high_precision.shape  # a storage with columnwise data only may have merged leading dimensions
    dtype = dtype_name(getattr(quantized, "_dtype", None) or quantized.dtype)
    return Quantized(class_name, shape, dtype, _format_quantizer(quantizer_of(quantized)), **directions)


_SHARED = ("shape", "transposed", "block", "largest_scale", "stored_scale_shape", "swizzled", "hadamard")
"""Fields that a Direction and a Stored have."""


def _shared(part: Direction | Stored) -> dict[str, Any]:
    return {name: getattr(part, name) for name in _SHARED}


def _add_direction(tensors: Tensors, part: Stored, *, one_object: bool = False, prefix: str = "") -> Direction:
    side = direction_name(part.columnwise)
    data = f"{prefix}{side}_data"
    scale = f"{prefix}{side}_block_scale_inv"
    scales = part.scales
    scale_format = FLOAT32
    if part.mode == PER_TENSOR:
        scales = scales.reshape(1)
        scale = scale.replace("block_", "")
        if one_object:
            data = "transpose" if part.columnwise else "data"
            scale = "scale_inv"
    elif part.scale_format is not None:
        scale_format = part.scale_format.name
        scales = scales.view(SCALE_DTYPES[scale_format])
    # All dimensions in the order of memory: FP8 codes in their dtype, FP4 codes two per byte.
    *leading, last = (*part.shape[-1:], *part.shape[:-1]) if part.transposed else part.shape
    codes = part.codes.reshape(*leading, last * part.element_format.bits // 8)
    if part.element_format.dtype is not None:
        codes = codes.view(part.element_format.dtype)
    tensors[data] = codes
    tensors[scale] = scales
    amax = None
    if part.amax is not None:
        amax = f"{prefix}amax_{side}"
        tensors[amax] = part.amax
    return Direction(
        format=part.element_format.name,
        scaling_mode=part.mode,
        data=data,
        scale=scale,
        amax=amax,
        scale_format=scale_format,
        **_shared(part),
    )


def _stored(direction: Direction, columnwise: bool, tensors: Mapping[str, torch.Tensor]) -> Stored:
    element_format = FORMATS[direction.format]
    scale_format = FORMATS.get(direction.scale_format)
    rows = math.prod(direction.shape[:-1])
    columns = math.prod(direction.shape[-1:])
    if direction.transposed:
        rows, columns = columns, rows
    counts = (1, 1) if direction.scaling_mode == PER_TENSOR else block_counts((rows, columns), direction.block)
    scales = tensors[direction.scale].reshape(counts)
    if scale_format is not None:
        scales = scales.view(torch.uint8)
    amax = None
    if direction.amax is not None:
        amax = tensors[direction.amax]
    return Stored(
        mode=direction.scaling_mode,
        columnwise=columnwise,
        codes=tensors[direction.data].reshape(rows, columns * element_format.bits // 8).view(torch.uint8),
        element_format=element_format,
        scale_memory=ScaleMemory(scales),
        scale_format=scale_format,
        amax=amax,
        **_shared(direction),
    )


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        # Allocates page-locked memory with torch's caching host allocator.
        return tensor.contiguous().to("cpu", non_blocking=True)
    return tensor.clone(memory_format=torch.contiguous_format)


def _format_quantizer(quantizer: Any) -> str | None:
    if quantizer is None:
        return None
    settings = []
    for name, value in sorted(vars(quantizer).items()):
        if not name.startswith("_") and isinstance(value, (bool, int, float, str, Enum)):
            settings.append(f"{name}={getattr(value, 'name', value)}")
    return f"{type(quantizer).__name__}({', '.join(settings)})"
