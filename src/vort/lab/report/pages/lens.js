"use strict";
// Putting the page together.

function fill(select, items) {
  select.replaceChildren(...items.map(([value, text]) => make("option", { value, text })));
}

function openHead(layer, number) {
  [state.layer, state.head] = [layer, number];
  head = vortMemory.open(data, layer, number);
  fill($("head"), Array.from({ length: data.layers[layer].heads }, (_, h) => [h, h]));
  $("layer").value = layer;
  $("head").value = number;
  $("subtitle").textContent = `${plural(data.tokens, "token")} as layer ${layer}, head ${number} remembers them: which are kept, for how long, and who reads them`;
  const names = Object.entries(COLOURS).filter(([name]) =>
    (name !== "gate" || head.gated) && (!["stretched", "absolute"].includes(name) || head.ordered));
  fill($("colour"), names);
  state.scale = null;
  look();
  if (!names.some(([name]) => name === state.colour)) state.colour = fallback();
  setColour(state.colour);
  panel();
}

function foot() {
  const list = make("dl");
  for (const [key, value] of Object.entries(data.about)) list.append(make("div", {}, make("dt", { text: key }), make("dd", { text: value })));
  const precision = data.error < 1e-4 ? data.error.toExponential(0) : `${(data.error * 100).toPrecision(2)} %`;
  const usual = `${(data.usual * 100).toPrecision(2)} %`;
  const turned = data.layers.every((layer) => layer.turned);
  const stored = turned ? `whose logarithms are stored in steps of ${data.step}` : `stored in ${data.bits} bits each`;
  $("foot").append(list, make("p", {
    text: `Weights are computed in this page from the model's own features, ${stored}. At sampled positions of every head a weight that has a colour was off by ${usual} of itself (root mean square of the worst head), and none by more than ${precision} of the largest one there. Characters stand in the order in which the model reads them, and those without a shape are shown as symbols.`,
  }));
}

async function start() {
  document.body.dataset.ready = "no";
  if (typeof DecompressionStream === "undefined") {
    $("notes").append(make("p", { class: "notice", text: "This page needs a browser that can inflate data (DecompressionStream): any of 2023 or later." }));
    return;
  }
  await vortMemory.load(data);
  $("title").textContent = data.title;
  for (const note of data.notes) $("notes").append(make("p", { class: "notice", text: note }));
  buildText();
  fill($("layer"), data.layers.map((_, l) => [l, l]));
  state.colour = data.layers[0].ordered ? "stretched" : data.layers[0].gated ? "gate" : "surprise";
  if (isNarrow()) {
    $("panel").classList.add("shut");
    $("grip").setAttribute("aria-expanded", "false");
  }
  openHead(0, 0);
  foot();
  const text = $("text");
  const cellAt = (event) => {
    const id = event.target.closest?.("#text [role=option]")?.id;
    return id ? Number(id.slice(1)) : null;
  };
  text.addEventListener("click", (event) => {
    const c = cellAt(event);
    if (c !== null) { tip(); pick(lastToken(c)); }
  });
  text.addEventListener("pointermove", (event) => {
    const c = event.pointerType === "touch" ? null : cellAt(event);
    tip(c === null ? undefined : describe(c), event);
  });
  text.addEventListener("pointerleave", () => tip());
  text.addEventListener("keydown", onKey);
  text.addEventListener("focus", activate);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.picked !== null) release(); });
  $("layer").addEventListener("change", (event) => openHead(Number(event.target.value), Math.min(state.head, data.layers[event.target.value].heads - 1)));
  $("head").addEventListener("change", (event) => openHead(state.layer, Number(event.target.value)));
  $("colour").addEventListener("change", (event) => setColour(event.target.value));
  $("grip").addEventListener("click", () => {
    const open = !$("panel").classList.toggle("shut");
    $("grip").setAttribute("aria-expanded", String(open));
    if (open && state.picked !== null) drawCharts();
  });
  const cellOnStrip = (event) => {
    const box = $("strip").getBoundingClientRect();
    return Math.min(count - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * count)));
  };
  $("strip").addEventListener("click", (event) => { state.here = cellOnStrip(event); activate(); reveal(state.here); });
  $("strip").addEventListener("pointermove", (event) => tip(describe(cellOnStrip(event)), event));
  $("strip").addEventListener("pointerleave", () => tip());
  const redraw = () => { swatches.clear(); recolour(); if (state.picked !== null) panel(); };
  let waiting = false;
  const soon = (work) => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; work(); }); } };
  addEventListener("scroll", () => soon(strip), { passive: true });
  addEventListener("resize", () => soon(redraw));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);
  document.body.dataset.ready = "yes";
}

window.vortLens = {
  reads: (layer, number, t) => Array.from(vortMemory.reads(vortMemory.open(data, layer, number), t).total),
  gives: (layer, number, i) => Array.from(vortMemory.gives(vortMemory.open(data, layer, number), i)),
  state: () => ({ ...state }),
};
start();
