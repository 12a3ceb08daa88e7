// The windows of number formats: what a format can hold at a scale.

// The largest and the least magnitude above 0 of each, and what its scales within a tensor add downwards: blocks of
// NVFP4 have E4M3 scales.
const FORMATS = {
  E4M3: { max: 448, least: 2 ** -9, reach: 1 },
  E5M2: { max: 57344, least: 2 ** -16, reach: 1 },
  E2M1: { max: 6, least: 0.5, reach: 2 ** -9 / 448 },
};

const WINDOWS = Object.keys(FORMATS);

const windowTitle = (format) => format === "E2M1" ? "E2M1 (blocks)" : format;

// What a tensor is quantized to in a layer's own products.
function ownFormat(layer, tensor) {
  const own = layer.gemms.map((gemm) => gemm.operands[tensor] ?? "").join(" ");
  return own.includes("NVFP4") ? "E2M1" : own.includes("E5M2") && !own.includes("E4M3") ? "E5M2" : "E4M3";
}

// The window of a format in a layer at a step, as powers of two: {top, bottom, recorded}; null if nothing is known. With no
// recorded scale, it is the one for which the largest magnitude becomes the format's largest number.
async function windowOf(report, name, index, tensor, step, amax, chosenRank) {
  const format = FORMATS[name];
  const window = (low, high, recorded) => ({ top: Math.log2(format.max * high), bottom: Math.log2(format.least * low), recorded });
  const read = async (base) => {
    const family = report.families.find((one) => one.base === base && one.tensor === tensor && !one.recipe && !one.columnwise && one.rowOf.has(index));
    return family ? (await family.at(family.rowOf.get(index), family.rankFor(chosenRank), step))?.value : undefined;
  };
  if (ownFormat(report.layers[index], tensor) === name) {
    const high = await read("scale_inv_max"), low = await read("scale_inv_min") || high * format.reach;
    if (high > 0) return window(low, high, true);
  }
  if (!(amax > 0) || !Number.isFinite(amax)) return null;
  return window((amax / format.max) * format.reach, amax / format.max, false);
}

// What a scale's rounding may move a limit by, as a power of two.
const ROUNDING = 2e-6;

// The families of statistics of a tensor that say how large its numbers are.
function magnitudeFamilies(report, tensor) {
  const plain = (base) => report.families.find((one) => one.tensor === tensor && one.base === base && one.recipe === null && !one.gemm);
  return { amax: plain("cur_amax"), max: plain("max"), min: plain("min"), range: plain("dynamic_range"), std: plain("std") };
}
