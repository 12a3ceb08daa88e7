// Pages, theme, and what happens when the address changes. A page's own script calls openPage() with what it is made of.

let pages = {}, report = null, turn = 0;

async function guarded(work) {
  try {
    return await work();
  } catch (error) {
    console.error(error);
    document.querySelector("main").prepend(el("div", { class: "notes", role: "alert" }, `This part of the report could not be drawn: ${error.message}`));
    return null;
  }
}

async function show() {
  const own = ++turn;
  state.read();
  const [title, make] = pages[state.now.page] ?? pages.summary;
  await guarded(async () => {
    const [nodes, render] = await make(report);
    if (own !== turn) return;
    forgetPlots();
    const main = document.querySelector("main");
    main.replaceChildren(...nodes.flat(Infinity).filter(Boolean));
    for (const [name, each] of Object.entries(pages)) document.querySelector(`nav a[data-page="${name}"]`).toggleAttribute("aria-current", each[1] === make);
    document.title = `${title} - ${report.name}`;
    await render();
  });
  if (own === turn) document.body.dataset.shown = String(own);
}

// The links of the pages keep what is chosen.
function navigation() {
  const nav = document.querySelector("nav");
  nav.replaceChildren(...Object.entries(pages).map(([name, [title]]) =>
    el("a", { href: `#page=${name}`, "data-page": name, onclick: (event) => { event.preventDefault(); state.go({ page: name }); } }, title)));
}

const theme = {
  remember(value) {
    try { localStorage.setItem("te-precision-theme", value); } catch { /* files may have no storage */ }
  },
  remembered() {
    try { return localStorage.getItem("te-precision-theme"); } catch { return null; }
  },
  set(value) {
    document.documentElement.dataset.theme = value;
    document.querySelector(".theme").textContent = value === "dark" ? "Light" : "Dark";
  },
  begin() {
    const preferred = matchMedia("(prefers-color-scheme: dark)");
    this.set(this.remembered() ?? (preferred.matches ? "dark" : "light"));
    preferred.addEventListener("change", () => {
      if (this.remembered()) return;
      this.set(preferred.matches ? "dark" : "light");
      show();
    });
    document.querySelector(".theme").addEventListener("click", () => {
      const next = isDark() ? "light" : "dark";
      this.set(next);
      this.remember(next);
      show();
    });
  },
};


// Open the page. Of what is carried: `prepared` gives the report that the pages get, `named` its name and where it is
// from, `foot` the lines at its end; `shownPages` is title and function of each page, by its name in the address, and
// `defaults` what the address need not say.
async function openPage({ shownPages, defaults, prepared, named, foot }) {
  pages = shownPages;
  state.defaults = defaults;
  theme.begin();
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old: it has no DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)");
  const content = JSON.parse(await inflatedText("data"), (_, value) => typeof value === "string" ? printable(value) : value);
  report = await prepared({ ...content, arrays: new Arrays() });
  [report.name, report.from] = named(report);
  document.querySelector(".run").textContent = report.name;
  document.querySelector(".run").title = report.from;
  navigation();
  document.querySelector("footer").append(el("p", {}, foot(report),
    `Created ${report.made} by te-precision-callbacks ${report.version} from ${report.from}. Plots by plotly.js (MIT license), included in this file; nothing is downloaded.`));
  await loadPlotly();
  addEventListener("hashchange", show);
  await show();
}
