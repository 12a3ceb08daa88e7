"""The precision that each GEMM really ran in, against the operands of the extension's GEMMs; and how long it held."""

import contextlib
import itertools
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format

from te_precision_callbacks.base.errors import ObservationError, PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, recipe_of
from te_precision_callbacks.session import GemmPrecision, InspectSession, running_session
from tests.capability import stand_for
from tests.combinations import half, pairs
from tests.conftest import feature, statistics
from tests.functions import Net
from tests.instrumentation.gemm_spy import (
    ALWAYS,
    AUTOCAST,
    BIASES,
    BLACKWELL,
    CHECKPOINTS,
    EARLIER,
    FEATURES,
    FIRST,
    FROZEN,
    HOPPER,
    LATER,
    MODULES,
    ROWS,
    Handed,
    Spy,
    can_run,
    case,
    wrong,
)
from tests.instrumentation.steps import stepped

FP8 = DelayedScaling()


def inputs() -> torch.Tensor:
    return torch.randn(16, 32)


def audit(config: Any, log_dir: Path, recipe: Any = None, **options: Any) -> dict[str, str]:
    """GEMM -> formats of its operands, of one linear layer."""
    session = stepped(te.Linear(32, 32), log_dir, [recipe] * 2, config, **options)
    assert all(entry.layer == "linear" for entry in session.precision)
    return {entry.gemm: " ".join(entry.operands.values()) for entry in session.precision}


def test_a_feature_that_modifies_tensors_is_told_by_what_it_gave(tmp_path: Path) -> None:
    """A plan of "modify_tensor()" does not show it: FakeQuant gives plain tensors, PerTensorScaling FP8 ones."""
    fake = {"s": feature("FakeQuant", ["linear"], gemms=["fprop"], tensors=["weight"], quant_format="FP8E4M3")}
    assert audit(fake, tmp_path, FP8)["fprop"] == "FP32 FP32 (modified)"
    scaled = {"s": feature("PerTensorScaling", ["linear"], gemms=["fprop"], tensors=["weight", "activation"])}
    assert audit(scaled, tmp_path, FP8)["fprop"] == "FP8 E4M3 (modified) FP8 E4M3 (modified)"


def toggled(folder: Path, regions: str, *, says_when: bool, config: Any = None) -> InspectSession:
    """Train with a region a step: of FP8 (8), in enabled=False (0), or none (-); another layer is in enabled=False."""
    net = torch.nn.ModuleList([te.Linear(32, 32), te.Linear(32, 32)])
    session = InspectSession(config, model=net, log_dir=folder, allow_unmatched=True)
    session.start(eval_mode_counts=not says_when)
    for region in regions:
        with nullcontext() if region == "-" else te.autocast(enabled=region == "8"):
            out = net[0](torch.randn(16, 32, requires_grad=True))
        with te.autocast(enabled=False):
            net[1](out).sum().backward()
        session.step()
    session.stop()
    return session


@pytest.mark.few
@pytest.mark.parametrize("says_when", [True, False], ids=["integration", "loop"])
@pytest.mark.parametrize("regions", ["000000", "808088", "888---", "88--88"])
def test_a_region_that_excludes_a_layer_is_told_from_no_region(regions: str, says_when: bool, tmp_path: Path) -> None:
    session = toggled(tmp_path, regions, says_when=says_when, config=statistics(layers=["nowhere"]))
    stated = {"0": "runs inside te.autocast(enabled=False)", "-": "runs outside of te.autocast", "8": ""}
    assert [{product.why for product in session.coverage(at=step) if product.layer == "0"} for step in range(6)] == [
        {stated[region]} for region in regions
    ]
    assert {product.why for product in session.coverage() if product.layer == "1"} == {stated["0"]}


def events(log_dir: Path) -> list[str]:
    log = log_dir / "nvdlfw_inspect_logs" / "nvdlfw_inspect_globalrank-0.log"
    return [line.partition("Tensor: ")[2] for line in log.read_text().splitlines() if "Tensor: " in line]


def test_the_log_of_events_has_the_plans_of_training(tmp_path: Path) -> None:
    net = te.Linear(32, 32)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, observe="debug") as session:
        for fp8 in (True, True, False, False):
            net.eval()
            with torch.no_grad():
                net(torch.randn(16, 32))
            net.train()
            with te.autocast(enabled=fp8):
                net(torch.randn(16, 32)).sum().backward()
            session.step()
            assert session.flush(60.0)
            if fp8:
                assert not any(line.endswith(" - High Precision") for line in events(tmp_path))
    for plan in ("Quantize", "High Precision"):
        assert len([line for line in events(tmp_path) if line.endswith(f" - {plan}")]) == 6


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_in_high_precision_is_told_and_what_is_missing_is_said(
    tmp_path: Path, override: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Float8CurrentScaling(backward_override=override)
    config = statistics(tensors=["activation", "gradient", "dgrad", "wgrad"])
    fp8, high = "FP8 E4M3 FP8 E4M3", "FP32 FP32"
    assert audit(config, tmp_path, recipe, observe="debug") == {"fprop": fp8, "dgrad": high, "wgrad": high}
    assert "What features do with dgrad, wgrad, gradient of linear cannot be observed" in caplog.text
    assert f"backward_override='{override}'" in caplog.text
    assert "Tensor: gradient, gemm wgrad - High Precision" in " ".join(f"Tensor: {line}" for line in events(tmp_path))


def test_what_is_missing_of_a_backward_raises_if_strict(tmp_path: Path) -> None:
    recipe = Float8CurrentScaling(backward_override="dequantized")
    with pytest.raises(ObservationError, match="backward_override"):
        audit(statistics(tensors=["gradient"]), tmp_path, recipe, strict=True, observe="debug")
    audit(statistics(), tmp_path, recipe, strict=True)


def not_run(precision: Iterable[GemmPrecision]) -> dict[str, str]:
    return {f"{entry.layer} {entry.gemm}": entry.not_run for entry in precision if entry.not_run}


@pytest.mark.parametrize("layers", [["all"], ["nowhere"]])
def test_a_gemm_that_a_backward_leaves_out_is_told_as_not_run(tmp_path: Path, layers: list[str]) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 64))
    net[1].fc2_weight.requires_grad_(False)
    config = statistics(tensors=["activation", "gradient"], layers=layers)
    session = stepped(net, tmp_path, [FP8], config, inputs=inputs, allow_unmatched=True)
    assert not_run(session.precision) == {"0 dgrad": "input needs no gradient", "1.fc2 wgrad": "frozen weight"}
    stated = {f"{entry.layer} {entry.gemm}": entry.operands for entry in session.precision}
    assert stated["0 dgrad"] == {}
    assert stated["1.fc2 dgrad"] == {"gradient": "FP8 E5M2", "weight": "FP8 E4M3"}
    assert all(entry.seen or entry.not_run for entry in session.precision)


def test_a_layer_that_no_backward_reaches_has_run_its_fprop_only(tmp_path: Path) -> None:
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    net[1].register_forward_pre_hook(
        lambda _, given: (given[0].detach(),) if running_session().iteration == 0 else None
    )
    shown: list[dict[str, str]] = []
    stepped(net, tmp_path, [None] * 2, statistics(), after=lambda session: shown.append(not_run(session.precision)))
    unreached = dict.fromkeys(["0 dgrad", "0 wgrad"], "no backward has reached it")
    assert shown == [{**unreached, "1 dgrad": "input needs no gradient"}, {}]


@pytest.mark.parametrize("layers", [["all"], ["nowhere"]])
def test_what_is_unfrozen_later_is_told_from_then_on(tmp_path: Path, layers: list[str]) -> None:
    """As by a callback for finetuning: also in steps without collection."""
    net = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    shown: list[dict[str, str]] = []
    stepped(
        net,
        tmp_path,
        [None] * 5,
        statistics(freq=100, layers=layers),
        inputs=inputs,
        before=lambda step: net[0].requires_grad_(step >= 2),
        after=lambda session: shown.append(not_run(session.precision)),
        allow_unmatched=True,
    )
    frozen = "neither input nor parameters need a gradient"
    assert shown[1] == {"0 dgrad": frozen, "0 wgrad": frozen, "1 dgrad": "input needs no gradient"}
    assert shown[4] == {"0 dgrad": "input needs no gradient"}


def test_a_change_in_steps_in_which_nothing_is_due_is_noticed(tmp_path: Path) -> None:
    """Every tenth step is due here."""
    shown: list[tuple[str, bool]] = []

    def show(session: InspectSession) -> None:
        shown.append((session.precision[0].operands["weight"], session.precision[0].seen))

    for recipes in ([FP8, FP8, None, FP8, FP8], [None, None, FP8, None, None]):
        stepped(te.Linear(32, 32), tmp_path, recipes, statistics(freq=10), inputs=inputs, after=show)
    assert shown[:5] == [("FP8 E4M3", True)] * 2 + [("FP8 E4M3 -> FP32", True)] * 3
    assert shown[9] == ("FP32 -> FP8 E4M3", True)


CHANGES = [name for name in AUTOCAST if name != ALWAYS]


def cases(recipes: list[str]) -> dict[str, list[tuple[Any, ...]]]:
    """Factor -> arguments of :func:`case`.

    Each module is in each recipe, with a feature or without; and its trainable parts vary in each pair of these.
    """
    quantized = [recipe for recipe in recipes if recipe != "none"]
    some = quantized[:2]
    results: dict[str, Any] = {
        "modules": pairs(MODULES, recipes, ["none", "LogTensorStats"]),
        "features": itertools.product(["LayerNormLinear"], quantized, list(FEATURES)[2:]),
        "schedules": [("Linear", some[0], name, 10, "none", change) for name, change in half(FEATURES, CHANGES)],
        "checkpoints": itertools.product(["LayerNormLinear"], some[-1:], ["none", "LogTensorStats"], [1], CHECKPOINTS),
        "checkpoints and schedules": pairs(
            ["Linear"], some[:1], ["none", "LogTensorStats"], [10], list(CHECKPOINTS)[1:], [LATER, EARLIER]
        ),
        "gradients": pairs(
            MODULES,
            ["none", *some[-1:]],
            ["none", "LogTensorStats"],
            [10],
            ["none"],
            [ALWAYS],
            [2],
            [False],
            [FROZEN, FIRST, BIASES],
        ),
    }
    return {what: [args for args in product if can_run(*args)] for what, product in results.items()}


OF_BLACKWELL = cases(BLACKWELL)
CASES = [
    *(((9, 0), args) for of_kind in cases(HOPPER).values() for args in of_kind),
    *(((10, 0), args) for args in OF_BLACKWELL["modules"][::2]),
    *(((10, 0), args) for kind in ("features", "schedules", "gradients") for args in OF_BLACKWELL[kind][::3]),
    *(((10, 0), args) for args in OF_BLACKWELL["checkpoints"]),
]


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.few
@pytest.mark.parametrize(("capability", "args"), CASES, ids=[" ".join(map(str, args)) for _, args in CASES])
def test_no_operand_is_told_wrongly(capability: tuple[int, int], args: tuple[Any, ...]) -> None:
    stand_for(capability)
    assert case(*args) == []


@pytest.mark.parametrize("freq", [1, 10])
def test_an_evaluation_in_another_precision_is_not_told(freq: int) -> None:
    """Also where it comes between a backward and ``step()``, and leaves its state in a layer that rests."""
    for name in ("none", "LogTensorStats"):
        assert case("Linear", "current", name, freq, "none", ALWAYS, 4, True) == []


BF16 = torch.bfloat16
NOTHING = statistics(layers=["nowhere"])
Feature = type[Any]
CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()
E4M3 = DelayedScaling(fp8_format=Format.E4M3)
E4M3_CURRENT = Float8CurrentScaling(fp8_format=Format.E4M3)

pytestmark = pytest.mark.filterwarnings("ignore:Recipe type changed")


def train(session: InspectSession, net: torch.nn.Module, recipe: Any, *, before_step: Callable[[], Any] = int) -> None:
    x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = net(x)
    out.float().sum().backward()
    before_step()
    session.step()


def watched(
    folder: Path, config: Any, recipes: Sequence[Any], *, evaluated: Sequence[int] = (), tells: bool = False
) -> tuple[InspectSession, list[Handed]]:
    """A run with a recipe for each step, and an evaluation without FP8 between the backward and ``step()`` of some.

    Args:
        tells: whether the loop reports its evaluations, as the integrations do.
    """
    net, features = te.Linear(32, 64, params_dtype=BF16), ()
    if isinstance(config, type):
        features, config = (config,), {"s": feature(config.__name__, ["linear"])}
    spy = Spy({(64, 32): "linear"}, {})
    session = InspectSession(config, model=net, log_dir=folder, allow_unmatched=True, features=features)
    with contextlib.ExitStack() as stack:
        stack.push(session.start(eval_mode_counts=not tells))
        stack.enter_context(spy.watching())

        def evaluate() -> None:
            spy.training, session.observing = False, not tells
            with torch.no_grad():
                net(torch.randn(ROWS, 32, dtype=BF16))
            spy.training = session.observing = True

        for step, recipe in enumerate(recipes):
            spy.begin_step()
            train(session, net, recipe, before_step=evaluate if step in evaluated else int)
    return session, spy.handed_in


def spans(session: InspectSession, gemm: str) -> list[tuple[int, int | None, str]]:
    """Since, until and the formats of a GEMM of the one layer, over the run."""
    results = [e for at in range(session.iteration) for e in session.precision(at=at) if e.gemm == gemm]
    return list(dict.fromkeys((e.since, e.until, " ".join(e.operands.values()) or e.not_run) for e in results))


def off(*iterations: int) -> Feature:
    class Off:
        def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int | None]:
            later = [due for due in iterations if due > iteration]
            return gemm != "dgrad" or iteration not in iterations, later[0] if later else None

    return Off


def modified(*iterations: int) -> Feature:
    class Modified:
        def modify_tensor_enabled(
            self, config: Any, layer_name: str, tensor_name: str, gemm: str, iteration: int
        ) -> tuple[bool, int | None]:
            later = [due for due in iterations if due > iteration]
            acts = gemm == "fprop" and tensor_name == "weight" and iteration in iterations
            return acts, later[0] if later else None

        def modify_tensor(
            self,
            config: Any,
            layer_name: str,
            gemm: str,
            tensor_name: str,
            tensor: torch.Tensor,
            *call: Any,
            **more: Any,
        ) -> torch.Tensor:
            return tensor * 2

    return Modified


WARM_UP = [None, None, CURRENT, CURRENT, CURRENT, None, None, E4M3, E4M3]


@pytest.mark.few
@pytest.mark.parametrize(
    ("config", "recipes"),
    [
        (NOTHING, WARM_UP),
        (statistics(freq=4), WARM_UP),
        (statistics(), WARM_UP),
        (NOTHING, [CURRENT, E4M3, BLOCK, BLOCK, CURRENT, CURRENT]),
        (off(2, 3, 4), [CURRENT] * 8),
        (off(2, 4, 6), [CURRENT] * 10),
        (off(0, 3, 6), [CURRENT] * 8),
        (off(1, 2, 4, 5), [None, None, *[CURRENT] * 6]),
        (modified(0, 2, 4), [None] * 7),
        (modified(2, 3), [None] * 6),
    ],
)
def test_it_is_what_the_gemms_of_each_iteration_were_handed(tmp_path: Path, config: Any, recipes: list[Any]) -> None:
    session, handed_in = watched(tmp_path, config, recipes, evaluated=[3])
    for step, handed in enumerate(handed_in):
        assert wrong(session.precision(at=step), handed) == [], step
        recipe = "none" if recipes[step] is None else recipe_of(recipes[step])
        assert {entry.recipe for entry in session.precision(at=step) if not entry.not_run} == {recipe}, step


def test_a_recipe_is_told_where_the_formats_do_not_show_it(tmp_path: Path) -> None:
    """Delayed and current scaling have the same format."""
    for config in (NOTHING, statistics()):
        session, _ = watched(tmp_path / str(config is NOTHING), config, [E4M3, E4M3, E4M3_CURRENT, E4M3_CURRENT])
        for entry in session.precision:
            assert set(entry.operands.values()) == {"FP8 E4M3"}
            assert entry.recipe == "fp8_delayed_scaling -> fp8_current_scaling"
            at = [session.precision(at=at)[GEMMS.index(entry.gemm)] for at in range(4)]
            assert [(e.recipe, e.since, e.until) for e in at] == [
                *[("fp8_delayed_scaling", 0, 1)] * 2,
                *[("fp8_current_scaling", 2, None)] * 2,
            ]


def test_a_span_is_from_its_first_iteration_to_its_last(tmp_path: Path) -> None:
    session, _ = watched(tmp_path, off(2, 3, 4), [CURRENT] * 8)
    fp8 = "FP8 E5M2 FP8 E4M3"
    assert spans(session, "dgrad") == [(0, 1, fp8), (2, 4, "BF16 BF16"), (5, None, fp8)]
    assert spans(session, "wgrad") == [(0, None, fp8)]
    whole = {entry.gemm: entry for entry in session.precision}
    assert whole["dgrad"].operands == {"gradient": "FP8 E5M2 -> BF16", "weight": "FP8 E4M3 -> BF16"}
    assert (whole["dgrad"].since, whole["dgrad"].until) == (0, None)


@pytest.mark.parametrize("tells", [True, False])
def test_a_single_step_is_known(tmp_path: Path, tells: bool) -> None:
    session, handed_in = watched(tmp_path, NOTHING, [CURRENT, CURRENT, None, CURRENT, CURRENT], tells=tells)
    assert [wrong(session.precision(at=step), handed) for step, handed in enumerate(handed_in)] == [[]] * 5
    assert session.precision(at=2)[0].seen


@pytest.mark.parametrize("config", [NOTHING, statistics()])
def test_a_gemm_that_is_left_out_from_some_step_on(tmp_path: Path, config: Any) -> None:
    net = te.Linear(32, 64, params_dtype=BF16)
    with InspectSession(config, model=net, log_dir=tmp_path, allow_unmatched=True) as session:
        for step in range(6):
            net.weight.requires_grad_(step < 3)
            train(session, net, CURRENT)
    assert spans(session, "wgrad") == [(0, 2, "FP8 E5M2 FP8 E4M3"), (3, None, "frozen weight")]


def test_an_iteration_that_has_not_run_is_an_error(tmp_path: Path) -> None:
    net = te.Linear(32, 64, params_dtype=BF16)
    with InspectSession(NOTHING, model=net, log_dir=tmp_path, allow_unmatched=True, start_step=7) as session:
        assert session.precision == ()
        with pytest.raises(LookupError, match="No iteration has run yet"):
            session.precision(at=7)
        for _ in range(3):
            train(session, net, CURRENT)
        assert [entry.since for entry in session.precision(at=9)] == [7] * 3
        for at in (6, 10):
            with pytest.raises(
                PrecisionDebugError, match=rf"at={at}\): this session did not observe that iteration.* 7 to 9"
            ):
                session.precision(at=at)


def returned_to_1(folder: Path, *again: Any) -> InspectSession:
    """A run of two iterations in FP8 and two in BF16, which goes on from iteration 1 in other recipes."""
    net = te.Linear(32, 64, params_dtype=BF16)
    with InspectSession(statistics(), model=net, log_dir=folder) as session:
        for recipe in (CURRENT, CURRENT, None, None):
            train(session, net, recipe)
        session.iteration = 1
        for recipe in again:
            train(session, net, recipe)
    return session


def test_an_iteration_that_runs_again_counts_as_it_ran_last(tmp_path: Path) -> None:
    session = returned_to_1(tmp_path, BLOCK, BLOCK)
    assert spans(session, "fprop") == [(0, 0, "FP8 E4M3 FP8 E4M3"), (1, None, "FP8 block E4M3 FP8 block E4M3")]
    with pytest.raises(LookupError, match="0 to 2"):
        session.precision(at=3)


@pytest.mark.parametrize("again", [None, CURRENT], ids=["as at the end", "as before"])
def test_an_iteration_that_runs_again_as_an_earlier_one_did(tmp_path: Path, again: Any) -> None:
    session = returned_to_1(tmp_path, again)
    fp8 = (0, None if again else 0, "FP8 E4M3 FP8 E4M3")
    assert spans(session, "fprop") == ([fp8] if again else [fp8, (1, None, "BF16 BF16")])


def test_a_look_between_forward_and_backward_changes_nothing(tmp_path: Path) -> None:
    recipes = [CURRENT, CURRENT, None, None, CURRENT]

    def run(folder: Path, *, looks: bool) -> InspectSession:
        net = te.Linear(32, 64, params_dtype=BF16)
        with InspectSession(statistics(), model=net, log_dir=folder) as session:
            if looks:
                net.register_forward_hook(lambda *_: list(session.precision) and None)
            for recipe in recipes:
                train(session, net, recipe)
        return session

    looked, alone = run(tmp_path / "looked", looks=True), run(tmp_path / "alone", looks=False)
    assert [spans(looked, gemm) for gemm in GEMMS] == [spans(alone, gemm) for gemm in GEMMS]
    assert looked.precision == alone.precision


def test_a_run_that_changes_in_every_step_keeps_a_few_bytes_of_each(tmp_path: Path) -> None:
    session, _ = watched(tmp_path, off(*range(0, 100, 2)), [CURRENT] * 12)
    size = len(pickle.dumps(session.precision))
    longer, _ = watched(tmp_path, off(*range(0, 100, 2)), [CURRENT] * 52)
    assert len(spans(longer, "dgrad")) == 52
    assert len(pickle.dumps(longer.precision)) - size <= 40 * 40


EVERY = {"enabled": True, "freq": 1}


def acting(events: str) -> list[tuple[str, str, str]]:
    return re.findall(r"LAYER=fc: Feature=(\w+), API=(\w+): (.+)", events)


def test_each_feature_that_acts_on_a_tensor_has_a_line(tmp_path: Path) -> None:
    features = {
        "LogTensorStats": {**EVERY, "tensors": ["activation", "output"], "stats": ["max"]},
        "LogFp8TensorStats": {**EVERY, "tensors": ["activation"], "stats": ["mse"]},
        "DumpTensors": {**EVERY, "tensors": ["activation"], "high_precision_tensor": True},
        "DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]},
        "PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["gradient"]},
    }
    section = {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}
    model = Net(lambda net, x: net.fc(x), fc=te.Linear(32, 32))
    stepped(model, tmp_path, [FP8] * 2, {"s": section})
    (events,) = (tmp_path / "nvdlfw_inspect_logs").iterdir()
    assert sorted(acting(events.read_text())) == [
        ("DisableFP8GEMM", "fp8_gemm_enabled", "fprop"),
        ("DumpTensors", "inspect_tensor", "activation"),
        ("LogFp8TensorStats", "inspect_tensor", "activation"),
        ("LogTensorStats", "inspect_tensor", "activation"),
        ("LogTensorStats", "inspect_tensor", "output"),
        ("PerTensorScaling", "modify_tensor", "dgrad, gradient"),
    ]
