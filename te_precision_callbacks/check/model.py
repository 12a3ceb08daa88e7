"""Plans a config on a model without running it: what each matrix product will run in, and what does not fit.

checked = check_model(model, load_config("config.yaml"), recipe="fp8_current_scaling", tokens=4096)
print(checked.coverage)                            # FP8 in 91.4 % of the multiply-adds (fprop 94.2, ...); ...
for finding in checked.findings:
    print(finding.kind, finding.text)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from te_precision_callbacks.check.recipes import AUTO, NONE, recipe_named
from te_precision_callbacks.config import Config, ConfigError, Plan, Section
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.dumping import check_conditions
from te_precision_callbacks.config.effects import NAMESPACE, Effect
from te_precision_callbacks.config.keys import Scheduled
from te_precision_callbacks.config.known import known_features
from te_precision_callbacks.config.levels import ObservingFeature
from te_precision_callbacks.errors import OptionError
from te_precision_callbacks.folding import folded
from te_precision_callbacks.gemm_shapes import SCALING_OF_RECIPE, refusals
from te_precision_callbacks.naming import Model, NamedModule, named_operations, named_te_modules
from te_precision_callbacks.records.coverage import Coverage
from te_precision_callbacks.session.planned import plan_products
from te_precision_callbacks.session.precision import recipe_text
from te_precision_callbacks.session.refusals import RefusedLayers
from te_precision_callbacks.session.shapes import layer_features
from te_precision_callbacks.vocabulary import GemmName, class_names

FindingKind = Literal["config", "unmatched", "refused", "recipe", "shape", "high_precision"]

_ANY_MULTIPLE = 1 << 10
"""A number of tokens that no GEMM refuses."""

_MOST_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """Something that does not fit.

    Attributes:
        kind: ``config``, a problem of the config; ``unmatched``, a selector without a layer; ``refused``, layers on
            which no feature can act; ``recipe``, what a recipe or a feature refuses; ``shape``, sizes with which a GEMM
            does not run; ``high_precision``, nothing runs in low precision.
        text: the finding in words, with the layers' names in short.
        layers: the layers, if it is about some.
    """

    kind: FindingKind
    text: str
    layers: tuple[str, ...] = ()


class ActingFeature(NamedTuple):
    """A feature that acts on a layer.

    Attributes:
        feature: its name, as in the config.
        section: the section of the config.
        on: the tensors or GEMMs that it is for; empty for all.
        steps: the steps in which it acts, such as ``every step``.
    """

    feature: str
    section: str
    on: str
    steps: str

    def __str__(self) -> str:
        return f"{self.section}: {self.feature}{f' of {self.on}' if self.on else ''}, {self.steps}"


@dataclass(frozen=True)
class CheckedModel:
    """The plan of a config on a model.

    Attributes:
        coverage: the planned matrix products of a step, with ``runs="planned"``.
        recipe: the recipe, as in :data:`~te_precision_callbacks.vocabulary.RECIPES`; empty for none.
        tokens: the tokens of a step on this rank; None if they were not given: multiply-adds are then for one token.
        layers: the number of layers of Transformer Engine that a config can select.
        features: layer -> the features that act on it.
        findings: what does not fit.
        notes: what may not be meant, and is no error.
        not_counted: modules with a weight of which no product could be planned.
    """

    coverage: Coverage
    recipe: str
    tokens: int | None
    layers: int
    features: Mapping[str, tuple[ActingFeature, ...]]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    not_counted: tuple[str, ...]


def check_model(model: Model, config: Config, *, recipe: Any = AUTO, tokens: int | None = None) -> CheckedModel:
    """Plan a training step of a model, without running it. Nothing of the model changes.

    Args:
        model: the model, on any device, also on ``meta``.
        config: the config.
        recipe: ``auto``, Transformer Engine's default recipe for the GPU; ``none``; one of
            :data:`~te_precision_callbacks.vocabulary.RECIPES`; or one of Transformer Engine's recipe objects.
        tokens: the tokens of a step on this rank: all dimensions of the input but the last, multiplied.

    Raises:
        RecipeError: as in :func:`~te_precision_callbacks.check.recipes.recipe_named`.
        OptionError: ``tokens`` is not positive.
    """
    if tokens is not None and tokens < 1:
        raise OptionError(f"tokens={tokens} must be 1 or more: the tokens of a step on one rank.")
    made = recipe_named(recipe) if isinstance(recipe, str) else recipe
    return _Check(model, config, made, tokens, is_wanted=recipe != NONE).checked()


class _Check:
    """Arguments are those of :func:`check_model`.

    Args:
        is_wanted: whether low precision is.
    """

    def __init__(self, model: Model, config: Config, recipe: Any, tokens: int | None, *, is_wanted: bool) -> None:
        self._model, self._config, self._recipe, self._tokens = model, config, recipe, tokens
        self._is_wanted = is_wanted and recipe is not None
        self._modules = named_te_modules(model, config.layer_names or "path")
        self._sections = {section.name: section for section in config.enabled_sections}
        self._findings: list[Finding] = []
        self._notes: list[str] = []

    def checked(self) -> CheckedModel:
        plan = self._plan()
        acting = {entry.layer.name: [self._sections[name] for name in entry.sections] for entry in plan.layers}
        features: dict[tuple[str, ...], tuple[ActingFeature, ...]] = {}
        for entry in plan.layers:
            if entry.sections not in features:
                features[entry.sections] = tuple(_features(acting[entry.layer.name]))
        products = plan_products(self._model, self._modules, acting, self._recipe, tokens=self._tokens or 1)
        self._check_recipe(acting)
        self._check_shapes(products.coverage)
        if self._is_wanted and not any(product.is_low for product in products.coverage):
            why = (
                "the model has no layer of Transformer Engine" if not self._modules else "see the plan for the reasons"
            )
            self._findings.append(Finding("high_precision", f"Nothing runs in low precision: {why}."))
        return CheckedModel(
            products.coverage,
            recipe_text(self._recipe),
            self._tokens,
            sum(len(named.layers) for named in self._modules),
            {entry.layer.name: features[entry.sections] for entry in plan.layers},
            tuple(self._findings),
            tuple(self._notes),
            products.not_counted,
        )

    def _plan(self) -> Plan:
        """The plan without the layers that Transformer Engine's debug path refuses."""
        layers = [layer for named in self._modules for layer in named.layers]
        draft = self._config.draft(layers, known_features())
        self._findings += [Finding("config", text) for text in draft.wrong.texts]
        self._findings += [Finding("unmatched", text) for text in draft.missing.texts]
        self._notes += draft.idle.texts
        if draft.plan.otherwise_upstream:
            self._notes.append(draft.plan.otherwise_upstream)
        try:
            check_conditions(draft.plan, self._config.enabled_sections, detects_overflow=True)
        except ConfigError as error:
            self._findings += [Finding("config", text) for text in error.problems]
        refused = RefusedLayers(strict=False)
        effects = {name: tuple(section.effects.values()) for name, section in self._sections.items()}
        plan = refused.leave(draft.plan, self._model, self._modules, effects)
        kept = {entry.layer.name for entry in plan.layers}
        left = (entry.layer.name for entry in draft.plan.layers if entry.layer.name not in kept)
        for why, names in _by_key((refused.why(name), name) for name in left).items():
            text = f"No feature can act on {_named(names)}, since Transformer Engine's debug path refuses: {why}."
            self._findings.append(Finding("refused", text, tuple(names)))
        return plan

    def _check_recipe(self, acting: Mapping[str, Sequence[Section]]) -> None:
        """Find features that need another recipe, and modules that refuse this one."""
        own = recipe_text(self._recipe)
        needing = (
            ((section.place(NAMESPACE, feature), feature, effect.needs_recipe), layer)
            for layer, sections in acting.items()
            for section in sections
            for feature, effect in section.effects.items()
            if effect.needs_recipe not in ("", own)
        )
        for (place, feature, needed), names in _by_key(needing).items():
            text = f"{place}: {feature} on {_named(names)} needs the recipe {needed}, and fails under {own or 'none'}."
            self._findings.append(Finding("recipe", text, tuple(names)))
        override = getattr(self._recipe, "backward_override", None)
        if override:
            # pytorch/module/layernorm_mlp.py of Transformer Engine 2.20.2, _LayerNormMLP.forward
            found = [named.name for named in self._modules if "LayerNormMLP" in class_names(named.module)]
            if found:
                text = f"LayerNormMLP refuses a recipe with backward_override={override!r}: {_named(found)}."
                self._findings.append(Finding("recipe", text, tuple(found)))

    def _check_shapes(self, coverage: Coverage) -> None:
        """Find the sizes with which a GEMM in low precision does not run."""
        recipe = recipe_text(self._recipe)
        if recipe not in SCALING_OF_RECIPE:
            return
        low = _by_key((product.layer, product.gemm) for product in coverage if product.is_low)
        refused: list[tuple[tuple[str, ...], str]] = []
        for layer, sizes, dtype_bytes, asserted, is_shared in _layer_shapes(self._model, self._modules):
            texts = _refused(
                recipe,
                sizes,
                None if is_shared else self._tokens,
                low.get(layer, ()),
                result_bytes=dtype_bytes,
                asserted=asserted,
            )
            if texts:
                refused.append((texts, layer))
        for texts, names in _by_key(refused).items():
            self._findings.append(Finding("shape", f"{_named(names)}: {'; '.join(texts)}.", tuple(names)))


def _layer_shapes(
    model: Model, modules: Sequence[NamedModule]
) -> Iterator[tuple[str, tuple[int, int], int, bool, bool]]:
    """Of each layer in_features and out_features, the bytes of an element, whether the layer checks its operands, and
    whether it shares the tokens with others."""
    for named in modules:
        shared = hasattr(named.module, "num_gemms")
        size = next(p.dtype.itemsize for p in named.module.parameters(recurse=False) if p.ndim > 1)
        for layer, sizes in zip(named.layers, layer_features(named.module), strict=True):
            yield layer.name, sizes, size, not shared, shared
    for operation in named_operations(model):
        module: Any = operation.module
        size = next(module.parameters(recurse=False)).dtype.itemsize
        for name in operation.layers:
            yield name, (module.in_features, module.out_features), size, False, len(operation.layers) > 1


def _refused(
    recipe: str,
    sizes: tuple[int, int],
    tokens: int | None,
    gemms: Sequence[GemmName],
    *,
    result_bytes: int,
    asserted: bool,
) -> tuple[str, ...]:
    from transformer_engine.pytorch.utils import get_device_compute_capability

    found = refusals(
        recipe,
        get_device_compute_capability(),
        tokens=tokens or _ANY_MULTIPLE,
        in_features=sizes[0],
        out_features=sizes[1],
        gemms=gemms,
        result_bytes=result_bytes,
        asserted=asserted,
    )
    return tuple(map(str, found))


def _features(sections: Iterable[Section]) -> Iterator[ActingFeature]:
    """The features of a layer's sections, one for each schedule."""
    for section in sections:
        for name, options in section.features.get(NAMESPACE, {}).items():
            if not options.get("enabled"):
                continue
            schema = options.schema if isinstance(options, ReadOptions) else None
            if isinstance(schema, ObservingFeature):
                due = [(str(_schedule(target.options)), str(target.tensor)) for target in schema.targets]
                for steps, tensors in _by_key(due).items():
                    yield ActingFeature(name, section.name, ", ".join(tensors), steps)
            elif schema is not None:
                yield ActingFeature(name, section.name, _on(section.effects[name]), "every step")
            else:
                yield ActingFeature(name, section.name, "", "a feature of your own, of which the plan knows nothing")


def _schedule(options: Any) -> object:
    return options.schedule if isinstance(options, Scheduled) else "every step"


def _on(effect: Effect) -> str:
    """The GEMMs, with the tensors that are replaced: ``fprop (activation, weight), dgrad``."""
    replaced = _by_key(effect.modifies)
    gemms = dict.fromkeys((*effect.high_precision, *replaced))
    return ", ".join(f"{gemm} ({', '.join(replaced[gemm])})" if gemm in replaced else gemm for gemm in gemms)


def _named(names: Iterable[str]) -> str:
    return ", ".join(folded(names, most=_MOST_NAMED))


def _by_key(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
