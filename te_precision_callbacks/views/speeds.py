"""Expected speed in words: what ``show`` and ``report`` print of a run.

speed = speed_of(run)               # on the run's own GPU
in_short(speed)                     # "expected 1.31 (1.18 to 1.45) times as fast as BF16 on NVIDIA H200 SXM; ..."
"""

from __future__ import annotations

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.speed.estimate import StepSpeed, estimate_step
from te_precision_callbacks.speed.expected import layers_without_gain
from te_precision_callbacks.speed.printing import times_faster
from te_precision_callbacks.speed.recorded import device_of_run, step_of_run


def speed_of(run: RecordedRun) -> StepSpeed:
    """What is expected of the step at the end of a run, on the run's own GPU.

    Raises:
        DeviceError: the run has no GPU whose speed is known.
        SpeedError: the run has no products, or the device does not run a recipe.
    """
    return estimate_step(step_of_run(run), device_of_run(run, None))


def in_short(speed: StepSpeed) -> str:
    """The expected speed-up of the matrix products, in one line without a full stop."""
    whole, where = speed.total, speed.device.title
    if not whole.is_low:
        why = "no product with a known cost" if whole.unknown else "no matrix product"
        return f"no speed-up expected on {where}: {why} runs in low precision"
    told = f"expected {times_faster(whole.speedup, whole.interval)} times as fast as BF16 on {where}"
    count = len(layers_without_gain(speed.times))
    if count:
        told += f"; {many(count, 'layer')} {'gains' if count == 1 else 'gain'} nothing"
    return told
