"""Why a device was idle: whether the host was still launching, had waited for the device, or had work in the queue."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from te_precision_callbacks.speed.trace.measured import Launches
from te_precision_callbacks.speed.trace.timeline import NOTHING, HostKind, Trace
from te_precision_callbacks.speed.trace.work import Work

BOUND_SHARE = 0.1
"""The share of a step from which on a step is called launch bound."""

_WAITS = re.compile(r"^(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(?!.*Async)")
"""Calls of the runtime that end when the device has done its work."""


def launches_of(trace: Trace, work: Sequence[Work], wall_us: float, steps: int) -> Launches:
    """Look at each stretch in which the device had no work.

    The kernel that ends a stretch was launched in it, or before it. If in it, the host was late: it was still
    launching, or it had waited for the device before. If before, the kernel was in the queue.

    Args:
        trace: the trace.
        work: the kernels of the steps.
        wall_us: the time of all steps, in microseconds.
        steps: how many.
    """
    waits = np.array(sorted(_ends_of_waits(trace)), dtype=np.float64)
    late = after_wait = queued = 0.0
    free = None
    for each in sorted(work, key=lambda each: each.begin):
        if free is not None and each.begin > free:
            begins = max(free, min(each.launched, each.begin))
            if each.launched_at == NOTHING or each.launched <= free:
                queued += each.begin - free
            else:
                queued += each.begin - begins  # from the launch to the start
                waited = np.searchsorted(waits, each.launched) > np.searchsorted(waits, free)
                if waited:
                    after_wait += begins - free
                else:
                    late += begins - free
        free = each.end if free is None else max(free, each.end)
    launched = sorted({each.launched for each in work if each.launched_at != NOTHING})
    between = [later - earlier for earlier, later in itertools.pairwise(launched)]
    return Launches(
        kernels=len(work) / steps,
        late_ms=late / 1e3 / steps,
        after_wait_ms=after_wait / 1e3 / steps,
        queued_ms=queued / 1e3 / steps,
        device_us=median(each.us for each in work) if work else float("nan"),
        host_us=median(between) if between else float("nan"),
        is_bound=bool(wall_us) and late >= BOUND_SHARE * wall_us,
    )


def _ends_of_waits(trace: Trace) -> Iterable[float]:
    host = trace.host
    wait = [bool(_WAITS.search(name)) for name in trace.names]
    for place in range(len(host)):
        if host.kind[place] == HostKind.CALL and wait[host.name[place]]:
            yield host.end[place]
