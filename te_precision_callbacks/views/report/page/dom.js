// Nodes, state in the address, and files to save. All text from a run becomes text nodes, never markup.

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => child instanceof Node ? child : String(child)));
  return node;
}

// A long text keeps its begin and, above all, its end; the names of layers are shortened where the page is made.
function shortened(name, most = 44) {
  if (name.length <= most) return name;
  const begin = Math.floor((most - 1) / 3);
  return `${name.slice(0, begin)}…${name.slice(begin + 1 - most)}`;
}

// What is looked at: in the hash of the address, so that a link leads there.
const state = {
  defaults: {},
  now: {},

  read() {
    const found = new URLSearchParams(location.hash.slice(1));
    this.now = { ...this.defaults };
    for (const [name, value] of found) if (name in this.defaults) this.now[name] = value;
  },

  hash(changes) {
    const wanted = new URLSearchParams();
    for (const [name, value] of Object.entries({ ...this.now, ...changes }))
      if (String(value) !== String(this.defaults[name])) wanted.set(name, value);
    return `#${wanted}`;
  },

  // Go there: a new entry of the history, and the page is drawn.
  go(changes) {
    location.hash = this.hash(changes);
  },

  // Note it in the address without a new entry, and without drawing.
  note(changes) {
    Object.assign(this.now, changes);
    history.replaceState(null, "", this.hash({}));
  },
};

// A link inside the page.
const link = (changes, ...children) => el("a", { href: state.hash(changes) }, ...children);

// The name of a layer in a table: the whole name where it has room.
const brief = ({ name, short }) => name.length <= 60 ? name : short;

const layerLink = (report, layer, changes = {}) => {
  const { name } = report.layers[layer];
  return el("a", { href: state.hash({ page: "layer", layer: name, ...changes }), class: "mono", title: name },
    brief(report.layers[layer]));
};

function csv(columns, rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    let text = String(value);
    if (/^[=+\-@\t\r]/.test(text)) text = `'${text}`; // a spreadsheet would run it
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

const fileName = (name) => name.replace(/[^\w.%-]+/g, "_").slice(0, 120);

function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: address, download: fileName(name) }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// A button for the table behind a plot; the rows are made when it is pressed.
const csvButton = (name, columns, rows) =>
  el("button", {
    class: "small csv", type: "button", title: `Save the data as ${name}.csv`,
    onclick: async () => save(`${name}.csv`, csv(columns, await rows())),
  }, "CSV");

const badge = (exact, text) => el("span", { class: exact ? "badge exact" : "badge" }, text);

// All buttons are there before a plot is drawn: one that came later would move the others away under the mouse.
function card(title, { about, extra = [] } = {}, ...children) {
  const made = el("section", { class: "card" }, ...children), text = about && el("p", {}, about);
  const picture = made.querySelector(".plot") && pictureButton(made);
  made.prepend(el("div", { class: "head" }, el("h2", {}, title), el("span", { class: "space" }), ...extra, picture, text));
  return made;
}

const notes = (report, title = "Missing data") => report.notes.length > 0 &&
  el("div", { class: "notes", role: "note" }, el("strong", {}, title),
    el("ul", {}, report.notes.map((note) => el("li", {}, note))));

function table(columns, rows, { tall = false } = {}) {
  const kind = (column) => column.startsWith("#") ? "number" : null;
  const name = (column) => column.replace(/^#/, "");
  return el("div", { class: tall ? "scroll tall" : "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((column) => el("th", { class: kind(column) }, name(column))))),
    el("tbody", {}, rows.map((row) => el("tr", {},
      row.map((value, at) => el("td", { class: kind(columns[at]) }, value ?? "")))))));
}

const choice = (label, options, chosen, change) =>
  el("label", {}, label, el("select", { "aria-label": label, onchange: (event) => change(event.target.value) },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text))));

const buttons = (label, options, chosen, change) =>
  el("span", { class: "labelled" }, label, el("span", { class: "group", role: "group", "aria-label": label },
    options.map(([value, text]) => el("button", {
      type: "button", value, "aria-pressed": String(value === chosen), onclick: () => change(value),
    }, text))));

const tip = {
  node: null,
  show(event, ...lines) {
    this.node ??= document.querySelector(".tip");
    this.node.replaceChildren(...lines.filter(Boolean).map((line) => el("div", {}, line)));
    this.node.hidden = false;
    const { clientX, clientY } = event, box = this.node.getBoundingClientRect();
    const left = clientX + 16 + box.width > innerWidth ? clientX - box.width - 12 : clientX + 16;
    const top = Math.min(clientY + 14, innerHeight - box.height - 8);
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    if (this.node) this.node.hidden = true;
  },
};
