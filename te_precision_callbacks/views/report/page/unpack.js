// What the file carries: base64 of zlib streams. Nothing is fetched; DecompressionStream is the browser's own.

async function inflated(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function inflatedText(id) {
  const node = document.getElementById(id);
  const text = new TextDecoder().decode(await inflated(node.textContent.trim()));
  node.remove();
  return text;
}

// A text of the run without characters that cannot be printed, such as terminal controls and changes of direction.
const printable = (text) => text.replace(/[\p{C}\p{Z}]/gu, (one) => {
  if (one === " " || one === "\n") return one;
  const code = one.codePointAt(0).toString(16);
  return code.length > 4 ? `\\U${code.padStart(8, "0")}` : code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
});

const ARRAY_TYPES = {
  uint8: Uint8Array, uint16: Uint16Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  float32: Float32Array, float64: Float64Array,
};

// The arrays of the file, each unpacked when it is first asked for.
class Arrays {
  constructor() {
    const node = document.getElementById("arrays");
    this.texts = node.textContent.trim().split("\n");
    this.known = new Map();
    node.remove();
  }

  // A flat typed array; int64 becomes an array of numbers.
  get(reference) {
    if (!reference) return Promise.resolve(null);
    const key = `${reference.id} ${reference.dtype}`;
    if (!this.known.has(key)) this.known.set(key, this.unpacked(reference));
    return this.known.get(key);
  }

  async unpacked({ id, dtype }) {
    const planes = await inflated(this.texts[id]);
    const type = ARRAY_TYPES[dtype];
    const width = type.BYTES_PER_ELEMENT, length = planes.length / width;
    const bytes = new Uint8Array(planes.length);
    for (let plane = 0; plane < width; plane++)
      for (let at = 0; at < length; at++) bytes[at * width + plane] = planes[plane * length + at];
    const found = new type(bytes.buffer);
    return dtype === "int64" ? Array.from(found, Number) : found;
  }
}

// Run the plotting library, which the file carries too.
async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await inflatedText("plotly");
  document.head.append(script);
  script.remove();
}
