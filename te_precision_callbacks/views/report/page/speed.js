// What low precision buys: layers, and what to do. Times are milliseconds of a step.

const SPEED_COLOURS = {
  high: PRECISIONS.bf16, low: PRECISIONS.fp8, cast: "#7cc3ee", interval: PRECISIONS.fp32,
};
const KINDS_IN_PLOT = 20;

// Blue is too dark on a dark page, where a lighter one stands for casts.
const ON_DARK = { [PRECISIONS.fp8]: "#4aa8e8", [SPEED_COLOURS.cast]: "#c3e5fa" };
const speedColour = (colour) => isDark() ? ON_DARK[colour] ?? colour : colour;

const milliseconds = (value) => value === null || value === undefined ? "unknown" : shown(value, 3);

const timesAsFast = ({ speedup, speedup_low: low, speedup_high: high }) => speedup === null ? ""
  : speedup.toFixed(2) + (low === null ? "" : ` (${low.toFixed(2)} to ${high.toFixed(2)})`);

// The room for names at the left of a plot, and names that fit there.
const roomForNames = () => Math.max(120, Math.min(380, innerWidth * 0.3));
const fitting = (name) => plotText(shortened(name, Math.floor(roomForNames() / 6.6)));

const namedAxis = (names, range) => ({
  tickmode: "array", tickvals: names.map((_, at) => at), ticktext: names.map(fitting), range, fixedrange: true, ticks: "", showgrid: false,
});

function speedVerdict({ speed }) {
  const { total } = speed, slow = total && total.speedup_low !== null && total.speedup_low <= 1;
  return el("section", { class: `card verdict ${!total || total.speedup_low === null ? "none" : slow ? "warning" : "healthy"}`, "aria-labelledby": "speed-verdict" },
    el("h2", { id: "speed-verdict" }, `${speed.summary}.`),
    speed.unknown && el("p", {}, speed.unknown),
    total && el("p", {}, `All matrix products of a step: ${milliseconds(total.low_ms)} ms as run, ${milliseconds(total.high_ms)} ms in BF16.`,
      total.unknown > 0 && ` ${shown(total.unknown)} products of unknown cost are not included.`),
    total && el("p", { class: "quiet" }, `Expected times from a cost model of ${speed.device}; 95 % confidence intervals in parentheses.`));
}

const kindName = ({ name, layers }) => layers > 1 ? `${name} (${shown(layers)})` : name;

function layersCard(report) {
  const { rows, more } = report.speed.kinds, known = rows.filter(({ high_ms: high }) => high !== null);
  const places = new Set(report.layers.map(({ name }) => name));
  const inPlot = known.slice(0, KINDS_IN_PLOT);
  const node = plotNode(96 + 46 * inPlot.length, `Milliseconds per step in BF16 and as run, by kind of layer: ${inPlot.map((row) => `${kindName(row)} ${milliseconds(row.high_ms)} and ${milliseconds(row.low_ms)}`).join("; ")}`);
  const named = (row) => places.has(row.first) ? el("a", { href: state.hash({ page: "layer", layer: row.first }), class: "mono layers", title: row.first }, row.name) : el("span", { class: "mono layers" }, row.name);
  const verdict = (row) => [row.gains_nothing ? "gains nothing" : row.verdict, ...row.why].filter(Boolean).join("; ");
  const columns = ["layers", "#count", "tokens × in × out", "recipe", "#BF16, ms", "#as run, ms", "#casts", "times as fast", "result, or reason"];
  const keys = ["name", "layers", "recipes", "high_ms", "low_ms", "cast_ms", "speedup", "speedup_low", "speedup_high", "verdict"];
  const made = card("Layers", {
    about: `Similar layers share a row, with their total time. ${known.length > KINDS_IN_PLOT ? `The plot shows the ${KINDS_IN_PLOT} slowest kinds. ` : ""}Whiskers: 95 % confidence interval.`,
    extra: [csvButton("layers by time", [...keys, "gains_nothing", "shapes", "why"], () => rows.map((row) => [...keys.map((key) => row[key]), row.gains_nothing, row.shapes.join(" "), row.why.join("; ")]))],
  }, inPlot.length > 0 && node, table(columns, rows.map((row) => [
    named(row), shown(row.layers), row.shapes.join(", "), row.recipes, milliseconds(row.high_ms), milliseconds(row.low_ms), row.verdict && row.cast_ms !== null ? milliseconds(row.cast_ms) : "",
    timesAsFast(row), verdict(row),
  ]), { tall: rows.length > 12 }), more && el("p", { class: "quiet" }, `${more}.`));
  const render = () => {
    if (!inPlot.length) return null;
    const width = 0.36, low = inPlot.map((row) => row.low_ms);
    const bar = (name, group, colour, x, more = {}) => ({
      type: "bar", orientation: "h", name, y: inPlot.map((_, at) => at), x, offset: width * (group - 1), width: width * 0.94,
      marker: { color: speedColour(colour) }, hovertemplate: `%{x:.4g} ms<extra>${name}</extra>`, ...more,
    });
    const whiskers = inPlot.map((row, at) => ({ row, at })).filter(({ row }) => row.speedup_low !== null);
    return draw(node, [
      bar("BF16", 0, SPEED_COLOURS.high, inPlot.map((row) => row.high_ms)),
      bar("as run: GEMMs", 1, SPEED_COLOURS.low, inPlot.map((row) => row.low_ms - row.cast_ms)),
      bar("as run: casts", 1, SPEED_COLOURS.cast, inPlot.map((row) => row.cast_ms), { base: inPlot.map((row) => row.low_ms - row.cast_ms) }),
      ...(whiskers.length ? [{
        type: "scatter", mode: "markers", name: "95 % confidence interval", x: whiskers.map(({ at }) => low[at]), y: whiskers.map(({ at }) => at + width / 2),
        marker: { size: 7, symbol: "line-ns-open", color: SPEED_COLOURS.interval }, hoverinfo: "skip", error_x: {
          type: "data", symmetric: false, thickness: 1.6, width: 5, color: SPEED_COLOURS.interval,
          array: whiskers.map(({ row }) => row.high_ms / row.speedup_low - row.low_ms), arrayminus: whiskers.map(({ row }) => row.low_ms - row.high_ms / row.speedup_high),
        },
      }] : []),
    ], {
      barmode: "overlay", margin: { l: roomForNames(), r: 24, t: 8, b: 40 }, xaxis: { title: { text: "ms per step" }, rangemode: "tozero", fixedrange: true },
      yaxis: namedAxis(inPlot.map((row) => kindName({ ...row, name: row.short })), [inPlot.length - 0.5, -0.5]),
    });
  };
  return [made, render];
}

function adviceCard({ advice, device }) {
  return card("What to do", { about: `Largest saving first, on ${device}. Each saving is estimated separately; savings do not add up.`, extra: [
    csvButton("what to do", ["text", "saves_ms", "saves_ms_low", "saves_ms_high", "note", "patch"], () => advice.map((one) => [one.text, one.saves_ms, ...one.interval, one.note, one.patch]))],
  }, advice.length ? el("ol", { class: "advice" }, advice.map((one) => el("li", { class: "found" },
    el("div", {}, el("strong", {}, one.text), `: saves about ${milliseconds(one.saves_ms)} ms per step (${one.interval.map(milliseconds).join(" to ")})`),
    one.note && el("p", { class: "quiet" }, one.note), one.patch && el("pre", { "aria-label": "Section for the config" }, one.patch))))
    : el("p", { class: "quiet" }, "No advice: no change was found that saves time."));
}

async function speedPage(report) {
  const { speed } = report, expected = speed.total;
  const [layers, drawLayers] = expected ? layersCard(report) : [null, () => {}];
  return [[
    el("h1", {}, "Speed"), speedVerdict(report), layers, expected && adviceCard(speed),
    expected && speed.notes.length > 0 && card("Limitations of these times", {}, el("ul", {}, speed.notes.map((note) => el("li", {}, note)))),
  ], drawLayers];
}
