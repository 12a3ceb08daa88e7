"""The parameters of a model, and the tensors that optimizers step for them: themselves or their master weights."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.optimizers import held_ids_of_process, state_of
from te_precision_callbacks.parameters.parameter import Parameter
from te_precision_callbacks.parameters.weight_samples import dequantized_sample, is_narrow, local_part, sampled_view
from te_precision_callbacks.te.tensors import is_quantized

MOST_WITHOUT_MASTER = 8
"""The most weights of a shape without a master weight, for which those with one are found by their values."""

DIFFERENT = 0.01
"""Share of sampled elements that differ by more than rounding, in a weight that is not the copy of a master weight."""

_RANGES = "_get_model_param_range_map"
"""Identifies a distributed optimizer of Megatron."""


class TrainedModel(Protocol):
    @property
    def roots(self) -> list[torch.nn.Module]:
        """The attached modules."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
        """Yield name, parameter and module, once per parameter."""


class Held(NamedTuple):
    """A parameter in an optimizer.

    Attributes:
        tensor: the stepped tensor: the parameter or its master weight.
        start: offset of a partial master weight in the flattened parameter; None for a whole one.
    """

    parameter: Parameter
    tensor: torch.Tensor
    group: Mapping[str, Any]
    start: int | None = None


class SteppedParameters:
    """The parameters that an optimizer steps, in lists: every step reads them, and a loop in Python takes ten times as
    long as a function of C over a list.

    Attributes:
        ids: the ids of the optimizer's groups and tensors that are listed.
        groups: the parameter groups that step a parameter.
        tensors: the stepped tensor of each parameter.
        in_order: the parameters that are not quantized, in the order of the model.
        are_plain: whether all tensors are parameters of the model, of a plain class.
        are_matched: whether all tensors of the optimizer are found among the weights.
        decays: whether weight decay removes a share of the weights, instead of adding to the gradients.
        adds_eps: whether it adds ``eps`` as Adam does; None if it steps no weight of the model itself.
        steps: number of the optimizer's steps.
        stepped_at: the iteration of the last step.
        versions: the version of each parameter after the last step; empty before it.
    """

    def __init__(
        self, optimizer: Optimizer, ids: Sequence[Sequence[int]], listed: Mapping[int, Parameter], steps: int
    ) -> None:
        parameters = listed.values()
        owners = {id(getattr(parameter.weight, "main_param", None)): parameter for parameter in parameters}
        owners |= listed
        tensors = [(tensor, group) for group in optimizer.param_groups for tensor in group["params"]]
        unknown: list[torch.Tensor] = []
        held_directly: set[Parameter] = set()
        for tensor, _ in tensors:
            if id(tensor) in owners:
                held_directly.add(owners[id(tensor)])
            elif tensor.requires_grad or tensor.grad is not None:
                unknown.append(tensor)
        masters = _match_masters(
            unknown, [parameter for parameter in parameters if parameter.is_trained and parameter not in held_directly]
        )
        owners |= masters
        starts = _starts_of_shards([parameter.weight for parameter in parameters])
        self.ids = ids
        self.steps = steps
        self.stepped_at = -1
        self.versions: Sequence[int] = ()
        self.held: list[Held] = []
        for tensor, group in tensors:
            if id(tensor) in owners:
                self.held.append(Held(owners[id(tensor)], tensor, group, starts.get(id(tensor))))
        self.groups = [*{id(entry.group): entry.group for entry in self.held}.values()]
        self.parameters = [entry.parameter for entry in self.held]
        self.tensors = [entry.tensor for entry in self.held]
        are_held = set(self.parameters)
        self.in_order = [
            parameter
            for parameter in parameters
            if parameter in are_held and (type(parameter.weight) in PLAIN or not is_quantized(parameter.weight))
        ]
        direct = [entry for entry in self.held if entry.tensor is entry.parameter.weight]
        self.are_plain = len(direct) == len(self.held) and all(type(tensor) in PLAIN for tensor in self.tensors)
        self.are_matched = bool(masters) or not unknown
        self.decays = isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD))
        self.adds_eps = any(adds_eps(entry.group) for entry in direct) if direct else None


class ParameterList:
    """The parameters of a model in its order, by id, and the parameters of each optimizer."""

    def __init__(self, model: TrainedModel) -> None:
        self.parameters: dict[int, Parameter] = {}
        self.stepped: weakref.WeakKeyDictionary[Optimizer, SteppedParameters] = weakref.WeakKeyDictionary()
        self._model = model
        self._not_seen: list[Parameter] = []  # in the optimizers so far
        self._unheld: list[Parameter] = []
        self._listed: list[tuple[int, int]] | None = None  # id and size of the parameters at the last refresh

    def clear(self) -> None:
        self.parameters.clear()
        self.stepped.clear()
        self._listed = None

    def refresh(self) -> None:
        """List the parameters, unless they are the same as before; their names take long to find."""
        listed = [(id(weight), weight.numel()) for root in self._model.roots for weight in root.parameters()]
        if listed == self._listed:
            return
        self._listed = listed
        former = self.parameters
        self.parameters = {
            id(weight): former.get(id(weight)) or Parameter(name, weight, module)
            for name, weight, module in self._model.named_parameters()
            if local_part(weight).numel()
        }
        if self.parameters.keys() != former.keys():
            for stepped in self.stepped.values():
                stepped.ids = ()

    def stepped_by(self, optimizer: Optimizer) -> SteppedParameters:
        # Groups that grow, whose parameters are replaced, or that load_state_dict() has replaced.
        ids = [[id(group), *map(id, group["params"])] for group in optimizer.param_groups]
        stepped = self.stepped.get(optimizer)
        if stepped is None or stepped.ids != ids:
            self.refresh()
            steps = 0 if stepped is None else stepped.steps
            self.stepped[optimizer] = stepped = SteppedParameters(optimizer, ids, self.parameters, steps)
        return stepped

    @property
    def held(self) -> set[Parameter]:
        return set(itertools.chain.from_iterable(map(operator.attrgetter("parameters"), self.stepped.values())))

    @property
    def unmatched(self) -> list[str]:
        """The optimizers with tensors that are not found among the weights, if a weight in 16 bits or fewer is in none.

        Nothing is concluded from a weight without an optimizer then.
        """
        optimizers = [type(optimizer).__name__ for optimizer, entry in self.stepped.items() if not entry.are_matched]
        held = self.held
        unheld = [parameter.weight for parameter in self.parameters.values() if parameter not in held and optimizers]
        if any(weight.requires_grad and is_narrow(weight) for weight in unheld):
            return optimizers
        return []

    def unheld(self) -> list[Parameter]:
        """Return parameters with gradients that no optimizer of this process steps, nor their master weights."""
        held = self.held
        trained = [
            parameter
            for parameter in self.parameters.values()
            if parameter.is_trained and parameter.has_gradient and parameter not in held
        ]
        if trained != self._not_seen:  # to look for optimizers takes long
            stepped = held_ids_of_process()
            masters = [getattr(parameter.weight, "main_param", None) for parameter in trained]
            pairs = zip(trained, masters, strict=True)
            self._unheld = [
                parameter for parameter, master in pairs if stepped.isdisjoint({id(parameter.weight), id(master)})
            ]
            self._not_seen = trained
        return self._unheld


def _match_masters(masters: Sequence[torch.Tensor], parameters: Sequence[Parameter]) -> dict[int, Parameter]:
    """Return id of a master weight -> its parameter; within a shape, both are in the order of the model.

    All or none are found, since tensors of another model may have some values in common, such as norms of 1. If weights
    of a shape are left out of the optimizer, values decide. Matrices come first: a module without a master weight for
    its matrix has no master weights for its biases, which are often all 0.
    """
    shapes = sorted(dict.fromkeys(master.shape for master in masters), key=len, reverse=True)
    owners: dict[int, Parameter] = {}
    without_master: set[torch.nn.Module] = set()
    for shape in shapes:
        same_shape = [master for master in masters if master.shape == shape]
        weights = [
            parameter
            for parameter in parameters
            if parameter.weight.shape == shape and parameter.module not in without_master
        ]
        surplus = len(weights) - len(same_shape)
        if len(shapes[0]) < 2 or not 0 <= surplus <= MOST_WITHOUT_MASTER:
            return {}
        for index, master in enumerate(same_shape):
            candidates = weights[index : index + surplus + 1]
            copies = [parameter for parameter in candidates if _is_copy(parameter.weight, master, default=not surplus)]
            if len(copies) != 1:
                return {}
            owners[id(master)] = copies[0]
        with_master = set(owners.values())
        without_master.update(parameter.module for parameter in weights if parameter not in with_master)
    return owners


def _is_copy(weight: torch.Tensor, master: torch.Tensor, *, default: bool) -> bool:
    """Return whether a weight differs from a tensor by rounding at most; the default if it cannot be sampled."""
    values = dequantized_sample(weight)
    if values is None:
        return default
    differs = (values.values - sampled_view(local_part(master))).abs() > values.allowed
    return differs.float().mean().item() < DIFFERENT


def _starts_of_shards(weights: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return id of a partial master weight -> its offset in the flattened weight.

    Read from Megatron-Core 0.16.1, ``optimizer/distrib_optimizer.py``.
    """
    sharded: list[Any] = [weight for weight in weights if getattr(weight, "main_param_sharded", False)]
    owners: list[Any] = [owner for owner in gc.get_objects() if hasattr(type(owner), _RANGES)] if sharded else []
    return {
        id(weight.main_param): getattr(owner, _RANGES)(weight)["param"].start
        for owner, weight in itertools.product(owners, sharded)
        if weight.main_param is not None and weight in owner.model_param_gbuf_map
    }


def master_of(optimizer: Optimizer, held: Held) -> torch.Tensor | None:
    """Return the float32 master weight, or its local part: stepped by the optimizer, or in the optimizer's state.

    None for a float32 weight: TE's FusedAdam keeps a master weight, but does not step it.
    """
    weight = held.parameter.weight
    tensor: Any = held.tensor
    if not is_narrow(weight):
        return None
    if tensor is weight:
        state = state_of(optimizer, tensor)
        tensor = next((value for name, value in state.items() if "master" in str(name)), None)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        return None
    master = local_part(tensor)
    return master if held.start is not None or master.shape == local_part(weight).shape else None


def adds_eps(group: Mapping[str, Any]) -> bool:
    return "betas" in group and bool(group.get("eps"))


def gradients_of(all_held: Iterable[Held]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter; None without a dense one of the parameter's shape."""
    gradients: list[torch.Tensor | None] = []
    for parameter, tensor, _, _ in all_held:
        weight = parameter.weight
        gradient: Any = tensor.grad
        if gradient is None:
            gradient = weight.grad
        if gradient is None:
            gradient = getattr(weight, "main_grad", None)
        if gradient is not None and (gradient.layout is not torch.strided or gradient.shape != weight.shape):
            gradient = None
        gradients.append(gradient)
    return gradients
