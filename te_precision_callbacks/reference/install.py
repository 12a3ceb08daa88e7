"""Installs the reference backend in this process; the functions of ``te_precision_callbacks.reference``."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass

from te_precision_callbacks.reference import compiled_extension, target
from te_precision_callbacks.reference.compiled_extension import COMPILED_MODULE
from te_precision_callbacks.reference.errors import InstallError
from te_precision_callbacks.reference.inherited import Inherited, environment, install_if_pending

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Installation:
    """Settings of the installed reference backend.

    Attributes:
        capability: the emulated compute capability.
        pretend_cuda: whether "cuda" means the CPU in the whole process.
        device: the default device of Transformer Engine's tensors: ``"cpu"``, or ``"cuda"`` if there is a GPU.
    """

    capability: tuple[int, int]
    pretend_cuda: bool
    device: str


_installed: Installation | None = None


def installed() -> Installation | None:
    """Return the settings of the reference backend in this process; None if it is not installed."""
    install_if_pending()
    return _installed


def is_installed() -> bool:
    """Return whether the reference backend is installed in this process."""
    return installed() is not None


def install(
    pretend_cuda: bool = False, capability: tuple[int, int] | None = None, *, always_in_children: bool = False
) -> Installation:
    """Let Transformer Engine run without its compiled extension, until the process ends.

    Call this before the first import of ``transformer_engine``. Child processes install the backend when they import
    torch or Transformer Engine; with a GPU and a compiled Transformer Engine they use these, with a warning. A second
    call does nothing.

    Args:
        pretend_cuda: False: only Transformer Engine's modules and the debug features see a GPU; your code, your tensors
            and torch are unchanged. True: "cuda" means the CPU everywhere in the process, for scripts and tests that
            were written for a GPU.
        capability: the compute capability to emulate: (9, 0), the default, or (10, 0). None takes it from the
            environment variable ``TE_PRECISION_REFERENCE_CAPABILITY``, if it is set.
        always_in_children: child processes install the backend in any case.

    Raises:
        TransformerEngineVersionError: Transformer Engine 2.20.x is not installed.
        InstallError: Transformer Engine, or its extension, is already imported; the backend is installed with other
            arguments; ``pretend_cuda`` with a real GPU; an unknown capability.
    """
    global _installed
    if (former := installed()) is not None:
        _refuse_others(former, pretend_cuda, capability)
        if always_in_children:
            os.environ.update(environment(Inherited(former.pretend_cuda, former.capability, always=True)))
        return former
    chosen = target.capability() if capability is None else target.validate(capability)
    _refuse_if_imported()
    version = compiled_extension.checked_version()
    import torch

    has_gpu = torch.cuda.is_available()
    if pretend_cuda and has_gpu:
        raise InstallError(
            f"install(pretend_cuda=True), but there is a real GPU ({torch.cuda.get_device_name()}). The reference"
            " backend works on it: call install() without pretend_cuda. To use the CPU, set CUDA_VISIBLE_DEVICES to"
            " an empty string."
        )
    target.choose(chosen)
    from te_precision_callbacks.reference.importer import Finder, rewrite_executed_features

    sys.meta_path.insert(0, Finder(cuda_on_cpu=not has_gpu))
    if (executor := sys.modules.get("nvdlfw_inspect.utils")) is not None:
        rewrite_executed_features(executor, cuda_on_cpu=not has_gpu)
    if pretend_cuda:
        from te_precision_callbacks.reference import pretend

        pretend.make_cuda_mean_cpu()
    os.environ.update(environment(Inherited(pretend_cuda, chosen, always_in_children)))
    _installed = Installation(chosen, pretend_cuda, "cuda" if has_gpu else "cpu")
    logger.info(
        "Transformer Engine %s runs on the reference backend of te-precision-callbacks, slowly but exactly, on the"
        " device %r, emulating compute capability %d.%d%s.",
        version,
        _installed.device,
        *chosen,
        '; "cuda" means the CPU in this process' if pretend_cuda else "",
    )
    return _installed


def install_where_needed(capability: tuple[int, int] | None = None) -> Installation | None:
    """Call :func:`install`, unless there is a GPU and the compiled Transformer Engine can be imported.

    Returns:
        The settings of the installed backend; None if the compiled Transformer Engine is used.
    """
    import torch

    if _installed is None and COMPILED_MODULE in sys.modules:
        return None
    if _installed is None and torch.cuda.is_available() and compiled_extension.why_unavailable() is None:
        return None
    return install(capability=capability)


def _refuse_others(former: Installation, pretend_cuda: bool, capability: tuple[int, int] | None) -> None:
    if (pretend_cuda and not former.pretend_cuda) or capability not in (None, former.capability):
        raise InstallError(
            f"install(pretend_cuda={pretend_cuda}, capability={capability}), but the reference backend is already"
            f" installed with pretend_cuda={former.pretend_cuda} and capability={former.capability}. Use the same"
            " arguments, or another process."
        )


def _refuse_if_imported() -> None:
    if COMPILED_MODULE in sys.modules:
        where = getattr(sys.modules[COMPILED_MODULE], "__file__", None)
        raise InstallError(
            f"Transformer Engine's compiled extension {COMPILED_MODULE!r} is already imported from {where}. Call"
            " reference.install() before importing transformer_engine, or continue without the reference backend."
        )
    if "transformer_engine" in sys.modules or "transformer_engine.common" in sys.modules:
        raise InstallError(
            "transformer_engine is already imported without the reference backend. Call reference.install() before"
            " the first import of transformer_engine, also by other packages."
        )
