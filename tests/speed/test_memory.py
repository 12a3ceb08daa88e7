"""Planned bytes equal the real tensors that layers keep and that forwards save on the reference backend.

A tensor that several layers save counts once, for the first. Read from Transformer Engine 2.20.2: ``tensor_objects`` of
the Functions in ``pytorch/module/*.py``, which ``restore_from_saved`` and ``prepare_for_saving`` of the storages fill
and empty; ``_fp8_workspaces`` of a module.
"""

import json
import shlex
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.quantized_tensor import restore_from_saved
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.check import check_model
from te_precision_callbacks.check.factory import recipe_by_name
from te_precision_callbacks.config import load_config
from te_precision_callbacks.layers.naming import NamedModule, named_te_modules
from te_precision_callbacks.speed.memory import Memory, plan_memory, show
from te_precision_callbacks.te.state import delayed_states
from tests.capability import stand_for
from tests.check.running import BF16, RECIPES
from tests.conftest import feature
from tests.docs.pages import blocks

pytestmark = pytest.mark.usefixtures("any_gpu")

BUFFERS = (
    *("_data", "_rowwise_data", "rowwise_data", "_transpose", "_columnwise_data", "columnwise_data"),
    *("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise"),
    *("scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax"),
)
"""Attributes of the storages in ``pytorch/tensor/storage``, the last ones of a GroupedTensorStorage."""

Counts = Counter[tuple[str, str, str]]
"""(module, ``high``, ``codes``, ``gradient`` or ``scaling``, lifetime) -> bytes."""


@contextmanager
def counting_saved(modules: Sequence[NamedModule], counts: Counts) -> Iterator[None]:
    seen = {held.data_ptr() for named in modules for p in named.module.parameters() for _, held in parts(p)}

    def look(module: Any, _: Any, output: Any) -> None:
        for workspace in vars(module).get("_fp8_workspaces", {}).values():
            seen.update(held.data_ptr() for _, held in parts(workspace))
        node = node_behind(output)
        objects = restore_from_saved(node.tensor_objects, list(node.saved_tensors))
        for tensor in objects:
            count(names[id(module)], tensor, "to_backward", seen, counts)
        for kept, tensor in zip(node.tensor_objects, objects, strict=True):
            if kept is not None and not isinstance(kept, torch.Tensor):
                tensor.prepare_for_saving()

    names = {id(named.module): named.layers[0].name.partition(".")[0] for named in modules}
    handles = [named.module.register_forward_hook(look) for named in modules]
    yield
    for handle in handles:
        handle.remove()


def count_kept(modules: Sequence[NamedModule], counts: Counts) -> None:
    seen: set[int] = set()
    for named in modules:
        module: Any = named.module
        name = named.layers[0].name.partition(".")[0]
        for parameter in module.parameters(recurse=False):
            count(name, parameter, "always", seen, counts)
            if parameter.grad is not None:
                counts[name, "gradient", "always"] += parameter.grad.nbytes
        for workspace in vars(module).get("_fp8_workspaces", {}).values():
            count(name, workspace, "always", seen, counts)
        for state in delayed_states(module):
            counts[name, "scaling", "always"] += state.scale.nbytes + state.amax_history.nbytes


def count(name: str, tensor: Any, lives: str, seen: set[int], counts: Counts) -> None:
    for part, held in parts(tensor):
        if held.is_floating_point() is False and part == "high":
            continue  # offsets of groups
        if held.numel() and held.data_ptr() not in seen:
            seen.add(held.data_ptr())
            counts[name, part, lives] += held.nbytes


def node_behind(output: Any) -> Any:
    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    while getattr(node, "tensor_objects", None) is None:
        node = node.next_functions[0][0]
    return node


def parts(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    held = [getattr(tensor, name, None) for name in BUFFERS]
    codes = [buffer for buffer in held if isinstance(buffer, torch.Tensor)]
    yield from (("codes", buffer) for buffer in codes)
    if not codes and isinstance(tensor, torch.Tensor):
        yield "high", tensor


# ---------------------------------------------------------------------------------------------------------------- plans


TOKENS = 256
PARTS = {
    "parameter": "high",
    "saved_high": "high",
    "weight_codes": "codes",
    "saved_codes": "codes",
    "gradient": "gradient",
    "scaling_state": "scaling",
}

CASES: dict[str, tuple[tuple[int, int], Callable[[], Any]]] = {
    **RECIPES,
    "delayed on Blackwell": ((10, 0), recipes.DelayedScaling),
    "current on Blackwell": ((10, 0), recipes.Float8CurrentScaling),
    "E4M3": ((9, 0), lambda: recipes.DelayedScaling(fp8_format=recipes.Format.E4M3, amax_history_len=16)),
    "current E4M3": ((9, 0), lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3)),
    "mxfp8 HYBRID": ((10, 0), lambda: recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID)),
    "nvfp4 without 2D": ((10, 0), lambda: recipes.NVFP4BlockScaling(disable_2d_quantization=True)),
}


class Layers(torch.nn.Module):
    """A layer of each class, of sizes that need padded scales; the experts share the tokens equally."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(96, 160, params_dtype=BF16)
        self.norm_linear = te.LayerNormLinear(160, 96, params_dtype=BF16)
        self.rms_linear = te.LayerNormLinear(96, 96, bias=False, normalization="RMSNorm", params_dtype=BF16)
        self.gelu = te.LayerNormMLP(96, 224, params_dtype=BF16)
        self.swiglu = te.LayerNormMLP(96, 224, activation="swiglu", normalization="RMSNorm", params_dtype=BF16)
        self.grouped = te.GroupedLinear(2, 96, 96, params_dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.named_children():
            x = layer(x, [TOKENS // 2] * 2) if name == "grouped" else layer(x)
        return x


def planned_as_counted(model: torch.nn.Module, recipe: Any) -> Counts:
    modules = named_te_modules(model)
    memory = plan_memory(model, modules, recipe, tokens=TOKENS)
    counted: Counts = Counter()
    with te.autocast(enabled=recipe is not None, recipe=recipe), counting_saved(modules, counted):
        # Until here: a backward frees what its forward has saved.
        out = model(torch.randn(TOKENS, 96, dtype=BF16, requires_grad=True))
    out.float().sum().backward()
    count_kept(modules, counted)
    planned: Counts = Counter()
    for row in memory:
        if row.kind in PARTS:
            planned[row.layer.partition(".")[0], PARTS[row.kind], row.lives] += row.low
    assert +planned == +counted
    return planned


@pytest.mark.parametrize("case", CASES)
def test_all_recipes(case: str) -> None:
    capability, recipe = CASES[case]
    stand_for(capability)
    planned_as_counted(Layers(), recipe())


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("case", ["fp8_current_scaling", "mxfp8"])
def test_a_backward_in_high_precision(case: str, override: str) -> None:
    stand_for(CASES[case][0])
    recipe = CASES[case][1]()
    recipe.backward_override = override
    model = Layers()
    del model.gelu, model.swiglu  # LayerNormMLP refuses a backward in another precision
    planned_as_counted(model, recipe)


@pytest.mark.parametrize("case", [name for name in RECIPES if name != "none"])
def test_primary_quantized_weights(case: str) -> None:
    stand_for(CASES[case][0])
    recipe = CASES[case][1]()
    with te.quantized_model_init(enabled=True, recipe=recipe):
        model = Layers()
    assert planned_as_counted(model, recipe)["linear", "high", "always"] == 160 * 2, "the bias alone"


def test_recomputed_activations() -> None:
    stand_for((9, 0))
    mlp = te.LayerNormMLP(96, 224, params_dtype=BF16, checkpoint=True)
    planned = planned_as_counted(torch.nn.Sequential(OrderedDict(mlp=mlp)), recipes.Float8CurrentScaling())
    assert planned["mlp", "high", "to_backward"] == TOKENS * 96 * 2
    assert not planned["mlp", "codes", "to_backward"]


def test_the_original_input_is_saved() -> None:
    stand_for((9, 0))
    model = Layers()
    model.linear.save_original_input = True
    planned = planned_as_counted(model, recipes.Float8CurrentScaling())
    assert planned["linear", "high", "to_backward"] == TOKENS * 96 * 2


# -------------------------------------------------------------------------------------------------------------- by hand


M, N, K = 8192, 14336, 4096


def planned(module: torch.nn.Module, recipe: str, capability: tuple[int, int]) -> Memory:
    stand_for(capability)
    model = torch.nn.ModuleDict({"layer": module})
    return plan_memory(model, named_te_modules(model), recipe_by_name(recipe), tokens=M)


def linear() -> te.Linear:
    return te.Linear(K, N, bias=False, params_dtype=BF16, device="meta")


Codes = namedtuple("Codes", "one_way weight")
"""Bytes of codes and scales: of n numbers in one direction, and of a weight in both."""

CODES = {
    "mxfp8": Codes(lambda n: n + n // 32, lambda n, k: 2 * (n * k + n * k // 32)),
    "nvfp4": Codes(lambda n: n // 2 + n // 16 + 4, lambda n, k: 2 * (n * k // 2 + n * k // 16 + 4)),
    "fp8_block_scaling": Codes(lambda n: n + 4 * n // 128, lambda n, k: 2 * (n * k + 4 * (n // 128) * (k // 128))),
    "fp8_current_scaling": Codes(lambda n: n + 4, lambda n, k: 2 * n * k + 4),
    "fp8_delayed_scaling": Codes(lambda n: n + 4, lambda n, k: 2 * n * k + 4),
}


@pytest.mark.parametrize("recipe", CODES)
def test_the_planned_bytes_of_a_linear_layer(recipe: str) -> None:
    codes = CODES[recipe]
    gradient = 2 * codes.one_way(M * N) - (4 if "current" in recipe or "delayed" in recipe else 0)  # one scale for both
    expected = {
        "parameter": (2 * N * K, 2 * N * K),
        "weight_codes": (codes.weight(N, K), 0),
        "gradient": (2 * N * K, 2 * N * K),
        "saved_high": (0, 2 * M * K),
        "saved_codes": (codes.one_way(M * K), 0),
        "gradient_codes": (gradient, 0),
    }
    if recipe == "fp8_delayed_scaling":
        expected["scaling_state"] = (5 * 1025 * 4, 0)
    memory = planned(linear(), recipe, RECIPES[recipe][0])
    assert {kind: tuple(value) for kind, value in memory.by_kind().items()} == expected


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_layer_norm_mlp(activation: str) -> None:
    module = te.LayerNormMLP(K, N, bias=False, activation=activation, params_dtype=BF16, device="meta")
    memory = planned(module, "nvfp4", (10, 0))
    before = N * (2 if activation == "swiglu" else 1)
    high = 2 * M * K + 8 * M + 2 * M * before
    assert memory.bytes("saved_high") == (high, high + 2 * M * (K + N))
    assert memory.bytes("saved_codes").low == 2 * sum(CODES["nvfp4"].one_way(M * size) for size in (K, N))
    # in both directions, and only for the layer with more outputs
    assert memory.bytes("gradient_codes").low == 2 * CODES["nvfp4"].one_way(M * max(K, before))


def test_what_is_not_planned_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    stand_for((9, 0))
    model = torch.nn.ModuleDict({"layer": linear(), "operation": te.ops.Linear(K, N, device="meta")})
    memory = plan_memory(model, named_te_modules(model), recipe_by_name("fp8_current_scaling"))
    assert not any(row.kind.startswith("saved") for row in memory)
    show(memory)
    text = " ".join(capsys.readouterr().out.split())
    assert "give the tokens of a forward" in text
    assert "Not planned: operation: operations of te.ops are not planned." in text


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(64, 128, bias=False, params_dtype=BF16)
        self.second = te.Linear(128, 64, bias=False, params_dtype=BF16)
        self.head = torch.nn.Linear(64, 32, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)[:64]))  # type: ignore[no-any-return]


def memory_of(config: dict[str, Any], **keywords: Any) -> Memory:
    stand_for((9, 0))
    return check_model(
        Net(), load_config(config), recipe="fp8_current_scaling", memory=True, allow_unmatched=True, **keywords
    ).memory


def test_the_plan_of_a_config() -> None:
    kept = {"kept": feature("DisableFP8Layer", ["second"])}
    memory = memory_of(kept, tokens=256)
    assert memory.bytes("saved_codes", layer="first") == (256 * 64 + 4, 0)
    assert memory.bytes("saved_high", layer="second") == (256 * 128 * 2, 256 * 128 * 2)
    assert memory.bytes("saved_high", layer="head") == (256 * 64 * 2, 256 * 64 * 2)
    assert memory.bytes("weight_codes", layer="second") == (0, 0)
    batch = memory_of(kept, batch=torch.empty(256, 64, dtype=BF16))
    assert batch.bytes("saved_codes", layer="first") == (256 * 64 + 4, 0)
    assert batch.bytes("saved_high", layer="second").low == 64 * 128 * 2, "64 tokens arrive there"
    partly = memory_of({"kept": feature("DisableFP8GEMM", ["second"], gemms=["dgrad"])}, tokens=256)
    assert partly.bytes("saved_codes", layer="second").low == 256 * 128 + 4
    assert any("some GEMMs of these layers" in note and "second" in note for note in partly.notes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.yaml").write_text("s: {enabled: False}\n")
    monkeypatch.chdir(tmp_path)
    stand_for((9, 0))
    return tmp_path


def test_the_command(folder: Path) -> None:
    plan = shlex.split(f"check config.yaml --model {__name__}:Net --recipe fp8_delayed_scaling --tokens 256")
    printed = CliRunner().invoke(cli.app, [*plan, "--memory"])
    assert printed.exit_code == 0, printed.output
    assert "256 tokens a forward" in printed.stdout
    rows = json.loads(CliRunner().invoke(cli.app, [*plan, "--memory", "--json"]).stdout)["memory"]["rows"]
    assert {row["layer"] for row in rows} == {"first", "second", "head"}
    assert json.loads(CliRunner().invoke(cli.app, [*plan, "--json"]).stdout)["memory"] is None


def test_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "llama.py").write_text(*blocks("docs/speed.md", "python", "# llama.py"))
    commands, outputs = blocks("docs/speed.md", "bash"), blocks("docs/speed.md", "text")[:2]
    for command, drawn in zip(commands, outputs, strict=True):
        done = CliRunner().invoke(cli.app, shlex.split(command)[1:], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        output = [line.split() for line in done.output.splitlines()]
        for line in drawn.splitlines():
            assert line.split() in output, done.output
    (code,) = blocks("docs/speed.md", "python", "from te_precision_callbacks.check")
    exec(code, {"model": sys.modules.pop("llama").build()})
    assert "all on the device" in capsys.readouterr().out
