"""Writes a choice: the config of the debug features, a module with a ``CustomRecipe``, and Megatron's precision file.

Each is read back, the config and Megatron's file by the code of ``te-precision check`` and ``te-precision map``. The
page shows the search.
"""

from __future__ import annotations

import glob
import inspect
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.check.checked_model import check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.diagnosis.patches import keep_high
from te_precision_callbacks.search.results import SearchResult
from te_precision_callbacks.search.units import Choice, SearchError, Units
from te_precision_callbacks.te import custom_recipe
from te_precision_callbacks.views.report.page import PageTemplate, write_bytes

_logger = logging.getLogger(__name__)

RECIPE = "precision_recipe.py"
PAGE = "search.html"

_HEAD = '''"""Precision by layer and GEMM, written by te-precision search. Needs Transformer Engine 2.20 only.

    import precision_recipe
    precision_recipe.assign_names(model)  # before the first forward
    with te.autocast(recipe=precision_recipe.recipe(low)):  # low: {recipe}
"""
'''


def write_files(
    folder: Path, choice: Choice, units: Units, model: torch.nn.Module, low: Any
) -> tuple[Callable[[Any], Any], list[str]]:
    """Write the config, the recipe and Megatron's file; returns the recipe, loaded from its file, and notes.

    The loaded module assigns the names of the model's modules.
    """
    write_config(folder / "config.yaml", choice, units, model, low)
    written = write_recipe(folder / RECIPE, choice, units, low)
    written["assign_names"](model)
    return written["recipe"], write_megatron(folder / "megatron.yaml", choice, units)


def write_config(path: Path, choice: Choice, units: Units, model: torch.nn.Module, low: Any) -> None:
    """Write the debug features, and check that the plan of the model has the choice."""
    high = units.high(choice)
    all_layers = set(itertools.chain(*units.layers.values()))
    in_high: set[tuple[str, str]] = set()
    sections = []
    for gemms, names in group_by_key((gemms, name) for name, gemms in high.items() if gemms).items():
        layers = [layer for name in names for layer in units.layers[name]]
        in_high.update(itertools.product(layers, gemms))
        low_layers = all_layers.difference(layers)
        sections.append(keep_high(*layers, other_layers=low_layers, gemms=() if gemms == GEMMS else gemms))
    path.write_text("".join(sections) or "{}\n")
    planned = _plan(path, model, low)
    wrong = [
        " ".join(switch)
        for switch, was_low in _plan({}, model, low).items()
        if switch[0] in all_layers and planned[switch] != (was_low and switch not in in_high)
    ]
    if wrong:
        raise SearchError(f"{path} does not express the choice for {', '.join(wrong[:4])}. Use {RECIPE} instead.")


def _plan(config: Any, model: torch.nn.Module, low: Any) -> dict[tuple[str, str], bool]:
    """Return layer and GEMM -> whether it is planned in low precision."""
    coverage = check_model(model, load_config(config), recipe=low).coverage
    return {(product.layer, product.gemm): product.is_low for product in coverage}


def write_recipe(path: Path, choice: Choice, units: Units, low: Any) -> Any:
    """Write the module of the recipe; returns it, loaded from the file."""
    code = inspect.getsource(custom_recipe)
    code = code[code.index("from __future__") :]
    table = "".join(f"    {json.dumps(name)}: {gemms!r},\n" for name, gemms in units.high(choice).items())
    text = _HEAD.format(recipe=type(low).__name__) + "\n" + code
    text += "\n\nHIGH: Mapping[str, Collection[str]] = {\n" + table + "}\n"
    text += '"""Layer -> its GEMMs in high precision."""\n\n\n'
    text += "def recipe(low: Any) -> Any:\n    return custom_recipe(low, HIGH)\n"
    path.write_text(text)
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(text, str(path), "exec"), names)
    return names


def write_megatron(path: Path, choice: Choice, units: Units) -> list[str]:
    """Write Megatron's precision file; returns a note of partly chosen modules, kept wholly in high precision."""
    high = group_by_key((units.module_of[name], gemms) for name, gemms in units.high(choice).items())
    config = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    matchers: dict[str, Any] = {}
    for module, parts in high.items():
        if any(parts):
            pattern = glob.escape(module)
            matchers[module] = {"type": "glob", "pattern": pattern, "config": "high_precision", "enabled": True}
    path.write_text(yaml.safe_dump({"configs": {"high_precision": config}, "matchers": matchers}, sort_keys=False))
    rounded = [module for module in matchers if set(high[module]) != {GEMMS}]
    if not rounded:
        return []
    return [f"{path.name} has no GEMMs: it keeps these modules wholly in high precision: {', '.join(rounded)}."]


def write_result(folder: Path, result: SearchResult) -> None:
    """Write ``search.json``, and the page of a search; warn without plotly."""
    (folder / "search.json").write_text(terminal.as_json(result))
    content = {**asdict(result), "confirmed": list(result.describe()), "path": str(folder)}
    try:
        page = PageTemplate(("search",)).fill("Precision search", content, ())
    except MissingExtraError as error:
        _logger.warning("%s was not written: %s", folder / PAGE, error)
        return
    write_bytes(folder / PAGE, page.encode())
