"""Counts batches, and tells which batch is running."""

from __future__ import annotations


class Batches:
    """The numbers of the batches of a training, and of the evaluations between them.

    Outermost forwards count them, or the loop does. From the first training batch on, forwards without gradients are an
    evaluation; where there is no training before them, they are batches as any other.

    Args:
        last: the number of the batch after which the run ends; None where it does not.

    Attributes:
        trains: whether there was a training batch.
        looked: whether all is looked at that was done: then the next forward begins a batch, of whatever module it is.
    """

    def __init__(self, last: int | None) -> None:
        self.trains = False
        self.looked = True
        self._last = last
        self._number = self._evaluation = -1
        self._given = False

    @property
    def number(self) -> int:
        """Of the training batch that is running or was the last; before the first one, of the forward without
        gradients."""
        return max(self._number, 0)

    @property
    def evaluation(self) -> int:
        """Of the forward without gradients that is running or was the last."""
        return max(self._evaluation, 0) if self.trains else self.number

    @property
    def is_over(self) -> bool:
        """Whether the last batch that was wanted has begun."""
        return self._last is not None and self._number >= self._last

    def give(self) -> None:
        """The loop says when a batch begins, from now on."""
        self._given = True
        self.train()

    def train(self) -> None:
        """Count anew from the first training batch on."""
        if not self.trains:
            self.trains, self._number = True, -1

    def begins(self, *, is_root: bool, evaluation: bool) -> bool:
        """Whether the next batch begins with the outermost forward that begins now; an evaluation is counted.

        Args:
            is_root: whether it is the model's, or else that of a module in it.
            evaluation: whether it has no gradients.
        """
        if evaluation and self.trains:
            self._evaluation += is_root
            return False
        begins, self.looked = is_root or self.looked, False
        return begins and not self._given

    def next(self) -> None:
        """The next batch begins."""
        self._number += 1
        self._evaluation = -1
