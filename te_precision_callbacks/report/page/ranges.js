// The windows of number formats: what a format can hold at a scale, and what lies outside of it.

const WINDOWS = ["E4M3", "E5M2", "E2M1"];

const windowTitle = (format) => format === "E2M1" ? "E2M1 (blocks)" : format;

// The format of a scale's statistic: of the recipe in its name, else of the layer's own operands.
function formatOf(family, layer, tensor) {
  if (family.recipe === "nvfp4") return "E2M1";
  if (family.e5m2 !== null) return family.e5m2 ? "E5M2" : "E4M3";
  const own = layer.gemms.map((gemm) => gemm.operands[tensor] ?? "").filter(Boolean).join(" ");
  if (!family.recipe && own.includes("NVFP4")) return "E2M1";
  return own.includes("E5M2") && !own.includes("E4M3") ? "E5M2" : "E4M3";
}

// The recorded scale factors of a tensor of a layer by format: {E4M3: {low, high}}, families.
function scaleFamilies(report, layerIndex, tensor) {
  const found = {}, layer = report.layers[layerIndex];
  for (const family of report.families) {
    if (family.tensor !== tensor || family.columnwise || !family.rowOf?.has(layerIndex)) continue;
    if (family.base !== "scale_inv_max" && family.base !== "scale_inv_min") continue;
    const format = formatOf(family, layer, tensor);
    found[format] ??= {};
    found[format][family.base === "scale_inv_max" ? "high" : "low"] ??= family;
  }
  return found;
}

// The largest and the smallest magnitude that a format holds at scale factors, as powers of two; beyond half of the
// smallest, numbers become 0.
const windowAt = (format, low, high) => ({
  top: Math.log2(format.max * high), bottom: Math.log2(format.least * low), zero: Math.log2(format.least * low) - 1,
});

// The factors that the recipe would choose for a largest magnitude: it becomes the format's largest number. With a scale
// for each block, which is a number of E4M3, the smallest one is 2^-9 / 448 of the largest one.
function assumedFactors(name, formats, amax) {
  const high = amax / formats[name].max;
  return { low: name === "E2M1" ? (high * formats.E4M3.least) / formats.E4M3.max : high, high };
}

// The window of a format in a layer at a step: {top, bottom, zero, recorded, exact}; null if nothing is known.
async function windowOf(report, name, layerIndex, tensor, step, amax, chosenRank) {
  const families = scaleFamilies(report, layerIndex, tensor)[name];
  const format = report.formats[name];
  if (families?.high) {
    const read = async (family) => family.at(family.rowOf.get(layerIndex), family.rankFor(chosenRank), step);
    const high = await read(families.high), low = families.low ? await read(families.low) : high;
    if (high?.value > 0 && low?.value > 0)
      return { ...windowAt(format, low.value, high.value), recorded: true, exact: high.exact && low.exact };
  }
  if (!(amax > 0) || !Number.isFinite(amax)) return null;
  const { low, high } = assumedFactors(name, report.formats, amax);
  return { ...windowAt(format, low, high), recorded: false, exact: true };
}

// The share of counts beyond a window, in percent: {below, above}. Bins span powers of two; one that a limit cuts counts
// by its part on the logarithmic axis.
function outsideShare(counts, lowest, steps, offset, { top, zero }) {
  let below = 0, above = 0, total = 0;
  counts.forEach((count, at) => {
    const begin = lowest + (offset + at) / steps, end = begin + 1 / steps;
    total += count;
    below += count * Math.min(1, Math.max(0, (zero - begin) / (end - begin)));
    above += count * Math.min(1, Math.max(0, (end - top) / (end - begin)));
  });
  return total ? { below: (100 * below) / total, above: (100 * above) / total } : { below: 0, above: 0 };
}

// The families of statistics of a tensor that say how large its numbers are.
function magnitudeFamilies(report, tensor) {
  const plain = (base) => report.families.find((one) => one.tensor === tensor && one.base === base && one.recipe === null && !one.gemm);
  return { amax: plain("cur_amax"), max: plain("max"), min: plain("min"), range: plain("dynamic_range"), std: plain("std") };
}

const openAll = (report) => Promise.all(report.families.map((family) => family.open()));
