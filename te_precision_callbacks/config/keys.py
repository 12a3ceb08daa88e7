"""Keys shared by features and the items of their lists.

A feature's key applies to all its tensors, an item's key to one tensor.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Generic

from pydantic import Field, StrictBool, StrictInt

from te_precision_callbacks.config.fields import (
    Fp8Statistic,
    Intervals,
    ListOf,
    Nvfp4Statistic,
    QuantFormat,
    Size,
    TensorStatistic,
    words,
)
from te_precision_callbacks.config.levels import Level, Misfit, NameT, Nested, OneTensor
from te_precision_callbacks.statistics.names import Request
from te_precision_callbacks.statistics.schedule import Schedule


class Spans(Level):
    start_step: StrictInt | None = Field(0, ge=0, description="The first step, counted from 0.")
    end_step: StrictInt | None = Field(-1, ge=-1, description="The last step, inclusive. -1: no end.")
    start_end_list: Intervals | None = Field(
        None,
        description="Several ranges of steps, inclusive, such as `[[0, 20], [80, 100]]`; `start_step` and"
        " `end_step` are then ignored. An end of -1: no end.",
    )

    @cached_property
    def schedule(self) -> Schedule:
        freq = getattr(self, "freq", 1)  # a key of some features only
        return Schedule.of(freq, self.start_step, self.end_step, self.start_end_list)

    def check_target(self, nested: Nested) -> None:
        start = self.start_step or 0
        end = self.end_step
        if not self.start_end_list and end is not None and -1 < end < start:
            raise Misfit(nested.path("end_step"), f"is {end}, which is before 'start_step', {start}. -1 means no end.")
        super().check_target(nested)


class Scheduled(Spans):
    freq: StrictInt = Field(
        1,
        ge=1,
        description="The feature acts in steps that are multiples of this number: with `freq: 10` and `start_step: 5`"
        " in the steps 10, 20, ...",
    )

    def check_target(self, nested: Nested) -> None:
        super().check_target(nested)
        if self.schedule.at(-1)[1] is None:
            raise Misfit(nested.path("freq"), f"selects no steps: there are no {self.schedule}.")


PROBES = 16
"""Misses an error of 3 times its tolerance with a probability below 1e-5: over s probes, the least favorable error has
the norm |E|_F^2 chi^2_s / s. Shifts |E|_F by 18 % at most (one standard deviation, for one singular value)."""


class GemmSampling(Scheduled):
    freq: StrictInt = Field(
        500,
        ge=1,
        description="The feature acts in steps that are multiples of this number. Measuring a GEMM takes a few times as"
        " long as the GEMM.",
    )
    probes: StrictInt = Field(
        PROBES,
        ge=2,
        le=256,
        description="The number of random vectors. 16 miss an error of 3 times its tolerance in less than 1 of 100,000"
        " cases.",
    )
    max_memory: Size = Field(
        "64MiB",
        validate_default=True,
        description="The size of a decoded piece of an operand, in float32; decoding temporarily needs up to four times"
        " that. A piece has at least 128 rows.",
    )


class TensorStatistics(Level):
    stats: ListOf[TensorStatistic] = Field(
        default_factory=list,
        description="Statistics to compute; required here or in each item. Formulas and units:"
        " `te-precision statistics`.",
    )


class Fp8Statistics(Level):
    stats: ListOf[Fp8Statistic] = Field(
        default_factory=list,
        description="Statistics to compute; required here or in each item. Without a recipe in the name: for the"
        " layer's own recipe. With another recipe: simulated, in its default element format or in FORMAT."
        " `_columnwise`: for the transposed data, if the recipe scales blocks. Formulas and units:"
        " `te-precision statistics`.",
    )
    only_quantized: StrictBool = Field(
        False,
        description="Omit statistics without a recipe in the name if the tensor is not quantized, instead of simulating"
        " a recipe.",
    )


class Nvfp4Statistics(Level):
    stats: ListOf[Nvfp4Statistic] = Field(
        default_factory=list,
        description="Statistics to compute; required here or in each item. `_columnwise`: for the transposed data."
        " Formulas and units: `te-precision statistics`.",
    )


class Dumped(Level):
    high_precision_tensor: StrictBool = Field(False, description="Write the tensor as it is before quantization.")
    quantized_tensor: StrictBool = Field(False, description="Write the quantized tensor, if there is one.")
    dump_quantized_internals: StrictBool = Field(
        True,
        description="With `quantized_tensor`: also write its decoded codes, scales and amax, rowwise and columnwise, in"
        " plain layouts.",
    )

    def check_target(self, nested: Nested) -> None:
        if not self.high_precision_tensor and not self.quantized_tensor:
            raise Misfit(
                nested.here,
                "would write nothing: neither high_precision_tensor nor quantized_tensor is set. Set one of them to"
                " True.",
            )


class Margin(Level):
    margin: StrictInt = Field(
        0,
        ge=-126,
        le=127,
        description="The scale is computed for amax * 2^margin: 1 leaves one power of two above amax unused, -1"
        " saturates elements above half of amax.",
    )


class Quantization(Margin):
    quant_format: QuantFormat | None = Field(
        None,
        description="The format to quantize to; required for every tensor, here or in an item. FP8 formats: one scale"
        " from the tensor's own amax. MXFP8 formats: one scale for each block of 32, and no `margin`.",
    )

    def check_target(self, nested: Nested) -> None:
        if self.quant_format is None:
            raise Misfit(nested.here, f"has no 'quant_format', {words(type(self).model_fields['quant_format'])}.")
        if self.quant_format.startswith("MXFP8") and self.margin:
            raise Misfit(
                nested.path("margin"),
                f"is {self.margin}, but {self.quant_format} takes its scales from its blocks, without a margin. Leave"
                " 'margin' out, or take FP8E4M3 or FP8E5M2.",
            )


class LoggedTensor(Scheduled, OneTensor[NameT], Generic[NameT]):
    if TYPE_CHECKING:
        stats: list[Request]

    def check_target(self, nested: Nested) -> None:
        super().check_target(nested)
        if not self.stats:
            raise Misfit(nested.here, f"has no 'stats', {words(type(self).model_fields['stats'])}.")

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        return tuple(request.of(self.tensor) for request in self.stats)

    def requests_for(self, *, is_quantized: bool) -> tuple[Request, ...]:
        return self.requests
