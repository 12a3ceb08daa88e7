"""Watch an unchanged training script: hooks find its model, optimizer steps and loss.

Usage::

    te-precision run --watch --config config.yaml --log-dir run train.py --epochs 3
    torchrun --nproc-per-node 8 -m te_precision_callbacks.watch --log-dir run train.py --epochs 3
    TE_PRECISION_WATCH=1 ./launch.sh

A model is an outermost module that is called in training mode, with gradients, and that has parameters in an optimizer.
If an optimizer steps and there is no such module, a called module with gradients is the model: it is in evaluation
mode, or the optimizer has other parameters.
A debug iteration ends when every optimizer of the model has stepped. The loss is the scalar that ``backward()`` is
called on. A session that the script starts, with any integration, replaces this one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import runpy
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch.autograd.variable import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.base.exits import raise_exit
from te_precision_callbacks.base.optimizers import held_ids, optimizers_of_process
from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.layers.naming import NamedTorchModule

if TYPE_CHECKING:
    from te_precision_callbacks.options import SessionOptions
    from te_precision_callbacks.session import InspectSession

logger = logging.getLogger(__name__)

BACKWARDS = 20
"""Backward passes without a model before a warning; and without a step at the end of a run."""

MOST_IN_A_STEP = 1000
"""Backward passes without a step before a warning: nanoGPT accumulates 40, and LBFGS evaluates up to 25."""

SEARCHED_ITERATIONS = 2
"""Iterations that search for further models, such as the second network of a GAN."""

BEHIND = 3
"""Steps of one optimizer after which another without steps is no longer waited for."""

_ADVICE = (
    "Add three lines to the script instead: `from te_precision_callbacks import InspectSession`, `session ="
    " InspectSession(model=model, log_dir='run').start()` before the loop, and `session.step()` after"
    " each update of the parameters, such as `optimizer.step()`"
)


class ScriptWatch:
    """Starts a session when the script's model is first called in training; steps it after its optimizers.

    A failure of the watch is logged once and ends it; the training continues. The options are ``config`` and keywords
    of :class:`te_precision_callbacks.options.SessionOptions`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.session: InspectSession | None = None
        self._options = options
        self._models: dict[str, torch.nn.Module] = {}
        self._called: set[str] = set()
        self._candidates: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._is_in_candidate = False
        self._in_evaluation = False
        self._waiting: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._values: Any = WeakIdKeyDictionary()  # loss -> value, unscaled, or from before its memory was freed
        self._backwards = 0  # since the last step
        self._limit = BACKWARDS
        self._of_others = 0  # backwards that an optimizer of another model has used
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}  # its first elements
        self._has_warned = False
        self._iterations = 0
        self._search_until = SEARCHED_ITERATIONS
        self._has_stepped = False
        self._schedules: set[Any] = set()
        self._search = Replacements()
        self._replaced = Replacements(keeps_later=True)
        self._handles: list[Any] = []
        self._has_called = False
        self._has_attached = False
        self._has_ended = False
        self._process = os.getpid()

    # ------------------------------------------------------------------ begin and end

    def begin(self) -> None:
        """Register the hooks. Transformer Engine is imported only when a model is found."""
        self._handles = [
            register_optimizer_step_pre_hook(self._guard(self._before_step)),
            register_optimizer_step_post_hook(self._guard(self._after_step)),
        ]
        self._begin_search()
        self._replaced.replace(Variable, "_execution_engine", _engine(self._guard(self._before_backward)))
        self._replace(Optimizer, "add_param_group", after=lambda *_: self._search_again())
        self._replace(torch.amp.GradScaler, "scale", after=self._after_scale)
        self._replace(torch.amp.GradScaler, "step", self._before_scaler_step, after=self._after_scaler_step)
        if torch.distributed.is_available():
            self._replace(torch.distributed, "destroy_process_group", self._before_group_ends)
        self._replaced.replace(sys, "exit", raise_exit)
        self._replace(os, "_exit", lambda status: self.stop(SystemExit(status) if status else None))
        # Runs before the session's finalizer, which stops the session.
        self._at_exit = Finalize(None, self._finish, exitpriority=101)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the session and remove the hooks; warns if a model was called but not observed."""
        self._finish()
        for handle in self._handles:
            handle.remove()
        self._end(error)

    def _finish(self) -> None:
        """Warn if a model was called but not observed."""
        if not self._has_called or self._has_ended or os.getpid() != self._process:
            return
        if not (self._backwards or self._has_attached):
            logger.warning("The script ended without a backward pass, so no training was observed.")
        if self._backwards >= (self._limit if self._iterations else 1):
            self._warn(self._backwards)
            if self.session is not None:
                self.session.note_unobserved(
                    f"no optimizer of the model stepped after the last {self._backwards} backward passes, so they are"
                    " not observed"
                )
        elif self._of_others:
            self._warn(self._of_others, of_others=True)

    def _end(self, error: BaseException | None = None) -> None:
        """Stop the session, if it runs. Hooks of optimizers stay, without effect, since one may be running."""
        self._has_ended = True
        self._search.restore()
        self._replaced.restore()
        session = self.session
        self.session = None
        if session is not None:
            session.stop(error)

    def _end_training(self, error: BaseException | None = None) -> None:
        session = self.session
        self.session = None
        self._models = {}
        self._iterations = 0
        self._waiting.clear()
        if session is not None:
            session.stop(error)

    def _before_group_ends(self, group: Any = None, *_: Any) -> None:
        """Stop before the process group is destroyed; later, every rank would act as rank 0 and print the verdict."""
        if group is None or group is torch.distributed.group.WORLD:
            self._end_training(sys.exc_info()[1])  # of a try block whose finally destroys the group

    def _guard(self, function: Any) -> Any:
        """Wrap a function to report failures of the watch; the session's errors, such as ConfigError, still raise."""

        @functools.wraps(function)
        def guarded(*args: Any, **keywords: Any) -> None:
            if self._has_ended:
                return
            try:
                function(*args, **keywords)
            except PrecisionDebugError:
                raise
            except Exception as error:
                logger.error("--watch failed and stops; the training continues. %s.", _ADVICE, exc_info=error)
                with contextlib.suppress(Exception):
                    self._end(error)

        return guarded

    def _replace(self, owner: Any, name: str, before: Any = None, *, after: Any = None) -> None:
        original = getattr(owner, name)
        before = before and self._guard(before)
        after = after and self._guard(after)

        @functools.wraps(original)
        def call(*args: Any, **keywords: Any) -> Any:
            if before is not None:
                before(*args, **keywords)
            result = original(*args, **keywords)
            if after is not None:
                after(result, *args)
            return result

        self._replaced.replace(owner, name, call)

    # ------------------------------------------------------------------ the model

    def _begin_search(self) -> None:
        if self._search:
            return
        original = torch.nn.Module.__call__

        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **keywords)
            self._has_called = True
            if not module.training or not torch.is_grad_enabled():
                if not torch.is_grad_enabled() or self._is_in_candidate:
                    return original(module, *args, **keywords)
                self._in_evaluation = True
                self._is_in_candidate = True
                self._candidates.add(module)
                try:
                    return original(module, *args, **keywords)
                finally:
                    self._is_in_candidate = False
            self._guard(self._consider)(module)
            try:
                return original(module, *args, **keywords)
            finally:
                if not (self._search or self._has_ended) and self._iterations < self._search_until:
                    self._begin_search()

        self._search.replace(torch.nn.Module, "__call__", call)

    def _consider(self, module: torch.nn.Module, name: str = "") -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation in a backward
            return
        if not any(module in model.modules() for model in self._models.values()):
            trained = _trainable_ids(module)
            if not trained or self._is_replaced():
                return
            self._called.add(type(module).__name__)
            self._sample(module)
            optimizers = [
                optimizer for optimizer in optimizers_of_process() if not trained.isdisjoint(held_ids(optimizer))
            ]
            if optimizers:
                self._attach(module, optimizers, name)
            else:
                self._candidates.add(module)
        self._search.restore()

    def _is_replaced(self) -> bool:
        from te_precision_callbacks.session.session import running_session

        is_replaced = running_session() is not self.session or (self.session is not None and not self.session.running)
        if is_replaced:
            self._end()
        return is_replaced

    def _attach(self, model: torch.nn.Module, optimizers: Iterable[Optimizer], name: str) -> None:
        from te_precision_callbacks.session import InspectSession

        gc.collect()
        if not self._waiting:  # an earlier training has ended
            self._end_training()
        self._has_attached = True
        self._called.clear()
        self._in_evaluation = False
        # The first model's layers keep their names when another model is found.
        self._models[name or (f"model{len(self._models)}" if self._models else "")] = model
        for optimizer in optimizers:
            self._others.discard(optimizer)
            self._waiting.setdefault(optimizer, True)
        if self.session is None:
            self.session = InspectSession.from_options(_check_options(self._options))
            self.session.start(integration="watch", gives_way=True)
            self.session.follow(self)
        self.session.attach(dict(self._models))

    # ------------------------------------------------------------------ the step

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Wait for the optimizer in each iteration if it steps the model; else search for its model again."""
        if optimizer in self._waiting or optimizer in self._others:
            return
        if any(not _trainable_ids(model).isdisjoint(held_ids(optimizer)) for model in self._models.values()):
            self._waiting[optimizer] = True
            return
        if self.session is None and not self._is_replaced():
            for candidate in list(self._candidates):
                if any(parameter.grad is not None for parameter in candidate.parameters()):
                    self._candidates.discard(candidate)
                    self._attach(candidate, [optimizer], "")
                    return
        self._others.add(optimizer)
        self._search_again()

    def _search_again(self) -> None:
        self._search_until = self._iterations + SEARCHED_ITERATIONS
        self._begin_search()
        self._watch_schedules()

    def _watch_schedules(self) -> None:
        """Attach a pipeline's stages before its schedule runs. In the schedule, a stage waits for the forward of the
        previous stage, so ranks that attach in their first forward would deadlock.
        """
        megatron: Any = sys.modules.get("megatron.core.pipeline_parallel.schedules")
        if megatron is not None and megatron not in self._schedules:
            self._schedules.add(megatron)
            for name in [name for name in vars(megatron) if name.startswith("forward_backward_")]:
                self._replace(megatron, name, self._before_megatron)
            if hasattr(megatron, "deallocate_output_tensor"):
                self._replace(megatron, "deallocate_output_tensor", self._before_freeing)
        pipelining: Any = sys.modules.get("torch.distributed.pipelining.schedules")
        if pipelining is not None and pipelining not in self._schedules:
            self._schedules.add(pipelining)
            for schedule in (pipelining.PipelineScheduleSingle, pipelining.PipelineScheduleMulti):
                self._replace(schedule, "step", self._before_pipeline)

    def _before_megatron(self, *_: Any, model: Any = None, forward_only: bool = False, **__: Any) -> None:
        if not forward_only:
            stages = model if isinstance(model, list) else [model]
            self._consider_stages([("", stage) for stage in stages])

    def _before_pipeline(self, schedule: Any, *_: Any, **__: Any) -> None:
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        self._consider_stages([(name_of_stage(stage), stage.submod) for stage in stages])

    def _consider_stages(self, stages: Sequence[NamedTorchModule]) -> None:
        if self._search and torch.is_grad_enabled():
            for name, stage in stages:
                if stage.training:
                    self._consider(stage, name)
            if not self._has_ended and self._iterations < self._search_until:
                self._begin_search()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._has_stepped = True
        if self.session is None or optimizer not in self._waiting or self._is_replaced():
            if optimizer in self._others and self.session is not None:
                # Another training, which is not observed, and not a part of the session's.
                is_known = self._of_others >= BACKWARDS
                self._of_others += self._backwards
                self._backwards = 0
                if self._of_others >= BACKWARDS and not is_known:
                    self._search.restore()
                    self._warn(self._of_others, of_others=True)
            return
        count = self._steps.get(optimizer, 0) + 1
        self._steps[optimizer] = count
        for other, is_waited_for in list(self._waiting.items()):
            if is_waited_for and not self._steps.get(other):
                # Lightning and Accelerate wrap optimizers in optimizers with the same parameters.
                self._waiting[other] = count < BEHIND and not set(held_ids(other)).issubset(held_ids(optimizer))
        if all(self._steps.get(other) for other, is_waited_for in self._waiting.items() if is_waited_for):
            self._steps.clear()
            self._limit = max(self._limit, 2 * self._backwards)
            self._backwards = 0
            self._iterations += 1
            if self._iterations >= self._search_until:
                self._search.restore()
            self.session.step()

    def _before_scaler_step(self, *_: Any) -> None:
        self._has_stepped = False

    def _after_scaler_step(self, _result: Any, _scaler: Any, optimizer: Optimizer, *_: Any) -> None:
        """Count a step that a GradScaler skips because of inf or nan in gradients."""
        if not self._has_stepped:
            self._after_step(optimizer)

    # ------------------------------------------------------------------ the loss

    def backward(self, loss: torch.Tensor) -> None:
        """Placeholder that a session wraps; called with the loss of each backward."""

    def _before_backward(self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation within a backward
            return
        loss = tensors[0]
        gradient = gradients[0]
        if len(tensors) == 1 and loss.numel() == 1 and (gradient is None or gradient.numel() == 1):
            value = self._values.get(loss, loss)
            if value is not loss or not _is_freed(loss):
                self.backward(value)
        self._backwards += 1
        if self._backwards == BACKWARDS:
            self._search.restore()
        if self._backwards == (BACKWARDS if self.session is None else MOST_IN_A_STEP):
            self._warn(self._backwards)

    def _after_scale(self, scaled: Any, _scaler: Any, outputs: Any, *_: Any) -> None:
        if isinstance(scaled, torch.Tensor) and isinstance(outputs, torch.Tensor):
            self._values[scaled] = outputs.detach()

    def _before_freeing(self, output: Any, *_: Any) -> None:
        """Keep a pipeline's loss: its schedule frees each output's memory before its backward."""
        if isinstance(output, torch.Tensor) and output.numel() == 1:
            self._values[output] = self._values.get(output, output.detach())

    def _sample(self, module: torch.nn.Module) -> None:
        name = type(module).__name__
        parameter = next(filter(_is_plain, module.parameters()), None)
        if name not in self._before and parameter is not None and not is_capturing():
            self._before[name] = weakref.ref(parameter), _first_elements(parameter)

    def _updated_by_hand(self) -> str:
        """The models with changed parameters; copies from the device, and so only for a warning."""
        changed = []
        for name, (reference, before) in self._before.items():
            parameter = reference()
            if parameter is not None and not torch.equal(_first_elements(parameter), before):
                changed.append(name)
        return ", ".join(sorted(changed))

    def _warn(self, backwards: int, *, of_others: bool = False) -> None:
        """Warn once of backward passes without a model or a step."""
        if self._has_warned:
            return
        self._has_warned = True
        optimizers = (
            ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers_of_process()}))
            or "no optimizer of torch.optim"
        )
        has_stepped = bool(self._iterations) or self._has_stepped
        changed = "" if has_stepped else self._updated_by_hand()
        if changed:
            seen = (
                f"no optimizer of torch.optim stepped, but the parameters of {changed} have changed: the script updates"
                " them itself, such as by p.data.add_(), so no step was observed"
            )
        elif self.session is None or of_others:
            called = ", ".join(sorted(self._called)) or "no module with trainable parameters"
            if self._in_evaluation and not self._called:
                called += ", but modules in evaluation mode: call model.train() before the training"
            seen = f"no model with parameters in an optimizer was found. Called in training mode: {called}"
        else:
            seen = "no optimizer of the model stepped" + (f" since step {self._iterations}" if self._iterations else "")
        logger.warning("After %d backward passes %s. In this process: %s. %s.", backwards, seen, optimizers, _ADVICE)


def name_of_stage(stage: Any) -> str:
    """Return a prefix for the layers of a pipeline's later stage, unless the whole model numbers them.

    Layers of the same name on different ranks would be merged.
    """
    numbers: list[int] = []
    for name, _ in stage.submod.named_modules():
        numbers += [int(part) for part in name.split(".") if part.isdigit()][:1]
    if stage.stage_index and not min(numbers, default=0):
        return f"stage{stage.stage_index}"
    return ""


def _engine(before_backward: Any) -> Any:
    """Wrap the autograd engine to report each backward, for Megatron's pipeline schedules, which call it directly."""

    class Engine(type(Variable._execution_engine)):  # type: ignore[misc]
        def run_backward(
            self, tensors: Any, grad_tensors: Any, *args: Any, accumulate_grad: bool = False, **keywords: Any
        ) -> Any:
            if accumulate_grad:  # False for torch.autograd.grad()
                before_backward(tensors, grad_tensors)
            return super().run_backward(tensors, grad_tensors, *args, accumulate_grad=accumulate_grad, **keywords)

    return Engine()


_SAMPLED = 64


def _is_plain(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and type(parameter.data) is torch.Tensor and parameter.is_contiguous()


def _first_elements(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().view(-1)[:_SAMPLED].clone()


def _is_freed(loss: torch.Tensor) -> bool:
    """Return whether a pipeline schedule freed an output's memory; its graph keeps the original shape."""
    if loss.grad_fn is None:
        return False
    metadata = getattr(loss.grad_fn, "_input_metadata", ())
    return loss.output_nr < len(metadata) and tuple(metadata[loss.output_nr].shape) != tuple(loss.shape)


def _check_options(options: Mapping[str, Any]) -> SessionOptions:
    from te_precision_callbacks.options import SessionOptions

    keywords = dict(options)
    return SessionOptions.from_keywords(keywords.pop("config", None), **keywords)


def _trainable_ids(module: torch.nn.Module) -> set[int]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    masters = [getattr(parameter, "main_param", None) for parameter in trained]
    return {id(parameter) for parameter in (*trained, *masters) if parameter is not None}


# ---------------------------------------------------------------------- the command line


def read_options(config: str | None, log_dir: str | None, settings: Iterable[str]) -> dict[str, Any]:
    """Parse the session's options from a command line; ``settings``: ``name=value`` with values in YAML.

    Raises:
        OptionError: an unknown keyword, or an invalid value.
        ConfigError: the config cannot be used.
    """
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        try:
            options[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise OptionError(f"--set takes NAME=VALUE with a value in YAML, such as on_finding=stop, not {setting!r}.")
    paths = {"config": config, "log_dir": log_dir}
    options |= {name: str(Path(path).absolute()) for name, path in paths.items() if path is not None}
    _check_options(options)
    return options


if __name__ == "__main__":
    sys.argv[1:1] = ["run", "--watch"]
    runpy.run_module("te_precision_callbacks", run_name="__main__")
