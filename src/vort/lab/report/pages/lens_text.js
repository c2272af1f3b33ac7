"use strict";
// The page's data, its state, and the text as cells. All text goes in through textContent.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const LEVELS = 16;
const DECADES = 3;
const shown = data.cells.shown;
const first = data.cells.first;
const flags = data.cells.flags;
const count = shown.length;
const cellOf = new Int32Array(data.tokens);
for (let c = 0; c < count; c++) cellOf.fill(c, first[c], c + 1 < count ? first[c + 1] : data.tokens);
const lastToken = (c) => (c + 1 < count ? first[c + 1] : data.tokens) - 1;

const state = { layer: 0, head: 0, colour: "", here: 0, picked: null, scale: null };
let head = null;
let found = null; // what the selection reads and gives
let levels = new Uint8Array(count);
let kinds = new Array(count).fill("");
const cells = [];

// Small helpers ----------------------------------------------------------------------------

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  const { text, class: name, ...rest } = options;
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  for (const [key, value] of Object.entries(rest)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const isNarrow = () => matchMedia("screen and (max-width: 60rem)").matches;
const whole = (n) => n.toLocaleString("en");
const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
const fixed = (x) => x.toFixed(3).replace(/^0/, "");
function share(w) {
  const size = Math.abs(w) * 100;
  if (size === 0) return "0 %";
  if (size < 0.01) return `${(w * 100).toExponential(0)} %`;
  return `${(w * 100).toFixed(size >= 10 ? 0 : size >= 1 ? 1 : 2)} %`;
}
/** A retrieval weight: a share where a normaliser makes it one, else the number itself. */
const weight = (w) => (head.shares || w === 0 ? share(w) : Number(w.toPrecision(2)).toString());
function halfLife(rate) {
  if (rate <= 0) return "never fades";
  const half = Math.LN2 / rate;
  return half < 10 ? half.toFixed(1) : whole(Number(half.toPrecision(3)));
}
const flat = (text) => text.replace(/[\n\t]/g, "");
const nameOf = (c) => (shown[c] === " " ? "space" : flat(shown[c]));

// Text -------------------------------------------------------------------------------------

function buildText() {
  const box = $("text");
  const plain = document.createDocumentFragment();
  let part = make("div", { class: "part", role: "presentation" });
  let size = 0;
  for (let c = 0; c < count; c++) {
    const text = shown[c];
    const cell = document.createElement("span");
    cell.id = `c${c}`;
    cell.setAttribute("role", "option");
    cell.textContent = text;
    cells.push(cell);
    part.append(cell);
    size++;
    if (text.endsWith("\n") && size > 400) {
      plain.append(part);
      part = make("div", { class: "part", role: "presentation" });
      size = 0;
    }
  }
  plain.append(part);
  box.append(plain);
}
const isSymbol = (text) => /^[↵⇥◇⟨]/.test(text);
const fixedClass = shown.map((text, c) =>
  (isSymbol(text) ? " sym" : "") + (flags[c] & 1 ? " name" : "") + (flags[c] & 4 ? " told" : ""));

const painted = new Array(count).fill("");
function paint() {
  const picked = state.picked === null ? -1 : cellOf[state.picked];
  for (let c = 0; c < count; c++) {
    let name = `c ${kinds[c]} l${levels[c]}${fixedClass[c]}`;
    if (c === picked) name += " on";
    if (c === state.here) name += " here";
    if (painted[c] !== name) {
      cells[c].className = name;
      painted[c] = name;
    }
  }
}
