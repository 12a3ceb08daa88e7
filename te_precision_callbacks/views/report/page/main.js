// The pages of a run.

function exactness({ families }) {
  const sum = (counts) => counts.reduce((total, count) => total + count, 0);
  const curves = sum(families.map((family) => Object.keys(family.curves).length)), series = sum(families.map((family) => family.seriesOf.size));
  return curves >= series
    ? "All recorded values on these pages are exact; estimates are marked. "
    : `Exact: the worst value of each layer, and the curves of ${shown(curves)} of ${shown(series)} series (those that show findings first, then the worst of each statistic). Everything else comes from an overview with three digits, in which a cell is the worst of up to ${shown(Math.max(...families.map((family) => family.widest)))} steps, and is marked with ≈ or "overview". `;
}

guarded(() => openPage({
  shownPages: {
    summary: ["Summary", summaryPage],
    findings: ["Findings", findingsPage],
    steps: ["Last steps", lastStepsPage],
    heatmap: ["Heatmap", heatmapPage],
    layer: ["Layer", layerPage],
    profile: ["Depth profile", profilePage],
    config: ["Config and events", configPage],
  },
  defaults: {
    page: "summary", statistic: "", tensor: "", layer: "", step: "", rank: "", axis: "steps", fold: "", open: "", filter: "", format: "E4M3", scalar: "", near: "yes",
  },
  prepared: withFamilies,
  named: ({ run }) => [run.name, run.path],
  foot: exactness,
}));
