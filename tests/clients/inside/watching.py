"""Attach the debugger to an unmodified training, through the integration for its loop.

==============  ========================================================================================================
front door      where it is put
==============  ========================================================================================================
session         around the training of each model: from the model's first forward in training to the next model's, or
                the end; a step after each step of an optimizer
accelerate      the same, with ``PrecisionDebugger`` where ``Accelerator.prepare`` has returned a model
megatron        the same session, from the first schedule on: inside of it a stage of a pipeline waits for the stage
                before, so that ranks would not start together
lightning       in the callbacks of a Trainer, when ``fit`` is called
transformers    in the callbacks of a Trainer, when it is made
==============  ========================================================================================================
"""

import atexit
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

Step = Callable[[], None]
Stop = Callable[[], None]


class Loop:
    """Debuggers of a hand-written loop: one after the other, a model at a time.

    Args:
        begin: starts a debugger for a model and returns how to step and how to stop it.
    """

    def __init__(self, begin: Callable[[torch.nn.Module], tuple[Step, Stop]]) -> None:
        self._begin = begin
        self._depth = 0
        self._model: torch.nn.Module | None = None
        self._step: Step | None = None
        self._stop: Stop | None = None

    def install(self) -> None:
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._end)

    def _enter(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._depth == 1 and module.training and torch.is_grad_enabled() and has_layers(module):
            self.train(module)

    def train(self, model: torch.nn.Module) -> None:
        """End the debugger of the model before, and begin with this one's; nothing if it has begun."""
        if model is not self._model:
            self._end()
            self._model = model
            self._step, self._stop = self._begin(model)

    def _leave(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1

    def _stepped(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if self._step is not None:
            self._step()

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._step = self._stop = None


def has_layers(model: torch.nn.Module) -> bool:
    return any(
        base.__module__.startswith("transformer_engine") for module in model.modules() for base in type(module).__mro__
    )


def _megatron(config: Path, folder: Path) -> None:
    from megatron.core.pipeline_parallel import schedules

    loop = _sessions(config, folder)
    loop.install()
    chosen = schedules.get_forward_backward_func

    @functools.wraps(chosen)
    def choosing(*arguments: Any, **keywords: Any) -> Any:
        schedule = chosen(*arguments, **keywords)

        @functools.wraps(schedule)
        def running(*, model: torch.nn.Module, **keywords: Any) -> Any:
            loop.train(model)
            return schedule(model=model, **keywords)

        return running

    schedules.get_forward_backward_func = choosing


def _sessions(config: Path, folder: Path, accelerator_of: Mapping[int, Any] | None = None) -> Loop:
    """Sessions in ``folder/0``, ``1``, ...; of a model that Accelerate has prepared, its debugger."""
    from te_precision_callbacks import InspectSession, PrecisionDebugger

    trained = itertools.count()

    def begin(model: torch.nn.Module) -> tuple[Step, Stop]:
        logs = folder / str(next(trained))
        accelerator = (accelerator_of or {}).get(id(model))
        debugger: Any = (
            InspectSession(config, model=model, log_dir=logs)
            if accelerator is None
            else PrecisionDebugger(accelerator, model, config, log_dir=logs)
        )
        debugger.start()
        return debugger.step, debugger.stop

    return Loop(begin)


def _accelerate(config: Path, folder: Path) -> None:
    import accelerate

    prepared: dict[int, Any] = {}
    prepare = accelerate.Accelerator.prepare

    @functools.wraps(prepare)
    def preparing(accelerator: Any, *objects: Any, **keywords: Any) -> Any:
        results = prepare(accelerator, *objects, **keywords)
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, torch.nn.Module):
                prepared[id(result)] = accelerator
        return results

    accelerate.Accelerator.prepare = preparing
    _sessions(config, folder, prepared).install()


def _lightning(config: Path, folder: Path) -> None:
    import lightning.pytorch

    from te_precision_callbacks import PrecisionDebugCallback

    fit = lightning.pytorch.Trainer.fit

    @functools.wraps(fit)
    def fitting(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        trainer.callbacks.append(PrecisionDebugCallback(str(config), log_dir=folder / "0"))
        return fit(trainer, *arguments, **keywords)

    lightning.pytorch.Trainer.fit = fitting


def _transformers(config: Path, folder: Path) -> None:
    import transformers

    from te_precision_callbacks import PrecisionDebugTrainerCallback

    make = transformers.Trainer.__init__

    @functools.wraps(make)
    def making(trainer: Any, *arguments: Any, **keywords: Any) -> None:
        callback = PrecisionDebugTrainerCallback(str(config), log_dir=folder / "0")
        keywords["callbacks"] = [*(keywords.get("callbacks") or []), callback]
        make(trainer, *arguments, **keywords)

    transformers.Trainer.__init__ = making


WATCH: dict[str, Callable[[Path, Path], None]] = {
    "session": lambda config, folder: _sessions(config, folder).install(),
    "megatron": _megatron,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "transformers": _transformers,
}
"""Front door -> what attaches the debugger to all trainings of the process, given a config and a folder for logs."""
