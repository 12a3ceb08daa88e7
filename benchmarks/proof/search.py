"""Search for layers to keep in high precision: planted sensitivities, and rivals at equal planned milliseconds.

    python benchmarks/proof/search.py [--names PART ...] [--folder FOLDER]

Margins, written down before the runs: in each planted case, the search ranks the planted layer first, and first of its
GEMMs one that reads the planted tensor; its choice closes at least 80 % of the gap of the loss between all-low and
all-high. Under NVFP4 the search is better than a rival if the 95 % interval of the paired difference of the losses is
below 0. ``--page`` writes the tables into benchmarks/proof/README.md. The exit code is 1 if a planted case misses its
margin.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checking import write_into_page
from models import Built, Precision, RecipeName, build, recipe_of
from running import proof_parser, record
from torch.nn.functional import linear

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))

CLOSED = 0.8
SEEDS = 3
SHORT, LONG = 20, 300
"""Steps of a training with a planted sensitivity, and with a rival's choice."""

DEVICE = "b200"
LARGER = 64
"""The planned times are of a model with 64 times as many features and tokens."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "input channel": ("fprop", "wgrad"),
    "input token": ("fprop", "wgrad"),
    "weight row": ("fprop", "dgrad"),
    "weight column": ("fprop", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}
"""What gets an offset -> the GEMMs that read it."""


@dataclass(frozen=True)
class Case:
    """A training; ``kind`` and ``block`` of the planted sensitivity, or ``arm`` and ``seed`` of a rival's choice."""

    name: str
    recipe: RecipeName
    kind: str = ""
    block: int = 0
    arm: str = ""
    seed: int = 0


def all_planted() -> list[Case]:
    models: dict[str, RecipeName] = {"byte-lm": "mxfp8", "gpt": "current"}
    return [
        Case(f"{model}-{kind.replace(' ', '-')}-{block}", recipe, kind, block)
        for (model, recipe), kind, block in itertools.product(models.items(), KINDS, range(3))
    ]


def byte_lm(recipe: RecipeName, precision: Precision, seed: int, count: int) -> Built:
    """The model of examples/byte_lm.py, in a recipe."""
    from byte_lm import ByteLanguageModel, StandardLibraryBytes
    from torch.utils.data import DataLoader

    class InRecipe(ByteLanguageModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens) + self.positions.weight
            for layer in self.layers:
                hidden = layer(hidden)
            logits: torch.Tensor = self.head(hidden)
            return logits

    torch.manual_seed(seed)
    model = InRecipe(layers=count, hidden=64, window=32)
    model.configure_model()
    loader = DataLoader(StandardLibraryBytes(window=32, count=8000), batch_size=4, shuffle=True)
    batches = ((batch[:, :-1], batch[:, 1:]) for batch in loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Built("bytes", model, (), batches, optimizer, recipe_of(recipe), precision)


class _GradientOffset(torch.autograd.Function):
    """Adds an offset to the gradient of a layer's output, and takes it from that of a twin in high precision."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, twin: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        ctx.offset = offset
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] + ctx.offset, -ctx.offset.expand_as(gradients[0]), None


def plant(layer: torch.nn.Module, kind: str) -> None:
    """Add an offset to a tensor of a te.Linear, and subtract its effect in high precision, where nothing changes."""
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    size = 2.0**12
    channel = torch.zeros(weight.shape[1])
    channel[3] = size
    signs = torch.tensor([1.0, -1.0]).repeat(weight.shape[0] // 2)  # a norm would remove an equal shift of all outputs
    offset = signs[:, None] * channel
    if kind == "input token":
        offset = torch.zeros(32, weight.shape[1])
        offset[0] = size
    elif kind == "weight row":
        offset = torch.zeros_like(weight)
        offset[3] = size
    noise = 16 * torch.randn(32, weight.shape[0], generator=torch.Generator().manual_seed(0))
    if kind.startswith("weight"):
        with torch.no_grad():
            weight += offset
    elif kind.startswith("input"):
        offset = offset if kind == "input token" else channel
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + offset,))

    def subtract(module: Any, inputs: Any, outputs: Any) -> Any:
        output, *rest = outputs
        if kind.startswith("weight"):
            output = output - linear(inputs[0], offset)
        elif kind.startswith("input"):
            output = output - linear(offset, weight)
        else:
            twin = linear(inputs[0], weight)
            output = _GradientOffset.apply(output, twin, noise)  # type: ignore[no-untyped-call]
        return (output, *rest)

    layer.register_forward_hook(subtract)


def closure_of(built: Built) -> Callable[[Any], torch.Tensor]:
    def closure(batch: Any) -> torch.Tensor:
        built.batches = iter([batch])
        return built.loss()

    return closure


def search_planted(case: Case, folder: Path) -> dict[str, Any]:
    from te_precision_callbacks.search import search

    if case.name.startswith("gpt"):
        built = build("gpt", case.recipe, "float32", 0, count=3)
        planted = f"blocks.{case.block}.layer.self_attention.proj"
    else:
        built = byte_lm(case.recipe, "float32", 0, 3)
        planted = f"layers.{case.block}.self_attention.proj"
    built.optimizer.param_groups[0]["weight_decay"] = 0.0  # it would move the offset of a weight
    plant(built.model.get_submodule(planted), case.kind)
    for _ in range(SHORT):
        built.train_step()
    options: Any = {"low_share": 0.85, "steps": SHORT, "seeds": SEEDS, "progress": False}
    result = search(built.model, closure_of(built), built.batches, optimizer=built.optimizer, **options)
    first = {entry.level: entry.name for entry in reversed(result.measured)}
    low, choice = (getattr(result.confirmation, arm).difference for arm in ("low", "choice"))
    return {
        "layer": first["layer"] == planted,
        "gemm": first["gemm"] in [f"{planted} {gemm}" for gemm in KINDS[case.kind]],
        "first": first["gemm"],
        "gap": low,
        "closed": 1 - choice / low,
    }


def choices(case: Case, folder: Path) -> dict[str, Any]:
    """The layers and GEMMs that the search and its rivals keep in high precision, after 30 steps."""
    from te_precision_callbacks import InspectSession
    from te_precision_callbacks.runs import open_run
    from te_precision_callbacks.search import search, searching
    from te_precision_callbacks.search.solving import Costs, split_by_gemm
    from te_precision_callbacks.search.units import Choice, LayerGroup, Units
    from te_precision_callbacks.speed import device_named

    class Larger(Units):
        def products(self, run: Callable[[], object]) -> Any:
            sizes = {"n": LARGER, "m": LARGER, "k": LARGER, "macs": LARGER**3}
            made = super().products(run)
            return [
                dataclasses.replace(product, **{name: times * getattr(product, name) for name, times in sizes.items()})
                for product in made
            ]

    built = byte_lm(case.recipe, "autocast", 100, 3)
    for _ in range(30):
        built.train_step()
    options = {"enabled": True, "gemms": ["fprop", "dgrad", "wgrad"], "freq": 1}
    section = {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": {"LogGemmError": options}}
    with InspectSession({"mse": section}, model=built.model, log_dir=folder / "run") as session:
        built.train_step()
        session.step()
    run = open_run(folder / "run")
    rows = [row for row in run.series.to_pylist() if row["statistic"] == "gemm_format_error"]
    gemms = {"output": "fprop", "dgrad": "dgrad", "wgrad": "wgrad"}
    error = {
        f"{row['layer']} {gemms[row['tensor']]}": run.values([row["series"]])["value"].to_pylist()[-1] for row in rows
    }
    units = Larger(built.model)
    products = units.products(lambda: built.loss().backward())  # type: ignore[no-untyped-call]
    costs = Costs(products, "nvfp4", device_named(DEVICE))
    layers = units.atoms((), whole_modules=False)
    by_gemm = [gemm for layer in layers for gemm in split_by_gemm(layer)]
    last = frozenset[Any]().union(*(layer.switches for layer in layers[-round(0.15 * len(layers)) :]))
    budget: float = costs.extra_ms(last) or 0.0

    def fill(order: Sequence[LayerGroup]) -> Choice:
        choice: Choice = frozenset()
        for group in order:
            if (costs.extra_ms(choice | group.switches) or 0.0) <= budget * (1 + 1e-9):
                choice |= group.switches
        return choice

    ends = [layer for pair in zip(layers, reversed(layers), strict=True) for layer in pair]
    chosen = {
        "last 15 % of the layers": last,
        "first and last layers": fill(ends),
        "largest mse of the GEMMs": fill(sorted(by_gemm, key=lambda gemm: -error.get(gemm.name, 0.0))),
    }
    high = {arm: units.high(choice) for arm, choice in chosen.items()}
    milliseconds = {arm: costs.extra_ms(choice) for arm, choice in chosen.items()}
    everything = dict.fromkeys(units.layers, ())
    units.restore()
    vars(searching)["Units"] = Larger
    built.optimizer.zero_grad()
    limits: Any = {"extra_ms": 4 * budget, "device": DEVICE, "sweep_batches": 4, "progress": False}  # a step has four
    found = search(built.model, closure_of(built), built.batches, **limits)
    arms = {"search": {**everything, **found.high}, **high, "all-low": everything, "all-high": None}
    return {"arms": arms, "milliseconds": {"search": (found.extra_ms or 0.0) / 4, **milliseconds, "all-low": 0.0}}


def train_rival(case: Case, folder: Path) -> dict[str, Any]:
    import json

    from te_precision_callbacks.te.custom_recipe import assign_names, custom_recipe

    high = json.loads((folder.parent / "choices" / "truth.json").read_text())["arms"][case.arm]
    built = byte_lm(case.recipe, "autocast", case.seed, 3)
    assign_names(built.model)
    built.recipe = None if high is None else custom_recipe(built.recipe, high)
    losses = [built.train_step() for _ in range(LONG)]
    last = losses[-LONG // 4 :]
    return {"arm": case.arm, "loss": sum(last) / len(last)}


def planted_table(truths: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool]:
    columns = "model, recipe | planted in | cases | layer first | GEMM first | gap, least to most | closed, least"
    lines = [f"| {columns} |", "|---|---|---|---|---|---|---|"]
    cases = [case for case in all_planted() if case.name in truths]
    groups = dict.fromkeys((case.name.partition(f"-{case.kind[:5]}")[0], case.recipe, case.kind) for case in cases)
    for model, recipe, kind in groups:
        rows = [truths[case.name] for case in cases if (case.recipe, case.kind) == (recipe, kind)]
        found = " | ".join(f"{sum(row[what] for row in rows)}" for what in ("layer", "gemm"))
        gaps = [100 * row["gap"] for row in rows]
        closed = 100 * min(row["closed"] for row in rows)
        lines.append(
            f"| {model}, {recipe} | {kind} | {len(rows)} | {found} | {min(gaps):.2g} to {max(gaps):.2g} % |"
            f" {closed:.1f} % |"
        )
    good = all(row["layer"] and row["gemm"] and row["closed"] >= CLOSED for row in truths.values())
    return "\n".join(lines), good


def rivals_table(chosen: Mapping[str, Any], truths: Sequence[Mapping[str, Any]]) -> str:
    from te_precision_callbacks.views.compare.paired import paired_difference

    losses = {arm: [truth["loss"] for truth in truths if truth["arm"] == arm] for arm in chosen["arms"]}
    lines = ["| in high precision | planned ms | loss | search against it | |", "|---|---|---|---|---|"]
    for arm, of_arm in losses.items():
        milliseconds = chosen["milliseconds"].get(arm)
        cost = "" if milliseconds is None else f"{milliseconds:+.3f}"
        compared = " | "
        if arm != "search":
            paired = paired_difference(of_arm, losses["search"])
            low, high = (100 * share for share in paired.interval)
            outcome = "not decided"
            if high < 0 or low > 0:
                outcome = "better" if high < 0 else "worse"
            compared = f"{100 * paired.difference:+.2f} % ({low:+.2f} to {high:+.2f} %) | {outcome}"
        lines.append(f"| {arm} | {cost} | {sum(of_arm) / len(of_arm):.4f} | {compared} |")
    return "\n".join(lines)


def main() -> int:
    parser = proof_parser(__doc__)
    parser.add_argument("--names", nargs="+", default=[""], help="only cases whose name contains one of these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        planted = [case for case in all_planted() if any(part in case.name for part in options.names)]
        table, good = planted_table(record(search_planted, planted, folder, processes=options.processes))
        print(table)
        if options.names != [""]:
            return 0 if good else 1
        chosen = record(choices, [Case("choices", "nvfp4")], folder, processes=1)["choices"]
        rivals = [
            Case(f"{arm.replace(' ', '-')}-{seed}", "nvfp4", arm=arm, seed=seed)
            for seed, arm in itertools.product(range(SEEDS), chosen["arms"])
        ]
        truths = record(train_rival, rivals, folder, processes=options.processes)
    rivals_text = rivals_table(chosen, list(truths.values()))
    print(rivals_text)
    if options.page:
        write_into_page("search", table)
        write_into_page("search-rivals", rivals_text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
