"""Rules on the outcome of a run: an exception that ended it, a broken contract, a run that was not observed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from te_precision_callbacks.diagnosis.finding import FAILED_OBSERVATION
from te_precision_callbacks.diagnosis.rule import Rule, Sighting, Sightings
from te_precision_callbacks.diagnosis.shapes import Reported
from te_precision_callbacks.runs.summary import ended_by, summarize_broken_contract
from te_precision_callbacks.sinks.step_records import Event

_EXPLAINED = ("PrecisionFindingError", "PrecisionContractError", "ActivationOverflowError")


def _failure_of_run(event: Event) -> Iterator[Sighting | str]:
    first_line = event.text.partition("\n")[0].rstrip(":. ")
    if event.kind == "stopped":
        yield first_line
    elif event.kind == "earlier_start":
        yield Sighting(first_line, since=event.iteration, severity="note", key=first_line)
    elif event.severity == "error":
        cause = ended_by(first_line)
        if cause and cause != "sys.exit()":
            yield f"the run was ended by {cause} after step {event.iteration}"
        elif not cause and not first_line.startswith(_EXPLAINED):
            yield Sighting(f"the run was ended by {first_line}", since=event.data.get("step", event.iteration))


def _broken_contract(event: Event) -> Iterator[Sighting | str]:
    if not event.data.get("checked", True):
        yield event.text.rstrip(".").replace("The precision contract (require=)", "it")
    elif event.severity != "info":
        yield Sighting(summarize_broken_contract(event.text).rstrip("."), since=event.iteration)


def _text_of(event: Event) -> Sightings:
    yield Sighting(event.text, since=event.iteration)


def _failure(event: Event) -> Iterator[str]:
    yield f"in step {event.iteration}, {event.text.partition(chr(10))[0].rstrip('.')}"


RULES = (
    Rule(
        id="failed-run",
        title="an exception ended the run",
        subject="model",
        needs="the recorded end of a session",
        collect="a run recorded by a session",
        condition="""
            the last process of the run ended with an exception, or with an exit status other than 0. Not checked after
            Ctrl-C or SIGTERM, since the run did not reach its end, or if the session was not stopped and the exit
            status is not known. A failure of an earlier start of a resumed run is a note
        """,
        silent="""
            sys.exit() with status 0; exceptions that te-precision-callbacks raises because of another finding; SIGTERM
            before the run was resumed
        """,
        severity="error",
        source="arithmetic",
        why="the training is incomplete, and a numerical problem may be the cause",
        disproof="the exception ended the run on purpose",
        remedy="Read the traceback in the output of the script",
        check=partial(
            Reported, kinds=("segment_ended", "stopped", "earlier_start"), find=_failure_of_run, is_of_all=True
        ),
        essential=True,
        consequence_of=("nonfinite", "contract"),
    ),
    Rule(
        id="contract",
        title="the run breaks its precision contract",
        subject="model",
        needs="a contract (require=)",
        collect='require="fp8 >= 95%"',
        condition="the products of the run do not meet require=",
        silent="runs without require=",
        severity="error",
        source="the contract itself",
        why="the run does not have the precision that you required",
        disproof="the contract is meant for another model or recipe",
        remedy="Fix what the message names for each product, or change the contract",
        check=partial(Reported, kinds=("contract_checked",), find=_broken_contract),
        essential=True,
    ),
    Rule(
        id="evaluation-mode",
        title="the model trains in evaluation mode",
        subject="model",
        needs="layers of Transformer Engine",
        collect="a run recorded by a session",
        condition="an optimizer of the model steps while all Transformer Engine layers are in evaluation mode",
        silent="models with a layer of Transformer Engine in training mode, or without such layers",
        source="PyTorch's documentation of Module.eval(); this project",
        why="dropout is off, statistics of batch norm are fixed, and a session does not observe the layers",
        disproof="the model trains in evaluation mode on purpose",
        remedy="Call model.train() before the training, and again after each evaluation",
        check=partial(Reported, kinds=("evaluation_mode",), find=_text_of),
    ),
    Rule(
        id=FAILED_OBSERVATION,
        title="the observation of the run failed",
        subject="model",
        needs="a run without a failure of the observation",
        collect="a run without a failure of the observation",
        condition="a failure was reported, after which statistics or records are missing",
        silent="runs without failures",
        severity="note",
        source="the events of the run",
        why="data that were not observed cannot be checked",
        disproof="you do not need the affected statistics",
        remedy="Read the failure in the log; report it if it is a bug in te-precision-callbacks",
        check=partial(Reported, kinds=("observation_failed", "records_limited"), find=_failure),
        essential=True,
    ),
)
