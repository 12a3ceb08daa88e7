// The page of a search: cost against quality, the effects of layers, the confirmation.

const digits = (value, count = 3) => Number(value).toPrecision(count);

function frontierCard(report) {
  const { frontier, effect, all_low: low } = report;
  const inTime = report.extra_ms !== null;
  const cost = (point) => inTime ? point.extra_ms : 100 * (1 - point.low_share);
  const unit = inTime ? "ms" : "%";
  const node = plotNode(360, "Cost against quality");
  const columns = ["also in high precision", "#low share in %", "#ms over all-low", "#expected error"];
  const rows = frontier.map((point) => [point.kept || "nothing", digits(100 * point.low_share), inTime ? digits(point.extra_ms) : "", digits(point.expected_error)]);
  const made = card("Cost against quality", {
    about: "Groups in the order in which they are kept in high precision. The line adds up effects of single groups; the crosses are measured.",
    extra: [csvButton("frontier", columns, () => rows)],
  }, node, el("details", {}, el("summary", {}, "Table"), table(columns, rows, { tall: true })));
  const measured = (name, x, y, colour) => ({
    type: "scatter", mode: "markers", name, x: [x], y: [y], marker: { symbol: "x", size: 11, color: colour },
    hovertemplate: `%{x:.3g} ${unit}, error %{y:.3g}<extra>${name}, measured</extra>`,
  });
  async function render() {
    const costs = frontier.map(cost), errors = frontier.map((point) => point.expected_error);
    const text = frontier.map((point) => plotText(point.kept ? `+ ${shortened(point.kept, 48)}` : "all-low"));
    await draw(node, [
      line("expected", { steps: costs, values: errors }, colourOf("activation", 0), { extra: { text, mode: "lines+markers", hovertemplate: `%{text}<br>%{x:.3g} ${unit}, error %{y:.3g}<extra></extra>` } }),
      measured("all-low", 0, low.error, "#d55e00"),
      measured("choice", cost(report), effect.error, "#009e73"),
    ], {
      margin: { l: 64, r: 16, t: 8, b: 48 },
      xaxis: { title: { text: inTime ? "planned ms of a step over all-low" : "% of multiply-adds in high precision" } },
      yaxis: { title: { text: "gradient error" }, ...linearAxis([{ values: [...errors, low.error, effect.error] }]) },
    });
  }
  return [made, render];
}

async function searchPage(report) {
  const [frontier, render] = frontierCard(report);
  const { effect, all_low: low } = report;
  const tiles = [
    ["Recipe", report.recipe], ["Low precision", `${digits(100 * report.low_share)} %`],
    report.extra_ms !== null && ["Planned, over all-low", `${digits(report.extra_ms)} ms`],
    ["Gradient cosine", [digits(effect.cosine, 6), " ", el("small", {}, `all-low: ${digits(low.cosine, 6)}`)]],
    ["Choice against the tolerance", report.confirmation?.choice.decision ?? "not confirmed"],
  ].filter(Boolean);
  const columns = ["level", "where", "#gradient error", "#cosine", "#loss"];
  const rows = report.measured.map((entry) => [entry.level, entry.name, digits(entry.effect.error), digits(entry.effect.cosine, 6), digits(entry.effect.loss, 6)]);
  const high = Object.entries(report.high);
  return [[
    el("h1", {}, report.name), notes(report, "Limits"),
    el("dl", { class: "tiles" }, tiles.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    frontier,
    el("div", { class: "two" },
      card("Choice", { about: "In high precision; all else is in low precision." },
        high.length ? table(["layer", "GEMMs"], high.map(([name, gemms]) => [el("span", { class: "mono" }, name), gemms.join(", ")]), { tall: true }) : el("p", {}, "Everything in low precision.")),
      card("Confirmation", {}, report.confirmed.length ? report.confirmed.map((text) => el("p", {}, text)) : el("p", { class: "quiet" }, "None: short trainings need an optimizer and seeds."))),
    card("Effect of low precision, alone in a layer", { extra: [csvButton("effects", columns, () => rows)] }, table(columns, rows, { tall: true })),
  ], render];
}

guarded(() => openPage({
  shownPages: { summary: ["Search", searchPage] },
  defaults: { page: "summary" },
  prepared: (content) => ({ ...content, families: [], layers: [] }),
  named: ({ path }) => ["Precision search", path],
  foot: () => "",
}));
