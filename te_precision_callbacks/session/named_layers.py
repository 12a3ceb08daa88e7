"""The layers of a model on this rank, and their names on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.coverage.parallel import Ranks
from te_precision_callbacks.layers.naming import (
    Layer,
    Model,
    NamedModule,
    NamedOperation,
    by_given_name,
    different_at_one_path,
    module_names,
    named_attention,
    named_operations,
    named_roots,
    named_te_modules,
)
from te_precision_callbacks.options import SessionOptions

logger = logging.getLogger(__name__)


class NamedLayers:
    """Finds the layers of a model, and names them alike on all ranks.

    Args:
        options: the session's options.

    Attributes:
        modules: the Transformer Engine modules of this rank.
        operations: the operations of ``te.ops`` with GEMMs.
        names: the names of the layers of the modules.
        of_all: the layers of all ranks that reduce together.
        given: layer -> the name that the script gave to it and to no other layer.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.modules: tuple[NamedModule, ...] = ()
        self.operations: Sequence[NamedOperation] = ()
        self.names: frozenset[str] = frozenset()
        self._attentions: Mapping[int, str] = {}
        self.of_all: tuple[Layer, ...] = ()
        self.given: dict[str, str] = {}
        self._options = options
        self._by_number = False

    @property
    def own(self) -> list[Layer]:
        """The layers of this rank."""
        return [layer for module in self.modules for layer in module.layers]

    @property
    def other_names(self) -> dict[int, str]:
        """The names of attention and operations of ``te.ops`` of this rank, by the id of the module."""
        operations = {id(found.module): found.layers[0] for found in self.operations if found.layers}
        return {**self._attentions, **operations}

    @property
    def of_other_ranks(self) -> list[Layer]:
        """The layers that other ranks alone have."""
        return [layer for layer in self.of_all if layer.name not in self.names]

    def attach(self, model: Model, ranks: Ranks) -> None:
        """Name the layers of a model; on all ranks.

        Raises:
            SessionError: it is no model.
        """
        if named_roots(model) is None:
            raise SessionError(f"The model must be a torch.nn.Module, or a list or mapping of them, not {model!r}.")
        self._find(model)
        layers = ranks.pool(self.own, "layers", Layer)
        if alike := different_at_one_path(layers):
            self._name_by_number(alike)
            self._find(model)
            layers = ranks.pool(self.own, "numbered layers", Layer)
        self._take(layers)

    def follow(self, model: Model) -> None:
        """Name the layers of a model that has changed, without the other ranks."""
        self._find(model)
        self._take([*dict.fromkeys([*self.of_all, *self.own])])

    def _find(self, model: Model) -> None:
        names, scope = self._options.layer_names or "path", self._options.scope
        self.modules = named_te_modules(model, names, by_number=self._by_number, scope=scope)
        self.operations = named_operations(model, by_number=self._by_number, scope=scope)
        self._attentions = named_attention(model, self.paths(model))
        self.names = frozenset(layer.name for layer in self.own)

    def _name_by_number(self, alike: Mapping[str, Sequence[str]]) -> None:
        """Name layers by their number in the whole model, since different layers would share a name."""
        self._by_number = True
        if own_rank() == 0:
            name, numbered = next(iter(alike.items()))
            logger.warning(
                "Ranks have different layers at one path, as in pipeline and expert parallelism: %r, for example, is"
                " %s. Layers are therefore named by the layer_number of their block, counted from 0; experts by the"
                " first and the last of their numbers; layers without a number by their stage and their rank among the"
                " experts.",
                name,
                " or ".join(map(repr, numbered)),
            )

    def _take(self, layers: Sequence[Layer]) -> None:
        self.of_all = tuple(layers)
        named = by_given_name(layers)
        self.given.clear()
        self.given.update((name, given) for given, (name, *more) in named.items() if not more and name != given)

    def paths(self, model: Model) -> dict[int, str]:
        """The id of each module of a model -> its name."""
        return module_names(model, by_number=self._by_number, scope=self._options.scope)
