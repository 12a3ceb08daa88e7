"""Plans a config on a model without running it: the precision of each matrix product, and problems."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.garbage import without_collections
from te_precision_callbacks.base.vocabulary import Observe, class_names
from te_precision_callbacks.check.dry_run import dry_run, modules_with_regions
from te_precision_callbacks.check.factory import AUTO, NONE, recipe_by_name
from te_precision_callbacks.check.findings import (
    PlanFinding,
    find_recipe_problems,
    find_refused_options,
    find_shape_problems,
    findings_of,
    join_names,
    region_note,
    unsized_finding,
    unsized_shares,
)
from te_precision_callbacks.config import Config, ConfigError, Plan
from te_precision_callbacks.config.contract import Contract, ContractSource
from te_precision_callbacks.config.dumping import check_conditions
from te_precision_callbacks.config.effects import NAMESPACE, spans_of
from te_precision_callbacks.config.levels import ObservingFeatureSchema
from te_precision_callbacks.config.loading import notes_of
from te_precision_callbacks.config.planning import Section, draft
from te_precision_callbacks.config.schemas import LogGemmError, known_features
from te_precision_callbacks.config.steps import with_early_steps
from te_precision_callbacks.coverage.contract_keeper import broken_clauses, require_layers
from te_precision_callbacks.coverage.coverage import Coverage, Reason
from te_precision_callbacks.coverage.planned_products import PlannedProducts, Ran, plan_products
from te_precision_callbacks.coverage.precision_audit import recipe_text
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.instrumentation.fused import choose, format_paths
from te_precision_callbacks.instrumentation.recipe_arguments import ignored_arguments
from te_precision_callbacks.instrumentation.refusals import RefusedLayers
from te_precision_callbacks.layers.folding import fold_for_sentence
from te_precision_callbacks.layers.naming import (
    Model,
    modules_of,
    named_operations,
    named_te_modules,
)
from te_precision_callbacks.maps.comparing import read_requirements
from te_precision_callbacks.options import check_value
from te_precision_callbacks.session.model import no_layers_warning
from te_precision_callbacks.speed.memory import Memory, plan_memory
from te_precision_callbacks.statistics.schedule import EVERY_STEP


class ActingFeature(NamedTuple):
    """A feature that acts on a layer.

    ``on``: the tensors or GEMMs; empty for all. ``steps``: text, such as ``every step``.
    """

    feature: str
    section: str
    on: str
    steps: str

    def __str__(self) -> str:
        text = f"{self.section}: {self.feature}"
        if self.on:
            text += f" of {self.on}"
        return f"{text}, {self.steps}"


@dataclass(frozen=True)
class CheckedModel:
    """The plan of a config on a model.

    Attributes:
        coverage: the planned matrix products of a step, with ``runs="planned"``.
        recipe: its name; empty without a recipe.
        tokens: the tokens of a step on this rank; if None, multiply-adds are for the batch, or else for one token.
        layers: the number of layers of Transformer Engine that a config can select.
        features: layer -> the features that act on it.
        findings: problems.
        notes: possible mistakes that are not errors.
        not_counted: modules with a weight but without a planned product.
        not_reached: with a batch, layers and modules that the forward does not call.
        memory: the planned memory, if requested.
        attention: without a batch, the modules of attention, which are not planned.
        spans: steps with a different set of GEMMs in high precision -> their products.
    """

    coverage: Coverage
    recipe: str
    tokens: int | None
    layers: int
    features: Mapping[str, tuple[ActingFeature, ...]]
    findings: tuple[PlanFinding, ...]
    notes: tuple[str, ...]
    not_counted: tuple[str, ...]
    not_reached: tuple[str, ...] = ()
    memory: Memory | None = None
    attention: tuple[str, ...] = ()
    spans: Mapping[str, Coverage] = field(default_factory=dict)


@without_collections()
def check_model(
    model: Model,
    config: Config,
    *,
    recipe: Any = AUTO,
    tokens: int | None = None,
    batch: Any = None,
    require: ContractSource = None,
    observe: Observe = "auto",
    unconverted: Mapping[str, str] | None = None,
    allow_unmatched: bool = False,
    memory: bool = False,
) -> CheckedModel:
    """Plan a training step of a model, without running it or changing it.

    With a batch, forward and backward are called once, on the model's device, for the sizes of all products. Layers of
    Transformer Engine do not quantize in this dry run. On ``meta`` nothing is computed.

    Args:
        model: on any device, also on ``meta``.
        recipe: ``auto``, Transformer Engine's default recipe for the GPU; ``none``; one of
            :data:`~te_precision_callbacks.base.vocabulary.RECIPES`; or one of Transformer Engine's recipe objects.
        tokens: the tokens of a step on this rank: all dimensions of the input but the last, multiplied.
        batch: the arguments of the model's forward, instead of ``tokens``: a tensor, a mapping of keyword arguments, or
            a tuple of positional arguments. Tensors are copied to the model's device.
        require: a contract, as for an integration. A clause that is broken, or cannot be checked, is a finding.
        observe: the path of observed layers, as for an integration.
        unconverted: for a model converted by Accelerate, the skipped layers with reasons, from
            ``te_precision_callbacks.accelerate.unconverted_layers(model)``.
        allow_unmatched: a section that matches no layer is a note, not a finding.
        memory: whether to plan memory too; ``tokens`` then refers to one forward.

    Raises:
        ConfigError: ``require`` is not a contract, or has a pattern that matches no layer.
        RecipeError: the recipe is unknown, or the GPU does not support it.
        OptionError: ``tokens`` is not positive, or given with a batch; ``observe`` is not a valid path.
        BatchError: the forward or backward fails with ``batch``.
    """
    if tokens is not None:
        _require_positive(tokens, batch)
    check_value("observe", observe)
    is_wanted = recipe != NONE
    if isinstance(recipe, str):
        recipe = recipe_by_name(recipe)
    contract = read_requirements(require)
    checked = _Check(
        model,
        with_early_steps(config),
        recipe,
        tokens,
        batch,
        observe,
        unconverted,
        is_wanted=is_wanted,
        allow_unmatched=allow_unmatched,
        memory=memory,
    ).check()
    if contract is None:
        return checked
    with_regions: Sequence[str] = ()
    if batch is None and recipe is not None:
        with_regions = modules_with_regions(model)
    return _with_broken_clauses(checked, contract, with_regions)


def _require_positive(tokens: int, batch: Any) -> None:
    if batch is not None:
        raise OptionError(
            "tokens= and batch= cannot be combined: a batch already sets the tokens of each layer. Give one of the two."
        )
    if tokens < 1:
        raise OptionError(f"tokens={tokens} must be 1 or more: the tokens of a step on one rank.")


def _with_broken_clauses(checked: CheckedModel, contract: Contract, with_regions: Sequence[str]) -> CheckedModel:
    require_layers(contract, {product.layer for product in checked.coverage})
    findings, checkable = unsized_shares(
        contract, checked.coverage, checked.not_counted, checked.attention, with_regions
    )
    texts = broken_clauses(checkable, checked.coverage)
    for steps, coverage in checked.spans.items():
        texts += [f"In {steps}: {text}" for text in broken_clauses(checkable, coverage)]
    findings += findings_of("contract", texts)
    if contract.same_as is not None:
        findings += findings_of("same", contract.same_as.broken(checked.coverage, "the plan"))
    return replace(checked, findings=(*checked.findings, *findings))


class _Check:
    """See :func:`check_model` for the arguments.

    Args:
        is_wanted: whether low precision is expected.
    """

    def __init__(
        self,
        model: Model,
        config: Config,
        recipe: Any,
        tokens: int | None,
        batch: Any,
        observe: Observe,
        unconverted: Mapping[str, str] | None,
        *,
        is_wanted: bool,
        allow_unmatched: bool,
        memory: bool,
    ) -> None:
        self._model = model
        self._config = config
        self._recipe = recipe
        self._tokens = tokens
        self._batch = batch
        self._observe = observe
        self._unconverted = unconverted
        self._allow_unmatched = allow_unmatched
        self._memory = memory
        self._is_wanted = is_wanted and recipe is not None
        self._modules = named_te_modules(model, config.layer_names or "path")
        self._layers = list(itertools.chain(*(named.layers for named in self._modules)))
        self._operations = named_operations(model)
        self._sections = {section.name: section for section in config.enabled_sections}
        self._findings: list[PlanFinding] = []
        self._notes: list[str] = []

    def check(self) -> CheckedModel:
        acting: dict[str, list[Section]] = {}
        features: dict[str, tuple[ActingFeature, ...]] = {}
        of_sections = functools.cache(lambda names: tuple(_features(map(self._sections.__getitem__, names))))
        for entry in self._plan().layers:
            if any(entry.features.values()):
                acting[entry.layer.name] = [self._sections[name] for name in entry.sections]
                features[entry.layer.name] = of_sections(entry.sections)
        ran = None
        tokens_of = None
        recipes = dict.fromkeys((layer.name for layer in self._layers), self._recipe)
        if self._batch is not None:
            ran = dry_run(self._model, self._modules, self._batch, self._recipe)
            tokens_of = ran.tokens
            recipes |= ran.recipes
        effects = itertools.chain.from_iterable(section.effects.values() for section in self._sections.values())
        (_, first_step), *later = spans_of(effects).items()
        products = self._products(acting, first_step, ran)
        coverage_of = {steps: self._products(acting, step, ran).coverage for steps, step in later}
        self._findings += find_recipe_problems(self._recipe, acting)
        self._findings += find_refused_options(recipes, self._modules)
        self._note_regions(ran)
        self._findings += find_shape_problems(
            self._recipe,
            self._modules,
            self._operations,
            products.coverage,
            tokens=self._tokens,
            tokens_of=tokens_of,
        )
        if self._is_wanted:
            self._apply_rules(products.coverage)
        if products.attention and products.coverage.macs():
            self._notes.append(
                "The shares do not include the two attention products, which depend on sequence lengths:"
                f" {fold_for_sentence(*products.attention, most=2)}. To include them, give --batch (batch= in Python)"
                " instead of the number of tokens."
            )
        if products.not_counted:
            self._findings.append(unsized_finding(products.not_counted))
        if self._is_wanted:
            self._require_low_precision(products.coverage)
        return CheckedModel(
            products.coverage,
            recipe_text(self._recipe),
            self._tokens,
            len(self._layers),
            features,
            tuple(self._findings),
            tuple(self._notes),
            products.not_counted,
            products.not_reached,
            self._planned_memory(products.coverage, ran),
            products.attention,
            coverage_of,
        )

    def _note_regions(self, ran: Ran | None) -> None:
        if ran is not None and ran.enters_region:
            self._notes.append("The model enters te.autocast itself, so the plan assumes no region around it.")
        elif ran is None and self._is_wanted and (with_regions := modules_with_regions(self._model)):
            self._notes.append(
                f"The plan assumes one region of te.autocast around the model: {region_note(with_regions)}."
            )

    def _require_low_precision(self, coverage: Coverage) -> None:
        if any(product.is_low for product in coverage):
            return
        why = "the model has no Transformer Engine layer"
        if any(product.family in ("te", "te_ops") for product in coverage):
            why = "see the reasons in the plan"
        self._findings.append(PlanFinding("high_precision", f"Nothing runs in low precision: {why}."))

    def _products(self, acting: Mapping[str, Sequence[Section]], iteration: int, ran: Ran | None) -> PlannedProducts:
        sections = {}
        for name, section in self._sections.items():
            effects = {feature: effect.at(iteration) for feature, effect in section.effects.items()}
            sections[name] = replace(section, effects=effects)
        acting_now: dict[str, list[Section]] = {}
        for layer, of_layer in acting.items():
            for section in of_layer:
                acting_now.setdefault(layer, []).append(sections[section.name])
        return plan_products(
            self._model,
            self._modules,
            self._operations,
            acting_now,
            self._recipe,
            tokens=self._tokens or 1,
            ran=ran,
            unconverted=self._unconverted,
        )

    def _planned_memory(self, coverage: Coverage, ran: Ran | None) -> Memory | None:
        if not self._memory:
            return None
        low = {product.layer for product in coverage if product.is_low}
        high: dict[str, None] = {}
        mixed: dict[str, None] = {}
        for product in coverage:
            if product.layer not in low:
                high[product.layer] = None
            elif product.reason is Reason.SECTION:
                mixed[product.layer] = None
        recipes: dict[str, Any] = {}
        calls = None
        if ran is not None:
            recipes |= ran.recipes
            calls = {p.layer: [p.n] * p.calls for p in ran.products if p.gemm == "fprop"} | ran.tokens
        recipes |= high
        planned = plan_memory(
            self._model,
            self._modules,
            self._recipe,
            tokens=self._tokens,
            recipes=recipes,
            calls=calls,
        )
        if not mixed:
            return planned
        note = (
            "The plan ignores the features that keep some GEMMs of these layers in high precision:"
            f" {join_names(mixed)}."
        )
        return replace(planned, notes=(*planned.notes, note))

    def _apply_rules(self, coverage: Coverage) -> None:
        facts = Facts.from_plan(coverage, recipe_text(self._recipe), ignored_arguments([self._recipe]))
        for finding in Diagnosis().set_facts(facts, 0):
            text = f"{finding.subject}: {finding.seen}. {finding.remedy} ({finding.rule})."
            if finding.severity == "note":
                self._notes.append(text)
            else:
                self._findings.append(PlanFinding("rule", text, finding.layers))

    def _plan(self) -> Plan:
        config = self._config
        drafted = draft(
            config.enabled_sections,
            self._layers,
            known_features(),
            layer_names=config.layer_names,
        )
        self._findings += findings_of("config", drafted.wrong.texts)
        if self._allow_unmatched:
            self._notes += drafted.missing.texts
        else:
            self._findings += findings_of("unmatched", drafted.missing.texts)
        self._notes += drafted.idle.texts
        self._notes += notes_of(config)
        self._notes += filter(None, [self._without_layers()])
        try:
            check_conditions(drafted.plan, self._config.enabled_sections, detects_overflow=True)
        except ConfigError as error:
            self._findings += findings_of("config", error.problems)
        refused = RefusedLayers(strict=False)
        effects = {name: tuple(section.effects.values()) for name, section in self._sections.items()}
        plan = refused.leave(drafted.plan, self._model, self._modules, effects, self._on_fused_path(drafted.plan))
        kept = {entry.layer.name for entry in plan.layers}
        reasons: dict[str, list[str]] = {}
        for entry in drafted.plan.layers:
            name = entry.layer.name
            if name not in kept:
                reasons.setdefault(refused.why(name), []).append(name)
        for why, names in reasons.items():
            text = (
                f"No feature can act on {join_names(names)}, because Transformer Engine's debug path does not support"
                f" them: {why}."
            )
            self._findings.append(PlanFinding("refused", text, tuple(names)))
        return plan

    def _without_layers(self) -> str:
        if self._layers:
            return ""
        text = no_layers_warning("without precision debugging")
        is_pretrained = any("PreTrainedModel" in class_names(module) for module in modules_of(self._model))
        if self._unconverted is None and is_pretrained:
            text += (
                " Accelerate converts Linear layers to Transformer Engine for FP8 training: plan this with"
                " te-precision check --convert accelerate."
            )
        return text

    def _on_fused_path(self, plan: Plan) -> list[int]:
        try:
            fused, not_fused = choose(self._observe, self._modules, plan)
        except ConfigError as error:
            self._findings.append(PlanFinding("refused", str(error)))
            fused = choose("auto", self._modules, plan)[0]
            not_fused = {}
        if not_fused:
            self._notes.append(f'observe="{self._observe}": {format_paths(len(fused), not_fused)}')
        return [key for key, changed in fused.items() if not changed]


def _features(sections: Iterable[Section]) -> Iterator[ActingFeature]:
    for section in sections:
        for name, options in section.features.get(NAMESPACE, {}).items():
            if not options.get("enabled"):
                continue
            schema = getattr(options, "schema", None)
            if schema is None:
                yield ActingFeature(name, section.name, "", "your own feature, which the plan cannot analyze")
                continue
            pairs: list[tuple[str, object]] = []
            if isinstance(schema, ObservingFeatureSchema):
                pairs = [(str(getattr(t.options, "schedule", EVERY_STEP)), t.tensor) for t in schema.targets]
            elif isinstance(schema, LogGemmError):
                pairs = [(str(target.options.schedule), target.gemm) for target in schema.targets]
            else:
                effect = section.effects[name]
                modified = group_by_key(effect.modifies)
                for gemm in effect.gemms:
                    text: str = gemm
                    if gemm in modified:
                        text += f" ({', '.join(modified[gemm])})"
                    pairs.append((effect.format_steps(gemm), text))
            for steps, parts in group_by_key(pairs).items():
                yield ActingFeature(name, section.name, ", ".join(map(str, parts)), steps)
