// The evaluation completions of two steps side by side, paired by prompt and sample.

const OUTCOMES = { fixed: "became right", broken: "became wrong", right: "stayed right", wrong: "stayed wrong" };
const OUTCOMES_BY_REWARD = { rose: "reward rose", fell: "reward fell", same: "reward stayed" };
const PAIRS_AT_ONCE = 20;
const evaluation = { run: 0, before: null, after: null, pairs: [], outcome: "all", query: "", shown: PAIRS_AT_ONCE, loaded: "" };

const evalSteps = () => state.runs[evaluation.run].samples.eval.steps;

function evaluationSection() {
  const choose = (key, text) => choice(text, `eval-${key}`, [], (value) => { evaluation[key] = Number(value); loadPairs(); });
  const runs = state.runs.length < 2 ? null : choice("Run ", "eval-run", state.runs.map((run, i) => [i, run.name]),
    (value) => { Object.assign(evaluation, { run: Number(value), before: null, after: null }); refreshEvaluation(); });
  const search = searchField("Search the evaluation completions", "eval-search", "Search", (value) => { Object.assign(evaluation, { query: value, shown: PAIRS_AT_ONCE }); showPairs(); }, () => movePair(1));
  const content = el("div", { id: "eval-content" },
    el("div", { class: "bar" }, runs, choose("before", "Before: step "), choose("after", "After: step "), search),
    el("div", { class: "chips", id: "outcomes", role: "group", "aria-label": "Filter" }),
    el("div", { id: "pairs" }), button({ id: "more-pairs", onclick: () => { evaluation.shown += PAIRS_AT_ONCE; showPairs(); } }, "Show more"));
  return [el("p", { id: "eval-note", class: "aside" }), content, () => refreshEvaluation()];
}

async function refreshEvaluation() {
  const steps = evalSteps();
  $("eval-content").hidden = !steps.length;
  $("eval-note").textContent = steps.length ? "" : "This run has no evaluation completions: it was not evaluated, or comes from a version that did not write them.";
  if (!steps.length) return;
  const latest = steps.at(-1).step;
  if (evaluation.after === null || evaluation.after === evaluation.latest) evaluation.after = latest;
  evaluation.before ??= steps[0].step;
  evaluation.latest = latest;
  for (const key of ["before", "after"]) {
    $(`eval-${key}`).replaceChildren(...steps.map((s) => el("option", { value: s.step, selected: s.step === evaluation[key] }, optionText(s))));
  }
  await loadPairs();
}

const optionText = (summary) => `${summary.step}${summary.judged ? `, ${summary.correct} of ${summary.judged} right` : ""}`;

// The samples of an evaluation by set, prompt and number.
const flatEval = (groups) => new Map((groups ?? []).flatMap((group) => group.samples.map((sample) =>
  [JSON.stringify([sample.set ?? "", group.id, sample.sample ?? 0, sample.greedy ?? true]), { group, sample }])));

async function loadPairs() {
  const { run, before, after } = evaluation;
  const signature = JSON.stringify([run, before, after, evalSteps().filter((s) => s.step === before || s.step === after)]);
  if (signature === evaluation.loaded) return;
  const [first, last] = await Promise.all([groupsOf(run, "eval", before), groupsOf(run, "eval", after)]);
  if (run !== evaluation.run || before !== evaluation.before || after !== evaluation.after) return;
  const [one, two] = [flatEval(first), flatEval(last)];
  evaluation.loaded = signature;
  evaluation.pairs = [...new Set([...one.keys(), ...two.keys()])].map((key) => ({ before: one.get(key), after: two.get(key) }));
  showPairs();
}

function inOutcome({ before, after }, name) {
  if (name === "all") return true;
  if (name === "alone") return !before || !after;
  if (name === "truncated") return after?.sample.finish_reason === "length";
  const key = name in OUTCOMES ? "correct" : "reward";
  const [was, is] = [before?.sample[key] ?? null, after?.sample[key] ?? null];
  if (was === null || is === null) return false;
  if (key === "reward") return name === (is > was ? "rose" : is < was ? "fell" : "same");
  return name === (was === is ? (is ? "right" : "wrong") : (is ? "fixed" : "broken"));
}

function showPairs() {
  const { pairs } = evaluation;
  const chip = ([name, text]) => button({
    "data-outcome": name, "aria-pressed": String(evaluation.outcome === name),
    onclick: () => { Object.assign(evaluation, { outcome: name, shown: PAIRS_AT_ONCE }); showPairs(); },
  }, text, tally(pairs.filter((pair) => inOutcome(pair, name)).length));
  const judged = pairs.some(({ before, after }) => [before, after].some((side) => (side?.sample.correct ?? null) !== null));
  const outcomes = { all: "all", ...(judged ? OUTCOMES : OUTCOMES_BY_REWARD), truncated: "truncated after", alone: "not in both" };
  if (evaluation.outcome !== "alone" && !pairs.some((pair) => inOutcome(pair, "alone"))) delete outcomes.alone;
  if (!(evaluation.outcome in outcomes)) evaluation.outcome = "all";
  $("outcomes").replaceChildren(...Object.entries(outcomes).map(chip));
  const sought = needle(evaluation.query);
  const found = pairs.filter((pair) => inOutcome(pair, evaluation.outcome)
    && [pair.before, pair.after].some((side) => side && matches(side.sample, side.group, sought)));
  $("pairs").replaceChildren(...found.slice(0, evaluation.shown).map((pair, i) => pairArticle(pair, found[i - 1])));
  showMarks($("pairs"));
  if (!found.length) $("pairs").append(el("p", { class: "empty" }, "No completion matches the search and the filter."));
  $("more-pairs").hidden = found.length <= evaluation.shown;
  $("more-pairs").textContent = `Show more (${(found.length - evaluation.shown).toLocaleString("en")} left)`;
}

const promptOf = ({ before, after }) => JSON.stringify([(after ?? before).sample.set, (after ?? before).group.id]);

// A prompt stands once above the pairs of its samples.
function pairArticle(pair, previous) {
  const { group, sample } = pair.after ?? pair.before;
  const side = (name, step, one) => el("div", { class: "card" }, el("h4", {}, `${name}, step ${step}`),
    one ? [facts(one.sample), completionBox(one.sample, ` ${name}`, completionBody(one.sample, "none", evaluation.query))]
      : el("p", { class: "empty" }, "not among the prompts of this evaluation"));
  const head = previous && promptOf(previous) === promptOf(pair) ? [] : [
    el("h3", {}, sample.set ? `${sample.set}, prompt ${group.id}` : `Prompt ${group.id}`),
    promptAndColumns({ prompt: group.prompt ?? sample.prompt, columns: group.columns ?? sample.columns }, evaluation.query)];
  return el("article", { class: `pair${head.length ? "" : " more"}`, tabindex: -1 }, head,
    el("div", { class: "cards two" }, side("before", evaluation.before, pair.before), side("after", evaluation.after, pair.after)));
}

function movePair(by) {
  const pairs = [...document.querySelectorAll("#pairs .pair")];
  const at = pairs.indexOf(document.activeElement);
  const next = pairs[Math.max(0, Math.min(pairs.length - 1, at + by))];
  if (!next) return;
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "start", behavior: "instant" });
}
