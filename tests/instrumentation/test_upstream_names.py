"""Layers by the names and numbers of nvidia-dlfw-inspect: ``layer_names: upstream`` selects the same layers.

Its selection comes from its ``infer_and_assign_layer_names`` and ``is_layer_in_cfg``, on the same model.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch import LightningModule
from nvdlfw_inspect.config_manager import ConfigSpec, is_layer_in_cfg
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from te_precision_callbacks.config import ConfigError
from te_precision_callbacks.instrumentation.upstream import isolate_upstream
from te_precision_callbacks.layers.naming import named_te_modules
from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, statistics

Module = torch.nn.Module


def of(**children: Module) -> Module:
    return torch.nn.ModuleDict(children)


def transformer_layers(count: int, **keywords: Any) -> torch.nn.ModuleList:
    """As BioNeMo's models have them: numbered from 1."""
    return torch.nn.ModuleList(
        te.TransformerLayer(32, 64, 2, layer_number=number, **keywords) for number in range(1, count + 1)
    )


def llama() -> Module:
    """BioNeMo's llama3_native_te."""
    return of(model=of(embed_tokens=torch.nn.Embedding(4, 32), layers=transformer_layers(3)), lm_head=te.Linear(32, 32))


def esm2() -> Module:
    """BioNeMo's esm2_native_te, with a checkpoint wrapper around one layer."""
    layers = transformer_layers(12)
    layers[1] = checkpoint_wrapper(layers[1])
    return of(
        model=of(encoder=of(layers=layers)), lm_head=of(dense=te.Linear(32, 32), decoder=te.LayerNormLinear(32, 32))
    )


def megatron() -> list[Module]:
    """Two chunks of a pipeline as Megatron-Bridge hands them over, each in its wrappers; numbered over all chunks."""

    class Float16Module(Module):
        pass

    class DistributedDataParallel(Module):
        pass

    class Layer(Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number = number
            self.self_attention = of(linear_qkv=te.LayerNormLinear(32, 96), linear_proj=te.Linear(32, 32))
            self.mlp = of(linear_fc1=te.LayerNormLinear(32, 64), linear_fc2=te.Linear(64, 32))

    chunks = []
    for numbers in ((1, 2), (5, 6)):
        gpt = of(decoder=of(layers=torch.nn.ModuleList(map(Layer, numbers)), final_layernorm=te.LayerNorm(32)))
        inner, outer = Float16Module(), DistributedDataParallel()
        inner.module, outer.module = gpt, inner
        chunks.append(outer)
    return chunks


def lightning() -> Module:
    class Recipe(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = torch.nn.ModuleList(of(proj=te.Linear(32, 32), mlp=te.LayerNormMLP(32, 64)) for _ in range(11))
            self.model = torch.compile(of(layers=blocks))
            self.head = te.Linear(32, 32)
            self.tied_head = self.head

    return Recipe()


def experts() -> Module:
    """Experts, and layers that were given no number, so that upstream calls them all by one name."""
    moe = te.GroupedLinear(2, 32, 32)
    return of(
        layers=torch.nn.ModuleList(te.TransformerLayer(32, 64, 2) for _ in range(2)),
        moe=torch.nn.ModuleList([moe, te.Linear(32, 32)]),
        shared_moe=moe,
    )


MODELS: tuple[Callable[[], Any], ...] = (llama, esm2, megatron, lightning, experts)

BLOCKS: tuple[dict[str, Any], ...] = (
    # BioNeMo's: llama3_native_te, and what esm2_native_te writes for the layers 1, 2 and 11.
    {"layer_name_regex_pattern": r"model\.model\.layers\.\d+\.self_attention\.layernorm_qkv"},
    {"layer_name_regex_pattern": r"model\.model\.encoder\.layers\.(1|2|11)\..*(layernorm_qkv|proj|fc1|fc2)"},
    {"layer_name_regex_pattern": r"model\.model\.layers\.[1-2]\..*(layernorm_qkv|proj|fc1|fc2)"},
    # Megatron-Bridge's and Transformer Engine's examples.
    {"layer_name_regex_pattern": ".*(fc2)"},
    {"layer_name_regex_pattern": ".*(fc1|self_attention).*"},
    {"layer_name_regex_pattern": ".*"},
    {"layer_name_regex_pattern": r"decoder\.layers\.(2|5)\."},
    {"layer_name_regex_pattern": r"layers\.1\."},
    {"layer_name_regex_pattern": r"^model\.(?!model|module)"},
    {"layer_name_regex_pattern": r"\.module\.decoder"},
    {"layer_name_regex_pattern": r"None.*fc1$"},
    {"layer_types": ["fc1", "layernorm_linear"]},
    {"layer_types": ["linear", "head"]},
    {"layer_types": ["LayerNormLinear", "layernorm_mlp", "gemm_1"]},
    {"layer_types": ["all"]},
    {"layer_numbers": [1, "5-11"]},
    {"layer_numbers": [0]},
    {"layer_numbers": ["0-3"], "layer_types": ["fc1", "qkv"]},
    {"layer_numbers": "all", "layer_types": ["fc2", "proj"]},
    {"exact_layer_names": ["model.lm_head", "model.model.layers.1.self_attention.proj", "model.moe.0.gemm_1"]},
)


BY_UPSTREAM = {"layer_names": "upstream"} | statistics()
CONFIG = {f"block {number}": {"enabled": True, "layers": block} for number, block in enumerate(BLOCKS)}


@contextmanager
def named_by_upstream(model: Any, log_dir: Path) -> Iterator[None]:
    """A model as a script has it that has called ``infer_and_assign_layer_names`` and ended upstream again."""
    chunks = model if isinstance(model, list) else [model]
    modules = [module for chunk in chunks for module in chunk.modules()]
    before = [vars(module).get("name") for module in modules]
    isolated = isolate_upstream()
    try:
        section = {"enabled": True, "layers": {"layer_types": ["all"]}, "LogTensorStats": {"enabled": True}}
        debug_api.initialize({"s": section}, log_dir=str(log_dir / "upstream"))
        debug_api.infer_and_assign_layer_names(model)
        debug_api.end_debug()
        yield
    finally:
        debug_api.DEBUG_MANAGER = None
        isolated.close()
        for module, name in zip(modules, before, strict=True):
            vars(module).pop("name", None) if name is None else vars(module).update(name=name)


def names_of_upstream(model: Any, log_dir: Path) -> list[str]:
    """Transformer Engine's name of each layer in calls to upstream: ``_get_debug_quantizers`` of its modules."""
    names = []
    modules = [named.module for named in named_te_modules(model)]
    with named_by_upstream(model, log_dir):
        for module in modules:
            parts = [""]
            if isinstance(module, te.LayerNormMLP):
                parts = [".fc1", ".fc2"]
            elif isinstance(module, te.GroupedLinear):
                parts = [f".gemm_{number}" for number in range(module.num_gemms)]
            names += [f"{module.name}{part}" for part in parts]
    return names


def is_selected_by_upstream(name: str, block: dict[str, Any]) -> bool | None:
    spec = ConfigSpec()
    spec.initialize({"enabled": True, "layers": block})
    try:
        return bool(is_layer_in_cfg(name, spec))
    except (ValueError, IndexError):
        return None


def without_wrappers(name: str) -> str:
    return re.sub(r"\.(_orig_mod|_checkpoint_wrapped_module|module)(?=\.)", "", name)


def selected(model: Any, log_dir: Path, **keys: Any) -> list[list[bool]]:
    with InspectSession({**CONFIG, **keys}, model=model, log_dir=log_dir, allow_unmatched=True) as session:
        return [[name in layer.sections for layer in session.layers] for name in CONFIG]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_a_config_selects_what_it_selects_in_upstream(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    names = names_of_upstream(model, tmp_path)
    of_upstream = [[is_selected_by_upstream(name, block) for name in names] for block in BLOCKS]
    for number, block in enumerate(BLOCKS):
        if not any(of_upstream[number]):
            of_upstream[number] = [is_selected_by_upstream(without_wrappers(name), block) for name in names]
    ours = selected(model, tmp_path, layer_names="upstream")
    for block, theirs, here in zip(BLOCKS, of_upstream, ours, strict=True):
        assert here == [bool(chosen) for chosen in theirs], block
    assert sum(map(any, ours)) >= 7, "of these configs many select something in each model"


@pytest.mark.parametrize("make", MODELS)
def test_the_names_are_upstreams(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    theirs = names_of_upstream(model, tmp_path)
    with InspectSession(BY_UPSTREAM, model=model, log_dir=tmp_path) as session:
        ours = [layer.name for layer in session.layers]
    assert len(set(ours)) == len(ours), "two layers are never one in the records"
    assert set(theirs) <= set(ours)
    different = [(name, upstream) for name, upstream in zip(ours, theirs, strict=True) if name != upstream]
    assert len(different) == len(theirs) - len(set(theirs)), "only what upstream calls alike is called otherwise"


# ------------------------------------------------------------------ where it is reported


def test_the_key_beside_the_sections_says_which_names_are_meant(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = "layer_names: upstream\ns:\n  enabled: True\n  layers: {layer_numbers: [1]}\n"
    path.write_text(text)
    net = of(layers=transformer_layers(2))

    def first_layer() -> list[str]:
        with InspectSession(path, model=net, log_dir=tmp_path) as session:
            return [layer.name for layer in session.layers if layer.sections][:1]

    assert first_layer() == ["model.layers.1.self_attention.layernorm_qkv"]
    path.write_text(text.replace("upstream", "path"))
    assert first_layer() == ["layers.1.self_attention.layernorm_qkv"]
    path.write_text(text.replace("upstream", "upstrem"))
    with pytest.raises(
        ConfigError, match=r"line 1.*'layer_names' beside the sections must be 'path' or 'upstream', not 'ups"
    ):
        first_layer()


# ------------------------------------------------------------------ names that the script has given


def test_names_that_upstream_assigns_before_attach_select_layers(tmp_path: Path, keeper: Keeper) -> None:
    """Also after ``start()``, as in a LightningModule's ``configure_model``."""
    net = of(layers=transformer_layers(2))
    session = InspectSession(statistics(layers=["model.layers.2"]), log_dir=tmp_path, sinks=[keeper])
    session.start()
    try:
        debug_api.infer_and_assign_layer_names(net)
        session.attach(net)
        hit = [layer for layer in session.layers if layer.sections]
        assert [layer.name for layer in hit][:1] == ["layers.1.self_attention.layernorm_qkv"]
        assert hit[0].given == "model.layers.2.self_attention.layernorm_qkv"
    finally:
        session.stop()
    with InspectSession(BY_UPSTREAM, model=torch.nn.DataParallel(net), log_dir=tmp_path) as session:
        assert session.layers[0].name == "model.layers.1.self_attention.layernorm_qkv", "named before it was wrapped"
