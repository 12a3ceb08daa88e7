"""Parameters that do not train: planted defects are found live and in the records, healthy twins are silent."""

import copy
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from te_precision_callbacks.diagnosis import Finding, Verdict, diagnose
from te_precision_callbacks.diagnosis.rules.parameters import ENDS_BY_A_GRADIENT, RULE_OF
from te_precision_callbacks.parameters.gradients import largest_magnitudes
from te_precision_callbacks.parameters.parameter import ParameterProblem
from te_precision_callbacks.session import InspectSession, running_session
from tests.conftest import statistics
from tests.diagnosis.planted import in_fp8, outside, trained
from tests.forked import ranks
from tests.training import Loss

STEPS = 12
PARAMETERS = ("missing-gradient", "frozen-weight", "kept-gradient", "replicas-differ", "no-reduction")


class Block(torch.nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1 = te.LayerNormLinear(width, 2 * width)
        self.fc2 = te.Linear(2 * width, width)
        self.cut = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.fc2(torch.nn.functional.gelu(self.fc1(tensor)))
        return tensor + (change.detach() if self.cut else change)


class Model(torch.nn.Module):
    def __init__(self, blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 32)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = torch.nn.Linear(32, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))

    def loss(self, step: int) -> torch.Tensor:
        tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(step))
        return torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1).float(), tokens.flatten())

    def loss_after(self, change: Callable[[int], object]) -> Loss:
        def loss(step: int) -> torch.Tensor:
            change(step)
            return self.loss(step)

        return loss


def train(folder: Path, model: Any, *arguments: Any, **keywords: Any) -> Verdict:
    """In high precision, which takes half of the time: these findings do not depend on the precision."""
    return trained(folder, model, *arguments, **{"loss": model.loss, "around": outside, **keywords})


def of_parameters(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict if finding.rule in PARAMETERS]


OF_BLOCK_1 = ("blocks.1.fc1", "blocks.1.fc2")


def assert_checked(verdict: Verdict) -> None:
    assert {"missing-gradient", "frozen-weight"} <= set(verdict.checked)


def assert_healthy(verdict: Verdict) -> None:
    assert not of_parameters(verdict)
    assert_checked(verdict)


# ---------------------------------------------------------------------- healthy twins


def adamw(model: torch.nn.Module, lr: float = 1e-3, **keywords: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **keywords)


# ---------------------------------------------------------------------- trainings of one model, and their finding

Options = dict[str, Any]
"""Of a training: ``optimizers``, by default AdamW of the changed model, and keywords of :func:`trained`."""


def finds(what: str, prepare: Callable[[Model], Options], *, seen: str = "", marks: Any = (), **expected: Any) -> Any:
    """A case with one finding, with these attributes, and this pattern in what is seen and in the remedy."""
    return pytest.param(prepare, expected, seen, id=what, marks=marks)


def silent(what: str, prepare: Callable[[Model], Options]) -> Any:
    return pytest.param(prepare, {}, "", id=what)


def scheduled(model: Model, factor: Callable[[int], float], **more: Any) -> Options:
    """A training whose learning rate is multiplied by this factor of the step."""
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizers": optimizer, "after": schedule.step, **more}


def without_a_rate_at_first(model: Model, late: int) -> Options:
    """All groups of the optimizer, or a group."""
    groups = [model.head.parameters(), (*model.embedding.parameters(), *model.blocks.parameters())]
    optimizer = torch.optim.AdamW([{"params": list(group)} for group in groups], lr=1e-3)
    rates = [lambda step: float(step >= 14)] * 2
    rates[:late] = [lambda step: 1.0] * late
    return {"optimizers": optimizer, "after": torch.optim.lr_scheduler.LambdaLR(optimizer, rates).step, "steps": 20}


def with_elements_near_0(model: Model) -> Options:
    with torch.no_grad():
        for weight in model.parameters():
            weight.view(-1)[::97] = 1e-9
    return {"optimizers": adamw(model, lr=1e-12, weight_decay=0.0)}


def with_an_adapter(model: Model, holds_all: bool) -> Options:
    model.requires_grad_(False)
    adapter = torch.nn.Linear(32, 32)
    model.head = torch.nn.Sequential(adapter, model.head)
    return {"optimizers": torch.optim.AdamW(model.parameters() if holds_all else adapter.parameters(), lr=1e-3)}


def with_gradients_elsewhere(model: Model) -> Options:
    """As Megatron keeps them in ``main_grad``, so that they are gone before the step."""

    def move(weight: torch.Tensor) -> None:
        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
        weight.grad = None

    for weight in model.parameters():
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        weight.register_post_accumulate_grad_hook(move)

    @torch.no_grad()
    def update() -> None:
        for weight in model.parameters():
            weight.sub_(weight.main_grad, alpha=1e-2)  # type: ignore[attr-defined]
            weight.main_grad.zero_()  # type: ignore[attr-defined]

    return {"after": update}


def at_each_loss(model: Model, change: Callable[[int], object], **more: Any) -> Options:
    return {"loss": model.loss_after(change), **more}


def with_heads(model: Model, joins: int) -> Options:
    """As many of two more heads join the training in step 9."""
    model.first, model.second = te.Linear(32, 16), te.Linear(32, 16)

    def loss(step: int) -> torch.Tensor:
        heads = (model.first, model.second)[: joins if step >= 9 else 0]
        return sum((head(torch.randn(16, 32)).square().mean() for head in heads), model.loss(step))

    return {"loss": loss, "steps": 16}


def with_a_layer_without_use(model: Model) -> Options:
    model.unused = te.Linear(32, 32)
    return {}


def with_an_optimizer_that_lacks_the_head(model: Model) -> Options:
    optimizer = adamw(model)
    model.head = torch.nn.Linear(32, 16)
    return {"optimizers": optimizer}


def with_an_optimizer_of_a_copy(model: Model) -> Options:
    copied = copy.deepcopy(model)
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        own.register_post_accumulate_grad_hook(lambda weight, other=other: setattr(other, "grad", weight.grad))
    return {"optimizers": adamw(copied)}


def with_a_weight_that_is_put_back(model: Model) -> Options:
    weight = model.blocks[1].fc2.weight.detach()
    return {"after": functools.partial(weight.copy_, weight.clone())}


def change_in_the_run(change: Callable[[Model, torch.optim.Optimizer, int], None], steps: int) -> Any:
    def prepare(model: Model) -> Options:
        parts = [{"params": part.parameters()} for part in (model.embedding, model.blocks, model.head)]
        optimizer = torch.optim.AdamW(parts, 1e-3)
        return at_each_loss(model, functools.partial(change, model, optimizer), optimizers=optimizer, steps=steps)

    return prepare


def stop(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 12:
        optimizer.step = lambda: None  # type: ignore[assignment,method-assign]


def cut(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.blocks[0].cut = bool(step % 2)  # which is not a problem
    model.blocks[1].cut = step >= 8


def skip(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 12:
        model.blocks[1].forward = lambda tensor: tensor


def remove(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 12:
        optimizer.param_groups.pop()


def cut_block_1(model: Model, is_cut: Callable[[int], bool]) -> Options:
    return at_each_loss(model, lambda step: setattr(model.blocks[1], "cut", is_cut(step)), steps=56)


STANDS_STILL = {"rule": "frozen-weight", "severity": "warning", "since": 0}
NO_GRADIENT = {"rule": "missing-gradient", "severity": "warning", "since": 0}
JOINS_LATE = "from step 0 on, and later did again"

TRAININGS = [
    silent("warm-up from 0", lambda model: scheduled(model, lambda step: step / 100)),
    silent("an adapter of frozen layers", lambda model: with_an_adapter(model, holds_all=False)),
    finds("an optimizer that holds frozen layers too", lambda model: with_an_adapter(model, holds_all=True),
          severity="note"),
    silent("gradients that are gone before the step", with_gradients_elsewhere),
    finds("a learning rate of 0", lambda model: {"optimizers": adamw(model, lr=0.0)}, **STANDS_STILL,
          seen="learning rate"),
    finds("a tiny rate", lambda model: {"optimizers": adamw(model, lr=1e-12, weight_decay=0.0)}, **STANDS_STILL,
          seen="learning rate"),
    finds("a tiny rate of SGD", lambda model: {"optimizers": torch.optim.SGD(model.parameters(), lr=1e-12)},
          **STANDS_STILL, seen="learning rate"),
    finds("a tiny rate that moves elements near 0", with_elements_near_0, **STANDS_STILL),
    finds("a learning rate that ends at 0",
          lambda model: scheduled(model, lambda step: max(0.0, 1 - step / 8), steps=40),
          **STANDS_STILL | {"since": 8}, seen="with a learning rate above 0"),
    silent("a few steps at the end of a schedule without a rate",
           lambda model: scheduled(model, lambda step: max(0.0, 1 - step / 8), steps=24)),
    silent("no learning rate in the first steps", lambda model: without_a_rate_at_first(model, 0)),
    silent("no learning rate of a group in the first steps", lambda model: without_a_rate_at_first(model, 1)),
    finds("a block that is frozen in mid-run",
          lambda model: at_each_loss(model, lambda step: model.blocks[1].requires_grad_(step < 12), steps=24),
          rule="missing-gradient", severity="note", layers=OF_BLOCK_1, since=12),
    finds("a block that is cut off",
          lambda model: cut_block_1(model, lambda step: True),
          **NO_GRADIENT, layers=OF_BLOCK_1,
          seen=r"^blocks\.1\.fc1\.layer_norm_weight and 5 more parameters received no gradient in"),
    finds("a layer without use", with_a_layer_without_use,
          **NO_GRADIENT, layers=("unused",), seen=r"^unused\.weight and 1 more parameter received no gradient in"),
    finds("an optimizer stops", change_in_the_run(stop, 40), **STANDS_STILL | {"since": 12}, layers=()),
    finds("a block is cut off in the run", change_in_the_run(cut, 25), **NO_GRADIENT | {"since": 8}, layers=OF_BLOCK_1,
          marks=pytest.mark.extended, seen="had gradients at the optimizer's step, but none since step 8, although"),
    finds("a block is no longer called, which may be meant, as in training by phases", change_in_the_run(skip, 80),
          rule="missing-gradient", severity="note", since=12, layers=OF_BLOCK_1, marks=pytest.mark.extended),
    finds("a group leaves the optimizer", change_in_the_run(remove, 25), **NO_GRADIENT | {"since": 12},
          layers=("head",)),
    finds("heads that join the training late", lambda model: with_heads(model, 2), severity="note",
          layers=("first", "second"), seen=JOINS_LATE),
    finds("one of two heads joins the training late", lambda model: with_heads(model, 1), severity="warning",
          layers=("first", "second"), seen=f"^((?!{JOINS_LATE}).)*$"),
    finds("a block that leaves the training for a while",
          lambda model: cut_block_1(model, lambda step: 4 <= step < 16), severity="note", layers=OF_BLOCK_1),
    finds("a block that leaves the training again",
          lambda model: cut_block_1(model, lambda step: 4 <= step < 16 or step >= 20), severity="warning",
          layers=OF_BLOCK_1),
    finds("an optimizer that lacks parameters", with_an_optimizer_that_lacks_the_head, rule="missing-gradient",
          layers=("head",),
          seen="^head.weight and 1 more parameter received gradients, but no optimizer updates them: "),
    finds("an optimizer of a copy", with_an_optimizer_of_a_copy, rule="frozen-weight", severity="error"),
    finds("a weight that is put back", with_a_weight_that_is_put_back, rule="frozen-weight", severity="error",
          layers=("blocks.1.fc2",), seen=r"^blocks\.1\.fc2\.weight: no bit changed in"),
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "expected", "seen"), TRAININGS)
def test_a_training_and_its_finding(
    tmp_path: Path, prepare: Callable[[Model], Options], expected: dict[str, Any], seen: str
) -> None:
    model = Model()
    options = prepare(model)
    verdict = train(tmp_path, model, **{"optimizers": adamw(model), **options})
    findings = of_parameters(verdict)
    assert len(findings) == bool(expected), str(verdict)
    for finding in findings:
        assert {name: getattr(finding, name) for name in expected} == expected
        assert re.search(seen, f"{finding.seen}: {finding.remedy}")
    if not findings:
        assert_checked(verdict)


@pytest.mark.few
@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (adamw, False),
        (lambda model: adamw(model, weight_decay=0.0), True),
        (lambda model: torch.optim.SGD(model.parameters(), lr=1e-2), False),
        (lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9), False),
        (lambda model: FusedAdam(model.parameters(), lr=1e-3), True),
        (lambda model: FusedSGD(model.parameters(), lr=1e-2), False),
        (lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3), True),
    ],
    ids=["adamw", "no decay", "sgd", "small momentum", "fused adam", "fused sgd", "adafactor"],
)
def test_healthy_optimizers_have_no_findings(
    tmp_path: Path, make: Callable[[torch.nn.Module], torch.optim.Optimizer], tied: bool
) -> None:
    model = Model(tied=tied)
    assert_healthy(train(tmp_path, model, make(model), micro_batches=2 - tied, around=in_fp8 if tied else outside))


def test_a_config_without_statistics_of_weights_checks_parameters_too(tmp_path: Path) -> None:
    model = Model()
    config = statistics(tensors=["activation"], stats=["cur_amax"], freq=5)
    assert_healthy(train(tmp_path / "healthy", model, adamw(model), config=config))
    model.blocks[1].cut = True
    (result,) = of_parameters(train(tmp_path / "planted", model, adamw(model), config=config))
    assert result.layers == OF_BLOCK_1


def test_sparse_gradients_are_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.embedding = torch.nn.Embedding(16, 32, sparse=True)
    dense = torch.optim.SGD([weight for weight in model.parameters() if weight is not model.embedding.weight], lr=1e-2)
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-3)
    assert_healthy(train(tmp_path, model, [dense, sparse], micro_batches=3))
    assert not caplog.messages


@pytest.mark.parametrize("optimizers", [1, 2])
def test_broken_weights_are_named_in_the_order_of_the_model(tmp_path: Path, optimizers: int) -> None:
    """Not in that of the optimizers, which step some twice."""
    model = Model()
    weights = [*model.parameters()][::-1]
    parts = [weights[:8], weights[8:] if optimizers == 1 else weights[4:]]
    if optimizers == 1:
        made = [torch.optim.SGD([{"params": part} for part in parts], lr=1e-2)]
    else:
        made = [torch.optim.SGD(part, lr=1e-2) for part in parts]
    steps = iter(range(9))

    def spoil() -> None:
        if next(steps) == 4:
            for weight in weights[2:]:
                torch.nn.init.constant_(weight, torch.nan)

    verdict = train(tmp_path, model, made, after=spoil, steps=7)
    (found,) = [finding for finding in verdict if finding.title == "inf or nan in a tensor"]
    assert "first embedding.weight" in str(found)
    assert f"{len(weights) - 2} parameters" in str(found)


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "rate", "decay", "finds"),
    [
        (torch.optim.AdamW, 1e-3, 20.0, True),
        (torch.optim.AdamW, 1e-3, 1.0, False),
        (torch.optim.SGD, 0.5, 0.05, True),
        (torch.optim.Adam, 1e-3, 20.0, False),
    ],
)
def test_a_decay_that_leaves_nothing(tmp_path: Path, kind: Any, rate: float, decay: float, finds: bool) -> None:
    """Of one block; Adam adds it to the gradient."""
    model = Model()
    block = list(model.blocks[1].parameters())
    others = [weight for weight in model.parameters() if not any(weight is of_block for of_block in block)]
    groups: Any = [{"params": others}, {"params": block, "weight_decay": decay}]
    optimizer = kind(groups, lr=rate, weight_decay=0.0)
    for group in groups[:1]:
        group["lr"] = 1e-3
    results = [item for item in train(tmp_path, model, optimizer) if item.rule == "learning-rate"]
    assert [(item.severity, item.layers) for item in results] == [("warning", ("blocks.1.fc1", "blocks.1.fc2"))] * finds
    assert not finds or f"weight decay removes {100 * rate * decay:.3g} % of blocks.1" in results[0].seen


def test_an_optimizer_that_loads_its_state_has_other_groups(tmp_path: Path) -> None:
    """Their learning rate and decay count from then on."""
    model = Model()
    optimizer = adamw(model)

    def load() -> None:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["weight_decay"] = 20.0

    (result,) = [item for item in train(tmp_path, model, optimizer, after=load) if item.rule == "learning-rate"]
    assert "weight decay removes 2 %" in result.seen


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


def test_an_average_of_the_weights_in_the_model(tmp_path: Path) -> None:
    model = Model()
    averaged = torch.optim.swa_utils.AveragedModel(model.blocks)
    both = torch.nn.ModuleDict({"model": model, "average": averaged})
    verdict = trained(
        tmp_path, both, adamw(model), loss=model.loss, after=lambda: averaged.update_parameters(model.blocks)
    )
    assert_healthy(verdict)


def test_experts_without_tokens(tmp_path: Path) -> None:
    """Of six, each step trains one; one gets no tokens in any step, and two get tokens in few steps, none after the
    tenth step."""
    experts = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(6))

    def loss(step: int) -> torch.Tensor:
        return experts[step * step % 3 if step > 10 else step % 5](torch.ones(16, 32)).square().mean()

    assert not of_parameters(trained(tmp_path / "few", experts, adamw(experts), loss=loss, steps=40))
    grouped, inputs = te.GroupedLinear(4, 32, 32), torch.randn(32, 32)
    verdict = trained(
        tmp_path / "grouped", grouped, adamw(grouped), loss=lambda _: grouped(inputs, [16, 16, 0, 0]).square().mean()
    )
    assert not [finding for finding in of_parameters(verdict) if finding.severity != "note"]


@pytest.mark.extended
@pytest.mark.slow
def test_grouped_experts_without_tokens_for_many_steps_are_a_note_with_their_share(tmp_path: Path) -> None:
    grouped, inputs = te.GroupedLinear(4, 32, 32), torch.randn(32, 32)
    verdict = trained(
        tmp_path,
        grouped,
        adamw(grouped),
        loss=lambda step: grouped(inputs, [16, 0, 0, 16] if step < 2 else [32, 0, 0, 0]).square().mean(),
        steps=70,
        config=statistics(freq=50),
    )
    (idle,) = (finding for finding in verdict if finding.rule == "missing-gradient")
    assert (idle.severity, idle.since) == ("note", 0)
    assert "75 % of similar weights" in idle.seen


class ListOfExperts(torch.nn.Module):
    """Experts that are called only with tokens, in two blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(te.Linear(32, 32) for _ in range(count)) for _ in range(2)
        )

    def loss(self, used: list[int]) -> torch.Tensor:
        parts = torch.ones(len(used), 16, 32)
        for experts in self.blocks:
            parts = torch.stack([experts[number](part) for number, part in zip(used, parts, strict=True)])
        return parts.square().mean()


@pytest.mark.slow
def test_listed_experts_without_tokens_for_many_steps_are_a_note_with_their_share(tmp_path: Path) -> None:
    model = ListOfExperts(5)
    verdict = train(
        tmp_path,
        model,
        adamw(model),
        loss=lambda step: model.loss([0, 1, 2, 3] if step < 2 else [0, 1, 4]),
        steps=72,
        config=statistics(freq=50),
    )
    (idle,) = of_parameters(verdict)
    assert (idle.severity, len(idle.layers)) == ("note", 4)
    assert "40 % of similar weights" in idle.seen


@pytest.mark.few
@pytest.mark.parametrize(
    ("clears", "micro_batches", "finds"),
    [("never", 1, True), ("never", 3, True), ("after 3 micro-batches", 3, True), ("before each backward", 1, False)],
)
def test_gradients_that_are_not_cleared(tmp_path: Path, clears: str, micro_batches: int, finds: bool) -> None:
    model = Model()
    optimizer = adamw(model)
    clear = optimizer.zero_grad

    def loss(number: int) -> torch.Tensor:
        if clears == "before each backward":
            clear(set_to_none=number % 2 == 0)
        if clears == "after 3 micro-batches" and number % 3:
            optimizer.step()  # one indentation too deep
        return model.loss(number)

    if clears != "after 3 micro-batches":
        optimizer.zero_grad = lambda *_: None  # type: ignore[method-assign]
    verdict = train(tmp_path, model, optimizer, steps=9, loss=loss, micro_batches=micro_batches)
    findings = [(finding.rule, finding.since) for finding in of_parameters(verdict)]
    assert findings == [("kept-gradient", 0)] * finds
    assert "kept-gradient" in verdict.checked


@pytest.mark.parametrize(
    "clips", ["a part", "all", "each part", "of one of two optimizers", "a part in the first step"]
)
def test_clipping_that_leaves_out_parameters(tmp_path: Path, clips: str) -> None:
    model = Model()
    first, *others = list(model.children())
    optimizers = [adamw(model)]
    if "two" in clips:
        optimizers = [adamw(part) for part in (first, torch.nn.ModuleList(others))]
    of_steps = {"a part": [[first]], "all": [[model]], "each part": [list(model.children())]}
    of_steps |= {"of one of two optimizers": [[first]], "a part in the first step": [[first], *[[model]] * 8]}
    parts = itertools.cycle(of_steps[clips])

    def clip() -> None:
        for part in next(parts):
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)

    verdict = train(tmp_path, model, optimizers, steps=9, before=clip)
    findings = [(found.severity, found.since) for found in verdict if found.rule == "gradient-norm"]
    assert findings == [("note", 0)] * (clips == "a part")


@pytest.mark.parametrize("clears_matrices", [False, True])
def test_one_of_two_optimizers_does_not_clear_its_gradients(tmp_path: Path, clears_matrices: bool) -> None:
    model = Model()
    matrices = torch.optim.AdamW([weight for weight in model.parameters() if weight.dim() > 1], lr=1e-3)
    vectors = torch.optim.AdamW([weight for weight in model.parameters() if weight.dim() == 1], lr=1e-3)
    (vectors if clears_matrices else matrices).zero_grad = lambda *_: None  # type: ignore[method-assign]
    verdict = train(tmp_path, model, [matrices, vectors], steps=9)
    assert [finding.rule for finding in of_parameters(verdict)] == ["kept-gradient"]


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_are_written_by_hand(tmp_path: Path, clears: bool) -> None:
    model = Model()
    optimizer, steps = adamw(model), itertools.count()

    def step() -> None:
        gradients = torch.autograd.grad(model.loss(next(steps)), list(model.parameters()))
        if clears:
            optimizer.zero_grad()
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient
        optimizer.step()

    of_nothing = torch.zeros((), requires_grad=True)
    assert not of_parameters(train(tmp_path, model, steps=9, loss=lambda _: of_nothing * 1, after=step))


def test_an_optimizer_for_each_parameter_in_the_backward(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad():
        model.blocks[0].fc1.bias.zero_()
    optimizers = {weight: torch.optim.AdamW([weight], lr=1e-3) for weight in model.parameters()}

    def step(weight: torch.Tensor) -> None:
        if weight is model.blocks[0].fc1.bias:
            weight.grad *= 1e-20  # type: ignore[operator]
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    verdict = train(tmp_path, model)
    assert not [finding for finding in verdict if finding.rule in ("below-eps", *PARAMETERS)]
    assert "below-eps" in verdict.checked


def test_gradients_of_a_discriminator_that_are_cleared_late(tmp_path: Path) -> None:
    """Before its own backward, not before the generator's."""
    models = torch.nn.ModuleDict({"generator": Block(), "discriminator": Block()})
    optimizers = {name: adamw(part) for name, part in models.items()}
    with InspectSession(model=models, log_dir=tmp_path) as session:
        for _ in range(9):
            for name in ("discriminator", "generator"):
                optimizers[name].zero_grad()
                models["discriminator"](models["generator"](torch.randn(16, 32))).square().mean().backward()
                optimizers[name].step()
            session.step()
    assert not of_parameters(session.findings)
    assert "kept-gradient" in session.findings.checked


@pytest.mark.parametrize("detaches", [False, True])
def test_a_generator_and_a_discriminator_in_turns(tmp_path: Path, detaches: bool) -> None:
    """The generator trains in the steps 4, 9, 14, ..., and statistics are collected in 0, 1, 2, 5, 10, ....; in the
    other steps no gradient reaches it, or nothing takes it."""
    models = torch.nn.ModuleDict({"generator": Block(), "discriminator": torch.nn.Sequential(Block(), Block())})
    generator, discriminator = adamw(models["generator"]), adamw(models["discriminator"])
    with InspectSession(model=models, log_dir=tmp_path) as session:
        for step in range(25):
            trains = step % 5 == 4
            models["discriminator"].requires_grad_(detaches or not trains)
            with in_fp8(step):
                fake = models["generator"](torch.randn(16, 32))
                loss = models["discriminator"](fake.detach() if detaches and not trains else fake).square().mean()
            loss.backward()
            (generator if trains else discriminator).step()
            models.zero_grad()
            models["discriminator"].requires_grad_(True)
            session.step()
    assert not [finding for finding in session.findings if finding.rule in ("dead-gradient", *PARAMETERS)]
    assert diagnose(tmp_path) == session.findings


def test_gradients_that_are_0_at_the_step(tmp_path: Path) -> None:
    """AdamW's weight decay still changes every weight."""
    model = Model()

    def zero_gradient(weight: torch.Tensor) -> None:
        weight.grad.zero_()  # type: ignore[union-attr]

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(zero_gradient)
    verdict = train(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    (finding,) = (finding for finding in of_parameters(verdict) if finding.severity != "note")
    assert finding.rule == "frozen-weight"
    assert "all gradient elements of" in finding.seen
    assert "zero_grad()" in of_parameters(verdict)[0].remedy


def test_a_loop_without_an_optimizer(tmp_path: Path) -> None:
    model = Model()

    @torch.no_grad()
    def update() -> None:
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=1e-2)
        model.zero_grad()

    verdict = train(tmp_path, model, after=update)
    assert not of_parameters(verdict)
    assert "missing-gradient" in verdict.checked
    assert "frozen-weight" not in verdict.checked


# ---------------------------------------------------------------------- missing gradients


def test_a_compiled_block_without_a_gradient_stays_one_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    compiled = torch.compile(lambda x: model[2](x + model[1](x).detach()), fullgraph=True, backend="eager")

    def loss(step: int) -> torch.Tensor:
        rows = 16 if step < 4 else 24  # it is compiled again after the hook is there
        return compiled(model[0](torch.randn(rows, 32))).square().mean()

    (result,) = of_parameters(trained(tmp_path, model, adamw(model), loss=loss))
    assert result.layers == ("1",)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_tensor_by_keyword_through_te_checkpoint(tmp_path: Path, by_keyword: bool) -> None:
    """A decoder gets the encoder's output through te.checkpoint, which has no gradient for keywords: its output needs
    none if no other tensor does. Megatron-LM issue 4765."""
    model = torch.nn.ModuleDict({name: te.Linear(32, 32) for name in ("encoder", "layer", "head")})

    def run(tensor: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return model["layer"](tensor + context)

    def loss(step: int) -> torch.Tensor:
        tensor = torch.randn(16, 32)
        context = model["encoder"](tensor)
        positional, keywords = ((tensor,), {"context": context}) if by_keyword else ((tensor, context), {})
        return model["head"](te.checkpoint(run, *positional, use_reentrant=True, **keywords)).square().mean()

    result = of_parameters(trained(tmp_path, model, adamw(model), loss=loss))
    expected = [("missing-gradient", ("encoder",)), ("missing-gradient", ("layer",))]
    assert [(item.rule, item.layers) for item in result] == expected * by_keyword
    assert ["reentrant checkpoint" in item.seen for item in result] == [False, True] * by_keyword


# ---------------------------------------------------------------------- weights that do not change


@torch.no_grad()
def _write(model: Model, what: str, first: list[torch.Tensor]) -> None:
    for weight, then in zip(model.blocks.parameters(), first, strict=True):
        if weight.dim() < 2:
            continue
        if what == "zero":
            weight.zero_()
        elif what == "first":
            weight.copy_(then)
        elif what == "other":
            weight.copy_(torch.randn_like(weight))
        elif what == "data":
            weight.data.zero_()
        else:
            weight.copy_(weight.clone())


@pytest.mark.few
@pytest.mark.parametrize(
    ("what", "seen"),
    [("zero", "set them to 0"), ("first", "restored their values of"), ("other", "replaced their"), ("same", "")],
)
def test_weights_that_other_code_writes_between_two_steps(tmp_path: Path, what: str, seen: str) -> None:
    """NVIDIA/Megatron-LM#5236: at a checkpoint, a buffer of zeros was gathered over the weights."""
    model = Model()
    first = [weight.detach().clone() for weight in model.blocks.parameters()]

    def act(step: int) -> None:
        if step == 11:
            _write(model, what, first)

    verdict = train(tmp_path, model, adamw(model), steps=15, loss=model.loss_after(act))
    findings = [finding for finding in verdict if finding.rule == "weight-jump"]
    assert [(finding.severity, finding.since) for finding in findings] == [("warning", 11)] * bool(seen)
    for finding in findings:
        assert set(finding.layers) == {"blocks.0.fc1", "blocks.0.fc2", *OF_BLOCK_1}
        assert f"other code than the optimizer {seen}" in finding.seen


@pytest.mark.parametrize(
    ("name", "scale", "finds"), [("embedding", 448.0, True), ("head", 448.0, True), ("head", 8.0, False)]
)
def test_a_weight_without_its_scale(tmp_path: Path, name: str, scale: float, finds: bool) -> None:
    """As codes of FP8 are, whose scale was not applied; of a layer without a GEMM in low precision, too."""
    model = Model()
    with torch.no_grad():
        weight = model.get_submodule(name).weight
        weight.mul_(scale / weight.abs().max())
    verdict = train(tmp_path, model, adamw(model, 1e-6))
    findings = [finding for finding in verdict if "without their scale" in finding.seen]
    assert [(finding.rule, finding.severity, finding.layers, finding.since) for finding in findings] == [
        ("sibling", "warning", (name,), 0)
    ] * finds


@pytest.mark.parametrize("finds", [False, True])
def test_parameters_of_two_optimizers_that_both_step(tmp_path: Path, finds: bool) -> None:
    model = Model()
    actor, critic = adamw(model), adamw(model)
    actor.zero_grad = lambda *_: None  # type: ignore[method-assign]

    def act(step: int) -> None:
        if step == 11 and finds:
            _write(model, "other", [*model.blocks.parameters()])

    verdict = train(tmp_path, model, [actor, critic], steps=15, loss=model.loss_after(act))
    assert verdict.summary.startswith("Problems found" if finds else "No problems found")
    problems = [(found.rule, found.since) for found in verdict if found.severity != "note"]
    assert problems == [] or (finds and problems[0] == ("weight-jump", 11))


@pytest.mark.parametrize("step", [3, 13])
def test_weights_of_an_earlier_step_or_checkpoint_that_are_restored(tmp_path: Path, step: int) -> None:
    model = Model()
    saved: dict[str, Any] = {}

    def act(now: int) -> None:
        if now == step:
            saved.update(copy.deepcopy(model.state_dict()))
            if step == 13:
                running_session().state_dict()
        if now == 34:
            model.load_state_dict(saved)

    verdict = train(tmp_path, model, adamw(model), steps=38, loss=model.loss_after(act))
    (finding,) = (finding for finding in verdict if finding.rule == "weight-jump")
    assert finding.since == 34
    assert f"restored their values of step {step}" in finding.seen


def test_regular_writes_and_averages_in_an_evaluation_are_silent(tmp_path: Path) -> None:
    model = Model()
    averages = [weight.detach().clone() for weight in model.parameters()]
    steps = 0

    @torch.no_grad()
    def clamp_and_evaluate() -> None:
        nonlocal steps
        steps += 1
        for weight, average in zip(model.parameters(), averages, strict=True):
            weight.clamp_(-2, 2)
            average.lerp_(weight, 0.1)
            if steps in (9, 13):  # swapped in, and out again
                own = weight.clone()
                weight.copy_(average)
                weight.copy_(own)

    verdict = train(tmp_path, model, adamw(model), steps=18, after=clamp_and_evaluate)
    assert not verdict.wrong


class Masters:
    """An optimizer of float32 masters that copies them into the weights: at once, a step late, or never.

    Args:
        weights: those with a master; by default all of the model.
        arrange: masters -> what the optimizer is made of.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        copies: str,
        lr: float,
        weights: Sequence[torch.nn.Parameter] = (),
        arrange: Callable[[list[torch.nn.Parameter]], Any] = list,
    ) -> None:
        self.weights = list(weights) or list(model.parameters())
        self.masters = [torch.nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        self.optimizer = torch.optim.Adam(arrange(self.masters), lr=lr)
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


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "lr", "copies"),
    [
        ("bfloat16", 1e-4, "at once"),
        ("bfloat16", 1e-3, "late"),
        ("current", 1e-4, "late"),
        ("current", 1e-3, "never"),
        ("block", 1e-3, "at once"),
        ("block", 1e-4, "never"),
    ],
)
def test_masters_that_do_not_reach_the_weights_are_found(tmp_path: Path, kind: str, copies: str, lr: float) -> None:
    recipe = Float8BlockScaling() if kind == "block" else Float8CurrentScaling()
    with te.quantized_model_init(enabled=kind != "bfloat16", recipe=recipe):
        model = torch.nn.Sequential(*(te.Linear(128, 128, params_dtype=torch.bfloat16) for _ in range(2)))
    result = of_parameters(
        trained(
            tmp_path,
            model,
            Masters(model, copies, lr).optimizer,
            loss=lambda step: model(torch.randn(128, 128, dtype=torch.bfloat16)).float().square().mean(),
            around=lambda step: te.autocast(recipe=recipe),
            steps=20,
        )
    )
    assert [(item.rule, item.severity) for item in result] == [("frozen-weight", "error")] * (copies != "at once")
    assert all("more than rounding" in item.seen for item in result)


def quantized_blocks(blocks: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        return torch.nn.Sequential(*(te.LayerNormLinear(64, 64, params_dtype=torch.bfloat16) for _ in range(blocks)))


def train_masters(folder: Path, model: torch.nn.Module, masters: Masters) -> Verdict:
    return trained(
        folder,
        model,
        masters.optimizer,
        loss=lambda step: model(torch.randn(64, 64, dtype=torch.bfloat16)).float().square().mean(),
        around=lambda step: te.autocast(recipe=Float8CurrentScaling()),
        steps=20,
    )


def in_two_groups(masters: list[torch.nn.Parameter]) -> Any:
    return [
        {"params": [master for master in masters if (master.dim() > 1) == is_matrix]} for is_matrix in (True, False)
    ]


def flat(masters: list[torch.nn.Parameter]) -> Any:
    """One tensor with the values of all masters."""
    whole = torch.nn.Parameter(torch.cat([master.detach().flatten() for master in masters]))
    whole.grad = torch.zeros_like(whole)
    return [whole]


@pytest.mark.few
@pytest.mark.parametrize("arrange", [list, in_two_groups])
@pytest.mark.parametrize("copies", ["at once", "never"])
def test_masters_of_quantized_weights_alone_and_in_groups(tmp_path: Path, arrange: Any, copies: str) -> None:
    model = quantized_blocks()
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    if arrange is list:
        masters = Masters(model, copies, 1e-3, matrices, lambda of_matrices: [*of_matrices, *others])
    else:
        masters = Masters(model, copies, 1e-3, arrange=arrange)
    verdict = train_masters(tmp_path, model, masters)
    assert [finding.rule for finding in of_parameters(verdict)] == ["frozen-weight"] * (copies == "never")
    assert_checked(verdict)


def test_a_layer_without_masters_is_left_out_of_the_optimizer(tmp_path: Path) -> None:
    """The biases of all layers are 0: they are told apart by the matrices beside them."""
    model = quantized_blocks()
    masters = Masters(model, "at once", 1e-3, [*model[0].parameters(), *model[2].parameters()])
    (result,) = of_parameters(train_masters(tmp_path, model, masters))
    assert (result.rule, result.layers) == ("missing-gradient", ("1",))


@pytest.mark.parametrize("arrange", [flat, lambda masters: masters[::-1]], ids=["flat", "reversed"])
def test_masters_that_cannot_be_matched_are_said_and_not_blamed(tmp_path: Path, arrange: Any) -> None:
    model = quantized_blocks()
    verdict = train_masters(tmp_path, model, Masters(model, "at once", 1e-3, arrange=arrange))
    assert not of_parameters(verdict)
    reasons = {item.rule: item.why for item in verdict.not_checked}
    for rule in ("missing-gradient", "frozen-weight"):
        assert reasons[rule].startswith("the tensors that Adam steps are neither weights of the model nor")
    assert "neither weights of the model" in str(verdict)


@pytest.mark.parametrize("restores", [False, True])
def test_masters_of_fused_adam(tmp_path: Path, restores: bool) -> None:
    with te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        model = torch.nn.Sequential(*(te.Linear(128, 128) for _ in range(2)))
    codes = model[1].weight._data
    result = of_parameters(
        trained(
            tmp_path,
            model,
            FusedAdam(model.parameters(), lr=1e-3, master_weights=True),
            loss=lambda step: model(torch.randn(128, 128)).square().mean(),
            after=functools.partial(codes.copy_, codes.clone()) if restores else lambda: None,
            steps=20,
        )
    )
    assert [(item.rule, item.layers) for item in result] == [("frozen-weight", ("1",))] * restores


def test_a_quantized_weight_whose_updates_are_far_below_its_smallest_number(tmp_path: Path) -> None:
    """All but one of its elements are 0 in FP8 (smallest number here: 4.4e-6); the masters take the updates."""
    with te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        model = torch.nn.Sequential(te.Linear(128, 128, bias=False))
    masters = Masters(model, "at once", lr=1e-9)
    with torch.no_grad():
        masters.masters[0].copy_(torch.linspace(1e-7, 2e-7, 128 * 128).view(128, 128))
        masters.masters[0][0, 0] = 1.0
    masters.copy()
    codes = model[0].weight._data.clone()
    assert codes.count_nonzero() == 1
    verdict = trained(tmp_path, model, masters.optimizer, loss=lambda _: model(torch.randn(128, 128)).square().mean())
    assert not of_parameters(verdict)
    assert "frozen-weight" not in verdict.checked, "no update had to show"
    assert torch.equal(model[0].weight._data, codes)


# ---------------------------------------------------------------------- the end of a run


def test_a_weight_that_is_nan_after_the_last_step(tmp_path: Path) -> None:
    model = Model()
    steps = iter(range(STEPS))

    @torch.no_grad()
    def break_in_the_end() -> None:
        model.blocks[1].fc1.bias[0] = 1.0 if next(steps) < STEPS - 1 else torch.nan

    verdict = train(tmp_path, model, adamw(model), after=break_in_the_end)
    (result,) = (item for item in verdict if item.title == "inf or nan in a tensor")
    assert (result.layers, result.since) == (("blocks.1.fc1",), STEPS - 1)
    assert "blocks.1.fc1.bias" in result.seen
    assert not verdict.healthy


def test_training_is_bit_equal(tmp_path: Path) -> None:
    models = [Model() for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    config = statistics(tensors=["weight"], stats=["cur_amax"], freq=100)
    train(tmp_path, models[0], optimizers[0], config=config, around=in_fp8)
    for step in range(STEPS):
        with in_fp8(step):
            loss = models[1].loss(step)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(map(torch.equal, *(list(model.parameters()) for model in models)))


# ---------------------------------------------------------------------- several ranks

_ALONE = "0.bias and 5 more parameters: ranks had the same values before the first step and now have different ones"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of each of two ranks: case -> findings, and the rules that were checked."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("parameters_script.py")
    ended = ranks(script, [[str(rank), str(folder)] for rank in range(2)])
    assert not ended[0].returncode, ended[0].stderr
    lines = [[json.loads(line) for line in item.stdout.splitlines() if line.startswith("[")] for item in ended]
    return [{case: (item, checked) for case, item, checked in line} for line in lines]


REPLICAS = ["replicas-differ", "no-reduction"]
_FORGOTTEN = ["replicas-differ", "error"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "finding", "seen", "checked"),
    [
        ("alone", ["no-reduction", "warning", ["0", "1"]], _ALONE, None),
        (
            "experts alone",
            ["no-reduction", "warning", ["router"]],
            "while other parameters are sharded or differ",
            None,
        ),
        ("one forgotten", [*_FORGOTTEN, ["1"]], "1.bias and 1 more parameter: ranks that had the same", None),
        ("ddp drifting", [*_FORGOTTEN, ["0"]], "0.layer_norm_weight: ranks that had the same values", None),
        ("norms forgotten", [*_FORGOTTEN, ["layernorm_linear"]], "layer_norm_bias: ranks that had", None),
        ("experts, router forgotten", [*_FORGOTTEN, ["router"]], "router.bias and 1 more parameter", None),
        ("other seeds", ["replicas-differ", "note", ["0", "1"]], "since before the first step", None),
        *(
            (case, [], "", REPLICAS)
            for case in ("averaged", "ddp", "fsdp", "fsdp without shards", "fsdp 2", "norms", "experts")
        ),
        ("local numbers", [], "", []),
        ("fp8 shards", [], "", ["frozen-weight"]),
        ("mxfp8 shards", [], "", ["frozen-weight"]),
        *(
            (f"{case}, restored", ["frozen-weight", "error", ["1"]], "by more than rounding", ["frozen-weight"])
            for case in ("fp8 shards", "mxfp8 shards")
        ),
    ],
)
def test_ranks(
    two_ranks: list[dict[str, Any]], case: str, finding: list[Any], seen: str, checked: list[str] | None
) -> None:
    """Replicas that differ, that should differ or do not; and quantized shards and their masters."""
    for of_rank in two_ranks:
        results, checked_rules = of_rank[case]
        assert [result[:3] for result in results] == [finding] * bool(finding)
        assert all(seen in result[3] for result in results)
        assert checked in (None, checked_rules)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "finds"),
    [
        *((case, False) for case in ("averaged", "ddp", "fsdp", "fsdp 2", "experts")),
        *((case, True) for case in ("before the mean", "shards by torch", "experts alone")),
    ],
)
def test_norms_by_which_ranks_clip(two_ranks: list[dict[str, Any]], case: str, finds: bool) -> None:
    for of_rank in two_ranks:
        result, _ = of_rank[f"clipped, {case}"]
        assert [item[:3] for item in result] == [["gradient-norm", "warning", []]] * finds
        assert all("each by that of its own gradients" in item[3] for item in result)


@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, FusedAdam])
def test_a_session_after_gradients_have_become_small(tmp_path: Path, optimizer_of: Callable[..., Any]) -> None:
    """Adam divides by the gradients of up to a thousand steps, so weights in bfloat16 may stand still for a while."""
    model = torch.nn.Sequential(*(te.Linear(32, 32, params_dtype=torch.bfloat16) for _ in range(2)))
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 32, dtype=torch.bfloat16)

    def loss(step: int) -> torch.Tensor:
        return model(inputs).float().square().mean() * (100.0 if step < 20 else 1e-3)

    for step in range(150):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not of_parameters(trained(tmp_path, model, optimizer, loss=lambda step: loss(150), steps=20))


def test_each_problem_of_a_parameter_belongs_to_a_rule() -> None:
    """The rules on elements that are inf or nan need more than the check of parameters."""
    assert {*get_args(ParameterProblem)} - {*RULE_OF} == {"nonfinite", "nonfinite_gradient"}
    assert {RULE_OF[what] for what in ENDS_BY_A_GRADIENT} == {"missing-gradient"}


def test_largest_magnitudes_are_those_of_the_norm() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        values = ([1.0, -3.0, 2.0], [math.nan, 1.0], [-math.inf, math.nan], [-math.inf, 1.0], [0.0, -0.0], [[-2.0]])
        tensors = [torch.tensor(of_tensor, dtype=dtype) for of_tensor in values]
        tensors.append(torch.randn(8, 6).to(dtype).t()[::2])
        largest = largest_magnitudes(tensors)
        expected = torch.stack([torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors])
        assert largest.dtype == dtype
        assert torch.equal(largest.nan_to_num(-1.0), expected.nan_to_num(-1.0))
