// The training completions: step → prompt → its group side by side; search over all steps, and filters.

const FILTERS = {
  all: ["all", null],
  wrong_rewarded: ["wrong but rewarded", "The answer is wrong and the reward is above 0."],
  wrong_pushed: ["wrong but pushed up", "The answer is wrong and the advantage is above 0: the update makes it more likely."],
  truncated: ["truncated", "The completion was cut at rollout.max_new_tokens."],
  failed: ["environment failed", "An error or a timeout of the environment ended the episode."],
  no_signal: ["no signal", "Every advantage of the group is 0: nothing is learned from it."],
};
const MOST_RESULTS = 200;
const view = { run: 0, step: null, group: 0, groups: null, filter: "all", query: "", by: "none", search: 0, tall: false };

const stepSummaries = () => state.runs[view.run].samples.step.steps;

function holds(name, group, sample) {
  if (name === "all") return true;
  return name === "no_signal" ? group.no_signal : sample.flags.includes(name);
}

function shownSamples(group) {
  const sought = needle(view.query);
  return group.samples.filter((sample) => holds(view.filter, group, sample) && matches(sample, group, sought));
}

const shownGroups = () => (view.groups ?? []).map((group, place) => ({ group, place })).filter(({ group }) => shownSamples(group).length);

function completionsSection() {
  const results = el("div", { id: "results", hidden: true });
  const body = el("div", { class: "split" },
    el("ol", { id: "prompts", class: "prompts", "aria-label": "Prompts of this step" }),
    el("div", { id: "group", class: "group" }));
  const bar = el("div", { class: "bar", id: "completions-bar" }, runChoice(), stepChoice(), searchBox(), colourChoice());
  const filters = el("div", { class: "chips", id: "filters", role: "group", "aria-label": "Filter" });
  const content = el("div", { id: "completions-content" }, bar, filters, results, body);
  watchTokens(content);
  return [el("p", { id: "completions-note", class: "aside" }), content, () => refreshCompletions()];
}

function runChoice() {
  if (state.runs.length < 2) return null;
  return choice("Run ", "run", state.runs.map((run, i) => [i, run.name]), (value) => openRun(Number(value)));
}

function stepChoice() {
  const move = (by, text, name) => button({ id: name, "aria-label": by < 0 ? "Step before" : "Step after", onclick: () => moveStep(by) }, text);
  return el("div", { class: "field steps" }, el("label", { for: "step" }, "Step"), move(-1, "‹", "step-before"),
    el("input", { type: "number", id: "step", inputmode: "numeric", onchange: (event) => openNearest(Number(event.target.value)) }),
    move(1, "›", "step-after"),
    el("input", { type: "range", id: "step-range", min: 0, "aria-label": "Step", oninput: (event) => showStep(stepSummaries()[Number(event.target.value)].step) }),
    el("span", { id: "step-count", class: "number", role: "status" }));
}

function searchBox() {
  let timer = null;
  return searchField("Search the completions of all steps", "search", "Search all steps ( / )", (value) => {
    Object.assign(view, { query: value, result: -1, awaited: false });
    clearTimeout(timer);
    timer = setTimeout(() => { showStepBody(); searchAll(); }, value && 200);
  }, openResult);
}

// Opens the next result of the search, or the one before; the first, if there is none yet, as soon as it is found.
function openResult(by) {
  const found = view.query === view.searched ? [...$("results").querySelectorAll("li button")] : [];
  const from = Math.max(view.result, by < 0 ? 0 : -1);
  if (found.length) found[(from + by + found.length) % found.length].click();
  else view.awaited = true;
}

const colourChoice = () => choice("Colour tokens by ", "colour", Object.entries(COLOURS), (value) => { view.by = value; showGroup(); }, { id: "colour-field", hidden: true });

function showFilters() {
  const steps = stepSummaries();
  const judged = steps.some((s) => s.judged);
  const accuracy = setting(state.runs[view.run], "eval.accuracy");
  const remedy = accuracy ? `give \`${accuracy}\` (\`eval.accuracy\`) a weight, which may be 0` : "name one in `eval.accuracy`";
  const entry = ([name, [text, meaning]]) => {
    const number = steps.reduce((sum, s) => sum + (s[name] ?? 0), 0);
    return button({
      "data-filter": name, "aria-pressed": String(view.filter === name), title: meaning, onclick: () => setFilter(name),
    }, text, name === "all" ? null : tally(number, name !== "no_signal" ? "" : number === 1 ? " group" : " groups"));
  };
  const offered = ([name]) => view.filter === name || !{ failed: !steps.some((s) => s.failed), wrong_rewarded: !judged, wrong_pushed: !judged }[name];
  $("filters").replaceChildren(...Object.entries(FILTERS).filter(offered).map(entry),
    judged ? "" : el("span", { class: "aside" }, prose(`No function in \`reward.functions\` decides what is right, so there is no filter “wrong but rewarded”: ${remedy}.`)));
}

function setFilter(name) {
  view.filter = name;
  showFilters();
  searchAll();
  const summary = stepSummaries().find((s) => s.step === view.step);
  if (name !== "all" && summary && !summary[name]) {
    const next = matchingStep(1) ?? matchingStep(-1);
    if (next !== null) { showStep(next); return; }
  }
  view.group = 0;
  showStepBody();
}

// The next step in a direction that has something the filter leaves.
function matchingStep(by) {
  const steps = stepSummaries();
  for (let i = steps.findIndex((s) => s.step === view.step) + by; i >= 0 && i < steps.length; i += by) {
    if (view.filter === "all" || steps[i][view.filter]) return steps[i].step;
  }
  return null;
}

function moveStep(by) {
  const step = matchingStep(by);
  if (step !== null) showStep(step);
}

function moveGroup(by) {
  const shown = shownGroups();
  const next = shown[Math.max(0, Math.min(shown.length - 1, shown.findIndex(({ place }) => place === view.group) + by))];
  if (!next || next.place === view.group) return;
  view.group = next.place;
  showStepBody();
}

function openNearest(step) {
  const steps = stepSummaries();
  if (!steps.length || Number.isNaN(step)) return;
  showStep(steps.reduce((best, s) => (Math.abs(s.step - step) < Math.abs(best.step - step) ? s : best)).step);
}

// From a curve or a hint: the completions of a step, or of the nearest step with completions.
function openStep(step) {
  openNearest(step);
  $("completions").scrollIntoView({ behavior: "instant" });
}

let asked = 0;

async function showStep(step, group = 0) {
  const request = ++asked;
  view.step = step;
  showPlace();
  const groups = await groupsOf(view.run, "step", step);
  if (request !== asked) return; // the reader has gone on to another step
  view.groups = groups ?? [];
  view.group = group;
  showStepBody();
  if (!LIVE) history.replaceState(null, "", `#step=${step}`);
}

function showPlace() {
  const steps = stepSummaries();
  const at = steps.findIndex((s) => s.step === view.step);
  $("step").value = view.step;
  $("step-range").max = Math.max(0, steps.length - 1);
  $("step-range").value = at;
  $("step-count").textContent = `${at + 1} of ${steps.length}`;
  $("step-before").disabled = matchingStep(-1) === null;
  $("step-after").disabled = matchingStep(1) === null;
}

function showStepBody() {
  showPlace();
  const shown = shownGroups();
  if (!shown.some(({ place }) => place === view.group)) view.group = shown.length ? shown[0].place : 0;
  $("prompts").replaceChildren(...shown.map(({ group, place }) => promptEntry(group, place)));
  keepInView($("prompts"), $("prompts").querySelector("[aria-current]"));
  showGroup();
}

function promptEntry(group, place) {
  const known = group.samples.map((s) => s.reward).filter((reward) => reward !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  return el("li", {}, button({ "aria-current": place === view.group ? "true" : null, onclick: () => { view.group = place; showStepBody(); } },
    el("span", { class: "number", title: "mean reward of the group" }, short(mean, 3)),
    el("span", { class: "line" }, promptLine(group)), group.no_signal ? badge("no signal", "") : null));
}

function showGroup() {
  const group = view.groups?.[view.group];
  const shown = group ? shownSamples(group) : [];
  if (!shown.length) {
    $("group").replaceChildren(el("p", { class: "empty" }, view.groups?.length ? "No completion of this step matches the search and the filter." : "This step has no completions."));
    return;
  }
  const expected = Number(setting(state.runs[view.run], "rollout.n"));
  const partly = expected > group.samples.length ? `, of ${expected} that were sampled (logging.samples_per_step)` : "";
  const hidden = group.samples.length - shown.length;
  $("group").replaceChildren(
    el("div", { class: "group-head" }, el("h3", {}, `Prompt ${group.id}`, group.set ? `, ${group.set}` : ""),
      el("span", { class: "aside" }, `${count(group.samples.length, "completion")}${partly}${hidden ? `; ${hidden} hidden by the search or filter` : ""}`),
      button({ class: "small", "aria-pressed": String(view.tall), onclick: () => { view.tall = !view.tall; showGroup(); } }, "full height")),
    ...promptAndColumns(group, view.query),
    el("div", { class: `cards${view.tall ? " tall" : ""}${shown.some((s) => s.turns) ? " wide" : ""}` }, shown.map((s) => card(s, group))));
  showMarks($("group"));
}

// What a group shares, or what a sample has of its own.
function promptAndColumns({ prompt, columns }, query) {
  return [prompt === undefined ? null : el("div", { class: "prompt" }, conversation(prompt, query)), columns ? columnList(columns, query) : null].filter(Boolean);
}

const completionBox = (sample, label, body) => el("div", { class: "body", tabindex: 0, role: "group", "aria-label": `${sample.turns ? "Episode" : "Completion"}${label}` }, body);

function card(sample, group) {
  const alone = { prompt: group.prompt === undefined ? sample.prompt : undefined, columns: group.columns ? null : sample.columns };
  return el("article", { class: "card" }, facts(sample), promptAndColumns(alone, view.query),
    completionBox(sample, "", completionBody(sample, view.by, view.query, view.tall)));
}

// Unpacks one step after another, so that results appear while the rest is still searched.
async function searchAll() {
  const search = ++view.search;
  const sought = needle(view.query);
  const host = $("results");
  host.hidden = !sought;
  Object.assign(view, { searched: view.query, result: -1 });
  if (!sought) return;
  const list = el("ol", {});
  const said = el("p", { role: "status" });
  host.replaceChildren(said, list);
  const steps = stepSummaries();
  let found = 0, listed = 0, inSteps = 0, done = 0;
  for (const { step } of steps) {
    const name = `${view.run}-step-${step}`;
    const groups = kept.get(name) ?? await fetchGroups(name) ?? [];
    if (search !== view.search) return; // the reader has typed on
    const before = found;
    for (const [place, group] of groups.entries()) {
      const hits = shownSamples(group);
      const own = hits.filter((sample) => saysItself(sample, sought)); // what only the prompt or a column says is listed once
      found += hits.length;
      listed += own.length || Math.min(1, hits.length);
      for (const sample of own.length ? own : hits.slice(0, 1)) {
        if (list.childElementCount < MOST_RESULTS) list.append(result(step, place, group, sample, sought, list.childElementCount));
      }
    }
    if (found > before && view.awaited) { view.awaited = false; openResult(1); }
    inSteps += found > before ? 1 : 0;
    done += 1;
    if (done % 8 && done !== steps.length) continue;
    const more = listed > MOST_RESULTS ? `, the first ${MOST_RESULTS} below` : "";
    said.textContent = `${count(found, "completion")} in ${count(inSteps, "step")}${more}${done < steps.length ? `; ${done} of ${steps.length} steps searched` : ""}`;
  }
}

function result(step, place, group, sample, sought, number) {
  const source = textsOf(sample).find((each) => each.toLowerCase().includes(sought)) ?? "";
  const at = source.toLowerCase().indexOf(sought);
  const text = at < 0 ? promptLine(group) : source.slice(Math.max(0, at - 40), at + sought.length + 60).replace(/\s+/g, " ");
  const open = (event) => {
    const list = event.currentTarget.closest("ol");
    view.result = number;
    list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    event.currentTarget.setAttribute("aria-current", "true");
    keepInView(list, event.currentTarget);
    showStep(step, place);
  };
  return el("li", {}, button({ onclick: open },
    el("span", { class: "number" }, `step ${step}`), el("span", { class: "number" }, short(sample.reward, 3)),
    el("span", { class: "line" }, marked(text, sought))));
}

// What of the samples the page does not hold, and how to see it.
function leftOut(run) {
  const said = [], gone = state.data.left_out_pictures;
  if (gone) said.push(`${count(gone, "picture")} of earlier steps are left out of this page; \`quatrain report ${run.name} --serve\` shows every one.`);
  for (const [kind, what, option] of [["step", "completions", ""], ["eval", "evaluation completions", " --eval"]]) {
    const index = run.samples[kind];
    if (index.left_out_samples) {
      said.push(`${count(index.left_out_samples, what.replace(/s$/, ""), what)} in ${count(index.left_out_steps, "whole step")} and at the end of long files are left out of this page, `
        + `because the files hold ${Math.round(index.num_bytes / 2 ** 20)} MiB and a page at most ${Math.round(index.cap_bytes / 2 ** 20)} MiB; `
        + `\`quatrain samples ${run.name}${option} --step N\` prints every one, and \`quatrain report ${run.name} --serve\` shows every step.`);
    }
    if (index.damaged) said.push(`${count(index.damaged, "damaged line")} in the files of ${what} were skipped.`);
  }
  return said;
}

async function refreshCompletions() {
  const run = state.runs[view.run];
  const steps = stepSummaries();
  $("completions-content").hidden = !steps.length;
  const none = "This run has no samples: logging.samples_per_step was 0, or no step has finished.";
  $("completions-note").replaceChildren(...(steps.length ? leftOut(run) : [none]).map((text) => el("span", {}, prose(text))));
  if (!steps.length) return;
  $("colour-field").hidden = !steps.some((s) => s.tokens);
  showFilters();
  const stays = steps.find((s) => s.step === view.step);
  if (stays && kept.has(`${view.run}-step-${view.step}`)) { showPlace(); return; }
  const wanted = Number((location.hash.match(/step=(\d+)/) ?? [])[1]);
  const start = stays ?? steps.find((s) => s.step === wanted) ?? steps.at(-1);
  await showStep(start.step, stays ? view.group : 0);
}
