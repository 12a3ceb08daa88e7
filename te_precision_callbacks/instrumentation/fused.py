"""Observation of layers on Transformer Engine's own fused path.

Transformer Engine calls features on its debug path only, which is unfused and rounds some tensors otherwise. With
``observe="fused"`` or ``"auto"`` a layer takes its own path, and the features that only look at tensors get what the
layer's GEMMs are handed (``tap.py``): the quantized operands, and the high-precision tensors that the path has anyway.
Training is the same to the last bit.

Some high-precision tensors never exist there: a norm or an activation function writes its result in the format of the
GEMM. :data:`HIGH_PRECISION_ON_FUSED_PATH` is the list of those that do exist. Read from Transformer Engine 2.20.2
(``pytorch/module``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import is_quantized
from te_precision_callbacks.base.vocabulary import RESULT, TENSORS, Observe, class_names
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.keys import Dumped, LoggedTensor
from te_precision_callbacks.config.levels import ObservingFeature
from te_precision_callbacks.config.planning import LayerPlan, Plan
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.coverage.gemm_events import GemmEvent
from te_precision_callbacks.engine.quantization import QuantizationError
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.table import OF_SCALES

_ALL = frozenset(TENSORS)
HIGH_PRECISION_ON_FUSED_PATH: Mapping[str, tuple[frozenset[str], ...]] = {
    "Linear": (_ALL,),
    "GroupedLinear": (_ALL,),
    "LayerNormLinear": (_ALL - {"activation"},),
    "LayerNormMLP": (
        frozenset({"weight", "wgrad", "dgrad"}),
        frozenset({"weight", "gradient", "output", "wgrad"}),
    ),
}
"""Class of a module -> for each of its layers the tensors that its fused path has in high precision.

LayerNormMLP may fuse the activation function, and its derivative, into the GEMMs of both layers.
"""

_OVERLAPPING = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")


class NotFused(NamedTuple):
    """Why a module cannot be observed on its fused path.

    Attributes:
        reason: the reason.
        layer: the layer that it is about; empty if it is about the whole module.
    """

    reason: str
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}" if self.layer else self.reason


def why_not_fused(named: NamedModule, planned: Mapping[str, LayerPlan]) -> NotFused | None:
    """Why a module cannot be observed on its fused path by the features of its layers; None if it can.

    Args:
        named: the module.
        planned: layer -> its features, for the layers that have any.
    """
    module: Any = named.module
    if getattr(module, "sequence_parallel", False) and getattr(module, "tp_size", 1) > 1:
        return NotFused("with sequence parallelism its GEMMs get gathered tensors, and not those of this rank")
    if any(value for name, value in vars(module).items() if name.startswith(_OVERLAPPING)):
        return NotFused("communication overlaps with its GEMMs")
    grouped = ("use_grouped_tensor", "single_grouped_weight", "single_grouped_bias")
    if any(getattr(module, name, False) for name in grouped):
        return NotFused("its experts' tensors are one grouped tensor")
    parts = _parts(module)
    if parts is None:
        return NotFused(f"nothing is known of the path of a {type(module).__name__}")
    for number, layer in enumerate(named.layers):
        entry = planned.get(layer.name)
        if entry is None:
            continue
        has = parts[min(number, len(parts) - 1)]
        for name, options in entry.features.get(NAMESPACE, {}).items():
            if options.get("enabled", False):
                reason = _why_not(name, options, has, module)
                if reason:
                    return NotFused(reason, layer.name)
    return None


def _parts(module: Any) -> tuple[frozenset[str], ...] | None:
    return next((parts for name in class_names(module) if (parts := HIGH_PRECISION_ON_FUSED_PATH.get(name))), None)


def _why_not(name: str, options: Any, has: frozenset[str], module: Any) -> str:
    schema = options.schema if isinstance(options, ReadOptions) else None
    if schema is None:
        return f"Transformer Engine calls {name}, a feature of your own, on its debug path only"
    if not isinstance(schema, ObservingFeature):
        return f"{name} changes precision, which Transformer Engine does on its debug path only"
    for target in schema.targets:
        tensor, item = str(target.tensor), target.options
        if tensor == "wgrad" and getattr(module, "fuse_wgrad_accumulation", False):
            return f"{name}: with fuse_wgrad_accumulation=True its wgrad exists in a sum only"
        if tensor in has:
            continue
        if isinstance(item, Dumped) and item.high_precision_tensor:
            return f"{name}: {_never(tensor, module)}"
        if isinstance(item, LoggedTensor):
            needing = [request.label for request in item.requests if _needs_high_precision(request)]
            if needing:
                return f"{name}: {_never(tensor, module)}, which {needing[0]!r} needs"
    return ""


def _never(tensor: str, module: Any) -> str:
    return f"the fused path of {type(module).__name__} never has its {tensor} in high precision"


def _needs_high_precision(request: Request) -> bool:
    return request.recipe != OWN_RECIPE or request.statistic.of not in OF_SCALES


def choose(observe: Observe, modules: Sequence[NamedModule], plan: Plan) -> tuple[frozenset[int], dict[str, NotFused]]:
    """The ids of the modules that are observed on their fused path, and of the others with features: name -> why not.

    Raises:
        ConfigError: with ``"fused"``, if a module with features cannot be observed so.
    """
    if observe == "debug":
        return frozenset(), {}
    planned = {entry.layer.name: entry for entry in plan.layers}
    watched = [named for named in modules if any(layer.name in planned for layer in named.layers)]
    why = [(named, why_not_fused(named, planned)) for named in watched]
    refused = {named.name: reason for named, reason in why if reason is not None}
    if observe == "fused" and refused:
        name, reason = next(iter(refused.items()))
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise ConfigError(
            f'observe="fused": {name}{more} cannot be observed on its fused path. {reason}. observe="auto" takes'
            " Transformer Engine's debug path for such layers."
        )
    return frozenset(id(named.module) for named, reason in why if reason is None), refused


def paths_in_words(fused: int, not_fused: Mapping[str, NotFused]) -> str:
    """How many modules are observed on their own path, and why the others are not, each reason once.

    Args:
        fused: how many are.
        not_fused: the others, by name.
    """
    text = f"{fused} of {fused + len(not_fused)} modules with features are observed on their own fused path."
    if not not_fused:
        return text
    of_reason: dict[str, list[str]] = {}
    for name, why in not_fused.items():
        of_reason.setdefault(why.reason, []).append(name)
    reasons = (
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in of_reason.items()
    )
    return f"{text} The others take Transformer Engine's debug path: {'; '.join(reasons)}"


class _Due(NamedTuple):
    """What is looked at in an iteration; layers with the same options share it.

    Attributes:
        observers: tensor -> the features that look at it.
        upcoming: the next iteration in which one of the features is to be asked again; None: never.
    """

    observers: Mapping[str, tuple[Any, ...]]
    upcoming: int | None


_Observers = tuple[tuple[str, tuple[Any, ...]], ...]
"""The tensors of a layer that features may look at, each with these features."""


class FusedObservation:
    """A listener of the tap that calls the features of layers on their fused path.

    Which features a layer has is found once, and what they look at is asked once an iteration for all layers with the
    same options: the features that only look answer for every layer alike.

    Args:
        report: receives failures.
    """

    def __init__(self, report: Callable[[str, str, Exception], None]) -> None:
        self._report = report
        self._api: Any = None
        self._iteration = -1
        self._modules: dict[str, Any] = {}
        self._observers: dict[str, _Observers] = {}
        self._shared: dict[tuple[object, ...], _Observers] = {}
        self._answers: dict[int, _Due] = {}
        self._due: dict[str, tuple[int, _Due]] = {}

    def watch(self, modules: Sequence[NamedModule]) -> None:
        """Set the modules, of which some are observed on their fused path."""
        self._modules = {layer.name: named.module for named in modules for layer in named.layers}
        for found in (self._observers, self._shared, self._answers, self._due):
            found.clear()

    def ask(self, layers: Sequence[str], iteration: int) -> int | None:
        """Ask the features of a module's layers what they look at in an iteration.

        Returns:
            The next iteration in which one of them is to be asked again; None: never.
        """
        import nvdlfw_inspect.api as debug_api

        self._api = debug_api.transformer_engine
        if iteration != self._iteration:
            self._iteration = iteration
            self._answers.clear()
        upcoming: list[int] = []
        for layer in layers:
            found = self._answer(layer, iteration)
            self._due[layer] = iteration, found
            upcoming += [] if found.upcoming is None else [found.upcoming]
        return min(upcoming, default=None)

    def _answer(self, layer: str, iteration: int) -> _Due:
        observers = self._observers.get(layer)
        if observers is None:
            try:
                found = tuple((tensor, self._api.observers(layer, tensor)) for tensor in TENSORS)
            except Exception as error:
                self._report("finding what to observe of", layer, error)
                return _Due({}, None)
            key = tuple((tensor, *(observer.key for observer in of_tensor)) for tensor, of_tensor in found)
            observers = self._observers[layer] = self._shared.setdefault(key, found)
        answer = self._answers.get(id(observers))
        if answer is None:
            answer = self._answers[id(observers)] = self._asked(observers, layer, iteration)
        return answer

    def _asked(self, observers: _Observers, layer: str, iteration: int) -> _Due:
        looking: dict[str, tuple[Any, ...]] = {}
        upcoming: list[int] = []
        for tensor, of_tensor in observers:
            wanted: list[Any] = []
            for observer in of_tensor:
                try:
                    is_wanted, again = self._api.asked(observer, layer, tensor, iteration)
                except Exception as error:
                    self._report("asking what to observe of", f"{layer} {tensor}", error)
                    is_wanted, again = False, iteration + 1
                wanted += [observer] if is_wanted else []
                upcoming += [] if again is None else [again]
            if wanted:
                looking[tensor] = tuple(wanted)
        return _Due(looking, min(upcoming, default=None))

    def wants(self, layers: Sequence[str]) -> bool:
        """Whether anything is looked at in the iteration that was asked for last."""
        return any(self._due[layer][1].observers for layer in layers if layer in self._due)

    def looks_at_activation(self, layers: Sequence[str]) -> bool:
        """Whether the first layer's activation is looked at in the iteration that was asked for last."""
        return "activation" in self._due[layers[0]][1].observers

    def __call__(self, event: GemmEvent) -> None:
        """Call the features that look at a tensor of a GEMM."""
        asked = self._due.get(event.layer)
        if asked is None or not asked[1].observers or event.kind is not ForwardKind.OBSERVED:
            return
        iteration, (observers, _) = asked
        for tensor, given in _tensors(event, observers):
            try:
                if tensor == RESULT[event.gemm] and is_quantized(event.out):
                    raise QuantizationError(
                        "its GEMM writes it quantized (fp8_output, fp8_grad or FP8 attention), so it never exists in"
                        " high precision"
                    )
                module = self._modules[event.layer]
                arguments = {
                    "tensor_name": tensor,
                    "iteration": iteration,
                    "tp_group": getattr(module, "tp_group", None),
                    "tp_size": getattr(module, "tp_size", 1),
                    **given,
                }
                self._api.show(observers[tensor], event.layer, tensor, arguments)
            except Exception as error:
                self._report("observing", f"{event.layer} {tensor}", error)
        try:
            self._api.measure()
        except Exception as error:
            self._report("observing", f"{event.layer} {event.gemm}", error)


def _tensors(event: GemmEvent, due: Container[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tensors of a GEMM that are looked at: each operand in the first GEMM that reads it, and the result."""
    for operand in event.operands:
        if operand.first and operand.tensor in due:
            yield operand.tensor, _arguments(operand.high, operand.given)
    result = RESULT[event.gemm]
    if result in due and event.out is not None:
        yield result, _arguments(event.out, None)


def _arguments(high: torch.Tensor | None, given: Any) -> Mapping[str, Any]:
    return {
        "tensor": high,
        "rowwise_quantized_tensor": given,
        "columnwise_quantized_tensor": given,
        "quantizer": getattr(given, "_quantizer", None),
    }
