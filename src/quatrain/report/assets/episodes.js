// Shows an episode: turns that the policy wrote, what environment and template wrote between them, long texts folded.

const ENDINGS = {
  length: ["truncated", "warn", null],
  environment: ["ended by the environment", "", null],
  turns: ["out of turns", "warn", "The episode had rollout.max_turns turns before the environment ended it."],
  error: ["environment error", "bad", "The environment raised an exception or returned nonsense."],
  timeout: ["environment timeout", "bad", "The environment took longer than rollout.environment_timeout_s."],
};
const FOLD = { characters: 1000, lines: 12 };
const FOLD_WHOLE = { characters: 20000, lines: 400 };

function ending(reason) {
  if (!reason) return null;
  const known = typeof reason === "string" && Object.hasOwn(ENDINGS, reason) ? ENDINGS[reason] : [asText(reason), "", null];
  return badge(...known);
}

const isOwn = (turn) => turn.role === "assistant";
// Of an agent's episode: an answer that another of its sequences trains.
const isShared = (turn) => turn.trained === false;

// What a sample says: its completion, or every turn of its episode.
const textsOf = (sample) => sample.turns ? [sample.completion, ...sample.turns.map((turn) => turn.text)] : [sample.completion];

// Where a text is cut; its length if little would be hidden.
function foldPlace(text, { characters, lines }) {
  let end = -1;
  for (let i = 0; i < lines; i++) {
    end = text.indexOf("\n", end + 1);
    if (end < 0 || end > characters) break;
  }
  const place = end < 0 ? characters : Math.min(end, characters);
  return text.length - place < 200 && text.slice(place).split("\n").length < 5 ? text.length : place;
}

// A text, of which a button shows what is beyond its fold. It starts open if only the rest has what is searched for.
function foldable(text, query, whole) {
  const place = foldPlace(text, whole ? FOLD_WHOLE : FOLD);
  if (place >= text.length) return el("div", { class: "text" }, marked(text, query));
  const sought = needle(query || "");
  const at = sought ? text.toLowerCase().indexOf(sought) : -1;
  let open = at + sought.length > place;
  const body = el("div", { class: "text" });
  const more = button({ class: "small fold", onclick: () => { open = !open; show(); } });
  const show = () => {
    // Half of a surrogate pair at the cut would be shown as a broken character.
    body.replaceChildren(...marked(open ? text : `${text.slice(0, place).replace(/[\ud800-\udbff]$/, "")} …`, query));
    more.textContent = open ? "show less" : `show all ${count(text.length, "character")}`;
    more.setAttribute("aria-expanded", String(open));
  };
  show();
  return [body, more];
}

function rewardBadge(reward) {
  const kind = reward > 0 ? "good" : reward < 0 ? "bad" : "";
  return el("span", { class: `badge number ${kind}`, title: "reward of this turn" }, el("span", { class: "sr" }, "reward "), signed(reward));
}

const turnHead = (words, reward) => el("div", { class: "turn-head" }, words, reward === null ? null : rewardBadge(reward));

// The turns in a list; the rewards are shown unless all of them are 0.
function episode(turns, query, whole) {
  const rewarded = turns.some((turn) => turn.reward);
  let number = 0;
  return el("ol", { class: "turns episode", role: "list" }, turns.map((turn) => el("li", { class: `turn ${isOwn(turn) && !isShared(turn) ? "own" : "given"}` },
    turnHead([el("span", { class: "role" }, turn.role), isOwn(turn) ? el("span", { class: "aside" }, turn.answer ? `answer ${turn.answer}` : `turn ${++number}`) : null,
      isShared(turn) ? el("span", { class: "aside", title: "Each answer is trained once, in one sequence of its episode." }, "trained in another sequence") : null,
      turn.name ? el("code", { class: "name" }, turn.name) : null], rewarded && turn.reward !== undefined ? turn.reward : null),
    turn.text === "" ? el("em", { class: "text" }, "empty") : content(turn, (text) => foldable(text, query, whole)))));
}

// The same list made of tokens; `spans(from, to)` are the elements of sampled tokens.
function episodeTokens(sample, spans) {
  const { texts, sampled } = sample.tokens;
  const own = (sample.turns ?? []).filter(isOwn);
  const starts = sampled.map((_, i) => i).filter((i) => i === 0 || sampled[i] !== sampled[i - 1]);
  const numTurns = starts.filter((i) => sampled[i]).length;
  const rewarded = own.length === numTurns && own.some((turn) => turn.reward);
  let number = 0;
  return el("ol", { class: "turns episode", role: "list" }, starts.map((from, k) => {
    const to = starts[k + 1] ?? texts.length;
    if (!sampled[from]) {
      return el("li", { class: "turn given" }, turnHead([el("span", { class: "role" }, "environment and template")], null), foldable(texts.slice(from, to).join(""), "", false));
    }
    const reward = rewarded ? own[number].reward ?? null : null;
    number += 1;
    return el("li", { class: "turn own" }, turnHead([el("span", { class: "role" }, "assistant"), el("span", { class: "aside" }, `turn ${number}`)], reward),
      el("div", { class: "text tokens" }, spans(from, to)));
  }));
}
