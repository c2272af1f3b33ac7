"use strict";
// What the panel says about the selection, and about the head where nothing is selected.

function hitsOf(weights, toToken, from, many, kind) {
  const order = [];
  for (let n = from; n < weights.length; n++) if (weights[n] !== 0) order.push(n);
  order.sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
  const list = make("ol", { class: `hits ${kind}` });
  for (const n of order.slice(0, many)) {
    const token = toToken(n);
    const c = cellOf[token];
    const lag = token - state.picked;
    const words = make("span", { class: "s" },
      make("bdi", { text: flat(shown.slice(Math.max(0, c - 9), c).join("")) }),
      make("mark", { text: flat(shown[c]) }),
      make("bdi", { text: flat(shown.slice(c + 1, c + 12).join("")) }));
    const button = make("button", { "data-token": token, "aria-label": `${nameOf(c)}, ${plural(Math.abs(lag), "token")} ${lag < 0 ? "back" : "on"}, ${weight(weights[n])}` },
      words,
      make("span", { class: "lag", text: lag === 0 ? "itself" : `${lag < 0 ? "−" : "+"}${whole(Math.abs(lag))}` }),
      make("span", { class: "w", text: weight(weights[n]) }));
    button.addEventListener("click", () => { pick(token); reveal(cellOf[token]); });
    list.append(make("li", {}, button));
  }
  return list;
}

function medianLag(total) {
  let sum = 0;
  for (const w of total) sum += Math.abs(w);
  let reached = 0;
  for (let lag = 0; lag < total.length; lag++) {
    reached += Math.abs(total[total.length - 1 - lag]);
    if (reached >= sum / 2) return lag;
  }
  return 0;
}

function fact(label, value) {
  return make("div", {}, make("small", { text: label }), make("b", { text: value }));
}

function panel() {
  const body = $("panel-body");
  body.replaceChildren();
  if (state.picked === null) { about(body); return; }
  const at = state.picked;
  const c = cellOf[at];
  const letGo = make("button", { class: "let-go", text: "let go" });
  letGo.addEventListener("click", () => { release(); $("text").focus(); });
  const label = flat(shown[c]);
  const glyph = make("div", { class: `glyph${[...label].length > 3 ? " long" : ""}`, text: label === " " ? "␣" : label });
  body.append(letGo, make("div", { class: "who" }, glyph, make("div", {},
    make("strong", { text: `Token ${whole(at)} of ${whole(data.tokens)}` }),
    make("span", { text: `layer ${state.layer}, head ${state.head}${flags[c] & 1 ? ", in a name" : ""}` }))));
  const facts = make("div", { class: "facts" });
  if (head.ordered) facts.append(fact("order", fixed(head.order[at])));
  if (head.gated) facts.append(fact("write gate", fixed(head.gate[at])));
  if (data.surprise[at] !== null) facts.append(fact("surprise", `${data.surprise[at].toFixed(1)} bits`));
  body.append(facts);
  if (lastToken(c) > first[c]) {
    const row = make("div", { class: "bytes", role: "group", "aria-label": "Tokens of this character" }, make("span", { text: "its tokens" }));
    for (let token = first[c]; token <= lastToken(c); token++) {
      const button = make("button", { text: whole(token), "aria-pressed": token === at });
      button.addEventListener("click", () => pick(token));
      row.append(button);
    }
    body.append(row);
  }
  readsPart(body);
  givesPart(body);
  drawCharts();
}

function readsPart(body) {
  const { total, byScale } = found.reads;
  body.append(make("h2", { class: "warm", text: "What it reads" }));
  const half = medianLag(total);
  const words = make("p");
  words.append("Half of it lies within ", make("b", { text: half === 0 ? "the token itself" : half === 1 ? "the last token" : `the last ${plural(half, "token")}` }),
    ". By lag, in the colours of the time scales:");
  body.append(words);
  const canvas = make("canvas", { class: "chart", id: "scales-chart", role: "img", "aria-label": `What is read, by lag; half lies within ${half} tokens` });
  body.append(canvas);
  const sums = byScale.map((weights) => weights.reduce((sum, w) => sum + Math.abs(w), 0));
  const all = sums.reduce((a, b) => a + b, 0) || 1;
  const list = make("div", { class: "scales", role: "group", "aria-label": "Time scales: press one to colour the text by it alone" });
  const order = head.rates.map((_, s) => s).sort((a, b) => head.rates[b] - head.rates[a]);
  const colours = vortCharts.ramp(head.rates);
  // Banks have scores of scales; most carry nothing.
  const kept = order.length <= 16 ? order : order.filter((s) => sums[s] / all >= 0.01);
  const part = (s) => (sums[s] / all < 1e-4 ? "< 0.01 %" : share(sums[s] / all));
  for (const s of kept) {
    const bar = make("i");
    bar.style.width = `${(100 * sums[s]) / all}%`;
    bar.style.background = colours[s];
    const label = head.rates[s] > 0 ? `half-life ${halfLife(head.rates[s])}` : halfLife(head.rates[s]);
    const button = make("button", { "aria-pressed": state.scale === s, "data-scale": s, "aria-label": `${label}, ${part(s)}` },
      make("span", { text: label }), make("span", { class: "track" }, bar), make("span", { class: "n", text: part(s) }));
    button.addEventListener("click", () => {
      state.scale = state.scale === s ? null : s;
      for (const other of list.children) other.setAttribute("aria-pressed", String(state.scale === Number(other.dataset.scale)));
      setColour("memory");
      $("sources").replaceWith(sources());
      drawCharts();
    });
    list.append(button);
  }
  body.append(list, sources());
}

function sources() {
  const weights = state.scale === null ? found.reads.total : found.reads.byScale[state.scale];
  const list = hitsOf(weights, (i) => i, 0, 7, "warm");
  list.id = "sources";
  list.setAttribute("aria-label", "Strongest sources");
  return list;
}

function givesPart(body) {
  body.append(make("h2", { class: "cool", text: "What it gives" }));
  const left = data.tokens - 1 - state.picked;
  if (left < 1) { body.append(make("p", { text: "Nothing follows it." })); return; }
  let best = 1;
  for (let lag = 1; lag <= left; lag++) if (Math.abs(found.gives[lag]) > Math.abs(found.gives[best])) best = lag;
  body.append(make("p", { text: "The line is its retention kernel: what is left of it, whoever asks. A dot is one later position, and the weight with which that position in fact retrieves it." }));
  body.append(make("canvas", { class: "chart", id: "influence-chart", role: "img", "aria-label": `Influence by lag; the strongest reader is ${plural(best, "token")} on, with ${weight(found.gives[best])}` }));
  const list = hitsOf(found.gives, (lag) => state.picked + lag, 1, 5, "cool");
  list.id = "readers";
  list.setAttribute("aria-label", "Strongest readers");
  body.append(list);
}

function drawCharts(marked) {
  const scales = $("scales-chart");
  if (scales) vortCharts.scales(scales, found.reads.byScale, vortCharts.ramp(head.rates), state.scale, weight);
  const influence = $("influence-chart");
  if (!influence) return;
  const draw = (lag) => vortCharts.influence(influence, found.gives, (x) => vortMemory.kernel(head, state.picked, x), lag);
  const lagAt = draw(marked);
  const lagOf = (event) => lagAt(event.clientX - influence.getBoundingClientRect().left);
  influence.onpointermove = (event) => {
    const lag = lagOf(event);
    draw(lag);
    const c = cellOf[state.picked + lag];
    tip(`${plural(lag, "token")} on: ${nameOf(c)}\nkernel ${vortMemory.kernel(head, state.picked, lag).toPrecision(3)}\nretrieved with ${weight(found.gives[lag])}`, event);
  };
  influence.onpointerleave = () => { draw(); tip(); };
  influence.onclick = (event) => { const token = state.picked + lagOf(event); pick(token); reveal(cellOf[token]); };
}

function about(body) {
  const keys = make("dl", { class: "keys" });
  for (const [names, does] of [
    [["←", "→", "↑", "↓"], "move through the text"],
    [["Enter"], "select a token"],
    [["["], ["]"], "previous, next head"],
    [["Esc"], "let go"],
  ].map((row) => [row.slice(0, -1).flat(), row.at(-1)])) {
    keys.append(make("dt", {}, ...names.map((k) => make("kbd", { text: k }))), make("dd", { text: does }));
  }
  body.append(make("h2", { text: "How to look" }),
    make("p", { text: "The legend above the text says what its colours mean, and the strip on top is the whole text in the same colours." }),
    ...(head.ordered ? [make("p", { text: "The higher the order that this head gives a token, the longer the memory keeps it." })] : []),
    make("p", { text: "Select a character. What came before it is then coloured by how much of it this position reads, what comes after by how much it is read there." }),
    keys);
  if (head.ordered) extremes(body);
  body.append(make("h2", { text: "Time scales of this head" }),
    make("p", { text: `Half-lives in tokens: ${[...head.rates].sort((a, b) => b - a).slice(0, 24).map(halfLife).join(", ")}${head.rates.length > 24 ? ", …" : ""}.` }));
}

/** Words whose letters have the highest and the lowest orders, on average. */
function extremes(body) {
  const words = new Map();
  let word = "", sum = 0, size = 0, start = 0;
  const close = () => {
    if (size > 2) {
      const entry = words.get(word) ?? { sum: 0, n: 0, start };
      entry.sum += sum / size;
      entry.n++;
      words.set(word, entry);
    }
    [word, sum, size] = ["", 0, 0];
  };
  for (let c = 0; c < count; c++) {
    if (/^[\p{L}\p{N}'’]+$/u.test(shown[c])) {
      if (!size) start = c;
      word += shown[c];
      sum += head.order[lastToken(c)];
      size++;
    } else close();
  }
  close();
  const ranked = [...words].map(([text, e]) => ({ text, mean: e.sum / e.n, start: e.start })).sort((a, b) => b.mean - a.mean);
  if (ranked.length < 8) return;
  const row = (title, some) => {
    const list = make("p");
    list.append(make("b", { text: title }), " ");
    some.forEach(({ text, mean }, n) => list.append(n ? ", " : "", make("bdi", { text }), ` ${fixed(mean)}`));
    body.append(list);
  };
  body.append(make("h2", { text: "Kept longest, and shortest" }));
  const each = Math.min(6, Math.floor(ranked.length / 2));
  row("long", ranked.slice(0, each));
  row("short", ranked.slice(-each).reverse());
}
