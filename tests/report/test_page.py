"""The report in a browser: every plot is drawn, nothing is requested, and every control works."""

from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.views.report import write_report
from tests.compare.recorded import record
from tests.report.conftest import Look
from tests.report.runs import PARTS, drifting
from tests.runs.making import RunWriter

pytestmark = pytest.mark.slow  # a browser

PAGES = ("findings", "heatmap", "layer", "profile", "config", "summary")
NOTE = "values-0002.parquet is damaged: iterations 10 to 19 are missing"
BAD = "decoder.layers.2.mlp.fc1"
RUN = drifting(blocks=3, steps=40, notes=(NOTE,))
assert RUN.run_id != BAD


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(RUN, tmp_path_factory.mktemp("report") / "report.html")


def test_every_plot_of_every_page_is_drawn(look: Look, report: Path) -> None:
    """In the dark: the tests below draw all pages' plots in the light."""
    plots_of = {"findings": 0, "heatmap": 1, "layer": 10, "profile": 1, "config": 0, "summary": 2}
    look.open_in_the_dark(report, plots_of)


def test_the_summary_names_the_worst_and_leads_there(look: Look, report: Path) -> None:
    look.open(report)
    finding = look.page.locator(".worst").first
    grid = RUN.grid("underflows%", "activation")
    row, column = np.unravel_index(np.argmax(grid.values), grid.values.shape)
    sentence = finding.locator("p").inner_text()
    assert grid.layers[row] in sentence
    assert f"{grid.values[row, column]:.4g} %" in sentence
    assert f"at step {grid.iterations[column]}" in sentence
    assert finding.locator("tbody tr").count() == 4
    assert NOTE in look.page.locator(".notes").inner_text()
    look.go(finding.locator("p a"))
    assert look.page.locator("h1").inner_text() == grid.layers[row]
    look.page.go_back()
    look.page.wait_for_selector(".worst")


def test_coverage_is_that_of_the_products(look: Look, report: Path) -> None:
    look.open(report)
    low = sum(
        macs
        for macs, name in zip(*(RUN.gemms[key].to_pylist() for key in ("macs", "precision")), strict=True)
        if name == "fp8"
    )
    shares = look.plot("plot.data.map((trace) => [trace.name, trace.x[2]])")
    assert shares[0] == ["FP8", pytest.approx(100 * low / sum(RUN.gemms["macs"].to_pylist()))]
    assert "DisableFP8GEMM in config.yaml:7" in look.page.locator(".card", has_text="Coverage").first.inner_text()


def test_hover_tells_the_exact_number_and_a_click_opens_the_layer(look: Look, report: Path) -> None:
    look.open(report, "page=heatmap&statistic=sqnr_db&tensor=weight")
    grid = RUN.grid("sqnr_db", "weight")
    said = look.tip(25, 7)
    assert f"{grid.values[7, 25]:.4g} dB" in said
    assert "≈" not in said
    assert grid.layers[7] in said
    look.page.mouse.click(*look.at(25, 7))
    look.page.wait_for_selector("h1.layer-name")
    assert look.page.locator("h1").inner_text() == grid.layers[7]
    assert "step=25" in look.page.url


def test_zoom_and_back(look: Look, report: Path) -> None:
    look.open(report, "page=heatmap")
    whole = look.plot("plot.layout.yaxis.range")
    look.page.mouse.move(*look.at(5, 2))
    look.page.mouse.down()
    look.page.mouse.move(*look.at(20, 6), steps=5)
    look.page.mouse.up()
    look.page.wait_for_function(
        "whole => (document.querySelector('.plot')?.layout?.yaxis.range[0] ?? whole) !== whole", arg=whole[0]
    )
    low, high = sorted(look.plot("plot.layout.yaxis.range"))
    assert 1.5 <= low <= 2.5
    assert 5.5 <= high <= 6.5
    look.page.mouse.dblclick(*look.at(10, 4))
    look.page.wait_for_function(
        "whole => document.querySelector('.plot')?.layout?.yaxis.range[0] === whole", arg=whole[0]
    )
    look.page.evaluate("new Promise((done) => setTimeout(done, 300))")  # behind the page's own wait for a second click
    assert look.page.locator("h1.layer-name").count() == 0, "two clicks are not one that opens a layer"


def test_fold_and_unfold(look: Look, report: Path) -> None:
    look.open(report, "page=heatmap")

    def rows() -> list[str]:
        return look.plot("plot.layout.yaxis.ticktext")

    assert len(rows()) == 3 * len(PARTS)
    look.go(look.page.get_by_role("button", name="Blocks"))
    assert [row.removeprefix("● ") for row in rows()] == [f"▸ decoder.layers.{block} (4)" for block in range(3)]
    folded = look.plot("plot.data[0].z[1]")
    look.page.mouse.click(*look.at(10, 1))
    look.page.wait_for_function("() => document.querySelector('.plot')?.layout?.yaxis.ticktext.length === 7")
    assert [row.removeprefix("● ") for row in rows()[2:6]] == [f"   decoder.layers.1.{part}" for part in PARTS]
    members = np.array(look.plot("plot.data[0].z.slice(2, 6)"))
    assert folded == members.max(0).tolist(), "a folded row is the worst of its layers"
    assert "open=" in look.page.url
    look.go(look.page.get_by_role("button", name="Alike names"))
    assert [row.rpartition(".")[2] for row in rows()] == ["qkv (3)", "proj (3)", "fc1 (3)", "fc2 (3)"]
    look.page.get_by_label("Layer name contains").fill("MLP")
    look.page.wait_for_function("() => document.querySelector('.plot')?.layout?.yaxis.ticktext.length === 2")


def test_a_layer_is_chosen(look: Look, report: Path) -> None:
    look.open(report, f"page=layer&layer={BAD}")
    look.go(look.page.get_by_role("button", name="next →"))
    assert look.page.locator("h1").inner_text() == "decoder.layers.2.mlp.fc2"
    field = look.page.get_by_label("Layer", exact=True)
    field.fill("decoder.layers.0.mlp.fc1")
    field.press("Enter")
    look.page.wait_for_function("() => document.querySelector('h1').textContent === 'decoder.layers.0.mlp.fc1'")
    assert {"fprop", "dgrad", "wgrad"} <= set(look.page.locator("table").first.inner_text().split())
    look.open(report, "page=layer&layer=decoder.layers.0.self_attention.proj")
    assert "DisableFP8GEMM in config.yaml:7" in look.page.locator("table").first.inner_text()


def test_the_window_of_a_format_is_at_the_recorded_scale(look: Look, report: Path) -> None:
    look.open(report, "page=profile&tensor=activation&step=39&format=E4M3")
    ((name, top),) = look.plot("plot.data.filter((t) => /largest$/.test(t.name)).map((t) => [t.name, [...t.x]])")[:1]
    scale = RUN.grid("scale_inv_max", "activation")
    assert name == "E4M3: largest"
    assert top[::2] == pytest.approx(np.log2(448 * scale.values[:, 39]).tolist(), abs=1e-6)


def test_dark_and_light_and_what_is_remembered(look: Look, report: Path) -> None:
    look.open(report, "page=heatmap&statistic=mean&tensor=gradient")
    light = look.plot("plot.data[0].colorscale[4][1]")
    look.go(look.page.get_by_role("button", name="Dark"))
    assert look.page.get_attribute("html", "data-theme") == "dark"
    assert look.plot("plot.data[0].colorscale[4][1]") != light, "0 has the colour of the background"
    assert "statistic=mean" in look.page.url
    look.close()
    look.open(report, "page=summary")
    assert look.page.get_attribute("html", "data-theme") == "dark"


def test_csv_has_the_numbers_of_the_run(look: Look, report: Path) -> None:
    look.open(report, "page=heatmap&statistic=dynamic_range&tensor=activation")
    head, *rows = look.saved(look.page.locator("button.csv"))
    grid = RUN.grid("dynamic_range", "activation")
    assert head == ["layer", "first step", "last step", "value", "exact"]
    assert len(rows) == grid.values.size
    for name, first, last, value, exact in rows[:: len(rows) // 17]:
        assert first == last
        assert exact == "true"
        assert float(value) == grid.values[grid.layers.index(name), int(first)]
    look.close()  # a browser lets a page save ten files in a row
    look.open(report, f"page=layer&layer={BAD}")
    for number in range(0, look.page.locator("button.csv").count(), 2):
        assert len(look.saved(look.page.locator("button.csv").nth(number))) > 3


def test_no_button_moves_when_a_plot_is_drawn(look: Look, report: Path) -> None:
    """Or a click would miss it."""
    look.open(report, f"page=layer&layer={BAD}")
    buttons = "[...document.querySelectorAll('.head button')].map((one) => [one.offsetLeft, one.offsetTop])"
    before = look.page.evaluate(buttons)
    look.everything_drawn()
    assert look.page.evaluate(buttons) == before
    with look.page.expect_download() as download:
        look.page.get_by_role("button", name="PNG").first.click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_the_depth_profile(look: Look, report: Path) -> None:
    look.open(report, "page=profile&tensor=gradient&step=39")
    base, width = look.plot("[plot.data[0].base, plot.data[0].x]")
    amax = RUN.grid("cur_amax", "gradient").values[:, 39]
    assert (np.array(base) + np.array(width)).tolist() == pytest.approx(np.log2(amax).tolist())
    assert RUN.ordered_layers[4] in look.tip(float(base[4]) + 1, 4)
    look.page.mouse.click(*look.at(float(base[4]) + 1, 4))
    look.page.wait_for_selector("h1.layer-name")
    assert look.page.locator("h1").inner_text() == RUN.ordered_layers[4]


def test_a_layer_above_its_recorded_window_is_orange(look: Look, tmp_path: Path) -> None:
    """The scale factor of the first two is recorded as 1."""
    layers = {"above": 448 * 1.1, "inside": 100.0, "assumed": 1e4}
    numbers = {(layer, "weight", "cur_amax"): np.full(3, amax) for layer, amax in layers.items()}
    numbers |= {(layer, "weight", "dynamic_range"): np.full(3, 10.0) for layer in layers}
    numbers |= {
        (layer, "weight", f"scale_inv_{end}"): np.ones(3) for layer in list(layers)[:2] for end in ("min", "max")
    }
    report = write_report(record(tmp_path, numbers, order=list(layers)), tmp_path / "report.html")
    look.open(report, "page=profile&tensor=weight")
    assert [colour == "#d55e00" for colour in look.plot("plot.data[0].marker.color")] == [True, False, False]


def test_the_profile_of_a_run_with_nan_is_of_the_last_step_with_numbers(look: Look, tmp_path: Path) -> None:
    finite = np.array([1.0, 2.0, 3.0, 0.0, 0.0])  # and nan from step 3 on
    numbers = {("fc1", "weight", name): finite for name in ("cur_amax", "max", "min", "mean")}
    numbers["fc1", "weight", "nonfinite_num"] = np.array([0.0, 0.0, 0.0, 16.0, 16.0])
    products = [{"gemm_id": 0, "layer": "fc1", "gemm": "fprop", "precision": "fp8", "macs": 10, "backward": False}]
    look.open(write_report(record(tmp_path, numbers, gemms=products), tmp_path / "report.html"), "page=profile")
    assert look.plot("plot.data[2].x") == [pytest.approx(np.log2(3.0))]
    assert "Step 2" in look.page.locator(".controls").inner_text()
    look.turn("page=profile&step=4")
    assert "Nothing to draw: 1 of 1 layers" in look.page.locator(".card").inner_text()
    assert not look.page.locator(".plot").is_visible()
    assert look.page.locator(".badge").count() == 0


ESM2 = [f"model.esm.encoder.layers.{n}.self_attention.{part}" for n in range(3) for part in ("layernorm_qkv", "proj")]


def default_run(folder: Path, steps: int = 30) -> RecordedRun:
    """As a default config records it, with long names, in a folder with a chosen name."""
    draw = np.random.default_rng(0)
    numbers = {(layer, tensor, statistic): least + least * draw.uniform(0, 0.3, steps)
               for layer in ESM2 for tensor in ("activation", "weight")
               for statistic, least in (("cur_amax", 3.1), ("underflows%", 0.2))}  # fmt: skip
    products = [{"gemm_id": 0, "layer": ESM2[0], "gemm": "fprop", "precision": "fp8", "macs": 10, "backward": False}]
    return record(
        folder / "esm2 again",
        numbers,
        scalars={"loss": np.linspace(2.9, 2.1, steps)},
        gemms=products,
        torch_settings={"allow_bf16_reduced_precision_reduction": True, "cudnn": {"allow_tf32": False}},
    )


TICKS = "[...plot.querySelectorAll('.{}tick text')].map((each) => each.textContent)"


def test_a_run_of_the_default_config(look: Look, tmp_path: Path) -> None:
    look.open(write_report(default_run(tmp_path), tmp_path / "report.html"))
    look.everything_drawn()
    assert look.page.locator("h1").inner_text() == look.page.locator(".run").inner_text() == "esm2 again"
    assert look.page.title() == "Summary - esm2 again"
    assert look.plot(TICKS.format("x"))[-1] == "100 %"
    look.everything_drawn("page=layer")
    assert len(look.plot(TICKS.format("y"))) >= 2, "3.1 to 4.1 has no power of ten, and no 5"
    look.everything_drawn("page=heatmap")
    ticks = {tick.removeprefix("…") for tick in look.plot(TICKS.format("y"))}
    assert len(ticks) == len(ESM2)
    assert all(any(name.endswith(tick) for name in ESM2) for tick in ticks), "long names are cut at their beginning"
    look.everything_drawn("page=profile")
    assert "add dynamic_range to the config" in look.page.locator(".card").inner_text()
    assert len(look.plot("plot.querySelectorAll('.scatterlayer .point')")) >= len(ESM2)
    look.turn("page=config")
    assert "allow_bf16_reduced_precision_reduction: true" in look.page.locator("main").inner_text()


def test_the_trainers_step_is_beside_the_iteration(look: Look, tmp_path: Path) -> None:
    with RunWriter.begin(tmp_path) as run:
        number = run.series("fc1", "weight", "mse")
        for step in range(10):
            run.add_step(step, logging_step=step + 1)
            run.add_values(step, np.array([number], np.int32), np.array([2.0 + step]))
    look.open(write_report(open_run(tmp_path), tmp_path / "report.html"))
    said = " ".join(look.page.locator("main").inner_text().split())
    assert "0 to 9, the trainer's 1 to 10" in said
    assert "at step 9 (the trainer's 10)." in said
    look.everything_drawn("page=heatmap")
    assert look.plot("plot.layout.xaxis.title.text") == "step (the trainer's is 1 more)"


NASTY = (
    "<script>window.hurt=1</script>",
    "</script><img src=x onerror=window.hurt=1>",
    "<b>bold</b><a href='javascript:window.hurt=1'>a</a>",
    'it\'s "quoted"',
    "a/b\\c/../d",
    "\x1b[31mred\x1b[0m\x07",
    "=HYPERLINK(1)",
    "$x^2$ {{DATA}} %s &amp; # ? ü 层",
    "long." + "x" * 300,
)


def test_names_do_no_harm(look: Look, tmp_path: Path) -> None:
    tensors, statistics = ("activation", "weight"), ("underflows%", "cur_amax")
    run = drifting(blocks=1, steps=8, tensors=tensors, statistics=statistics, names=NASTY, notes=(NASTY[0], NASTY[5]))
    report = write_report(run, tmp_path / "report.html")
    text = report.read_text()
    assert "\x1b" not in text
    assert not any(name in text for name in NASTY if "<" in name)
    look.open(report)
    for page in PAGES:
        look.everything_drawn(f"page={page}")
    for number, name in enumerate(run.ordered_layers[: len(NASTY)]):
        look.turn(f"page=layer&layer={quote(look_of(name))}")
        assert look.page.locator("h1").inner_text().split() == look_of(NASTY[number]).split()
    look.turn("page=heatmap&layer=")
    assert look.page.evaluate("window.hurt") is None
    texts = look.page.locator(".plot .yaxislayer-above text, .plot .yaxislayer-below text").all_text_contents()
    assert NASTY[0] in texts
    assert look.page.locator(".plot .yaxislayer-above tspan, .plot .yaxislayer-above a").count() == 0
    _, *rows = look.saved(look.page.locator("button.csv"))
    assert {"'=HYPERLINK(1)", NASTY[3]} <= {row[0] for row in rows}


def look_of(name: str) -> str:
    return name.replace("\x1b", "\\x1b").replace("\x07", "\\x07")


def test_ranks_that_differ(look: Look, tmp_path: Path) -> None:
    run = drifting(blocks=2, steps=12, ranks=(0, 1, 3), histograms=False)
    look.open(write_report(run, tmp_path / "report.html"), "page=heatmap&statistic=cur_amax&tensor=weight")
    assert f"{run.grid('cur_amax', 'weight', rank=0).values[3, 5]:.4g}" in look.tip(5, 3)
    look.page.get_by_label("Rank", exact=True).select_option("1")
    look.page.wait_for_function("() => location.hash.includes('rank=1')")
    look.page.wait_for_timeout(300)
    assert f"{run.grid('cur_amax', 'weight', rank=1).values[3, 6]:.4g}" in look.tip(6, 3)
    look.go(look.page.get_by_role("button", name="Ranks"))
    assert look.plot("plot.layout.xaxis.ticktext") == ["0", "1", "3"]
    said = look.tip(2, 4)
    assert f"{run.grid('cur_amax', 'weight', rank=3).values[4].max():.4g}" in said
    assert "rank 3" in said


def test_what_is_not_exact_says_so(look: Look, tmp_path: Path) -> None:
    run = drifting(blocks=24, steps=90, statistics=("cur_amax", "sqnr_db", "mean"), histograms=False)
    report = write_report(run, tmp_path / "report.html", most=3_500_000)
    assert report.stat().st_size <= 3_500_000
    look.open(report, "page=heatmap&statistic=sqnr_db&tensor=gradient&fold=layers")
    assert "Everything else comes from an overview" in look.page.locator("footer").inner_text()
    assert "overview" in look.page.locator(".badge").inner_text()
    grid = run.grid("sqnr_db", "gradient")
    level = (grid.values.max() - grid.values.min()) / 249
    approximate = 0
    for row in (4, 30, 70):
        said, name, *_ = look.tip(50, row).splitlines()
        value = float(said.removeprefix("≈ ").removesuffix(" dB"))
        true = grid.values[grid.layers.index(name), 50]
        approximate += said.startswith("≈")
        assert abs(value - true) <= level / 2 + 0.01
    assert approximate
    look.open(report, f"page=layer&layer={run.run_id}&statistic=sqnr_db")
    card = look.page.locator(".card", has=look.page.get_by_role("heading", name="sqnr_db"))
    card.locator(".badge").wait_for()
    assert card.locator(".badge").inner_text() == "exact", "the worst layer's curves are exact"
    _, *rows = look.saved(card.locator("button.csv"))
    assert {row[4] for row in rows} == {"true"}


def test_a_run_without_layers_or_facts_is_no_empty_page(look: Look, tmp_path: Path) -> None:
    report = write_report(drifting(blocks=1, steps=5, statistics=(), histograms=False), tmp_path / "report.html")
    look.open(report, "page=nowhere")
    for page in PAGES:
        look.everything_drawn(f"page={page}")
        assert len(look.page.locator("main").inner_text()) > 60


def test_findings_are_marked_on_the_curve_of_a_metric(look: Look, tmp_path: Path) -> None:
    values = np.ones(20)
    values[12:] = np.inf
    losses = np.linspace(2, 1, 20)
    record(tmp_path / "run", {("fc", "activation", "cur_amax"): values}, scalars={"loss": losses})
    look.open(write_report(open_run(tmp_path / "run"), tmp_path / "report.html"), "scalar=loss")
    look.everything_drawn()
    drawn = look.page.locator(".plot[aria-label='Trainer metrics over steps']")
    assert drawn.evaluate("plot => plot.data[0].y") == pytest.approx(losses)
    assert drawn.evaluate("plot => plot.layout.shapes.map((shape) => shape.x0)") == [12]
