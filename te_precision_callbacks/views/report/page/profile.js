// The depth profile: at one step, for all layers, the range of a tensor's magnitudes and what formats hold of it.

async function profilePage(report) {
  const tensors = [...new Set(report.families.map((one) => one.tensor).filter((tensor) => sourcesOf(report, tensor).any))];
  if (!tensors.length)
    return nothingPage("Depth profile", "The profile needs cur_amax, or min and max, of a tensor, which the run does not have.");
  const tensor = tensors.includes(state.now.tensor) ? state.now.tensor : tensors[0];
  const sources = sourcesOf(report, tensor);
  const steps = stepsOf(sources);
  const last = await lastWithMagnitudes(report, sources, steps);
  const place = () => state.now.step === "" ? last : Math.min(steps.length - 1, Math.max(0, lowerBound(steps, Number(state.now.step) + 1) - 1));
  const formats = [["", "none"], ...WINDOWS.map((name) => [name, windowTitle(name)])];
  const format = () => formats.some(([name]) => name === state.now.format) ? state.now.format : "E4M3";
  const node = plotNode(500, `Range of ${tensor} in all layers`);
  const shownStep = el("span", {});
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: place(), "aria-label": "Step" });
  const badgeHolder = el("span", {}), without = el("p", { class: "quiet" });
  let rows = [], shownRows = [], visible = null, pool = 1;
  slider.addEventListener("input", () => { state.note({ step: steps[Number(slider.value)] }); render(); });
  const ranks = [...new Set(sources.families.flatMap((one) => one.ranks))].sort((a, b) => a - b);
  const controls = el("div", { class: "controls" },
    choice("Tensor", tensors.map((name) => [name, name]), tensor, (name) => state.go({ tensor: name })),
    choice("Limits of", formats, format(), (name) => { state.note({ format: name }); render(); }),
    ranks.length > 1 && rankChoice(ranks, (rank) => state.go({ rank })),
    el("label", { class: "grow" }, shownStep, slider));
  const isPoint = !sources.range;
  const page = card(`Range of ${tensor} through the model`, {
    about: isPoint ? `A dot marks the largest magnitude, the only recorded value of ${tensor}. For bars down to the smallest magnitude, add dynamic_range to the config.`
      : "A bar spans the smallest nonzero to the largest magnitude; a tick marks the standard deviation. Layers run from top to bottom.",
    extra: [badgeHolder, csvButton(`profile ${tensor}`, ["layer", "step", "smallest", "std", "largest", "format smallest", "format largest", "exact"],
      () => rows.map((row) => [row.name, row.step, ...[row.low, row.middle, row.high, row.limits?.bottom, row.limits?.top].map((power) => power === undefined || power === null ? null : 2 ** power), row.exact]))],
  }, without, node);

  async function read() {
    const step = steps[place()], chosen = state.now.rank;
    const found = [];
    for (const index of sources.layers) {
      const row = await magnitudes(report, sources, index, step, chosen);
      if (!row) continue;
      const limits = format() ? await windowOf(report, format(), index, tensor, step, row.amax, chosen) : null;
      const outside = limits?.recorded && row.high > limits.top + ROUNDING;
      found.push({ ...row, index, name: report.layers[index].name, short: report.layers[index].short, limits, outside });
    }
    return found;
  }

  function span() {
    const all = rows.flatMap((row) => [row.low, row.high, row.limits?.bottom, row.limits?.top]).filter((each) => Number.isFinite(each));
    const low = Math.min(...all), high = Math.max(...all), air = 0.03 * (high - low) + 0.2;
    return [low - air, high + air];
  }

  const height = () => Math.min(TALLEST, Math.max(160, rows.length * ROW_HEIGHT)) + 76;
  const poolFor = ([low, high]) => Math.max(1, Math.ceil((high - low) / ((height() - 76) / 4)));

  function labels([low, high]) {
    const from = Math.max(0, Math.ceil(low)), to = Math.min(rows.length - 1, Math.floor(high));
    const every = Math.max(1, Math.ceil((to - from + 1) / ((height() - 76) / 14)));
    const places = [];
    for (let at = from; at <= to; at += every) places.push(at);
    return { tickvals: places, ticktext: places.map((at) => plotText(rows[at].short)) };
  }

  async function render() {
    shownStep.textContent = `Step ${stepText(report, steps[place()])}`;
    const now = await read();
    rows = now;
    const drawn = new Set(rows.map(({ index }) => index)), left = sources.layers.filter((index) => !drawn.has(index));
    without.textContent = left.length ? `${rows.length ? "Not drawn: " : "Nothing to draw: "}${shown(left.length)} of ${shown(sources.layers.length)} layers have no finite, nonzero value at this step, such as ${report.layers[left[0]].name}.`
      + (rows.length ? "" : ` The last step with such a value is ${stepText(report, steps[last])}.`) : "";
    node.hidden = !rows.length;
    if (!rows.length) return badgeHolder.replaceChildren();
    visible ??= [-0.5, rows.length - 0.5];
    await drawRows();
  }

  async function drawRows() {
    pool = poolFor(visible);
    shownRows = pool === 1 ? rows.map((row, at) => ({ ...row, at, size: 1 })) : pooledRanges(rows, pool);
    node.style.height = `${height()}px`;
    badgeHolder.replaceChildren(badge(rows.every((row) => row.exact), rows.every((row) => row.exact) ? "exact" : "in part from the overview"));
    const blue = colourOf("activation", 0), orange = isDark() ? "#f0964b" : "#d55e00";
    const y = shownRows.map((row) => row.at + (row.size - 1) / 2);
    const thick = Math.max(1, ((height() - 76) / (visible[1] - visible[0])) * pool);
    const traces = [
      { type: "bar", orientation: "h", y, base: shownRows.map((row) => row.low), x: shownRows.map((row) => row.high - row.low),
        width: shownRows.map((row) => row.size * (pool === 1 ? 0.72 : 1)), marker: { color: shownRows.map((row) => row.outside ? orange : blue), line: { width: 0 } },
        hoverinfo: "none", showlegend: false },
      { type: "scatter", mode: "markers", name: "standard deviation", hoverinfo: "none", y,
        x: shownRows.map((row) => row.middle ?? null), showlegend: rows.some((row) => row.middle !== undefined),
        marker: { symbol: "line-ns", size: Math.max(3, Math.min(11, thick * 0.7)), line: { width: 2, color: isDark() ? "#fff" : "#111" } } },
    ];
    if (isPoint)
      traces.push({ type: "scatter", mode: "markers", name: "largest", hoverinfo: "none", y, x: shownRows.map((row) => row.high), showlegend: false,
        marker: { symbol: "circle", size: Math.max(3, Math.min(9, thick * 0.6)), color: shownRows.map((row) => row.outside ? orange : blue) } });
    if (format()) {
      const sides = [["top", `${windowTitle(format())}: largest`, "solid"], ["bottom", `${windowTitle(format())}: smallest`, "dash"]];
      for (const [side, name, dash] of sides)
        traces.push({
          type: "scatter", mode: "lines", name, hoverinfo: "skip", line: { color: isDark() ? "#cfd8e0" : "#333d47", width: pool > 1 ? 1.2 : 1.6, dash },
          x: shownRows.flatMap((row) => [row.limits?.[side] ?? null, row.limits?.[side] ?? null]),
          y: shownRows.flatMap((row) => [row.at - 0.5, row.at + row.size - 0.5]),
        });
      for (const [name, colour] of [["inside", blue], ["largest is outside", orange]])
        traces.push({ type: "scatter", mode: "markers", x: [null], y: [null], name, marker: { symbol: "square", size: 10, color: colour } });
    }
    await draw(node, traces, {
      height: height(), margin: { l: labelsWidth(rows.map(({ short }) => short)), r: 16, t: 30, b: 46 }, bargap: 0, hovermode: "closest", hoverdistance: 20,
      xaxis: { title: { text: "magnitude" }, range: span(), tickprefix: "2<sup>", ticksuffix: "</sup>", tickformat: "~g" },
      yaxis: { range: [visible[1], visible[0]], tickmode: "array", ...labels(visible), ticks: "", showgrid: false, tickfont: LABEL_FONT },
    });
    listen(node, { zoomed, clicked: ({ y }) => rowAt(y) && state.go({ page: "layer", layer: rowAt(y).name, tensor, step: steps[place()] }), hovered });
  }

  async function zoomed(event) {
    if (!Object.keys(event).some((name) => name.startsWith("yaxis"))) return;
    const range = node.layout.yaxis.range;
    const next = event["yaxis.autorange"] ? [-0.5, rows.length - 0.5] : [Math.min(...range), Math.max(...range)];
    if (next[0] === visible[0] && next[1] === visible[1]) return;
    visible = next;
    if (poolFor(visible) !== pool) return void await drawRows();
    const { tickvals, ticktext } = labels(visible);
    await Plotly.relayout(node, { "yaxis.tickvals": tickvals, "yaxis.ticktext": ticktext, "yaxis.range": [visible[1], visible[0]] });
  }

  function hovered(points, event) {
    const row = rowAt(points[0].y);
    if (!row) return;
    tip.show(event, el("span", { class: "mono" }, row.name), row.size > 1 && `and the next ${row.size - 1} layers`,
      el("b", {}, power(row.low), " to ", power(row.high)),
      row.middle !== undefined && el("span", {}, "standard deviation ", power(row.middle)),
      row.limits && el("span", { class: "dim" }, `${windowTitle(format())}: `, power(row.limits.bottom), " to ", power(row.limits.top),
        `, scale ${row.limits.recorded ? "recorded" : "assumed from the largest value"}`));
  }

  const rowAt = (y) => shownRows.find((row) => y >= row.at - 0.5 && y < row.at + row.size - 0.5);

  return [[el("h1", {}, "Depth profile"), controls, page], render];
}

// Neighbours for which no pixel is left, in one row: the middle one of their ranges and limits, and the extremes of all.
function pooledRanges(rows, size) {
  const found = [];
  for (let at = 0; at < rows.length; at += size) {
    const own = rows.slice(at, at + size), limits = own.map((row) => row.limits).filter(Boolean);
    const middle = (values) => values.filter((each) => each !== undefined && each !== null).sort((a, b) => a - b)[values.length >> 1];
    found.push({
      at, size: own.length, name: own[0].name, short: own[0].short, outside: own.some((row) => row.outside),
      low: middle(own.map((row) => row.low)), high: middle(own.map((row) => row.high)), middle: middle(own.map((row) => row.middle)),
      limits: limits.length ? {
        top: middle(limits.map((each) => each.top)), bottom: middle(limits.map((each) => each.bottom)), recorded: limits.every((each) => each.recorded),
      } : null,
    });
  }
  return found;
}

// The recorded magnitudes of a tensor.
function sourcesOf(report, tensor) {
  const found = magnitudeFamilies(report, tensor);
  const families = Object.values(found).filter(Boolean);
  const any = Boolean(found.amax || (found.max && found.min));
  const layers = new Set([found.amax, found.max && found.min ? found.max : null].flatMap((family) => Array.from(family?.layers ?? [])));
  return { ...found, families, any, layers: [...layers].sort((a, b) => a - b), tensor };
}

const stepsOf = (sources) => Array.from((sources.amax ?? sources.max).ends);

// The place of the last step in which a layer has magnitudes: a run with nan has none from some step on.
async function lastWithMagnitudes(report, sources, steps) {
  const has = async (at) => {
    for (const index of sources.layers) if (await magnitudes(report, sources, index, steps[at], state.now.rank)) return true;
    return false;
  };
  let low = 0, high = steps.length - 1;
  if (await has(high)) return high;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (await has(middle)) low = middle; else high = middle - 1;
  }
  return low;
}

// The magnitudes of a layer at a step as powers of two: {low, middle, high, amax, exact, step}.
async function magnitudes(report, sources, index, step, chosenRank) {
  const read = async (family) => family?.rowOf.has(index) ? family.at(family.rowOf.get(index), family.rankFor(chosenRank), step) : null;
  const amax = await read(sources.amax), max = amax ? null : await read(sources.max), min = amax ? null : await read(sources.min);
  const largest = amax?.value ?? (max && min ? Math.max(Math.abs(max.value), Math.abs(min.value)) : undefined);
  const known = [amax, max, min].filter(Boolean);
  if (!(largest > 0) || !Number.isFinite(largest)) return null;
  const high = Math.log2(largest), range = await read(sources.range), std = await read(sources.std);
  const low = range ? high - range.value : high;
  return {
    low, middle: std?.value > 0 ? Math.log2(std.value) : undefined, high, amax: largest, step,
    exact: [...known, range, std].filter(Boolean).every((each) => each.exact),
  };
}
