"""What a forward pass of a Transformer Engine module means for a session, and how the session makes TE act on it.

Whether a forward is observed is decided in that forward, holds for its backward, and is not remembered for other
forwards of the same iteration. Transformer Engine decides it once an iteration and knows neither evaluation nor
recomputation. Two seams are replaced while a session is live, both read from Transformer Engine 2.20.2:

- ``TransformerEngineBaseModule.is_debug_iter`` and ``no_debug_features_active`` (``pytorch/module/base.py``): the first
  thing that each forward asks.
- ``debug_quantization.DebugQuantizer`` (``debug/pytorch/debug_quantization.py``), which each forward in debug mode
  builds anew for each tensor: a subclass, which knows the kind of its forward.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from te_precision_callbacks.forwards import ForwardClassifier, ForwardKind, outside_of_dynamo
from te_precision_callbacks.session.errors import SessionError
from te_precision_callbacks.session.failures import ObservationFailures
from te_precision_callbacks.session.precision import PrecisionAudit
from te_precision_callbacks.session.upstream import reset_schedule

MOST_FORWARDS = 100
"""Training forwards of a module in one debug iteration at which the loop may have forgotten to step."""

FORWARD_TENSORS = frozenset({"activation", "weight", "output"})


class ForwardHooks:
    """Puts the session's decision into Transformer Engine, and takes it out again.

    A module is *armed* in the iterations in which a feature may act on it. In all others, and where it has no feature,
    it *rests*: it runs Transformer Engine's own methods, and nothing of the session is called in its forward and
    backward.

    Args:
        classify: decides the kind of a forward.
        failures: receives what goes wrong in observation.
        audit: receives the precision that each GEMM operand really had.

    Attributes:
        on_many_forwards: called in the :data:`MOST_FORWARDS`-th training forward of a module without a step in between.
        unwatched: the modules that are not watched, and ran a forward with gradients in training.
    """

    def __init__(self, classify: ForwardClassifier, failures: ObservationFailures, audit: PrecisionAudit) -> None:
        self.on_many_forwards: Callable[[torch.nn.Module], None] | None = None
        self.unwatched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._forwards: dict[int, int] = {}
        self._classify = classify
        self._failures = failures
        self._audit = audit
        self._current = threading.local()
        self._own_is_debug_iter: Callable[[Any], bool] = bool
        self._modules: dict[int, torch.nn.Module] = {}
        self._armed: dict[int, torch.nn.Module] = {}
        self._waiting: dict[int, list[torch.nn.Module]] = {}
        self._without_feature: dict[int, torch.nn.Module] = {}
        self._idle_in_evaluation: dict[int, int] = {}
        self._idle_under: dict[int, set[object]] = {}
        self._saved: list[tuple[Any, str, Any]] = []

    def watch(self, modules: dict[int, torch.nn.Module]) -> None:
        """Set the modules (by ``id``) that the session acts on; any other module runs as without a session."""
        self._release()
        self.unwatched.clear()
        self._modules = modules
        self._idle_in_evaluation.clear()
        self._idle_under.clear()
        self.arm()

    def arm(self) -> None:
        """Arm every module: all features are asked again in the next forward."""
        self._waiting.clear()
        self._without_feature.clear()
        for module in self._modules.values():
            reset_schedule(module)
            self._arm(module)

    def begin(self, iteration: int) -> None:
        """Arm the modules on which a feature may act in an iteration, and let the others rest."""
        self.forget_forwards()
        for module in list(self._armed.values()):
            upcoming = module.__dict__["next_iter_when_debug_should_be_run"]
            if upcoming is None:
                self._rest(module)
                self._without_feature[id(module)] = module
            elif upcoming > iteration:
                self._rest(module)
                self._waiting.setdefault(upcoming, []).append(module)
        for module in self._waiting.pop(iteration, ()):
            self._arm(module)
        for key, module in list(self._without_feature.items()):
            if _autocast_of(module) not in self._idle_under.get(key, ()):
                # No feature acts here, but what the audit says of the layer is out of date.
                del self._without_feature[key]
                reset_schedule(module)
                self._arm(module)

    def keep(self) -> None:
        """End observation, and leave the features that change precision, until :meth:`remove`."""
        self._classify.kept = True
        self.arm()

    def forget_forwards(self) -> None:
        """Count the forwards of each module anew."""
        self._forwards.clear()

    def install(self) -> None:
        """Replace the seams.

        Raises:
            SessionError: this Transformer Engine does not have them.
        """
        from transformer_engine.debug.pytorch import debug_quantization
        from transformer_engine.pytorch.module import base

        module_class = base.TransformerEngineBaseModule
        _require(module_class, "is_debug_iter", "no_debug_features_active")
        _require(debug_quantization, "DebugQuantizer", "API_CALL_MODIFY", "HIGH_PRECISION", "STANDARD_QUANTIZE")
        _require(debug_quantization.DebugQuantizer, *_OVERRIDDEN)
        self._own_is_debug_iter = module_class.is_debug_iter
        self._replace(module_class, "is_debug_iter", self._make_is_debug_iter_of_unwatched())
        self._replace(
            module_class,
            "no_debug_features_active",
            self._make_no_debug_features_active(module_class.no_debug_features_active),
        )
        quantizer = _session_quantizer(debug_quantization, self._current, self._failures, self._audit)
        self._replace(debug_quantization, "DebugQuantizer", quantizer)
        for name in ("layernorm_linear", "layernorm_mlp", "linear", "grouped_linear"):
            module = sys.modules.get(f"transformer_engine.pytorch.module.{name}")
            if module is not None and hasattr(module, "DebugQuantizer"):
                self._replace(module, "DebugQuantizer", quantizer)

    def remove(self) -> None:
        """Put Transformer Engine's own back."""
        self._release()
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)
        self._modules = {}
        self.unwatched.clear()
        self._current = threading.local()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _release(self) -> None:
        for module in self._modules.values():
            module.__dict__.pop("is_debug_iter", None)
        self._armed.clear()
        self._waiting.clear()
        self._without_feature.clear()

    def _arm(self, module: torch.nn.Module) -> None:
        self._armed[id(module)] = module
        module.__dict__["is_debug_iter"] = _OfOneModule(self._is_debug_iter, module)

    def _rest(self, module: torch.nn.Module) -> None:
        del self._armed[id(module)]
        module.__dict__["is_debug_iter"] = _OfOneModule(self._own_is_debug_iter, module)

    @outside_of_dynamo
    def _is_debug_iter(self, module: Any) -> bool:
        """What an armed module asks first in each forward."""
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        kind = self._classify(module)
        self._current.kind = kind
        self._current.module = module
        if kind is ForwardKind.UNTOUCHED:
            return False
        if kind is ForwardKind.OBSERVED and self.on_many_forwards is not None:
            count = self._forwards[id(module)] = self._forwards.get(id(module), 0) + 1
            if count == MOST_FORWARDS:
                self.on_many_forwards(module)
        if self._classify.kept:
            return True  # the iteration does not change any more, and what was idle in it may have become otherwise
        if kind is ForwardKind.EVALUATION:
            return self._idle_in_evaluation.get(id(module)) != int(TEDebugState.get_iteration())
        return bool(self._own_is_debug_iter(module))

    def _make_is_debug_iter_of_unwatched(self) -> Callable[[Any], bool]:
        unwatched, classify = self.unwatched, self._classify

        @outside_of_dynamo
        def is_debug_iter(module: Any) -> bool:
            if module.training and torch.is_grad_enabled() and not (classify.paused or classify.kept):
                unwatched.add(module)
            return False

        return is_debug_iter

    def _make_no_debug_features_active(self, upstream: Any) -> Any:
        from transformer_engine.debug.pytorch.debug_state import TEDebugState
        from transformer_engine.debug.pytorch.utils import any_feature_enabled

        def no_debug_features_active(module: Any, quantizers: Any) -> bool:
            if self._current.kind is not ForwardKind.EVALUATION:
                idle = bool(upstream(module, quantizers))
                if module.next_iter_when_debug_should_be_run is None:
                    self._idle_under.setdefault(id(module), set()).add(_autocast_of(module))
                return idle
            # Evaluation must not change the schedule of training: it asks for itself, once an iteration.
            idle = not any_feature_enabled(quantizers)
            if idle:
                self._idle_in_evaluation[id(module)] = TEDebugState.get_iteration()
            return idle

        return no_debug_features_active


class _OfOneModule(functools.partial):  # type: ignore[type-arg]
    """The ``is_debug_iter`` of a watched module, called as fast as a method. A copy of the module is not watched."""

    def __deepcopy__(self, memo: dict[int, Any]) -> functools.partial[bool]:
        return functools.partial(_as_its_class, copy.deepcopy(self.args[0], memo))


def _as_its_class(module: Any) -> bool:
    return bool(type(module).is_debug_iter(module))


def _autocast_of(module: Any) -> object:
    """What a module's last forward ran under: the type of the recipe, False without FP8."""
    return bool(module.fp8) and type(module.fp8_meta.get("recipe"))


_OVERRIDDEN = (
    "_call_inspect_tensor_api",
    "_update_parent_quantizer_usage",
    "get_enabled_look_at_tensors",
    "get_plans_for_output_tensors",
    "get_tensors_plan",
    "process_enabled_api_call",
    "process_gemm_output",
    "quantize",
)


def _require(owner: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise SessionError(
            f"This Transformer Engine has no {', '.join(missing)} in {owner.__name__}, on which the session relies. It"
            " was made for Transformer Engine 2.20: install that, or a te-precision-callbacks for yours."
        )


def _session_quantizer(
    debug_quantization: Any, current: threading.local, failures: ObservationFailures, audit: PrecisionAudit
) -> type:
    """Transformer Engine's DebugQuantizer, with the kind of the forward that it was built in."""

    class DebugQuantizer(debug_quantization.DebugQuantizer):  # type: ignore[misc]
        """Observes if its forward is an observed one; a failure in observation does not reach training."""

        @outside_of_dynamo
        def __init__(self, layer_name: str, tensor_name: str, *args: Any, **keywords: Any) -> None:
            self._kind = current.kind
            self._graph_task = torch._C._current_graph_task_id()
            self._high_precision = current.module.activation_dtype
            self._shown_first: DebugQuantizer | None = None
            self._module = current.module
            super().__init__(layer_name, tensor_name, *args, **keywords)
            if tensor_name == "dgrad":
                self._pair_dgrads_of_mlp()
            if self._kind is not ForwardKind.EVALUATION and not self.output_tensor:
                audit.planned(self, self._high_precision)

        def _pair_dgrads_of_mlp(self) -> None:
            """LayerNormMLP 2.20.2 shows fc2's dgrad, which its backward computes first, as that of fc1.

            It builds both quantizers in one forward, so that they have the same module.
            """
            before: DebugQuantizer | None = getattr(current, "dgrad", None)
            pairs = before is not None and before._module is current.module and before.layer_name.endswith(".fc1")
            if before is not None and pairs and self.layer_name.endswith(".fc2"):
                before._shown_first = self
                current.dgrad = None
            else:
                current.dgrad = self

        @outside_of_dynamo
        def process_gemm_output(self, tensor: torch.Tensor) -> torch.Tensor:
            owner, self._shown_first = self._shown_first, None
            shown = super() if owner is None else owner
            return shown.process_gemm_output(tensor)  # type: ignore[union-attr]

        def get_enabled_look_at_tensors(self) -> tuple[bool, bool, bool]:
            if self._kind is ForwardKind.EVALUATION:
                return False, False, False
            try:
                return super().get_enabled_look_at_tensors()  # type: ignore[no-any-return]
            except Exception as error:
                failures.report("asking what to observe of", f"{self.layer_name} {self.tensor_name}", error)
                self.process_enabled_api_call((False, self.iteration + 1))  # ask again: it may be well by then
                return False, False, False

        def get_tensors_plan(self) -> tuple[str, str]:
            plans: tuple[str, str] = super().get_tensors_plan()
            if self.parent_quantizer is None:
                # Upstream asks whether to quantize only where there is a quantizer. The answer is without effect here,
                # but not when it is to be asked again: autocast may be switched on in the next iteration.
                import nvdlfw_inspect.api as debug_api

                for gemm in (self.rowwise_gemm_name, self.columnwise_gemm_name):
                    self.process_enabled_api_call(
                        debug_api.transformer_engine.fp8_gemm_enabled(
                            layer_name=self.layer_name, gemm=gemm, iteration=self.iteration
                        )
                    )
            return plans

        def get_plans_for_output_tensors(self) -> tuple[bool, str]:
            if self._kind is not ForwardKind.EVALUATION:
                try:
                    return super().get_plans_for_output_tensors()  # type: ignore[no-any-return]
                except Exception as error:
                    failures.report("asking what to observe of", f"{self.layer_name} {self.tensor_name}", error)
                    self.process_enabled_api_call((False, self.iteration + 1))
            import nvdlfw_inspect.api as debug_api

            modified = self.process_enabled_api_call(
                debug_api.transformer_engine.modify_tensor_enabled(
                    layer_name=self.layer_name,
                    gemm=self.rowwise_gemm_name,
                    tensor_name=self.tensor_name,
                    iteration=self.iteration,
                )
            )
            plan = debug_quantization.API_CALL_MODIFY if modified else debug_quantization.HIGH_PRECISION
            return False, plan

        @outside_of_dynamo
        def quantize(self, tensor: Any, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
            result = super().quantize(tensor, out=out, dtype=dtype)
            if out is None and dtype is None:
                # Under torch's autocast the input may have another type than the GEMM's other operand. Upstream casts
                # it on its own path, and forgets to here.
                rowwise, columnwise = result.rowwise_gemm_tensor, result.columnwise_gemm_tensor
                result.rowwise_gemm_tensor = self._as_operand(rowwise)
                same = columnwise is rowwise
                result.columnwise_gemm_tensor = result.rowwise_gemm_tensor if same else self._as_operand(columnwise)
            return result

        def _as_operand(self, tensor: Any) -> Any:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            return tensor.to(self._high_precision) if plain and self._high_precision is not None else tensor

        def _update_parent_quantizer_usage(self) -> None:
            super()._update_parent_quantizer_usage()
            parent = self.parent_quantizer
            planned = debug_quantization.STANDARD_QUANTIZE in (self.rowwise_tensor_plan, self.columnwise_tensor_plan)
            if planned and parent is not None and not parent.rowwise_usage and not parent.columnwise_usage:
                # Without gradients the columnwise tensor is not needed, and a feature makes the rowwise one: upstream
                # then asks for a quantized tensor that holds nothing, which is an error in the compiled extension too.
                parent.set_usage(rowwise=True)

        def _call_inspect_tensor_api(self, tensor: Any, rowwise: Any = None, columnwise: Any = None) -> None:
            if self._kind is not ForwardKind.OBSERVED:
                return
            if self.tensor_name in FORWARD_TENSORS and torch._C._current_graph_task_id() != self._graph_task:
                return  # LayerNormMLP(checkpoint=True) runs its forward again inside its own backward
            if not self.output_tensor:
                audit.ran(self, rowwise, columnwise, self._high_precision)
            try:
                super()._call_inspect_tensor_api(tensor, rowwise, columnwise)
            except Exception as error:
                failures.report("observing", f"{self.layer_name} {self.tensor_name}", error)

    return DebugQuantizer
