"""The recorded events, in order: calls of modules, gradients, and labelled tensors.

An event is made while the model runs, and is expanded into the frames of a report only if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from te_precision_callbacks.overflow.extreme_slots import Measured


class Place(Protocol):
    """A module as reports name it.

    Attributes:
        path: the path in the model, without wrapper parts; empty for the model itself.
        class_name: the name of its class.
    """

    path: str
    class_name: str


class Frame(NamedTuple):
    """A line of a report.

    Attributes:
        sign: ``>`` for a tensor that enters a module's forward or backward, ``<`` for one that leaves, else ``=``.
        place: the module; None for a label.
        role: which tensor of the module.
        measured: the numbers of the tensor.
    """

    sign: str
    place: Place | None
    role: str
    measured: Measured


class Event(Protocol):
    """Something that was seen in a batch."""

    batch: int

    def frames(self) -> Iterator[Frame]:
        """The event's lines of a report."""


Tensors = Sequence[tuple[str, Measured]]


@dataclass(slots=True, eq=False)
class Call:
    """The forward of a module, emitted when it ends."""

    place: Place
    batch: int
    parameters: Tensors
    inputs: Tensors
    outputs: Tensors

    def frames(self) -> Iterator[Frame]:
        for role, measured in self.parameters:
            yield Frame("=", self.place, role, measured)
        for role, measured in self.inputs:
            yield Frame(">", self.place, role, measured)
        for role, measured in self.outputs:
            yield Frame("<", self.place, role, measured)


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient, for each module that its tensor left or entered."""

    batch: int
    roles: Sequence[tuple[str, Place, str]]
    measured: Measured

    def frames(self) -> Iterator[Frame]:
        for sign, place, role in self.roles:
            yield Frame(sign, place, role, self.measured)


@dataclass(slots=True, eq=False)
class Labelled:
    """A tensor that ``detect_overflow`` was given inside a forward."""

    batch: int
    label: str
    measured: Measured

    def frames(self) -> Iterator[Frame]:
        yield Frame("=", None, self.label, self.measured)
