"""CUDA graphs: a step that is captured while a session and overflow detection are attached trains as without them.

Nothing of this project may end a capture with an error, nor be recorded into the graph. A capture that fails without a
session too, as on the reference backend, is left out.

Layers of ``te.make_graphed_callables`` are observed: a session trains as without it, collects the statistics of a
training without graphs, and has the same verdict.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from step import with_ours, without

from gpu_parts.rows import CannotRunHereError, Rows, Settings, in_one_line, of_all_layers
from gpu_parts.training import transformer_layers
from te_precision_callbacks.session import InspectSession

WIDTH, TOKENS, HEADS, REPLAYS = 256, 128, 4, 3
CONFIG = of_all_layers(
    {"LogTensorStats": {"enabled": True, "tensors": ["activation", "weight", "gradient"], "stats": ["max", "std"]}}
)

STEPS, BLOCKS, BATCH, MICRO_BATCHES = 14, 3, 2, 2
"""Of the training with ``te.make_graphed_callables``; the default config collects in steps 0, 1, 2, 5 and 10."""

Graphs = Literal["none", "before", "after"]
"""Whether graphs are made, before or after the session starts."""

Make = Callable[[], torch.nn.Module]


class Packed(torch.nn.Module):
    """Attention of packed sequences with lengths on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, device=device, dtype=torch.bfloat16)
        self.register_buffer("bounds", torch.tensor([0, TOKENS // 4, TOKENS], dtype=torch.int32, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.reshape(1, TOKENS, HEADS, -1) for part in self.qkv(inputs).chunk(3, -1))
        mixed: torch.Tensor = torch.ops.aten._efficient_attention_forward(
            query, key, value, None, self.bounds, self.bounds, TOKENS, TOKENS, 0.0, 0, True
        )[0]
        return mixed.reshape(inputs.shape)


def models(settings: Settings) -> dict[str, Make]:
    te = settings.transformer_engine()
    sizes: dict[str, Any] = {"device": settings.device, "dtype": torch.bfloat16}
    te_sizes: dict[str, Any] = {"device": settings.device, "params_dtype": torch.bfloat16}
    return {
        "torch": lambda: torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH, **sizes), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH, **sizes)
        ),
        "packed sequences": lambda: Packed(settings.device),
        "Transformer Engine": lambda: torch.nn.Sequential(
            te.Linear(WIDTH, WIDTH, **te_sizes), te.LayerNormLinear(WIDTH, WIDTH, **te_sizes)
        ),
    }


def _trained(settings: Settings, make: Make, *, watched: bool, warm: bool) -> list[torch.Tensor]:
    """The weights after a capture and some replays.

    Args:
        settings: where.
        make: makes the model.
        watched: whether a session is attached.
        warm: whether the warm-up before the capture, too, runs in the session.
    """
    torch.manual_seed(0)
    model = make()
    # Tensors that stay where they are, as a graph needs them.
    inputs = torch.randn(TOKENS, WIDTH, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(inputs).float().square().mean().backward()
        optimizer.step()

    def warm_up(end: Callable[[], object]) -> None:
        with _beside(settings):
            for _ in range(2):
                step()
                end()

    if not warm:
        warm_up(lambda: None)
    session = with_ours(model, CONFIG, debug="activation_overflow", allow_unmatched=True) if watched else without()
    with session as end:
        if warm:
            warm_up(end)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(REPLAYS):
            graph.replay()
            end()
    torch.cuda.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextlib.contextmanager
def _beside(settings: Settings) -> Iterator[None]:
    """On another stream, which waits for the current one and the current one for it, as before a capture."""
    side = torch.cuda.Stream(settings.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


Statistics = dict[tuple[int, str, str, str], float]  # iteration, layer, tensor and statistic -> value


def _same(weights: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, weights, others))


def _difference(statistics: Statistics, without_graphs: Statistics) -> str:
    """The first difference of the statistics; empty without one."""
    keys = dict.fromkeys([*without_graphs, *statistics])
    differing = [key for key in keys if repr(statistics.get(key)) != repr(without_graphs.get(key))]
    if not differing:
        return ""
    key = differing[0]
    values = f"{statistics.get(key)}, without graphs {without_graphs.get(key)}"
    return f"{len(differing)} of {len(keys)} differ, first {key}: {values}"


class _Blocks(torch.nn.Module):
    """Transformer layers, which get the keywords of the call."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(transformer_layers(settings, BLOCKS, WIDTH, HEADS))

    def forward(self, values: torch.Tensor, **keywords: Any) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values, **keywords)
        return values


def _train_blocks(
    settings: Settings, recipe: Any, graphs: Graphs, *, watched: bool, caches: bool
) -> tuple[list[torch.Tensor], Statistics, InspectSession]:
    """Train transformer layers, and return the last weights, the statistics, and the session with its verdict.

    Args:
        settings: the device.
        recipe: the recipe.
        graphs: when graphs are made.
        watched: whether a session with the default config observes.
        caches: whether the second micro-batch uses the quantized weights of the first.
    """
    te = settings.transformer_engine()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    model, statistics = _Blocks(settings), Statistics()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def make_inputs() -> torch.Tensor:
        shape = TOKENS, BATCH, WIDTH
        return torch.randn(shape, device=settings.device, dtype=torch.bfloat16, requires_grad=True)

    def make_graphs() -> None:
        te.make_graphed_callables(
            tuple(model.layers),
            tuple((make_inputs(),) for _ in model.layers),
            enabled=True,
            recipe=recipe,
            cache_quantized_params=caches,
        )
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if graphs == "before":
            make_graphs()
        session = InspectSession(None, model=model, log_dir=folder)
        if watched:
            stack.enter_context(session)
        if graphs == "after":
            make_graphs()
        for step in range(STEPS):
            torch.manual_seed(1 + step)
            for number in range(MICRO_BATCHES):
                with te.autocast(enabled=True, recipe=recipe):
                    outputs = model(make_inputs(), **({"is_first_microbatch": number == 0} if caches else {}))
                loss = outputs.float().square().mean() / MICRO_BATCHES
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                session.log({"loss": loss.detach()})
                for row in session.step() or ():
                    statistics[step, row.layer, row.tensor, row.statistic] = row.value
    torch.cuda.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()], statistics, session


def _captured(train: Callable[[], Any]) -> Any:
    """Train without a session.

    Raises:
        CannotRunHereError: the training cannot be captured.
    """
    try:
        return train()
    except Exception as error:
        raise CannotRunHereError(f"it cannot be captured without a session: {in_one_line(error)}") from error


def _check_blocks(settings: Settings, rows: Rows, name: str, recipe: Any, *, caches: bool) -> None:
    """Compare trainings with ``te.make_graphed_callables``, with and without a session."""
    train = functools.partial(_train_blocks, settings, recipe, caches=caches)
    alone = functools.partial(train, "before", watched=False)
    (weights, *_), (again, *_) = _captured(alone), _captured(alone)
    if not _same(weights, again):
        raise CannotRunHereError("two trainings without a session have different weights")
    eager_weights, eager_statistics, eager = train("none", watched=True)
    as_eager = _same(eager_weights, weights)
    without_graphs = "same" if as_eager else "other"
    rows.measured(f"{name}: the weights without graphs", without_graphs, note=f"the verdict: {eager.findings.summary}")
    when: Graphs
    for when in ("before", "after"):
        title = f"{name}, graphs made {when} the session starts"
        with rows.of(title):
            watched_weights, statistics, session = train(when, watched=True)
            note = "; ".join(sorted({info.refused for info in session.layers if info.refused}))
            same = _same(watched_weights, weights)
            if as_eager:
                rows.same(f"{title}: the weights", same, note)
                difference = _difference(statistics, eager_statistics)
                rows.same(f"{title}: the statistics", not difference, difference)
            else:
                why = "the layers' own forward computes other values than the graph"
                rows.measured(f"{title}: the weights", "same" if same else "other", note=f"{why} {note}".strip())
            collected, right = ({key[0] for key in keys} for keys in (statistics, eager_statistics))
            rows.equal(f"{title}: steps with statistics", len(collected), len(right))
            findings = session.findings
            rows.equal(f"{title}: the verdict", findings.state, "no problems found", note=findings.summary)


def check_scales(settings: Settings, rows: Rows) -> None:
    """Check the scales of a step that is captured by hand: a replay updates them, and they are recorded."""
    te = settings.transformer_engine()
    from transformer_engine.common.recipe import DelayedScaling

    name = "delayed scaling, captured by hand"
    with rows.of(name), tempfile.TemporaryDirectory() as folder:
        linear = te.Linear(WIDTH, WIDTH, device=settings.device, params_dtype=torch.bfloat16)
        inputs = torch.randn(TOKENS, WIDTH, device=settings.device, dtype=torch.bfloat16)

        def step() -> None:
            with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
                linear(inputs).float().square().mean().backward()

        graph = torch.cuda.CUDAGraph()
        with InspectSession(None, model=linear, log_dir=folder) as session:
            try:
                with _beside(settings):
                    step()
                session.step()
                with torch.cuda.graph(graph):
                    step()
            except Exception as error:
                raise CannotRunHereError(f"it cannot be captured: {in_one_line(error)}") from error
            session.step()
            inputs.mul_(8)
            graph.replay()
            session.step()
            read = {(row.tensor, row.statistic): row.value for row in session.last_statistics}
        forward = linear.fp8_meta["scaling_fwd"]
        rows.equal(f"{name}: scale_inv_max", read.get(("activation", "scale_inv_max")), float(1 / forward.scale[0]))
        amax = float(inputs.abs().max())
        rows.equal(f"{name}: cur_amax", read.get(("activation", "cur_amax")), amax, note=session.findings.summary)


def check(settings: Settings, rows: Rows) -> None:
    if not settings.on_gpu:
        raise CannotRunHereError("needs a GPU")
    # Otherwise the backward of attention may give other gradients in each training.
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    logging.getLogger("te_precision_callbacks").setLevel(logging.CRITICAL)
    settings.transformer_engine()
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    for name, recipe, caches in (
        ("make_graphed_callables, current scaling", Float8CurrentScaling, False),
        ("make_graphed_callables, current scaling, cached weights", Float8CurrentScaling, True),
        ("make_graphed_callables, delayed scaling", DelayedScaling, False),
    ):
        with rows.of(name):
            _check_blocks(settings, rows, name, recipe(), caches=caches)
    check_scales(settings, rows)
    for name, make in models(settings).items():
        for warm in (True, False):
            when = "after steps in the session" if warm else "in the first step"
            with rows.of(f"{name}, captured {when}"):
                alone = _captured(functools.partial(_trained, settings, make, watched=False, warm=warm))
                watched = _trained(settings, make, watched=True, warm=warm)
                rows.same(f"{name}, captured {when}: the weights", _same(alone, watched))
