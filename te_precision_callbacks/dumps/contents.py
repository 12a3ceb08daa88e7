"""The content of a dump: named plain torch tensors, and a header that describes them.

The names of the tensors follow Transformer Engine's pull request 2645; ``docs/gemm-error.md`` lists them. Scales are
neither padded nor swizzled. Transformer Engine is not needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from te_precision_callbacks.base.numerics.blocks import block_counts
from te_precision_callbacks.base.numerics.layouts import NVFP4, PER_TENSOR, ScaleMemory, Stored, unpack_fp4
from te_precision_callbacks.base.vocabulary import direction_name
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.dumps.header import (
    DTYPES,
    FLOAT32,
    FORMATS,
    HIGH_PRECISION,
    QUANTIZED,
    SCALE_DTYPES,
    Direction,
    DumpedGemm,
    Header,
    Plain,
    Quantized,
    dtype_name,
)
from te_precision_callbacks.te.tensors import has_quantizer, is_hybrid, is_quantized, part_of, quantizer_of, read_stored


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
    tensors: dict[str, torch.Tensor]
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
        events = []
        for device in devices:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return dataclasses.replace(self, tensors=tensors, events=tuple(events))

    def wait(self) -> None:
        """Wait until the device has computed the tensors."""
        for event in self.events:
            event.synchronize()

    def part(self, *, columnwise: bool) -> Stored | None:
        """Return one direction of the quantized tensor, if the dump has it."""
        quantized = self.header.quantized
        if quantized is None:
            return None
        direction = quantized.direction(columnwise)
        if direction is None:
            return None
        return _part(direction, columnwise, self.tensors)

    def complete(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a file; with ``internals``, including decoded tensors.

        ``*_unpacked_values`` are FP4 codes as float32, ``*_scale_inv_values`` E8M0 and E4M3 scales as float32, and
        ``*_block_factors`` (NVFP4 only) the factors of the elements of each block.
        """
        tensors = dict(self.tensors)
        quantized = self.header.quantized
        if quantized is None or not self.internals:
            return tensors
        for columnwise in (False, True):
            direction = quantized.direction(columnwise)
            part = self.part(columnwise=columnwise)
            if direction is not None and part is not None:
                tensors = {**dict(_decoded_tensors(direction, part)), **tensors}
        return tensors


def create_dump(
    header: Header,
    high_precision: torch.Tensor | None,
    quantized: Any,
    *,
    internals: bool = True,
    columnwise_from: Any = None,
) -> Dump:
    """Create a dump of a tensor. It shares the tensor's memory if the layout in the file is the same.

    Args:
        header: the description, without the contents.
        high_precision: the tensor before quantization, or None. A quantized model parameter counts as ``quantized``.
        quantized: the tensor after quantization, or None: a quantized tensor of Transformer Engine or its storage
            class, with scales in any layout; or a plain tensor.
        internals: whether files also get the decoded internals.
        columnwise_from: another quantized tensor with the columnwise data.

    Raises:
        DumpError: both tensors are None, or the kind of the quantized tensor is unknown.
        LayoutError: the quantized tensor's buffers do not match each other.
    """
    if high_precision is not None and kind_is_known(high_precision):
        if quantized is None:
            quantized = high_precision
        high_precision = None
    if high_precision is None and quantized is None:
        what = header.tensor or "a tensor"
        raise DumpError(f"There is nothing to dump for {what!r}: give high_precision or quantized.")
    tensors: dict[str, torch.Tensor] = {}
    plain = None
    described = None
    if high_precision is not None:
        tensors[HIGH_PRECISION] = _plain(high_precision)
        plain = _describe_plain(high_precision)
    if quantized is not None:
        described, of_quantized = _describe_quantized(quantized, columnwise_from, plain)
        tensors.update(of_quantized)
    header = dataclasses.replace(header, high_precision=plain, quantized=described)
    return Dump(header, tensors, internals=internals)


def create_record(
    header: Header,
    gemm: DumpedGemm,
    operands: Mapping[str, tuple[Any, torch.Tensor | None]],
    *,
    out: torch.Tensor,
    before: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Dump:
    """Create a record of a GEMM.

    Args:
        header: the description, without the contents.
        gemm: its description, with the tensors and directions of its operands, but without their contents.
        operands: "a" and "b" -> the plain or quantized operand, and the tensor before quantization, if any.
        out, before, bias: the result, the tensor that the product was added to, and the bias.

    Raises:
        DumpError: an operand or the result is of a kind that cannot be dumped.
    """
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    for side, (data, high) in operands.items():
        operand = gemm.operands()[side]
        if kind_is_known(data):
            part = read_stored(data, columnwise=operand.columnwise)
            if part is None:
                raise DumpError(f"The {operand.tensor} has no data of the direction that the GEMM reads.")
            direction, of_direction = _internals(part, one_object=False, prefix=f"{side}.")
            tensors.update(of_direction)
            operand = dataclasses.replace(operand, direction=direction)
            if high is not None:
                tensors[f"{side}.{HIGH_PRECISION}"] = _plain(high)
                operand = dataclasses.replace(operand, high_precision=_describe_plain(high))
        else:
            tensors[f"{side}.values"] = _plain(data)
            operand = dataclasses.replace(operand, values=_describe_plain(data))
        described[side] = operand
    for name, tensor in (("out", out), ("before", before), ("bias", bias)):
        if tensor is not None:
            tensors[name] = _plain(tensor)
            described[name] = _describe_plain(tensor)
    gemm = dataclasses.replace(gemm, **described)
    return Dump(dataclasses.replace(header, tensor=f"{gemm.gemm}_gemm", gemm=gemm), tensors)


def _describe_plain(tensor: torch.Tensor) -> Plain:
    return Plain(tuple(tensor.shape), dtype_name(tensor.dtype))


def operand_of(dump: Dump, side: str) -> Stored | torch.Tensor:
    gemm = dump.header.gemm
    if gemm is None:
        raise DumpError("The dump has a single tensor, not a whole GEMM. DumpTensors writes GEMMs with 'gemms'.")
    operand = gemm.operands()[side]
    if operand.direction is None:
        return dump.tensors[f"{side}.values"]
    return _part(operand.direction, operand.columnwise, dump.tensors)


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
    if QUANTIZED in dump.tensors and what.rowwise is None and what.columnwise is None:
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


def _plain(tensor: Any) -> torch.Tensor:
    # Subclasses that wrap other tensors: Transformer Engine's, DTensor, ...
    holds_others = has_quantizer(tensor) or hasattr(tensor, "__tensor_flatten__")
    if not isinstance(tensor, torch.Tensor) or holds_others or tensor.layout is not torch.strided or tensor.is_meta:
        raise DumpError(
            f"{type(tensor).__name__}: neither a plain, dense tensor nor a quantized tensor of a known format (Float8,"
            " Float8 blockwise, MXFP8, NVFP4). Dump the result of its dequantize(), to_dense() or to_local()."
        )
    return tensor.detach().as_subclass(torch.Tensor)


def _describe_quantized(
    quantized: Any, columnwise_from: Any, before: Plain | None
) -> tuple[Quantized, dict[str, torch.Tensor]]:
    class_name = type(quantized).__name__
    if not kind_is_known(quantized):
        tensor = _plain(quantized)
        return Quantized(class_name, tuple(tensor.shape), dtype_name(tensor.dtype)), {QUANTIZED: tensor}
    if columnwise_from is None:
        columnwise_from = quantized
    columns = part_of(columnwise_from, columnwise=True)
    rows = part_of(quantized, columnwise=False)
    tensors: dict[str, torch.Tensor] = {}
    directions: dict[bool, Direction] = {}
    for columnwise, source in ((False, rows), (True, columns)):
        if source is None:
            continue
        part = read_stored(source, columnwise=columnwise)
        # Per-tensor FP8 data in one layout serve both directions; write them once.
        if part is None or (part.mode == PER_TENSOR and rows is columns and part.transposed is not columnwise):
            continue
        directions[columnwise], of_direction = _internals(part, one_object=rows is columns)
        tensors.update(of_direction)
    if not directions:
        raise DumpError(f"The {class_name} has no rowwise or columnwise data: they were freed or moved.")
    shape = (directions.get(False) or directions[True]).shape
    if isinstance(quantized, torch.Tensor):
        shape = tuple(quantized.shape)
    elif before is not None and shape == (math.prod(before.shape[:-1]), *before.shape[-1:]):
        shape = before.shape  # a storage with columnwise data only may have merged leading dimensions
    described = Quantized(
        class_name=class_name,
        shape=shape,
        dtype=dtype_name(getattr(quantized, "_dtype", None) or quantized.dtype),
        quantizer=_format_quantizer(quantizer_of(quantized)),
        rowwise=directions.get(False),
        columnwise=directions.get(True),
    )
    return described, tensors


_SHARED = ("shape", "transposed", "block", "largest_scale", "stored_scale_shape", "swizzled", "hadamard")
"""Fields that a Direction and a Stored have."""


def _shared(part: Direction | Stored) -> dict[str, Any]:
    return {name: getattr(part, name) for name in _SHARED}


def _internals(part: Stored, *, one_object: bool, prefix: str = "") -> tuple[Direction, dict[str, torch.Tensor]]:
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
    tensors = {data: _elements_in_memory(part), scale: scales}
    amax = None
    if part.amax is not None:
        amax = f"{prefix}amax_{side}"
        tensors[amax] = part.amax
    direction = Direction(
        format=part.element_format.name,
        scaling_mode=part.mode,
        data=data,
        scale=scale,
        amax=amax,
        scale_format=scale_format,
        **_shared(part),
    )
    return direction, tensors


def _elements_in_memory(part: Stored) -> torch.Tensor:
    """Return the codes with all dimensions: FP8 codes in their dtype, FP4 codes two per byte."""
    shape = _shape_in_memory(part)
    if part.element_format.dtype is None:
        return part.codes.reshape(*shape[:-1], shape[-1] // 2)
    return part.codes.reshape(shape).view(part.element_format.dtype)


def _shape_in_memory(part: Stored) -> tuple[int, ...]:
    if part.transposed:
        return (*part.shape[-1:], *part.shape[:-1])
    return part.shape


def _part(direction: Direction, columnwise: bool, tensors: Mapping[str, torch.Tensor]) -> Stored:
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


def _decoded_tensors(direction: Direction, part: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    if part.element_format.dtype is None:
        data = part.element_format.decode(unpack_fp4(part.codes))
        yield f"{direction.data}_unpacked_values", data.reshape(_shape_in_memory(part))
    if part.scale_format is not None:
        yield f"{direction.scale}_values", part.block_scales()
    if part.mode == NVFP4:
        yield f"{direction.scale.removesuffix('scale_inv')}factors", part.factors()


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
