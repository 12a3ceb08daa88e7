// Config, versions, environment and events.

// A value in words: of a mapping a line for each name.
function inWords(value) {
  if (value === null || typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.map((each) => each !== null && typeof each === "object" ? JSON.stringify(each) : each).join(", ");
  return Object.entries(value).map(([name, each]) => el("div", { class: "inner" }, el("span", { class: "mono" }, name), ": ", inWords(each)));
}

const mapping = (values) => table(["name", "value"], Object.entries(values).map(([name, value]) =>
  [el("span", { class: "mono" }, name), el("div", { class: "value" }, inWords(value))]));

const SHOWN_APART = ["versions", "environment", "config_text"];

function segmentCard(segment, number) {
  const { facts } = segment;
  const others = Object.fromEntries(Object.entries(facts).filter(([name, value]) => !SHOWN_APART.includes(name) && value !== null && value !== "" && JSON.stringify(value) !== "{}" && JSON.stringify(value) !== "[]"));
  const has = (name) => facts[name] && Object.keys(facts[name]).length > 0;
  return [
    number > 1 && el("h2", {}, `Process start ${segment.number + 1}: from step ${shown(segment.first_iteration)}, ${segment.status}`),
    el("div", { class: "two" },
      card("Config", { extra: facts.config_hash ? [el("span", { class: "quiet mono" }, facts.config_hash)] : [] },
        facts.config_text ? el("pre", {}, facts.config_text) : el("p", { class: "quiet" }, "The config was not recorded.")),
      card("Run", {}, table(["name", "value"], [
        ["status", segment.status], ["started", segment.started_at || "–"], ["ended", segment.ended_at || "–"],
        ["first step", shown(segment.first_iteration)], ["ranks", shown(segment.world)],
      ]), Object.keys(others).length > 0 && mapping(others))),
    el("div", { class: "two" },
      card("Versions", {}, has("versions") ? mapping(facts.versions) : el("p", { class: "quiet" }, "Not recorded.")),
      card("Environment", {}, has("environment") ? mapping(facts.environment) : el("p", { class: "quiet" }, "No variable that affects precision was set or recorded."))),
  ];
}

// The features of the config, each with its number of layers.
function featuresOf(plan) {
  const found = new Map();
  for (const { section, file, line, feature, since, until, layer } of plan) {
    const key = JSON.stringify([section, file, line, feature, since, until]);
    if (!found.has(key)) found.set(key, { section, file, line, feature, since, until, layers: new Set() });
    found.get(key).layers.add(layer);
  }
  return [...found.values()];
}

async function configPage(report) {
  const { segments, plan, states, events_total: total } = report.run;
  const events = report.run.events.map((event) => ({ ...event, ranks: event.ranks.join(", ") }));
  const layers = new Map(report.layers.map((layer) => [layer.name, layer]));
  const rows = events.map((event) => [
    shown(event.iteration), event.kind ?? "", event.severity ?? "", event.layer ? link({ page: "layer", layer: event.layer, step: event.iteration }, brief(layers.get(event.layer) ?? { name: event.layer, short: event.layer })) : "",
    event.ranks, event.text ?? "",
  ]);
  const columns = ["iteration", "kind", "severity", "ranks", "phase", "layer", "tensor", "gemm", "text", "data", "time"];
  return [[
    el("h1", {}, "Config and events"), notes(report),
    card("Events", {
      about: total > events.length ? `The last ${shown(events.length)} of ${shown(total)}.` : "",
      extra: [csvButton("events", columns, () => events.map((event) => columns.map((name) => event[name])))],
    }, rows.length ? table(["#step", "kind", "severity", "layer", "ranks", "text"], rows, { tall: true }) : el("p", { class: "quiet" }, "No events were recorded.")),
    ...segments.slice().reverse().map((segment) => segmentCard(segment, segments.length)),
    plan.length > 0 && card("Features of the config", {}, table(["section", "file", "feature", "#layers", "steps"], featuresOf(plan).map((row) =>
      [row.section, row.file ? `${row.file}${row.line ? `:${row.line}` : ""}` : "", row.feature, shown(row.layers.size), row.until === null ? `from ${row.since ?? 0}` : `${row.since ?? 0} to ${row.until}`]))),
    states.length > 0 && card("Dtypes of the state", {}, table(["state", "dtype", "#bytes", "#count"], states.map((row) => [row.subject, row.dtype, shown(row.bytes), shown(row.count)]))),
  ], async () => {}];
}
