// Numbers: their text, their places on a scale, and which of two is worse.

const REDUCED = -1;

// A number of the JSON, in which those that are not finite are words.
const asNumber = (value) => typeof value === "string" ? { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] : value;

function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

// A step, and what the trainer calls it where that counts otherwise.
const stepText = ({ run }, step) => {
  const ahead = run?.duration.trainer?.ahead;
  return shown(step) + (ahead ? ` (the trainer's ${shown(step + ahead)})` : "");
};

// A power of two, whose exponent stands raised.
const power = (exponent) => exponent === undefined || exponent === null ? "–"
  : el("span", {}, "2", el("sup", {}, shown(exponent, 3).replace("-", "−")));

const withUnit = (value, unit) =>
  shown(value) + (["%", "dB", "points", "powers of two", "spreads"].includes(unit) ? ` ${unit}` : "");

// The place of a number on a scale, and back.
const SCALES = {
  linear: [(value) => value, (place) => place],
  log: [Math.log, Math.exp],
  asinh: [Math.asinh, Math.sinh],
};

const NARROW = 1e-3; // below this ratio of smallest to largest a scale is logarithmic
const FAR = 1e-2; // below this ratio of median to largest magnitude a scale for both signs is not linear

// A scale for some numbers: linear, unless they span several orders of magnitude; asinh is about linear below `bend`.
class Scale {
  constructor(numbers, centred) {
    const finite = numbers.filter((value) => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
    const above = finite.filter((value) => value > 0);
    Object.assign(this, { kind: "linear", low: finite[0] ?? 0, high: finite.at(-1) ?? 1, bend: 1, centred });
    if (this.low >= 0 && !centred) {
      if (above[0] < NARROW * this.high) Object.assign(this, { kind: "log", low: above[0] });
    } else {
      const sizes = finite.filter((value) => value !== 0).map(Math.abs).sort((a, b) => a - b);
      const most = sizes.at(-1) ?? 1, middle = sizes.length ? (sizes[(sizes.length - 1) >> 1] + sizes[sizes.length >> 1]) / 2 : 1;
      if (middle < FAR * most) Object.assign(this, { kind: "asinh", bend: middle });
      if (centred) Object.assign(this, { low: -most, high: most });
    }
    const [there, back] = SCALES[this.kind];
    this.there = (value) => there(value / this.bend);
    this.back = (place) => back(place) * this.bend;
    this.begin = this.there(this.low);
    this.width = this.there(this.high) - this.begin;
  }

  // The place of a number, from 0 to 1; 0 and less on a logarithmic scale are at its low end.
  level(value) {
    if (!this.width || (this.kind === "log" && value <= 0)) return 0;
    return Math.min(1, Math.max(0, (this.there(value) - this.begin) / this.width));
  }

  // Round numbers on the scale, for its legend.
  ticks() {
    if (this.kind === "linear") return niceNumbers(this.low, this.high, 5);
    const low = this.kind === "log" ? this.low : this.there(this.low) < -1 ? -this.low : 0;
    const powers = [];
    const top = Math.log10(Math.max(Math.abs(this.low), Math.abs(this.high)));
    const bottom = this.kind === "log" ? Math.log10(low) : Math.log10(Math.abs(this.back(1)));
    const step = Math.max(1, Math.ceil((top - bottom) / (this.kind === "log" ? 6 : 3)));
    for (let power = Math.floor(top); power >= bottom - 1e-9; power -= step) powers.push(10 ** power);
    if (powers.length < 2) return niceNumbers(this.low, this.high, 5);
    if (this.kind === "log") return powers;
    const all = this.low < 0 ? [...powers.map((value) => -value), 0, ...powers.reverse()] : [0, ...powers.reverse()];
    return all.filter((value) => value >= this.low * (1 + 1e-9) - 1e-300 && value <= this.high * (1 + 1e-9));
  }
}

function niceNumbers(low, high, most) {
  const raw = (high - low) / most;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step)
    found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// A key that grows as a number gets worse; nan is the worst.
function badness(value, worse) {
  if (Number.isNaN(value)) return Infinity;
  return worse === "high" ? value : worse === "low" ? -value : Math.abs(value);
}

// What the first of several numbers by badness is called: a magnitude, such as an amax, has no bad direction.
const extreme = (worse) => worse ? "worst" : "largest";

// Steps from the first one and the differences to the one before.
function stepsFrom(between) {
  const steps = new Array(between.length);
  for (let at = 0, step = 0; at < between.length; at++) steps[at] = step += between[at];
  return steps;
}

// The steps and the columns of a packed curve.
async function unpackedCurve(report, arrays) {
  const [between, ...columns] = await Promise.all(arrays.map((each) => report.arrays.get(each)));
  return [stepsFrom(between), ...columns];
}

// A statistic of a tensor, in all layers and steps.
class Family {
  constructor(content, index, report) {
    Object.assign(this, content);
    this.index = index;
    this.report = report;
    this.label = `${content.statistic} of ${content.tensor}` + (content.gemm ? ` (${content.gemm})` : "");
  }

  // What every use of it needs; the cells of a rank are unpacked when they are asked for.
  async open() {
    const [layers, ranks, begins, ends] = await Promise.all(["layer", "rank", "first", "last"].map((name) => this.unpacked(name)));
    this.layers = [...new Set(layers)].sort((a, b) => a - b);
    this.ranks = [...new Set(ranks)].sort((a, b) => a - b);
    this.several = this.ranks.length > 1;
    this.begins = begins;
    this.ends = ends;
    this.widest = Math.max(1, ...Array.from(begins, (begin, at) => ends[at] - begin + 1));
    this.rowOf = new Map(this.layers.map((layer, row) => [layer, row]));
    this.seriesOf = new Map(Array.from(layers, (layer, series) => [`${this.rowOf.get(layer)}:${ranks[series]}`, series]));
    return this;
  }

  unpacked(name) {
    return this.report.arrays.get(this.arrays[name]);
  }

  // The rank that is shown: the chosen one where it has numbers, else the first one.
  rankFor(chosen) {
    return chosen !== "" && this.ranks.includes(Number(chosen)) ? Number(chosen) : this.ranks[0];
  }

  // The exact worst number of each row, and its step, -1 where there is none: {values, at}.
  async worstOf(rank) {
    const [values, at] = await Promise.all([this.unpacked("worst"), this.unpacked("worst_at")]);
    const series = this.layers.map((_, row) => this.seriesOf.get(`${row}:${rank}`));
    return { values: series.map((each) => values[each]), at: series.map((each) => at[each] ?? -1) };
  }

  // The numbers of the overview, of all rows and columns; null where there is none.
  cellsOf(rank) {
    this.known ??= {};
    return this.known[rank] ??= this.unpackedCells(rank);
  }

  async unpackedCells(rank) {
    const [halves, places] = await Promise.all([this.unpacked("cells"), this.unpacked("nans")]);
    const numbers = new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer); // bfloat16
    const all = Array.from(numbers, (value) => Number.isNaN(value) ? null : value);
    for (const place of places) all[place] = NaN;
    const width = this.begins.length;
    return this.layers.flatMap((_, row) => {
      const series = this.seriesOf.get(`${row}:${rank}`);
      return series === undefined ? new Array(width).fill(null) : all.slice(series * width, (series + 1) * width);
    });
  }

  // The scale of its numbers in all ranks.
  async scale() {
    const cells = await Promise.all(this.ranks.map((rank) => this.cellsOf(rank)));
    return new Scale(cells.flat(), this.signed);
  }

  columnOf(step) {
    let low = 0, high = this.begins.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.begins[middle] <= step) low = middle; else high = middle - 1;
    }
    return low;
  }

  // The whole curve of a row, {steps, values}; null where the page has none.
  async curve(row, rank) {
    const packed = this.curves[this.seriesOf.get(`${row}:${rank}`)];
    if (!packed) return null;
    const [steps, values] = await unpackedCurve(this.report, packed);
    return { steps, values, exact: true };
  }

  // The curve of a row, from the overview where the page has no exact one.
  async anyCurve(row, rank) {
    const exact = await this.curve(row, rank);
    if (exact) return exact;
    const cells = await this.cellsOf(rank), width = this.begins.length;
    const steps = [], values = [];
    for (let column = 0; column < width; column++) {
      const value = cells[row * width + column];
      if (value === null) continue;
      steps.push(this.ends[column]);
      values.push(value);
    }
    return { steps, values, exact: false };
  }

  // The number of a cell of the overview: {value, exact, step}; of several steps the worst, null if there is none.
  async cell(row, rank, column) {
    const cells = await this.cellsOf(rank), value = cells[row * this.begins.length + column];
    if (value === null) return null;
    const exact = await this.exactIn(row, rank, this.begins[column], this.ends[column]);
    return exact ?? { value, exact: false, step: null };
  }

  async exactIn(row, rank, begin, end) {
    const curve = await this.curve(row, rank);
    if (!curve) return null;
    let found = null;
    for (let at = lowerBound(curve.steps, begin); at < curve.steps.length && curve.steps[at] <= end; at++)
      if (!found || badness(curve.values[at], this.worse) > badness(found.value, this.worse))
        found = { value: curve.values[at], exact: true, step: curve.steps[at] };
    return found;
  }

  // The number at a step, or the last one before it; {value, exact, step} or null.
  async at(row, rank, step) {
    const curve = await this.curve(row, rank);
    if (curve) {
      const at = lowerBound(curve.steps, step + 1) - 1;
      return at < 0 ? null : { value: curve.values[at], exact: true, step: curve.steps[at] };
    }
    const cells = await this.cellsOf(rank);
    for (let column = this.columnOf(step); column >= 0; column--) {
      const value = cells[row * this.begins.length + column];
      if (value !== null) return { value, exact: false, step: this.ends[column] };
    }
    return null;
  }
}

const MOST_WORST = 5;

// Statistics whose worst layers come first; the others follow.
const FIRST = ["nonfinite_num", "overflows%", "underflows%", "sqnr_db", "saturated_scales%", "flushed_scales%"];

// The worst layers of each statistic with a bad direction, without perfect values: {family, items, counted}, where
// `counted` is whether there is any value besides those of the first step of delayed scaling.
async function worstLayers(families) {
  const priority = ({ base }) => FIRST.includes(base) ? FIRST.indexOf(base) : FIRST.length;
  const directed = families.filter(({ worse, base }) => base && (worse === "high" || worse === "low"));
  const listed = await Promise.all(directed.map(async (family) => {
    const [layers, ranks, values, steps] = await Promise.all(["layer", "rank", "worst", "worst_at"].map((name) => family.unpacked(name)));
    const all = Array.from(steps, (at, row) => ({ layer: layers[row], rank: ranks[row], value: values[row], at }))
      .filter(({ at }) => at >= 0).sort((a, b) => badness(b.value, family.worse) - badness(a.value, family.worse) || 0);
    const found = new Map();
    for (const item of all) if (!found.has(item.layer) && found.size < MOST_WORST) found.set(item.layer, item);
    const worst = [...found.values()];
    return { family: family.index, counted: worst.length > 0, items: worst.filter(({ value }) => value !== (family.worse === "high" ? 0 : Infinity)) };
  }));
  return listed.sort((a, b) => priority(families[a.family]) - priority(families[b.family]));
}

async function withFamilies(report) {
  report.families = await Promise.all(report.families.map((family, index) => new Family(family, index, report).open()));
  report.worst_layers = await worstLayers(report.families);
  return report;
}

// The first place in ascending numbers that is not below a number.
function lowerBound(numbers, wanted) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}
