"use strict";
// Which colour each cell has, the legend that says so, and the strip that shows all of them.

const COLOURS = {
  stretched: "order, this head's range",
  absolute: "order, 0 to 1",
  gate: "write gate",
  surprise: "surprise",
  memory: "reads and gives",
};

/** What a colour says of a token, by kind. */
const MEANINGS = {
  order: "the order this head gives a token, and so how long it is kept",
  gate: "the write gate, how much of a token this head writes",
  surprise: "surprise, in bits, that the model had at a token",
};

function quantile(values, q) {
  const sorted = Float64Array.from(values).sort();
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))];
}

/** Values of the tokens and the ends of the colour scale. */
function measure() {
  if (state.colour === "gate") return { values: head.gate, low: 0, high: 1, kind: "gate" };
  if (state.colour === "surprise") {
    const values = data.surprise.map((x) => x ?? 0);
    return { values, low: 0, high: Math.max(1, quantile(values, 0.98)), kind: "surprise" };
  }
  let [low, high] = [0, 1];
  if (state.colour === "stretched") {
    [low, high] = [quantile(head.order, 0.02), quantile(head.order, 0.98)];
    // Less than a hundredth is no difference worth a colour.
    const missing = 0.01 - (high - low);
    if (missing > 0) [low, high] = [Math.max(0, low - missing / 2), Math.min(1, high + missing / 2)];
  }
  return { values: head.order, low, high, kind: "order" };
}

function colourByValue() {
  const { values, low, high, kind } = measure();
  for (let c = 0; c < count; c++) {
    const x = (values[lastToken(c)] - low) / (high - low || 1);
    levels[c] = Math.round(Math.min(1, Math.max(0, x)) * LEVELS);
    kinds[c] = kind;
  }
}

/** Cells before the selection by what it reads of them, cells after by what they read of it. */
function weightsByCell() {
  const at = state.picked;
  const own = cellOf[at];
  const out = new Float64Array(count);
  const past = state.scale === null ? found.reads.total : found.reads.byScale[state.scale];
  for (let i = 0; i <= at; i++) out[cellOf[i]] += past[i];
  const self = out[own];
  for (let t = at + 1; t < data.tokens; t++) {
    const c = cellOf[t];
    if (c > own && Math.abs(found.gives[t - at]) > Math.abs(out[c])) out[c] = found.gives[t - at];
  }
  return { out, own, self };
}

function colourByMemory() {
  const { out, own } = weightsByCell();
  let [past, next] = [0, 0];
  for (let c = 0; c < count; c++) {
    const size = Math.abs(out[c]);
    if (c < own) past = Math.max(past, size);
    if (c > own) next = Math.max(next, size);
  }
  for (let c = 0; c < count; c++) {
    const top = c <= own ? Math.max(past, c === own ? Math.abs(out[c]) : 0) : next;
    const size = Math.abs(out[c]);
    const x = size > 0 && top > 0 ? 1 + Math.log10(size / top) / DECADES : 0;
    levels[c] = Math.round(Math.min(1, Math.max(0, x)) * LEVELS);
    kinds[c] = c <= own ? "past" : "next";
  }
  found.tops = { past, next };
}

const showsMemory = () => state.colour === "memory" && state.picked !== null;

function recolour() {
  if (showsMemory()) colourByMemory();
  else if (!head.ordered && !head.gated && ["stretched", "absolute", "gate", "memory"].includes(state.colour)) {
    levels.fill(0);
    kinds.fill("plain");
  } else {
    const wanted = state.colour;
    if (wanted === "memory") state.colour = fallback();
    colourByValue();
    state.colour = wanted;
  }
  paint();
  legend();
  requestAnimationFrame(strip);
}
const fallback = () => (head.ordered ? resting : head.gated ? "gate" : "surprise");
let resting = "stretched";

// Legend -----------------------------------------------------------------------------------

function scaleOf(kind, left, right, bars) {
  const box = make("div", { class: "scale" });
  if (bars) {
    const top = Math.max(...bars, 1);
    for (const bar of bars) {
      const column = make("i", { class: `c ${kind} l${LEVELS >> 1}` });
      column.style.height = `${(1.5 * bar) / top}rem`;
      column.style.padding = "0";
      box.append(column);
    }
  }
  for (let level = 0; level <= LEVELS; level++) box.append(make("i", { class: `c ${kind} l${level}` }));
  box.append(make("div", { class: "ends" }, make("span", { text: left }), make("span", { text: right })));
  return box;
}

function legend() {
  const box = $("legend");
  box.replaceChildren();
  if (showsMemory()) {
    const { past, next } = found.tops;
    const least = 10 ** -DECADES;
    box.append(
      make("div", {}, make("div", { text: `Colour before it: how much the selected token reads of each${state.scale === null ? "" : ", on one time scale"}` }), scaleOf("past", weight(past * least), weight(past))),
      make("div", {}, make("div", { text: "Colour after it: how much each token reads of the selected one" }), scaleOf("next", weight(next * least), weight(next))),
    );
  } else if (!head.ordered && state.colour !== "surprise" && !head.gated) {
    box.append(make("span", { text: "No colour: this memory has no orders, every token fades alike. Select one to see what it reads and gives." }));
  } else {
    const wanted = state.colour;
    if (wanted === "memory") state.colour = fallback();
    const { low, high, kind } = measure();
    state.colour = wanted;
    const bars = new Array(LEVELS + 1).fill(0);
    for (let c = 0; c < count; c++) bars[levels[c]]++;
    const words = { order: ["short memory", "long"], gate: ["writes little", "much"], surprise: ["expected", "not"] }[kind];
    const ends = kind === "surprise" ? [`${low.toFixed(0)} bits`, `${high.toFixed(1)} bits`] : [fixed(low), high === 1 ? "1" : fixed(high)];
    box.append(make("div", {},
      make("div", { text: `Colour: ${MEANINGS[kind]}. Bars: how many tokens have it.` }),
      scaleOf(kind, `${ends[0]} ${words[0]}`, `${words[1]} ${ends[1]}`, bars)));
  }
  const keys = make("div");
  if (flags.some((f) => f & 1)) keys.append(make("div", { class: "key" }, make("span", { class: "c name", text: "Name" }), make("span", { text: "a name, found by the entity probe" })));
  if (flags.some((f) => f & 4)) keys.append(make("div", { class: "key" }, make("span", { class: "c told", text: "x" }), make("span", { text: "where the model is told of it" })));
  if (keys.children.length) box.append(keys);
}

// The strip: the whole text in one line -------------------------------------------------------

const swatches = new Map();
function swatch(kind, level) {
  const name = `${kind}${level}`;
  if (!swatches.has(name)) {
    const probe = make("span", { class: `c ${kind} l${level}` });
    $("legend").append(probe);
    swatches.set(name, getComputedStyle(probe).backgroundColor);
    probe.remove();
  }
  return swatches.get(name);
}

function strip() {
  const canvas = $("strip");
  const width = canvas.clientWidth;
  if (!width) return;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(26 * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--wash");
  pen.fillRect(0, 0, width, 20);
  const columns = Math.min(Math.ceil(width), count);
  for (let x = 0; x < columns; x++) {
    const from = Math.floor((x * count) / columns);
    const to = Math.max(from + 1, Math.floor(((x + 1) * count) / columns));
    // A single strong weight must be seen; of orders the mean says more.
    let [best, sum] = [from, 0];
    for (let c = from; c < to; c++) {
      if (levels[c] > levels[best]) best = c;
      sum += levels[c];
    }
    if (kinds[best] === "plain") continue;
    pen.fillStyle = swatch(kinds[best], showsMemory() ? levels[best] : Math.round(sum / (to - from)));
    pen.fillRect((x * width) / columns, 0, width / columns + 0.5, 20);
  }
  const box = $("text").getBoundingClientRect();
  const top = document.querySelector(".bar").offsetHeight;
  const seen = [(top - box.top) / box.height, (window.innerHeight - box.top) / box.height]
    .map((x) => Math.min(1, Math.max(0, x)) * width);
  pen.fillStyle = style.getPropertyValue("--faint");
  pen.fillRect(seen[0], 22, Math.max(3, seen[1] - seen[0]), 3);
  if (state.picked !== null) {
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.fillRect(((cellOf[state.picked] + 0.5) / count) * width - 1, 0, 2, 20);
  }
}
