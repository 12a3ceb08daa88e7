"""Counts batches, and knows which batch is running."""

from __future__ import annotations


class Batches:
    """The numbers of the batches of a training, and of the evaluations between them.

    Outermost forwards count batches, or the loop does. Forwards without gradients are an evaluation. Before the first
    training batch they have the numbers of batches, since a run may have no training.

    Args:
        last: the number of the batch after which the run ends; None if no batch ends it.

    Attributes:
        trains: whether there was a training batch.
        looked: whether everything so far was looked at: the next forward of any module then begins a batch.
    """

    def __init__(self, last: int | None) -> None:
        self.trains = False
        self.looked = True
        self._last = last
        self._number = self._evaluation = -1
        self._given = False

    @property
    def number(self) -> int:
        """The number of the current or last training batch; before the first, of the forward without gradients."""
        return max(self._number, 0)

    @property
    def evaluation(self) -> int:
        """The number of the current or last forward without gradients."""
        return max(self._evaluation, 0) if self.trains else self.number

    @property
    def is_over(self) -> bool:
        """Whether the last batch of the run has begun."""
        return self._last is not None and self._number >= self._last

    def give(self) -> None:
        """Let the loop mark the beginning of batches from now on."""
        self._given = True
        self.train()

    def train(self) -> None:
        """Count anew from the first training batch on."""
        if not self.trains:
            self.trains, self._number = True, -1

    def begins(self, *, is_root: bool, evaluation: bool) -> bool:
        """Whether the outermost forward that begins now begins the next batch; an evaluation is counted here.

        Args:
            is_root: whether the forward is the model's, not that of a module inside.
            evaluation: whether the forward has no gradients.
        """
        if evaluation and self.trains:
            self._evaluation += is_root
            return False
        begins, self.looked = is_root or self.looked, False
        return begins and not self._given

    def next(self) -> None:
        """Begin the next batch."""
        self._number += 1
        self._evaluation = -1
