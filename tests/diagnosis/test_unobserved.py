"""Nothing is concluded from missing observations: the reason comes first, and no rule fires because of it."""

from __future__ import annotations

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


class WithConvolution(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().forward(self.convolution(tensor.unsqueeze(1)).squeeze(1))


class Recurrent(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().forward(self.recurrent(tensor.unsqueeze(1))[0].squeeze(1))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.chunk(2)
        return torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])


class Model(torch.nn.Module):
    """A base with its forward called by ``call``, and a head of torch."""

    def __init__(self, base: torch.nn.Module, call: Callable[..., torch.Tensor] = lambda base, x: base(x)) -> None:
        super().__init__()
        self.base = base
        self.head = torch.nn.Linear(WIDTH, 8)
        self._call = call

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.head(self._call(self.base, tensor))


def without(context: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def call(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        with context():
            result: torch.Tensor = base(tensor)
        return result.clone()

    return call


def checkpointed(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(base, tensor, use_reentrant=True)
    return result


def te_checkpointed(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = te.checkpoint(base, tensor, use_reentrant=True)
    return result


def train(folder: Path, model: torch.nn.Module, **options: Any) -> InspectSession:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    torch.manual_seed(0)
    options = {"model": model, "log_dir": folder, **options}
    with InspectSession(**options) as session:
        for _ in range(STEPS):
            tensor = torch.randn(32, WIDTH)
            loss = torch.nn.functional.cross_entropy(model(tensor), tensor[:, :8].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss})
            session.step()
    return session


def named(verdict: Verdict) -> list[str]:
    return [finding.rule for finding in verdict]


def warned(share: str) -> dict[str, str]:
    return {"share": share, "on_broken": "warn"}


BASES = [Mlp, WithConvolution, Recurrent, Experts]


@pytest.mark.parametrize("base", BASES)
def test_evaluation_mode_is_the_finding(tmp_path: Path, base: type[torch.nn.Module]) -> None:
    session = train(tmp_path, Model(base()).eval())
    assert named(session.findings) == ["evaluation-mode"]
    assert str(session.coverage()).startswith("Not observed: evaluation mode (base.")
    assert torch.tensor(session.coverage().share("fp8")).isnan()
    assert "no-low-precision" not in session.findings.checked
    assert diagnose(tmp_path) == session.findings
    rows = open_run(tmp_path).gemms.to_pylist()
    assert {row["not_run"] for row in rows if row["runs"] == "uncounted"} == {"not observed: evaluation mode"}


@pytest.mark.parametrize(("base", "context"), half(BASES, [torch.no_grad, torch.inference_mode]))
def test_layers_without_gradients(tmp_path: Path, base: type[torch.nn.Module], context: Callable[[], Any]) -> None:
    model = Model(base().requires_grad_(False), without(context))
    session = train(tmp_path, model, require=warned("fp8 >= 95%"))
    assert not session.findings.wrong
    assert f"Not observed: torch.{context.__name__}() (base." in str(session.coverage())
    unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
    assert "not observed" in unchecked["contract"]
    assert session.findings.state == "not enough checked"
    assert diagnose(tmp_path) == session.findings


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_forward_in_each_step_is_of_the_training(tmp_path: Path, evaluates: bool) -> None:
    """A base that the script calls outside the head belongs to the training; a layer of an evaluation does not."""
    model = Model(Mlp().eval(), lambda base, x: x)
    spare = torch.nn.ModuleList([model, te.Linear(WIDTH, WIDTH)])
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-2)
    with InspectSession(model=spare, log_dir=tmp_path) as session:
        for step in range(6):
            tensor = torch.randn(32, WIDTH)
            with torch.no_grad():
                if not evaluates or step == 3:
                    tensor = model.base(tensor)
            model(tensor).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
    assert ("Not observed: torch.no_grad() (0.base" in str(session.coverage())) == (not evaluates)


@pytest.mark.few
@pytest.mark.parametrize(("base", "call"), half(BASES, [checkpointed, te_checkpointed]))
def test_a_checkpoint_whose_inputs_need_no_gradient(
    tmp_path: Path, base: type[torch.nn.Module], call: Callable[..., torch.Tensor]
) -> None:
    session = train(tmp_path / "broken", Model(base(), call))
    (finding,) = session.findings
    assert finding.rule == "missing-gradient"
    assert "reentrant checkpoint" in finding.seen
    assert "use_reentrant=False" in finding.remedy
    fprop = [product for product in session.coverage() if product.family == "te" and product.gemm == "fprop"]
    assert {product.precision for product in fprop if product.macs} == {"fp8"}
    assert diagnose(tmp_path / "broken") == session.findings
    remedied = Model(base(), lambda base, x: call(base, x.requires_grad_()))
    assert not train(tmp_path / "remedied", remedied).findings.wrong


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_that_recomputes_in_high_precision_ran_in_low_precision(tmp_path: Path, count: int) -> None:
    layers = torch.nn.ModuleList(te.Linear(WIDTH, WIDTH) for _ in range(count))

    def call(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.requires_grad_()
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            for layer in layers:
                tensor = checkpointed(layer, tensor)
        return tensor

    assert named(train(tmp_path, Model(layers, call)).findings) == ["hole"]


def test_the_other_remedy_of_a_checkpoint(tmp_path: Path) -> None:
    model = Model(Mlp(), lambda base, x: torch.utils.checkpoint.checkpoint(base, x, use_reentrant=False))
    assert not train(tmp_path, model).findings.wrong


def test_a_forward_without_gradients_beside_the_training(tmp_path: Path) -> None:
    """A checkpoint under no_grad, as for the log-probabilities of a reference, is no forward of the training."""

    def with_reference(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        return checkpointed(base, tensor.requires_grad_())

    model = Model(Mlp(), with_reference)
    session = train(tmp_path / "alone", model)
    alone = session.coverage().macs()

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(Mlp(), with_reference)

        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return self.model(tensor)

    twice = Twice()
    session = InspectSession(model=twice, log_dir=tmp_path / "beside").start()
    for _ in range(2):
        tensor = torch.randn(32, WIDTH)
        with torch.no_grad():
            twice(tensor)
        twice(tensor).square().mean().backward()
        session.step()
    session.stop()
    assert session.coverage().macs() == alone


def test_layers_of_another_model(tmp_path: Path) -> None:
    """The session's model is of torch; a teacher runs in FP8, next to it or without gradients."""
    teacher = Mlp().requires_grad_(False)

    def call(base: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = elsewhere[0](tensor)
        result: torch.Tensor = base(tensor) + target
        return result

    elsewhere = [teacher]
    session = train(tmp_path, Model(torch.nn.Linear(WIDTH, WIDTH), call))
    assert "no-low-precision" not in named(session.findings)
    assert diagnose(tmp_path) == session.findings


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
def test_a_frozen_base_is_green(tmp_path: Path, base: type[torch.nn.Module]) -> None:
    session = train(tmp_path, Model(base().requires_grad_(False)))
    assert session.findings.healthy, session.findings
    assert diagnose(tmp_path) == session.findings


def test_a_frozen_base_in_evaluation_mode_is_no_finding(tmp_path: Path) -> None:
    session = train(tmp_path, Model(Mlp().requires_grad_(False).eval()))
    assert not session.findings.wrong
    assert "no layer was observed: evaluation mode" in {rule.why for rule in session.findings.not_checked}


def test_a_log_is_not_told_to_train(tmp_path: Path) -> None:
    train(tmp_path, Model(Mlp()))
    (log,) = (tmp_path / "nvdlfw_inspect_statistics_logs").iterdir()
    assert not [rule for rule in diagnose(log).not_checked if "model.train()" in rule.why]


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

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = make()
            self.linear = te.Linear(WIDTH, WIDTH)

        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            with te.autocast():
                return self.linear(self.recurrent(tensor)[0])

    model = Net()
    with (
        torch.backends.mkldnn.flags(enabled=gate),
        InspectSession(model=model, log_dir=tmp_path) as session,
    ):
        model(torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)).square().mean().backward()
        session.step()
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
    model = torch.nn.ModuleDict({"cell": cell(WIDTH, WIDTH)})
    model.forward = lambda tensor: model["cell"](tensor)  # type: ignore[method-assign]
    with InspectSession(model=model, log_dir=tmp_path) as session:
        result = model(torch.randn(BATCH, WIDTH))
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        session.step()
    gates = {"LSTMCell": 4, "GRUCell": 3, "RNNCell": 1}[cell.__name__]
    assert session.coverage().macs(gemm="fprop") == 2 * gates * BATCH * WIDTH * WIDTH
    assert not session.coverage().is_estimate


class Uncounted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(WIDTH, WIDTH)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        with te.autocast():
            made: torch.Tensor = self.linear(tensor)
        return torch.linalg.matrix_exp(made[:, :, None] * made[:, None, :] / 99).sum(2)


def test_an_uncounted_product_begins_the_line(tmp_path: Path) -> None:
    session = train(tmp_path, Model(Uncounted()))
    text = str(session.coverage())
    assert text.startswith("Not counted: aten::linalg_matrix_exp")
    assert "of the counted multiply-adds" in text
    assert torch.tensor(session.coverage().share("fp8")).isnan()


@pytest.mark.parametrize("raises", [False, True])
def test_a_contract_over_uncounted_products_is_not_checked(tmp_path: Path, raises: bool) -> None:
    model = Model(Uncounted())
    if raises:
        with pytest.raises(PrecisionContractError, match="cannot be checked"):
            train(tmp_path, model, require="fp8 >= 10%")
    else:
        session = train(tmp_path, model, require=warned("fp8 >= 10%"))
        unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
        assert "cannot be checked" in unchecked["contract"]
        assert session.findings.state == "not enough checked"
        assert "contract" in str(session.findings)
    verdict = diagnose(tmp_path)
    assert "contract" in {rule.rule for rule in verdict.not_checked}
    assert not verdict.healthy


def test_a_contract_over_layers_that_were_not_observed_is_not_checked(tmp_path: Path) -> None:
    require = {"layers": {"base": "fp8"}, "on_broken": "warn"}
    session = train(tmp_path, Model(Mlp()).eval(), require=require)
    unchecked = {rule.rule: rule.why for rule in session.findings.not_checked}
    assert "not observed: evaluation mode" in unchecked["contract"]


# ---------------------------------------------------------------------- gradients that are kept


@pytest.mark.parametrize("kept", ["all", "two layers", "one layer"])
@pytest.mark.parametrize("to_none", [True, False])
def test_kept_gradients_are_named(tmp_path: Path, kept: str, to_none: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 8))
    cleared = {"all": [], "two layers": [model[0]], "one layer": [model[0], model[2]]}[kept]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        for _ in range(STEPS):
            model(torch.randn(32, WIDTH)).square().mean().backward()
            optimizer.step()
            for module in cleared:
                module.zero_grad(set_to_none=to_none)
            session.step()
    (finding,) = session.findings.wrong
    assert finding.rule == "kept-gradient"
    assert finding.layers == {"all": (), "two layers": ("1", "2"), "one layer": ("1",)}[kept]
    assert ("all parameters" in finding.seen) == (kept == "all")
    assert diagnose(tmp_path) == session.findings
