// The verdict, what ran, how it went, and the worst of each statistic that has a direction.

const seconds = (value) => {
  if (value === undefined || value === null) return "–";
  if (value < 1) return `${shown(value * 1000, 3)} ms`;
  if (value < 120) return `${shown(value, 3)} s`;
  if (value < 7200) return `${shown(value / 60, 3)} min`;
  return `${shown(value / 3600, 3)} h`;
};

function tiles(report) {
  const { duration, segments, source } = report.run, last = segments.at(-1);
  const facts = last?.facts ?? {};
  const shownFacts = [
    ["Status", last?.status ?? "unknown", segments.length > 1 ? `${segments.length} process starts` : ""],
    ["Steps recorded", duration.steps ? shown(duration.steps) : "–", stepsRecorded(report)],
    ["Step time", seconds(duration.median_step_seconds), duration.median_step_seconds ? "median" : ""],
    ["Layers", shown(report.layers.length), `${report.families.length} statistics`],
    ["Ranks", shown(last?.world ?? 1), ""],
    ["Written by", facts.integration || source, facts.gpu ? String(facts.gpu) : ""],
  ];
  return el("dl", { class: "tiles" }, shownFacts.map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", more && el("small", {}, more)))));
}

// The first and the last step, also as the trainer counts them.
function stepsRecorded({ run: { duration: { steps, first, last, trainer } } }) {
  const own = !trainer || (trainer.first === first && trainer.last === last) ? ""
    : `, the trainer's ${shown(trainer.first)} to ${shown(trainer.last)}`;
  return steps ? `${shown(first)} to ${shown(last)}${own}` : "";
}

// The multiply-adds of a step by precision and pass: {precision, backward, macs}.
function coverageOf(report) {
  const sums = new Map();
  for (const { precision, backward, macs } of report.layers.flatMap((layer) => layer.gemms)) {
    if (!macs) continue;
    const key = `${precision ?? ""} ${backward ?? false}`;
    if (!sums.has(key)) sums.set(key, { precision: precision ?? "", backward: backward ?? false, macs: 0 });
    sums.get(key).macs += macs;
  }
  return [...sums.values()].sort((a, b) => a.precision.localeCompare(b.precision) || a.backward - b.backward);
}

const PASSES = [["backward", true], ["forward", false], ["all", null]];

function coverageCard(report) {
  const rows = coverageOf(report);
  const total = (pass) => rows.filter((row) => pass === null || row.backward === pass).reduce((sum, row) => sum + row.macs, 0);
  if (!rows.length) {
    return [card("Coverage", {}, el("p", { class: "quiet" },
      "The precision of the matrix products is unknown: te-precision-callbacks did not record the run, or no step was completed.")), () => {}];
  }
  const precisions = [...new Set(rows.map((row) => row.precision))]
    .sort((a, b) => rank(a) - rank(b));
  function rank(name) {
    const place = Object.keys(PRECISIONS).indexOf(name);
    return place < 0 ? 99 : place;
  }
  const share = (precision, pass) => {
    const own = rows.filter((row) => row.precision === precision && (pass === null || row.backward === pass));
    return total(pass) ? own.reduce((sum, row) => sum + row.macs, 0) / total(pass) : 0;
  };
  const node = plotNode(190, "Multiply-adds by precision, in the forward and the backward");
  const made = card("Coverage", {
    about: "Multiply-adds of a step by precision, at the end of the run.",
    extra: [csvButton("coverage", ["precision", "backward", "macs"], () => rows.map((row) => [row.precision, row.backward, row.macs]))],
  }, node, report.run.other_steps.map((line) => el("p", {}, `${line}.`)), reasons(report));
  const render = () => draw(node, precisions.map((precision) => ({
    type: "bar", orientation: "h", name: plotText(precision ? precision.toUpperCase() : "look-ups"),
    y: PASSES.map(([name]) => name), x: PASSES.map(([, pass]) => 100 * share(precision, pass)),
    text: PASSES.map(([, pass]) => share(precision, pass) > 0.06 ? `${shown(100 * share(precision, pass), 3)} %` : ""),
    textposition: "inside", insidetextanchor: "middle", textangle: 0,
    insidetextfont: { color: precision === "fp16" || precision === "bf16" || precision === "mxfp8" || precision === "nvfp4" ? "#111" : "#fff" },
    marker: { color: PRECISIONS[precision] ?? "#888" },
    hovertemplate: `%{x:.2f} % of %{y}<extra>${plotText(precision.toUpperCase())}</extra>`,
  })), {
    showlegend: true, barmode: "stack", bargap: 0.28, margin: { l: 70, r: 28, t: 6, b: 36 },
    xaxis: { range: [0, 100], dtick: 20, ticksuffix: " %", fixedrange: true }, yaxis: { fixedrange: true, ticks: "" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
  });
  return [made, render];
}

// Why the rest is not in low precision, the largest part first.
function reasons(report) {
  const found = new Map();
  let total = 0;
  for (const layer of report.layers)
    for (const gemm of layer.gemms) {
      if (!gemm.macs) continue;
      total += gemm.macs;
      if (!gemm.why) continue;
      const known = found.get(gemm.why) ?? { macs: 0, layers: new Set() };
      known.macs += gemm.macs;
      known.layers.add(layer.name);
      found.set(gemm.why, known);
    }
  const rows = [...found].sort((a, b) => b[1].macs - a[1].macs);
  const most = 5, left = rows.slice(most);
  return rows.length > 0 && table(["reason for high precision", "#layers", "#multiply-adds"], [
    ...rows.slice(0, most).map(([why, { macs, layers }]) => [why, shown(layers.size), `${shown((100 * macs) / total, 3)} %`]),
    ...(left.length ? [[`${left.length} more reasons`, "", `${shown((100 * left.reduce((sum, [, { macs }]) => sum + macs, 0)) / total, 3)} %`]] : []),
  ]);
}

function lossCard(report) {
  const all = report.scalars;
  if (!all.length) {
    return [card("Loss", {}, el("p", { class: "quiet" }, "The run has no trainer metrics, such as the loss.")), () => {}];
  }
  const chosen = () => all.find((one) => one.name === state.now.scalar) ?? all[0];
  const node = plotNode(260, "Trainer metrics over steps");
  const picker = all.length > 1 && choice("Metric", all.map((one) => [one.name, shortened(one.name, 40)]), chosen().name, (name) => {
    state.note({ scalar: name });
    render();
  });
  const curve = async (one) => {
    const [steps, values] = await unpackedCurve(report, one.arrays);
    return { steps, values, exact: true };
  };
  const heading = el("h2", {}, chosen().name);
  const since = [...new Set(report.verdict.findings.filter((found) => found.severity !== "note").map((found) => found.since).filter((step) => step !== null))];
  const made = el("section", { class: "card" }, el("div", { class: "head" }, heading, el("span", { class: "space" }),
    csvButton("scalars", ["name", "step", "value"], async () => {
      const rows = [];
      for (const one of all) {
        const { steps, values } = await curve(one);
        values.forEach((value, at) => rows.push([one.name, steps[at], value]));
      }
      return rows;
    })), picker && el("div", { class: "controls" }, picker), node,
    since.length > 0 && el("p", { class: "quiet" }, "Dotted: the first steps of findings."));
  async function render() {
    const one = chosen(), own = await curve(one);
    heading.textContent = one.name;
    const colour = colourOf("activation", 0);
    await draw(node, [line(one.name, own, colour), ...notFinite(one.name, own, colour)], {
      showlegend: false, hovermode: "x unified", margin: { l: 64, r: 16, t: 8, b: 40 },
      xaxis: stepAxis(report, own.steps), yaxis: valueAxis([own]), yaxis2: MARKS_AXIS,
      shapes: since.map((step) => ({ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: NOT_FINITE, width: 1, dash: "dot" } })),
    });
  }
  return [made, render];
}

function worstCard(report, { family: index, items }) {
  const family = report.families[index];
  const where = { statistic: family.statistic, tensor: family.tensor };
  const [worst] = items;
  const value = (item) => withUnit(item.value, family.unit);
  const rank = (item) => item.rank === REDUCED ? {} : { rank: item.rank };
  return el("section", { class: "card worst" },
    el("div", { class: "head" },
      el("h3", {}, link({ page: "heatmap", ...where, layer: "", step: "" }, family.label)), el("span", { class: "space" }),
      csvButton(`worst ${family.label}`, ["layer", "value", "step", "rank"], async () => {
        const rows = [];
        for (const rank of family.ranks) {
          const { values, at } = await family.worstOf(rank);
          family.layers.forEach((layer, row) => at[row] >= 0 &&
            rows.push([report.layers[layer].name, values[row], at[row], rank === REDUCED ? "" : rank]));
        }
        return rows.sort((a, b) => badness(b[1], family.worse) - badness(a[1], family.worse));
      })),
    el("p", {}, "Worst in ", layerLink(report, worst.layer, { ...where, step: worst.at, ...rank(worst) }), ": ",
      el("span", { class: "value" }, value(worst)), ` at step ${stepText(report, worst.at)}`,
      worst.rank === REDUCED ? "" : ` on rank ${worst.rank}`, "."),
    items.length > 1 && table(["then", "#worst value", "#step"], items.slice(1).map((item) => [
      layerLink(report, item.layer, { ...where, step: item.at, ...rank(item) }),
      value(item), link({ page: "heatmap", ...where, step: item.at, layer: "" }, shown(item.at)),
    ])));
}

function worstPart(report) {
  const found = report.worst_layers.filter((listed) => listed.items.length);
  const empty = (counted) => report.worst_layers.filter((listed) => !listed.items.length && listed.counted === counted).map((listed) => report.families[listed.family].label);
  const clean = empty(true), unchecked = empty(false);
  if (!report.worst_layers.length) {
    return [card("Worst layers", {}, el("p", { class: "quiet" }, report.families.length
      ? "The run has only statistics without a worse direction, such as amax, std, norms and scales."
      : "The run has no statistics of layers: the config collects none, or no collection step has run."))];
  }
  return [
    el("div", {}, el("h2", {}, "Worst layers"),
      el("p", { class: "quiet" }, "The five worst layers for each statistic, over the whole run. SQNR and squared error do not show elements lost next to an outlier: also check underflows and overflows.")),
    el("div", { class: "two" }, found.map((listed) => worstCard(report, listed))),
    clean.length > 0 && el("p", { class: "quiet clean" }, `No issues in any layer or step: ${clean.join(", ")}.`),
    unchecked.length > 0 && el("p", { class: "quiet" }, `Only values from the first step of delayed scaling, which has no scale yet: ${unchecked.join(", ")}.`),
  ];
}

async function summaryPage(report) {
  const [coverage, drawCoverage] = coverageCard(report);
  const [loss, drawLoss] = lossCard(report);
  const page = [
    verdictPart(report),
    el("div", {}, el("h1", {}, report.name), el("p", { class: "quiet" }, [report.run.id && `Run ${report.run.id}`, report.run.path].filter(Boolean).join(", "))),
    notes(report), tiles(report),
    el("div", { class: "two" }, coverage, loss), ...worstPart(report),
  ];
  return [page, async () => Promise.all([drawCoverage(), drawLoss()])];
}
