// Layer by step, for a statistic of a tensor: rows in the order of execution, folded by block or by alike names.

const TALLEST = 760, ROW_HEIGHT = 17, WIDEST_LABELS = 330;
const LABEL_FONT = { size: 11, family: "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace" };

// The room in front of a plot that its rows' labels need.
const labelsWidth = (labels) => Math.min(WIDEST_LABELS, Math.max(60, 6.7 * Math.max(0, ...labels.map((label) => label.length)) + 14));

// The selects for statistic, tensor and rank that several pages share.
function familyControls(report, family, change) {
  const tensors = [...new Set(report.families.filter((one) => one.statistic === family.statistic).map((one) => one.tensor))];
  const statistics = [...new Set(report.families.map((one) => one.statistic))];
  const ranks = [...new Set(report.families.flatMap((one) => one.ranks))].sort((a, b) => a - b);
  return [
    choice("Statistic", statistics.map((name) => [name, name]), family.statistic, (statistic) => change({ statistic })),
    choice("Tensor", tensors.map((name) => [name, name]), family.tensor, (tensor) => change({ tensor })),
    ranks.length > 1 && rankChoice(ranks, change),
  ];
}

const rankChoice = (ranks, change) => choice("Rank",
  ranks.map((rank) => [rank, rank === REDUCED ? "over all ranks" : `rank ${rank}`]),
  state.now.rank === "" ? ranks[0] : state.now.rank, (rank) => change({ rank }));

// The family that the address names, else that of the first finding, else the first one with worst layers.
function chosenFamily(report) {
  const { statistic, tensor } = state.now;
  const fits = (one) => (!statistic || one.statistic === statistic) && (!tensor || one.tensor === tensor);
  const found = report.verdict?.findings.map((finding) => familyOf(report, finding)).find(Boolean);
  const first = report.worst_layers.find((listed) => listed.items.length) ?? report.worst_layers[0];
  const preferred = found ?? (first && report.families[first.family]);
  return (preferred && fits(preferred) ? preferred : null) ?? report.families.find(fits)
    ?? report.families.find((one) => one.statistic === statistic) ?? preferred ?? report.families[0];
}

const alike = (name) => name.replace(/(?<!\d)(?<!fc)(?:0|[1-9]\d*)(?!\d)/g, "{n}");

// The repeated part of the model that contains a layer, such as layers.3; empty without one.
const blockOf = (name) => name.match(/^(.*?(?:^|\.)\d+)(?=\.)/)?.[1] ?? "";

// The rows of the plot: {label, members, kind, key}; members are rows of the family.
function plotRows(report, family, fold, opened, filter) {
  const layers = Array.from(family.layers, (layer) => report.layers[layer]);
  const wanted = filter.toLowerCase();
  const kept = layers.map((layer, row) => ({ layer, row })).filter(({ layer }) => layer.name.toLowerCase().includes(wanted));
  const single = ({ layer, row }, indent = "") => ({ label: indent + layer.short, members: [row], kind: "layer" });
  if (fold === "layers") return kept.map((each) => single(each));
  const key = fold === "blocks" ? ({ layer }) => blockOf(layer.name) : ({ layer }) => alike(layer.name);
  const groups = new Map();
  for (const each of kept) {
    const name = key(each) || each.layer.name;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(each);
  }
  return [...groups].flatMap(([name, members]) => {
    if (members.length === 1) return [single(members[0])];
    const [{ layer }] = members, short = fold === "blocks" ? shortened(blockOf(layer.name)) : alike(layer.short);
    const group = { label: `${short} (${members.length})`, key: name, members: members.map(({ row }) => row), kind: "group" };
    return opened.has(name) ? [{ ...group, label: `▾ ${group.label}` }, ...members.map((each) => single(each, "   "))]
      : [{ ...group, label: `▸ ${group.label}` }];
  });
}

// The cells of rows: of several members the worst number.
function worstCells(rows, cells, width, worse) {
  return rows.map(({ members }) => {
    const found = cells.slice(members[0] * width, (members[0] + 1) * width);
    for (const member of members.slice(1))
      for (let column = 0; column < width; column++) {
        const value = cells[member * width + column];
        if (value !== null && (found[column] === null || badness(value, worse) > badness(found[column], worse))) found[column] = value;
      }
    return found;
  });
}

const OUTSIDE = 0.05; // the part of the colours beyond the scale, for what is not finite

const MEANS = { high: "Bright is worse.", low: "Bright is worse: lower.", "": "Bright is larger." };

// The place of a number on the colours, from 0 to 1; null for no number. Harmless infinities lie at the good end.
function colourPlace(family, scale) {
  return (value) => {
    if (value === null) return null;
    if (Number.isFinite(value)) return scale.level(value);
    if (value === Infinity && family.worse === "low") return 1;
    if (value === -Infinity && family.worse === "high") return 0;
    return 1 + OUTSIDE;
  };
}

function colourScale(family, scale, anyOutside) {
  const end = anyOutside ? 1 / (1 + OUTSIDE) : 1;
  const colours = scale.centred ? DIVERGING[isDark() ? "dark" : "light"] : family.worse === "low" ? [...VIRIDIS].reverse() : VIRIDIS;
  return anyOutside ? [...stops(colours, 0, end), [end + 1e-6, NOT_FINITE], [1, NOT_FINITE]] : stops(colours);
}

function colourLegend(family, scale, anyOutside) {
  const ticks = scale.ticks();
  const places = ticks.map((value) => scale.level(value));
  const texts = ticks.map((value) => shown(value, 3));
  if (anyOutside) {
    places.push(1 + OUTSIDE / 2);
    texts.push("nan, inf");
  }
  return {
    title: { text: plotText(family.unit || ""), side: "top", font: { size: 11 } }, thickness: 12, outlinewidth: 0, ticks: "outside", ticklen: 4,
    tickvals: places, ticktext: texts, len: 1, lenmode: "fraction", y: 0.5, xpad: 8, tickfont: { size: 11 },
  };
}

// Where columns begin and end on the axis of steps.
const edges = (begins, ends) => begins.length === 0 ? [] :
  [begins[0] - 0.5, ...Array.from(begins.slice(1), (begin, at) => (ends[at] + begin) / 2), ends.at(-1) + 0.5];

async function byRank(report, family) {
  const ranks = family.ranks, height = family.layers.length;
  const cells = new Array(height * ranks.length).fill(null);
  const exact = [];
  for (const [column, rank] of ranks.entries()) {
    const { values, at } = await family.worstOf(rank);
    exact.push({ values, at });
    for (let row = 0; row < height; row++)
      if (at[row] >= 0) cells[row * ranks.length + column] = values[row];
  }
  return { cells, exact };
}

async function heatmapPage(report) {
  const family = chosenFamily(report);
  if (!family) return nothingPage("Heatmap", "The run has no statistics of layers, so there is nothing to draw.");
  const folds = [["layers", "Layers"], ["blocks", "Blocks"], ["alike", "Alike names"]];
  const usual = family.layers.length > 120 ? "blocks" : "layers";
  const fold = () => folds.some(([name]) => name === state.now.fold) ? state.now.fold : usual;
  const opened = new Set(state.now.open ? state.now.open.split("\n") : []);
  const ranksShown = family.several && state.now.axis === "ranks";
  const rank = family.rankFor(state.now.rank);
  const { cells, exact } = ranksShown ? await byRank(report, family) : { cells: await family.cellsOf(rank), exact: null };
  const columns = ranksShown ? family.ranks.length : family.begins.length;
  const scale = await family.scale();
  const place = colourPlace(family, scale);
  const outside = cells.some((value) => place(value) > 1);
  const node = plotNode(300, `Heatmap of ${family.label}`);
  const count = el("span", { class: "quiet" });
  let rows = [], pool = 0, visible = [0, 0], shownRows = [];

  const findings = (report.verdict?.findings ?? []).filter((finding) => familyOf(report, finding) === family);
  const placesFound = new Set(findings.flatMap((finding) => finding.places));
  const isFound = (row) => row.members.some((member) => placesFound.has(family.layers[member]));

  const change = (changes) => state.go(changes);
  const search = el("input", {
    type: "search", placeholder: "part of a name", value: state.now.filter, "aria-label": "Layer name contains",
    oninput: (event) => { state.note({ filter: event.target.value }); render(); },
  });
  const controls = el("div", { class: "controls" },
    familyControls(report, family, change),
    family.several && buttons("Columns", [["steps", "Steps"], ["ranks", "Ranks"]], ranksShown ? "ranks" : "steps",
      (axis) => change({ axis })),
    buttons("Rows", folds, fold(), (name) => change({ fold: name, open: "" })),
    el("label", { class: "grow" }, "Layer name contains", search));
  const word = extreme(family.worse);
  const exactAll = Object.keys(family.curves).length >= family.seriesOf.size;
  const { widest } = family;
  const how = ranksShown ? [true, `exact: the ${word} of the run`]
    : [exactAll && widest === 1, exactAll && widest === 1 ? "all values are exact" : widest === 1 ? "overview: a cell is a step" : `overview: a cell is the ${word} of up to ${widest} steps`];
  const page = card(family.label, {
    about: `${family.formula ? `${family.formula.replaceAll("`", "")}. ` : ""}${MEANS[family.worse] ?? MEANS[""]} Click a layer to open it${fold() === "layers" ? "" : ", a folded row to unfold it"}; drag to zoom, double-click to go back.`,
    extra: [count, badge(...how), csvButton(`heatmap ${family.label}`,
      ranksShown ? ["layer", "rank", "value", "step"] : ["layer", "first step", "last step", "value", "exact"], csvRows)],
  }, node);

  async function csvRows() {
    const found = [];
    for (let row = 0; row < family.layers.length; row++) {
      const name = report.layers[family.layers[row]].name;
      for (let column = 0; column < columns; column++) {
        if (cells[row * columns + column] === null) continue;
        if (ranksShown) found.push([name, family.ranks[column], exact[column].values[row], exact[column].at[row]]);
        else {
          const cell = await family.cell(row, rank, column);
          found.push([name, family.begins[column], family.ends[column], cell.value, cell.exact]);
        }
      }
    }
    return found;
  }

  // Rows that no pixel is left for are drawn together, each cell the worst; zooming takes them apart.
  function pooled(size) {
    if (size === 1) return rows;
    const found = [];
    for (let at = 0; at < rows.length; at += size) {
      const together = rows.slice(at, at + size);
      found.push({ label: together[0].label, members: together.flatMap((row) => row.members), kind: "pool" });
    }
    return found;
  }

  const height = () => Math.min(TALLEST, Math.max(120, rows.length * ROW_HEIGHT)) + 52;
  const poolFor = ([low, high]) => Math.max(1, Math.ceil((high - low) / ((height() - 52) / 2)));

  function traces() {
    shownRows = pooled(pool);
    return [{
      type: "heatmap", x: ranksShown ? family.ranks.map((_, at) => at) : edges(family.begins, family.ends),
      y: Array.from({ length: shownRows.length + 1 }, (_, at) => Math.min(at * pool, rows.length) - 0.5),
      z: worstCells(shownRows, cells, columns, family.worse).map((row) => row.map(place)),
      zmin: 0, zmax: outside ? 1 + OUTSIDE : 1, colorscale: colourScale(family, scale, outside), colorbar: colourLegend(family, scale, outside),
      hoverinfo: "none", hoverongaps: false, zsmooth: false,
    }];
  }

  function labels([low, high]) {
    const from = Math.max(0, Math.ceil(low)), to = Math.min(rows.length - 1, Math.floor(high));
    const most = (height() - 52) / 14, every = Math.max(1, Math.ceil((to - from + 1) / most));
    const places = [];
    for (let at = from; at <= to; at += every) places.push(at);
    return { tickvals: places, ticktext: places.map((at) => plotText(`${isFound(rows[at]) ? "● " : ""}${rows[at].label}`)) };
  }

  async function render() {
    rows = plotRows(report, family, fold(), opened, search.value);
    count.textContent = `${shown(rows.length)} rows, ${shown(family.layers.length)} layers`;
    if (!rows.length) {
      count.textContent = "no layer name contains this";
      return;
    }
    const found = rows.map((row, at) => [row, at]).filter(([row]) => isFound(row));
    if (found.length) {
      const named = found.slice(0, 3).map(([row]) => row.label.trim()).join(", "), more = found.length > 3 ? ` and ${found.length - 3} more` : "";
      node.setAttribute("aria-label", `Heatmap of ${family.label}; marked: ${named}${more}, with a finding`);
      count.textContent += `; ● has a finding: ${named}${more}`;
    }
    visible = [-0.5, rows.length - 0.5];
    pool = poolFor(visible);
    node.style.height = `${height()}px`;
    const step = Number(state.now.step), marked = !ranksShown && state.now.step !== "" && columns > 0;
    const edge = getComputedStyle(document.documentElement).getPropertyValue(findings[0]?.severity === "error" ? "--error" : "--warn").trim();
    await draw(node, traces(), {
      height: height(), margin: { l: labelsWidth(rows.map((row) => `${isFound(row) ? "● " : ""}${row.label}`)), r: 70, t: 6, b: 46 },
      xaxis: ranksShown
        ? { title: { text: "rank" }, tickvals: family.ranks.map((_, at) => at), ticktext: family.ranks.map((each) => each === REDUCED ? "all" : String(each)) }
        : stepAxis(report, Array.from(family.ends)),
      yaxis: {
        range: [visible[1], visible[0]], tickmode: "array", ...labels(visible), ticks: "", showgrid: false,
        tickfont: LABEL_FONT,
      },
      shapes: [
        ...(marked ? [{ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, line: { color: isDark() ? "#fff" : "#000", width: 1, dash: "dot" } }] : []),
        ...found.map(([, at]) => ({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: at - 0.5, y1: at + 0.5, line: { color: edge, width: 2 } })),
      ],
    });
    listen(node, { zoomed, clicked, hovered: ([point], event) => hovered(point, event) });
  }

  async function zoomed(event) {
    if (!Object.keys(event).some((name) => name.startsWith("yaxis"))) return;
    const range = node.layout.yaxis.range;
    const now = event["yaxis.autorange"] ? [-0.5, rows.length - 0.5] : [Math.min(...range), Math.max(...range)];
    if (now[0] === visible[0] && now[1] === visible[1]) return;
    visible = now;
    const wanted = poolFor(visible);
    if (wanted !== pool) {
      pool = wanted;
      const [{ y, z }] = traces();
      await Plotly.restyle(node, { y: [y], z: [z] });
    }
    const { tickvals, ticktext } = labels(visible);
    await Plotly.relayout(node, { "yaxis.tickvals": tickvals, "yaxis.ticktext": ticktext, "yaxis.range": [visible[1], visible[0]] });
  }

  const cellOf = (point) => ({ row: shownRows[point.pointIndex[0]], column: point.pointIndex[1] });

  function clicked(point) {
    const { row, column } = cellOf(point);
    const step = ranksShown ? {} : { step: family.ends[column] };
    if (row.kind === "layer") {
      change({ page: "layer", layer: report.layers[family.layers[row.members[0]]].name, statistic: family.statistic, tensor: family.tensor, ...step, ...(ranksShown ? { rank: family.ranks[column] } : {}) });
    } else if (row.kind === "group") {
      if (!opened.delete(row.key)) opened.add(row.key);
      state.note({ open: [...opened].join("\n") });
      render();
    }
  }

  async function hovered(point, event) {
    const { row, column } = cellOf(point);
    let worst = null;
    for (const member of row.members) {
      const value = cells[member * columns + column];
      if (value !== null && (!worst || badness(value, family.worse) > badness(worst.value, family.worse))) worst = { value, member };
    }
    if (!worst) return tip.hide();
    const found = ranksShown
      ? { value: exact[column].values[worst.member], exact: true, step: exact[column].at[worst.member] }
      : await family.cell(worst.member, rank, column);
    const begin = ranksShown ? 0 : family.begins[column], end = ranksShown ? 0 : family.ends[column];
    const when = ranksShown ? `rank ${family.ranks[column] === REDUCED ? "all" : family.ranks[column]}, ${word} at step ${stepText(report, found.step)}`
      : begin === end ? `step ${stepText(report, begin)}` : found.exact ? `step ${stepText(report, found.step)}, the ${word} of ${shown(begin)} to ${shown(end)}` : `${word} of steps ${shown(begin)} to ${shown(end)}`;
    tip.show(event, el("b", {}, `${found.exact ? "" : "≈ "}${withUnit(found.value, family.unit)}`),
      el("span", { class: "mono" }, report.layers[family.layers[worst.member]].name),
      el("span", { class: "dim" }, `${when}${row.members.length > 1 ? `; the ${word} of ${row.members.length} layers` : ""}`));
  }

  return [[el("h1", {}, "Heatmap"), controls, page], render];
}

const nothingPage = (title, why) => [[el("h1", {}, title), card("Nothing to show", {}, el("p", { class: "quiet" }, why))], async () => {}];
