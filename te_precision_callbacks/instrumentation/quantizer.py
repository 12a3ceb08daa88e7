"""A subclass of TE's DebugQuantizer that keeps the kind of its forward.

Each forward in debug mode builds a quantizer per tensor. Read from Transformer Engine 2.20.2,
``debug/pytorch/debug_quantization.py``. Import this module only after Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import nvdlfw_inspect.api as debug_api
import torch

from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.instrumentation.current_call import CurrentForward
from te_precision_callbacks.layers.forwards import ForwardKind, outside_of_dynamo
from te_precision_callbacks.te.debug import debug_quantization
from te_precision_callbacks.te.quantizers import Float8Quantizer
from te_precision_callbacks.te.state import backward_override
from te_precision_callbacks.te.tensors import is_quantized

OVERRIDDEN = (
    "_call_inspect_tensor_api",
    "_update_parent_quantizer_usage",
    "get_enabled_look_at_tensors",
    "get_plans_for_output_tensors",
    "get_tensors_plan",
    "log_messages_about_plans",
    "process_enabled_api_call",
    "process_gemm_output",
    "quantize",
    "update_quantized",
)

_FORWARD_TENSORS = frozenset({"activation", "weight", "output"})


class SessionQuantizer(debug_quantization.DebugQuantizer):  # type: ignore[misc]
    """Observes a tensor if its forward is observed; failures of observation do not reach training."""

    _current: ClassVar[CurrentForward]
    _failures: ClassVar[ObservationFailures]

    @outside_of_dynamo
    def __init__(self, layer_name: str, tensor_name: str, *arguments: Any, **keywords: Any) -> None:
        self.kind = self._current.kind
        self._module = self._current.module
        self._override = backward_override(self._module)
        self._high_precision = self._module.activation_dtype
        self._graph_task = torch._C._current_graph_task_id()
        self._shown_first: SessionQuantizer | None = None
        self._own_wgrad: torch.Tensor | None = None
        self._accumulates = False
        super().__init__(layer_name, tensor_name, *arguments, **keywords)
        if tensor_name == "dgrad":
            self._pair_dgrads_of_mlp()

    # ------------------------------------------------------------------ queries of features

    def get_enabled_look_at_tensors(self) -> tuple[bool, bool, bool]:
        if self.kind is ForwardKind.EVALUATION:
            return False, False, False
        try:
            return super().get_enabled_look_at_tensors()  # type: ignore[no-any-return]
        except Exception as error:
            self._query_again_after(error)
            return False, False, False

    def _query_again_after(self, error: Exception) -> None:
        self._failures.report("finding what to observe of", f"{self.layer_name} {self.tensor_name}", error)
        self.process_enabled_api_call((False, self.iteration + 1))

    def get_tensors_plan(self) -> tuple[str, str]:
        plans: tuple[str, str] = super().get_tensors_plan()
        if self.parent_quantizer is None:
            # Upstream queries whether to quantize only if there is a quantizer. Here the answer affects only the next
            # iteration of a query: autocast may be enabled by then.
            for gemm in (self.rowwise_gemm_name, self.columnwise_gemm_name):
                self.process_enabled_api_call(
                    debug_api.transformer_engine.fp8_gemm_enabled(
                        layer_name=self.layer_name, gemm=gemm, iteration=self.iteration
                    )
                )
        return plans

    def get_plans_for_output_tensors(self) -> tuple[bool, str]:
        if self.kind is not ForwardKind.EVALUATION:
            try:
                return super().get_plans_for_output_tensors()  # type: ignore[no-any-return]
            except Exception as error:
                self._query_again_after(error)
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

    def _update_parent_quantizer_usage(self) -> None:
        super()._update_parent_quantizer_usage()
        parent = self.parent_quantizer
        planned = debug_quantization.STANDARD_QUANTIZE in (self.rowwise_tensor_plan, self.columnwise_tensor_plan)
        if planned and parent is not None and not parent.rowwise_usage and not parent.columnwise_usage:
            # Without gradients, a feature creates only the rowwise tensor. Upstream then requests an empty quantized
            # tensor, which the compiled extension refuses.
            parent.set_usage(rowwise=True)

    def log_messages_about_plans(self) -> None:
        """Log plans as upstream does, only in observed forwards, and again after a change."""
        if self.kind is not ForwardKind.OBSERVED:
            return
        for gemm, plan in (
            (self.rowwise_gemm_name, self.rowwise_tensor_plan),
            (self.columnwise_gemm_name, self.columnwise_tensor_plan),
        ):
            if self._override is not None and gemm != "fprop":
                plan = debug_quantization.HIGH_PRECISION
            debug_api.log_message(
                f"Tensor: {self.tensor_name}, gemm {gemm} - {plan}",
                layer_name=self.layer_name,
                extra_cachable_args=(gemm, self.tensor_name, plan),
            )

    def is_left_out(self) -> bool:
        """Return whether a feature would act in a backward where TE calls no features."""
        if self._override is None:
            return False
        modifies = debug_quantization.API_CALL_MODIFY
        if self.output_tensor:
            in_backward = self.tensor_name in ("dgrad", "wgrad")
            return in_backward and bool(self.inspect_tensor_enabled or self.rowwise_tensor_plan == modifies)
        if self.tensor_name == "gradient" and (self.inspect_tensor_enabled or self.rowwise_tensor_plan == modifies):
            return True
        return bool(self.columnwise_tensor_plan == modifies)

    # ------------------------------------------------------------------ tensors

    def _pair_dgrads_of_mlp(self) -> None:
        """Work around LayerNormMLP 2.20.2, which passes fc2's dgrad, computed first, to the quantizer of fc1.

        LayerNormMLP builds both quantizers in one forward, so both have the same module.
        """
        dgrad_quantizer: SessionQuantizer | None = self._current.dgrad
        pairs = (
            dgrad_quantizer is not None
            and dgrad_quantizer._module is self._current.module
            and dgrad_quantizer.layer_name.endswith(".fc1")
        )
        if dgrad_quantizer is not None and pairs and self.layer_name.endswith(".fc2"):
            dgrad_quantizer._shown_first = self
            self._current.dgrad = None
        else:
            self._current.dgrad = self

    @outside_of_dynamo
    def quantize(self, tensor: Any, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        if out is None:
            self._feed_amax(tensor)
        result = super().quantize(tensor, out=out, dtype=dtype)
        if out is None and dtype is None:
            # Under torch's autocast the input may differ in dtype from the other operand. Upstream casts it only on its
            # ordinary path.
            rowwise = result.rowwise_gemm_tensor
            columnwise = result.columnwise_gemm_tensor
            result.rowwise_gemm_tensor = self._as_operand(rowwise)
            same = columnwise is rowwise
            result.columnwise_gemm_tensor = result.rowwise_gemm_tensor if same else self._as_operand(columnwise)
        return result

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        self._feed_amax(src)
        return super().update_quantized(src, dst, noop_flag=noop_flag)

    def _feed_amax(self, tensor: Any) -> None:
        """Update the amax history for a tensor that features keep from the recipe's quantizer.

        Delayed scaling derives the scale from it, which must fit when features no longer act.
        """
        plans = self.rowwise_tensor_plan, self.columnwise_tensor_plan
        parent = self.parent_quantizer
        if debug_quantization.STANDARD_QUANTIZE in plans or not isinstance(parent, Float8Quantizer):
            return
        if tensor.numel() and not is_quantized(tensor):
            usage = {"rowwise": parent.rowwise_usage, "columnwise": parent.columnwise_usage}
            parent.set_usage(rowwise=True, columnwise=False)
            parent(tensor)  # as in a step without features
            parent.set_usage(**usage)  # GroupedLinear does not set it again for gradients

    def _as_operand(self, tensor: Any) -> Any:
        if type(tensor) in PLAIN and self._high_precision is not None:
            return tensor.to(self._high_precision)
        return tensor

    def _call_inspect_tensor_api(self, tensor: Any, rowwise: Any = None, columnwise: Any = None) -> None:
        if self.kind is not ForwardKind.OBSERVED:
            return
        if self.tensor_name in _FORWARD_TENSORS and torch._C._current_graph_task_id() != self._graph_task:
            return  # LayerNormMLP(checkpoint=True) reruns its forward inside its backward
        try:
            super()._call_inspect_tensor_api(tensor, rowwise, columnwise)
        except Exception as error:
            self._failures.report("observing", f"{self.layer_name} {self.tensor_name}", error)

    @outside_of_dynamo
    def process_gemm_output(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = self._shown_first
        self._shown_first = None
        if owner is not None:
            return owner.process_gemm_output(tensor)
        if not self._accumulates:
            return super().process_gemm_output(tensor)  # type: ignore[no-any-return]
        wgrad_product = self._own_wgrad
        self._own_wgrad = None
        self._accumulates = False
        if wgrad_product is not None:
            self._call_inspect_tensor_api(wgrad_product)
        return tensor

    def take_own_wgrad(self, compute: Callable[[], torch.Tensor]) -> None:
        """If a feature needs it, compute the wgrad that the next GEMM will add to ``main_grad``."""
        self._accumulates = True
        if self.kind is not ForwardKind.OBSERVED:
            return
        if self.rowwise_tensor_plan == debug_quantization.API_CALL_MODIFY:
            error = FeatureError(
                "with fuse_wgrad_accumulation=True Transformer Engine adds wgrad to main_grad before a feature gets it"
            )
            self._failures.report("modifying", f"{self.layer_name} wgrad", error)
        if self.inspect_tensor_enabled:
            try:
                self._own_wgrad = compute()
            except Exception as error:
                self._failures.report("recomputing", f"{self.layer_name} wgrad", error)


def make_quantizer_class(current: CurrentForward, failures: ObservationFailures) -> type[SessionQuantizer]:
    members = {"_current": current, "_failures": failures, "__module__": __name__}
    return cast("type[SessionQuantizer]", type("DebugQuantizer", (SessionQuantizer,), members))
