"""Records GEMMs selected by DumpTensors: a listener of the tap.

An operand in high precision is recorded if it exists when the GEMM runs: both operands of fprop and dgrad, and the
gradient of wgrad.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.vocabulary import RESULT, GemmName
from te_precision_callbacks.dumps.contents import Dump, record_of
from te_precision_callbacks.dumps.header import DumpedGemm, DumpedOperand, Plain
from te_precision_callbacks.dumps.recording import Wanted
from te_precision_callbacks.engine.gemm_operands import GemmOperands
from te_precision_callbacks.instrumentation.gemm_errors import SelectedGemms, added, high_of, result_of, why_not_seen
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent, GemmOperand, Watched

logger = logging.getLogger(__name__)

_BEFORE = "recorded before"


class GemmRecords:
    def __init__(self, operands: GemmOperands, report: Callable[[str, str, Exception], None]) -> None:
        self._operands = operands
        self._report = report
        self._notices = Notices()
        self._selected = SelectedGemms(Wanted)
        self.watch = self._selected.watch

    def before_sum(self, layer: str, gemm: GemmName, out: Any, kept: dict[Any, Any]) -> None:
        if isinstance(out, torch.Tensor) and not is_capturing() and self._selected.due(layer, gemm, kept) is not None:
            kept[_BEFORE, layer, gemm] = out.detach().clone()

    def __call__(self, event: GemmEvent) -> None:
        before = event.kept.pop((_BEFORE, event.layer, event.gemm), None)
        if event.kind is not ForwardKind.OBSERVED:
            return
        try:
            due = self._selected.due(event.layer, event.gemm, event.kept)
            if due is not None:
                self._record(event, before, *due)
        except ObservationError:
            raise
        except Exception as error:
            self._report("recording the GEMM of", f"{event.layer} {event.gemm}", error)

    def _record(self, event: GemmEvent, before: torch.Tensor | None, wanted: Wanted, iteration: int) -> None:
        import nvdlfw_inspect.api as debug_api

        reason = why_not_seen(event, before)
        if reason:
            if self._notices.first(reason):
                logger.warning(
                    "DumpTensors: the GEMM %s of %s is not written: %s. Further GEMMs are not named.",
                    event.gemm,
                    event.layer,
                    reason,
                )
            return
        result = RESULT[event.gemm]
        seen = Watched(event.layer, result, iteration, result_of(event))
        record = functools.partial(self._described, event, before, iteration)
        api = debug_api.transformer_engine
        collected = functools.partial(api.collected, event.layer, result)
        api.observation.recorder.note(seen, wanted, collected, record)

    def _described(self, event: GemmEvent, before: torch.Tensor | None, iteration: int, micro_batch: int) -> Dump:
        out = result_of(event)
        n, m, k = event.sizes
        more = added(event)
        on_gpu = out.device.type == "cuda"
        gemm = DumpedGemm(
            gemm=event.gemm,
            result=RESULT[event.gemm],
            order=event.order,
            layout=event.arguments["layout"],
            n=n,
            m=m,
            k=k,
            a=DumpedOperand(event.a.tensor, event.a.columnwise),
            b=DumpedOperand(event.b.tensor, event.b.columnwise),
            out=Plain((), ""),
            expert=event.expert,
            alpha=float(event.arguments.get("alpha", 1.0)),
            beta=more["beta"],
            split_accumulator=bool(event.arguments.get("use_split_accumulator", False)),
            device=torch.cuda.get_device_name(out.device) if on_gpu else out.device.type,
            capability=torch.cuda.get_device_capability(out.device) if on_gpu else None,
        )
        operands = {"a": (event.a.data, self._high(event, event.a)), "b": (event.b.data, self._high(event, event.b))}
        return record_of(
            gemm,
            operands,
            out,
            before=before,
            bias=more["bias"],
            layer=event.layer,
            iteration=iteration,
            micro_batch=micro_batch,
            rank=own_rank(),
            recipe=event.recipe,
        )

    def _high(self, event: GemmEvent, operand: GemmOperand) -> torch.Tensor | None:
        """Return an operand in high precision, unless recomputed, or gathered after quantization."""
        if operand.recomputed:
            return None
        high = high_of(self._operands, event.layer, operand)
        n, m, k = event.sizes
        rows = m if operand is event.a else n
        return None if high is None or high.numel() != rows * k else high
