"""Set up a process of the tests."""

import functools
from pathlib import Path
from types import CodeType

import torch
import typer.testing

from te_precision_callbacks import reference
from te_precision_callbacks.reference.importer import RewritingLoader


def prepare() -> None:
    """Install the reference backend if there is no GPU; let torch compute in one thread."""
    if not torch.cuda.is_available():
        reference.install()
    torch.set_num_threads(1)
    keep_bytecode()
    # Making the commands from their functions takes longer than many of them run.
    typer.testing._get_command = functools.cache(typer.testing._get_command)


def keep_bytecode() -> None:
    """Every session executes all feature files; the bytecode of each is read once."""
    read = RewritingLoader.get_code
    kept: dict[tuple[str, bool, int], CodeType | None] = {}

    def get_code(loader: RewritingLoader, fullname: str) -> CodeType | None:
        if "features" not in Path(loader.path).parts:
            return read(loader, fullname)
        key = loader.path, loader.cuda_on_cpu, loader.path_stats(loader.path)["mtime"]
        if key not in kept:
            kept[key] = read(loader, fullname)
        return kept[key]

    RewritingLoader.get_code = get_code  # type: ignore[method-assign]
