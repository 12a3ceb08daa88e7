"""The header of a dump: describes its tensors as JSON, and checks the tensors against the description.

Usage::

    header = Header.from_json(text)  # a field that no dump can have is a NotADumpError that names it
    check(header, tensors)           # NotADumpError for a missing tensor, or another shape or dtype than the header's
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import pydantic
import torch

from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0
from te_precision_callbacks.base.numerics.layouts import BLOCK_1D, BLOCK_2D, MXFP8, NVFP4, PER_TENSOR
from te_precision_callbacks.dumps.errors import LaterVersionError, NotADumpError
from te_precision_callbacks.gemm_error.codes import RoundingRules

SCHEMA = 1
"""The version of the header that this package writes. It grows when a reader of the last version would misread one."""

GEMM_VERSION = 1
"""The version of what describes a whole GEMM. It grows as :data:`SCHEMA` does."""

HIGH_PRECISION, QUANTIZED = "high_precision", "quantized"
"""The names of the tensor before quantization, and of the tensor after quantization if that is a plain tensor."""

FLOAT32 = "float32"
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1, E8M0)}
"""The formats of elements and scales, by their names in a header."""

# torch 2.6 has no E8M0: there these scales are their bytes.
SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8)}
"""The dtypes of scales in a dump; those of other formats are float32."""

_FP8 = ("E4M3", "E5M2")
# Scaling mode -> the formats of its elements, and the format of its scales.
_MODES = {
    PER_TENSOR: (_FP8, FLOAT32),
    MXFP8: (_FP8, "E8M0"),
    BLOCK_1D: (_FP8, FLOAT32),
    BLOCK_2D: (_FP8, FLOAT32),
    NVFP4: (("E2M1",), "E4M3"),
}

_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
"""The dtypes that a header may name and that this torch has."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _one_of(known: Mapping[str, object]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        return value

    return check


_Dtype = Annotated[str, pydantic.AfterValidator(_one_of(DTYPES))]
_Format = Annotated[str, pydantic.AfterValidator(_one_of(dict.fromkeys((*_FP8, "E2M1"))))]
_Mode = Annotated[str, pydantic.AfterValidator(_one_of(_MODES))]
_ScaleFormat = Annotated[str, pydantic.AfterValidator(_one_of(dict.fromkeys(("E8M0", "E4M3", FLOAT32))))]
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
        shape: the shape of the quantized tensor. Columnwise NVFP4 data are a matrix, whatever the leading dimensions
        were.
        transposed: whether the first dimension of the data is the last one of the quantized tensor.
        block: rows and columns of a block of the data, viewed as a matrix: the first dimension against the others if
            transposed, otherwise the others against the last dimension.
        scale_format: "E8M0", "E4M3" or "float32".
        largest_scale: NVFP4 only: the E4M3 number of the largest scale, 448 or 256.
        stored_scale_shape: the shape of the scales in training: padded, and perhaps transposed.
        swizzled: whether the scales were in the order that a GEMM reads, in training. In a dump they never are.
        hadamard: whether the data hold a random Hadamard transform of the tensor.
    """

    format: _Format
    scaling_mode: _Mode
    data: str
    scale: str
    amax: str | None
    shape: _Shape
    transposed: bool
    block: tuple[_Length, _Length]
    scale_format: _ScaleFormat
    largest_scale: _Largest | None
    stored_scale_shape: _Shape
    swizzled: bool
    hadamard: bool

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the data as a matrix, in elements."""
        leading, last = math.prod(self.shape[:-1]), math.prod(self.shape[-1:])
        return (last, leading) if self.transposed else (leading, last)

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        if self.scaling_mode == PER_TENSOR:
            return (1, 1)
        rows, columns = self.matrix_shape
        return (-(-rows // self.block[0]), -(-columns // self.block[1]))

    @property
    def shape_in_memory(self) -> tuple[int, ...]:
        """The shape of the tensor with the data: FP4 has two elements per byte."""
        shape = (*self.shape[-1:], *self.shape[:-1]) if self.transposed else self.shape
        return shape if self.format in _FP8 else (*shape[:-1], *(size // 2 for size in shape[-1:]))


@dataclass(frozen=True)
class Plain:
    """A plain tensor: its shape, and its dtype as torch calls it ("bfloat16")."""

    shape: _Shape
    dtype: _Dtype


@dataclass(frozen=True)
class Quantized:
    """The tensor after quantization.

    Attributes:
        class_name: Transformer Engine's class, or "Tensor" if the tensor stayed plain, after fake quantization for
            example.
        shape: the shape of the tensor.
        dtype: the nominal dtype, which ``dequantize()`` gives.
        quantizer: the quantizer and its settings, as text.
        rowwise, columnwise: the data of each direction, if any.
    """

    class_name: str
    shape: _Shape
    dtype: _Dtype
    quantizer: str | None = None
    rowwise: Direction | None = None
    columnwise: Direction | None = None

    def direction(self, columnwise: bool) -> Direction | None:
        """The columnwise or the rowwise data; None if there are none."""
        return self.columnwise if columnwise else self.rowwise


@dataclass(frozen=True)
class DumpedOperand:
    """An operand of a GEMM in a record of the whole GEMM.

    Attributes:
        tensor: "activation", "weight" or "gradient".
        columnwise: whether the GEMM sums over the rows of the tensor, not over its last dimension.
        direction: the data that the GEMM read; None if these are the plain tensor ``NAME.values``.
        values: that plain tensor.
        high_precision: the tensor before quantization, ``NAME.high_precision``, if the record has it.
        rounding: how the quantizer rounds, as :class:`te_precision_callbacks.gemm_error.codes.RoundingRules`; None if
            unknown.
    """

    tensor: str
    columnwise: bool
    direction: Direction | None = None
    values: Plain | None = None
    high_precision: Plain | None = None
    rounding: RoundingRules | None = None


@dataclass(frozen=True)
class DumpedGemm:
    """Describes a whole GEMM: ``out = alpha * left @ right^T + bias + beta * before``.

    ``left`` is the operand B, [n, k], and ``right`` the operand A, [m, k], as the extension names them. Names of their
    tensors in the file begin with ``a.`` and ``b.``; the others are ``out``, ``before`` and ``bias``.

    Attributes:
        version: the version of the record.
        gemm: "fprop", "dgrad" or "wgrad".
        result: the tensor that it makes: "output", "dgrad" or "wgrad".
        expert: the number of the expert; None outside of grouped GEMMs.
        order: its number among the GEMMs of the iteration, in the order in which they ran.
        layout: "TN", "NN" or "NT", of A and B.
        n, m, k: the sizes.
        alpha, beta: the factors.
        split_accumulator: as in the call.
        a, b: the operands.
        out: the result, before an activation function.
        before: what the product was added to, if anything.
        bias: the bias, if one was added.
        device: the name of the device.
        capability: its compute capability; None for the reference backend.
    """

    gemm: str
    result: str
    order: int
    layout: str
    n: int
    m: int
    k: int
    a: DumpedOperand
    b: DumpedOperand
    out: Plain
    expert: int | None = None
    alpha: float = 1.0
    beta: float = 1.0
    split_accumulator: bool = False
    before: Plain | None = None
    bias: Plain | None = None
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    version: int = GEMM_VERSION

    @property
    def name(self) -> str:
        """What has run, in words: ``fprop of expert 3``."""
        return self.gemm if self.expert is None else f"{self.gemm} of expert {self.expert}"

    def operands(self) -> dict[str, DumpedOperand]:
        """The operands by the beginnings of their tensors' names."""
        return {"a": self.a, "b": self.b}


@dataclass(frozen=True)
class Header:
    """Describes the tensor in a dump.

    Attributes:
        layer: the layer's name in the model.
        tensor: "activation", "weight", "gradient", "output", "wgrad", "dgrad", or any other word.
        iteration: the debug iteration; None if there is none.
        micro_batch: counts the dumps of this tensor within the iteration, from 0.
        rank: the rank of the process in the default process group.
        run: a name for the start of the session on this rank, which sorts by time; empty if no session wrote the dump.
        recipe: the quantization recipe, as text.
        high_precision: the tensor before quantization, if the dump has it.
        quantized: the tensor after quantization, if the dump has it.
        gemm: the whole GEMM, if the dump is a record of one; it then has no ``high_precision`` and ``quantized``.
        versions: the versions of "torch", "transformer_engine" and "te_precision_callbacks" that made the dump.
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
    versions: dict[str, str] = field(default_factory=dict)
    time: str = ""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The header as a JSON object, with the names of the attributes.

        A lone surrogate, which a name on disk may have, cannot be held by JSON: it is written as an escape of six
        characters.
        """
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False)
        return _LONE_SURROGATE.sub(lambda found: rf"\\u{ord(found[0]):04x}", text)

    @classmethod
    def from_json(cls, text: str | bytes) -> Header:
        """Read the header from the text of :meth:`to_json`; fields that a later version added are ignored.

        Raises:
            NotADumpError: the text is not a header.
            LaterVersionError: the schema is later than :data:`SCHEMA`.
        """
        try:
            version = _SchemaOnly.model_validate_json(text).version
        except pydantic.ValidationError as error:
            raise NotADumpError("The header is not a dump's: it has no number under 'schema'.") from error
        if version > SCHEMA:
            raise LaterVersionError(
                f"The dump has a header of version {version}, but this te-precision-callbacks reads versions up to"
                f" {SCHEMA}: update the package."
            )
        try:
            header = _HEADER.validate_json(text)
            if header.gemm is not None and header.gemm.version > GEMM_VERSION:
                raise LaterVersionError(
                    f"The record of a GEMM has the version {header.gemm.version}, but this te-precision-callbacks reads"
                    f" versions up to {GEMM_VERSION}: update the package."
                )
            return header
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place, why = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
            raise NotADumpError(f"The header of the dump is damaged at {place!r}: {why}.") from error


class _SchemaOnly(pydantic.BaseModel):
    version: int = pydantic.Field(alias="schema")


_HEADER = pydantic.TypeAdapter(Header)


def check(header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check the tensors of a dump against its header.

    Raises:
        NotADumpError: a tensor is missing, or has another shape or dtype; or the header contradicts itself.
    """
    if header.high_precision is not None:
        _check_tensor(tensors, HIGH_PRECISION, header.high_precision.shape, DTYPES[header.high_precision.dtype])
    if header.gemm is not None:
        _check_gemm(header.gemm, tensors)
    quantized = header.quantized
    if quantized is None:
        return
    if quantized.rowwise is None and quantized.columnwise is None:
        _check_tensor(tensors, QUANTIZED, quantized.shape, DTYPES[quantized.dtype])
    for name, direction in (("rowwise", quantized.rowwise), ("columnwise", quantized.columnwise)):
        if direction is None:
            continue
        if not leads_to(quantized.shape, direction.shape):
            raise NotADumpError(
                f"The header of the dump is damaged at 'quantized.{name}.shape': {direction.shape} is not that of"
                f" 'quantized.shape', {quantized.shape}."
            )
        if not DTYPES[quantized.dtype].is_floating_point:
            raise NotADumpError(f"The header of the dump is damaged at 'quantized.dtype': {quantized.dtype!r}.")
        check_direction(direction, tensors)


def _check_gemm(gemm: DumpedGemm, tensors: Mapping[str, torch.Tensor]) -> None:
    plain = {"out": gemm.out, "before": gemm.before, "bias": gemm.bias}
    for side, operand in gemm.operands().items():
        if (operand.direction is None) is (operand.values is None):
            raise NotADumpError(
                f"The header of the dump is damaged at 'gemm.{side}': it has either 'direction' or 'values'."
            )
        plain |= {f"{side}.values": operand.values, f"{side}.{HIGH_PRECISION}": operand.high_precision}
        sizes = (gemm.m if side == "a" else gemm.n) * gemm.k
        parts: dict[str, Direction | Plain | None] = {
            "direction": operand.direction,
            "values": operand.values,
            HIGH_PRECISION: operand.high_precision,
        }
        for part, described in parts.items():
            if described is not None and math.prod(described.shape) != sizes:
                raise NotADumpError(
                    f"The header of the dump is damaged at 'gemm.{side}.{part}.shape': {described.shape} does not have"
                    f" the {sizes:,} elements that 'gemm.n', 'gemm.m' and 'gemm.k' give."
                )
        if operand.direction is not None:
            check_direction(operand.direction, tensors)
    for name, tensor in plain.items():
        if tensor is not None:
            _check_tensor(tensors, name, tensor.shape, DTYPES[tensor.dtype])
    if math.prod(gemm.out.shape) != gemm.n * gemm.m:
        raise NotADumpError(f"The header of the dump is damaged at 'gemm.out.shape': {gemm.out.shape}.")


def check_direction(direction: Direction, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check the tensors of one direction against the header, as :func:`check` does."""
    elements, scale_format = _MODES[direction.scaling_mode]
    if direction.format not in elements or direction.scale_format != scale_format:
        raise NotADumpError(
            f"The header of the dump is damaged at 'format' or 'scale_format': {direction.scaling_mode} has"
            f" {' or '.join(elements)} with scales of {scale_format}, not {direction.format} with"
            f" {direction.scale_format}."
        )
    if (direction.scaling_mode == NVFP4) is (direction.amax is None or direction.largest_scale is None):
        raise NotADumpError(
            "The header of the dump is damaged at 'amax' or 'largest_scale': NVFP4 has both, other formats neither."
        )
    if FORMATS[direction.format].bits == 4 and direction.matrix_shape[1] % 2:
        raise NotADumpError(
            f"The header of the dump is damaged at 'shape': {direction.shape} cannot lie in memory with two elements"
            f" of {direction.format} a byte."
        )
    dtype = FORMATS[direction.format].dtype or torch.uint8
    _check_tensor(tensors, direction.data, direction.shape_in_memory, dtype)
    scales = SCALE_DTYPES.get(direction.scale_format, torch.float32)
    # torch 2.6 writes E8M0 as bytes.
    others = (torch.uint8,) if direction.scale_format == "E8M0" else ()
    per_tensor = direction.scaling_mode == PER_TENSOR
    _check_tensor(tensors, direction.scale, (1,) if per_tensor else direction.blocks, scales, *others)
    if direction.amax is not None:
        amax, of_rows = tensors.get(direction.amax), direction.matrix_shape[:1]
        shape = of_rows if amax is not None and tuple(amax.shape) == of_rows else (1,)
        _check_tensor(tensors, direction.amax, shape, torch.float32)


def leads_to(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes are equal, or the other is the matrix of the shape, with its leading dimensions merged."""
    return other in (shape, (math.prod(shape[:-1]), *shape[-1:]))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _check_tensor(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise NotADumpError(f"The dump has no {name!r}, which its header lists.")
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise NotADumpError(
            f"The dump's {name!r} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, not"
            f" {dtype_name(dtypes[0])} {shape}, as the header says."
        )
