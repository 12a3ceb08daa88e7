// What all plots share: colours, axes, drawing. Plotly reads a little HTML and TeX in texts, so texts of a run are escaped.

const plotText = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("$", "&#36;");

const VIRIDIS = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"];
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const DIVERGING = {
  light: ["#08417a", "#2f79b5", "#7fb3d9", "#cfe1ee", "#f3f3f3", "#f9dcc0", "#f0aa6a", "#cf6d1e", "#8a3c04"],
  dark: ["#9fd0f5", "#5aa2d8", "#2d6c9f", "#1f4461", "#23282e", "#5a3d20", "#9c5d1d", "#d98f3d", "#ffcf94"],
};
const NOT_FINITE = "#e6007e";

// Okabe and Ito's colours, which differ for all kinds of colour vision.
const COLOURS = {
  activation: "#0072b2", weight: "#d55e00", gradient: "#009e73", output: "#cc79a7", wgrad: "#e69f00", dgrad: "#56b4e9",
};
const OTHER_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"];
const PRECISIONS = {
  nvfp4: "#cc79a7", mxfp8: "#56b4e9", fp8: "#0072b2", bf16: "#e69f00", fp16: "#f0e442", fp32: "#d55e00", fp64: "#8a3c04",
};

const isDark = () => document.documentElement.dataset.theme === "dark";

const colourOf = (tensor, at) => {
  const found = COLOURS[tensor] ?? OTHER_COLOURS[at % OTHER_COLOURS.length];
  return isDark() && found === "#0072b2" ? "#4aa8e8" : found;
};

const stops = (colours, from = 0, to = 1) =>
  colours.map((colour, at) => [from + ((to - from) * at) / (colours.length - 1), colour]);

function themed(layout) {
  const ink = getComputedStyle(document.documentElement);
  const colour = (name) => ink.getPropertyValue(name).trim();
  const axis = (own = {}) => ({
    gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"), zeroline: false,
    ticks: "outside", ticklen: 4, tickcolor: colour("--line"),
    automargin: own.exponentformat ? "left" : false, // labels such as -0.5 x 10^-16 are wider than the margin
    ...own,
    title: own.title ? { standoff: 8, font: { size: 12, color: colour("--quiet") }, ...own.title } : undefined,
    tickfont: { size: 11, color: colour("--quiet"), ...own.tickfont },
  });
  const axes = Object.fromEntries(Object.keys(layout).filter((name) => /^[xy]axis/.test(name))
    .map((name) => [name, axis(layout[name])]));
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
    hoverlabel: { bgcolor: colour("--ink"), bordercolor: colour("--ink"), font: { size: 12, color: colour("--card") } },
    margin: { l: 60, r: 16, t: 10, b: 44 },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12 } },
    dragmode: "zoom",
    ...layout, ...axes,
  };
}

const PLOT_OPTIONS = {
  responsive: true, displayModeBar: false, doubleClick: "reset", showTips: false,
};

// The plots that the page has now; they are given back before the next page is drawn.
const drawn = new Set();

async function draw(node, traces, layout) {
  drawn.add(node);
  await Plotly.react(node, traces, themed(layout), PLOT_OPTIONS);
  node.dataset.drawn = "yes";
  return node;
}

// A button that saves what is drawn in a card: plotly's own toolbar would cover a part of it.
function pictureButton(card) {
  const save = async () => {
    const plots = card.querySelectorAll(".plot[data-drawn]"), name = card.querySelector("h2, h3").textContent;
    const paper_bgcolor = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
    for (const [at, plot] of [...plots].entries())
      await Plotly.downloadImage({ data: plot.data, layout: { ...plot.layout, paper_bgcolor } }, {
        format: "png", scale: 2, width: plot.clientWidth, height: plot.clientHeight, filename: fileName(plots.length > 1 ? `${name} ${at + 1}` : name),
      });
  };
  return el("button", { class: "small", type: "button", title: "Save the plot as a picture", onclick: () => guarded(save) }, "PNG");
}

function forgetPlots() {
  for (const node of drawn) Plotly.purge(node);
  drawn.clear();
  tip.hide();
}

const plotNode = (height, label) =>
  el("div", { class: "plot", style: `height:${height}px`, role: "img", "aria-label": label });

// What the mouse does in a plot; what it did before is forgotten. A click acts when no second one follows, since two of
// them reset the zoom: plotly tells the second one too, behind the double click. On a plot that has gone it does nothing.
function listen(node, { zoomed, clicked, hovered }) {
  for (const name of ["plotly_relayout", "plotly_click", "plotly_doubleclick", "plotly_hover", "plotly_unhover"]) node.removeAllListeners(name);
  let waiting = 0, doubled = -Infinity;
  if (zoomed) node.on("plotly_relayout", (event) => guarded(() => zoomed(event)));
  if (clicked) {
    node.on("plotly_click", ({ points }) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => node.isConnected && performance.now() - doubled > 500 && guarded(() => clicked(points[0])), 250);
    });
    node.on("plotly_doubleclick", () => { doubled = performance.now(); });
  }
  node.on("plotly_hover", ({ points, event }) => guarded(() => hovered(points, event)));
  node.on("plotly_unhover", () => tip.hide());
}

// A line over steps; nan and inf have no place on it, so they are marked at the top.
function line(name, curve, colour, { dash = "solid", unit = "", extra = {} } = {}) {
  return {
    type: "scatter", mode: curve.steps.length < 60 ? "lines+markers" : "lines", name: plotText(name), x: curve.steps,
    y: Array.from(curve.values, (value) => Number.isFinite(value) ? value : null),
    line: { color: colour, width: 1.8, dash }, marker: { size: 4, color: colour },
    hovertemplate: `%{y:.5g} ${plotText(unit)}<extra>${plotText(name)}${curve.exact === false ? " (overview)" : ""}</extra>`,
    ...extra,
  };
}

function notFinite(name, curve, colour, axes = {}) {
  const steps = [], words = [];
  curve.values.forEach((value, at) => {
    if (value === undefined || Number.isFinite(value)) return;
    steps.push(curve.steps[at]);
    words.push(shown(value));
  });
  return !steps.length ? [] : [{
    type: "scatter", mode: "markers", name: plotText(`${name}: not finite`), x: steps, y: steps.map(() => 1), yaxis: "y2", text: words,
    marker: { symbol: "x", size: 8, color: NOT_FINITE }, hovertemplate: "%{text}<extra></extra>", showlegend: false, ...axes,
  }];
}

// An axis that lies over the whole height, for marks without a value.
const MARKS_AXIS = { overlaying: "y", range: [0, 1.03], visible: false, fixedrange: true };

const MOST_STEPS_WITH_TICKS = 8;

// The axis of steps: only whole numbers have ticks, and of a few steps each of them.
function stepAxis(report, steps) {
  const few = new Set(steps), { ahead = 0 } = report.run?.duration.trainer ?? {};
  const title = { text: ahead ? `step (the trainer's is ${ahead} ${ahead > 0 ? "more" : "less"})` : "step" };
  return few.size <= MOST_STEPS_WITH_TICKS ? { title, tickmode: "array", tickvals: [...few], tickformat: ",d" }
    : { title, tickformatstops: [{ dtickrange: [null, 0.999], value: "~g" }, { dtickrange: [1, null], value: ",d" }] };
}

// The least and the greatest of the numbers of curves that a condition holds for.
function endsOf(curves, holds) {
  let low = Infinity, high = -Infinity;
  for (const { values } of curves)
    for (const value of values)
      if (Number.isFinite(value) && holds(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

// A linear axis. That of a constant is around its value: plotly's reaches one to both sides, where 0.001 lies on the 0.
function linearAxis(curves) {
  const [low, high] = endsOf(curves, () => true), size = Math.max(Math.abs(low), Math.abs(high));
  const isConstant = high >= low && high - low <= 1e-9 * size;
  return { exponentformat: "power", ...(isConstant && size && { range: [low - size / 2, high + size / 2] }) };
}

// A logarithmic axis, with labels at powers of ten unless it spans less than two of them. Within one of them it is linear:
// there may be no round number of its kind.
function logAxis(curves) {
  const [low, high] = endsOf(curves, (value) => value > 0);
  const decades = high > low ? Math.log10(high / low) : 0;
  if (decades < 1) return linearAxis(curves);
  return { type: "log", exponentformat: "power", dtick: decades > 2 ? Math.ceil(decades / 6) : "D2" };
}

// The axis of curves.
const valueAxis = (curves, isLog = wantsLog(curves)) => isLog ? logAxis(curves) : linearAxis(curves);

// Whether numbers want a logarithmic axis.
function wantsLog(curves) {
  const [low, high] = endsOf(curves, () => true);
  return low > 0 && high > 100 * low;
}
