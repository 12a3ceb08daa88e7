// The pages of a comparison: what differs, where the sides part, both curves of each series.

const SIDES = () => [colourOf("activation", 0), "#d55e00"];
const MOST_PLOTS = 24;
const MOST_BEYOND = 4;

const whatNode = ({ layer, tensor, rank }, statistic) => layer < 0 ? statistic
  : [el("span", { class: "mono" }, brief(report.layers[layer])), ` ${tensor}`, rank === REDUCED ? "" : ` (rank ${rank})`];

const curveLink = (parting, departure, ...children) => link({
  page: "layer", layer: parting.layer < 0 ? "" : report.layers[parting.layer].name, tensor: parting.tensor,
  statistic: departure.statistic, step: departure.iteration, rank: parting.rank === REDUCED ? "" : parting.rank,
}, ...children);

const sentences = (texts) => texts.map((text) => el("p", {}, text));

function partedCard(report) {
  if (!report.parted.length) return null;
  const beyond = report.floor ? "#vs. noise" : "#vs. threshold";
  const rows = report.parted.map((parting) => {
    const [departure] = parting.departures, more = parting.departures.length - 1;
    return [
      shown(parting.iteration), curveLink(parting, departure, whatNode(parting, departure.statistic)),
      `${departure.statistic}${more > 0 ? `, ${more} more` : ""}`, departure.a, departure.b, departure.difference, departure.times, parting.origin,
    ];
  });
  return card("All differing tensors", {
    about: `Sorted by first step, then by execution order. Each row links to both curves.${report.parted_total > rows.length ? ` The first ${shown(rows.length)} of ${shown(report.parted_total)} tensors.` : ""}`,
    extra: [csvButton("departures", ["step", "layer", "tensor", "rank", "statistic", "gemm", "a", "b", "difference", "times", "origin"], () =>
      report.parted.flatMap((parting) => parting.departures.map((each) => [
        each.iteration, parting.layer < 0 ? "" : report.layers[parting.layer].name, parting.tensor, parting.rank === REDUCED ? "" : parting.rank,
        each.statistic, each.gemm, each.a, each.b, each.difference, each.times, parting.origin,
      ])))],
  }, table(["#step", "where", "statistic", "#A", "#B", "#difference", beyond, "origin"], rows, { tall: true }));
}

// The losses of both sides, and how far apart they are beside what is known to be ordinary.
function losses(report) {
  const { loss } = report;
  if (!loss?.arrays) return [null, () => {}];
  const curves = plotNode(280, "The losses of both sides"), apart = plotNode(280, "Difference of the losses");
  const made = card("Loss", {
    extra: [csvButton("losses", ["step", "a", "b", "a smoothed", "b smoothed", "difference in %"], async () => {
      const [steps, ...columns] = await unpackedCurve(report, loss.arrays);
      return steps.map((step, at) => [step, ...columns.map((column) => column[at])]);
    })],
  }, sentences(loss.sentences), el("div", { class: "two" }, curves, apart));
  async function render() {
    const [steps, a, b, smoothA, smoothB, relative] = await unpackedCurve(report, loss.arrays);
    const [colourA, colourB] = SIDES();
    const faint = { showlegend: false, opacity: 0.3, hoverinfo: "skip", hovertemplate: null, mode: "lines" };
    await draw(curves, [
      line("A", { steps, values: a }, colourA, { extra: faint }), line("B", { steps, values: b }, colourB, { extra: faint }),
      ...(loss.window ? [ // without a step that both have, there is none
        line(`A, running median of ${loss.window}`, { steps, values: smoothA }, colourA),
        line(`B, running median of ${loss.window}`, { steps, values: smoothB }, colourB),
      ] : []),
      ...notFinite("A", { steps, values: a }, colourA), ...notFinite("B", { steps, values: b }, colourB),
    ], { xaxis: stepAxis(report, steps), yaxis: { title: { text: plotText(loss.name) }, ...valueAxis([{ values: a }, { values: b }]) }, yaxis2: MARKS_AXIS, hovermode: "x unified" });
    const bounds = [...loss.yardsticks.map(({ name, bound, holds }) => [name, 100 * bound, holds === null ? "dot" : "dash"]), ...(loss.floor === null ? [] : [["the noise", 100 * loss.floor, "longdash"]])];
    const stable = steps.filter((step) => step >= loss.stable_since);
    const limits = bounds.map(([name, bound, dash], at) => ({
      type: "scatter", mode: "lines", name: plotText(name), x: [steps[0], steps.at(-1), null, steps[0], steps.at(-1)], y: [bound, bound, null, -bound, -bound],
      line: { color: OTHER_COLOURS[(at + 2) % OTHER_COLOURS.length], width: 1.4, dash }, hovertemplate: `±${shown(bound)} %<extra>${plotText(name)}</extra>`,
    }));
    await draw(apart, [line("B against A", { steps, values: relative }, colourB, { unit: "%" }), ...limits, ...notFinite("B against A", { steps, values: relative }, colourB)], {
      xaxis: stepAxis(report, steps), yaxis: { title: { text: "(B - A) / |A|" }, ticksuffix: " %" }, yaxis2: MARKS_AXIS,
      shapes: stable.length > 1 ? [{ type: "rect", x0: stable[0], x1: stable.at(-1), yref: "paper", y0: 0, y1: 1, fillcolor: "rgba(127,127,127,0.12)", line: { width: 0 }, layer: "below" }] : [],
    });
  }
  return [made, render];
}

// The losses that are no number any more: what the page begins with.
const lostLosses = ({ lost }) => lost.length > 0 && el("section", { class: "card verdict error", "aria-label": "Lost losses" }, lost.map((sentence) => el("h2", {}, sentence)));

// The findings that only B has.
function newFindings(report) {
  const { verdicts } = report;
  if (!verdicts) return null;
  const { only_b: found, not_checked_in_a: unknown } = verdicts;
  return el("section", { class: `card verdict ${found[0]?.severity ?? (verdicts.partial ? "unchecked" : "healthy")}`, "aria-labelledby": "verdict" },
    el("h2", { id: "verdict" }, verdicts.summary),
    found.length > 0 && el("ol", { "aria-label": "Findings that only B has, most severe first" }, found.map((finding) =>
      findingLine(report, finding, unknown.includes(finding.rule) ? " This rule was not checked in A." : ""))),
    el("p", { class: "quiet" }, `A: ${verdicts.a}`), el("p", { class: "quiet" }, `B: ${verdicts.b}`));
}

async function comparisonPage(report) {
  const [loss, drawLoss] = losses(report), [first] = report.parted;
  const tiles = [["A, the reference", report.a], ["B", report.b], ["Noise floor", report.floor ? report.floor.sides.join(", ") : "none"], ["Differing tensors", shown(report.parted_total)]];
  return [[
    lostLosses(report), newFindings(report),
    el("h1", {}, report.name), notes(report, "Missing data"),
    el("dl", { class: "tiles" }, tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    card("Where they diverge first", {}, el("div", { class: "finding first" }, sentences(report.first)),
      first && el("p", {}, curveLink(first, first.departures[0], "Both curves"))),
    partedCard(report), loss,
    el("div", { class: "two" },
      card("Facts that differ", {}, report.facts.length ? table(["fact", "A", "B"], report.facts, { tall: true }) : el("p", { class: "quiet" }, "None recorded.")),
      card("What was compared", {}, sentences(report.what))),
  ], drawLoss];
}

const labelOf = ({ layer, tensor, statistic, gemm, rank }) => layer < 0 ? statistic
  : `${statistic} of ${tensor}${gemm ? ` (${gemm})` : ""}${rank === REDUCED ? "" : `, rank ${rank}`}`;

// The axis of a plot that shows curves and what is ordinary; the values that count too, unless that would make the curves
// flat.
function curvesAxis(curves, counting, log) {
  const place = log ? Math.log10 : (value) => value;
  const ends = (columns) => {
    let low = Infinity, high = -Infinity;
    for (const values of columns)
      for (const value of values)
        if (Number.isFinite(value) && !(log && value <= 0)) { low = Math.min(low, place(value)); high = Math.max(high, place(value)); }
    return [low, high];
  };
  const own = ends(curves), all = ends([...curves, ...counting]);
  const [low, high] = own[1] > own[0] && all[1] - all[0] > MOST_BEYOND * (own[1] - own[0]) ? own : all;
  const margin = 0.05 * (high - low), range = high > low ? { range: [low - margin, high + margin] } : {};
  return { ...valueAxis([{ values: log ? [10 ** low, 10 ** high] : [low, high] }], log), ...range };
}

// The steps, both sides, and the values below and above A from where on a difference counts.
async function unpackedSides(report, one) {
  const [steps, a, b, limit] = await unpackedCurve(report, one.arrays);
  const width = asNumber(one.step), resolution = asNumber(one.resolution); // NaN: the scale is that of the values
  const place = (value) => Number.isNaN(width) ? value : Math.asinh(value / resolution) / width;
  const back = (at) => Number.isNaN(width) ? at : resolution * Math.sinh(at * width);
  const nearest = (sign) => Array.from(a, (value, at) => Number.isFinite(value) ? back(place(value) + sign * limit[at]) : value);
  return [steps, a, b, nearest(-1), nearest(1)];
}

// Both curves of a series, and from where on a difference from A counts.
function curvePlot(report, one) {
  const node = plotNode(230, `Both sides of ${labelOf(one)}`);
  const made = card(labelOf(one), {
    about: one.every > 1 ? `Every ${one.every}th of its steps.` : "",
    extra: [one.departs && el("span", { class: "badge exact" }, "diverges"), csvButton(labelOf(one), ["step", "a", "b", "counts below", "counts above"], async () => {
      const [steps, ...columns] = await unpackedSides(report, one);
      return steps.map((step, at) => [step, ...columns.map((column) => column[at])]);
    })],
  }, node);
  async function render() {
    const [steps, a, b, below, above] = await unpackedSides(report, one);
    const [colourA, colourB] = SIDES(), log = wantsLog([{ values: a }, { values: b }]);
    const step = Number(state.now.step);
    const edge = (values) => Array.from(values, (value) => Number.isFinite(value) && !(log && value <= 0) ? value : null);
    const limit = { type: "scatter", mode: "lines", x: steps, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    const band = (name, from, to) => [
      { ...limit, y: edge(from) },
      { ...limit, y: edge(to), fill: "tonexty", fillcolor: "rgba(127,127,127,0.22)", name, showlegend: true },
    ];
    await draw(node, [
      ...band("below the threshold", below, above),
      line("A", { steps, values: a }, colourA), line("B", { steps, values: b }, colourB),
      ...notFinite("A", { steps, values: a }, colourA), ...notFinite("B", { steps, values: b }, colourB),
    ], {
      hovermode: "x unified", xaxis: stepAxis(report, steps), yaxis2: MARKS_AXIS,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
      yaxis: curvesAxis([a, b], [below, above], log),
      shapes: state.now.step === "" ? [] : [{ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: isDark() ? "#fff" : "#000", width: 1, dash: "dot" } }],
    });
  }
  return [made, render];
}

async function curvesPage(report) {
  const { layer, tensor, statistic, rank } = state.now;
  const number = report.layers.findIndex((each) => each.name === layer);
  const fits = (one) => (!tensor || one.tensor === tensor) + (!statistic || one.statistic === statistic) + (rank === "" || String(one.rank) === rank);
  const own = report.curves.filter((one) => one.layer === number).sort((a, b) => fits(b) - fits(a) || b.departs - a.departs);
  const plots = own.slice(0, MOST_PLOTS).map((one) => curvePlot(report, one));
  const names = [...new Set(report.curves.map((one) => one.layer))].sort((a, b) => a - b);
  const partings = report.parted.filter((parting) => parting.layer === number);
  return [[
    el("h1", { class: "layer-name" }, number < 0 ? "The trainer's numbers" : layer),
    el("div", { class: "controls" }, choice("Layer", names.map((each) => each < 0 ? ["", "trainer metrics"] : [report.layers[each].name, brief(report.layers[each])]), number < 0 ? "" : layer,
      (name) => state.go({ layer: name, step: "", tensor: "", statistic: "" }))),
    partings.length > 0 && card("Differences", {}, table(["#step", "tensor", "statistic", "#A", "#B", "#difference", report.floor ? "#vs. noise" : "#vs. threshold", "origin"],
      partings.flatMap((parting) => parting.departures.map((each) => [
        shown(each.iteration), parting.tensor, curveLink(parting, each, each.statistic), each.a, each.b, each.difference, each.times, parting.origin,
      ])), { tall: true })),
    own.length > plots.length && el("p", { class: "quiet" }, `${plots.length} of ${shown(own.length)} series: the first to differ.`),
    own.length ? el("div", { class: "two" }, plots.map(([node]) => node))
      : card("Nothing to show", {}, el("p", { class: "quiet" }, "The page has no curves of this layer, only of the first that differ.")),
  ], async () => Promise.all(plots.map(([, render]) => render()))];
}

guarded(() => openPage({
  shownPages: {
    summary: ["Comparison", comparisonPage],
    layer: ["Curves", curvesPage],
  },
  defaults: { page: "summary", statistic: "", tensor: "", layer: "", step: "", rank: "", filter: "" },
  prepared: (content) => {
    const numbers = new Map(content.layers.map((layer, number) => [layer.name, number]));
    const placed = (each) => ({ ...each, layer: numbers.get(each.layer) ?? -1, rank: each.rank ?? REDUCED }); // -1: a trainer's metric
    return { ...content, parted: content.parted.map(placed), curves: content.curves.map(placed), families: [] };
  },
  named: ({ a, b }) => [`${a} and ${b}`, `${a} and ${b}`],
  foot: ({ curves }) => `Curves of ${shown(curves.length)} series are in this page. `,
}));
