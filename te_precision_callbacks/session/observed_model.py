"""The model of a run: its named layers, and what the config does with each layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.base.errors import ObservationError, SessionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.config.differences import FlatConfig, config_hash, flat_config
from te_precision_callbacks.config.dumping import check_conditions
from te_precision_callbacks.config.idle import idle_in_words
from te_precision_callbacks.config.planning import NamespacedFeatures, Plan, resolve_features
from te_precision_callbacks.coverage.contract_keeper import remedy
from te_precision_callbacks.coverage.coverage import Reason
from te_precision_callbacks.coverage.history import LayerFacts, kept_by_sections
from te_precision_callbacks.coverage.parallel import Ranks, placements
from te_precision_callbacks.coverage.precision_audit import backward_override
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.instrumentation.attaching import alike_in_words, without_layers
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.instrumentation.fused import NotFused, choose, paths_in_words
from te_precision_callbacks.instrumentation.refusals import DebugRefusal, RefusedLayers
from te_precision_callbacks.instrumentation.upstream import Inspector
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.layers.naming import (
    Layer,
    Model,
    ModuleTree,
    NamedModule,
    NamedOperation,
    by_given_name,
    different_at_one_path,
    module_names,
    named_operations,
    named_roots,
    named_te_modules,
)
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session.results import Findings
from te_precision_callbacks.sinks.step_records import LayerInfo

logger = logging.getLogger(__name__)

_FOR_TRAINER = (
    "To change that, leave gradient_checkpointing out of the TrainingArguments, and before the training call"
    " model.gradient_checkpointing_enable() and model._set_gradient_checkpointing(gradient_checkpointing_func="
    "transformer_engine.pytorch.checkpoint). With use_reentrant=False alone torch raises a CheckpointError."
)
"""What makes a checkpoint of the Hugging Face Trainer compute again in low precision."""


class ObservedModel:
    """Names the Transformer Engine modules of a model, plans the config on their layers, and follows changes.

    Half of its attributes are the parts of the run that the class works on.

    Args:
        options: the session's options.
        inspector: gets the names and the plan.
        hooks: get the modules.
        engine: gets the split of layers over ranks.
        findings: get the facts about each layer.
        failures: get errors.
        notices: the messages that the run has logged once.
        front_door: gives what has started the session.

    Attributes:
        modules: the Transformer Engine modules of this rank.
        layer_names: the names of the layers of these modules.
        attached: whether there is a model.
        given_names: layer -> the name that the script gave to it and to no other layer.
        config_hash: of the config with its registered features; empty before the attach.
        flat_config: the config with its registered features; empty before the attach.
        overrides: layer -> the features that can change the precision of its GEMMs, if it has any.
    """

    def __init__(
        self,
        options: SessionOptions,
        inspector: Inspector,
        hooks: ForwardHooks,
        engine: StatisticsEngine,
        findings: Findings,
        failures: ObservationFailures,
        notices: Notices,
        front_door: Callable[[], str],
    ) -> None:
        self.modules: tuple[NamedModule, ...] = ()
        self.layer_names: frozenset[str] = frozenset()
        self.attached = False
        self.given_names: dict[str, str] = {}
        self.config_hash = ""
        self.flat_config: FlatConfig = {}
        self.overrides: Mapping[str, tuple[str, ...]] = {}
        self._options = options
        self._inspector = inspector
        self._hooks = hooks
        self._engine = engine
        self._findings = findings
        self._failures = failures
        self._notices = notices
        self._front_door = front_door
        self._refused = RefusedLayers(strict=options.strict)
        self._by_number = False
        self._operations: Sequence[NamedOperation] = ()
        self._fused: frozenset[int] = frozenset()
        self._not_fused: Mapping[str, NotFused] = {}
        self._model: Model = ()
        self._tree: ModuleTree | None = None
        self._registrations: RemovableHandle | None = None
        self._known_outside = 0
        self._layers_of_all: tuple[Layer, ...] = ()

    @property
    def config_source(self) -> str:
        """The source of the config, a path or ``<mapping>``."""
        return self._options.config.name

    # ------------------------------------------------------------------ a model that is given

    def attach(self, model: Model, ranks: Ranks) -> None:
        """Name and watch a model, instead of the model that was watched before; on all ranks, inside of
        :meth:`Ranks.together`.

        Raises:
            ConfigError, SessionError: as in ``InspectSession.attach``.
        """
        options, inspector = self._options, self._inspector
        layers = self._find_layers(model)
        layers_of_all = ranks.pool(layers, "layers")
        if alike := different_at_one_path(layers_of_all):
            self._name_by_number(alike)
            layers = self._find_layers(model)
            layers_of_all = ranks.pool(layers, "numbered layers")
        plan, sections = self._plan(model, layers, layers_of_all)
        config = {"layer_names": repr(options.layer_names), **flat_config(options.config.enabled_sections, sections)}
        agreed = {"strict": options.strict, "debug": options.debug, "require": options.require}
        ranks.require_alike({**config, **{name: repr(value) for name, value in agreed.items()}}, inspector.iteration)
        self.flat_config, self.config_hash = config, config_hash(config)
        self._take_names(layers_of_all, plan)
        watched = ACTIVATION_OVERFLOW in options.debug
        goes_on = "with activation overflow detection alone" if watched else "without precision debugging"
        for text in idle_in_words(options.config, sections):
            logger.warning("%s", text)
        if not layers_of_all:
            logger.warning("%s", without_layers(goes_on, self._front_door()))
        self._observe(layers, plan, sections)
        self._model, self._tree = model, ModuleTree(model)
        if self._registrations is None:
            self._registrations = register_module_module_registration_hook(self._note_registration)
        self._count_products()
        self.attached = True

    def release(self) -> None:
        """No longer follow what is registered in modules."""
        if self._registrations is not None:
            self._registrations.remove()
            self._registrations = None

    def _note_registration(self, module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if self._tree is not None:
            self._tree.note_registration(module)

    def _find_layers(self, model: Model) -> list[Layer]:
        if named_roots(model) is None:
            raise SessionError(f"The model must be a torch.nn.Module, or a list or mapping of them, not {model!r}.")
        self._inspector.forget_names()
        names = self._options.layer_names or "path"
        scope = self._options.scope
        self.modules = named_te_modules(model, names, by_number=self._by_number, scope=scope)
        self._operations = named_operations(model, by_number=self._by_number, scope=scope)
        layers = [layer for module in self.modules for layer in module.layers]
        self.layer_names = frozenset(layer.name for layer in layers)
        return layers

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

    def _plan(
        self, model: Model, layers: Sequence[Layer], layers_of_all: Sequence[Layer]
    ) -> tuple[Plan, list[NamespacedFeatures]]:
        """Plan the features of this rank's layers without refused layers, and list the features of all sections."""
        config, registered = self._options.config, self._inspector.registered
        plan = config.plan(
            layers_of_all,
            registered,
            allow_unmatched=self._options.allow_unmatched,
            layer_names=self._options.layer_names,
        )
        check_conditions(plan, config.enabled_sections, detects_overflow=ACTIVATION_OVERFLOW in self._options.debug)
        planned = {entry.layer: entry for entry in plan.layers}
        sections = [resolve_features(section, registered) for section in config.enabled_sections]
        own = tuple(planned[layer] for layer in layers if layer in planned)
        effects = {section.name: tuple(section.effects.values()) for section in config.enabled_sections}
        own_plan = replace(plan, layers=own)
        fused, not_fused = choose(self._options.observe, self.modules, own_plan)
        own_plan = self._refused.leave(own_plan, model, self.modules, effects, fused)
        refused = self._refused.modules
        left = {named.name for named in self.modules if id(named.module) in refused}
        self._fused = fused.difference(refused)
        self._not_fused = {name: why for name, why in not_fused.items() if name not in left}
        return own_plan, sections

    def _take_names(self, layers: Sequence[Layer], plan: Plan) -> None:
        """Collect the names that the script gave to layers on all ranks, and warn of ambiguous names."""
        self._layers_of_all = tuple(layers)
        named = by_given_name(layers)
        self.given_names.clear()
        self.given_names.update((name, given) for given, (name, *more) in named.items() if not more and name != given)
        if own_rank() != 0:
            return
        for text, what in ((alike_in_words(layers), "alike"), (plan.otherwise_upstream, "otherwise_upstream")):
            if text and self._notices.first(what):
                logger.warning("%s", text)

    def _observe(self, layers: Sequence[Layer], plan: Plan, sections: Sequence[NamespacedFeatures]) -> None:
        """Name and watch this rank's modules; without a collective."""
        inspector = self._inspector
        infos = _layer_infos(layers, plan, self.given_names, self._refused)
        self._hooks.order.grown = True
        self._findings.layers.put(inspector.iteration, infos)
        inspector.configure(plan.as_inspect_config(), self.config_source, sections)
        overrides = {entry.layer.name: inspector.that_change_precision(entry.features) for entry in plan.layers}
        self.overrides = {layer: features for layer, features in overrides.items() if features}
        self._findings.changes_precision |= bool(self.overrides)
        self._engine.placements = placements(self.modules, self._options.process_group)
        for module in self.modules:
            inspector.name_module(module.module, module.name)
            inspector.log(f"Assigned layer name: {module.name}")
        self._hooks.watch(self.modules, self._refused.modules, self._operations, self._fused)
        self.say_refused()
        if self._options.observe == "auto" and own_rank() == 0 and self._notices.first("observe"):
            self._say_paths()

    def _say_paths(self) -> None:
        """Tell how many modules are observed on their own path, and why the others are not."""
        logger.info('observe="auto": %s', paths_in_words(len(self._fused), self._not_fused))

    # ------------------------------------------------------------------ what changes in it

    def follow(self) -> None:
        """Watch modules that were added to the model since the last step, and warn of modules that train outside it.

        Runs no collective, since other ranks may have nothing new: sections that matched at the attach still match.
        """
        if self._has_changed():
            before = {id(module.module): module.name for module in self.modules}
            try:
                layers = self._find_layers(self._model)
                layers_of_all = [*dict.fromkeys([*self._layers_of_all, *layers])]
                plan, sections = self._plan(self._model, layers, layers_of_all)
                self._take_names(layers_of_all, plan)
                self._observe(layers, plan, sections)
                self._count_products()
            except ObservationError:
                raise
            except Exception as error:
                self._failures.report("following", "the changed model", error)
            self._tree = ModuleTree(self._model)
            self._say_changed(before)
        elif self._hooks.unwatched and self._notices.first("unwatched"):
            logger.warning(
                "%s trains outside the model that the session was given, so nothing watches it. A module is found as"
                " an attribute of another module or in a torch.nn.ModuleList or ModuleDict, not in a plain list or"
                " dict. model= also takes several models.",
                ", ".join(sorted(f"{type(module).__name__} {module.name!r}" for module in self._hooks.unwatched)),
            )

    def _has_changed(self) -> bool:
        """Whether the model is another one, looked at as a whole only where something suggests it."""
        outside, self._known_outside = self._known_outside, len(self._hooks.unwatched)
        tree = self._tree
        if tree is None or not (tree.seems_changed() or self._known_outside != outside):
            return False
        return tree.changed()

    def holds(self, *modules: torch.nn.Module | None) -> bool:
        """Whether one of these is a module of the model, of Transformer Engine or not."""
        asked = {id(module) for module in modules}
        return any(id(module) in asked for _, root in named_roots(self._model) or () for module in root.modules())

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps a parameter of the model."""
        own = {id(parameter) for _, root in named_roots(self._model) or () for parameter in root.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def note_order(self) -> None:
        """Note in which order layers ran for the first time, if any has since the last call."""
        order = self._hooks.order
        if order.grown:
            order.grown = False
            forward, backward = order.forward, order.backward
            infos = [
                replace(info, exec_fwd=forward.get(info.name), exec_bwd=backward.get(info.name))
                for info in self._findings.layers.now
            ]
            self._findings.layers.put(self._inspector.iteration, infos)

    @property
    def _module_names(self) -> dict[int, str]:
        return module_names(self._model, by_number=self._by_number, scope=self._options.scope)

    @property
    def all_names(self) -> list[str]:
        """The names of all modules of this rank and of their layers."""
        return [*dict.fromkeys([*self._module_names.values(), *sorted(self.layer_names)])]

    @property
    def layers_of_other_ranks(self) -> list[Layer]:
        """The layers that other ranks alone have, where ranks reduce together."""
        return [layer for layer in self._layers_of_all if layer.name not in self.layer_names]

    def _count_products(self) -> None:
        """Count the matrix products of the next step."""
        self._hooks.count_products(self._model, self._module_names)

    def note_products(self) -> None:
        """Note the matrix products of the step, if they were counted."""
        outside = self._hooks.products.recomputed.outside
        found = self._hooks.products.end_step()
        if found is not None:
            self._say_recomputed(outside)
            products, state = found
            sections = {section.name: section for section in self._options.config.enabled_sections}
            overrides = {
                layer.name: backward_override(named.module) or "" for named in self.modules for layer in named.layers
            }
            facts = {
                info.name: LayerFacts(
                    kept_by_sections(sections[name] for name in info.sections),
                    overrides.get(info.name, ""),
                    info.name in outside,
                )
                for info in self._findings.layers.now
            }
            self._findings.coverage.put(self._inspector.iteration, products, facts, state)

    def _say_recomputed(self, layers: Collection[str]) -> None:
        """Warn of layers whose backward is not in low precision, though their forward is."""
        if layers and own_rank() == 0 and self._notices.first("recomputed"):
            named = [layer.name for module in self.modules for layer in module.layers if layer.name in layers]
            logger.warning(
                "Gradient checkpointing (use_reentrant=True) computes the forward of %d layer%s again outside of"
                " te.autocast: %s. Only the first forward runs in low precision; the backward does not. %s",
                len(named),
                "" if len(named) == 1 else "s",
                " and ".join(folded(named, most=2)),
                _FOR_TRAINER if self._front_door() == "transformers" else remedy(Reason.RECOMPUTED, ""),
            )

    def _say_changed(self, before: dict[int, str]) -> None:
        now = {id(module.module): module.name for module in self.modules}
        news = [f"{name} is new" for key, name in now.items() if key not in before]
        news += [f"{before[key]} is now {name}" for key, name in now.items() if before.get(key, name) != name]
        news += [f"{name} has left" for key, name in before.items() if key not in now and name not in now.values()]
        if news:
            logger.log(
                logging.WARNING if self._notices.first("changed") else logging.INFO,
                "The model has changed: %s. The session follows from iteration %d on; what ran before is not observed"
                " under these names.",
                ", ".join(news),
                self._inspector.iteration,
            )

    # ------------------------------------------------------------------ what Transformer Engine refuses

    def note_refusal(self, module: torch.nn.Module, refusal: DebugRefusal) -> None:
        """Note a forward that is left as it is."""
        names = {layer.name for named in self.modules if named.module is module for layer in named.layers}
        acting = [info.name for info in self._findings.layers.now if info.name in names and info.features]
        self._refused.note(acting, refusal)

    def say_refused(self) -> None:
        """Warn of the layers that are left as they are since the last call."""
        if self._refused.say(self._inspector.log):
            infos = [replace(info, refused=self._refused.why(info.name)) for info in self._findings.layers.now]
            self._findings.layers.put(self._inspector.iteration, infos)


def _layer_infos(
    layers: Sequence[Layer], plan: Plan, given_names: Mapping[str, str], refused: RefusedLayers
) -> tuple[LayerInfo, ...]:
    planned = {entry.layer.name: entry for entry in plan.layers}
    return tuple(
        LayerInfo(
            name=layer.name,
            module_class=layer.types[0],
            sections=planned[layer.name].sections if layer.name in planned else (),
            features=planned[layer.name].features if layer.name in planned else {},
            scope=layer.scope,
            given=given_names.get(layer.name, ""),
            refused=refused.why(layer.name),
        )
        for layer in layers
    )
