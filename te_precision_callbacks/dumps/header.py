"""The header of a dump: a description of its tensors as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated

import pydantic
import torch

from te_precision_callbacks.base.numerics.formats import E2M1, E4M3, E5M2, E8M0
from te_precision_callbacks.dumps.errors import NotADumpError
from te_precision_callbacks.te.environment import installed_version

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
        """Whether columnwise -> the data of a direction."""
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
        return {"a": self.a, "b": self.b}


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
