"""A parameter of a model, the measurements of it in the steps of its optimizer, and the problems that rules find in
them.

Imports no torch: rules over recorded runs do without.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from te_precision_callbacks.base.vocabulary import LEAST_ABSENT

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

FEW_CHANGED = 0.05
"""Largest share of changed elements in a weight that hardly changes; others are not sampled any more."""

SAMPLED_CLEARINGS = 3
"""The last sampled steps of which it is known whether the gradient was cleared."""

NORMS_DIFFER = 1e-3
"""The least difference of two ranks' gradient norms, as a share, if they are not of the same gradients."""

ParameterProblem = Literal[
    # of its gradient
    "no_gradient",
    "checkpointed",
    "lost_gradient",
    "arrived",
    "left_out",
    "unclipped",
    "idle",
    "not_held",
    "converted",
    "frozen_held",
    "zeroed",
    "kept",
    "all_kept",
    "nonfinite_gradient",
    # of its weight
    "large",
    "unchanged",
    "still",
    "apart",
    "emptied",
    "restored",
    "replaced",
    "nonfinite",
    # of its optimizer
    "unstepped",
    "rises_again",
    "decays",
    # of ranks
    "norms_differ",
    "differs",
    "differs_from_start",
    "no_reduction",
    "no_sum",
]


class Problem(NamedTuple):
    """A problem of a parameter.

    Attributes:
        name: the parameter; empty for a problem of the model.
        number: number of steps, or percentage of elements.
    """

    what: ParameterProblem
    name: str
    since: int
    number: float


@dataclass(eq=False)
class Gap:
    """Consecutive optimizer steps without a gradient of a parameter.

    Attributes:
        called: number of steps with a training forward of the module.
        reached, ran: whether a backward reached the parameter, and the module ran in training, since the last step.
        checkpointed: number of forwards in a reentrant checkpoint without an input that needs a gradient.
    """

    since: int
    steps: int = 0
    called: int = 0
    reached: bool = False
    ran: bool = False
    checkpointed: int = 0
    hooks: tuple[RemovableHandle, ...] = ()

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()


@dataclass
class ZeroGradients:
    """Consecutive optimizer steps with a gradient of 0.

    Attributes:
        was_present: whether it was not 0 in enough steps before.
    """

    since: int
    was_present: bool
    last: int = 0
    steps: int = 0


@dataclass(eq=False)
class WeightRow:
    """A weight before a sampled step of its optimizer; nan where it is not measured.

    Attributes:
        rate: the learning rate.
        changed: share of the elements that differ from the first sample.
        moved: share of the elements that this step changed in the tensor that the optimizer steps.
    """

    iteration: int
    rate: float
    changed: float = math.nan
    moved: float = math.nan


class WeightSample(NamedTuple):
    iteration: int
    values: torch.Tensor


@dataclass(eq=False)
class MasterRow:
    """A weight after the last step before a sampled one.

    Attributes:
        apart: share of its elements that differ from the master weight by more than rounding; nan until it is on the
            host.
    """

    iteration: int
    apart: float = math.nan


@dataclass(eq=False)
class WriteRow:
    """A weight that code has written between two optimizer steps, more often than ever.

    Attributes:
        sampled: iterations of its samples.
        distances: distances of zero, the samples and the weight from each other; empty until they are on the host.
    """

    iteration: int
    sampled: list[int]
    distances: Sequence[Sequence[float]] = ()


@dataclass(eq=False)
class Parameter:
    """A parameter, and its measurements.

    Attributes:
        has_gradient: whether a backward has reached it.
        at_step: whether a gradient exists at the optimizer's step.
        longest_gap: steps of the longest earlier gap.
        zeros: the last steps with a gradient of 0, if the last one had.
        present_since: the first iteration since its gradient was last 0; -1 before the first gradient.
        unclipped: number of steps in which other gradients of its optimizer were clipped.
        least_zeros: the least number of steps with a gradient of 0 of a gradient that has vanished.
        held_until: last iteration with a step of the parameter's optimizer, or -1.
        cleared: last sampled iterations, and whether the gradient was cleared before the next step.
        first_size: the root mean square of the first sample of a matrix; nan until it is on the host.
        rows: rows of the sampled steps, until the weight has changed.
        master_rows: the last rows of the checks against the master weight.
        samples: iterations and samples of its values, or of its codes if it is quantized: the first one and the last
            ones.
        most_writes: maximum number of writes to it between two optimizer steps.
        slot: its slot in the watch of every step, if it has one so far.
        is_unwatched: whether it is not the weight of a layer of Transformer Engine.
        stepped_sample: a sample after a step of its optimizer, if another one has stepped since.
    """

    name: str
    weight: torch.nn.Parameter
    module: torch.nn.Module
    has_gradient: bool = False
    at_step: bool = False
    gap: Gap | None = None
    longest_gap: int = 0
    zeros: ZeroGradients | None = None
    present_since: int = -1
    least_zeros: int = LEAST_ABSENT
    unclipped: int = 0
    held_until: int = -1
    cleared: dict[int, bool] = field(default_factory=dict)
    first_size: float = math.nan
    rows: list[WeightRow] = field(default_factory=list)
    master_rows: list[MasterRow] = field(default_factory=list)
    samples: list[WeightSample] = field(default_factory=list)
    writes: list[WriteRow] = field(default_factory=list)
    most_writes: int = 0
    slot: int | None = None
    is_unwatched: bool = False
    stepped_sample: torch.Tensor | None = None
    is_matrix: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_matrix = self.weight.dim() > 1  # a property would be a call for each parameter

    @property
    def is_trained(self) -> bool:
        return self.weight.requires_grad

    @property
    def is_converted(self) -> bool:
        """Return whether Accelerate's FP8 conversion can have made the module; it passes trained parameters to the
        optimizer.

        Read from Accelerate 1.10 to 1.15, ``state.py`` and ``accelerator.py`` (``_prepare_te``).
        """
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        precision = getattr(state, "_shared_state", {}).get("_mixed_precision")
        return precision == "fp8" and type(self.module).__module__.startswith("transformer_engine.")

    def note_cleared(self, iteration: int, *, is_cleared: bool) -> None:
        self.cleared[iteration] = is_cleared and self.cleared.get(iteration, True)
        if len(self.cleared) > SAMPLED_CLEARINGS:
            del self.cleared[min(self.cleared)]
