"""Watch an unchanged training script: hooks find its model, optimizer steps and loss.

Usage::

    te-precision run --watch --config config.yaml --log-dir run train.py --epochs 3
    torchrun --nproc-per-node 8 -m te_precision_callbacks.watch --log-dir run train.py --epochs 3

A model is an outermost module that is called with gradients, and that has parameters in an optimizer. It is attached in
its first call in training mode; or, if the call may wait for another rank, as in a pipeline, at the first step of its
optimizer. If an optimizer steps and has parameters of no module, a called module with gradients is the model.
A debug iteration ends when every optimizer of the model has stepped. The loss is the scalar that ``backward()`` is
called on. A session that the script starts, with any integration, replaces this one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import runpy
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.base.failures import Guard
from te_precision_callbacks.base.optimizers import held_ids, optimizers_of_process
from te_precision_callbacks.base.ranks import has_other_ranks, world_size
from te_precision_callbacks.base.replaced import Replacements

if TYPE_CHECKING:
    from te_precision_callbacks.session import InspectSession

logger = logging.getLogger(__name__)

MOST_BACKWARDS = 1000
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
        self._candidates: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        self._waiting: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._attaching: list[RemovableHandle] = []  # hooks of the step that runs
        self._unscaled: torch.Tensor | None = None  # the loss before a GradScaler's last scaling
        self._backwards = 0  # since the last step
        self._iterations = 0
        self._search_until = SEARCHED_ITERATIONS
        self._search = Replacements()
        self._replaced = Replacements(keeps_later=True)
        self._has_called = False
        self._has_attached = False
        self._has_ended = False

    # ------------------------------------------------------------------ begin and end

    def begin(self) -> None:
        """Register the hooks. Transformer Engine is imported only when a model is found."""
        register_optimizer_step_pre_hook(self._guard(self._before_step))
        register_optimizer_step_post_hook(self._guard(self._after_step))
        self._begin_search()
        self._replace(torch.autograd, "backward", self._before_backward)
        self._replace(Optimizer, "add_param_group", self._search_again)
        self._replace(torch.amp.GradScaler, "scale", self._before_scale)
        if torch.distributed.is_available():
            self._replace(torch.distributed, "destroy_process_group", self._before_group_ends)
        # Runs before the session's finalizer, which stops the session.
        self._at_exit = Finalize(None, self.finish, exitpriority=101)

    def finish(self) -> None:
        """Warn if no training was observed."""
        if self._has_ended or not (self._has_called or self._backwards):
            return
        if not self._has_attached or (self._backwards and not self._iterations):
            if self._backwards < MOST_BACKWARDS:  # later, it has been said
                self._warn()
            if self.session is not None:
                self.session.note_unobserved(
                    f"no optimizer of the model stepped after the last {self._backwards} backward passes, so they are"
                    " not observed"
                )

    def end(self, error: BaseException | None = None) -> None:
        """Stop the session, if it runs. Hooks of optimizers stay, without effect, since one may be running."""
        self._has_ended = True
        self._search.restore()
        self._replaced.restore()
        self._end_training(error)

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
            with Guard(self._fail, PrecisionDebugError):
                if not self._has_ended:
                    function(*args, **keywords)

        return guarded

    def _fail(self, error: Exception) -> None:
        logger.error("--watch failed and stops; the training continues. %s.", _ADVICE, exc_info=error)
        with contextlib.suppress(Exception):
            self.end(error)

    def _replace(self, owner: Any, name: str, before_call: Any) -> None:
        original = getattr(owner, name)
        before_call = self._guard(before_call)

        @functools.wraps(original)
        def call(*args: Any, **keywords: Any) -> Any:
            before_call(*args, **keywords)
            return original(*args, **keywords)

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
            is_recomputed = torch._C._current_graph_task_id() != -1  # in a backward
            if is_recomputed or not torch.is_grad_enabled():
                return original(module, *args, **keywords)
            self._search.restore()  # modules inside are parts of this one
            self._guard(self._consider)(module)
            try:
                return original(module, *args, **keywords)
            finally:
                if not self._has_ended and self._iterations < self._search_until:
                    self._begin_search()

        self._search.replace(torch.nn.Module, "__call__", call)

    def _consider(self, module: torch.nn.Module) -> None:
        trained = _trainable_ids(module)
        is_known = any(module in model.modules() for model in self._models.values())
        if is_known or not trained or self._is_replaced():
            return
        if module not in self._candidates:
            self._candidates[module] = None
            gc.collect()
            if not self._waiting:  # an earlier training has ended
                self._end_training()
        if module.training and _is_called_on_all_ranks(module):
            optimizers = [other for other in optimizers_of_process() if not trained.isdisjoint(held_ids(other))]
            if optimizers:
                self._attach([module], optimizers)

    def _is_replaced(self) -> bool:
        from te_precision_callbacks.session.session import running_session

        is_replaced = running_session() is not self.session
        if is_replaced:
            self.end()
        return is_replaced

    def _attach(self, models: Iterable[torch.nn.Module], optimizers: Iterable[Optimizer]) -> None:
        from te_precision_callbacks.session import InspectSession

        stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None and any(issubclass(type(item), stages._PipelineStageBase) for item in gc.get_objects()):
            logger.error(
                "--watch stops: stages of torch.distributed.pipelining may give their layers equal names, which would"
                " mix their statistics. %s, with a name for the stage: model={'stage1': module}.",
                _ADVICE,
            )
            self.end()
            return
        self._has_attached = True
        for model in models:
            # The first model's layers keep their names when another model is found.
            self._models[f"model{len(self._models)}" if self._models else ""] = model
            self._candidates.pop(model, None)
        for optimizer in optimizers:
            self._others.discard(optimizer)
            self._waiting.setdefault(optimizer, True)
        if self.session is None:
            self.session = InspectSession(**self._options)
            self.session.start(integration="watch", gives_way=True)
            self.session.follow(self)
        self.session.attach(dict(self._models))

    # ------------------------------------------------------------------ the step

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Wait for the optimizer in each iteration if it steps a model; attach called models that it steps."""
        if optimizer in self._waiting or optimizer in self._others or self._is_replaced():
            return
        held = set(held_ids(optimizer))
        if any(not held.isdisjoint(_trainable_ids(model)) for model in self._models.values()):
            self._waiting[optimizer] = True
            return
        candidates = list(self._candidates)
        models = [model for model in candidates if not held.isdisjoint(_trainable_ids(model))]
        if not models and self.session is None:
            models = [
                model for model in candidates if any(parameter.grad is not None for parameter in model.parameters())
            ]
        if models:
            # torch iterates over the hooks of all optimizers now, to which a session adds one.
            attach = functools.partial(self._attach_in_step, models)
            self._attaching.append(optimizer.register_step_pre_hook(attach))
        else:
            self._others.add(optimizer)
            self._search_again()

    def _attach_in_step(self, models: Sequence[torch.nn.Module], optimizer: Optimizer, args: Any, keywords: Any) -> Any:
        """Attach models in a hook of their optimizer, and call the hooks that the session has added: torch does not
        call them any more in this step (2.6 to 2.13, ``Optimizer.profile_hook_step``).
        """
        if optimizer in self._waiting:  # an earlier step has failed
            return None
        earlier_hooks = [*_global_optimizer_pre_hooks]
        self._guard(self._attach)(models, [optimizer])
        changed = None
        for key, hook in _global_optimizer_pre_hooks.items():
            if key not in earlier_hooks:
                changed = hook(optimizer, args, keywords) or changed
        return changed

    def _search_again(self, *_: Any, **__: Any) -> None:
        self._search_until = self._iterations + SEARCHED_ITERATIONS
        self._begin_search()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        while self._attaching:
            self._attaching.pop().remove()
        if self.session is None or optimizer not in self._waiting or self._is_replaced():
            return
        count = self._steps.get(optimizer, 0) + 1
        self._steps[optimizer] = count
        for other, is_waited_for in list(self._waiting.items()):
            if is_waited_for and not self._steps.get(other):
                # Lightning and Accelerate wrap optimizers in optimizers with the same parameters.
                self._waiting[other] = count < BEHIND and not set(held_ids(other)).issubset(held_ids(optimizer))
        if all(self._steps.get(other) for other, is_waited_for in self._waiting.items() if is_waited_for):
            self._steps.clear()
            self._backwards = 0
            self._iterations += 1
            if self._iterations >= self._search_until:
                self._search.restore()
            self.session.step()

    # ------------------------------------------------------------------ the loss

    def backward(self, loss: torch.Tensor) -> None:
        """Placeholder that a session wraps; called with the loss of each backward."""

    def _before_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation within a backward
            return
        loss = tensors[0] if isinstance(tensors, Sequence) and len(tensors) == 1 else tensors
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.backward(loss if self._unscaled is None else self._unscaled)
        self._unscaled = None
        self._backwards += 1
        if self._backwards == MOST_BACKWARDS:
            self._search.restore()
            self._warn()

    def _before_scale(self, _scaler: Any, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor):
            self._unscaled = outputs.detach()

    def _warn(self) -> None:
        """Warn of backward passes without a model or a step."""
        seen = "no optimizer of the model stepped" + (f" since step {self._iterations}" if self._iterations else "")
        if self.session is None:
            called = ", ".join(sorted({type(module).__name__ for module in self._candidates}))
            seen = f"no model with parameters in an optimizer was found. Called with gradients: {called or 'none'}"
        optimizers = ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers_of_process()}))
        logger.warning(
            "After %d backward pass%s %s. In this process: %s. %s.",
            self._backwards,
            "" if self._backwards == 1 else "es",
            seen,
            optimizers or "no optimizer of torch.optim",
            _ADVICE,
        )


def _trainable_ids(module: torch.nn.Module) -> set[int]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return {*map(id, trained), *(id(getattr(parameter, "main_param", None)) for parameter in trained)}


def _is_called_on_all_ranks(module: torch.nn.Module) -> bool:
    """Return whether no rank waits for another one in the call: there is one rank, or DDP or FSDP over all ranks."""
    group = getattr(module, "process_group", None)
    return not has_other_ranks(None) or (group is not None and group.size() == world_size())


# ---------------------------------------------------------------------- the command line


def read_options(config: str | None, log_dir: str | None, settings: Iterable[str]) -> dict[str, Any]:
    """Parse the session's options from a command line; ``settings``: ``name=value`` with values in YAML.

    Raises:
        OptionError: an unknown keyword, or an invalid value.
        ConfigError: the config cannot be used.
    """
    from te_precision_callbacks.options import SessionOptions

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
    SessionOptions.from_keywords(**{"config": None, **options})
    return options


if __name__ == "__main__":
    sys.argv[1:1] = ["run", "--watch"]
    runpy.run_module("te_precision_callbacks", run_name="__main__")
