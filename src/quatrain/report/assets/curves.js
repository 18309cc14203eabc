// Says which metrics share a chart, and lays the charts out.

const STAGES = ["rollout", "wait_rollout", "copy_weights", "place_weights", "reward", "token_scores", "advantage", "update", "eval", "checkpoint"];
const PLAIN = [
  { title: "Reward", unit: "mean of a step", of: ["reward/mean", "reward/greedy/mean"] },
  { title: "Reward by function", unit: "unweighted mean of a step", match: /^reward\/(?!greedy\/)(.+)\/mean$/ },
  { title: "Accuracy, evaluation", unit: "fraction of completions", match: /^eval\/(?:.+\/)?(?:accuracy_(?:lenient|strict)|mean_at_n|pass_at_n)$/ },
  { title: "Reward, evaluation", unit: "mean", match: /^eval\/(?!(?:.+\/)?(?:episode|agent)\/)(?:.+\/)?reward(?:\/[^/]+)?$/ },
  { title: "Length", unit: "tokens", of: ["length/completion/mean", "length/completion/max", "length/prompt/mean"], match: /^eval\/(?:.+\/)?completion_length$/ },
  { title: "Turns", unit: "of the policy, per episode", of: ["episode/turns/mean", "episode/turns/max", "agent/turns/mean", "agent/turns/max"] },
  { title: "Truncated completions", unit: "fraction", of: ["rollout/truncated_fraction"], match: /^eval\/(?:.+\/)?truncated_fraction$/ },
  { title: "Entropy", unit: "nats per token", of: ["update/entropy"] },
  { title: "KL", unit: "nats per token", of: ["update/kl", "reward/kl", "update/behaviour_kl"] },
  { title: "Probability ratio", unit: "current to old policy", of: ["update/ratio_mean", "update/ratio_max"] },
  { title: "Clipped tokens", unit: "fraction", of: ["update/clip_fraction", "update/clip_low_fraction", "update/clip_high_fraction", "update/clip_dual_fraction", "update/corrected_fraction"] },
  { title: "Log-probability gap, sampler to trainer", unit: "nats per token", of: ["rollout/logprob_diff_mean", "rollout/logprob_diff_max"], log: true },
  { title: "Groups without signal", unit: "fraction", of: ["advantage/zero_signal_fraction"] },
  { title: "Loss", unit: "nats", of: ["loss", "update/policy_loss", "eval/loss"] },
  { title: "Pairs judged as in the data", unit: "fraction", of: ["dpo/accuracy", "rm/accuracy", "eval/accuracy"] },
  { title: "Margin of rewards", unit: "better answer less the other", of: ["dpo/margin", "rm/margin", "eval/margin"] },
  { title: "Rewards of answers", unit: "mean", of: ["dpo/reward_chosen", "dpo/reward_rejected", "rm/reward_mean", "rm/reward_min", "rm/reward_max"] },
  { title: "Gradient norm", unit: "before clipping", of: ["update/grad_norm", "critic/grad_norm"], log: true },
  { title: "Learning rate", unit: "", of: ["update/learning_rate", "critic/learning_rate"] },
  { title: "Critic", unit: "explained variance", of: ["critic/explained_variance"] },
  { title: "Throughput", unit: "tokens/s", of: ["throughput/tokens_per_s", "rollout/tokens_per_s", "throughput/update_tokens_per_s"] },
  { title: "Compile time", unit: "s", of: ["time/compile_s"] },
];

// What step 0 has of training itself: other metrics of that step, as the loss, are those of the warm start's last step.
const BEFORE_TRAINING = /^(eval|time)\//;

const metricNames = () => [...new Set(state.runs.flatMap((run) => Object.keys(run.metrics)))];

// Names in a legend: each without what all of them share or what is evident; the whole names if that leaves two the same.
function labels(names) {
  const alone = names.every((name) => name.startsWith("eval/"));
  const short = names.map((name) => (alone ? name.slice(5) : name).replace(/^(update|rollout|length|throughput|advantage|episode)\//, "")
    .replace(/\/mean$/, "").replace(/^reward\/(?=.)/, "").replace(/_fraction$/, ""));
  return names.map((name, i) => (short.indexOf(short[i]) === short.lastIndexOf(short[i]) ? short[i] : name));
}

// One line for each run that has the metric: the run has a colour and the metric a dash; of one run, metrics have colours.
function seriesOf(names, { fromStep = 0 } = {}) {
  const several = state.runs.length > 1;
  const ofFinal = names.length === 2 && names[1].replace("final/", "") === names[0];
  const named = several && (ofFinal || names.length === 1) ? ["", "final"] : labels(names);
  return names.flatMap((name, n) => state.runs.flatMap((run, r) => (run.metrics[name] ? [{
    name, steps: run.steps, nonFinite: run.non_finite[name],
    values: run.metrics[name].map((value, i) => (run.steps[i] < fromStep && !BEFORE_TRAINING.test(name) ? null : value)),
    label: several ? `${run.name} ${named[n]}`.trim() : named[n],
    colour: colour(several ? r : n), dash: DASHES[(several ? n + Math.floor(r / 8) : Math.floor(n / 8)) % DASHES.length],
  }] : [])));
}

function stageSeries(run) {
  const names = STAGES.filter((stage) => run.metrics[`time/${stage}_s`] && !(stage === "rollout" && run.metrics["time/wait_rollout_s"]));
  return names.map((stage, i) => ({
    name: `time/${stage}_s`, label: stage, steps: run.steps, values: run.metrics[`time/${stage}_s`], colour: colour(i),
  }));
}

function chartNote(names) {
  const known = state.data.described;
  return names.map((name) => (known[name] ? `${name}: ${known[name][1]}` : name)).join("\n");
}

// [title, unit, metric names, log] of each chart that has data. Of several runs, each metric of a crowded chart has its own,
// together with its value in the final evaluation.
function chartPlans() {
  const present = metricNames().filter((name) => seriesOf([name], { fromStep: 1 }).some((s) => s.nonFinite || s.values.some((v) => v !== null)));
  const plans = [];
  for (const chart of PLAIN) {
    const listed = (chart.of ?? []).filter((name) => present.includes(name));
    const names = [...listed, ...present.filter((name) => chart.match && chart.match.test(name))];
    if (!names.length) continue;
    const finals = (name) => names.filter((each) => each !== name && each.replace("final/", "") === name);
    const first = names.filter((name) => !names.some((each) => finals(each).includes(name)));
    if (state.runs.length > 1 && names.length > 2) {
      labels(first).forEach((label, n) => plans.push([`${chart.title}: ${label}`, chart.unit, [first[n], ...finals(first[n])], chart.log]));
    } else plans.push([chart.title, chart.unit, names, chart.log]);
  }
  return plans;
}

function curvesSection() {
  const grid = el("div", { class: "charts" });
  const smooth = el("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing", "aria-label": "Smoothing of the curves",
    oninput: (event) => { smoothing = Number(event.target.value); $("smoothing-value").textContent = smoothing ? smoothing.toFixed(2) : "off"; redrawCharts(); },
  });
  const bar = el("div", { class: "bar" },
    el("label", { class: "field" }, "Smoothing ", smooth, el("output", { id: "smoothing-value", class: "number" }, "off")),
    button({ id: "reset-zoom", hidden: true, onclick: () => setZoom(null) }, "Show all steps"),
    el("span", { class: "aside" }, "Drag over a curve to zoom in; click it to read the completions of that step."));
  return [bar, grid, () => fillCurves(grid)];
}

let planned = "";

// Draws the charts anew; they are made anew only if other metrics have come.
function fillCurves(grid) {
  const steps = state.runs.flatMap((run) => run.steps);
  stepRange = steps.length ? [Math.min(...minmax(steps)), Math.max(...minmax(steps), 1)] : [0, 1];
  const plans = chartPlans();
  const signature = JSON.stringify([plans, state.runs.map((run) => stageSeries(run).length)]);
  if (signature === planned) { redrawCharts(); return; }
  planned = signature;
  for (const chart of [...charts]) if (grid.contains(chart.figure)) chart.destroy();
  const made = plans.map(([title, unit, names, log]) => new Chart(title, unit, () => ({ series: seriesOf(names, { fromStep: 1 }), log }), { onStep: openStep, note: chartNote(names) }));
  state.runs.forEach((run, i) => {
    if (!stageSeries(run).length) return;
    const title = state.runs.length > 1 ? `Seconds by stage: ${run.name}` : "Seconds by stage";
    made.push(new Chart(title, "s, stacked", () => ({ series: stageSeries(state.runs[i]), stacked: true }), { onStep: openStep }));
  });
  grid.replaceChildren(...made.map((chart) => chart.figure));
  if (!made.length) grid.append(el("p", { class: "empty" }, "No metrics have been written yet."));
}

const minmax = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
