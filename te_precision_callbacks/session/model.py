"""The model of a run: its layers, their names on all ranks, and the features of each layer."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from te_precision_callbacks.base.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.base.optimizers import held_ids, held_ids_of_process
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.config.differences import config_hash, flat_config, require_equal
from te_precision_callbacks.config.loading import describe_idle_sections
from te_precision_callbacks.config.planning import LayerPlan, resolve_features
from te_precision_callbacks.coverage.coverage import REMEDIES, Reason
from te_precision_callbacks.coverage.history import HighPrecisionFacts, kept_by_sections
from te_precision_callbacks.engine.engine import Placement, StatisticsEngine
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.instrumentation.fused import choose, format_paths
from te_precision_callbacks.layers.folding import fold_for_sentence
from te_precision_callbacks.layers.naming import (
    Layer,
    Model,
    NamedModule,
    NamedOperation,
    find_ambiguous_names,
    group_by_given_name,
    module_names,
    modules_of,
    named_attention,
    named_operations,
    named_roots,
    named_te_modules,
    roots_of,
)
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.sinks.step_records import LayerInfo
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import backward_override

logger = logging.getLogger(__name__)

_WITHOUT_PRODUCTS = r"Norm|Dropout|Embedding|\btorch\.nn\.modules\.activation\b"
"""Matches the classes, or the Python module, of modules without matrix products."""

_FOR_TRAINER = (
    "Remedy: use transformer_engine.pytorch.checkpoint, as docs/transformers.md shows. Setting only"
    " use_reentrant=False raises a CheckpointError."
)
"""Remedy for gradient checkpointing of the Hugging Face Trainer, which recomputes in high precision."""


_BY_ACCELERATE = {
    "accelerate": " To convert its Linear layers, prepare the model with Accelerator(mixed_precision='fp8',"
    " kwargs_handlers=[TERecipeKwargs()]).",
    "transformers": " To let Accelerate convert Linear layers, set mixed_precision: fp8 and fp8_config: {backend:"
    " TE} in its config file, or ACCELERATE_MIXED_PRECISION=fp8 and ACCELERATE_FP8_BACKEND=TE in the"
    " environment.",
}


def no_layers_warning(goes_on: str, integration: str = "") -> str:
    """Return the warning that a model has no Transformer Engine layers, with the integration's remedy."""
    return (
        "The model has no Transformer Engine layers with GEMMs, such as Linear or LayerNormMLP, so there are no"
        f" statistics. Training continues {goes_on}.{_BY_ACCELERATE.get(integration, '')}"
    )


def placements(
    modules: Iterable[NamedModule], reduced_over: torch.distributed.ProcessGroup | None
) -> dict[str, Placement]:
    """Return layer name -> placement, for layers with a tensor-parallel group of several ranks.

    Other layers with the same name on several ranks count as replicas, even if they differ, unless they are named by
    number (``Layer.by_number``), or have separate process groups (``process_group=``).
    """
    placed: dict[str, Placement] = {}
    ranks_of = torch.distributed.get_process_group_ranks
    for named in modules:
        group = te_modules.tensor_parallel_group(named.module)
        if group is None:
            continue
        rank = torch.distributed.get_rank(group)
        lower = ranks_of(group)[:rank]
        first = not lower if reduced_over is None else set(lower).isdisjoint(ranks_of(reduced_over))
        row = te_modules.of(named.module)
        # GroupedLinear does not communicate: its input was gathered before the layer.
        is_split = not row.groups and bool(named.module.sequence_parallel)
        for layer, mode in zip(named.names, row.parallel_modes(named.module), strict=True):
            placed[layer] = Placement(rank, first, mode, is_split)
    return placed


class NamedLayers:
    """Finds the layers of a model, and names them consistently on all ranks.

    Attributes:
        of_all: the layers of all ranks that reduce together.
        given: layer -> the script's name for it, if unique.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.modules: tuple[NamedModule, ...] = ()
        self.operations: Sequence[NamedOperation] = ()
        self.names: frozenset[str] = frozenset()
        self.of_all: tuple[Layer, ...] = ()
        self.given: dict[str, str] = {}
        self._options = options
        self._by_number = False

    @property
    def own(self) -> list[Layer]:
        return list(itertools.chain.from_iterable(module.layers for module in self.modules))

    def other_names(self, model: Model) -> dict[int, str]:
        """Return id -> name of attention modules and ``te.ops`` operations of this rank."""
        operations = {id(named.module): named.names[0] for named in self.operations if named.names}
        return {**named_attention(model, self.paths(model)), **operations}

    @property
    def other_ranks_products(self) -> list[Layer]:
        return [layer for layer in self.of_all if layer.name not in self.names]

    def attach(self, model: Model, ranks: Ranks) -> None:
        if named_roots(model) is None:
            raise SessionError(f"The model must be a torch.nn.Module, or a list or mapping of them, not {model!r}.")
        self._find(model)
        layers = ranks.pool(self.own, "layers", Layer)
        if ambiguous := find_ambiguous_names(layers):
            self._by_number = True
            if own_rank() == 0:
                name, numbered = next(iter(ambiguous.items()))
                logger.warning(
                    "Ranks have different layers at the same path, as in pipeline and expert parallelism (%r is %s). So"
                    " layers are named by layer_number, counted from 0, experts by their range of numbers, and others"
                    " by stage and expert rank.",
                    name,
                    " or ".join(map(repr, numbered)),
                )
            self._find(model)
            layers = ranks.pool(self.own, "numbered layers", Layer)
        self.of_all = tuple(layers)
        named = group_by_given_name(layers)
        self.given.clear()
        self.given.update(
            (name, user_name) for user_name, (name, *more) in named.items() if not more and name != user_name
        )

    def _find(self, model: Model) -> None:
        names = self._options.config.layer_names or "path"
        scope = self._options.scope
        self.modules = named_te_modules(model, names, by_number=self._by_number, scope=scope)
        self.operations = named_operations(model, by_number=self._by_number, scope=scope)
        self.names = frozenset(layer.name for layer in self.own)

    def paths(self, model: Model) -> dict[int, str]:
        return module_names(model, by_number=self._by_number, scope=self._options.scope)


class ObservedModel:
    """Applies the config to the layers of a model, watches its modules, and tracks changes of the model.

    Attributes:
        model: an empty sequence before :meth:`attach`.
        config_hash: the hash of the config with its registered features.
    """

    def __init__(self, context: RunContext, hooks: ForwardHooks, engine: StatisticsEngine) -> None:
        self.layers = NamedLayers(context.options)
        self.attached = False
        self.config_hash = ""
        self.model: Model = ()
        self._context = context
        self._inspector = context.inspector
        self.hooks = hooks
        self._engine = engine
        self._results = context.results
        self._notices = context.notices
        self._refused = hooks.answers.refused
        self._unobserved: dict[str, str] = {}
        self._uncounted: dict[str, str] = {}
        self._added: dict[str, str] = {}
        self._plan_of: dict[str, LayerPlan] = {}
        self._ordered = 0  # layers with a place in the order of forwards, or of backwards

    # ------------------------------------------------------------------ attach

    def attach(self, model: Model) -> None:
        options = self._context.options
        inspector = self._inspector
        ranks = self._context.ranks
        inspector.forget_names()
        self._added = {}
        self.layers.attach(model, ranks)
        modules = self.layers.modules
        registered = inspector.registered
        enabled = options.config.enabled_sections
        # The features of this rank's layers, without refused layers.
        plan = options.config.plan(self.layers.of_all, registered, allow_unmatched=options.allow_unmatched)
        planned = {entry.layer: entry for entry in plan.layers}
        plan = replace(plan, layers=tuple(planned[layer] for layer in self.layers.own if layer in planned))
        sections = [resolve_features(section, registered) for section in enabled]
        fused, not_fused = choose(options.observe, modules, plan, inspector.only_observes)
        effects = {section.name: tuple(section.effects.values()) for section in enabled}
        plan = self._refused.leave(
            plan, model, modules, effects, [key for key, changed in fused.items() if not changed]
        )
        for named in modules:
            if id(named.module) in self._refused.modules:
                fused.pop(id(named.module), None)
                not_fused.pop(named.name, None)
        config = {"layer_names": repr(options.config.layer_names), **flat_config(enabled, sections)}
        settings = {name: repr(getattr(options, name)) for name in ("strict", "debug", "require")}
        require_equal({**config, **settings}, inspector.iteration, ranks)
        self.config_hash = config_hash(config)
        watched = ACTIVATION_OVERFLOW in options.debug
        goes_on = "with only activation overflow detection" if watched else "without precision debugging"
        for text in describe_idle_sections(options.config, sections):
            logger.warning("%s", text)
        if not self.layers.of_all and self.layers.operations:
            logger.warning(
                "The model's only layers of Transformer Engine are operations of te.ops, which have no statistics. What"
                " they run in, and inf and nan, are observed."
            )
        elif not self.layers.of_all:
            logger.warning("%s", no_layers_warning(goes_on, self._context.results.integration))
        self.model = model
        self._plan_of = {entry.layer.name: entry for entry in plan.layers}
        self._describe_layers()
        inspector.configure(plan.as_inspect_config(), options.config.name, sections)
        self._engine.placements = placements(modules, options.process_group)
        for named in modules:
            inspector.name_module(named.module, named.name)
        if modules:
            inspector.log("\n".join(f"Assigned layer name: {named.name}" for named in modules))
        self.hooks.watch(modules, self._refused.modules, self.layers.operations, fused, self.roots)
        self.warn_of_refused()
        if options.observe == "auto" and own_rank() == 0 and self._notices.first("observe"):
            logger.info('observe="auto": %s', format_paths(len(fused), not_fused))
        self.hooks.count_products(model, self.layers.paths(model))
        self.attached = True

    # ------------------------------------------------------------------ modules and parameters

    @property
    def roots(self) -> list[torch.nn.Module]:
        return roots_of(self.model)

    def holds(self, *modules: torch.nn.Module | None) -> bool:
        return not set(modules).isdisjoint(modules_of(self.model))

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return itertools.chain.from_iterable(root.parameters() for root in self.roots)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
        """Yield name, parameter and module, once per parameter."""
        names = self.layers.paths(self.model)
        seen = set[torch.nn.Parameter]()
        for module in modules_of(self.model):
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    path = names.get(id(module), "")
                    yield f"{path}.{attribute}" if path else attribute, parameter, module

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        return not set(held_ids(optimizer)).isdisjoint(map(id, self.parameters()))

    def end_step(self) -> None:
        self.hooks.end_step()
        self.warn_of_refused()
        self._warn_of_unwatched()
        self.note_step()

    def note_step(self) -> None:
        """Note the order of the layers, unobserved layers, and the products of a step."""
        ordered = sum(map(len, self._results.table.order))
        if ordered != self._ordered:
            self._ordered = ordered
            self._describe_layers()
        self._note_unobserved()
        self._note_products()

    def _warn_of_unwatched(self) -> None:
        unwatched = []
        for module in self.hooks.answers.unwatched:
            trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            if trains and not te_modules.is_unknown(type(module)):
                unwatched.append(module)
        if unwatched and self._notices.first("unwatched"):
            paths = self.layers.paths(self.model)
            for module in unwatched:
                if id(module) in paths:
                    self._added[paths[id(module)]] = "not attached"
            names = fold_for_sentence(*(paths.get(id(module), str(module.name)) for module in unwatched))
            parameters = itertools.chain.from_iterable(module.parameters() for module in unwatched)
            if not held_ids_of_process().isdisjoint(map(id, parameters)):
                reason = "trained, but not in the session's model"
                remedy = (
                    "If they were added later, call session.attach(model) again. If they are in a plain list or dict,"
                    " use torch.nn.ModuleList or ModuleDict, or pass several models."
                )
            else:
                reason = "run in training mode with gradients, but no optimizer has the parameters"
                remedy = (
                    "If they should train, create the optimizer after the model. Otherwise call their eval(), or use"
                    " torch.no_grad()."
                )
            text = f"{names}: {reason}, so not observed"
            self._context.note_unobserved(text)
            logger.warning("%s. %s", text, remedy)

    def _describe_layers(self) -> None:
        forward, backward = self._results.table.order
        infos = []
        for layer in self.layers.own:
            planned = self._plan_of.get(layer.name, LayerPlan(layer, (), {}))
            info = LayerInfo(
                name=layer.name,
                module_class=layer.types[0],
                sections=planned.sections,
                features=planned.features,
                scope=layer.scope,
                given=self.layers.given.get(layer.name, ""),
                refused=self._refused.why(layer.name) or self._unobserved.get(layer.name, ""),
                exec_fwd=forward.get(layer.name),
                exec_bwd=backward.get(layer.name),
            )
            infos.append(info)
        self._results.layers = tuple(infos)

    def _note_unobserved(self) -> None:
        """Note the layers that ran only in forwards that are not observed, with the reasons.

        Coverage also gets layers with some unobserved forwards of the training, layers that were added to the model,
        and double backward.
        """
        forwards = self.hooks.products.unobserved
        reasons = forwards.reasons
        observed = self._results.table.order[0]
        unobserved: dict[str, str] = {}
        uncounted = dict(self._added)
        if self.hooks.products.has_double_backward:
            uncounted["the model"] = "double backward (create_graph=True)"
        for named in self.layers.modules if reasons else ():
            if id(named.module) in reasons:
                for name in named.names:
                    if self._refused.why(name):
                        continue
                    if name not in observed:
                        unobserved[name] = reasons[id(named.module)]
                    elif id(named.module) in forwards.with_backward:
                        uncounted[name] = "evaluation mode"
        uncounted |= unobserved
        if uncounted != self._uncounted:
            self._uncounted = uncounted
            self._results.coverage.put_unobserved(uncounted)
        if unobserved != self._unobserved:
            self._unobserved = unobserved
            self._describe_layers()

    @property
    def all_names(self) -> list[str]:
        return [*dict.fromkeys([*self.layers.paths(self.model).values(), *sorted(self.layers.names)])]

    def names_without_products(self) -> list[str]:
        """Return the paths of norms, embeddings, activation functions and dropout."""
        names = self.layers.paths(self.model)
        paths = []
        for module in modules_of(self.model):
            kinds = " ".join((type(module).__module__, *class_names(module)))
            is_simple = not module._modules and re.search(_WITHOUT_PRODUCTS, kinds)
            if is_simple and te_modules.find(type(module)) is None and id(module) in names:
                paths.append(names[id(module)])
        return paths

    def _note_products(self) -> None:
        step = self.hooks.products.take_step()
        if step is None:
            return
        outside = step.gemms.recomputed_outside
        if outside and own_rank() == 0 and self._notices.first("recomputed"):
            named = [layer.name for layer in self.layers.own if layer.name in outside]
            logger.warning(
                "Gradient checkpointing (use_reentrant=True) recomputes the forward of %d layer%s outside of"
                " te.autocast: %s. So the backward does not run in low precision. %s",
                len(named),
                "" if len(named) == 1 else "s",
                fold_for_sentence(*named, most=2),
                _FOR_TRAINER
                if self._context.results.integration == "transformers"
                else f"Remedy: {REMEDIES[Reason.RECOMPUTED]}.",
            )
        self._results.coverage.put(self._inspector.iteration, step, lambda: self._layer_facts(outside))
        if step.has_backward:
            self._results.table.note_backward()

    def _layer_facts(self, recomputed_outside: Collection[str]) -> Mapping[str, HighPrecisionFacts]:
        sections = {section.name: section for section in self._context.options.config.enabled_sections}
        overrides: dict[str, str] = {}
        for named in self.layers.modules:
            overrides |= dict.fromkeys(named.names, backward_override(named.module) or "")
        facts = {}
        for info in self._results.layers:
            sections_that_keep = kept_by_sections(map(sections.__getitem__, info.sections))
            facts[info.name] = HighPrecisionFacts(
                sections_that_keep, overrides.get(info.name, ""), info.name in recomputed_outside
            )
        return facts

    # ------------------------------------------------------------------ refused layers

    def warn_of_refused(self) -> None:
        if self._refused.warn(self._inspector.log):
            self._describe_layers()
