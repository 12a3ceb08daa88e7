"""Nothing is concluded from missing observations: the reason comes first, and no rule fires because of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.coverage.contract_keeper import PrecisionContractError
from te_precision_callbacks.diagnosis import Verdict, diagnose
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession
from tests.combinations import half
from tests.diagnosis.planted import outside, sgd, trained
from tests.functions import Net
from tests.training import observed

STEPS = 9
WIDTH = 32


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(WIDTH, 2 * WIDTH)
        self.second = te.LayerNormLinear(2 * WIDTH, WIDTH)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return tensor + self.second(torch.relu(self.first(tensor)))


def with_convolution() -> Net:
    """Before the layers of Transformer Engine."""
    parts = {"convolution": torch.nn.Conv1d(1, 1, 3, padding=1), "mlp": Mlp()}
    return Net(lambda net, x: net.mlp(net.convolution(x.unsqueeze(1)).squeeze(1)), **parts)


def recurrent() -> Net:
    parts = {"recurrent": torch.nn.GRU(WIDTH, WIDTH, batch_first=True), "mlp": Mlp()}
    return Net(lambda net, x: net.mlp(net.recurrent(x.unsqueeze(1))[0].squeeze(1)), **parts)


def experts() -> Net:
    return Net(lambda net, x: torch.cat([net.a(x[:16]), net.b(x[16:])]), a=Mlp(), b=Mlp())


def with_head(base: torch.nn.Module, call: Callable[..., torch.Tensor] = lambda base, x: base(x)) -> Net:
    """A base with its forward called by ``call``, and a head of torch."""
    return Net(lambda net, x: net.head(call(net.base, x)), base=base, head=torch.nn.Linear(WIDTH, 8))


def without(context: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def call(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        with context():
            result: torch.Tensor = base(tensor)
        return result.clone()

    return call


checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
te_checkpointed = functools.partial(te.checkpoint, use_reentrant=True)


def train(folder: Path, model: torch.nn.Module, **options: Any) -> InspectSession:
    """The session of a training whose records give the same findings."""

    def loss(step: int) -> torch.Tensor:
        tensor = torch.randn(32, WIDTH)
        return torch.nn.functional.cross_entropy(model(tensor), tensor[:, :8].argmax(1))

    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    torch.manual_seed(0)
    session = observed(folder, net=model, steps=STEPS, optimizers=optimizer, loss=loss, logs=True, **options)
    assert diagnose(folder) == session.findings
    return session


def named(verdict: Verdict) -> list[str]:
    return [finding.rule for finding in verdict]


def warned(share: str) -> dict[str, str]:
    return {"share": share, "on_broken": "warn"}


BASES = [Mlp, with_convolution, recurrent, experts]
Base = Callable[[], torch.nn.Module]


@pytest.mark.parametrize("base", BASES)
def test_evaluation_mode_is_the_finding(tmp_path: Path, base: Base) -> None:
    session = train(tmp_path, with_head(base()).eval(), require={"layers": {"first$": "fp8"}, "on_broken": "warn"})
    assert named(session.findings) == ["evaluation-mode"]
    assert str(session.coverage()).startswith("Not observed: evaluation mode (base.")
    assert torch.tensor(session.coverage().share("fp8")).isnan()
    assert "no-low-precision" not in session.findings.checked
    unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
    assert "not observed: evaluation mode" in unchecked["contract"]
    rows = open_run(tmp_path).gemms.to_pylist()
    assert {row["not_run"] for row in rows if row["runs"] == "uncounted"} == {"not observed: evaluation mode"}


@pytest.mark.parametrize(("base", "context"), half(BASES, [torch.no_grad, torch.inference_mode]))
def test_layers_without_gradients(tmp_path: Path, base: Base, context: Callable[[], Any]) -> None:
    model = with_head(base().requires_grad_(False), without(context))
    session = train(tmp_path, model, require=warned("fp8 >= 95%"))
    assert not session.findings.wrong
    assert f"Not observed: torch.{context.__name__}() (base." in str(session.coverage())
    unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
    assert "not observed" in unchecked["contract"]
    assert session.findings.state == "not enough checked"


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_forward_in_each_step_is_of_the_training(tmp_path: Path, evaluates: bool) -> None:
    """A base that the script calls outside the head belongs to the training; a layer of an evaluation does not."""
    model = with_head(Mlp().eval(), lambda base, x: x)
    spare = torch.nn.ModuleList([model, te.Linear(WIDTH, WIDTH)])

    def loss(step: int) -> torch.Tensor:
        tensor = torch.randn(32, WIDTH)
        with torch.no_grad():
            if not evaluates or step == 3:
                tensor = model.base(tensor)
        return model(tensor).square().mean()

    session = observed(tmp_path, net=spare, steps=6, optimizers=sgd(model.head), loss=loss)
    assert ("Not observed: torch.no_grad() (0.base" in str(session.coverage())) == (not evaluates)


@pytest.mark.few
@pytest.mark.parametrize(("base", "call"), half(BASES, [checkpointed, te_checkpointed]))
def test_a_checkpoint_whose_inputs_need_no_gradient(
    tmp_path: Path, base: Base, call: Callable[..., torch.Tensor]
) -> None:
    session = train(tmp_path / "broken", with_head(base(), call))
    (finding,) = session.findings
    assert finding.rule == "missing-gradient"
    assert "reentrant checkpoint" in finding.seen
    assert "use_reentrant=False" in finding.remedy
    fprop = [product for product in session.coverage() if product.family == "te" and product.gemm == "fprop"]
    assert {product.precision for product in fprop if product.macs} == {"fp8"}
    remedied = with_head(base(), lambda base, x: call(base, x.requires_grad_()))
    assert not train(tmp_path / "remedied", remedied).findings.wrong
    remedied = with_head(base(), functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    assert not train(tmp_path / "not reentrant", remedied).findings.wrong


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_that_recomputes_in_high_precision_ran_in_low_precision(tmp_path: Path, count: int) -> None:
    layers = torch.nn.ModuleList(te.Linear(WIDTH, WIDTH) for _ in range(count))

    def call(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.requires_grad_()
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            for layer in layers:
                tensor = checkpointed(layer, tensor)
        return tensor

    assert named(train(tmp_path, with_head(layers, call)).findings) == ["hole"]


def test_a_forward_without_gradients_beside_the_training(tmp_path: Path) -> None:
    """A checkpoint under no_grad, as for the log-probabilities of a reference, is no forward of the training."""

    def with_reference(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        return checkpointed(base, tensor.requires_grad_())

    alone = train(tmp_path / "alone", with_head(Mlp(), with_reference))
    twice = Net(lambda net, x: net.model(x), model=with_head(Mlp(), with_reference))

    def loss(step: int) -> torch.Tensor:
        tensor = torch.randn(32, WIDTH)
        with torch.no_grad():
            twice(tensor)
        return twice(tensor).square().mean()

    beside = observed(tmp_path / "beside", net=twice, steps=2, loss=loss)
    assert beside.coverage().macs() == alone.coverage().macs()


def test_layers_of_another_model(tmp_path: Path) -> None:
    """The session's model is of torch; a teacher runs in FP8, next to it or without gradients."""
    teacher = Mlp().requires_grad_(False)

    def call(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(tensor)
        result: torch.Tensor = base(tensor) + target
        return result

    session = train(tmp_path, with_head(torch.nn.Linear(WIDTH, WIDTH), call))
    assert "no-low-precision" not in named(session.findings)


def adversary(critic: torch.nn.Module, way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The generator's loss: its backward runs through the critic, here in evaluation mode, or only in an evaluation."""

    def of(fake: torch.Tensor) -> torch.Tensor:
        critic.eval()
        with te.autocast(enabled=False):
            loss: torch.Tensor = critic(fake if way == "trains" else fake.detach().requires_grad_()).square().mean()
        if way == "gradient of the input":
            torch.autograd.grad(loss, [*critic.parameters()])
        critic.train()
        return loss if way == "trains" else fake.square().mean()

    return of


@pytest.mark.parametrize("way", ["trains", "evaluation with gradients", "gradient of the input"])
def test_layers_that_also_train_in_evaluation_mode(tmp_path: Path, way: str) -> None:
    generator, critic = Mlp(), Mlp()
    loss_of = adversary(critic, way)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (generator, critic)]
    models = {"generator": generator, "critic": critic}
    with InspectSession(model=models, log_dir=tmp_path, require=warned("fp8 >= 50%")) as session:
        for _ in range(STEPS):
            tensor = torch.randn(32, WIDTH)
            loss_of(generator(tensor)).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            critic(tensor).square().mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            session.step()
    coverage = session.coverage()
    assert coverage.has_unknown == (way == "trains")
    assert str(coverage).startswith("Not observed: evaluation mode (critic.") == (way == "trains")
    unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
    assert ("not observed: evaluation mode" in unchecked.get("contract", "")) == (way == "trains")
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize("penalizes", [False, True])
def test_a_gradient_penalty_is_not_counted(tmp_path: Path, penalizes: bool) -> None:
    critic = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, 1))
    model = Mlp()
    with InspectSession(model={"model": model, "critic": critic}, log_dir=tmp_path) as session:
        for _ in range(3):
            tensor = torch.randn(32, WIDTH, requires_grad=True)
            loss = critic(model(tensor)).mean()
            if penalizes:
                (gradient,) = torch.autograd.grad(critic(tensor).sum(), tensor, create_graph=True)
                loss = loss + gradient.square().mean()
            loss.backward()
            session.step()
    line = str(session.coverage())
    assert line.startswith("Not observed: double backward (create_graph=True) (the model); FP8 in") == penalizes
    assert session.coverage().has_unknown == penalizes


def test_a_layer_that_was_added_and_not_attached(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for step in range(STEPS):
            if step == 3:
                model.append(te.Linear(WIDTH, WIDTH))
                optimizer.add_param_group({"params": [*model[1].parameters()]})
            model(torch.randn(32, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            if step == 5:
                assert str(session.coverage()).startswith("Not observed: not attached ('1')")
                assert session.findings.summary.startswith("Not enough checked: observation: in step 3, '1': trained")
                session.attach(model)
    assert str(session.coverage()).startswith("FP8 in 76.9 %")


@pytest.mark.parametrize("base", BASES)
def test_a_frozen_base_is_green(tmp_path: Path, base: Base) -> None:
    session = train(tmp_path / "training", with_head(base().requires_grad_(False)))
    assert session.findings.healthy, session.findings
    (log,) = (tmp_path / "training" / "nvdlfw_inspect_statistics_logs").iterdir()
    assert not [rule for rule in diagnose(log).not_checked if "model.train()" in rule.why]
    session = train(tmp_path / "evaluation mode", with_head(base().requires_grad_(False).eval()))
    assert not session.findings.wrong
    assert "no layer was observed: evaluation mode" in {rule.why for rule in session.findings.not_checked}


# ---------------------------------------------------------------------- products that are not counted

LENGTH, BATCH = 5, 16


RECURRENT: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "lstm": (lambda: torch.nn.LSTM(WIDTH, WIDTH), 4 * 2 * WIDTH * WIDTH),
    "two layers": (lambda: torch.nn.LSTM(WIDTH, WIDTH, 2), 2 * 4 * 2 * WIDTH * WIDTH),
    "bidirectional": (
        lambda: torch.nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True),
        2 * 2 * 4 * (WIDTH * WIDTH // 2 + WIDTH // 2 * WIDTH // 2),
    ),
    "projection": (
        lambda: torch.nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH),
        4 * 2 * WIDTH * (WIDTH + WIDTH) + 2 * WIDTH * WIDTH,
    ),
    "gru": (lambda: torch.nn.GRU(WIDTH, WIDTH), 3 * 2 * WIDTH * WIDTH),
    "rnn": (lambda: torch.nn.RNN(WIDTH, WIDTH, bias=False), 2 * WIDTH * WIDTH),
    "bidirectional gru": (
        lambda: torch.nn.GRU(WIDTH, WIDTH // 2, bidirectional=True),
        2 * 3 * (WIDTH * WIDTH // 2 + WIDTH // 2 * WIDTH // 2),
    ),
}


@pytest.mark.parametrize(
    ("name", "gate"),
    [*((name, True) for name in RECURRENT), *((name, False) for name in ("two layers", "projection", "gru", "rnn"))],
)
def test_recurrent_layers_are_counted(tmp_path: Path, name: str, gate: bool) -> None:
    """By mkldnn, and decomposed."""
    make, macs = RECURRENT[name]
    model = Net(lambda net, x: net.linear(net.recurrent(x)[0]), recurrent=make(), linear=te.Linear(WIDTH, WIDTH))
    tensor = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
    with torch.backends.mkldnn.flags(enabled=gate):
        session = observed(tmp_path, net=model, steps=1, x=tensor, around=lambda _: te.autocast())
    coverage = session.coverage()
    rows = LENGTH * BATCH
    own = [product for product in coverage if product.layer.startswith("recurrent")]
    assert not coverage.is_estimate
    assert sum(product.macs for product in own if product.gemm == "fprop") == rows * macs
    backward = sum(product.macs for product in own if product.backward)
    assert 2 * rows * macs - 16 * BATCH * WIDTH * WIDTH <= backward <= 2 * rows * macs
    whole = rows * (macs + WIDTH * WIDTH)
    assert coverage.share("fp8", backward=False) == pytest.approx(rows * WIDTH * WIDTH / whole)


@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_recurrent_cells_are_counted(tmp_path: Path, cell: type[torch.nn.Module]) -> None:
    model = Net(lambda net, x: torch.cat([*net.cell(x)]), cell=cell(WIDTH, WIDTH))
    session = observed(tmp_path, net=model, steps=1, x=torch.randn(BATCH, WIDTH))
    gates = {"LSTMCell": 4, "GRUCell": 3, "RNNCell": 1}[cell.__name__]
    assert session.coverage().macs(gemm="fprop") == 2 * gates * BATCH * WIDTH * WIDTH
    assert not session.coverage().is_estimate


def uncounted(net: Net, tensor: torch.Tensor) -> torch.Tensor:
    with te.autocast():
        made: torch.Tensor = net.linear(tensor)
    return torch.linalg.matrix_exp(made[:, :, None] * made[:, None, :] / 99).sum(2)


@pytest.mark.parametrize("raises", [False, True])
def test_a_contract_over_uncounted_products_is_not_checked(tmp_path: Path, raises: bool) -> None:
    model = with_head(Net(uncounted, linear=te.Linear(WIDTH, WIDTH)))
    if raises:
        with pytest.raises(PrecisionContractError, match="cannot be checked"):
            train(tmp_path, model, require="fp8 >= 10%")
    else:
        session = train(tmp_path, model, require=warned("fp8 >= 10%"))
        text = str(session.coverage())
        assert text.startswith("Not counted: aten::linalg_matrix_exp")
        assert "of the counted multiply-adds" in text
        assert torch.tensor(session.coverage().share("fp8")).isnan()
        unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
        assert "cannot be checked" in unchecked["contract"]
        assert session.findings.state == "not enough checked"
        assert "contract" in str(session.findings)
    verdict = diagnose(tmp_path)
    assert "contract" in {rule.rule for rule in verdict.not_checked}
    assert not verdict.healthy


# ---------------------------------------------------------------------- gradients that are kept


@pytest.mark.parametrize("kept", ["all", "two layers", "one layer"])
@pytest.mark.parametrize("to_none", [True, False])
def test_kept_gradients_are_named(tmp_path: Path, kept: str, to_none: bool) -> None:
    model = torch.nn.Sequential(te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 8))
    cleared = {"all": [], "two layers": [model[0]], "one layer": [model[0], model[2]]}[kept]
    optimizer = sgd(model)

    def clear(**_: Any) -> None:
        for module in cleared:
            module.zero_grad(set_to_none=to_none)

    optimizer.zero_grad = clear  # type: ignore[method-assign]
    (finding,) = trained(tmp_path, model, optimizer, steps=STEPS, around=outside).wrong
    assert finding.rule == "kept-gradient"
    assert finding.layers == {"all": (), "two layers": ("1", "2"), "one layer": ("1",)}[kept]
    assert ("all parameters" in finding.seen) == (kept == "all")
