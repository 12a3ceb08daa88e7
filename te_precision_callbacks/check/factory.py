"""Builds a model from ``package.module:function``, and Transformer Engine's recipes by name.

The function takes no arguments. A model is built on the meta device, without memory for weights, or else on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.suggestions import shorten, shown, suggestion
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.reference import is_installed, target


class ModelFactoryError(PrecisionDebugError):
    """The function of ``--model`` does not exist, fails, or does not return a model."""


class _Expected(NamedTuple):
    returns: str
    error: type[PrecisionDebugError]
    arguments: str = "without arguments"

    @property
    def spelling(self) -> str:
        return f"Give package.module:function, a function {self.arguments} that returns {self.returns}."


_MODEL = _Expected("a torch.nn.Module", ModelFactoryError)

_SETUP = _Expected("a mapping with model, closure, batches, and optimizer to confirm", ModelFactoryError)


def build_model(spec: str) -> tuple[torch.nn.Module, str]:
    """Call a user's function that builds a model; returns the model and its device, ``meta`` or ``cpu``.

    Output of the function goes to stderr.

    Raises:
        ModelFactoryError: the function does not exist, needs arguments or a GPU, raises, or does not return a module.
    """
    with _like_a_script():
        factory = _call(functools.partial(pkgutil.resolve_name, spec), spec, _MODEL)
        # Many models cannot be built on meta; a mistake in the function raises again on the CPU.
        with contextlib.suppress(Exception, SystemExit), torch.device("meta"), _OnMeta():
            return _module(factory(), spec), "meta"
        return _module(_call(factory, spec, _MODEL), spec), "cpu"


def build_setup(spec: str) -> Mapping[str, Any]:
    """Call a user's function that returns the arguments of a search; raises a ModelFactoryError."""
    with _like_a_script():
        setup = _call(_call(functools.partial(pkgutil.resolve_name, spec), spec, _SETUP), spec, _SETUP)
    if not isinstance(setup, Mapping):
        raise ModelFactoryError(f"{shown(spec)} has returned {shown(setup)}. {_SETUP.spelling}")
    missing = {"model", "closure", "batches"} - set(setup)
    unknown = set(setup) - {"model", "closure", "batches", "optimizer"}
    if missing or unknown:
        lacks = f"lacks {', '.join(sorted(missing))}" if missing else f"has unknown keys: {', '.join(sorted(unknown))}"
        raise ModelFactoryError(f"The mapping of {shown(spec)} {lacks}. {_SETUP.spelling}")
    return setup


class _OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device even if the caller requests another one, like Transformer Engine's modules."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if keywords.get("device") is not None:
            keywords["device"] = "meta"
        return function(*arguments, **keywords)


@contextlib.contextmanager
def _like_a_script() -> Iterator[None]:
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = path


def _call(function: Callable[[], Any], spec: str, expected: _Expected) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise expected.error(f"{format_failure(f'{shown(spec)} failed', error)} {expected.spelling}") from error


def _module(returned: object, spec: str) -> torch.nn.Module:
    if isinstance(returned, torch.nn.Module):
        return returned
    raise ModelFactoryError(f"{shown(spec)} has returned {shown(returned)}. {_MODEL.spelling}")


def format_failure(what: str, error: BaseException) -> str:
    """Format an exception, with the last line of the user's code in its traceback."""
    text = f"{what}: {type(error).__name__}: {shorten(str(error))}"
    location = _place(error)
    if location:
        return f"{text} ({location})."
    return f"{text}."


def _place(error: BaseException) -> str:
    other_folders = (os.path.dirname(os.path.dirname(__file__)), sys.prefix, sys.base_prefix, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(other_folders) and "site-packages" not in frame.filename:
            return f"{frame.filename}, line {frame.lineno}: {frame.line}"
    return ""


AUTO = "auto"
NONE = "none"

CHOICES = (AUTO, NONE, *RECIPES)


class RecipeError(PrecisionDebugError, ValueError):
    """A recipe is unknown, its factory fails, or the GPU does not support it."""


_FACTORY = _Expected("a quantizer, or an IdentityQuantizer for high precision", RecipeError, "of a QuantizerRole")


def recipe_by_name(name: str) -> Any:
    """Create a recipe with Transformer Engine's defaults, including environment variables such as
    NVTE_BACKWARD_OVERRIDE.

    Args:
        name: ``auto``, Transformer Engine's default for the GPU; ``none``, for None; one of RECIPES; or
            ``package.module:function``, the factory of a custom recipe's quantizers.

    Raises:
        RecipeError: the recipe is unknown, Transformer Engine refuses it on this GPU, or an environment variable is
            invalid.
    """
    if ":" in name:
        return _custom_recipe(name)
    if name not in CHOICES:
        raise RecipeError(f"There is no recipe {name!r}.{suggestion(name, CHOICES)}")
    if name == NONE:
        return None
    from te_precision_callbacks.te import recipes

    try:
        recipe = recipes.default_recipe() if name == AUTO else recipes.recipe_of_name(name)
    except (AssertionError, ValueError) as error:
        details = str(error)
        if hasattr(error, "errors"):  # pydantic's ValidationError, if it is installed
            details = error.errors()[0]["msg"]
        raise RecipeError(f"Transformer Engine cannot run the recipe {name!r}: {details}") from error
    why = recipes.why_unsupported(recipe)
    if why is not None:
        if is_installed() and target.capability() != target.ALLOWED[-1]:
            best = "{}.{}".format(*target.ALLOWED[-1])
            why += f" {target.ENVIRONMENT_VARIABLE}={best} in the environment lets the reference backend emulate"
            why += " another GPU."
        raise RecipeError(f"Transformer Engine cannot run the recipe {name!r}: {why}")
    return recipe


def _custom_recipe(spec: str) -> Any:
    from te_precision_callbacks.te.recipes import CustomRecipe

    with _like_a_script():
        factory = _call(functools.partial(pkgutil.resolve_name, spec), spec, _FACTORY)

    def quantizer(role: Any) -> Any:
        recipe = _call(functools.partial(factory, role), spec, _FACTORY)
        if recipe is None:
            raise RecipeError(f"{shown(spec)} has returned None for {role}. {_FACTORY.spelling}")
        return recipe

    return CustomRecipe(qfactory=quantizer)
