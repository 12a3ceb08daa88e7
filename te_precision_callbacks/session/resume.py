"""The audit of a resume: compares the training state and the loss with the checkpoint.

Transformer Engine 2.20 restores scales and amax histories in ``load_state_dict``, and adapts them to the recipe in a
module's first forward. The audit therefore reads states and weights before the first forward. It reads recipes before
the first optimizer step, and reports then.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ResumeAuditError
from te_precision_callbacks.base.optimizers import state_of
from te_precision_callbacks.base.ranks import own_rank, world_size
from te_precision_callbacks.base.scalars import is_scalar, to_floats
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import Layer, NamedModule, modules_by_layer
from te_precision_callbacks.parameters.optimizers import ParameterList, SteppedParameters
from te_precision_callbacks.runs.fingerprints import (
    Fingerprint,
    FingerprintError,
    compare,
    for_log,
    read,
    unsaved_layers,
    with_layers,
    with_recipes,
    write,
)
from te_precision_callbacks.runs.run_files import new_run_id
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.runs.summary import is_training_loss
from te_precision_callbacks.runs.training_state import sample_state
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.sinks.step_records import Event, Severity
from te_precision_callbacks.te.state import delayed_states

if TYPE_CHECKING:
    from te_precision_callbacks.session.model import ObservedModel

logger = logging.getLogger(__name__)

_VERSIONED = ("torch", "transformer_engine", "nvdlfw_inspect", "te-precision-callbacks")


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, importlib.metadata.version(name)) for name in _VERSIONED)


_REMEDY = (
    "Ignore intended changes. For the others, docs/session.md explains how to save and load a checkpoint of FP8"
    " training."
)


_EVALUATE_IN_FP8 = (
    "Their last forward was an evaluation outside of FP8, so Transformer Engine saved an empty _extra_state, and a"
    " resume starts with scales of 1. %s, or save before the evaluation."
)
_EVALUATE_IN_FP8_WITH_ACCELERATE = (
    "Set fp8_use_autocast_during_eval: true in fp8_config of Accelerate's file, or"
    " TERecipeKwargs(use_autocast_during_eval=True)"
)


class ResumeAudit:
    """Fingerprints the model for checkpoints, and compares a resumed run with its checkpoint's fingerprint.

    While the model exists, fingerprints can also be taken after :meth:`end`, for a checkpoint saved after the stop.
    """

    def __init__(
        self, context: RunContext, model: ObservedModel, listed: ParameterList, records: RecordSink | None
    ) -> None:
        self._model: ObservedModel | None = model
        self._stepped: MutableMapping[torch.optim.Optimizer, SteppedParameters] = listed.stepped
        self._context = context
        self._results = context.results
        self._records = records
        self._failures = context.failures
        self._run_id = new_run_id()
        self._left = weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, tuple[Layer, ...]]]()
        self._config = ""
        self._saved: Fingerprint | None = None
        self._restored: Fingerprint | None = None
        self._handle: RemovableHandle | None = None
        self._steps: list[torch.Tensor] | None = None  # of the optimizer, before its first step in the session

    # ------------------------------------------------------------------ saving

    def end(self) -> None:
        self._forget()
        if self._model is not None:
            self._config = self._model.config_hash
            self._run_id = self._name_of_run
            self._records = None
            self._stepped = weakref.WeakKeyDictionary(self._stepped)
            for named in self._model.layers.modules:
                self._left[named.module] = named.name, named.layers
            self._model = None

    def take(self, iteration: int) -> Fingerprint | None:
        """Return the fingerprint of this rank; None without layers, and after a failure."""
        modules = self._modules()
        if not modules:
            return None
        try:
            fingerprint = with_recipes(self._with_layers(iteration), modules, self._results.table.trained_in_fp8)
            fingerprint = self._with_training(fingerprint)
            context = self._context
            unsaved = unsaved_layers(fingerprint)
            if unsaved is not None and own_rank() == 0 and context.notices.first("unsaved"):
                converts = context.results.integration in ("accelerate", "transformers")
                remedy = _EVALUATE_IN_FP8_WITH_ACCELERATE if converts else "Evaluate inside te.autocast"
                logger.warning("%s %s", unsaved, _EVALUATE_IN_FP8 % remedy)
            return fingerprint
        except Exception as error:
            self._failures.report("taking the fingerprint of", f"iteration {iteration}", error)
            return None

    def _with_layers(self, iteration: int) -> Fingerprint:
        model = self._model
        facts = Fingerprint(
            iteration=iteration,
            run=self._name_of_run,
            rank=own_rank(),
            world_size=world_size(),
            config=self._config if model is None else model.config_hash,
            versions=dict(versions()),
        )
        return with_layers(facts, self._modules())

    def _with_training(self, fingerprint: Fingerprint) -> Fingerprint:
        if not self._stepped:
            return fingerprint
        return replace(fingerprint, training=sample_state(self._stepped))

    @property
    def _name_of_run(self) -> str:
        if self._records is None:
            return self._run_id
        return self._records.run_id

    def _modules(self) -> Sequence[NamedModule]:
        if self._model is not None:
            return self._model.layers.modules
        return [NamedModule(module, *names) for module, names in self._left.items()]

    def save(self, folder: Path, iteration: int) -> None:
        fingerprint = self.take(iteration)
        if fingerprint is not None:
            try:
                write(fingerprint, folder)
            except OSError as error:
                self._failures.report("writing", f"a fingerprint into {folder}", error)

    # ------------------------------------------------------------------ restoring

    def expect(self, saved: str | Path) -> None:
        """Schedule the comparison of the restored model with a fingerprint, for its first step.

        Args:
            saved: the text of a fingerprint, or the folder of a checkpoint, with or without a fingerprint.
        """
        self._forget()
        try:
            self._saved = read(saved, own_rank()) if isinstance(saved, Path) else Fingerprint.from_text(saved)
        except FingerprintError as error:
            if self._context.options.strict:
                raise
            logger.warning("The resume cannot be audited. %s", error)
            return
        if self._saved:
            if self._records is not None:
                with self._failures.guard("looking for", f"the records of the run {self._saved.run}"):
                    self._records.continue_run(self._saved.run)
            self._handle = register_module_forward_pre_hook(outside_of_dynamo(self._before_forward))

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        model = self._model
        if model is None or not model.holds(module, *module._modules.values()):
            return
        saved = self._saved
        self._forget()
        with self._failures.guard("auditing", "the resume"):
            self._restored = self._with_layers(0)
            self._saved = saved

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model
        if self._steps is None and model is not None and model.is_trained_by(optimizer):
            self._steps = []
            with self._failures.guard("looking for", "the scales of a resume"):
                self._steps = [torch.as_tensor(count).clone() for count in _steps_before(optimizer)]
        if self._restored is None or is_capturing():
            return
        if optimizer in self._stepped and self._stepped[optimizer].held:
            self._compare_restored()

    def end_step(self) -> None:
        """Without a fingerprint, find lost scales: the optimizer has stepped before, and all scales are new."""
        self._compare_restored()
        steps = max(map(float, self._steps or ()), default=0.0)
        model = self._model
        if steps < 1 or model is None or self._results.resume is not None:
            return
        self._steps = []
        modules = model.layers.modules
        layers = list(modules_by_layer(named for named in modules if any(delayed_states(named.module))))
        unscaled = model.hooks.answers.delayed_scaling.unscaled(self._context.iteration, modules, ())
        if layers and unscaled.issuperset(layers):
            text = (
                f"The optimizer has stepped {many(round(steps), 'time')} before, but the scales and amax histories of"
                f" delayed scaling are new, in all {many(len(layers), 'layer')}."
            )
            self._report(text, "warning", [text], layers)
            logger.warning("%s\n%s", text, _REMEDY)

    def _report(self, text: str, severity: Severity, lost: Sequence[str], layers: Iterable[str]) -> None:
        data = {"lost": list(lost), "layers": list(dict.fromkeys(layers))}
        event = Event("resume_audited", text, self._context.iteration, severity, phase="checkpoint", data=data)
        self._context.events.append(event)

    def _compare_restored(self) -> None:
        """Compare and report, once: before the first step of an optimizer, or else at the end of the first step."""
        saved = self._saved
        restored = self._restored
        if saved is None or restored is None:
            return
        self._forget()
        with self._failures.guard("auditing", "the resume"):
            restored = with_recipes(restored, self._modules(), self._results.table.trained_in_fp8)
            report = compare(saved, self._with_training(restored))
            self._results.resume = report
            lost: list[str] = []
            layers: list[str] = []
            for finding in report.findings:
                if finding.of_rank:
                    lost.append(str(finding))
                    if not finding.of_training:
                        layers += finding.layers
            self._report(str(report), "warning" if report.findings else "info", lost, layers)
            if not report.findings:
                logger.debug("The resume restored the state of the checkpoint of iteration %d.", report.iteration)
            elif self._context.options.strict:
                raise ResumeAuditError(f"{report}\n{_REMEDY}")
            elif (logged := for_log(report)).findings:
                logger.warning("%s\n%s", logged, _REMEDY)

    def _forget(self) -> None:
        self._saved = None
        self._restored = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _steps_before(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield counts of earlier steps of an optimizer's parameters: of torch's, and of TE's FusedAdam; not of SGD."""
    for group in optimizer.param_groups:
        if group.get("step"):
            yield group["step"]
        for tensor in group["params"][:1]:
            if "step" in (state := state_of(optimizer, tensor)):
                yield state["step"]


NAMES = ("loss", "train_loss", "train/loss", "training_loss", "train_loss_step")
"""Names under which scripts and trainers log the training loss."""


_KEPT = 20
"""Number of losses in a checkpoint. The rule diverging-loss derives from them the noise after a resume."""


class ResumedLoss:
    """The last training losses before a checkpoint; a rule compares the first losses after a resume with them.

    Attributes:
        restored: the losses of the checkpoint, oldest first, until :meth:`take_restored`.
    """

    def __init__(self) -> None:
        self.restored: list[float] = []
        self._recent = deque[Any](maxlen=_KEPT)

    def note(self, values: Mapping[str, Any]) -> None:
        loss = next((values[name] for name in NAMES if name in values), None)
        if is_scalar(loss):
            self._recent.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)

    def saved(self) -> dict[str, Any]:
        """Return the last losses for a checkpoint, under the key ``losses``; empty without losses."""
        if self._recent:
            return {"losses": to_floats(self._recent)}
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.restored = list(map(float, state.get("losses", ())))
        self._recent = deque(self.restored, _KEPT)

    def take_restored(self, values: Mapping[str, Any]) -> list[float]:
        """Return the losses of the checkpoint once, when the first training loss after the resume is logged."""
        if not any(is_training_loss(str(name)) for name in values):
            return []
        restored = self.restored
        self.restored = []
        return restored


def losses_before(history: Sequence[Mapping[str, Any]], resumed_at: int) -> list[float]:
    """Return the last training losses before a checkpoint, from the Hugging Face Trainer's log history."""
    losses = [entry["loss"] for entry in history if "loss" in entry and entry["step"] <= resumed_at]
    return losses[-_KEPT:]
