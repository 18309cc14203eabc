// Shows texts that a model or a data set wrote: as text nodes, with what was searched for marked, tokens coloured.

const COLOURS = {
  none: "no colour",
  logprob: "log-probability (sampler)",
  gap: "gap, trainer − sampler",
  taught: "gap, teacher − sampler",
  advantage: "advantage",
};

const needle = (query) => query.trim().toLowerCase();

// Text nodes of `text`, with each place of `query` in a <mark>.
function marked(text, query) {
  const sought = needle(query || "");
  if (!sought) return [text];
  const lower = text.toLowerCase();
  if (lower.length !== text.length) return [text]; // a letter whose lower case is longer would move the marks
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(sought); at >= 0 && parts.length < 2000; at = lower.indexOf(sought, from)) {
    if (at > from) parts.push(text.slice(from, at));
    parts.push(el("mark", {}, text.slice(at, at + sought.length)));
    from = at + sought.length;
  }
  parts.push(text.slice(from));
  return parts;
}

// Scrolls `box`, and nothing else, so far that `part` of it is seen.
function keepInView(box, part) {
  if (part) box.scrollTop += part.getBoundingClientRect().top - box.getBoundingClientRect().top - 80;
}

// Scrolls each text in `host` to the first place of what was searched for.
function showMarks(host) {
  for (const box of host.querySelectorAll(".prompt, .body")) keepInView(box, box.querySelector("mark"));
}

const PICTURE = { least: 96, most: 256 };

// A picture, at 96 to 256 pixels; its mark, as a terminal shows it, where the page does not hold it.
function picture({ picture: name, size: [width, height] }) {
  const mark = `[image ${width}x${height} ${name.slice(0, 6)}]`;
  const held = LIVE ? null : $(`picture-${name}`);
  if (!LIVE && !held) return el("span", { class: "text aside" }, mark);
  const longest = Math.max(width, height);
  const scale = Math.min(Math.max(longest, PICTURE.least), PICTURE.most) / longest;
  const side = (pixels) => Math.max(1, Math.round(pixels * scale));
  return el("img", { class: `picture${scale > 1 ? " drawn" : ""}`, src: LIVE ? `picture/${name}` : `data:image/webp;base64,${held.textContent}`,
    alt: mark, title: mark, width: side(width), height: side(height), onerror: (event) => event.target.replaceWith(el("span", { class: "text aside" }, mark)) });
}

// The text of a message; pictures stand where they are in it. `show` makes the elements of a text.
function content({ text, parts }, show) {
  return parts ? parts.map((part) => (typeof part === "string" ? show(part) : picture(part))) : show(text);
}

// A prompt or turns: text, or messages with their roles.
function conversation(value, query) {
  if (typeof value === "string") return el("div", { class: "text" }, marked(value, query));
  return el("div", { class: "turns" }, value.map((turn) => el("div", { class: "turn" },
    el("span", { class: "role" }, turn.role), content(turn, (text) => el("div", { class: "text" }, marked(text, query))))));
}

function tokenValue(tokens, i, by) {
  const [sampler, trainer, teacher, advantage] = [tokens.sampler_logprobs, tokens.trainer_logprobs, tokens.teacher_logprobs, tokens.advantages].map((list) => list?.[i] ?? null);
  if (by === "logprob") return sampler;
  if (by === "advantage") return advantage;
  const other = by === "taught" ? teacher : trainer;
  return sampler === null || other === null ? null : other - sampler;
}

// Strength from -1 to 1 of each token's colour: by the largest size in the completion; of log-probabilities 1 - p.
function strengths(tokens, by) {
  const values = tokens.texts.map((_, i) => tokenValue(tokens, i, by));
  if (by === "logprob") return values.map((v) => (v === null ? 0 : Math.min(0, Math.exp(v) - 1)));
  const largest = Math.max(by === "gap" ? 0.05 : 1e-9, ...values.map((v) => Math.abs(v ?? 0)));
  return values.map((v) => (v ?? 0) / largest);
}

function colouredTokens(sample, by) {
  const { tokens } = sample;
  const strong = strengths(tokens, by);
  const spans = (from, to) => tokens.texts.slice(from, to).map((text, k) => {
    const i = from + k;
    const span = el("span", { "data-token": i }, text);
    const percent = Math.round(Math.abs(strong[i]) * 62);
    if (percent) span.style.backgroundColor = `color-mix(in srgb, var(${strong[i] < 0 ? "--low" : "--high"}) ${percent}%, transparent)`;
    span.sample = sample;
    return span;
  });
  if (!tokens.sampled) return el("div", { class: "text tokens" }, spans(0, tokens.texts.length));
  return episodeTokens(sample, spans);
}

function completionBody(sample, by, query, whole = false) {
  if (by !== "none" && sample.tokens) return colouredTokens(sample, by);
  if (sample.turns && sample.turns.length) return episode(sample.turns, query, whole);
  return el("div", { class: "text" }, sample.completion === "" ? el("em", {}, "empty") : marked(sample.completion, query));
}

const fixed = (value) => value.toFixed(3).replace("-", "−");

function tokenTip(span) {
  const { tokens } = span.sample;
  const i = Number(span.dataset.token);
  const value = (by) => tokenValue(tokens, i, by);
  const sampler = value("logprob"), gap = value("gap"), taught = value("taught"), advantage = value("advantage"), trainer = tokens.trainer_logprobs?.[i] ?? null, teacher = tokens.teacher_logprobs?.[i] ?? null;
  const rows = {
    token: tokens.ids ? `${i}, id ${tokens.ids[i]}` : String(i),
    "log-probability, sampler": sampler === null ? null : fixed(sampler),
    "probability, sampler": sampler === null ? null : short(Math.exp(sampler), 3),
    "log-probability, trainer": trainer === null ? null : fixed(trainer),
    "gap, trainer − sampler": gap === null ? null : signed(gap),
    "log-probability, teacher": teacher === null ? null : fixed(teacher),
    "gap, teacher − sampler": taught === null ? null : signed(taught),
    advantage: advantage === null ? null : signed(advantage),
  };
  const known = Object.entries(rows).filter(([, text]) => text !== null);
  return [el("code", {}, JSON.stringify(tokens.texts[i])), ...known.map(([name, text]) => el("div", {}, el("span", {}, name), el("b", { class: "number" }, text)))];
}

function watchTokens(root) {
  const tip = $("tip");
  root.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-token]");
    tip.hidden = !span;
    if (!span) return;
    tip.replaceChildren(...tokenTip(span));
    const box = span.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
    const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  });
  root.addEventListener("pointerleave", () => { tip.hidden = true; });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true });
}

function promptLine(group, limit = 90) {
  const prompt = group.prompt ?? group.samples[0].prompt ?? "";
  const text = typeof prompt === "string" ? prompt : (prompt.findLast((turn) => turn.role === "user") ?? prompt.at(-1) ?? { text: "" }).text;
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > limit ? `${line.slice(0, limit)} …` : line || "(empty prompt)";
}

// The gold answer first, then the other columns.
function columnList(columns, query) {
  const names = Object.keys(columns).sort((a, b) => (b === "answer") - (a === "answer"));
  return names.length ? el("dl", { class: "columns" }, names.map((name) => el("div", {},
    el("dt", {}, name === "answer" ? "gold answer" : name), el("dd", { class: name === "answer" ? "text gold" : "text" }, marked(asText(columns[name]), query))))) : null;
}

const saysItself = (sample, sought) => textsOf(sample).some((text) => text.toLowerCase().includes(sought));

function matches(sample, group, sought) {
  if (!sought) return true;
  const prompt = group.prompt ?? sample.prompt;
  return saysItself(sample, sought) || asText(prompt).toLowerCase().includes(sought)
    || asText(group.columns ?? sample.columns ?? {}).toLowerCase().includes(sought);
}

const tally = (number, unit = "") => el("span", { class: "number tally" }, ` ${number.toLocaleString("en")}${unit}`);
const badge = (text, kind, title = null) => el("span", { class: `badge ${kind}`, title }, text);

// Reward, rewards of the functions, advantage and how it ended.
function facts(sample) {
  const badges = [
    sample.correct === 1 ? badge("right", "good") : sample.correct === 0 ? badge("wrong", "bad") : null,
    ending(sample.finish_reason),
    sample.completion_tokens === undefined ? null : badge(count(sample.completion_tokens, "token"), ""),
    !(sample.episode?.sequences > 1) ? null : badge(`sequence ${sample.episode.sequence + 1} of ${sample.episode.sequences}, sample ${sample.episode.sample}`, ""),
    sample.episode?.role ? badge(`role ${sample.episode.role}`, "", "One of several agents in the episode.") : null,
    sample.episode?.began ? badge(`began anew: ${sample.episode.began}`, "warn", "It continues no earlier answer of its episode.") : null,
    sample.turns ? badge(count(sample.turns.filter(isOwn).length, "turn"), "") : null,
    sample.sample === undefined ? null : badge(sample.greedy === false ? `sample ${sample.sample}` : "greedy", ""),
  ];
  const cell = (name, value, kind = "") => el("div", { class: kind }, el("dt", {}, name), el("dd", { class: "number" }, value));
  const numbers = [
    cell("reward", short(sample.reward, 3), "main"),
    sample.advantage === null ? null : cell("advantage", signed(sample.advantage), sample.advantage > 0 ? "up" : sample.advantage < 0 ? "down" : ""),
    ...Object.entries(sample.rewards).map(([name, value]) => cell(name, value === null ? "none" : short(value, 3))),
    sample.environment_reward === undefined || "environment" in sample.rewards ? null : cell("environment", short(sample.environment_reward, 3)),
  ];
  return el("div", { class: "facts" }, el("dl", { class: "numbers" }, numbers), el("div", { class: "badges" }, badges));
}
