"""Plans of observed GEMMs: what to do for a GEMM like an earlier one, without events and listeners.

A GEMM that the listeners observed leaves a plan under a key: the classes and formats of its operands, the recipe, and
the features that are due. A later GEMM with this key, in this step or another, follows the plan: its formats are noted,
and its tensors are measured into the same slots. Anything else about a tensor, such as its shape, is checked when it is
measured; a GEMM that differs goes to the listeners. A plan holds no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.numerics.layouts import PLAIN, scaling_mode
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, OPERANDS
from te_precision_callbacks.coverage.precision_audit import PrecisionAudit, SeenOperand, seen_operands
from te_precision_callbacks.engine.engine import Differs, Prepared, StatisticsEngine
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


class GemmPlan(NamedTuple):
    """A plan of a GEMM.

    Attributes:
        tensors: 0 for operand A, 1 for operand B or 2 for the result; and how to measure it.
    """

    layer: str
    seen: Sequence[SeenOperand]
    tensors: Sequence[tuple[int, Prepared]]


Plans: TypeAlias = dict[Key, GemmPlan | None]
"""The plans of a module's GEMMs; None for a GEMM that always goes to the listeners."""


class GemmPlans:
    """The plans of a session.

    Attributes:
        declined: why a GEMM went to the listeners -> number of GEMMs.
        followed: number of GEMMs that followed a plan.
    """

    def __init__(
        self,
        audit: PrecisionAudit,
        fused: FusedObservation,
        engine: StatisticsEngine,
        selected: Sequence[SelectedGemms[Any]],
    ) -> None:
        self.declined: Counter[str] = Counter()
        self.followed = 0
        self._audit = audit
        self._fused = fused
        self._engine = engine
        self._selected = selected
        self._of_modules: dict[int, Plans | None] = {}

    def forget(self) -> None:
        self._of_modules.clear()

    def of_module(self, module: Any, layers: Sequence[str]) -> Plans | None:
        """Return the plans of a module; None if its GEMMs have none, since a feature selects GEMMs of its layers."""
        if id(module) not in self._of_modules:
            try:
                selects = any(any(map(selected.of_layer, layers)) for selected in self._selected)
            except Exception:  # a listener fails likewise, and reports it
                return None
            self._of_modules[id(module)] = None if selects else {}
        return self._of_modules[id(module)]

    def follow(self, forward: Forward, operands: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> Key | None:
        """Observe a GEMM by its plan; return the key of a GEMM that must go to the listeners."""
        half = forward.half
        key: Key = ()
        plans = forward.plans or {}
        read = forward.read
        high = forward.high or {}
        try:
            gemm = GEMM_OF_LAYOUT[keywords.get("layout", "TN")]
            if forward.kind is not ForwardKind.OBSERVED or (half == 2 and gemm == "fprop"):
                raise Differs("recomputed")
            index = forward.next_layer_index(gemm, None) if forward.halves else 0
            layer = forward.layers[index]
            out = result[0]
            due = self._fused.due.get(layer)
            features = None if due is None else due.number
            fields: list[object] = [gemm, layer, forward.recipe, features, type(out)]
            values: list[Any] = []
            for given, tensor in zip(operands, OPERANDS[gemm][::-1], strict=True):
                kind = type(given)
                place = index, tensor
                before = high.get(place)
                values.append(given if before is None else before)
                if kind in PLAIN:
                    fields += kind, given.dtype, None, place in read, before is None
                else:
                    dtype = int(getattr(given, "_fp8_dtype", -1))
                    fields += kind, dtype, type(given._quantizer), place in read, before is None
            key = tuple(fields)
            plan = plans.get(key)
            if plan is None:
                raise Differs("not planned" if key in plans else _difference(key, plans))
            self._audit.note_seen(layer, gemm, forward.recipe, plan.seen)
            if plan.tensors:
                values.append(out)
                self._engine.measure_again(plan.tensors, values, operands, self._fused.iteration)
        except ObservationError:  # reported already; must be raised
            raise
        except Exception as error:
            forward.half = half
            reason = str(error) if isinstance(error, Differs) else type(error).__name__
            self.declined[reason] += 1
            if reason == "placement":
                plans.pop(key, None)
            return key
        self.followed += 1
        forward.events += 1
        for tensor in OPERANDS[gemm]:
            place = index, tensor
            read.add(place)
            high.pop(place, None)
        return None

    def record(self, forward: Forward, key: Key, event: GemmEvent) -> None:
        """Record the plan of a GEMM that the listeners have observed."""
        plans = forward.plans
        if plans is None or not key or key in plans:
            return
        tensors = None
        if all(map(_has_known_format, event.operands)):
            try:
                tensors = self._fused.prepare(event)
            except Exception as error:
                self.declined[type(error).__name__] += 1
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = None if tensors is None else GemmPlan(event.layer, seen_operands(event), tensors)


def _has_known_format(operand: GemmOperand) -> bool:
    given = operand.given
    return type(given) in PLAIN or (scaling_mode(given) is not None and not getattr(given, "custom", False))


def _difference(key: Key, plans: Plans) -> str:
    """Return the first field in which a GEMM differs from the last planned one of its layer; ``new`` for the first."""
    others = [other for other in plans if other[:2] == key[:2]]
    if not others:
        return "new"
    return next(name for name, mine, other in zip(_FIELDS, key, others[-1], strict=True) if mine != other)
