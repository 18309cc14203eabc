// Unpacks the data of the page and builds elements. What a model or a data set wrote becomes text nodes only.

const LIVE = document.documentElement.hasAttribute("data-live");
const POLL_MS = 2000;
const KEPT_CHUNKS = 24;
const state = { data: null, runs: [] };
const kept = new Map();
let tag = null;

const $ = (id) => document.getElementById(id);

// el("p", { class: "note", onclick: f }, "text", child): strings become text nodes, never HTML.
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "selected") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// Button, labelled select (`options`: [value, text]) and search field.
const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);
const choice = (label, id, options, onchange, attributes = {}) => el("label", { class: "field", ...attributes }, label,
  el("select", { id, onchange: (event) => onchange(event.target.value) }, options.map(([value, text]) => el("option", { value }, text))));
// Enter calls `onenter` with 1, or -1 with Shift; Escape empties the field and leaves it.
function searchField(label, id, placeholder, oninput, onenter = () => {}) {
  const onkeydown = (event) => {
    if (event.isComposing) return; // Enter or Escape of an input method
    if (event.key === "Enter") onenter(event.shiftKey ? -1 : 1);
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.target.value = "";
    oninput("");
    event.target.blur();
  };
  return el("label", { class: "field grow" }, el("span", { class: "sr" }, label), el("input", {
    type: "search", id, placeholder, enterkeyhint: "search", autocomplete: "off", spellcheck: "false", onkeydown, oninput: (event) => oninput(event.target.value),
  }));
}
// What `render` makes of each run, under its name if there are several.
const perRun = (render) => state.runs.flatMap((run, i) => [state.runs.length > 1 ? el("h3", {}, run.name) : null, render(run, i)]);

const bytesOf = (base64) => Uint8Array.fromBase64?.(base64) ?? Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

async function unpacked(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// The groups of one file of samples; `kind` is "step" or "eval". null if the page does not hold them.
async function groupsOf(run, kind, step) {
  const name = `${run}-${kind}-${step}`;
  const groups = kept.get(name) ?? await fetchGroups(name);
  if (groups === null) return null;
  kept.delete(name);
  kept.set(name, groups);
  if (kept.size > KEPT_CHUNKS) kept.delete(kept.keys().next().value);
  return groups;
}

async function fetchGroups(name) {
  if (LIVE) {
    const answer = await fetch(`chunk/${name}`);
    return answer.ok ? unpacked(await answer.arrayBuffer()) : null;
  }
  const element = $(`chunk-${name}`);
  return element === null ? null : unpacked(bytesOf(element.textContent));
}

async function readData() {
  if (!LIVE) return unpacked(bytesOf($("chunk-data").textContent));
  const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
  if (answer.status === 304) return null;
  tag = answer.headers.get("ETag");
  return unpacked(await answer.arrayBuffer());
}

// Forgets the groups of files that have changed, and makes `data` what the page shows.
function adopt(data) {
  for (const [i, run] of data.runs.entries()) {
    for (const kind of ["step", "eval"]) {
      const known = new Set(state.runs[i]?.samples[kind].steps.map((summary) => JSON.stringify(summary)));
      for (const summary of run.samples[kind].steps) {
        if (!known.has(JSON.stringify(summary))) kept.delete(`${i}-${kind}-${summary.step}`);
      }
    }
  }
  state.data = data;
  state.runs = data.runs;
}

const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

// A number in at most `digits` significant digits, without an exponent where it is readable.
function short(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replaceAll("-", "−");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits }).replace("-", "−");
}

const signed = (value) => value > 0 ? `+${short(value, 3)}` : short(value, 3);

// A name or path: it stays whole if a line holds it; if not, it breaks after a dot, slash, colon or underscore.
const pieces = (text) => text.replace(/[./:_](?=[A-Za-z])/g, "$&\n").split("\n").flatMap((part) => [part, el("wbr")]);
const whole = (...children) => el("span", { class: "whole" }, children);
const code = (text, after) => whole(el("code", {}, pieces(text)), after);

// A sentence of quatrain, in which Markdown's backticks mark code; the comma or full stop after it stays with it.
function prose(text) {
  const parts = text.split(/`([^`]+)`([.,;:)]*)/);
  return parts.map((part, i) => [part, code(part, parts[i + 1]), ""][i % 3]);
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? null));

function store(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch { /* a page of a file may have no storage: the choice then lasts as long as the page */ }
  return null;
}
