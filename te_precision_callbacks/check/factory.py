"""Builds a model or a batch from ``package.module:function``; a model without memory for its weights, if possible.

The function takes no arguments. It is called on the meta device first, and on the CPU if it raises there.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.config.problems import nearest, shortened, shown


class ModelFactoryError(PrecisionDebugError):
    """The function of ``--model`` does not exist, fails, or does not return a model."""


class BatchError(PrecisionDebugError):
    """The function of ``--batch`` does not exist, fails, or does not return arguments for a model's forward."""


class _Wanted(NamedTuple):
    what: str
    returns: str
    error: type[PrecisionDebugError]

    @property
    def spelling(self) -> str:
        return f"Write package.module:function; the function takes no arguments and returns {self.returns}."


_MODEL = _Wanted("model", "a torch.nn.Module", ModelFactoryError)
_BATCH = _Wanted(
    "batch", "a tensor, a mapping of keywords, or a tuple of positional arguments for the model's forward", BatchError
)


def build_model(spec: str, *, on_meta: bool = True) -> tuple[torch.nn.Module, str]:
    """Return the model that a function makes, and its device, ``meta`` or ``cpu``. Output of the function goes to
    stderr.

    Raises:
        ModelFactoryError: the function does not exist, needs arguments or a GPU, raises, or does not return a module.
    """
    with _as_from_here():
        factory = _found(spec, _MODEL)
        if on_meta:
            try:
                with meta_device():
                    return _module(factory(), spec), "meta"
            except ModelFactoryError:
                raise
            except (Exception, SystemExit):
                pass  # many models cannot be made there: the CPU shows whether it is the function's own mistake
        return _module(_called(factory, spec, _MODEL), spec), "cpu"


def build_batch(spec: str) -> Any:
    """Return the batch that a function makes; raises BatchError as :func:`build_model` does its own error."""
    with _as_from_here():
        made = _called(_found(spec, _BATCH), spec, _BATCH)
    require_batch(made, f"{shown(spec)} has returned ")
    return made


def require_batch(batch: object, start: str = "") -> None:
    if isinstance(batch, (torch.Tensor, Mapping, tuple)):
        return
    text = f"{start}{shown(batch)}, which is no batch. A batch is {_BATCH.returns}."
    if isinstance(batch, list):
        text += " Write a tuple in place of the list: its values are the arguments."
    raise BatchError(text)


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    with torch.device("meta"), _OnMeta():
        yield


class _OnMeta(TorchFunctionMode):
    """Makes tensors on the meta device even if another device is given, as Transformer Engine does."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if keywords.get("device") is not None:
            keywords["device"] = "meta"
        return function(*arguments, **keywords)


@contextlib.contextmanager
def _as_from_here() -> Iterator[None]:
    """Let imports find the current folder, and keep stdout for the command's own output."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = before


def _called(factory: Callable[[], object], spec: str, wanted: _Wanted) -> object:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise wanted.error(_failed_factory(f"{shown(spec)} failed", error, wanted)) from error


def _found(spec: str, wanted: _Wanted) -> Callable[[], object]:
    module_name, colon, name = spec.partition(":")
    if not (colon and name and all(part.isidentifier() for part in module_name.split("."))):
        raise wanted.error(f"{shown(spec)} names no function. {wanted.spelling}")
    try:
        module: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise wanted.error(_failed_factory(f"{module_name!r} cannot be imported", error, wanted)) from error
        files = (file.removesuffix(".py") for file in os.listdir() if file.endswith(".py"))
        raise wanted.error(
            f"There is no module {missing!r}, neither in the current folder nor in the environment."
            f"{_meant(nearest(missing, files))} {wanted.spelling}"
        ) from None
    try:
        factory: Any = operator.attrgetter(name)(module)
    except AttributeError:
        own = [f"{module_name}:{key}" for key in nearest(name, (key for key in vars(module) if key[0] != "_"))]
        raise wanted.error(f"{module_name!r} has no function {name!r}.{_meant(own)} {wanted.spelling}") from None
    if isinstance(factory, (torch.nn.Module, torch.Tensor)):
        raise wanted.error(f"{shown(spec)} is a {wanted.what}, which has been made already. {wanted.spelling}")
    if not callable(factory):
        raise wanted.error(f"{shown(spec)} is no function, but {shown(factory)}. {wanted.spelling}")
    return factory  # type: ignore[no-any-return]


def _meant(close: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _module(made: object, spec: str) -> torch.nn.Module:
    if isinstance(made, torch.nn.Module):
        return made
    hint = " Return an instance of it." if isinstance(made, type) and issubclass(made, torch.nn.Module) else ""
    raise ModelFactoryError(f"{shown(spec)} has returned {shown(made)}, which is no torch.nn.Module.{hint}")


def _failed_factory(what: str, error: BaseException, wanted: _Wanted) -> str:
    text, place = failed(what, error), _place(error)
    if isinstance(error, TypeError) and "argument" in str(error) and not place:
        return f"{text} {wanted.spelling}"
    if any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA driver")):
        return (
            f"{text} It asks for a GPU, and there is none. Make the {wanted.what} without .cuda() and without a device,"
            " which the training script can choose afterwards."
        )
    return text


def failed(what: str, error: BaseException) -> str:
    """A message with the exception, and the line of the user's own code that raised it."""
    text, place = f"{what}: {type(error).__name__}: {shortened(str(error))}", _place(error)
    return f"{text} ({place})." if place else f"{text}."


def _place(error: BaseException) -> str:
    others = (os.path.dirname(os.path.dirname(__file__)), sys.prefix, sys.base_prefix, "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    frames = [frame for frame in frames if "site-packages" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
