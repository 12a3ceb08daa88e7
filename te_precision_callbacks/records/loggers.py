"""What loggers want otherwise than as a name and a number: histograms, and MLflow's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

LOWEST_EXPONENT = -127.0
"""The exponent of a histogram's first bin, see ``exponents`` in docs/statistics.md; each further bin is one higher."""

ValueT = TypeVar("ValueT")


def names_for_mlflow(metrics: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """The metrics under names that MLflow takes, which has no ``%`` in them."""
    return {name.replace("%", "_pct"): value for name, value in metrics.items()}


def add_to_tensorboard(writer: Any, name: str, counts: Sequence[float], step: int) -> None:
    """Log an exponent histogram: over the exponents, not over the values.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or one of tensorboardX.
        name: the name of the metric.
        counts: elements for each exponent, from :data:`LOWEST_EXPONENT` up.
        step: the logging step.
    """
    exponents = [index + LOWEST_EXPONENT for index in range(len(counts))]
    filled = [exponent for exponent, count in zip(exponents, counts, strict=True) if count] or [0.0]
    writer.add_histogram_raw(
        name,
        min=min(filled),
        max=max(filled) + 1,
        num=sum(counts),
        sum=sum(exponent * count for exponent, count in zip(exponents, counts, strict=True)),
        sum_squares=sum(exponent**2 * count for exponent, count in zip(exponents, counts, strict=True)),
        bucket_limits=[exponent + 1 for exponent in exponents],
        bucket_counts=list(counts),
        global_step=step,
    )


def wandb_histogram(counts: Sequence[float]) -> Any:
    """An exponent histogram as a ``wandb.Histogram``."""
    import numpy
    import wandb

    edges = LOWEST_EXPONENT + numpy.arange(len(counts) + 1)
    return wandb.Histogram(np_histogram=(numpy.asarray(counts), edges))
