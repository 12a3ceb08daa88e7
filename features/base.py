"""What the features of this folder have in common: which of their options hold for a tensor and a GEMM, and statistics.

Nothing here is registered; nvidia-dlfw-inspect executes this file as every other, which has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from nvdlfw_inspect.registry import api_method

from te_precision_callbacks.layouts import gemm_operand
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.watched import Watched

if TYPE_CHECKING:
    from te_precision_callbacks.observation import Observation

Options = dict[str, Any]

_STRUCTS = ("tensors_struct", "gemms_struct")
_TENSORS = frozenset({"tensors", "tensors_struct"})


def matching_options(config: Mapping[str, Any], *, tensor: str | None, gemm: str | None) -> list[Options]:
    """The options of a feature that hold for a tensor and a GEMM, one for each entry that names them.

    ``tensors: [...]`` and ``tensors_struct: [{tensor: ..., ...}]`` choose tensors, ``gemms`` and ``gemms_struct``
    GEMMs; what stands in a struct goes before what stands outside of it. Without them it is every tensor, every GEMM.

    Args:
        config: the feature's options in the config.
        tensor, gemm: of the call; None where the call has none.
    """
    found = [dict(config)]
    for what, name in (("gemm", gemm), ("tensor", tensor)):
        if name is not None:
            found = [options for entry in found for options in _chosen(entry, what, name)]
    for options in found:
        options.pop("enabled", None)
    return found


def _chosen(options: Options, what: str, name: str) -> Iterator[Options]:
    """The entries of ``<what>s_struct`` or ``<what>s`` that are about ``name``, with what stands outside of them."""
    choosing = (f"{what}s", f"{what}s_struct")
    struct, names = options.get(choosing[1]), options.get(choosing[0])
    rest = {key: value for key, value in options.items() if key not in choosing}
    if struct:
        for entry in struct:
            if entry.get(what) == name:
                # An entry that chooses tensors of its own leaves the outer choice without effect.
                outer = rest if _TENSORS.isdisjoint(entry) else {k: v for k, v in rest.items() if k not in _TENSORS}
                yield {**outer, **entry}
    elif names is None:
        yield options
    elif name in ([names] if isinstance(names, str) else names):
        yield {**rest, what: name}


def every_options(config: Mapping[str, Any]) -> Iterator[Options]:
    """The options of a feature for each entry of its structs, whatever tensor and GEMM it names."""
    struct = next((config[key] for key in _STRUCTS if config.get(key)), None)
    rest = {key: value for key, value in config.items() if key not in _STRUCTS}
    entries: list[Options] = list(struct or [{}])
    for entry in entries:
        yield {**rest, **entry}


class Feature:
    """Base class of the features of this folder.

    Attributes:
        observation: of the run; the namespace API sets it when nvidia-dlfw-inspect starts.
    """

    observation: Observation

    def options_for(self, config: Mapping[str, Any], tensor: str | None, gemm: str | None) -> list[Options]:
        """The options that hold for a call; none where the feature does not act.

        Raises:
            ValueError: nothing says on which tensors or GEMMs it acts.
        """
        found = matching_options(config, tensor=tensor, gemm=gemm)
        for what, name in (("gemm", gemm), ("tensor", tensor)):
            if name is not None and any(what not in options for options in found):
                raise ValueError(f"its options have neither '{what}s' nor '{what}s_struct'")
        return found

    def parse_config_and_api(self, config: Mapping[str, Any], **call: Any) -> tuple[bool, Options | None]:
        """As nvidia-dlfw-inspect asks, which knows one set of options for a call."""
        found = self.options_for(config, call.get("tensor_name"), call.get("gemm"))
        return (True, found[0]) if found else (False, None)


class HighPrecisionFeature(Feature):
    """Base class of the features whose GEMMs run in high precision."""

    @api_method
    def fp8_gemm_enabled(self, config: Options, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int | None]:
        """No, and so in the next iteration."""
        return False, iteration + 1


class ModifyingFeature(Feature):
    """Base class of the features that put another tensor in a tensor's place, in every iteration."""

    @api_method
    def modify_tensor_enabled(
        self, config: Options, layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Yes, and so in the next iteration."""
        return True, iteration + 1


class StatisticsFeature(Feature):
    """Base class of the features that log statistics: a schedule, and what is asked of the engine."""

    def request(self, entry: object, tensor_name: str) -> Request:
        """What an entry of ``stats`` asks for."""
        raise NotImplementedError

    def options_for(self, config: Mapping[str, Any], tensor: str | None, gemm: str | None) -> list[Options]:
        """As for every feature, with the entries of ``stats`` as requests to the engine, and the schedule."""
        found = super().options_for(config, tensor, gemm)
        for options in found:
            stats = options.get("stats", ())
            entries = [stats] if isinstance(stats, (str, Mapping)) else stats
            options["requests"] = tuple(self.request(entry, tensor or "") for entry in entries)
            options["schedule"] = Schedule.of(options)
        return found

    @api_method
    def inspect_tensor_enabled(
        self, config: Options, layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether a statistic is due, and in which iteration the next one is."""
        due: tuple[bool, int | None] = config["schedule"].at(iteration)
        return due

    @api_method
    def inspect_tensor(
        self,
        config: Options,
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tensor: torch.Tensor | None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_size: int = 1,
    ) -> None:
        """Note what is wanted of the tensor; the namespace API has it measured when every feature was asked."""
        watched = Watched(
            layer=layer_name,
            tensor=tensor_name,
            iteration=iteration,
            values=tensor,
            rowwise=gemm_operand(rowwise_quantized_tensor, columnwise=False),
            columnwise=gemm_operand(columnwise_quantized_tensor, columnwise=True),
            quantizer=getattr(quantizer, "rowwise_quantizer", quantizer),  # of a hybrid one
            tp_group=tp_group if tp_size > 1 else None,
        )
        requests = config["requests"]
        if config.get("only_quantized") and watched.quantized() is None:
            requests = tuple(request for request in requests if request.recipe != OWN_RECIPE)
        if requests:
            self.observation.engine.note(watched, requests)
