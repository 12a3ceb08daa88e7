"""Plans of observed GEMMs: what to do for a GEMM like an earlier one, without an event.

A GEMM that was observed by its event leaves a plan under a key: the classes and formats of its operands, the recipe,
and the features that are due. A later GEMM with this key, in this step or another, follows the plan: its tensors are
measured into the same slots. Anything else about a tensor, such as its shape, is checked when it is measured; a GEMM
that differs is observed by its event. A plan holds no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.numerics.layouts import PLAIN, scaling_mode
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, OPERANDS
from te_precision_callbacks.engine.engine import Differs, PreparedGemm, StatisticsEngine
from te_precision_callbacks.instrumentation.current_call import Forward
from te_precision_callbacks.instrumentation.fused import FusedObservation
from te_precision_callbacks.instrumentation.gemm_errors import SelectedGemms
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent, GemmOperand

Key: TypeAlias = tuple[object, ...]
"""The fields of :data:`_FIELDS` of a GEMM."""

_OPERAND = ("class", "dtype", "quantizer", "order", "high precision")
_FIELDS = ("gemm", "layer", "recipe", "features", "class", *_OPERAND, *_OPERAND)
_MOST_PLANS = 64

_PLACES = {
    (gemm, index): ((index, tensors[1]), (index, tensors[0]))
    for gemm, tensors in OPERANDS.items()
    for index in range(2)
}
"""GEMM and index of its layer -> layer index and name of operands A and B."""


Plans: TypeAlias = dict[Key, PreparedGemm | None]
"""The plans of a module's GEMMs; None for a GEMM that always needs an event."""


class GemmPlans:
    """The plans of a session.

    Attributes:
        declined: why a GEMM needed an event -> number of GEMMs.
        followed: number of GEMMs that followed a plan.
        of_modules: id of a module -> its plans; None if a feature selects GEMMs of its layers.
    """

    def __init__(self, fused: FusedObservation, engine: StatisticsEngine, selected: SelectedGemms) -> None:
        self.declined: Counter[str] = Counter()
        self.followed = 0
        self._fused = fused
        self._engine = engine
        self._selected = selected
        self.of_modules: dict[int, Plans | None] = {}

    def forget(self) -> None:
        self.of_modules.clear()

    def add_module(self, module: Any, layers: Sequence[str]) -> None:
        try:
            selects = any(map(self._selected.of_layer, layers))
        except Exception:  # the event fails likewise, and reports it
            return
        self.of_modules[id(module)] = None if selects else {}

    def follow(
        self, forward: Forward, half: int, operands: Sequence[Any], keywords: Mapping[str, Any], result: Any
    ) -> Key | None:
        """Observe a GEMM by its plan; return the key of a GEMM that needs an event.

        Args:
            half: :attr:`Forward.half` before the GEMM.
        """
        key: Key = ()
        plans = forward.plans or {}
        read = forward.read
        high = forward.high or {}
        try:
            gemm = GEMM_OF_LAYOUT[keywords.get("layout", "TN")]
            if forward.kind is not ForwardKind.OBSERVED or (half == 2 and gemm == "fprop"):
                raise Differs("recomputed")
            index = forward.half if forward.halves else 0
            due = self._fused.due.get(forward.layers[index])
            out = result[0]
            key = gemm, index, forward.recipe, None if due is None else due.number, type(out)
            places = _PLACES[gemm, index]
            values: list[Any] = []
            for given, place in zip(operands, places, strict=True):
                kind = type(given)
                before = high.get(place)
                if kind in PLAIN:
                    key += kind, given.dtype, None, place in read, before is None
                else:
                    key += (
                        kind,
                        int(getattr(given, "_fp8_dtype", -1)),
                        type(given._quantizer),
                        place in read,
                        before is None,
                    )
                values.append(given if before is None else before)
            plan = plans.get(key)
            if plan is None:
                raise Differs("not planned" if key in plans else _difference(key, plans))
            values.append(out)
            self._engine.measure_again(plan, values, operands, self._fused.iteration)
        except ObservationError:  # reported already; must be raised
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, Differs) else type(error).__name__
            self.declined[reason] += 1
            if reason in ("placement", "dtype"):
                plans.pop(key, None)
            return key
        self.followed += 1
        read.update(places)
        for place in places:
            high.pop(place, None)
        return None

    def record(self, forward: Forward, key: Key, event: GemmEvent) -> None:
        """Record the plan of a GEMM that was observed by its event."""
        plans = forward.plans
        if plans is None or not key or key in plans:
            return
        prepared = None
        if all(map(_has_known_format, event.operands)):
            try:
                prepared = self._fused.prepare(event)
            except Exception as error:
                self.declined[type(error).__name__] += 1
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = prepared


def _has_known_format(operand: GemmOperand) -> bool:
    given = operand.given
    return type(given) in PLAIN or (scaling_mode(given) is not None and not getattr(given, "custom", False))


def _difference(key: Key, plans: Plans) -> str:
    """Return the first field in which a GEMM differs from the last planned one of its layer; ``new`` for the first."""
    others = [other for other in plans if other[:2] == key[:2]]
    if not others:
        return "new"
    return next(name for name, mine, other in zip(_FIELDS, key, others[-1], strict=True) if mine != other)
