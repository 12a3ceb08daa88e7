"""The report in a browser: every plot is drawn, nothing is requested, and every control works."""

from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.views.report import write_report
from tests.compare.recorded import record
from tests.report.conftest import Look
from tests.report.runs import PARTS, drifting

pytestmark = pytest.mark.slow  # a browser

PAGES = ("findings", "heatmap", "layer", "profile", "config", "summary")
NOTE = "values-0002.parquet is damaged: iterations 10 to 19 are missing"
BAD = "decoder.layers.2.mlp.fc1"
RUN = drifting(blocks=3, steps=40, notes=(NOTE,))
assert RUN.run_id != BAD


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(RUN, tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.extended
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


def test_worst_layers_leave_out_what_is_as_good_as_can_be(look: Look, tmp_path: Path) -> None:
    run = drifting(blocks=2, steps=20, statistics=("nonfinite_num", "numel"), histograms=False)
    look.open(write_report(run, tmp_path / "report.html"))
    listed = look.page.locator(".worst")
    assert {text.split(" of ")[0] for text in listed.locator("h3").all_inner_texts()} == {"nonfinite_num"}
    assert listed.count() == 3, "numel has no direction"
    assert listed.locator("tbody tr").count() == 0, "only the layer that has any"
    assert [run.ordered_layers[5] in text for text in listed.locator("p").all_inner_texts()] == [True] * 3


@pytest.mark.extended
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


@pytest.mark.extended
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


@pytest.mark.extended
def test_the_depth_profile(look: Look, report: Path) -> None:
    look.open(report, "page=profile&tensor=gradient&step=39")
    base, width = look.plot("[plot.data[0].base, plot.data[0].x]")
    amax = RUN.grid("cur_amax", "gradient").values[:, 39]
    assert (np.array(base) + np.array(width)).tolist() == pytest.approx(np.log2(amax).tolist())
    assert RUN.ordered_layers[4] in look.tip(float(base[4]) + 1, 4)
    look.page.mouse.click(*look.at(float(base[4]) + 1, 4))
    look.page.wait_for_selector("h1.layer-name")
    assert look.page.locator("h1").inner_text() == RUN.ordered_layers[4]


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


@pytest.mark.extended
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
    for number, name in enumerate(run.ordered_layers[:4]):
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


@pytest.mark.extended
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


@pytest.mark.extended
def test_a_run_without_layers_or_facts_is_no_empty_page(look: Look, tmp_path: Path) -> None:
    report = write_report(drifting(blocks=1, steps=5, statistics=(), histograms=False), tmp_path / "report.html")
    look.open(report, "page=nowhere")
    for page in PAGES:
        look.everything_drawn(f"page={page}")
        assert len(look.page.locator("main").inner_text()) > 60
