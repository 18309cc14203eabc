// Puts the sections together, listens to keys, and in a live page asks for what has changed.

const SECTIONS = [
  ["overview", "Overview", overviewSection],
  ["differing-keys", "Keys that differ", differingSection],
  ["curves", "Curves", curvesSection],
  ["completions", "Completions", completionsSection],
  ["evaluation", "Evaluation", evaluationSection],
  ["plan", "Plan", planSection],
  ["configuration", "Configuration", configSection],
  ["metrics", "All metrics", metricsSection],
];
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
const fills = [];

function build() {
  const wanted = SECTIONS.filter(([id]) => id !== "differing-keys" || state.runs.length > 1);
  const sections = wanted.map(([id, title, make]) => {
    const parts = make();
    fills.push(parts.pop());
    return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), parts);
  });
  $("main").replaceChildren(...sections);
  $("nav").replaceChildren(...wanted.map(([id, title]) => el("a", { href: `#${id}` }, title)));
  const watcher = new IntersectionObserver(() => markSection(), { rootMargin: "-24% 0px -75% 0px" });
  for (const section of sections) watcher.observe(section);
}

function currentSection() {
  const line = innerHeight * 0.25;
  return [...document.querySelectorAll("main > section")].findLast((section) => section.getBoundingClientRect().top <= line);
}

function markSection() {
  const current = currentSection();
  for (const link of $("nav").children) {
    const here = current && link.hash === `#${current.id}`;
    if (here && !link.hasAttribute("aria-current")) $("nav").scrollLeft = link.offsetLeft - 60;
    link.toggleAttribute("aria-current", Boolean(here));
  }
}

function fillAll() {
  for (const fill of fills) fill();
  const made = LIVE ? "served live" : `written ${state.data.written.replace("T", " ").replace("Z", " UTC")}`;
  $("written").textContent = `quatrain ${state.data.version}, ${made}`;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = THEMES[theme];
  for (const chart of charts) chart.restyle();
}

function watchTheme() {
  const saved = store("quatrain-theme");
  const names = Object.keys(THEMES);
  setTheme(names.includes(saved) ? saved : "auto");
  $("theme").addEventListener("click", () => {
    const next = nextOf(names, document.documentElement.dataset.theme);
    store("quatrain-theme", next);
    setTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
}

const inEvaluation = () => currentSection()?.id === "evaluation";
const nextOf = (names, current) => names[(names.indexOf(current) + 1) % names.length];
const offeredFilters = () => [...$("filters").querySelectorAll("button")].map((b) => b.dataset.filter);

const KEYS = {
  ArrowLeft: () => moveStep(-1),
  ArrowRight: () => moveStep(1),
  j: () => (inEvaluation() ? movePair(1) : moveGroup(1)),
  k: () => (inEvaluation() ? movePair(-1) : moveGroup(-1)),
  "/": () => { const box = inEvaluation() ? $("eval-search") : $("search"); box.focus(); box.select(); },
  "?": () => $("help").showModal(),
  f: () => setFilter(nextOf(offeredFilters(), view.filter)),
  c: () => {
    if ($("colour-field").hidden) return;
    view.by = nextOf(Object.keys(COLOURS), view.by);
    $("colour").value = view.by;
    showGroup();
  },
};

function watchKeys() {
  $("keys").addEventListener("click", () => $("help").showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "Escape" && typing) { typing.blur(); return; }
    const action = KEYS[event.key];
    const scrolls = event.key.startsWith("Arrow") && event.target.closest(".scroll"); // moves the table that has the focus
    if (typing || !action || !state.runs.length || scrolls) return;
    event.preventDefault();
    action();
  });
}

// Asks for what has changed; the reader's place, search and filters stay.
async function follow() {
  try {
    const data = await readData();
    if (data !== null) { adopt(data); fillAll(); }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
    $("written").textContent = "The server has ended: this page shows what it last sent.";
  }
  setTimeout(follow, POLL_MS);
}

async function start() {
  watchTheme();
  watchKeys();
  if (typeof DecompressionStream === "undefined") {
    $("loading").textContent = "This page is compressed, and this browser is too old to unpack it (it has no DecompressionStream).";
    return;
  }
  adopt(await readData());
  build();
  fillAll();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  const anchor = /^#step=/.test(location.hash) ? "completions" : location.hash.slice(1);
  if (anchor && !anchor.includes("=")) $(anchor)?.scrollIntoView();
  if (LIVE) setTimeout(follow, POLL_MS);
}

start().catch((error) => {
  $("main").prepend(el("p", { class: "message" }, `This page could not be shown: ${error.message}`));
});
