"""Records the plan of a forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.precision_audit import (
    LayerGemm,
    PrecisionAudit,
    backward_override,
    formats_of_fused_path,
    gemms_left_out,
    of_fprop,
)
from te_precision_callbacks.engine.quantization import QuantizationError
from te_precision_callbacks.instrumentation.delayed_scaling import DelayedScalingLayers
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.watched import WatchedModules


class ForwardNotes:
    def __init__(self, watched: WatchedModules, audit: PrecisionAudit, failures: ObservationFailures) -> None:
        self.delayed_scaling = DelayedScalingLayers()
        self._watched = watched
        self._audit = audit
        self._failures = failures

    def note_plan(
        self, module: Any, quantizers: Iterable[Any], idle: bool, *, fprop_only: bool, input_needs_gradient: bool
    ) -> None:
        try:
            self._watched.resting.note_training(module, idle=idle)
            layers, left_out = self._watched.layers[id(module)], dict[LayerGemm, str]()
            if not fprop_only:
                left_out = gemms_left_out(module, layers, input_needs_gradient=input_needs_gradient)
                self._audit.leave_out(left_out)
            gemms = [LayerGemm(layer, gemm) for layer in layers for gemm in (GEMMS[:1] if fprop_only else GEMMS)]
            self._audit.expect(gemm for gemm in gemms if gemm not in left_out)
            if idle:
                formats = formats_of_fused_path(module, layers, fp8=module.fp8)
                formats = of_fprop(formats) if fprop_only else formats
                self._audit.expect_unseen(
                    {
                        operand: made
                        for operand, made in formats.items()
                        if LayerGemm(operand.layer, operand.gemm) not in left_out
                    }
                )
                return
        except Exception as error:
            self._failures.report("reading the precision of", str(module.name), error)
        without_effect = [quantizer for quantizer in quantizers if quantizer.is_left_out()]
        if without_effect:
            self._report_left_out(module, without_effect)

    def check_scales(self, module: Any, iteration: int) -> None:
        try:
            self.delayed_scaling.look(module, iteration)
        except Exception as error:
            self._failures.report("reading the scales of", str(module.name), error)

    def report_quantized_input(self, module: Any) -> None:
        self._failures.report(
            "What features do with activation",
            f"of {module.name}",
            QuantizationError(
                "its input is already quantized, by a layer with fp8_output or by FP8 attention, so Transformer"
                " Engine does not quantize it, and calls no feature for it"
            ),
        )

    def _report_left_out(self, module: Any, quantizers: Sequence[Any]) -> None:
        tensors = ", ".join(dict.fromkeys(quantizer.tensor_name for quantizer in quantizers))
        override = backward_override(module)
        self._failures.report(
            f"What features do with {tensors}",
            f"of {module.name}",
            QuantizationError(
                f"the recipe has backward_override={override!r}, with which Transformer Engine runs the backward in"
                " high precision and outside its debug path, where no feature is called"
            ),
        )
