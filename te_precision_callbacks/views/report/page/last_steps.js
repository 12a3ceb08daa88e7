// The last steps before it broke: tensors in the order of execution, time from left to right, the loss below.

const MOST_CHANGE = 8; // powers of two to both sides of a row's median, where the colours end
const BAD_CHANGE = MOST_CHANGE + 2; // where what is not finite lies on the colour scale
const ROWS_NEAR = 40, LOSS_HEIGHT = 110;

const changeOf = (value, median) => value < 0 ? null : !Number.isFinite(value) ? BAD_CHANGE
  : median > 0 ? Math.max(-MOST_CHANGE, Math.min(MOST_CHANGE, Math.log2(value / median))) : 0;

function medianOf(values) {
  const positive = Array.from(values).filter((value) => value > 0 && Number.isFinite(value)).sort((a, b) => a - b);
  return positive[positive.length >> 1] ?? 0;
}

// The end of a name, which has the number of the layer.
const tail = (name, most) => name.length <= most ? name : `…${name.slice(1 - most)}`;

// Which of two changes is drawn where rows share a pixel: the larger one.
const stronger = (a, b) => b !== null && (a === null || Math.abs(b) > Math.abs(a)) ? b : a;

async function lastStepsPage(report) {
  const steps = report.last_steps;
  if (!steps) return nothingPage("Last steps", "The run has no record of its last steps: it has not ended, it ran with every_step=False, or no GEMM of its layers is watched.");
  const { tensors, iterations, first, loss } = steps, width = iterations.length;
  const magnitudes = await report.arrays.get(steps.magnitudes);
  const valuesOf = (place) => magnitudes.subarray(place * width, (place + 1) * width);
  const kinds = [...new Set(tensors.map(([, tensor]) => tensor))], kind = kinds.includes(state.now.tensor) ? state.now.tensor : "";
  const wanted = tensors.map((_, place) => place).filter((place) => !kind || tensors[place][1] === kind);
  const around = first ? wanted.findIndex((place) => place >= first[0]) : -1, centre = around < 0 ? wanted.length - 1 : around;
  const begin = Math.max(0, Math.min(centre - ROWS_NEAR / 2, wanted.length - ROWS_NEAR)), isNear = state.now.near === "yes" && wanted.length > ROWS_NEAR;
  const places = isNear ? wanted.slice(begin, begin + ROWS_NEAR) : wanted;
  const label = (place) => tensors[place].join(" ");
  const heat = Math.min(TALLEST, Math.max(60, places.length * ROW_HEIGHT)), pool = Math.ceil((2 * places.length) / heat);
  const hasLoss = loss.some((value) => value !== null), below = hasLoss ? LOSS_HEIGHT : 0;
  const node = plotNode(heat + below + 60, "Change of the largest magnitude of each tensor in the last steps");
  const rows = [];
  for (let at = 0; at < places.length; at += pool) rows.push(places.slice(at, at + pool));
  const changes = places.map((place) => {
    const values = valuesOf(place), median = medianOf(values);
    return Array.from(values, (value) => changeOf(value, median));
  });
  const z = rows.map((row, at) => iterations.map((_, column) => row.reduce((found, _, member) => stronger(found, changes[at * pool + member][column]), null)));
  const inOrder = first && tensors[first[0]], at = first ? places.indexOf(first[0]) : -1;
  const controls = el("div", { class: "controls" },
    choice("Tensor", [["", "all"], ...kinds.map((name) => [name, name])], kind, (tensor) => state.go({ tensor })),
    wanted.length > ROWS_NEAR && buttons("Rows", [["yes", first ? "Around the first inf or nan" : "The last ones"], ["no", `All ${shown(wanted.length)}`]], isNear ? "yes" : "no", (near) => state.go({ near })));
  const head = first ? el("p", { class: "first" }, el("strong", {}, "First inf or nan: "), `the ${inOrder[1]} of `, layerNamed(report, inOrder[0]), `, in step ${stepText(report, first[1])}.`)
    : el("p", { class: "first" }, "No inf or nan in these steps.");
  const made = card("Largest magnitude of each tensor", {
    about: "Tensors in the order of execution, from top to bottom. The colour is the change to the median of the row: at most ÷ 256 (blue) or × 256 (orange); pink is nan or inf, and no colour a tensor that was not read. The number of an input of a norm is the largest RMS of a token, that of an update is its share of the norm of the weight, and that of tokens is how many an expert got. Click a row to open its layer.",
    extra: [csvButton("last steps", ["layer", "tensor", "step", "largest magnitude"], () => wanted.flatMap((place) =>
      Array.from(valuesOf(place)).flatMap((value, column) => value < 0 ? [] : [[...tensors[place], iterations[column], value]])))],
  }, node);

  async function render() {
    const total = heat + below, every = Math.max(1, Math.ceil((14 * places.length) / heat)), named = places.map((_, row) => row).filter((row) => row % every === 0);
    const curve = { steps: iterations, values: loss.map(asNumber).map((value) => value ?? undefined) };
    const isWide = innerWidth > 700, room = Math.min(labelsWidth(places.map(label)), innerWidth * 0.35), most = Math.floor((room - 14) / 6.7);
    await draw(node, [{
      type: "heatmap", x: edges(iterations, iterations), y: Array.from({ length: rows.length + 1 }, (_, row) => Math.min(row * pool, places.length) - 0.5), z,
      zmin: -MOST_CHANGE, zmax: MOST_CHANGE + 4, hoverinfo: "none", hoverongaps: false, zsmooth: false, showscale: isWide,
      colorscale: [...stops(DIVERGING[isDark() ? "dark" : "light"], 0, 0.8), [0.8 + 1e-6, NOT_FINITE], [1, NOT_FINITE]],
      colorbar: {
        thickness: 12, outlinewidth: 0, ticklen: 4, tickfont: { size: 11 }, len: Math.max(heat, 120), lenmode: "pixels", y: 1, yanchor: "top", xpad: 8,
        tickvals: [-8, -4, 0, 4, 8, BAD_CHANGE], ticktext: ["÷ 256", "÷ 16", "median", "× 16", "× 256", "nan, inf"],
      },
    }, ...(at < 0 ? [] : [{
      type: "scatter", mode: "markers", name: "first inf or nan", x: [first[1]], y: [at], hoverinfo: "skip", showlegend: false, cliponaxis: false,
      marker: { symbol: "square-open", size: 15, color: isDark() ? "#fff" : "#000", line: { width: 3 } },
    }]), ...(hasLoss ? [{ ...line("loss", curve, colourOf("activation", 0)), yaxis: "y2", showlegend: false }, ...notFinite("loss", curve, colourOf("activation", 0), { yaxis: "y3" })] : [])], {
      height: total + 60, margin: { l: room, r: isWide ? 76 : 20, t: 14, b: 46 }, showlegend: false,
      xaxis: { ...stepAxis(report, iterations), range: [iterations[0] - 0.5, iterations.at(-1) + 0.5], anchor: hasLoss ? "y2" : "y" },
      yaxis: {
        domain: [below / total, 1], range: [places.length - 0.5, -0.5], ticks: "", showgrid: false, tickfont: LABEL_FONT,
        tickvals: named, ticktext: named.map((row) => plotText(`${row === at ? "● " : ""}${tail(label(places[row]), most)}`)),
      },
      yaxis2: { ...valueAxis([curve]), domain: [0, Math.max(below - 24, 1) / total], title: { text: "loss" }, automargin: false, nticks: 4 },
      yaxis3: { ...MARKS_AXIS, overlaying: "y2" },
    });
    listen(node, { clicked, hovered: ([point], event) => hovered(point, event) });
  }

  // The tensor of a cell: of several, the one that changed the most.
  function placeOf({ data, pointIndex }) {
    if (data.type !== "heatmap") return -1;
    const [row, column] = pointIndex, from = row * pool;
    return places[from + rows[row].findIndex((_, member) => changes[from + member][column] === z[row][column])] ?? -1;
  }

  function clicked(point) {
    const [layer] = tensors[placeOf(point)] ?? [];
    if (report.layers.some(({ name }) => name === layer)) state.go({ page: "layer", layer, step: "", tensor: "" });
  }

  function hovered(point, event) {
    const place = placeOf(point);
    if (place < 0) return;
    const value = valuesOf(place)[point.pointIndex[1]];
    tip.show(event, el("b", {}, shown(value, 3)), el("span", { class: "mono" }, label(place)),
      el("span", { class: "dim" }, `step ${stepText(report, iterations[point.pointIndex[1]])}${rows[point.pointIndex[0]].length > 1 ? `; the largest change of ${rows[point.pointIndex[0]].length} tensors` : ""}`));
  }

  const named = steps.rank ? `Rank ${steps.rank}. ` : "";
  return [[el("h1", {}, "Last steps"), el("p", {}, `${named}${steps.text}`), head, controls, made], render];
}

function layerNamed(report, name) {
  const index = report.layers.findIndex((layer) => layer.name === name);
  return index < 0 ? el("span", { class: "mono" }, name) : layerLink(report, index);
}
