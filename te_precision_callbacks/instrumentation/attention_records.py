"""Records the calls of attention that DumpTensors has chosen: a listener of the tap.

Of fused attention the forward and the backward are recorded, of unfused attention the forward, whose backward is that
of torch's operators.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.numerics.formats import FloatFormat
from te_precision_callbacks.base.numerics.layouts import LayoutError
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.config.dumping import collected
from te_precision_callbacks.config.levels import FeatureSchema
from te_precision_callbacks.config.schemas import DumpTensors
from te_precision_callbacks.coverage.gemm_events import UNFUSED, AttentionEvent
from te_precision_callbacks.dumps.contents import Dump, attention_record_of
from te_precision_callbacks.dumps.header import Attention, Operand, Rounded, dtype_name
from te_precision_callbacks.dumps.wanted import Wanted
from te_precision_callbacks.gemm_error.attention_operands import HeadTensor
from te_precision_callbacks.gemm_error.codes import Rules
from te_precision_callbacks.gemm_error.factors import FactorError
from te_precision_callbacks.instrumentation.attention_errors import call_of, forms_of, why_not
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.watched import Watched

logger = logging.getLogger(__name__)

_FORWARD, _BACKWARD = "fprop", "dgrad"


class _Chosen(NamedTuple):
    """What is recorded of attention: by the GEMM whose keys hold, and the features that conditions read."""

    wanted: Mapping[str, Wanted]
    features: Sequence[FeatureSchema]


class AttentionRecords:
    """See the module's description.

    Args:
        report: receives failures.
    """

    def __init__(self, report: Callable[[str, str, Exception], None]) -> None:
        self._report = report
        self._notices = Notices()
        self._names: dict[int, str] = {}
        self._chosen: dict[str, _Chosen] = {}
        self._noted: set[str] = set()

    def watch(self, modules: Mapping[int, tuple[str, Sequence[FeatureSchema]]]) -> None:
        """Set the modules of attention: id -> name, and the features that look at it."""
        self._names, self._chosen = {}, {}
        for key, (layer, features) in modules.items():
            for dumps in (feature for feature in features if isinstance(feature, DumpTensors)):
                wanted = {gemm: Wanted.of_gemm(item, dumps) for gemm, item in dumps.of_attention.items()}
                self._names[key], self._chosen[layer] = layer, _Chosen(wanted, features)

    def due(self, iteration: int) -> dict[int, str]:
        """The modules that are recorded in an iteration: id -> name."""
        return {
            key: layer
            for key, layer in self._names.items()
            if any(wanted.schedule.at(iteration)[0] for wanted in self._chosen[layer].wanted.values())
        }

    def _wanted(self, layer: str, gemm: str, kind: ForwardKind) -> tuple[Wanted, int] | None:
        """The options of a call that is recorded, and the iteration."""
        wanted = self._chosen[layer].wanted.get(gemm) if layer in self._chosen else None
        if wanted is None or kind is not ForwardKind.OBSERVED:
            return None
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        iteration = int(TEDebugState.get_iteration())
        return (wanted, iteration) if wanted.schedule.at(iteration)[0] else None

    # ------------------------------------------------------------------ what runs

    def enter_attention(self, layer: str, kind: ForwardKind) -> None:
        """A forward begins."""
        self._noted.discard(layer)

    def note_attention(self, event: AttentionEvent) -> None:
        """Record attention that has run."""
        if not event.backward:
            self._noted.add(event.layer)
        due = self._wanted(event.layer, _BACKWARD if event.backward else _FORWARD, event.kind)
        if due is None or not all(event.sizes):
            return
        try:
            self._record(event, *due)
        except ObservationError:
            raise
        except (FactorError, LayoutError) as error:
            self._say(event.layer, str(error))
        except Exception as error:
            self._report("recording the attention of", event.layer, error)

    def note_unfused(self, layer: str, kind: ForwardKind, event: Callable[[], AttentionEvent]) -> None:
        """Record unfused attention that has run, if it is due."""
        if self._wanted(layer, _FORWARD, kind) is not None:
            self.note_attention(event())

    def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None:
        """A forward ends, which another kernel may have run."""
        if layer not in self._noted and self._wanted(layer, _FORWARD, kind) is not None:
            self._say(layer, "its kernel is neither fused attention on one rank nor unfused attention")

    def _say(self, layer: str, reason: str) -> None:
        if self._notices.first(reason):
            logger.warning(
                "DumpTensors: the attention %s is not written: %s. Further attention with this reason is not named.",
                layer,
                reason,
            )

    def _record(self, event: AttentionEvent, wanted: Wanted, iteration: int) -> None:
        import nvdlfw_inspect.api as debug_api

        results = event.gradients if event.backward else (event.output,)
        watched = None
        if wanted.conditions and not is_capturing():  # the extremes have an inf or nan if a result has
            with torch.no_grad():
                found = [each.dequantize() if hasattr(each, "dequantize") else each for each in results]
                watched = torch.stack([extreme.float() for each in found for extreme in torch.aminmax(each.detach())])
        record = functools.partial(self._described, event, iteration)
        schemas = self._chosen[event.layer].features
        statistics = functools.partial(collected, schemas, "output")
        recorder = debug_api.transformer_engine.observation.recorder
        recorder.note(Watched(event.layer, "output", iteration, watched), wanted, statistics, record)

    def _described(self, event: AttentionEvent, iteration: int, micro_batch: int) -> Dump:
        given, absent = event.arguments, dict[str, str]()
        tensors = _tensors(event)
        results = [name for name in tensors if name not in _OPERANDS[event.backward]]
        call = call_of(event, tensors[results[0]])
        memory: dict[str, tuple[Any, torch.Tensor | None]] = {}
        for name, tensor in tensors.items():
            high = None if name in results else event.high.get(name)
            if tensor.part is not None and name not in results and high is None:
                absent[f"{name}.high_precision"] = "it was quantized before the kernel of attention was called"
            before: Any = None if high is None else HeadTensor(high, str(given["o_format"])).memory
            memory[name] = tensor.memory, before
        others: dict[str, Any] = {"bias": call.bias, "softmax_stats": next(iter(event.auxiliary), None)}
        for name, bounds in (("q", call.queries), ("kv", call.keys)):
            if bounds is not None:
                others |= {f"lengths_{name}": bounds.lengths, f"places_{name}": bounds.places}
        if others["softmax_stats"] is None:
            absent["softmax_stats"] = "the forward keeps none"
        if given["dropout"]:
            absent["dropout_mask"] = "the kernel draws it, and hands it to nobody"
        if event.kernel == UNFUSED:
            absent["backward"] = "torch's operators run it"
        scales: dict[str, torch.Tensor] = {}
        inner = {"probabilities": (event.probabilities, "query"), "scores": (event.scores, "gradient")}
        rounded: dict[str, Rounded] = {}
        for name, (quantizer, like) in inner.items() if event.backward else list(inner.items())[:1]:
            scale = getattr(quantizer, "scale", None)
            if scale is not None:
                scales[f"{name}.scale"] = scale
            rounded[name] = Rounded(_name(tensors[like].numbers), None if scale is None else f"{name}.scale")
        described = {
            # Q, K and V of per-tensor FP8 have one scale, which does not follow from one of them.
            name: Operand(name, each.part is not None and each.part.columnwise, rounding=Rules(scales_follow=False))
            for name, each in tensors.items()
        }
        device = tensors["query"].device
        on_gpu = device.type == "cuda"
        attention = Attention(
            gemm=_BACKWARD if event.backward else _FORWARD,
            order=event.order,
            kernel=event.kernel,
            layout=str(given["qkv_layout"]),
            operands={name: described[name] for name in tensors if name not in results},
            results={name: described[name] for name in results},
            others={},
            scale=call.scale,
            sequences=call.sequences,
            longest=call.longest,
            mask=str(given["attn_mask_type"]),
            left=call.mask.left,
            right=call.mask.right,
            at_the_end=call.mask.at_the_end,
            probabilities=rounded["probabilities"],
            scores=rounded.get("scores"),
            bias=str(given["attn_bias_type"]),
            softmax=str(given["softmax_type"]),
            dropout=float(given["dropout"]),
            why_not=why_not(event),
            absent=absent,
            device=torch.cuda.get_device_name(device) if on_gpu else device.type,
            capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        )
        return attention_record_of(
            attention,
            memory,
            {name: tensor for name, tensor in others.items() if tensor is not None},
            scales,
            layer=event.layer,
            iteration=iteration,
            micro_batch=micro_batch,
            rank=own_rank(),
            recipe=event.recipe,
        )


_OPERANDS = {False: ("query", "key", "value"), True: ("query", "key", "value", "output", "gradient")}
"""Whether it is the backward -> what the kernel has read."""


def _tensors(event: AttentionEvent) -> dict[str, HeadTensor]:
    """What the kernel has read and what it gave, by name."""
    given = event.arguments
    operands = zip(_OPERANDS[False], (event.query, event.key, event.value), forms_of(given["qkv_layout"]), strict=True)
    found = {name: HeadTensor(each, form, along_tokens=name == "value") for name, each, form in operands}
    if not event.backward:
        return {**found, "output": HeadTensor(event.output, str(given["o_format"]))}
    found["output"] = HeadTensor(given["o"], str(given["o_format"]))
    found["gradient"] = HeadTensor(event.gradient, str(given["do_format"]))
    gradients = zip(_OPERANDS[False], event.gradients, forms_of(given["dqkv_layout"]), strict=True)
    return found | {f"{name}_gradient": HeadTensor(each, form) for name, each, form in gradients}


def _name(numbers: FloatFormat | torch.dtype) -> str:
    return numbers.name if isinstance(numbers, FloatFormat) else dtype_name(numbers)
