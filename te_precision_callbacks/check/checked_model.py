"""Plans a config on a model without running it: the precision of each matrix product, and problems."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.base.garbage import without_collections
from te_precision_callbacks.base.vocabulary import GEMMS, RECIPES, Observe, class_names
from te_precision_callbacks.check.factory import AUTO, NONE, recipe_by_name
from te_precision_callbacks.config import Config, ConfigError, Plan
from te_precision_callbacks.config.contract import Contract, ContractSource
from te_precision_callbacks.config.effects import NAMESPACE, spans_of
from te_precision_callbacks.config.levels import ObservingFeatureSchema
from te_precision_callbacks.config.loading import notes_of
from te_precision_callbacks.config.planning import Section, draft
from te_precision_callbacks.config.schemas import LogGemmError, known_features
from te_precision_callbacks.config.steps import with_early_steps
from te_precision_callbacks.coverage.contract_keeper import broken_clauses, require_layers
from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.coverage.formats import recipe_text
from te_precision_callbacks.coverage.planned_products import PlannedProducts, plan_products
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.instrumentation.fused import choose, format_paths
from te_precision_callbacks.instrumentation.recipe_arguments import ignored_arguments
from te_precision_callbacks.instrumentation.refusals import RefusedLayers
from te_precision_callbacks.layers.naming import (
    Model,
    module_names,
    modules_of,
    modules_with_gemms,
    named_operations,
    named_te_modules,
)
from te_precision_callbacks.maps.comparing import read_requirements
from te_precision_callbacks.maps.precision_map import join_names
from te_precision_callbacks.options import check_value
from te_precision_callbacks.session.model import no_layers_warning
from te_precision_callbacks.statistics.schedule import EVERY_STEP
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.gemm_shapes import refusals
from te_precision_callbacks.te.state import enters_autocast

FindingKind = Literal["config", "unmatched", "refused", "recipe", "shape", "high_precision", "rule", "contract", "same"]

_ANY_MULTIPLE = 1 << 10
"""A number of tokens that no GEMM refuses."""


@dataclass(frozen=True)
class PlanFinding:
    """A problem of a plan.

    Attributes:
        kind: ``config``, a problem of the config; ``unmatched``, a selector without a layer; ``refused``, layers that
            no feature can act on; ``recipe``, a recipe that does not fit; ``shape``, unsupported sizes of a GEMM;
            ``high_precision``, nothing runs in low precision; ``rule``, a finding of a rule; ``contract``, a contract
            that the plan breaks; ``same``, a difference from ``--same-as``.
        text: the message, with abbreviated names of layers.
        layers: the affected layers.
    """

    kind: FindingKind
    text: str
    layers: tuple[str, ...] = ()


def findings_of(kind: FindingKind, texts: Iterable[str]) -> list[PlanFinding]:
    return [PlanFinding(kind, text) for text in texts]


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
        tokens: the tokens of a step on this rank; if None, multiply-adds are for one token.
        layers: the number of layers of Transformer Engine that a config can select.
        features: layer -> the features that act on it.
        findings: problems.
        notes: possible mistakes that are not errors.
        unknown: what is not known before the run, such as the kernel of attention.
        undecided: the clauses of the contract that depend on something unknown.
        not_counted: modules with a weight but without a planned product.
        attention: the modules of attention, which are not planned.
        spans: steps with a different set of GEMMs in high precision -> their products.
    """

    coverage: Coverage
    recipe: str
    tokens: int | None
    layers: int
    features: Mapping[str, tuple[ActingFeature, ...]]
    findings: tuple[PlanFinding, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    undecided: tuple[str, ...]
    not_counted: tuple[str, ...]
    attention: tuple[str, ...] = ()
    spans: Mapping[str, Coverage] = field(default_factory=dict)


@without_collections()
def check_model(
    model: Model,
    config: Config,
    *,
    recipe: Any = AUTO,
    tokens: int | None = None,
    require: ContractSource = None,
    observe: Observe = "auto",
    allow_unmatched: bool = False,
) -> CheckedModel:
    """Plan a training step of a model, without running it or changing it.

    Args:
        model: on any device, also on ``meta``.
        recipe: ``auto``, Transformer Engine's default recipe for the GPU; ``none``; one of
            :data:`~te_precision_callbacks.base.vocabulary.RECIPES`; or one of Transformer Engine's recipe objects.
        tokens: the tokens of a step on this rank: all dimensions of the input but the last, multiplied.
        require: a contract, as for an integration. A broken clause is a finding. A clause that depends on something
            unknown is in ``undecided`` instead.
        observe: the path of observed layers, as for an integration.
        allow_unmatched: a section that matches no layer is a note, not a finding.

    Raises:
        ConfigError: ``require`` is not a contract, or has a pattern that matches no layer.
        RecipeError: the recipe is unknown, or the GPU does not support it.
        OptionError: ``tokens`` is not positive; ``observe`` is not a valid path.
    """
    if tokens is not None and tokens < 1:
        raise OptionError(f"tokens={tokens} must be 1 or more: the tokens of a step on one rank.")
    check_value("observe", observe)
    used_recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    contract = read_requirements(require)
    is_wanted = recipe != NONE and used_recipe is not None
    return _Check(
        model, with_early_steps(config), used_recipe, tokens, contract, observe, is_wanted, allow_unmatched
    ).check()


@dataclass
class _Check:
    """See :func:`check_model` for the fields.

    Attributes:
        is_wanted: whether low precision is expected.
    """

    _model: Model
    _config: Config
    _recipe: Any
    _tokens: int | None
    _contract: Contract | None
    _observe: Observe
    _is_wanted: bool
    _allow_unmatched: bool
    _findings: list[PlanFinding] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._modules = named_te_modules(self._model, self._config.layer_names or "path")
        self._layers = list(itertools.chain(*(named.layers for named in self._modules)))
        self._operations = named_operations(self._model)
        names = module_names(self._model)
        self._regions = [  # a ``forward`` names Transformer Engine and ``autocast``
            names[id(module)]
            for module in modules_of(self._model)
            if id(module) in names and enters_autocast(type(module).forward)
        ]
        self._sections = {section.name: section for section in self._config.enabled_sections}

    def check(self) -> CheckedModel:
        acting = {
            entry.layer.name: [self._sections[name] for name in entry.sections]
            for entry in self._plan().layers
            if any(entry.features.values())
        }
        features = {layer: tuple(_features(sections)) for layer, sections in acting.items()}
        effects = itertools.chain.from_iterable(section.effects.values() for section in self._sections.values())
        (_, first_step), *later = spans_of(effects).items()
        products = self._products(acting, first_step)
        coverage_of = {steps: self._products(acting, step).coverage for steps, step in later}
        self._findings += self._recipe_problems(acting)
        self._findings += self._shape_problems(products.coverage)
        if self._is_wanted:
            self._apply_rules(products.coverage)
            if not any(product.is_low for product in products.coverage):
                why = "the model has no Transformer Engine layer"
                if any(product.family in ("te", "te_ops") for product in products.coverage):
                    why = "see the reasons in the plan"
                self._findings.append(PlanFinding("high_precision", f"Nothing runs in low precision: {why}."))
        unknown = self._unknown(products)
        undecided: tuple[str, ...] = ()
        if self._contract is not None:
            undecided = self._check_contract(self._contract, products, coverage_of, is_known=not unknown)
        if products.attention:
            unknown.append(f"attention of {join_names(products.attention)}: its kernel, formats and multiply-adds")
        unknown.append("which layers the forward calls, with which shapes, and matrix products outside of modules")
        return CheckedModel(
            products.coverage,
            recipe_text(self._recipe),
            self._tokens,
            len(self._layers),
            features,
            tuple(self._findings),
            tuple(self._notes),
            tuple(unknown),
            undecided,
            products.not_counted,
            products.attention,
            coverage_of,
        )

    def _unknown(self, products: PlannedProducts) -> list[str]:
        """Return messages about matrix products with a weight that are not known."""
        unknown = []
        if products.not_counted:
            unknown.append(f"the matrix products of {join_names(products.not_counted)}")
        experts = [named.names for named in self._modules if te_modules.of(named.module).groups]
        if experts:
            names = join_names(itertools.chain.from_iterable(experts))
            unknown.append(f"the tokens of each expert ({names}); the plan assumes equal numbers")
        if self._regions:
            names = join_names(self._regions)
            unknown.append(f"the recipe inside {names}, whose forward may enter te.autocast itself")
        is_pretrained = any("PreTrainedModel" in class_names(module) for module in modules_of(self._model))
        if is_pretrained and not self._layers:
            unknown.append(
                "the layers after Accelerate's conversion for FP8. To plan them, let the function return"
                " te_precision_callbacks.accelerate.convert_to_te(model)"
            )
        return unknown

    def _check_contract(
        self, contract: Contract, products: PlannedProducts, spans: Mapping[str, Coverage], *, is_known: bool
    ) -> tuple[str, ...]:
        """Add a finding for each broken clause, and return the clauses that cannot be checked."""
        require_layers(contract, {product.layer for product in products.coverage})
        undecided = []
        shares = {}
        for key, share in contract.share.items():
            if is_known and (share.part in GEMMS or not products.attention):
                shares[key] = share
            else:
                undecided.append(str(share))
        layers = contract.layers
        if self._regions:
            undecided += [f"{pattern}: {precision}" for pattern, precision in layers.items()]
            layers = {}
        undecided += [f"{subject}: {dtype}" for subject, dtype in contract.state.items()]
        contract = contract.model_copy(update={"share": shares, "layers": layers})
        texts = broken_clauses(contract, products.coverage)
        for steps, coverage in spans.items():
            texts += [f"In {steps}: {text}" for text in broken_clauses(contract, coverage)]
        self._findings += findings_of("contract", texts)
        if contract.same_as is not None:
            self._findings += findings_of("same", contract.same_as.broken(products.coverage, "the plan"))
        return tuple(undecided)

    def _products(self, acting: Mapping[str, Sequence[Section]], iteration: int) -> PlannedProducts:
        sections = {}
        for name, section in self._sections.items():
            effects = {feature: effect.at(iteration) for feature, effect in section.effects.items()}
            sections[name] = replace(section, effects=effects)
        acting_now = {
            layer: [sections[section.name] for section in layer_sections] for layer, layer_sections in acting.items()
        }
        return plan_products(
            self._model,
            self._modules,
            self._operations,
            acting_now,
            self._recipe,
            tokens=self._tokens or 1,
        )

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
        self._findings += findings_of("config", drafted.wrong)
        if self._allow_unmatched:
            self._notes += drafted.missing
        else:
            self._findings += findings_of("unmatched", drafted.missing)
        self._notes += drafted.idle
        self._notes += notes_of(config)
        if not self._layers:
            self._notes.append(no_layers_warning("without precision debugging"))
        refused = RefusedLayers(strict=False)
        effects = {name: tuple(section.effects.values()) for name, section in self._sections.items()}
        plan = refused.leave(drafted.plan, self._model, self._modules, effects, self._on_fused_path(drafted.plan))
        planned_names = {entry.layer.name for entry in plan.layers}
        names_left = [entry.layer.name for entry in drafted.plan.layers if entry.layer.name not in planned_names]
        for why, names in group_by_key((refused.why(name), name) for name in names_left).items():
            text = (
                f"No feature can act on {join_names(names)}, because Transformer Engine's debug path does not support"
                f" them: {why}."
            )
            self._findings.append(PlanFinding("refused", text, tuple(names)))
        return plan

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

    def _recipe_problems(self, acting: Mapping[str, Sequence[Section]]) -> Iterator[PlanFinding]:
        """Yield the features that need another recipe, and layers that raise in their first forward with this one."""
        name = recipe_text(self._recipe)
        needing = []
        for layer, sections in acting.items():
            for section in sections:
                for feature, effect in section.effects.items():
                    if effect.needs_recipe not in ("", name):
                        needing.append(((section.place(NAMESPACE, feature), feature, effect.needs_recipe), layer))
        for (where, feature, needed), names in group_by_key(needing).items():
            text = (
                f"{where}: {feature} on {join_names(names)} needs the recipe {needed}, and fails with {name or 'none'}."
            )
            yield PlanFinding("recipe", text, tuple(names))
        # Read from Transformer Engine 2.20.2: pytorch/module/linear.py and grouped_linear.py.
        saving: list[str] = []
        for named in self._modules if name == "fp8_delayed_scaling" else ():
            trains = any(weight.requires_grad and weight.ndim > 1 for weight in named.module.parameters())
            if trains and getattr(named.module, "save_original_input", False):
                saving += named.names
        if saving:
            text = (
                f"{join_names(saving)}: Transformer Engine refuses save_original_input=True with delayed scaling. Set"
                " it to False, or use Float8CurrentScaling."
            )
            yield PlanFinding("recipe", text, tuple(saving))

    def _shape_problems(self, coverage: Coverage) -> Iterator[PlanFinding]:
        """Yield sizes and dtypes that GEMMs in low precision do not support.

        Tokens are not checked if unknown, nor for experts, since a router decides their share of the tokens.
        """
        from te_precision_callbacks.te.recipes import compute_capability

        name = recipe_text(self._recipe)
        if name not in RECIPES:
            return
        low = group_by_key((product.layer, product.gemm) for product in coverage if product.is_low)
        refused: list[tuple[tuple[str, ...], str]] = []
        by_hadamard: list[str] = []
        capability = compute_capability()
        for named in modules_with_gemms(self._modules, self._operations):
            row = te_modules.of(named.module)
            dtype = next(p.dtype for p in named.module.parameters(recurse=False) if p.ndim > 1)
            for layer, (in_features, out_features) in zip(named.names, row.features(named.module), strict=True):
                gemms = tuple(gemm for gemm in GEMMS if gemm in low.get(layer, ()))
                problems = refusals(
                    name,
                    capability,
                    tokens=_ANY_MULTIPLE if self._tokens is None or row.groups else self._tokens,
                    in_features=in_features,
                    out_features=out_features,
                    gemms=gemms,
                    result_bytes=dtype.itemsize,
                    asserted=row.checks_operands,
                )
                if problems:
                    refused.append((tuple(map(str, problems)), layer))
                if name == "nvfp4" and "wgrad" in gemms and dtype != torch.bfloat16:
                    by_hadamard.append(layer)
        for texts, names in group_by_key(refused).items():
            yield PlanFinding("shape", f"{join_names(names)}: {'; '.join(texts)}.", tuple(names))
        if by_hadamard and not self._recipe.disable_rht:
            # common/hadamard_transform/*.cu of Transformer Engine 2.20.2
            text = (
                f"NVFP4's random Hadamard transform needs bfloat16, but the weights of {join_names(by_hadamard)} have"
                " another dtype. Convert them to bfloat16, or set disable_rht=True in the recipe."
            )
            yield PlanFinding("recipe", text, tuple(by_hadamard))


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
            if isinstance(schema, (ObservingFeatureSchema, LogGemmError)):
                pairs = [(str(getattr(t.options, "schedule", EVERY_STEP)), t.tensor or t.gemm) for t in schema.targets]
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
