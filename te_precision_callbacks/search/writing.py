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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.base.vocabulary import GEMMS, class_names, name_of_recipe
from te_precision_callbacks.check.checked_model import check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.maps.matching import Module
from te_precision_callbacks.maps.precision_map import is_quantized
from te_precision_callbacks.maps.sources import open_map
from te_precision_callbacks.maps.tool_files import Surroundings
from te_precision_callbacks.search import factory
from te_precision_callbacks.search.units import Choice, SearchError, Unit, Units
from te_precision_callbacks.views.report.page import PageTemplate, write_bytes

_logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
RECIPE = "precision_recipe.py"
MEGATRON = "megatron.yaml"
PAGE = "search.html"

_HEAD = '''"""Precision by layer and GEMM, written by te-precision search. Needs Transformer Engine 2.20 only.

    import precision_recipe
    precision_recipe.assign_names(model)  # before the first forward
    with te.autocast(recipe=precision_recipe.recipe(low)):  # low: {recipe}
"""
'''


def write_config(path: Path, choice: Choice, units: Units, model: torch.nn.Module, low: Any) -> None:
    """Write the debug features, and check that the plan of the model has the choice."""
    high = units.high(choice)
    by_gemms = group_by_key((gemms, units.all[name]) for name, gemms in high.items() if gemms)
    names = set(_layers(units.all.values()))
    in_high: set[tuple[str, str]] = set()
    sections = []
    for gemms, members in by_gemms.items():
        layers = _layers(members)
        in_high.update(itertools.product(layers, gemms))
        others = names.difference(layers)
        sections.append(keep_high(*layers, others=others, gemms=() if gemms == GEMMS else gemms))
    path.write_text("".join(sections) or "{}\n")
    before = _plan({}, model, low)
    after = _plan(path, model, low)
    wrong = []
    for (layer, gemm), was_low in before.items():
        is_low = was_low and (layer, gemm) not in in_high
        if layer in names and after[layer, gemm] != is_low:
            wrong.append(f"{layer} {gemm}")
    if wrong:
        raise SearchError(f"{path} does not express the choice for {', '.join(wrong[:4])}. Use {RECIPE} instead.")


def _layers(units: Iterable[Unit]) -> list[str]:
    return list(itertools.chain(*(unit.layers for unit in units)))


def _plan(config: Any, model: torch.nn.Module, low: Any) -> dict[tuple[str, str], bool]:
    """Return layer and GEMM -> whether it is planned in low precision."""
    coverage = check_model(model, load_config(config), recipe=low).coverage
    return {(product.layer, product.gemm): product.is_low for product in coverage}


def write_recipe(path: Path, choice: Choice, units: Units, low: Any) -> Any:
    """Write the module of the recipe; returns it, loaded from the file."""
    code = inspect.getsource(factory)
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


def write_megatron(path: Path, choice: Choice, units: Units, low: Any) -> list[str]:
    """Write Megatron's precision file; returns the partly chosen modules, kept wholly in high precision."""
    wanted = group_by_key((units.all[name].module, gemms) for name, gemms in units.high(choice).items())
    kept = [module for module, parts in wanted.items() if any(parts)]
    config: dict[str, Any] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    matchers: dict[str, Any] = {}
    for module in kept:
        pattern = glob.escape(module)
        matchers[module] = {"type": "glob", "pattern": pattern, "config": "high_precision", "enabled": True}
    path.write_text(yaml.safe_dump({"configs": {"high_precision": config}, "matchers": matchers}, sort_keys=False))
    modules = [Module(name, "", True, class_names(module)) for name, module in units.modules.items()]
    read = open_map(path, modules=modules, around=Surroundings(recipe=name_of_recipe(low)))
    wrong = [
        name for name in wanted if name in read.modules and is_quantized(read.modules[name].weight) == (name in kept)
    ]
    if wrong or read.findings:
        problem = "; ".join(finding.text for finding in read.findings) or ", ".join(wrong[:4])
        raise SearchError(f"{path} does not express the choice: {problem}. Use {RECIPE} instead.")
    return [module for module in kept if set(wanted[module]) != {GEMMS}]


def write_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page of a search; warn without plotly.

    Args:
        content: ``SearchResult.as_json()``, and the lines ``confirmed``.
    """
    try:
        page = PageTemplate(("search",)).fill("Precision search", {**content, "path": str(path.parent)}, ())
    except MissingExtraError as error:
        _logger.warning("%s was not written: %s", path, error)
        return
    write_bytes(path, page.encode())
