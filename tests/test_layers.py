"""Layers: names from the module tree, names in few words, and the kind of the running forward."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from te_precision_callbacks.base import terminal
from te_precision_callbacks.layers.folding import ShortNames, fold_for_sentence, fold_names
from te_precision_callbacks.layers.forwards import innermost_autograd_frame, is_evaluation_forward, running_functions
from te_precision_callbacks.layers.naming import (
    Layer,
    find_ambiguous_names,
    module_paths,
    named_te_modules,
    snake_case,
)
from tests.functions import Function
from tests.properties import examples

BLOCK = ["self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"]


def layers(model: Any) -> list[Layer]:
    return [layer for module in named_te_modules(model) for layer in module.layers]


def names(model: Any) -> list[str]:
    return [layer.name for layer in layers(model)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(te.TransformerLayer(32, 64, 2) for _ in range(2))
        self.head = te.Linear(32, 32, name="the_head")
        self.plain = torch.nn.Linear(32, 32)


@pytest.mark.slow
def test_wrappers_add_nothing_to_a_name() -> None:
    net = Net()
    plain = names(net)
    assert names(torch.nn.DataParallel(net)) == plain
    assert names(torch.compile(net)) == plain
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    assert names(net) == plain
    own = torch.nn.ModuleDict({"module": net})
    assert names(own) == [f"module.{name}" for name in plain], "the user's own `module` is part of the path"


def shared() -> torch.nn.Module:
    module = te.Linear(32, 32)
    return torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"x": module}), "b": module})


def wraps_itself() -> torch.nn.Module:
    net = torch.nn.Sequential(te.Linear(32, 32))
    net._forward_module = net
    return net


PATHS = [
    (shared, ["a.x"]),  # the first path
    (wraps_itself, ["0"]),
    (lambda: [torch.nn.Sequential(te.Linear(32, 32)) for _ in range(2)], ["chunk0.0", "chunk1.0"]),
    (lambda: te.Linear(32, 32), ["linear"]),  # a root of Transformer Engine lends its class
    (lambda: te.LayerNormMLP(32, 64), ["layernorm_mlp.fc1", "layernorm_mlp.fc2"]),
    (lambda: te.TransformerLayer(32, 64, 2), [f"transformer_layer.{part}" for part in BLOCK]),
    (lambda: torch.nn.Sequential(te.GroupedLinear(3, 32, 32)), ["0.gemm_0", "0.gemm_1", "0.gemm_2"]),
    (lambda: torch.nn.Sequential(te.LayerNorm(32), te.RMSNorm(32), torch.nn.Linear(32, 32)), []),
    (Net, [*(f"layers.{i}.{part}" for i in range(2) for part in BLOCK), "head"]),
]


def test_layers_are_named_by_their_path() -> None:
    for make, expected in PATHS:
        assert names(make()) == expected


def test_names_of_classes() -> None:
    """In snake case, as Transformer Engine's own; subclasses are found and selected by both classes."""
    MyLinear = type("MyLinear", (te.Linear,), {})
    assert names(MyLinear(32, 32)) == ["my_linear"]
    (layer,) = layers(torch.nn.Sequential(MyLinear(32, 32)))
    assert {"MyLinear", "my_linear", "Linear", "linear"} <= set(layer.types)
    snake_cases = {
        "LayerNormLinear": "layernorm_linear",
        "LayerNormMLP": "layernorm_mlp",
        "TransformerLayer": "transformer_layer",
        "GroupedLinear": "grouped_linear",
        "MultiheadAttention": "multihead_attention",
        "TEColumnParallelLinear": "te_column_parallel_linear",
    }
    assert {name: snake_case(name) for name in snake_cases} == snake_cases


def test_other_names_stay_aliases() -> None:
    LightningModule = type("LightningModule", (torch.nn.ModuleDict,), {})
    results = {layer.name: set(layer.aliases) for layer in layers(LightningModule({"model": Net()}))}
    assert results["model.head"] == {"the_head", "head"}
    aliases = results["model.layers.1.self_attention.layernorm_qkv"]
    assert "layers.1.self_attention.layernorm_qkv" in aliases, "the path without the LightningModule's own attribute"
    assert "self_attention.layernorm_linear_qkv" in aliases, "the constructor's name, without its automatic prefix"
    assert "layers.1.self_attn.layernorm_qkv" in aliases, "the spelling of the documentation"
    assert not any("Layer_" in alias for alias in aliases)
    other_root = {layer.name: set(layer.aliases) for layer in layers(torch.nn.ModuleDict({"model": Net()}))}
    assert other_root["model.head"] == {"the_head"}


def peft_class(name: str, *bases: type) -> Any:
    """PEFT's classes are recognized by their names."""
    return type(name, bases, {"__module__": "peft.tuners"})


def of_peft(name: str, *bases: type, **children: torch.nn.Module) -> torch.nn.Module:
    made: torch.nn.Module = peft_class(name, *(bases or (torch.nn.Module,)))()
    for child_name, child in children.items():
        setattr(made, child_name, child)
    return made


def test_names_of_peft_wrappers_and_adapters() -> None:
    """The tree comes from ``get_peft_model`` with LoRA on one layer and a trained copy of another, in PEFT 0.21."""

    def adapter(inputs: int, outputs: int) -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({"default": te.Linear(inputs, outputs)})

    net = Net()
    plain = names(net)
    block: Any = net.layers[0]
    bases, proj = (torch.nn.Module, peft_class("BaseTunerLayer")), block.self_attention.proj
    block.self_attention.proj = of_peft(
        "Linear", *bases, base_layer=proj, lora_A=adapter(32, 16), lora_B=adapter(16, 32)
    )
    copies = torch.nn.ModuleDict({"default": te.Linear(32, 32), "other": te.Linear(32, 32)})
    net.head = of_peft("ModulesToSaveWrapper", original_module=net.head, modules_to_save=copies)
    plain.remove("head")
    tuner = of_peft("LoraModel", peft_class("BaseTuner", torch.nn.Module), model=net)
    peft_model = peft_class("PeftModel", torch.nn.Module)
    model = torch.nn.DataParallel(of_peft("PeftModelForCausalLM", peft_model, base_model=tuner))

    results = {layer.name: layer for layer in layers(model)}
    copied = [f"head.{name}" for name in ("original_module", "modules_to_save.default", "modules_to_save.other")]
    adapters = [f"layers.0.self_attention.proj.{name}.default" for name in ("lora_A", "lora_B")]
    assert sorted(results) == sorted([*plain, *copied, *adapters])
    assert named_te_modules(model)[1].module is proj
    # Upstream's function takes `layer_number`, which is None.
    of_upstream = "model.module.base_model.model.layers.None.self_attention.proj.base_layer"
    assert of_upstream in results["layers.0.self_attention.proj"].upstream
    # Overflow detection watches the sum and its parts.
    assert "layers.0.self_attention.proj.base_layer" in dict(module_paths(model))


class Stage(torch.nn.Module):
    """A stage of a pipeline of two blocks a stage, with the attributes that Megatron Core has."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for index in range(2):
            mixture = torch.nn.ModuleDict({"experts": te.GroupedLinear(2, 32, 32)})
            mixture.local_expert_indices = [2 * stage, 2 * stage + 1]
            self.layers.append(torch.nn.ModuleDict({"attention": te.Linear(32, 32), "mixture": mixture}))
            self.layers[index].layer_number = 2 * stage + index + 1


def test_layers_of_other_ranks_at_one_path_have_numbers_of_the_whole_model() -> None:
    first, second = Stage(0), torch.nn.DataParallel(checkpoint_wrapper(Stage(1)))
    alike = find_ambiguous_names([*layers(first), *layers(second)])
    assert alike["layers.1.attention"] == ["layers.1.attention", "layers.3.attention"]
    assert len(alike) == len(layers(first))
    assert not find_ambiguous_names([*layers(first), *layers(Stage(0))]), "replicas are alike"

    numbered = {layer.name: layer for module in named_te_modules(second, by_number=True) for layer in module.layers}
    assert [*numbered][:3] == [
        "layers.2.attention",
        "layers.2.mixture.experts_2_3.gemm_0",
        "layers.2.mixture.experts_2_3.gemm_1",
    ]
    assert numbered["layers.2.attention"].aliases == (), "its path is another stage's layer"
    assert numbered["layers.2.mixture.experts_2_3.gemm_0"].aliases == ("layers.2.mixture.experts.gemm_0",)


FOLDED = [
    ([], []),
    (["head"], ["head"]),
    (["layers.0.fc", "layers.1.fc", "layers.4.fc", "head"], ["layers.{0-1,4}.fc", "head"]),
    (["a.0.fc1", "a.0.fc2", "a.1.fc1"], ["a.{0-1}.fc1", "a.0.fc2"]),
    (["h0", "h1", "h1", "h2"], ["h{0-2}"]),
    ([f"h.{i}.e.gemm_{e}" for i in range(32) for e in range(8)], ["h.{0-31}.e.gemm_{0-7}"]),
    (["m.0.0", "m.0.1", "m.1.0", "m.1.1", "m.2.0"], ["m.{0-1}.{0-1}", "m.2.0"]),
    (["l.00", "l.01"], ["l.00", "l.01"]),
    ([f"l.{2 * i}" for i in range(20)], ["l.{0,2,4,6 and 16 more}"]),
    ([str(number) for number in range(20_000)], ["{0-19999}"]),
]


def test_folded_names() -> None:
    for names, texts in FOLDED:
        assert fold_names(names) == texts
    assert fold_names(["a", "b", "c"], most=2) == ["a", "b", "1 more"]
    assert fold_names(["a", "b"], most=2) == ["a", "b"]
    assert fold_for_sentence("0", "1", "4.0", "net.0") == "'{0-1}' and '4.0' and net.0"


def unfolded(text: str) -> set[str]:
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [
        [part] if not number % 2 else [
            str(item)
            for span in part.split(",")
            for first, _, last in [span.partition("-")]
            for item in range(int(first), int(last or first) + 1)
        ]
        for number, part in enumerate(parts)
    ]  # fmt: skip
    return {"".join(item) for item in itertools.product(*choices)}


EXPERTS = [
    f"m.{layer}.e.{expert}.fc{half}" for layer in range(4) for expert in (0, 1, 2, 3, 10, 11, 12) for half in (1, 2)
]


@given(names=st.sets(st.sampled_from(EXPERTS), min_size=1, max_size=30))
@examples(100)
def test_a_text_stands_for_exactly_its_names(names: set[str]) -> None:
    texts = fold_names(sorted(names))
    assert sorted([name for text in texts for name in unfolded(text)]) == sorted(names)
    assert len(texts) <= len(names)


ESM2 = [f"model.esm.encoder.layers.{n}.self_attention.layernorm_qkv" for n in (0, 9, 17, 32)]
LLAMA = [
    *(f"base_model.model.model.layers.{n}.{part}.base_layer"
      for n in range(32)
      for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")),
    "base_model.model.lm_head",
]  # fmt: skip


SHORT = [
    (["head", "layers.0.fc"], 11, ["head", "layers.0.fc"]),
    (ESM2, 42, ["…layers.0.self_attention.layernorm_qkv", "…layers.9.self_attention.layernorm_qkv"]),
    (ESM2, 30, ["…layers.0.…layernorm_qkv", "…layers.9.…layernorm_qkv"]),
    (ESM2, 5, ["…0.…", "…9.…", "…17.…"]),
    (LLAMA, 44, ["…model.layers.0.self_attn.q_proj.base_layer", "…model.layers.0.self_attn.k_proj.base_layer"]),
    (LLAMA, 55, ["…model.model.layers.0.self_attn.q_proj.base_layer"]),
    (LLAMA, 30, ["…model.…0.self_attn.q_proj.…", "…model.…0.self_attn.k_proj.…"]),
]


def test_a_short_name_keeps_the_differing_parts() -> None:
    for names, most, texts in SHORT:
        short = ShortNames(names)
        results = [short.of(name, most) for name in names]
        assert results[: len(texts)] == texts
        assert len(set(results)) == len(names)
        assert max(map(len, results)) <= most


def test_a_name_that_nobody_has_told_loses_its_middle() -> None:
    short = ShortNames([])
    assert short.of("layers.0.attention.query", 12) == "lay…on.query"
    assert short.of("layers", 3) == "ers"


@given(
    st.sets(st.lists(st.sampled_from(["layers", "0", "1", "12", "self_attention", "self_attn", "fc"]), max_size=5)
            .map(".".join), min_size=1, max_size=12),
    st.integers(0, 60),
)  # fmt: skip
@examples(100)
def test_short_names_fit(names: set[str], most: int) -> None:
    short = ShortNames(names)
    results = {name: short.of(name, most) for name in names}
    assert all(len(text) <= most for text in results.values())
    assert all(text == name for name, text in results.items() if len(name) <= most)


BROKEN = [
    ("layers.{0-2}.self_attention.layernorm_qkv", 29, ["layers.{0-2}.self_attention.", "layernorm_qkv"]),
    ("below examples/demo.yaml", 9, ["below", "examples/", "demo.yaml"]),
    ("1234.5678", 7, ["1234.56", "78"]),  # a number has no separators
    ("[bold]a.b", 20, ["[bold]a.b"]),
]


def test_names_break_after_a_separator() -> None:
    for text, width, lines in BROKEN:
        table = terminal.table("")
        table.show_header = False
        table.add_row(terminal.cell(text))
        console = Console(width=width + 4)  # with the padding and the edges
        with console.capture() as captured:
            console.print(table)
        assert [line.strip() for line in captured.get().splitlines() if line.strip()] == lines


@pytest.mark.parametrize(("columns", "is_table"), [(30, True), (20, False)])
def test_a_narrow_terminal_shows_rows_as_paragraphs(
    columns: int, is_table: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = terminal.table("layer", "multiply-adds", "")
    table.add_row(*map(terminal.cell, ("fc", 12, "")))
    terminal.show(table)
    output = capsys.readouterr().out
    assert (output == "layer: fc; multiply-adds: 12\n") != is_table
    assert ("─" in output) == is_table


looks: list[Any] = []


def look() -> None:
    looks.append(
        (innermost_autograd_frame(), [context is not None for context in running_functions()], is_evaluation_forward())
    )


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_more(*arguments: Any) -> Any:
        return function(*arguments)

    return with_more


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        look()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        look()
        return gradient * 2


class WithSetUp(WithContext):
    """Of the newer kind, with a forward without context."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        look()
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Decorated(WithSetUp):
    forward = staticmethod(decorated(WithSetUp.forward))


@pytest.fixture(autouse=True)
def no_looks() -> None:
    looks.clear()


@pytest.mark.parametrize(
    ("function", "has_context"),
    [(WithContext, [True]), (WithSetUp, [False]), (Decorated, [False])],
    ids=["with a context", "with setup_context", "decorated"],
)
def test_a_function_of_either_kind_is_known_in_forward_and_backward(function: Any, has_context: list[bool]) -> None:
    function.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert looks == [("forward", has_context, False), ("backward", [], True)]


def test_a_module_and_a_plain_function_are_no_autograd_function() -> None:
    def forward() -> None:
        look()

    Function(look)()
    with torch.no_grad():
        forward()
    assert looks == [(None, [], False), (None, [], True)]
