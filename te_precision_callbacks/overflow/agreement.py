"""Agreement of ranks: all stop together, with the first culprit of any rank, or because a rank could not look."""

from __future__ import annotations

from dataclasses import dataclass

from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.base.ranks.tree import RanksLostError

_MOST_RANKS = 2**20
_LAST = 2**32
"""With the number of a rank, a whole number that a float64 holds."""


@dataclass(frozen=True)
class Find:
    """An overflow.

    Attributes:
        path, class_name, role, batch, evaluation, rank: as in ActivationOverflowError.
        sequence: the number of the event since the last look.
        headline: which tensor is bad.
        advice: what to do.
        report: the whole report.
        step: the training step, in words; empty if it is not known.
    """

    path: str
    class_name: str
    role: str
    batch: int
    evaluation: bool
    rank: int
    sequence: int
    headline: str
    advice: str
    report: str
    step: str = ""


@dataclass(frozen=True)
class Failure:
    """A failure of detection itself.

    Attributes:
        rank: the rank on which it happened.
        text: the class and text of the exception.
    """

    rank: int
    text: str


def agree(own: Find | Failure | None, messages: Messages) -> Find | Failure | None:
    """The find of the rank whose first bad event came first, or else a failure of any rank; None if there is neither.

    All ranks must call it. One number is exchanged, and only if there is a find or a failure, then that. If the ranks
    lose one another in between, all ranks know that there is one, and on which rank.

    Args:
        own: this rank's find or failure.
        messages: to the other ranks.

    Raises:
        RanksLostError: the ranks are apart.
    """
    # A failure ranks below every find, whose number is above zero.
    order = _LAST - min(own.sequence, _LAST - 1) if isinstance(own, Find) else 0
    key = 0 if own is None else order * _MOST_RANKS + (_MOST_RANKS - 1 - messages.rank)
    why = "to look for activation overflow together. Perhaps a rank has not trained in this step"
    (greatest,) = messages.largest("overflow", why, float(key))
    if greatest == 0:
        return None
    owner = _MOST_RANKS - 1 - int(greatest) % _MOST_RANKS
    sent: list[Find | Failure] = [own] if own is not None and owner == messages.rank else []
    try:
        return messages.pooled(sent, "the overflow", why)[0]
    except RanksLostError:
        if sent:
            return sent[0]
        name = messages.name(owner)
        if greatest < _MOST_RANKS:
            return Failure(messages.number(owner), f"on {name}, whose log says what it was")
        text = f"An activation or a gradient is inf or nan on {name}"
        return Find("", "", "", 0, False, messages.number(owner), 0, text, "Its log has the report.", "")
