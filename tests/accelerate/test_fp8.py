"""Accelerate's own FP8: the layers that it converts are watched, and the layers that it leaves are named."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformers
from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import TERecipeKwargs
from torch.nn import LayerNorm, Linear, ModuleList, Sequential
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.accelerate import PrecisionDebugger, convert_to_te, unconverted_layers
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.views.compare import compare
from tests.accelerate.loops import Torch, fresh, prepared, run
from tests.conftest import Keeper
from tests.docs.pages import blocks
from tests.lightning.models import batch_of

STATISTICS: dict[str, Any] = {
    "stats": {
        "enabled": True,
        "layers": {"layer_types": ["fc1", "fc2"]},
        "transformer_engine": {
            "LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max"]},
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation", "weight"], "stats": ["scale_inv_max"]},
        },
    }
}


def accelerator(**recipe: Any) -> Accelerator:
    return Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**recipe)])


def precision(debugger: PrecisionDebugger) -> dict[tuple[str, str], dict[str, str]]:
    return {(entry.layer, entry.gemm): dict(entry.operands) for entry in debugger.session.precision}


def test_the_layers_that_accelerate_makes_run_in_fp8(tmp_path: Path, keeper: Keeper) -> None:
    """Delayed scaling with the recipe's options: the largest value so far over E4M3's 448, as of the step before."""
    prepares = accelerator(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")
    model, optimizer, loader = prepared(prepares, Torch(), batches=4, size=16)
    with PrecisionDebugger(prepares, model, STATISTICS, log_dir=tmp_path, sinks=[keeper]) as debugger:
        run(prepares, debugger, model, optimizer, loader)
    batches = [batch_of(step, 16) for step in range(4)]
    assert keeper.values("max", "fc1") == {step: batch.max().item() for step, batch in enumerate(batches)}
    amaxes = [batch.abs().max().item() for batch in batches]
    scales = keeper.values("scale_inv_max", "fc1")
    assert scales == pytest.approx({0: 1.0, **{step: max(amaxes[:step]) / 448 for step in (1, 2, 3)}}, rel=1e-6)
    for layer in ("fc1", "fc2"):
        assert precision(debugger)[layer, "fprop"] == {"activation": "FP8 E4M3", "weight": "FP8 E4M3"}
        assert precision(debugger)[layer, "wgrad"] == {"activation": "FP8 E4M3", "gradient": "FP8 E5M2"}
    assert precision(debugger)["fc2", "dgrad"] == {"weight": "FP8 E4M3", "gradient": "FP8 E5M2"}


class Adapted(torch.nn.Module):
    """A frozen layer with an adapter, and a head with the weight of the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 32)
        self.base = Linear(32, 32).requires_grad_(False)
        self.down = Linear(32, 16)
        self.up = Linear(16, 32)
        self.head = Linear(32, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("tied", "lost"), [(False, ("base",)), (True, ("base", "head"))])
def test_what_the_conversion_unfreezes_or_unties(
    tied: bool, lost: tuple[str, ...], again: bool, tmp_path: Path
) -> None:
    """The remedy is not to pass the parameters to the optimizer, which would train the frozen layer."""
    model = Adapted(tied=tied)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    prepares = accelerator()
    after, optimizer = prepares.prepare(model, optimizer)
    if again:
        after.base.requires_grad_(False)
        if tied:
            after.head.weight = after.embedding.weight
    with PrecisionDebugger(prepares, after, log_dir=tmp_path) as debugger:
        for step in range(10):
            tokens = torch.randint(16, (32,), generator=torch.Generator().manual_seed(step))
            prepares.backward(torch.nn.functional.cross_entropy(after(tokens).float(), tokens))
            optimizer.step()
            optimizer.zero_grad()
            debugger.step()
    found = [finding for finding in debugger.session.findings if finding.rule == "missing-gradient"]
    assert [finding.layers for finding in found] == ([] if again else [lost])
    assert all("Accelerate's FP8 conversion" in finding.seen for finding in found)
    assert all("freeze again" in finding.remedy and "tie again" in finding.remedy for finding in found)


# ---------------------------------------------------------------------- what is left unconverted


def converted(model: torch.nn.Module) -> tuple[Accelerator, torch.nn.Module]:
    prepares = accelerator()
    model, _ = prepares.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return prepares, model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Torch(), {"head": "32 x 10: 10 is not a multiple of 16"}),
        (  # one container stops and skips what is inside of later siblings too; the one around it goes on
            Sequential(
                OrderedDict(
                    blocks=ModuleList(
                        [Sequential(Linear(16, 24), Sequential(LayerNorm(24), Linear(16, 16))), Linear(16, 16)]
                    ),
                    head=Linear(16, 16),
                )
            ),
            {
                "blocks.0.0": "16 x 24: 24 is not a multiple of 16",
                "blocks.0.1.1": "skipped, because the conversion stopped at blocks.0.0",
            },
        ),
        (Linear(16, 16), {"Linear": "Accelerate converts the layers inside a model, not the model itself"}),
    ],
)
def test_what_accelerate_left_is_named_with_the_reason(model: torch.nn.Module, expected: dict[str, str]) -> None:
    _, after = converted(model)
    assert unconverted_layers(after) == expected
    of_torch = [path or "Linear" for path, module in after.named_modules() if type(module) is Linear]
    assert of_torch == list(expected), "each layer that is still one of torch, and no other"


def test_what_multiplies_without_being_a_linear_is_named_too() -> None:
    """GPT-2's Conv1D, Mixtral's routers and experts; embeddings, convolutions and norms are none of it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **sizes)
    )
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=16, **sizes))
    linear = "Accelerate converts only Linear"
    assert unconverted_layers(converted(gpt2)[1]) == {
        "transformer.h.0.attn.c_attn": f"32 x 96 of Conv1D: {linear}",
        "transformer.h.0.attn.c_proj": f"32 x 32 of Conv1D: {linear}",
        "transformer.h.0.mlp.c_fc": f"32 x 128 of Conv1D: {linear}",
        "transformer.h.0.mlp.c_proj": f"128 x 32 of Conv1D: {linear}",
    }
    assert unconverted_layers(converted(mixtral)[1]) == {
        "model.layers.0.mlp.gate": f"4 x 32 of MixtralTopKRouter: {linear}",
        "model.layers.0.mlp.experts.gate_up_proj": f"96 x 32 of MixtralExperts, 4 experts: {linear}",
        "model.layers.0.mlp.experts.down_proj": f"32 x 48 of MixtralExperts, 4 experts: {linear}",
    }
    assert unconverted_layers(converted(vit)[1]) == {}
    attention = Sequential(torch.nn.MultiheadAttention(32, 2))
    assert unconverted_layers(converted(attention)[1]) == {
        "0.in_proj_weight": f"96 x 32 of MultiheadAttention: {linear}"
    }


def test_a_run_without_fp8_has_that_as_the_reason_of_all_layers() -> None:
    prepares = Accelerator(mixed_precision="bf16", cpu=True)
    model = prepares.prepare(Sequential(Linear(16, 10), Linear(16, 16), te.Linear(16, 16)))
    assert unconverted_layers(model) == dict.fromkeys(
        ("0", "1"), "Accelerate converts layers with mixed_precision='fp8', not 'bf16'"
    )


def test_the_debugger_says_it_once_and_shows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepares, model = converted(Torch())
    debugger = PrecisionDebugger(prepares, model, STATISTICS, log_dir=tmp_path)
    with debugger:
        model(torch.randn(16, 32, device=prepares.device)).sum().backward()
        debugger.step()
    assert debugger.unconverted == {"head": "32 x 10: 10 is not a multiple of 16"}
    (said,) = [record.message for record in caplog.records if "unconverted" in record.message]
    assert "1 layer unconverted, which runs without FP8: " in said
    assert "head: 32 x 10: 10 is not a multiple of 16." in said
    (product,) = (item for item in debugger.session.coverage() if (item.layer, item.gemm) == ("head", "fprop"))
    assert "32 x 10: 10 is not a multiple of 16" in product.why


# ---------------------------------------------------------------------- what was frozen or tied


def test_the_way_of_the_page_keeps_them_frozen(tmp_path: Path) -> None:
    prepares = accelerator()
    (block,) = (block for block in blocks("docs/accelerate.md", "python") if "convert_model" in block)
    names: dict[str, Any] = {"torch": torch, "accelerator": prepares}
    exec(block, names)
    frozen = Sequential(OrderedDict(q_proj=Linear(32, 32), k_proj=Linear(32, 32).requires_grad_(False)))
    model, optimizer = names["prepare"](frozen)
    before = model.k_proj.weight.detach().clone()
    with PrecisionDebugger(prepares, model, log_dir=tmp_path) as debugger:
        prepares.backward(model(torch.randn(16, 32, device=prepares.device)).sum())
        optimizer.step()
        debugger.step()
    # None of k_proj.
    assert [path for path, p in model.named_parameters() if p.grad is not None] == ["q_proj.weight", "q_proj.bias"]
    assert torch.equal(model.k_proj.weight, before)
    assert precision(debugger)["q_proj", "wgrad"] == {"activation": "FP8 E4M3", "gradient": "FP8 E5M2"}


# ---------------------------------------------------------------------- the same layers in a run in BF16


def recorded(folder: Path, precision: str, model: torch.nn.Module) -> Path:
    accelerator, *loop = fresh(model, size=16, mixed_precision=precision)
    with PrecisionDebugger(accelerator, loop[0], log_dir=folder / precision, quiet=True) as debugger:
        run(accelerator, debugger, *loop)
    return folder / precision


def test_a_model_is_converted_as_accelerate_does(tmp_path: Path) -> None:
    model = Torch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert convert_to_te(model) is model
    assert not is_initialized()  # an Accelerator that is made later chooses its own precision
    assert [type(layer) for layer in model.children()] == [te.Linear, te.Linear, torch.nn.Linear]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(OptionError, match="not a list"):
        convert_to_te([model])  # type: ignore[type-var]


def test_bf16_against_fp8_in_accelerate(tmp_path: Path) -> None:
    fp8, bf16 = (recorded(tmp_path, precision, Torch()) for precision in ("fp8", "bf16"))
    result = compare(open_run(bf16), open_run(fp8))
    assert result.loss.steps == 6
    assert "convert_to_te(model)" in result.layers_apart
    shown = CliRunner().invoke(cli.app, ["compare", str(bf16), str(fp8)])
    assert "has no statistics of layers, so no layer can be compared" in " ".join(shown.stdout.split("A: ")[0].split())

    bf16 = recorded(tmp_path / "converted", "bf16", convert_to_te(Torch()))
    result = compare(open_run(bf16), open_run(fp8))
    assert (result.layers_apart, result.pairing.layers) == ("", 2)
