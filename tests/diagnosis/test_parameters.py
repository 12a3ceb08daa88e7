"""Parameters that do not train: planted defects are found live and in the records, healthy twins are silent."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose
from te_precision_callbacks.session import InspectSession
from tests.combinations import half
from tests.conftest import statistics
from tests.forked import ranks

STEPS = 12
PARAMETERS = ("missing-gradient", "frozen-weight", "replicas-differ", "no-reduction")


class Block(torch.nn.Module):
    """A residual block of TE layers; ``cut`` detaches its branch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1 = te.LayerNormLinear(width, 2 * width)
        self.fc2 = te.Linear(2 * width, width)
        self.cut = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.fc2(torch.nn.functional.gelu(self.fc1(tensor)))
        return tensor + (change.detach() if self.cut else change)


class Model(torch.nn.Module):
    """A language model of blocks, tied if wanted."""

    def __init__(self, blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 32)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = torch.nn.Linear(32, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return result


Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Loss = Callable[[int], torch.Tensor]


def language_loss(model: torch.nn.Module) -> Loss:
    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(step))
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    return loss


def train(
    folder: Path,
    model: torch.nn.Module,
    optimizers: Optimizers,
    *,
    loss: Loss | None = None,
    after: Callable[[], object] = lambda: None,
    steps: int = STEPS,
    micro_batches: int = 1,
    recipe: Any = None,
    config: Any = None,
) -> Verdict:
    """Train; the verdict, which that on the records must equal."""
    loss = loss or language_loss(model)
    stepped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    with InspectSession(config, model=model, log_dir=folder, report=False) as session:
        for step in range(steps):
            for micro_batch in range(micro_batches):
                with te.autocast(recipe=recipe or Float8CurrentScaling()):
                    value = loss(step * micro_batches + micro_batch)
                value.backward()
            for optimizer in stepped:
                optimizer.step()
                optimizer.zero_grad()
            after()
            session.log({"loss": value.detach()})
            session.step()
    assert diagnose(folder) == session.findings
    return session.findings


def of_parameters(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict if finding.rule in PARAMETERS]


def alarms(verdict: Verdict) -> list[str]:
    return [str(finding) for finding in of_parameters(verdict) if finding.severity != "note"]


def assert_checked(verdict: Verdict) -> None:
    assert {"missing-gradient", "frozen-weight"} <= set(verdict.judged)


# ---------------------------------------------------------------------- healthy twins


def adamw(model: torch.nn.Module, lr: float = 1e-3, **keywords: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **keywords)


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (adamw, 2),
        (lambda model: adamw(model, weight_decay=0.0), 4),
        (lambda model: torch.optim.SGD(model.parameters(), lr=1e-2), 6),
        (lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9), 2),
        (lambda model: FusedAdam(model.parameters(), lr=1e-3), 4),
        (lambda model: FusedSGD(model.parameters(), lr=1e-2), 6),
        (lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3), 4),
    ],
    ids=["adamw", "no decay", "sgd", "small momentum", "fused adam", "fused sgd", "adafactor"],
)
def test_healthy(tmp_path: Path, make: Callable[[torch.nn.Module], torch.optim.Optimizer], blocks: int) -> None:
    model = Model(blocks, tied=blocks == 4)
    verdict = train(tmp_path, model, make(model), micro_batches=1 + blocks % 4)
    assert not of_parameters(verdict)
    assert_checked(verdict)


def test_a_config_without_statistics_of_weights_checks_parameters_too(tmp_path: Path) -> None:
    model = Model()
    config = statistics(tensors=["activation"], stats=["cur_amax"], freq=5)
    assert_checked(verdict := train(tmp_path / "healthy", model, adamw(model), config=config))
    assert not of_parameters(verdict)
    model.blocks[1].cut = True
    (result,) = of_parameters(train(tmp_path / "planted", model, adamw(model), config=config))
    assert result.layers == ("blocks.1.fc1", "blocks.1.fc2")


def test_warm_up_from_0(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    verdict = train(tmp_path, model, optimizer, after=schedule.step)
    assert not of_parameters(verdict)
    assert_checked(verdict)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: adamw(model, lr=0.0),
        lambda model: adamw(model, lr=1e-12, weight_decay=0.0),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-12),
    ],
    ids=["rate 0", "tiny rate", "tiny rate of sgd"],
)
def test_a_model_that_stands_still(tmp_path: Path, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    model = Model()
    (result,) = of_parameters(train(tmp_path, model, make(model)))
    assert (result.rule, result.severity) == ("frozen-weight", "warning")
    assert "learning rate" in result.remedy


def test_weights_that_are_restored_before_each_forward(tmp_path: Path) -> None:
    model = Model()
    first = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def restore(*_: object) -> None:
        for name, weight in model.named_parameters():
            weight.copy_(first[name])

    model.register_forward_pre_hook(restore)
    result = of_parameters(train(tmp_path, model, adamw(model)))
    assert ("frozen-weight", "error") in [(item.rule, item.severity) for item in result]


@pytest.mark.parametrize("holds_all", [False, True])
def test_frozen_layers_and_adapters(tmp_path: Path, holds_all: bool) -> None:
    """An optimizer that has the frozen parameters, too, is a note."""
    model = Model()
    model.requires_grad_(False)
    adapter = torch.nn.Linear(32, 32)
    model.head = torch.nn.Sequential(adapter, model.head)
    parameters = model.parameters() if holds_all else adapter.parameters()
    verdict = train(tmp_path, model, torch.optim.AdamW(parameters, lr=1e-3))
    assert [finding.severity for finding in of_parameters(verdict)] == ["note"] * holds_all
    assert_checked(verdict)


def test_an_average_of_the_weights_in_the_model(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    averaged = torch.optim.swa_utils.AveragedModel(model.blocks)
    both = torch.nn.ModuleDict({"model": model, "average": averaged})
    verdict = train(
        tmp_path, both, optimizer, loss=language_loss(model), after=lambda: averaged.update_parameters(model.blocks)
    )
    assert not of_parameters(verdict)
    assert_checked(verdict)


class Experts(torch.nn.Module):
    """Experts of which each step trains one; some are not trained after the tenth step."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(6))

    def forward(self, step: int) -> torch.Tensor:
        result: torch.Tensor = self.ffn[step * step % 3 if step > 10 else step % 5](torch.ones(16, 32))
        return result.pow(2).mean()


def test_experts_without_tokens(tmp_path: Path) -> None:
    """One of six has none in all steps, and two have none in most."""
    model = Experts()
    verdict = train(tmp_path / "few", model, adamw(model), loss=lambda step: model(step), steps=40)
    assert not of_parameters(verdict)
    grouped = te.GroupedLinear(4, 32, 32)
    inputs = torch.randn(32, 32)
    verdict = train(
        tmp_path / "grouped", grouped, adamw(grouped), loss=lambda step: grouped(inputs, [16, 16, 0, 0]).pow(2).mean()
    )
    assert not alarms(verdict)


def test_a_generator_and_a_discriminator(tmp_path: Path) -> None:
    """The generator trains in every fifth step; its optimizer has not stepped in the first ones."""
    models = torch.nn.ModuleDict({"generator": Block(), "discriminator": torch.nn.Sequential(Block(), Block())})
    generator, discriminator = adamw(models["generator"]), adamw(models["discriminator"])
    with InspectSession(model=models, log_dir=tmp_path, report=False) as session:
        for step in range(20):
            trains = step % 5 == 4
            models["discriminator"].requires_grad_(not trains)
            with te.autocast(recipe=Float8CurrentScaling()):
                loss = models["discriminator"](models["generator"](torch.randn(16, 32))).pow(2).mean()
            loss.backward()
            (generator if trains else discriminator).step()
            models.zero_grad()
            models["discriminator"].requires_grad_(True)
            session.step()
    assert not of_parameters(session.findings)
    assert diagnose(tmp_path) == session.findings


def test_gradients_that_are_gone_before_the_step(tmp_path: Path) -> None:
    """A loop that keeps gradients in another place, as Megatron does in ``main_grad``."""
    model = Model()
    for weight in model.parameters():
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    optimizer = adamw(model)
    loss = language_loss(model)
    with InspectSession(model=model, log_dir=tmp_path, report=False) as session:
        for step in range(STEPS):
            loss(step).backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.main_grad.add_(weight.grad)
                    weight.grad = None
                optimizer.step()
                for weight in model.parameters():
                    weight.sub_(weight.main_grad, alpha=1e-2)
                    weight.main_grad.zero_()
            session.step()
    assert not of_parameters(session.findings)
    assert_checked(session.findings)


def _zero_gradient(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.zero_()


def test_gradients_that_are_0_at_the_step(tmp_path: Path) -> None:
    """AdamW's weight decay still changes every weight."""
    model = Model()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(_zero_gradient)
    verdict = train(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    (alarm,) = alarms(verdict)
    assert "frozen-weight" in alarm
    assert "sampled gradient elements of" in alarm
    assert "zero_grad()" in of_parameters(verdict)[0].remedy


def test_a_loop_without_an_optimizer(tmp_path: Path) -> None:
    model = Model()
    loss = language_loss(model)
    with InspectSession(model=model, log_dir=tmp_path, report=False) as session:
        for step in range(STEPS):
            loss(step).backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad, alpha=1e-2)
            model.zero_grad()
            session.step()
    assert not of_parameters(session.findings)
    assert "missing-gradient" in session.findings.judged
    assert "frozen-weight" not in session.findings.judged


# ---------------------------------------------------------------------- missing gradients


def test_a_block_that_is_cut_off(tmp_path: Path) -> None:
    model = Model()
    model.blocks[1].cut = True
    (result,) = of_parameters(train(tmp_path, model, adamw(model)))
    assert (result.rule, result.severity, result.since) == ("missing-gradient", "warning", 0)
    assert result.layers == ("blocks.1.fc1", "blocks.1.fc2")
    assert "blocks.1.fc1.layer_norm_weight and 5 more parameters received no gradient in" in result.seen


def test_an_optimizer_that_no_longer_steps(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    step_of = optimizer.step
    loss = language_loss(model)

    def stop(step: int) -> torch.Tensor:
        optimizer.step = step_of if step < 12 else lambda: None  # type: ignore[method-assign]
        return loss(step)

    (result,) = of_parameters(train(tmp_path, model, optimizer, loss=stop, steps=40))
    assert (result.rule, result.severity, result.since) == ("frozen-weight", "warning", 12)
    assert result.layers == ()


def test_a_block_that_is_cut_off_later(tmp_path: Path) -> None:
    """From step 8 on, in a run of 25 steps; each second step of another block is cut, which is not a problem."""
    model = Model()
    loss = language_loss(model)

    def cut(step: int) -> torch.Tensor:
        model.blocks[0].cut = bool(step % 2)
        model.blocks[1].cut = step >= 8
        return loss(step)

    (result,) = of_parameters(train(tmp_path, model, adamw(model), loss=cut, steps=25))
    assert (result.rule, result.severity, result.since) == ("missing-gradient", "warning", 8)
    assert result.layers == ("blocks.1.fc1", "blocks.1.fc2")
    assert "had gradients, and received none since step 8, although the module still runs" in result.seen


def test_a_block_that_is_no_longer_called(tmp_path: Path) -> None:
    """It may be meant, as in training by phases."""
    model = Model(3)
    loss = language_loss(model)

    def skip(step: int) -> torch.Tensor:
        if step == 12:
            model.blocks[1].forward = lambda tensor: tensor
        return loss(step)

    (result,) = of_parameters(train(tmp_path, model, adamw(model), loss=skip, steps=80))
    assert (result.rule, result.severity, result.since) == ("missing-gradient", "note", 12)
    assert result.layers == ("blocks.1.fc1", "blocks.1.fc2")


def test_a_generator_that_has_its_turn_in_no_collection_step(tmp_path: Path) -> None:
    """It trains in the steps 4, 9, 14, ...; statistics are collected in 0, 1, 2, 5, 10, ...."""
    models = torch.nn.ModuleDict({"generator": Block(), "critic": torch.nn.Sequential(Block(), Block())})
    generator, critic = adamw(models["generator"]), adamw(models["critic"])
    with InspectSession(model=models, log_dir=tmp_path, report=False) as session:
        for step in range(25):
            with te.autocast(recipe=Float8CurrentScaling()):
                fake = models["generator"](torch.randn(16, 32))
                if step % 5 == 4:
                    models["critic"](fake).mean().backward()
                else:
                    models["critic"](fake.detach()).pow(2).mean().backward()
            (generator if step % 5 == 4 else critic).step()
            models.zero_grad()
            session.step()
    assert not [finding for finding in session.findings if finding.rule in ("dead-gradient", "missing-gradient")]
    assert diagnose(tmp_path) == session.findings


def test_a_group_of_parameters_that_leaves_the_optimizer(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(
        [{"params": model.embedding.parameters()}, {"params": model.blocks.parameters()}], 1e-3
    )
    optimizer.add_param_group({"params": model.head.parameters()})
    loss = language_loss(model)

    def remove(step: int) -> torch.Tensor:
        if step == 12:
            optimizer.param_groups.pop()
        return loss(step)

    (result,) = of_parameters(train(tmp_path, model, optimizer, loss=remove, steps=25))
    assert (result.rule, result.layers, result.since) == ("missing-gradient", ("head",), 12)


def test_a_compiled_block_without_a_gradient_stays_one_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    block = torch.nn.Linear(32, 32)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), block, torch.nn.Linear(32, 32))
    compiled = torch.compile(lambda x: model[2](x + block(x).detach()), fullgraph=True, backend="eager")
    widths = [16] * 4 + [24] * 8  # it is compiled again after the hook is there

    def loss(step: int) -> torch.Tensor:
        result: torch.Tensor = compiled(model[0](torch.randn(widths[step], 32))).pow(2).mean()
        return result

    (result,) = of_parameters(train(tmp_path, model, adamw(model), loss=loss))
    assert result.layers == ("1",)


class Decoder(torch.nn.Module):
    """A decoder that gets the encoder's output through te.checkpoint, which has no gradient for keywords: its output
    needs none if no other tensor does."""

    def __init__(self, *, by_keyword: bool) -> None:
        super().__init__()
        self.encoder, self.layer, self.head = (te.Linear(32, 32) for _ in range(3))
        self.by_keyword = by_keyword

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        context = self.encoder(tensor)

        def run(tensor: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(tensor + context)
            return result

        positional, keywords = ((tensor,), {"context": context}) if self.by_keyword else ((tensor, context), {})
        result: torch.Tensor = te.checkpoint(run, *positional, use_reentrant=True, **keywords)
        value: torch.Tensor = self.head(result).pow(2).mean()
        return value


def test_a_tensor_by_keyword_through_te_checkpoint(tmp_path: Path) -> None:
    """Megatron-LM issue 4765."""
    for by_keyword in (True, False):
        model = Decoder(by_keyword=by_keyword)
        verdict = train(
            tmp_path / str(by_keyword), model, adamw(model), loss=lambda step, model=model: model(torch.randn(16, 32))
        )
        result = of_parameters(verdict)
        assert [(item.rule, item.layers) for item in result] == [
            ("missing-gradient", ("encoder", "layer"))
        ] * by_keyword


def test_a_parameter_without_use(tmp_path: Path) -> None:
    model = Model()
    model.unused = te.Linear(32, 32)
    (result,) = of_parameters(train(tmp_path, model, adamw(model)))
    assert (result.rule, result.layers) == ("missing-gradient", ("unused",))
    assert result.seen.startswith("unused.weight and 1 more parameter received no gradient in")


def test_an_optimizer_that_lacks_parameters(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    model.head = torch.nn.Linear(32, 16)
    (result,) = of_parameters(train(tmp_path, model, optimizer))
    assert (result.rule, result.layers) == ("missing-gradient", ("head",))
    assert result.seen == "head.weight and 1 more parameter received gradients, but no optimizer updates them"


# ---------------------------------------------------------------------- weights that do not change


def test_an_optimizer_of_a_copy(tmp_path: Path) -> None:
    model = Model(4)
    copied = copy.deepcopy(model)
    optimizer = adamw(copied)

    def loss(step: int) -> torch.Tensor:
        value = language_loss(model)(step)
        for own, other in zip(model.parameters(), copied.parameters(), strict=True):
            other.grad = own.grad
        return value

    verdict = train(tmp_path, model, optimizer, loss=loss)
    assert [(parameter.rule, parameter.severity) for parameter in of_parameters(verdict)] == [
        ("frozen-weight", "error")
    ]


def test_a_weight_that_is_put_back(tmp_path: Path) -> None:
    model = Model()
    weight = model.blocks[1].fc2.weight
    old = weight.detach().clone()

    def put_back() -> None:
        with torch.no_grad():
            weight.copy_(old)

    (result,) = of_parameters(train(tmp_path, model, adamw(model), after=put_back))
    assert (result.rule, result.severity, result.layers) == ("frozen-weight", "error", ("blocks.1.fc2",))
    assert result.seen.startswith("blocks.1.fc2.weight: not a single bit changed in")


class Masters:
    """An optimizer of float32 masters that copies them into the weights: at once, a step late, or never."""

    def __init__(self, model: torch.nn.Module, copies: str, lr: float) -> None:
        self.weights = list(model.parameters())
        self.masters = [torch.nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        self.optimizer = torch.optim.Adam(self.masters, lr=lr)
        self.copies = copies
        self.optimizer.register_step_pre_hook(lambda *_: self.take_gradients())
        self.optimizer.register_step_post_hook(lambda *_: self.copy())
        self.before = [master.detach().clone() for master in self.masters]

    def take_gradients(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def copy(self) -> None:
        now = [master.detach().clone() for master in self.masters]
        for weight, value in zip(self.weights, self.before if self.copies == "late" else now, strict=True):
            if self.copies != "never":
                weight.copy_(value)
        self.before = now


@pytest.mark.parametrize(
    ("kind", "lr", "copies"), half(["bfloat16", "current", "block"], [1e-3, 1e-4], ["at once", "late", "never"])
)
def test_masters(tmp_path: Path, kind: str, copies: str, lr: float) -> None:
    torch.manual_seed(0)
    recipe = Float8BlockScaling() if kind == "block" else Float8CurrentScaling()
    with te.quantized_model_init(enabled=kind != "bfloat16", recipe=recipe):
        model = torch.nn.Sequential(*(te.Linear(128, 128, params_dtype=torch.bfloat16) for _ in range(2)))
    masters = Masters(model, copies, lr)
    verdict = train(
        tmp_path,
        model,
        masters.optimizer,
        loss=lambda step: model(torch.randn(128, 128, dtype=torch.bfloat16)).float().pow(2).mean(),
        recipe=recipe,
        steps=20,
    )
    result = of_parameters(verdict)
    assert [(item.rule, item.severity) for item in result] == [("frozen-weight", "error")] * (copies != "at once")
    if result:
        text = "one step earlier" if copies == "late" else "more than rounding"
        assert text in result[0].seen


@pytest.mark.parametrize("restores", [False, True])
def test_masters_of_fused_adam(tmp_path: Path, restores: bool) -> None:
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(enabled=True, recipe=recipe):
        model = torch.nn.Sequential(*(te.Linear(128, 128) for _ in range(2)))
    old = model[1].weight.detach().clone()

    def restore() -> None:
        if restores:
            with torch.no_grad():
                model[1].weight._data.copy_(old._data)

    verdict = train(
        tmp_path,
        model,
        FusedAdam(model.parameters(), lr=1e-3, master_weights=True),
        loss=lambda step: model(torch.randn(128, 128)).pow(2).mean(),
        recipe=recipe,
        after=restore,
        steps=20,
    )
    assert [(parameter.rule, parameter.layers) for parameter in of_parameters(verdict)] == [
        ("frozen-weight", ("1",))
    ] * restores


# ---------------------------------------------------------------------- the end of a run


def test_a_weight_that_is_nan_after_the_last_step(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    steps = iter(range(STEPS))

    def break_in_the_end() -> None:
        if next(steps) == STEPS - 1:
            with torch.no_grad():
                model.blocks[1].fc1.bias[0] = torch.nan

    verdict = train(tmp_path, model, optimizer, after=break_in_the_end)
    (results,) = [item for item in verdict if item.rule == "nonfinite"]
    assert (results.layers, results.since) == (("blocks.1.fc1",), STEPS - 1)
    assert "blocks.1.fc1.bias" in results.seen
    assert not verdict.healthy


def test_training_is_bit_equal(tmp_path: Path) -> None:
    def weights(*, observed: bool) -> list[torch.Tensor]:
        model = Model()
        optimizer = adamw(model)
        if observed:
            train(tmp_path, model, optimizer, config=statistics(tensors=["weight"], stats=["cur_amax"], freq=100))
        else:
            for step in range(STEPS):
                with te.autocast(recipe=Float8CurrentScaling()):
                    value = language_loss(model)(step)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [weight.detach() for weight in model.parameters()]

    assert all(map(torch.equal, weights(observed=True), weights(observed=False)))


# ---------------------------------------------------------------------- several ranks

_ALONE = "0.bias and 5 more parameters: ranks had the same values before the first step and now have different ones"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found: case -> findings, and the rules that were checked."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("parameters_script.py")
    ended = ranks(script, [[str(rank), str(folder)] for rank in range(2)])
    assert not ended[0].returncode, ended[0].stderr
    lines = [[json.loads(line) for line in item.stdout.splitlines() if line.startswith("[")] for item in ended]
    return [{case: (item, checked) for case, item, checked in line} for line in lines]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "rule", "severity", "layers", "seen"),
    [
        ("alone", "no-reduction", "warning", ["0", "1"], _ALONE),
        ("one forgotten", "replicas-differ", "error", ["1"], "1.bias and 1 more parameter: ranks that had the same"),
        ("ddp drifting", "replicas-differ", "error", ["0"], "0.layer_norm_weight: ranks that had the same values"),
        ("norms forgotten", "replicas-differ", "error", ["layernorm_linear"], "layer_norm_bias: ranks that had"),
        ("experts, router forgotten", "replicas-differ", "error", ["router"], "router.bias and 1 more parameter"),
        ("other seeds", "replicas-differ", "note", ["0", "1"], "since before the first step"),
    ],
)
def test_ranks_that_differ(
    two_ranks: list[dict[str, Any]], case: str, rule: str, severity: str, layers: list[str], seen: str
) -> None:
    for of_rank in two_ranks:
        (result,), _ = of_rank[case]
        assert result[:3] == [rule, severity, layers]
        assert seen in result[3]


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", ["averaged", "ddp", "fsdp", "fsdp without shards", "fsdp 2", "norms", "experts", "local numbers"]
)
def test_ranks_that_should_differ_or_do_not(two_ranks: list[dict[str, Any]], case: str) -> None:
    for of_rank in two_ranks:
        result, checked = of_rank[case]
        assert not result
        assert checked == ([] if case == "local numbers" else ["replicas-differ", "no-reduction"])


@pytest.mark.processes
@pytest.mark.parametrize("case", ["fp8 shards", "fp8 shards, restored", "mxfp8 shards", "mxfp8 shards, restored"])
def test_quantized_shards_and_their_masters(two_ranks: list[dict[str, Any]], case: str) -> None:
    for of_rank in two_ranks:
        result, checked = of_rank[case]
        assert [item[:3] for item in result] == [["frozen-weight", "error", ["1"]]] * ("restored" in case)
        assert all("by more than rounding" in item[3] for item in result)
        assert checked == ["frozen-weight"]


@pytest.mark.parametrize("optimizer_of", [adamw, lambda model: FusedAdam(model.parameters(), lr=1e-3)])
def test_a_session_after_gradients_have_become_small(tmp_path: Path, optimizer_of: Callable[..., Any]) -> None:
    """Adam divides by the gradients of up to a thousand steps, so weights in bfloat16 may stand still for a while."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(32, 32, params_dtype=torch.bfloat16) for _ in range(2)))
    optimizer = optimizer_of(model)
    inputs = torch.randn(32, 32, dtype=torch.bfloat16)

    def loss(step: int) -> torch.Tensor:
        value: torch.Tensor = model(inputs).float().square().mean() * (100.0 if step < 20 else 1e-3)
        return value

    for step in range(150):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not of_parameters(train(tmp_path, model, optimizer, loss=lambda step: loss(150), steps=20))
