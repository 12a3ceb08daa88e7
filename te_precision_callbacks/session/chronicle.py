"""Tells sinks what happens in a run, and the trainer's own numbers; and gives the facts to the record store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.coverage.parallel import Ranks
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.instrumentation.failures import ASKED_FOR, ObservationFailures
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.runs.recording import Place
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.session.delivery import is_number, is_on_host, to_floats
from te_precision_callbacks.session.live_diagnosis import LiveDiagnosis
from te_precision_callbacks.session.observed_model import ObservedModel
from te_precision_callbacks.session.results import RunResults
from te_precision_callbacks.session.run_facts import RunFacts
from te_precision_callbacks.session.sinks import Sinks
from te_precision_callbacks.sinks.step_records import Event, Scalars, Severity, end_of

_MOST_KEPT, _LONGEST = 256, 1.0
"""The tensors, and the seconds, after which the trainer's numbers are copied to the host."""


class Chronicle:
    """Tells the sinks of a run what happens in it.

    Args:
        options: the session's options.
        model: the model.
        results: the results of the run.
        sinks: get what happens.
        records: the sink that gets the facts; None if the run is not recorded.
        failures: get failures.
        front_door: what has started the session.
        diagnosis: judges the facts, and the trainer's numbers.
    """

    def __init__(
        self,
        options: SessionOptions,
        model: ObservedModel,
        results: RunResults,
        sinks: Sinks,
        records: RecordSink | None,
        failures: ObservationFailures,
        front_door: str,
        diagnosis: LiveDiagnosis,
    ) -> None:
        self._options = options
        self._results = results
        self._sinks = sinks
        self._records = records
        self._failures = failures
        self._facts = RunFacts(options, model, results, front_door)
        self._diagnosis = diagnosis
        self._has_begun = False
        self._told: list[object] = []
        self._kept: list[tuple[int, int, str, Any]] = []
        self._kept_since = 0.0

    def begin(self, ranks: Ranks) -> None:
        """Agree, in the first step, where the run is recorded; on all ranks that reduce together, whether they record
        it or not."""
        if self._has_begun:
            return
        self._has_begun = True
        records, group = self._records, self._options.process_group
        with_rank_0 = ranks.several and (group is None or 0 in torch.distributed.get_process_group_ranks(group))
        if records is not None:
            records.writes_reduced = own_rank() == 0 or (ranks.several and ranks.leads)
            records.is_alone = not ranks.several
        if own_rank() == 0:
            self._begin_segment()
        if with_rank_0:
            own = [] if own_rank() or records is None or records.place is None else [records.place]
            agreed = ranks.pool(own, "place of the records")
            if records is not None and agreed:
                records.place = Place(*agreed[0])

    def _begin_segment(self) -> None:
        if self._records is not None:
            try:
                self._records.place = self._records.begin()
            except Exception as error:
                self._sinks.drop(self._records)
                self._records = None
                self._failures.report("recording", "the run", error)

    # ------------------------------------------------------------------ what happens

    def tell(self, event: Event, is_recorded: bool = True) -> None:
        """Send an event to the rules, and to the sinks if this rank records it."""
        if is_recorded:
            self._sinks.tell(event)
        self._diagnosis.event(event)

    def tell_end(self, error: BaseException | None, iteration: int) -> None:
        """Report how the run ends to the rules. The recorded run gets the same event when its files are closed."""
        self._diagnosis.event(end_of(error, iteration))

    def tell_changes(self, iteration: int, *, at_last: bool = False, from_device: bool = True) -> None:
        """Tell at the end of a step what has changed in it.

        Args:
            iteration: the step.
            at_last: whether the run ends.
            from_device: whether to read the trainer's numbers that are not on the host.
        """
        self._tell_of_resume(iteration)
        if not from_device:
            self._kept = [kept for kept in self._kept if is_on_host(kept[-1])]
        self._send_scalars(at_once=at_last)
        facts, records = self._facts, self._records
        if at_last and records is not None and self._results.iterations.last is not None:
            records.last = self._results.iterations.last
        if not facts.changed(at_last=at_last):
            return
        try:
            taken = facts.take()
            if records is not None and records.writes_reduced:
                for event in facts.changes():
                    self.tell(event)
                records.put_facts(taken)
            self._diagnosis.know(taken, iteration)
        except ASKED_FOR:
            raise
        except Exception as error:
            self._failures.report("gathering the facts of", f"iteration {iteration}", error)

    def tell_error(self, error: BaseException, iteration: int) -> None:
        """Report the overflow that stopped the training; no other error."""
        from te_precision_callbacks.overflow import ActivationOverflowError

        if isinstance(error, ActivationOverflowError) and error not in self._told:
            self._told.append(error)
            data = {"class": error.class_name, "role": error.role, "batch": error.batch, "rank": error.rank}
            phase = "backward" if error.role.startswith("grad") else "forward"
            event = Event("nonfinite", str(error), iteration, "error", phase=phase, layer=error.path, data=data)
            self.tell(event)

    def tell_dumps(self, written: Iterable[Header]) -> None:
        """Tell which tensors were dumped."""
        for header in written:
            text = f"{header.layer} {header.tensor}, micro-batch {header.micro_batch}"
            event = Event("dump_written", text, header.iteration or 0, layer=header.layer, tensor=header.tensor)
            self.tell(event)

    def tell_judgement(self, broken: str, iteration: int) -> None:
        """Tell what the judgement of a contract has found; empty if the contract holds."""
        severity: Severity = "warning" if broken else "info"
        text = broken or "The run holds its precision contract."
        self.tell(Event("contract_judged", text, iteration, severity, phase="step"))

    def _tell_of_resume(self, iteration: int) -> None:
        report = self._results.resume
        if report is not None and report not in self._told:
            self._told.append(report)
            severity: Severity = "warning" if report.findings else "info"
            self.tell(Event("resume_audited", str(report), iteration, severity, phase="checkpoint"))

    # ------------------------------------------------------------------ the trainer's numbers

    def log(self, iteration: int, logging_step: int, values: Mapping[str, Any]) -> None:
        """Take numbers of the trainer: those among the values, and the tensors with one element."""
        if not self._kept:
            self._kept_since = time.monotonic()
        for name, value in values.items():
            if is_number(value):
                kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
                self._kept.append((iteration, logging_step, str(name), kept))

    def _send_scalars(self, *, at_once: bool) -> None:
        """Tell the sinks the trainer's numbers. A GPU's are not fetched in each step, which would wait for it."""
        kept = self._kept
        on_gpu = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for _, _, _, value in kept)
        waits = on_gpu and len(kept) < _MOST_KEPT and time.monotonic() - self._kept_since < _LONGEST
        if not kept or (waits and not at_once):
            return
        self._kept = []
        try:
            numbers = to_floats([value for _, _, _, value in kept])
        except Exception as error:
            self._failures.report("reading", "the trainer's numbers", error)
            return
        found: dict[tuple[int, int], dict[str, float]] = {}
        for (iteration, logging_step, name, _), number in zip(kept, numbers, strict=True):
            found.setdefault((iteration, logging_step), {})[name] = number
        for (iteration, logging_step), values in found.items():
            scalars = Scalars(iteration, logging_step, values)
            self._sinks.tell(scalars)
            self._diagnosis.take(scalars)
