"""Builds a model from the name of a function, without a GPU and without memory for its weights where that works.

    model, device = build_model("package.module:factory")     # device: "meta" or "cpu"

The function takes no arguments and returns a ``torch.nn.Module``. It is called on the meta device first, where tensors
have shapes and no values; if it raises there, it is called once more on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from te_precision_callbacks.config.problems import nearest, shortened, shown
from te_precision_callbacks.errors import PrecisionDebugError

_SPELLING = "Write package.module:function; the function takes no arguments and returns a torch.nn.Module."


class ModelFactoryError(PrecisionDebugError):
    """The function of ``--model`` cannot be found, fails, or returns something else than a model."""


def build_model(spec: str) -> tuple[torch.nn.Module, str]:
    """The model that a function makes, and the device that it was made on.

    Modules are found as ``python -m`` finds them, in the current folder too. What the function prints goes to stderr.

    Args:
        spec: ``package.module:function``.

    Raises:
        ModelFactoryError: there is no such function, it needs arguments or a GPU, raises, or returns no module.
    """
    with _as_from_here():
        factory = _found(spec)
        try:
            with torch.device("meta"), _OnMeta():
                return _module(factory(), spec), "meta"
        except ModelFactoryError:
            raise
        except (Exception, SystemExit):
            pass  # many models cannot be made there: the CPU tells whether it is the function's own mistake
        try:
            return _module(factory(), spec), "cpu"
        except ModelFactoryError:
            raise
        except (Exception, SystemExit) as error:
            raise ModelFactoryError(_failed(f"{shown(spec)} failed", error)) from error


class _OnMeta(TorchFunctionMode):
    """Puts tensors on the meta device, also those that are made for a device by name, as Transformer Engine's are."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if keywords.get("device") is not None:
            keywords["device"] = "meta"
        return function(*arguments, **keywords)


@contextlib.contextmanager
def _as_from_here() -> Iterator[None]:
    """Let imports find the current folder, and keep stdout for the answer."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = before


def _found(spec: str) -> Callable[[], object]:
    module_name, colon, name = spec.partition(":")
    if not (colon and name and all(part.isidentifier() for part in module_name.split("."))):
        raise ModelFactoryError(f"{shown(spec)} names no function. {_SPELLING}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ModelFactoryError(_failed(f"{module_name!r} cannot be imported", error)) from error
        raise ModelFactoryError(
            f"There is no module {error.name!r}, neither in the current folder nor in the environment."
            f"{_meant(error.name, _modules_here())} {_SPELLING}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ModelFactoryError(_failed(f"{module_name!r} cannot be imported", error)) from error
    for part in name.split("."):
        if not hasattr(found, part):
            callables = [each for each in dir(found) if not each.startswith("_") and callable(getattr(found, each))]
            raise ModelFactoryError(f"{module_name!r} has no function {part!r}.{_meant(part, callables)} {_SPELLING}")
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module):
        raise ModelFactoryError(f"{shown(spec)} is a model, which has been made already. {_SPELLING}")
    if not callable(found):
        raise ModelFactoryError(f"{shown(spec)} is no function, but {shown(found)}. {_SPELLING}")
    return found  # type: ignore[no-any-return]


def _modules_here() -> list[str]:
    return [name.removesuffix(".py") for name in os.listdir() if name.endswith(".py")]


def _meant(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _module(made: object, spec: str) -> torch.nn.Module:
    if isinstance(made, torch.nn.Module):
        return made
    hint = " Return an instance of it." if isinstance(made, type) and issubclass(made, torch.nn.Module) else ""
    raise ModelFactoryError(f"{shown(spec)} has returned {shown(made)}, which is no torch.nn.Module.{hint}")


def _failed(what: str, error: BaseException) -> str:
    """What has failed, the exception, and the line that raised it."""
    text = f"{what}: {type(error).__name__}: {shortened(str(error))}"
    place = _place(error)
    text += f" ({place})." if place else "."
    if isinstance(error, TypeError) and "argument" in str(error) and not place:
        return f"{text} {_SPELLING}"
    if any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA driver")):
        return (
            f"{text} It asks for a GPU, and there is none. Make the model without .cuda() and without a device, which"
            " the training script can choose afterwards."
        )
    return text


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception comes from: its file, number and text."""
    others = (os.path.dirname(os.path.dirname(__file__)), sys.prefix, sys.base_prefix, "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    frames = [frame for frame in frames if "site-packages" not in frame.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
