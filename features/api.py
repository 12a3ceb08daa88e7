"""The namespace API ``transformer_engine``: passes the calls of Transformer Engine's modules to features.

It replaces Transformer Engine's API, even if Transformer Engine's folder of features is also listed, before or after
this one. Read from Transformer Engine 2.20.2 (``debug/features/api.py``) and nvidia-dlfw-inspect 0.2.2 (``base.py``).
Differences:

- **Schedules.** A tensor is passed only to the features that requested it in the last query.
- **Queries.** A feature may return a plain bool: it is queried again in the next iteration.
- **Arguments.** A feature receives the arguments that its method names, or all with ``**kwargs``; arguments that
  Transformer Engine no longer passes (``out``, the ``gemm`` of ``inspect_tensor_postquantize``) are supplied.
- **Errors.** An exception in a feature becomes a :class:`FeatureError` with the feature, the call and the layer.
  Warnings and AttributeErrors in a feature do not end the process, and other features still receive the tensor.
- **Autocast.** A float32 weight that a feature has quantized works under torch's autocast.
- **Caches.** Memory for a call does not grow with the iterations.
- **Statistics and dumps.** This folder's features measure and dump through the run's
  :class:`te_precision_callbacks.observation.Observation`: a session's, or the one in ``features/plain.py``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import nvdlfw_inspect.api as debug_api
import torch
from nvdlfw_inspect.config_manager import ConfigManager
from nvdlfw_inspect.logging import get_logger
from nvdlfw_inspect.registry import Registry

from te_precision_callbacks.base.errors import FeatureError
from te_precision_callbacks.base.ranks import is_distributed
from te_precision_callbacks.base.vocabulary import COLUMNWISE, RESULT, ROWWISE
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.keys import GemmSampling, LoggedTensor
from te_precision_callbacks.config.levels import FeatureSchema
from te_precision_callbacks.features.base import (
    Decision,
    Feature,
    ScheduledFeature,
    Watcher,
    matching_options,
)
from te_precision_callbacks.features.plain import PlainObservation
from te_precision_callbacks.features.registration import NAMESPACE, is_upstream, namespace
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.statistics.series import Measured
from te_precision_callbacks.te.debug import STATS_BUFFERS, restore_log_stats
from te_precision_callbacks.te.debug_api import TEDefaultFeatures
from te_precision_callbacks.te.debug_api import TransformerEngineAPI as UpstreamAPI
from te_precision_callbacks.te.state import debug_iteration
from te_precision_callbacks.te.tensors import is_quantized

logger = logging.getLogger("te_precision_callbacks.features")

_BY_GEMM = ("fp8_gemm_enabled", "modify_tensor_enabled", "modify_tensor")
"""The calls that are about one GEMM."""

_CALLS = (
    *_BY_GEMM,
    "inspect_tensor_enabled",
    "inspect_tensor",
    "inspect_tensor_postquantize_enabled",
    "inspect_tensor_postquantize",
)

_OF_MODIFY: Mapping[str, Any] = {"default_quantizer": None, "out": None, "dtype": None}
"""Arguments of ``modify_tensor``, and the value that a feature gets if Transformer Engine does not pass one."""

_Key = tuple[str, str, str | None, str | None]
"""Layer, name of a call, tensor and GEMM."""

_ENABLED = "_enabled"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Call(NamedTuple):
    """A method of a feature, for one layer, tensor and GEMM.

    Attributes:
        position: the index among the feature's options that apply to the tensor and GEMM.
        options: the options: typed for a feature of this project, a mapping for a custom feature.
        arguments: the arguments that the method accepts; None if it accepts all.
    """

    feature: str
    position: int
    name: str
    method: Callable[..., Any]
    options: Any
    arguments: frozenset[str] | None

    def __call__(self, layer: str, arguments: Mapping[str, Any]) -> Any:
        accepted = self.arguments
        keywords = arguments if accepted is None else {name: arguments[name] for name in accepted if name in arguments}
        try:
            return self.method(self.options, layer, **keywords)
        except Exception as error:
            kind = "" if isinstance(error, FeatureError) else f"{type(error).__name__}: "
            raise self._error("failed in", layer, f"{kind}{error}") from error

    def error_for(self, layer: str, returned: Any, expected: str) -> FeatureError:
        return self._error(f"returned {_describe(returned)} from", layer, f"expected {expected}.")

    def _error(self, did: str, layer: str, why: str) -> FeatureError:
        return FeatureError(
            f"The feature {self.feature} {did} {self.name} for the layer {layer!r}: {why}",
            feature=self.feature,
            call=self.name,
            layer=layer,
            failure=f"{did} {self.name}: {why}",
        )


@Registry.register_namespace_api(namespace=NAMESPACE)
class TransformerEngineAPI(UpstreamAPI):
    """Routes the calls of Transformer Engine's modules to features, which use the run's ``observation``."""

    is_own = True

    def __init__(self) -> None:
        super().__init__()
        self.observation: Observation
        self._plain: PlainObservation | None = None
        self._reduces = True
        self._answers: dict[_Key, dict[tuple[str, int], bool]] = {}
        self._noted: set[tuple[str, str, str, str | None, str | None]] = set()
        self._unlogged: list[str] = []
        self._read: dict[int, tuple[Any, FeatureSchema]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(f"The namespace {NAMESPACE} has no call {name!r}. It has: {', '.join(_CALLS)}.")
        return functools.partial(self.route_api, api_name=name)

    def route_api(self, layer_name: str, api_name: str, **arguments: Any) -> Any:
        """Pass a call to the features of a layer.

        Raises:
            FeatureError: a feature failed, or returned an invalid value.
        """
        if api_name == "modify_tensor":
            arguments = {**_OF_MODIFY, **arguments}
        tensor = arguments.get("tensor_name")
        gemm = arguments.get("gemm")
        if api_name == "inspect_tensor_postquantize" and gemm is None:
            gemm = (ROWWISE if arguments["rowwise"] else COLUMNWISE).get(str(tensor))
            arguments["gemm"] = gemm
        key = (layer_name, api_name, tensor, gemm)
        calls: list[_Call] | None = self._api_cache.get(key)
        if calls is None:
            calls = self._find(key, arguments)
            self._api_cache[key] = calls
        if api_name.endswith(_ENABLED):
            return self._query(calls, key, arguments)
        if api_name == "modify_tensor":
            return self._modify(calls, key, arguments)
        try:
            self._show(self._due(calls, key), key, arguments)
        finally:
            self.observation.engine.measure()
        return None

    def watchers(self, layer: str, tensor: str) -> tuple[Watcher, ...]:
        watchers: tuple[Watcher, ...] | None = self._api_cache.get((layer, tensor))
        if watchers is None:
            matching_watchers: list[Watcher] = []
            for name, written in ConfigManager.get_config_for_layer(layer).get(self.name, {}).items():
                feature = self.namespace_features.get(name)
                if isinstance(feature, ScheduledFeature):
                    matching = self._matching(name, written, tensor, None)
                    matching_watchers += [Watcher(name, feature, options, options.schedule) for options in matching]
            watchers = tuple(matching_watchers)
            self._api_cache[layer, tensor] = watchers
        return watchers

    def _find(self, key: _Key, passed: Collection[str]) -> list[_Call]:
        layer, api_name, tensor, gemm = key
        if api_name not in _BY_GEMM:
            gemm = None
        calls: list[_Call] = []
        for name, options in ConfigManager.get_config_for_layer(layer).get(self.name, {}).items():
            feature = self.namespace_features.get(name)
            method = _own_method(feature, api_name)
            if method is None:
                continue
            try:
                matching = self._matching(name, options, tensor, gemm)
                accepted = _accepted_arguments(method, passed)
            except Exception as error:
                # Raise when this feature is called, without affecting the layer's other features. Only the text is
                # kept, since a traceback would keep tensors.
                fail = functools.partial(_fail, f"{type(error).__name__}: {error}")
                calls.append(_Call(name, 0, api_name, fail, {}, frozenset()))
                continue
            if api_name.startswith("modify_tensor"):
                matching = matching[:1]  # a tensor is modified once
            calls.extend(
                _Call(name, number, api_name, method, entry, accepted) for number, entry in enumerate(matching)
            )
        return calls

    def _query(self, calls: Sequence[_Call], key: _Key, arguments: dict[str, Any]) -> Decision:
        layer, api_name, tensor, gemm = key
        vetoes = api_name == "fp8_gemm_enabled"
        if not calls:
            return vetoes, None
        answers: dict[tuple[str, int], bool] = {}
        upcoming: list[int] = []
        for call in calls:
            answer = _answer(call, layer, arguments)
            answers[call.feature, call.position] = answer[0]
            if answer[1] is not None:
                upcoming.append(answer[1])
            if vetoes and not answer[0]:
                self.note_once(call.feature, key)
        self._answers[layer, api_name.removesuffix(_ENABLED), tensor, gemm] = answers
        # Quantization needs the permission of all features; a tensor, the request of any feature.
        decided = all(answers.values()) if vetoes else any(answers.values())
        return decided, min(upcoming, default=None)

    def _due(self, calls: Sequence[_Call], key: _Key) -> Iterable[_Call]:
        """The features that requested this call in the last query; all features without a query, since a backward may
        come after the step of its forward.
        """
        answers = self._answers.get(key) or self._answers.get((*key[:3], None))
        if answers is None:
            return calls
        return [call for call in calls if answers.get((call.feature, call.position), False)]

    def _show(self, calls: Iterable[_Call], key: _Key, arguments: Mapping[str, Any]) -> None:
        layer = key[0]
        failures: list[FeatureError] = []
        for call in calls:
            try:
                returned = call(layer, arguments)
                if returned is not None:
                    raise call.error_for(layer, returned, "nothing")
                self.note_once(call.feature, key)
            except FeatureError as error:  # other features still receive the tensor
                failures.append(error)
        if failures:
            raise failures[0]

    def _modify(self, calls: Sequence[_Call], key: _Key, arguments: dict[str, Any]) -> Any:
        layer, _, tensor, gemm = key
        due = list(self._due(calls, key))
        if len(due) != 1:
            names = " and ".join(call.feature for call in due) or "no feature"
            raise FeatureError(f"{names} would modify {tensor} of {layer!r} in {gemm}: exactly one feature must.")
        call = due[0]
        returned = call(layer, arguments)
        self._refuse_forbidden(call, key, returned if arguments["out"] is None else arguments["out"])
        self.note_once(call.feature, key)
        if arguments["out"] is not None:
            if returned is not None:
                raise call.error_for(layer, returned, "None, after writing into 'out'")
            return None
        if not isinstance(returned, torch.Tensor) and not hasattr(returned, "dequantize"):
            raise call.error_for(layer, returned, "a tensor or a quantized tensor")
        tensor_before = arguments["tensor"]
        if returned.size() != tensor_before.size():
            raise call.error_for(
                layer, returned, f"the shape of the tensor that it was given, {tuple(tensor_before.shape)}"
            )
        if tensor in RESULT.values() and returned.dtype != tensor_before.dtype:
            raise call.error_for(
                layer, returned, f"a tensor of {tensor_before.dtype}, as the {tensor} that it was given"
            )
        dtype = arguments["dtype"]
        if dtype is None or getattr(returned, "dtype", dtype) == dtype:
            return returned
        if not hasattr(returned, "to_dtype"):
            raise call.error_for(layer, returned, f"a tensor of {dtype}")
        # Quantized from a float32 weight, under torch's autocast: only the nominal dtype changes.
        return returned.to_dtype(dtype)

    def _refuse_forbidden(self, call: _Call, key: _Key, replacement: Any) -> None:
        """Refuse to quantize an operand of a GEMM that another feature keeps in high precision.

        Transformer Engine does not query the other feature if a feature replaces the tensor. With both operands
        replaced, the other feature would have no effect; with one operand replaced, the GEMM would fail.
        """
        layer, _, tensor, gemm = key
        if tensor in RESULT.values() or not is_quantized(replacement):
            return
        allowed, _ = self.route_api(layer, "fp8_gemm_enabled", gemm=gemm, iteration=debug_iteration())
        if not allowed:
            answers = self._answers[layer, "fp8_gemm", None, gemm]
            forbidding = " and ".join(feature for (feature, _), allows in answers.items() if not allows)
            raise FeatureError(
                f"The feature {call.feature} quantized {tensor} of {layer!r} for {gemm}, which {forbidding} keeps in"
                f" high precision. A GEMM runs in one way only: take {gemm} out of one of the features."
            )

    def note_once(self, feature: str, key: _Key) -> None:
        """Log the first time that a feature acts on a tensor or a GEMM, at the end of the step."""
        acting = (feature, *key)
        if acting not in self._noted:
            self._noted.add(acting)
            layer, api_name, tensor, gemm = key
            what = ", ".join(name for name in (gemm, tensor) if name) if api_name in _BY_GEMM else tensor
            self._unlogged.append(f"LAYER={layer}: Feature={feature}, API={api_name}: {what}")

    def _log_noted(self) -> None:
        """Log all lines, in a session as one message: its log writes the time and the level before each line."""
        lines = self._unlogged
        self._unlogged = []
        if lines and self._plain is None:
            lines = ["\n".join(lines)]
        for message in lines:
            get_logger().log_message(message)

    def set_features(self, features: Any) -> None:
        super().set_features(features)
        for name, feature in features.items():
            if not is_upstream(type(feature)):
                _warn_if_never_called(name, feature)
        plain = PlainObservation()
        self._plain = plain
        self._observe(plain)
        # Code that reads a step's statistics from Transformer Engine's buffers also gets the engine's.
        STATS_BUFFERS.log_stats = self._log_statistics

    def begin(self, observation: Observation, *, reduce: bool) -> None:
        self._plain = None
        self._reduces = reduce
        restore_log_stats()
        self._observe(observation)

    def _observe(self, observation: Observation) -> None:
        self.observation = observation
        for feature in self.namespace_features.values():
            if isinstance(feature, Feature):
                feature.observation = observation

    def step(self) -> None:
        """Log the statistics since the last step; a collective call if statistics are reduced."""
        self._log_noted()
        if self._reduces:
            STATS_BUFFERS.log_stats()
        else:
            self.log_local_buffers()
        if self._plain is not None:
            self._plain.end_step()

    def _log_statistics(self) -> dict[tuple[str, str, str, int], torch.Tensor]:
        logged: list[tuple[Measured, int]] = []
        if self._plain is not None:
            group = debug_api.get_tensor_reduction_group()
            if is_distributed(group) and not self._plain.schedules:
                self.plan(config.extension_config.get(NAMESPACE, {}) for config in ConfigManager.configs)
            iteration = debug_iteration() - 1  # already incremented at this call
            logged = self._plain.log(iteration, group)
        values: dict[tuple[str, str, str, int], torch.Tensor] = {**type(STATS_BUFFERS).log_stats(STATS_BUFFERS)}
        for measured, iteration in logged:
            for m in measured:
                values[m.layer, m.tensor, m.statistic, iteration] = torch.tensor(m.value)
        return values

    def log_local_buffers(self) -> None:
        """Log statistics that features put into Transformer Engine's buffers on this rank, without a collective."""
        buffer: Any
        for buffer in STATS_BUFFERS.buffers.values():
            if buffer.modified[0]:
                buffer.skip_reduction = True
                buffer.log()
        STATS_BUFFERS.at_least_one_layer_fed = False

    def end_debug(self) -> None:
        self._log_noted()
        super().end_debug()
        if self._plain is not None:
            self._plain.end()
        restore_log_stats()

    def plan(self, sections: Iterable[Mapping[str, Any]]) -> None:
        schedules = set()
        for name, options in itertools.chain.from_iterable(section.items() for section in sections):
            if isinstance(self.namespace_features.get(name), ScheduledFeature) and options.get("enabled", False):
                for target in self._read_schema(name, options).targets:
                    if isinstance(target.options, (LoggedTensor, GemmSampling)):
                        schedules.add(target.options.schedule)
        self.observation.plan(frozenset(schedules))

    def _read_schema(self, name: str, options: Any) -> FeatureSchema:
        """The options of one of this project's features, as read by the session, or else read here once."""
        if isinstance(options, ReadOptions):
            return options.schema
        if id(options) not in self._read:  # stored with the options, to keep their id unique
            self._read[id(options)] = options, self.namespace_features[name].read(name, options)
        return self._read[id(options)][1]

    def _matching(self, name: str, options: Any, tensor: str | None, gemm: str | None) -> list[Any]:
        """The options of a feature for a call: typed for this project's features, mappings for custom features."""
        if not isinstance(options, Mapping) or "enabled" not in options:
            raise ValueError("the config has no 'enabled' for it")
        if not options["enabled"]:
            return []
        feature = self.namespace_features[name]
        if isinstance(feature, Feature):
            items: list[Any] = feature.options_for(self._read_schema(name, options), tensor, gemm)
            return items
        if hasattr(feature, "parse_config_and_api"):
            call = {name: value for name, value in (("tensor_name", tensor), ("gemm", gemm)) if value is not None}
            matches, parsed = feature.parse_config_and_api(
                options, gemm_parsing=gemm is not None, tensor_parsing=tensor is not None, **call
            )
            if matches:
                return [dict(parsed or options)]
            return []
        matching: list[Any] = matching_options(options, tensor=tensor, gemm=gemm)
        return matching


def _warn_if_never_called(name: str, feature: Any) -> None:
    has = [call for call in _CALLS if _own_method(feature, call) is not None]
    if not has:
        methods = [method for method in dir(feature) if not method.startswith("_")]
        logger.warning(
            "The feature %s is never called: it has none of the methods %s, but %s.",
            name,
            ", ".join(_CALLS),
            ", ".join(methods) or "no method",
        )
    for call in has:
        if f"{call}{_ENABLED}" in _CALLS and f"{call}{_ENABLED}" not in has:
            logger.warning("%s of the feature %s is never called: %s%s is missing.", call, name, call, _ENABLED)


def _answer(call: _Call, layer: str, arguments: Mapping[str, Any]) -> Decision:
    answer = call(layer, arguments)
    if type(answer) is bool:
        return answer, arguments["iteration"] + 1
    is_valid = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool)
    if not is_valid or not (answer[1] is None or type(answer[1]) is int):
        raise call.error_for(layer, answer, "a bool, or a tuple of a bool and the next iteration (None: never)")
    decided: Decision = answer
    return decided


def _describe(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        return f"a {type(returned).__name__} of {returned.dtype} and shape {tuple(returned.shape)}"
    if isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__}"
    return repr(returned)


def _fail(text: str, options: Mapping[str, Any], layer: str) -> None:
    raise FeatureError(text)


def _own_method(feature: Any, api_name: str) -> Any:
    """Return a method of a feature; None without it, and for Transformer Engine's default."""
    method = getattr(feature, api_name, None)
    if getattr(method, "__func__", method) is getattr(TEDefaultFeatures, api_name):
        return None
    return method


def _accepted_arguments(method: Any, passed: Collection[str]) -> frozenset[str] | None:
    """The arguments that a method accepts after the two positional ones; None if it accepts all.

    Raises:
        TypeError: the method requires an argument that the call does not have.
    """
    by_position = []
    named = []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.kind in _POSITIONAL:
            by_position.append(parameter)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named.append(parameter)
    names = set()
    for parameter in (*by_position[2:], *named):
        names.add(parameter.name)
        if parameter.default is parameter.empty and parameter.name not in passed:
            raise TypeError(f"it asks for {parameter.name!r}, but the call has only {', '.join(sorted(passed))}")
    return frozenset(names)


namespace()
