// One layer: what its products ran in, the exponents of its tensors, scales and amax, and all its curves.

function gemmTable(gemms) {
  const sizes = ({ gemm, n, m, k }) => gemm === "dgrad" ? [n, m, k] : gemm === "wgrad" ? [k, m, n] : [n, k, m]; // tokens, in, out
  const times = (gemm) => sizes(gemm).every((size) => size) ? [...(gemm.batch > 1 ? [gemm.batch] : []), ...sizes(gemm)].join(" × ") : "–";
  const ran = (gemm) => gemm.runs === "never" ? `does not run${gemm.not_run ? `: ${gemm.not_run}` : ""}` : (gemm.precision || "–").toUpperCase();
  return table(["product", "runs in", "operands", "reason for high precision", "tokens × in × out", "#multiply-adds per step"], gemms.map((gemm) => [
    gemm.gemm + (gemm.backward && !["dgrad", "wgrad"].includes(gemm.gemm) ? " (backward)" : ""), ran(gemm),
    Object.entries(gemm.operands).map(([tensor, format]) => el("div", {}, `${tensor}: ${format}`)),
    gemm.why ?? "", times(gemm), gemm.macs ? shown(gemm.macs) : "–",
  ]));
}

function layerHead(report, index) {
  const { name, facts } = report.layers[index];
  const step = (to) => to >= 0 && to < report.layers.length ? () => state.go({ page: "layer", layer: report.layers[to].name }) : null;
  const button = (text, title, to) => el("button", { type: "button", title, disabled: !step(to), onclick: step(to) }, text);
  const options = el("datalist", { id: "layers" }, report.layers.map((layer) => el("option", { value: layer.name })));
  const picker = el("input", {
    type: "search", list: "layers", value: name, "aria-label": "Layer",
    onchange: (event) => report.layers.some((layer) => layer.name === event.target.value) && state.go({ layer: event.target.value }),
    onfocus: (event) => event.target.select(),
  });
  const parts = [
    facts.class, facts.family && `family ${facts.family}`, facts.params && `${shown(facts.params)} parameters`, facts.weight_dtype,
    facts.primary_weights === "quantized" && "primary weights quantized",
    facts.exec_fwd !== undefined && facts.exec_fwd !== null && `forward number ${facts.exec_fwd + 1}`,
    facts.given && facts.given !== name && `named ${facts.given} by the script`,
  ].filter(Boolean);
  return [
    el("div", { class: "controls" }, el("label", { class: "grow" }, "Layer", picker), options,
      el("span", { class: "steps" }, button("← before", "The layer that ran before it", index - 1), button("next →", "The layer that ran next", index + 1))),
    el("div", {}, el("h1", { class: "layer-name" }, name), el("p", { class: "quiet" }, parts.join(" · ")),
      facts.sections?.length > 0 && el("p", { class: "quiet" }, `Sections of the config: ${facts.sections.join(", ")}`),
      facts.refused && el("p", {}, `Not observed: ${facts.refused}`)),
  ];
}

// A histogram over time.
function histogramCard(report, histogram) {
  const title = `Exponents of ${histogram.tensor}`;
  const node = plotNode(360, `${title} over steps`);
  const from = (bin) => histogram.lowest + bin - 127;
  const read = async () => {
    const [counts, begins, ends] = await Promise.all(histogram.arrays.map((each) => report.arrays.get(each)));
    const width = histogram.arrays[0].shape[1];
    return { begins, ends, rows: Array.from(begins, (_, column) => counts.subarray(column * width, (column + 1) * width)), width };
  };
  const made = card(title, {
    extra: [badge(true, "counts are exact"), csvButton(`${histogram.statistic} ${histogram.tensor}`, ["first step", "last step", "from 2^", "count"], async () => {
      const { begins, ends, rows } = await read();
      return rows.flatMap((row, column) => Array.from(row).flatMap((count, bin) => count ? [[begins[column], ends[column], from(bin), count]] : []));
    })],
  }, node);

  async function render() {
    const { begins, ends, rows, width } = await read();
    const totals = rows.map((row) => row.reduce((sum, count) => sum + count, 0));
    const z = Array.from({ length: width }, (_, bin) => rows.map((row, column) => row[bin] ? Math.log10((100 * row[bin]) / totals[column]) : null));
    await draw(node, [{
      type: "heatmap", x: edges(begins, ends), y: Array.from({ length: width + 1 }, (_, bin) => from(bin)), z,
      colorscale: stops(isDark() ? CIVIDIS : [...CIVIDIS].reverse()), zmin: -4, zmax: 2, hoverinfo: "none", hoverongaps: false, name: "",
      colorbar: { title: { text: "share", side: "top", font: { size: 11 } }, thickness: 12, outlinewidth: 0, tickvals: [-4, -2, 0, 2], ticktext: ["≤ 0.0001 %", "0.01 %", "1 %", "100 %"], tickfont: { size: 11 }, xpad: 8 },
    }], {
      margin: { l: 64, r: 86, t: 28, b: 44 }, xaxis: stepAxis(report, Array.from(ends)),
      yaxis: { title: { text: "magnitude" }, range: [from(0) - 1, from(width) + 1], tickprefix: "2<sup>", ticksuffix: "</sup>", tickformat: "~g" },
    });
    listen(node, { hovered: ([point], event) => {
      const [bin, column] = point.pointIndex, begin = begins[column], end = ends[column];
      tip.show(event, el("b", {}, `${shown((100 * rows[column][bin]) / totals[column], 3)} % (${shown(rows[column][bin])})`),
        el("span", {}, "from ", power(from(bin)), " to below ", power(from(bin + 1))),
        el("span", { class: "dim" }, `step ${shown(begin)}${begin === end ? "" : ` to ${shown(end)}`}`));
    } });
  }
  return [made, render];
}

// Curves of some families of the layer in one plot.
function curvesCard(report, index, title, families, { about = "", name = (family) => family.tensor, log = null } = {}) {
  const node = plotNode(230, `${title} over steps`);
  const ready = Promise.all(families.map(async (family, place) => {
    const row = family.rowOf.get(index), rank = family.rankFor(state.now.rank);
    return { family, curve: await family.anyCurve(row, rank), place };
  }));
  const holder = el("span", {});
  const made = card(title, {
    about,
    extra: [holder, csvButton(`${title} ${report.layers[index].name}`, ["tensor", "statistic", "step", "value", "exact"], async () =>
      (await ready).flatMap(({ family, curve }) => Array.from(curve.values, (value, at) => [family.tensor, family.statistic, curve.steps[at], value, curve.exact]).filter(([, , , value]) => value !== undefined)))],
  }, node);
  async function render() {
    const all = await ready, exact = all.every(({ curve }) => curve.exact);
    holder.replaceChildren(badge(exact, exact ? "exact" : "from the overview"));
    const curves = all.map(({ curve }) => curve), unit = families[0].unit;
    const marked = state.now.step !== "";
    const isLog = log ?? wantsLog(curves);
    await draw(node, all.flatMap(({ family, curve, place }) => {
      const colour = colourOf(log === null ? family.tensor : "", place);
      return [line(name(family), curve, colour, { unit: unit === "%" || unit === "dB" ? unit : "" }), ...notFinite(name(family), curve, colour)];
    }), {
      hovermode: "x unified", margin: { l: 62, r: 12, t: 26, b: 40 }, showlegend: true,
      xaxis: stepAxis(report, curves.flatMap(({ steps }) => Array.from(steps))), yaxis2: MARKS_AXIS,
      yaxis: valueAxis(curves, isLog),
      shapes: marked ? [{ type: "line", x0: Number(state.now.step), x1: Number(state.now.step), yref: "paper", y0: 0, y1: 1, line: { color: isDark() ? "#aaa" : "#666", width: 1, dash: "dot" } }] : [],
    });
  }
  return [made, render];
}

async function layerPage(report) {
  const withNumbers = new Set(report.families.flatMap((family) => Array.from(family.layers)));
  const named = report.layers.findIndex((layer) => layer.name === state.now.layer);
  const found = report.verdict.findings.find((finding) => finding.places.length)?.places[0];
  const worst = found ?? report.worst_layers.find((listed) => listed.items.length)?.items[0].layer;
  const index = named >= 0 ? named : worst ?? [...withNumbers][0] ?? 0;
  if (!report.layers.length) return nothingPage("Layer", "The run has no layers.");
  const layer = report.layers[index];
  const own = report.families.filter((family) => family.rowOf.has(index));
  const ranks = [...new Set(own.flatMap((family) => family.ranks))].sort((a, b) => a - b);
  const renders = [];
  const add = ([node, render]) => { renders.push([node, render]); return node; };

  // One of each tensor: of the chosen rank where the page has it, else of the first rank.
  const ofLayer = report.histograms.filter((histogram) => histogram.layer === index).sort((a, b) => a.rank - b.rank);
  const alike = (one) => (other) => one.tensor === other.tensor && one.statistic === other.statistic;
  const isChosen = (histogram) => state.now.rank !== "" && String(histogram.rank) === state.now.rank;
  const carried = ofLayer.filter((histogram) => histogram.arrays).sort((a, b) => isChosen(b) - isChosen(a));
  const firstOfTensor = (all) => all.filter((one, at) => all.findIndex(alike(one)) === at);
  const histograms = firstOfTensor(carried).sort((a, b) => ofLayer.findIndex(alike(a)) - ofLayer.findIndex(alike(b)));
  const missing = firstOfTensor(ofLayer).filter((one) => !carried.some(alike(one)));
  const isScale = (family) => /^scale_inv|^cur_amax$/.test(family.base ?? "");
  const byTensor = [...new Set(own.filter(isScale).map((family) => family.tensor))];
  const others = new Map();
  for (const family of own.filter((each) => !isScale(each))) {
    const title = family.statistic + (family.gemm ? ` (${family.gemm})` : "");
    others.set(title, [...(others.get(title) ?? []), family]);
  }
  const first = (title) => title === state.now.statistic ? 0 : 1;
  const page = [
    ...layerHead(report, index),
    ranks.length > 1 && el("div", { class: "controls" }, rankChoice(ranks, (rank) => state.go({ rank }))),
    layer.gemms.length > 0
      ? card("Matrix products", { extra: [csvButton(`products ${layer.name}`, ["gemm", "backward", "precision", "operands", "why", "n", "m", "k", "batch", "calls", "macs"],
          () => layer.gemms.map((gemm) => [gemm.gemm, gemm.backward, gemm.precision, JSON.stringify(gemm.operands), gemm.why, gemm.n, gemm.m, gemm.k, gemm.batch, gemm.calls, gemm.macs]))] }, gemmTable(layer.gemms))
      : card("Matrix products", {}, el("p", { class: "quiet" }, "The precision of this layer's products was not recorded.")),
    histograms.length > 0 && el("div", {}, el("h2", {}, "Magnitudes"), el("p", { class: "quiet" }, "Elements by magnitude, summed over the steps of a column.")),
    histograms.length > 0 && el("div", { class: "magnitudes" }, histograms.map((histogram) => add(histogramCard(report, histogram)))),
    missing.length > 0 && el("p", { class: "quiet" }, `Not in this file, to limit its size: ${missing.map((each) => `${each.statistic} of ${each.tensor}`).join(", ")}.`),
    byTensor.length > 0 && el("h2", {}, "Scales and amax"),
    byTensor.length > 0 && el("div", { class: "three" }, byTensor.map((tensor) => add(curvesCard(report, index, tensor, own.filter((family) => isScale(family) && family.tensor === tensor), { name: (family) => family.statistic, log: true })))),
    others.size > 0 && el("h2", {}, "Statistics"),
    others.size > 0 && el("div", { class: "three" }, [...others].sort((a, b) => first(a[0]) - first(b[0])).map(([title, families]) =>
      add(curvesCard(report, index, title, families, { about: families[0].unit && !["%", "dB"].includes(families[0].unit) ? families[0].unit : "" })))),
    own.length === 0 && card("Statistics", {}, el("p", { class: "quiet" }, "The run has no statistics of this layer.")),
  ];
  return [page, async () => {
    for (const [node, render] of renders) whenNear(node, render);
  }];
}

// Draw when it comes near the window: a layer may have very many plots.
function whenNear(node, render) {
  const watch = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    if (node.isConnected) guarded(render);
  }, { rootMargin: "600px" });
  watch.observe(node);
}
