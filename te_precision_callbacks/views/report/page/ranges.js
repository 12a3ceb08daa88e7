// The windows of number formats: what a format can hold at a scale, and what lies outside of it.

const WINDOWS = ["E4M3", "E5M2", "E2M1"];

const windowTitle = (format) => format === "E2M1" ? "E2M1 (blocks)" : format;

// What a tensor is quantized to in a layer's own products: {format, fp8, one_scale}.
const ownFormat = (layer, tensor) => layer.formats[tensor] ?? { format: "E4M3", fp8: "E4M3", one_scale: false };

// The format of a scale's statistic: of its name, else of the layer's own operands.
const formatOf = (family, layer, tensor) => family.format ?? ownFormat(layer, tensor)[family.recipe ? "fp8" : "format"];

// The recorded statistics of a format in a tensor of a layer: {high, low, below, above}, families of one recipe, that of
// the layer itself where it has any.
function recordedFamilies(report, layerIndex, tensor, name) {
  const found = new Map(), layer = report.layers[layerIndex];
  const kinds = { scale_inv_max: "high", scale_inv_min: "low", "underflows%": "below", "overflows%": "above" };
  for (const family of report.families) {
    const kind = kinds[family.base];
    if (!kind || family.tensor !== tensor || family.columnwise || !family.rowOf?.has(layerIndex) || formatOf(family, layer, tensor) !== name) continue;
    const recipe = family.recipe ?? "";
    if (!found.has(recipe)) found.set(recipe, {});
    found.get(recipe)[kind] ??= family;
  }
  const own = found.get("");
  return own?.high ? own : [...found.values()].find((each) => each.high) ?? own ?? [...found.values()][0] ?? {};
}

// The largest and the smallest magnitude that a format holds at scale factors, as powers of two; beyond half of the
// smallest, numbers become 0.
const windowAt = (format, low, high) => ({
  top: Math.log2(format.max * high), bottom: Math.log2(format.least * low), zero: Math.log2(format.least * low) - 1,
});

// The factors that the recipe would choose for a largest magnitude: it becomes the format's largest number.
function assumedFactors(format, amax) {
  const high = amax / format.max;
  return { low: high * format.reach, high };
}

// The window of a format in a layer at a step: {top, bottom, zero, recorded, exact}; null if nothing is known.
async function windowOf(report, name, layerIndex, tensor, step, amax, chosenRank) {
  const families = recordedFamilies(report, layerIndex, tensor, name);
  const format = report.formats[name];
  if (families.high) {
    const read = async (family) => family.at(family.rowOf.get(layerIndex), family.rankFor(chosenRank), step);
    const high = await read(families.high), low = families.low ? await read(families.low) : high;
    if (high?.value > 0 && low?.value > 0)
      return { ...windowAt(format, low.value, high.value), recorded: true, exact: high.exact && low.exact };
  }
  if (!(amax > 0) || !Number.isFinite(amax)) return null;
  const { low, high } = assumedFactors(format, amax);
  return { ...windowAt(format, low, high), recorded: false, exact: true };
}

// Where a format's limits were from one step to another, as powers of two, each from the least to the most: {top, zero,
// recorded}; null if nothing is known. Where the scale is assumed, it follows the largest magnitude, and nothing is above.
async function limitsIn(report, name, layerIndex, tensor, begin, end, amax, chosenRank) {
  const families = recordedFamilies(report, layerIndex, tensor, name), format = report.formats[name];
  const spread = (low, high, recorded) => ({
    top: [Math.log2(format.max * low), Math.log2(format.max * high)], zero: [Math.log2(format.least * low) - 1, Math.log2(format.least * high) - 1], recorded,
  });
  if (families.high) {
    const read = (family) => family.span(family.rowOf.get(layerIndex), family.rankFor(chosenRank), begin, end);
    const high = await read(families.high), low = families.low ? await read(families.low) : null;
    if (high?.low > 0 && high.high < Infinity && (!low || low.low > 0))
      return spread(low ? low.low : hasOneScale(families.high, report.layers[layerIndex], tensor) ? high.low : 0, high.high, true);
  }
  if (!(amax?.low > 0) || !Number.isFinite(amax.high)) return null;
  return spread(assumedFactors(format, amax.low).low, assumedFactors(format, amax.high).high, false);
}

// Whether there is one scale for the whole tensor: by the recipe in a statistic's name, else by the layer's own operands.
const hasOneScale = (family, layer, tensor) => family.one_scale ?? ownFormat(layer, tensor).one_scale;

// What is beyond a format from one step to another, in percent: {below, above}, each {low, high, from}: what was recorded,
// or what the counts allow. Bins span powers of two, so of a bin that a limit cuts anything from none to all is beyond it.
// With a scale for each block, limits are those of all blocks.
async function sharesOutside(report, name, layerIndex, tensor, begin, end, { counts, lowest, steps, offset, amax, rank }) {
  const families = recordedFamilies(report, layerIndex, tensor, name);
  const limits = await limitsIn(report, name, layerIndex, tensor, begin, end, amax, rank);
  const below = { low: 0, high: 0, from: "estimate" }, above = { low: 0, high: 0, from: limits?.recorded ? "estimate" : "assumed" };
  const total = counts.reduce((sum, count) => sum + count, 0);
  counts.forEach((count, at) => {
    if (!limits || !count) return;
    const from = offset + at ? lowest + (offset + at) / steps : -Infinity, to = lowest + (offset + at + 1) / steps, share = (100 * count) / total;
    if (to <= limits.zero[0]) below.low += share;
    if (from <= limits.zero[1]) below.high += share;
    if (limits.recorded && from > limits.top[1] + ROUNDING) above.low += share;
    if (limits.recorded && to > limits.top[0]) above.high += share;
  });
  if (limits?.recorded && amax.from === "amax" && Math.log2(amax.high) <= limits.top[0] + ROUNDING) Object.assign(above, { low: 0, high: 0, from: "by amax" });
  for (const [side, found] of [["below", below], ["above", above]]) {
    const family = families[side];
    const span = family && await family.span(family.rowOf.get(layerIndex), family.rankFor(rank), begin, end);
    if (span && (limits?.recorded || !family.recipe)) Object.assign(found, span, { from: span.exact ? "recorded" : "overview" });
  }
  return limits || families.below || families.above ? { below, above } : null;
}

// What a scale's rounding may move a limit by, as a power of two.
const ROUNDING = 2e-6;

// The families of statistics of a tensor that say how large its numbers are.
function magnitudeFamilies(report, tensor) {
  const plain = (base) => report.families.find((one) => one.tensor === tensor && one.base === base && one.recipe === null && !one.gemm);
  return { amax: plain("cur_amax"), max: plain("max"), min: plain("min"), range: plain("dynamic_range"), std: plain("std") };
}

const openAll = (report) => Promise.all(report.families.map((family) => family.open()));
