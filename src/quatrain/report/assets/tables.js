// Overview, hints, plan, configuration, keys that differ between runs, and the table of all metrics.

// On a phone a row is a block, in which each cell says what it holds.
function table(heads, rows, attributes = {}) {
  for (const row of rows) [...row.cells].forEach((cell, i) => { cell.dataset.head = heads[i]; });
  const head = el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text))));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes["aria-label"] }, el("table", attributes, head, el("tbody", {}, rows)));
}

// Renders into `host` only what has changed, so that in a live page the focus and the place in a table stay.
function renew(host, value, render) {
  const signature = JSON.stringify(value);
  if (host.signature === signature) return;
  host.signature = signature;
  host.replaceChildren(...render().filter(Boolean));
}

const latest = (run, name) => run.metrics[name]?.findLast((v) => v !== null) ?? null;
const firstOf = (run, name) => run.metrics[name]?.find((v) => v !== null) ?? null;
const setting = (run, key) => run.config.find((row) => row.key === key)?.value ?? null;
const change = (run, name) => `${short(firstOf(run, name), 3)} → ${short(latest(run, name), 3)}`;

function tile(name, value, note) {
  return el("div", { class: "tile" }, el("dt", {}, name), el("dd", { class: "number" }, value), note ? el("span", { class: "aside" }, note) : null);
}

// The accuracy of the first evaluation set, or its reward, on the prompts of every evaluation.
function evaluated(run) {
  for (const [pattern, text] of [[/^eval\/(?!final\/)(?:[^/]+\/)?accuracy_lenient$/, "Accuracy"], [/^eval\/(?!final\/)(?:[^/]+\/)?reward$/, "Reward, evaluation"], [/^eval\/accuracy$/, "Accuracy, evaluation"], [/^eval\/loss$/, "Loss, evaluation"]]) {
    const name = Object.keys(run.metrics).find((each) => pattern.test(each));
    if (!name) continue;
    const prompts = latest(run, name.replace(/[^/]+$/, "num_prompts"));
    return tile(text, change(run, name), [prompts === null ? "" : `${count(prompts, "prompt")}, `, whole(pieces(name))]);
  }
  return null;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function tiles(run) {
  const total = Number(run.total_steps);
  const step = run.step ?? 0;
  const sum = (name) => (run.metrics[name] ?? []).reduce((a, b) => a + (b ?? 0), 0);
  const compile = sum("time/compile_s");
  return el("dl", { class: "tiles" },
    tile("State", run.state, run.updated ? `last metric ${run.updated.replace("T", " ").replace("Z", " UTC")}` : "no metrics yet"),
    tile("Step", total ? `${step.toLocaleString("en")} of ${total.toLocaleString("en")}` : step.toLocaleString("en")),
    evaluated(run),
    latest(run, "reward/mean") === null ? null : tile("Reward", change(run, "reward/mean"), "first step → last step"),
    latest(run, "throughput/tokens_per_s") === null ? null : tile("Throughput", `${short(latest(run, "throughput/tokens_per_s"), 3)} tokens/s`, "last step"),
    sum("time/step_s") ? tile("Time in steps", duration(sum("time/step_s")), compile >= 1 ? `${duration(compile)} of it compiling` : null) : null);
}

function what(run) {
  const task = setting(run, "run.task") ?? "rl";
  const parts = ["model.path", ...(task === "rl" ? ["data.train", "advantage.estimator", "update.loss"] : [`${task}.data`, `${task}.loss`])].map((key) => [key, setting(run, key)]).filter(([, value]) => value !== null);
  return el("p", { class: "what" }, parts.map(([key, value], i) => [i ? " · " : "", el("span", { title: key }, whole(pieces(asText(value))))]));
}

const noteList = (notes) => (notes.length ? el("ul", { class: "notes" }, notes.map((note) => el("li", {}, prose(note)))) : null);

function overviewSection() {
  const places = state.runs.map(() => {
    const starts = el("div", {});
    return { numbers: el("div", {}), hints: el("div", {}), starts, made: el("details", { class: "made" }, el("summary", {}, "Command, versions, commit and devices"), starts) };
  });
  const host = el("div", { id: "overview-content" }, places.map(({ numbers, hints, made }) => el("div", { class: "run" }, numbers, hints, made)));
  const numbers = (run) => [state.runs.length > 1 ? el("h3", {}, run.name) : null, what(run), tiles(run)];
  const fill = () => state.runs.forEach((run, i) => {
    places[i].numbers.replaceChildren(...numbers(run).filter(Boolean));
    renew(places[i].hints, [run.hints, run.notes], () => [hintList(i), noteList(run.notes)]);
    places[i].made.hidden = !run.starts.length;
    renew(places[i].starts, run.starts, () => run.starts.map(startTable));
  });
  return [host, fill];
}

// Command, versions, commits and devices of one start of a run, as `run.json` has them.
function startTable(rows, i) {
  const row = ([name, text]) => el("tr", {}, el("td", {}, name), el("td", { class: "wide value" }, whole(pieces(text))));
  return table([`Start ${i + 1}`, ""], rows.map(row), { "aria-label": `Start ${i + 1}` });
}

function hintList(i) {
  const { hints } = state.runs[i];
  if (!hints.length) return null;
  return el("ul", { class: "hints" }, hints.map((hint) => el("li", {},
    hint.step === null ? null : button({ class: "link number", title: "Read the completions of this step", onclick: () => { openRun(i); openStep(hint.step); } }, `step ${hint.step}`),
    el("span", { class: "badge" }, hint.hint), el("span", {}, prose(hint.text)))));
}

function openRun(i) {
  if (i === view.run) return;
  Object.assign(view, { run: i, step: null });
  $("run").value = i;
  refreshCompletions();
  searchAll();
}

function planSection() {
  const host = el("div", {});
  const value = (v) => (v === null ? "–" : typeof v === "object" ? `${short(v.min)} to ${short(v.max)}` : short(v));
  const row = ({ key, value: v, unit, why }) => el("tr", {}, el("td", {}, code(key)), el("td", { class: "number" }, value(v)), el("td", {}, asText(unit)), el("td", { class: "wide" }, prose(asText(why))));
  const render = ({ plan }) => (plan === null
    ? el("p", { class: "empty" }, prose("This run has no plan.json: it was `quatrain sft`, or comes from a version that did not write it. `quatrain plan` prints the plan of a configuration."))
    : el("div", {}, noteList(plan.warnings), table(["Size", "Value", "Unit", "Why"], plan.rows.map(row), { "aria-label": "Plan" })));
  return [host, () => renew(host, state.runs.map((run) => run.plan), () => perRun(render))];
}

function configSection() {
  let shown = "changed", query = "";
  const host = el("div", { id: "config-content" });
  const kinds = { changed: "differs from the default", derived: "and derived", every: "all keys" };
  const wanted = (row) => (shown === "every" || row.changed || (shown === "derived" && row.derived)) && `${row.key} ${asText(row.value)}`.toLowerCase().includes(needle(query));
  const row = (each) => el("tr", { class: each.changed ? "changed" : null }, el("td", {}, code(each.key)), el("td", { class: "wide value" }, whole(pieces(asText(each.value)))), el("td", { class: "wide value muted" }, whole(pieces(asText(each.default)))), el("td", { class: "muted" }, each.layer));
  const fill = () => {
    chips.replaceChildren(...Object.entries(kinds).map(([name, text]) => button({ "aria-pressed": String(shown === name), onclick: () => { shown = name; fill(); } }, text)));
    renew(host, [shown, query, state.runs.map((run) => run.config)], () => perRun(({ config }) => {
      const rows = config.filter(wanted);
      return rows.length ? table(["Key", "Value", "Default", "From"], rows.map(row), { "aria-label": "Configuration" }) : el("p", { class: "empty" }, config.length ? "No key matches." : "The configuration could not be read.");
    }));
  };
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Keys" });
  const search = searchField("Search keys", "config-search", "Search keys and values", (value) => { query = value; fill(); });
  return [el("div", { class: "bar" }, chips, search), host, fill];
}

function differingSection() {
  const host = el("div", { id: "differing" });
  const fill = () => {
    const rows = state.data.differing;
    renew(host, rows, () => [rows.length
      ? table(["Key", ...state.runs.map((run) => run.name)], rows.map((row) => el("tr", {}, el("td", {}, code(row.key)), row.values.map((v) => el("td", { class: "value wide" }, whole(pieces(asText(v))))))), { "aria-label": "Keys that differ" })
      : el("p", { class: "empty" }, "The configurations of these runs are the same.")]);
  };
  return [host, fill];
}

function metricsSection() {
  let query = "";
  const open = new Map();
  const host = el("div", { id: "metrics-content" });
  const named = (name) => state.data.described[name] ?? ["", "Not in the catalogue of metrics."];
  const toggle = (name, row) => {
    const there = open.get(name);
    if (there) { there.chart.destroy(); there.row.remove(); open.delete(name); return; }
    const chart = new Chart(name, named(name)[0], () => ({ series: seriesOf([name]), log: true }), { onStep: openStep });
    const extra = el("tr", { class: "opened" }, el("td", { colspan: 5 }, chart.figure));
    row.after(extra);
    open.set(name, { chart, row: extra });
  };
  const ends = (name) => [firstOf, latest].map((end) => state.runs.map((run) => short(end(run, name))).join(" | "));
  const line = (name) => {
    const row = el("tr", { "data-metric": name }, el("td", {}, button({ class: "link", title: "Show or hide its curve", onclick: () => toggle(name, row) }, code(name))),
      ends(name).map((value) => el("td", { class: "number" }, value)), el("td", {}, named(name)[0]), el("td", { class: "wide muted" }, prose(named(name)[1])));
    return row;
  };
  const fill = () => {
    const sought = needle(query);
    const names = metricNames().filter((name) => name.toLowerCase().includes(sought)).sort();
    renew(host, names, () => {
      for (const { chart } of open.values()) chart.destroy();
      open.clear();
      return [names.length ? table(["Metric", "First", "Last", "Unit", "Meaning"], names.map(line), { "aria-label": "All metrics" }) : el("p", { class: "empty" }, "No metric matches.")];
    });
    for (const row of host.querySelectorAll("[data-metric]")) ends(row.dataset.metric).forEach((value, i) => { row.cells[i + 1].textContent = value; });
    for (const { chart } of open.values()) chart.draw();
  };
  const search = searchField("Filter metrics by name", "metric-filter", "Filter by name", (value) => { query = value; fill(); });
  return [el("div", { class: "bar" }, search, el("span", { class: "aside" }, "A click on a name shows its curve.")), host, fill];
}
