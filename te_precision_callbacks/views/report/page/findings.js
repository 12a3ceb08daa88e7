// The verdict, its findings, and where each can be seen.

const FINDINGS_AT_THE_TOP = 5;

const severityBadge = (severity) => el("span", { class: `severity ${severity}` }, severity);

const whenFound = (report, { since, where }) => (since === null ? "" : `, since step ${stepText(report, since)}`) + (where && `, ${where}`);

// The family of the statistic that shows a finding; undefined where the page has none.
const familyOf = (report, { statistic, tensor }) => statistic === "" ? undefined
  : report.families.find((one) => one.statistic === statistic && one.tensor === tensor);

// Links to what shows a finding: a heat map, and the curves or the products of its first layer.
function findingLinks(report, finding) {
  const [first] = finding.places, family = familyOf(report, finding);
  const where = { statistic: family?.statistic ?? "", tensor: family?.tensor ?? "", step: finding.since ?? "", rank: finding.ranks[0] ?? "", filter: "" };
  const button = (changes, text, label) => el("a", { class: "button", href: state.hash(changes), "aria-label": `${text}: ${label}` }, text);
  const name = first === undefined ? "" : report.layers[first].name;
  return el("p", { class: "links" },
    family && button({ page: "heatmap", ...where, layer: name }, "Heat map", family.label),
    name && button({ page: "layer", ...where, layer: name }, family ? "Curves" : "Layer", name),
    report.last_steps?.iterations.includes(finding.since) && button({ page: "steps", tensor: "", filter: "" }, "Last steps", finding.title),
    !family && !name && "config" in pages && button({ page: "config" }, "Config", finding.title));
}

const findingLine = (report, finding, more = "") => el("li", { class: "found" },
  el("div", {}, severityBadge(finding.severity), " ", finding.layers_total ? el("strong", {}, `${finding.subject}: `) : "", `${finding.seen_in_words} `,
    el("span", { class: "quiet" }, `(${finding.rule}${whenFound(report, finding)}${finding.caused_by && `, caused by ${finding.caused_by}`})`)),
  el("p", {}, `${finding.remedy}.${more}`), findingLinks(report, finding));

const toFindings = (...children) => link({ page: "findings" }, ...children);

// The verdict, with its first findings: what a report begins with.
function verdictPart(report) {
  const { verdict } = report, { findings, not_checked: notChecked } = verdict;
  const state = { "no problems found": "healthy", "problems found": verdict.severity }[verdict.state] ?? "unchecked", left = findings.length - FINDINGS_AT_THE_TOP;
  return el("section", { class: `card verdict ${state}`, "aria-labelledby": "verdict" },
    report.run.outcome.map((line) => el("p", {}, el("strong", {}, line))),
    el("h2", { id: "verdict" }, verdict.summary),
    findings.length > 0 && el("ol", { "aria-label": "Findings, root causes and the most severe first" }, findings.slice(0, FINDINGS_AT_THE_TOP).map((finding) => findingLine(report, finding))),
    findings.length > 0 && el("p", {}, toFindings(left > 0 ? `${left} more finding${left === 1 ? "" : "s"}, and all details` : "All details")),
    notChecked.length > 0 && el("p", { class: "quiet" }, `Not checked${notChecked.some(({ essential }) => essential) ? "" : " (optional)"}: ${[...new Set(notChecked.map(({ rule }) => rule))].filter((rule) => !verdict.checked_rules.includes(rule)).join(", ")}. `, toFindings("What to add")));
}

function findingCard(report, finding, number) {
  const { since, until, last_good: lastGood, checkpoint } = finding, unnamed = finding.layers_total - finding.places.length;
  const steps = since === null ? "" : `${since === until ? "step" : `steps ${stepText(report, since)} to`} ${stepText(report, until)}${finding.where && ` ${finding.where}`}`
    + (lastGood === null ? "; no earlier step is known to be good" : `; last step without the problem: ${stepText(report, lastGood)}; `
      + (checkpoint === null ? "no checkpoint from before the problem is known"
        : `last earlier checkpoint: before step ${stepText(report, checkpoint)}`));
  const where = { statistic: finding.statistic, tensor: finding.tensor, step: since ?? "" };
  const layers = finding.places.length > 0 && [
    finding.places.map((place, at) => [at ? ", " : "", layerLink(report, place, where)]), unnamed > 0 && ` and ${shown(unnamed)} more`];
  const parts = [
    ["seen", finding.seen_in_words], ["caused by", finding.caused_by], ["seen in", steps], [finding.places.length > 1 ? "layers, in execution order" : "layer", layers],
    ["why it matters", finding.why], ["what to do", `${finding.remedy}.`], ["section for the config", finding.patch && el("pre", {}, finding.patch)],
    ["not a problem if", finding.disproof], ["rule", `${finding.rule}: ${finding.title}`], ["source", finding.source],
  ];
  return el("section", { class: `card finding-card ${finding.severity}`, "aria-labelledby": `finding-${number}` },
    el("div", { class: "head" }, el("h2", { id: `finding-${number}` }, severityBadge(finding.severity), " ", finding.subject)),
    findingLinks(report, finding),
    el("dl", { class: "facts" }, parts.filter(([, value]) => value).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

async function findingsPage(report) {
  const { verdict } = report, { findings, not_checked: notChecked } = verdict;
  return [[
    el("h1", {}, "Findings"), el("p", {}, verdict.summary),
    !verdict.checked && el("p", { class: "quiet" }, "The run has no statistics to check. Record statistics of the layers: the default config is enough."),
    findings.map((finding, number) => findingCard(report, finding, number)),
    notChecked.length > 0 && card("Rules that were not checked", { about: "To check them, add the missing data and run again." },
      table(["rule", "why not", "what to add"], notChecked.map(({ rule, why, collect }) => [el("span", { class: "mono" }, rule), why, collect]))),
    verdict.checked > 0 && card("Rules that were checked", { about: "For details: te-precision rules ID" }, el("p", { class: "mono" }, verdict.checked_rules.join(", "))),
  ], async () => {}];
}
