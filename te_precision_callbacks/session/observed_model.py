"""The model of a run: its named layers, and what the config does with each layer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from te_precision_callbacks.base.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.config.differences import FlatConfig, flat_config
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
from te_precision_callbacks.instrumentation.execution_order import ExecutionOrder
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.instrumentation.fused import NotFused, choose, paths_in_words
from te_precision_callbacks.instrumentation.refusals import DebugRefusal, RefusedLayers
from te_precision_callbacks.instrumentation.upstream import Inspector
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.layers.naming import Model, compiled_call, named_roots
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.overflow.hooks import watched_modules
from te_precision_callbacks.session.model_changes import ModelChanges
from te_precision_callbacks.session.named_layers import NamedLayers
from te_precision_callbacks.session.results import RunResults
from te_precision_callbacks.sinks.step_records import LayerInfo
from te_precision_callbacks.statistics.schedule import Schedule

logger = logging.getLogger(__name__)

_FOR_TRAINER = (
    "To change that, leave gradient_checkpointing out of the TrainingArguments, and before the training call"
    " model.gradient_checkpointing_enable() and model._set_gradient_checkpointing(gradient_checkpointing_func="
    "transformer_engine.pytorch.checkpoint). With use_reentrant=False alone torch raises a CheckpointError."
)
"""What makes a checkpoint of the Hugging Face Trainer compute again in low precision."""


class _Planned(NamedTuple):
    """What the config does with the layers of this rank.

    Attributes:
        plan: the features of each layer, without refused layers.
        sections: the features of all sections.
        fused: the modules that are observed on their fused path, as of :func:`choose`.
        not_fused: the other modules with features -> why not.
    """

    plan: Plan
    sections: list[NamespacedFeatures]
    fused: Mapping[int, tuple[Schedule, ...]]
    not_fused: Mapping[str, NotFused]


class ObservedModel:
    """Plans the config on the layers of a model, has the modules watched, and follows changes of the model.

    Args:
        options: the session's options.
        inspector: gets the names and the plan.
        hooks: get the modules.
        engine: gets the split of layers over ranks.
        results: get the facts about each layer.
        failures: get errors.
        notices: the messages that the run has logged once.
        front_door: what has started the session.

    Attributes:
        layers: the layers and their names.
        attached: whether there is a model.
        flat_config: the config with its registered features; empty before the attach.
        overrides: layer -> the features that can change the precision of its GEMMs, if it has any.
    """

    def __init__(
        self,
        options: SessionOptions,
        inspector: Inspector,
        hooks: ForwardHooks,
        engine: StatisticsEngine,
        results: RunResults,
        failures: ObservationFailures,
        notices: Notices,
        front_door: str,
    ) -> None:
        self.layers = NamedLayers(options)
        self.attached = False
        self.flat_config: FlatConfig = {}
        self.overrides: Mapping[str, tuple[str, ...]] = {}
        self._options = options
        self._inspector = inspector
        self._hooks = hooks
        self._engine = engine
        self._results = results
        results.not_measured = hooks.gemm_errors.not_measured
        self._failures = failures
        self._notices = notices
        self._front_door = front_door
        self._refused = RefusedLayers(strict=options.strict)
        self._changes = ModelChanges(hooks.answers.unwatched)
        self._model: Model = ()

    @property
    def model(self) -> Model:
        """The model that is watched; an empty sequence before the attach."""
        return self._model

    @property
    def unmeasured(self) -> str:
        """Why LogGemmError has measured nothing; empty if it has, or no GEMM of it was due."""
        return self._hooks.gemm_errors.why_nothing

    # ------------------------------------------------------------------ a model that is given

    def attach(self, model: Model, ranks: Ranks) -> None:
        """Name and watch a model, instead of the model that was watched before; on all ranks, inside of
        :meth:`Ranks.together`.

        Raises:
            ConfigError, SessionError: as in ``InspectSession.attach``.
        """
        options, inspector = self._options, self._inspector
        inspector.forget_names()
        self.layers.attach(model, ranks)
        planned = self._plan(model)
        sections = flat_config(options.config.enabled_sections, planned.sections)
        config = {"layer_names": repr(options.layer_names), **sections}
        agreed = {name: getattr(options, name) for name in ("strict", "debug", "require", "early_steps")}
        ranks.require_alike({**config, **{name: repr(value) for name, value in agreed.items()}}, inspector.iteration)
        self.flat_config = config
        watched = ACTIVATION_OVERFLOW in options.debug
        goes_on = "with activation overflow detection alone" if watched else "without precision debugging"
        for text in idle_in_words(options.config, planned.sections):
            logger.warning("%s", text)
        if not self.layers.of_all:
            logger.warning("%s", without_layers(goes_on, self._front_door))
        self._model = model
        self._observe(planned)
        self._changes.watch(model)
        self._count_products()
        self.attached = True

    def release(self) -> None:
        """No longer follow what is registered in modules."""
        self._changes.release()

    def _plan(self, model: Model) -> _Planned:
        """Plan the features of this rank's layers, and warn of ambiguous names."""
        config, registered, modules = self._options.config, self._inspector.registered, self.layers.modules
        plan = config.plan(
            self.layers.of_all,
            registered,
            allow_unmatched=self._options.allow_unmatched,
            layer_names=self._options.layer_names,
        )
        check_conditions(plan, config.enabled_sections, detects_overflow=ACTIVATION_OVERFLOW in self._options.debug)
        planned = {entry.layer: entry for entry in plan.layers}
        sections = [resolve_features(section, registered) for section in config.enabled_sections]
        effects = {section.name: tuple(section.effects.values()) for section in config.enabled_sections}
        own_plan = replace(plan, layers=tuple(planned[layer] for layer in self.layers.own if layer in planned))
        fused, not_fused = choose(self._options.observe, modules, own_plan, self._inspector.only_looks)
        stay = [key for key, changed in fused.items() if not changed]
        own_plan = self._refused.leave(own_plan, model, modules, effects, stay)
        refused = self._refused.modules
        left = {named.name for named in modules if id(named.module) in refused}
        not_fused = {name: why for name, why in not_fused.items() if name not in left}
        for text, what in ((alike_in_words(self.layers.of_all), "alike"), (plan.otherwise_upstream, "upstream")):
            if text and own_rank() == 0 and self._notices.first(what):
                logger.warning("%s", text)
        fused = {key: changed for key, changed in fused.items() if key not in refused}
        return _Planned(own_plan, sections, fused, not_fused)

    def _observe(self, planned: _Planned) -> None:
        """Name and watch this rank's modules; without a collective."""
        inspector, plan, modules = self._inspector, planned.plan, self.layers.modules
        infos = _layer_infos(self.layers, plan, self._refused, self._hooks.order)
        self._results.layers.put(inspector.iteration, infos)
        inspector.configure(plan.as_inspect_config(), self._options.config.name, planned.sections)
        overrides = {entry.layer.name: inspector.that_change_precision(entry.features) for entry in plan.layers}
        self.overrides = {layer: features for layer, features in overrides.items() if features}
        self._results.changes_precision |= bool(self.overrides)
        self._engine.placements = placements(modules, self._options.process_group)
        for module in modules:
            inspector.name_module(module.module, module.name)
            inspector.log(f"Assigned layer name: {module.name}")
        self._hooks.watch(modules, self._refused.modules, self.layers.operations, planned.fused)
        self.say_refused()
        if self._options.observe == "auto" and own_rank() == 0 and self._notices.first("observe"):
            logger.info('observe="auto": %s', paths_in_words(len(planned.fused), planned.not_fused))

    # ------------------------------------------------------------------ what changes in it

    def follow(self) -> None:
        """Watch modules that were added to the model since the last step, and warn of modules that train outside it.

        Runs no collective, since other ranks may have nothing new: sections that matched at the attach still match.
        """
        if self._changes.found():
            before = {id(module.module): module.name for module in self.layers.modules}
            try:
                self._inspector.forget_names()
                self.layers.follow(self._model)
                self._observe(self._plan(self._model))
                self._count_products()
            except ObservationError:
                raise
            except Exception as error:
                self._failures.report("following", "the changed model", error)
            self._changes.watch(self._model)
            self._say_changed(before)
        elif self._hooks.answers.unwatched and self._notices.first("unwatched"):
            logger.warning(
                "%s trains outside the model that the session was given, so nothing watches it. A module is found as"
                " an attribute of another module or in a torch.nn.ModuleList or ModuleDict, not in a plain list or"
                " dict. model= also takes several models.",
                ", ".join(
                    sorted(f"{type(module).__name__} {module.name!r}" for module in self._hooks.answers.unwatched)
                ),
            )

    @property
    def roots(self) -> list[torch.nn.Module]:
        """The models that were attached."""
        return [root for _, root in named_roots(self._model) or ()]

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules of the model into which hooks reach, by name; without the model itself."""
        names, roots = self.layers.paths(self._model), tuple(named_roots(self._model) or ())
        whole = {id(root) for _, root in roots}
        for _, module in watched_modules(roots):
            if id(module) in names and id(module) not in whole and compiled_call(module) is None:
                yield names[id(module)], module

    def holds(self, *modules: torch.nn.Module | None) -> bool:
        """Whether one of these is a module of the model, of Transformer Engine or not."""
        asked = {id(module) for module in modules}
        return any(id(module) in asked for _, root in named_roots(self._model) or () for module in root.modules())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the model."""
        return (parameter for root in self.roots for parameter in root.parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
        """The parameters of the model, each once, with the names of their modules before their own, and the modules."""
        names, seen = self.layers.paths(self._model), set[int]()
        for root in self.roots:
            for module in root.modules():
                for own, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        path = names.get(id(module), "")
                        yield f"{path}.{own}" if path else own, parameter, module

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps a parameter of the model."""
        own = set(map(id, self.parameters()))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def note_order(self) -> None:
        """Note in which order layers ran for the first time, if any has since the last call."""
        order = self._hooks.order
        if order.take_grown():
            infos = [
                replace(info, exec_fwd=order.forward.get(info.name), exec_bwd=order.backward.get(info.name))
                for info in self._results.layers.now
            ]
            self._results.layers.put(self._inspector.iteration, infos)

    @property
    def all_names(self) -> list[str]:
        """The names of all modules of this rank and of their layers."""
        return [*dict.fromkeys([*self.layers.paths(self._model).values(), *sorted(self.layers.names)])]

    def _count_products(self) -> None:
        """Count the matrix products of the model, from the next step on."""
        self._hooks.count_products(self._model, self.layers.paths(self._model))

    @property
    def enters_autocast(self) -> bool:
        """Whether a region of ``te.autocast(enabled=True)`` has been entered so far."""
        return self._hooks.has_enabled_regions

    def note_products(self) -> None:
        """Note the matrix products of the step."""
        outside = self._hooks.products.recomputed_outside
        step = self._hooks.products.end_step()
        if step is None:
            return
        self._say_recomputed(outside)
        self._results.coverage.put(self._inspector.iteration, step, lambda: self._layer_facts(outside))
        if step.has_backward:
            self._results.audit.note_backward()

    def _layer_facts(self, recomputed_outside: Collection[str]) -> Mapping[str, LayerFacts]:
        """The facts that say why GEMMs of layers are not in low precision."""
        sections = {section.name: section for section in self._options.config.enabled_sections}
        overrides = {
            layer.name: backward_override(named.module) or "" for named in self.layers.modules for layer in named.layers
        }
        return {
            info.name: LayerFacts(
                kept_by_sections(sections[name] for name in info.sections),
                overrides.get(info.name, ""),
                info.name in recomputed_outside,
            )
            for info in self._results.layers.now
        }

    def _say_recomputed(self, layers: Collection[str]) -> None:
        """Warn of layers whose backward is not in low precision, though their forward is."""
        if layers and own_rank() == 0 and self._notices.first("recomputed"):
            named = [layer.name for module in self.layers.modules for layer in module.layers if layer.name in layers]
            logger.warning(
                "Gradient checkpointing (use_reentrant=True) computes the forward of %d layer%s again outside of"
                " te.autocast: %s. Only the first forward runs in low precision; the backward does not. %s",
                len(named),
                "" if len(named) == 1 else "s",
                in_sentence(*named, most=2),
                _FOR_TRAINER if self._front_door == "transformers" else remedy(Reason.RECOMPUTED, ""),
            )

    def _say_changed(self, before: dict[int, str]) -> None:
        now = {id(module.module): module.name for module in self.layers.modules}
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
        names = {layer.name for named in self.layers.modules if named.module is module for layer in named.layers}
        acting = [info.name for info in self._results.layers.now if info.name in names and info.features]
        self._refused.note(acting, refusal)

    def say_refused(self) -> None:
        """Warn of the layers that are left as they are since the last call."""
        if self._refused.say(self._inspector.log):
            infos = [replace(info, refused=self._refused.why(info.name)) for info in self._results.layers.now]
            self._results.layers.put(self._inspector.iteration, infos)


def _layer_infos(
    layers: NamedLayers, plan: Plan, refused: RefusedLayers, order: ExecutionOrder
) -> tuple[LayerInfo, ...]:
    planned = {entry.layer.name: entry for entry in plan.layers}
    return tuple(
        LayerInfo(
            name=layer.name,
            module_class=layer.types[0],
            sections=planned[layer.name].sections if layer.name in planned else (),
            features=planned[layer.name].features if layer.name in planned else {},
            scope=layer.scope,
            given=layers.given.get(layer.name, ""),
            refused=refused.why(layer.name),
            exec_fwd=order.forward.get(layer.name),
            exec_bwd=order.backward.get(layer.name),
        )
        for layer in layers.own
    )
