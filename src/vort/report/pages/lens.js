"use strict";
// The page itself: text, colours, selection, keys. All text goes in through textContent.

(() => {
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
    let part = make("div", { class: "part" });
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
        part = make("div", { class: "part" });
        size = 0;
      }
    }
    plain.append(part);
    box.append(plain);
  }
  const isSymbol = (text) => /^[␀-␡↵⇥⍽◇⟨]/.test(text);
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

  // Colours ----------------------------------------------------------------------------------

  const COLOURS = {
    stretched: "order",
    absolute: "order, 0 to 1",
    gate: "write gate",
    surprise: "surprise",
    memory: "reads and gives",
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
        make("div", {}, make("div", { text: "read from the past" }), scaleOf("past", share(past * least), share(past))),
        make("div", {}, make("div", { text: "given to what follows" }), scaleOf("next", share(next * least), share(next))),
      );
    } else if (!head.ordered && state.colour !== "surprise" && !head.gated) {
      box.append(make("span", { text: "This memory has no orders: every token fades alike. Select one to see what it reads and gives." }));
    } else {
      const wanted = state.colour;
      if (wanted === "memory") state.colour = fallback();
      const { low, high, kind } = measure();
      state.colour = wanted;
      const bars = new Array(LEVELS + 1).fill(0);
      for (let c = 0; c < count; c++) bars[levels[c]]++;
      const words = { order: ["order", "short memory", "long"], gate: ["write gate", "writes little", "much"], surprise: ["surprise", "expected", "not"] }[kind];
      const ends = kind === "surprise" ? [`${low.toFixed(0)} bits`, `${high.toFixed(1)} bits`] : [fixed(low), high === 1 ? "1" : fixed(high)];
      box.append(make("div", {},
        make("div", { text: `${words[0]}, and how many tokens have it` }),
        scaleOf(kind, `${ends[0]} ${words[1]}`, `${words[2]} ${ends[1]}`, bars)));
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

  // Panel ------------------------------------------------------------------------------------

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
      const button = make("button", { "data-token": token, "aria-label": `${nameOf(c)}, ${plural(Math.abs(lag), "token")} ${lag < 0 ? "back" : "on"}, ${share(weights[n])}` },
        words,
        make("span", { class: "lag", text: lag === 0 ? "itself" : `${lag < 0 ? "−" : "+"}${whole(Math.abs(lag))}` }),
        make("span", { class: "w", text: share(weights[n]) }));
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
    for (const s of kept) {
      const bar = make("i");
      bar.style.width = `${(100 * sums[s]) / all}%`;
      bar.style.background = colours[s];
      const label = head.rates[s] > 0 ? `half-life ${halfLife(head.rates[s])}` : halfLife(head.rates[s]);
      const button = make("button", { "aria-pressed": state.scale === s, "data-scale": s, "aria-label": `${label}, ${share(sums[s] / all)}` },
        make("span", { text: label }), make("span", { class: "track" }, bar), make("span", { class: "n", text: share(sums[s] / all) }));
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
    body.append(make("canvas", { class: "chart", id: "influence-chart", role: "img", "aria-label": `Influence by lag; the strongest reader is ${plural(best, "token")} on, with ${share(found.gives[best])}` }));
    const list = hitsOf(found.gives, (lag) => state.picked + lag, 1, 5, "cool");
    list.id = "readers";
    list.setAttribute("aria-label", "Strongest readers");
    body.append(list);
  }

  function drawCharts(marked) {
    const scales = $("scales-chart");
    if (scales) vortCharts.scales(scales, found.reads.byScale, vortCharts.ramp(head.rates), state.scale);
    const influence = $("influence-chart");
    if (!influence) return;
    const draw = (lag) => vortCharts.influence(influence, found.gives, (x) => vortMemory.kernel(head, state.picked, x), lag);
    const lagAt = draw(marked);
    const lagOf = (event) => lagAt(event.clientX - influence.getBoundingClientRect().left);
    influence.onpointermove = (event) => {
      const lag = lagOf(event);
      draw(lag);
      const c = cellOf[state.picked + lag];
      tip(`${plural(lag, "token")} on: ${nameOf(c)}\nkernel ${vortMemory.kernel(head, state.picked, lag).toPrecision(3)}\nretrieved with ${share(found.gives[lag])}`, event);
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
      make("p", { text: "Every character is coloured by the order that this head gives it: the higher the order, the longer the memory keeps it." }),
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
    row("long", ranked.slice(0, 6));
    row("short", ranked.slice(-6).reverse());
  }

  // Selection --------------------------------------------------------------------------------

  function look() {
    found = state.picked === null ? null : {
      reads: vortMemory.reads(head, state.picked),
      gives: vortMemory.gives(head, state.picked),
      tops: null,
    };
  }

  function pick(token) {
    for (const old of document.querySelectorAll('#text [aria-selected="true"]')) old.removeAttribute("aria-selected");
    state.picked = token;
    state.here = cellOf[token];
    cells[state.here].setAttribute("aria-selected", "true");
    look();
    setColour("memory");
    $("panel").classList.remove("shut"); // before it is filled: charts need its width
    $("grip").setAttribute("aria-expanded", "true");
    panel();
    activate();
    keepInSight(state.here);
    const half = medianLag(found.reads.total);
    $("status").textContent = `Selected ${nameOf(state.here)}, token ${token}${head.ordered ? `, order ${fixed(head.order[token])}` : ""}. Half of what it reads lies within ${plural(half, "token")}.`;
  }

  function release() {
    for (const old of document.querySelectorAll('#text [aria-selected="true"]')) old.removeAttribute("aria-selected");
    state.picked = null;
    state.scale = null;
    found = null;
    setColour(fallback());
    panel();
    $("status").textContent = "Nothing is selected.";
  }

  function setColour(name) {
    if (name !== "memory") resting = name === "absolute" ? "absolute" : "stretched";
    state.colour = name;
    $("colour").value = name;
    recolour();
  }

  function describe(c) {
    const token = lastToken(c);
    const lines = [`${nameOf(c)}   token ${whole(token)}`];
    const values = [];
    if (head.ordered) values.push(`order ${fixed(head.order[token])}`);
    if (head.gated) values.push(`gate ${fixed(head.gate[token])}`);
    if (data.surprise[token] !== null) values.push(`${data.surprise[token].toFixed(1)} bits`);
    lines.push(values.join(" · "));
    if (found && c < cellOf[state.picked]) {
      let sum = 0;
      for (let i = first[c]; i <= token; i++) sum += found.reads.total[i];
      lines.push(`the selection reads ${share(sum)} from here`);
    } else if (found && c > cellOf[state.picked]) lines.push(`retrieves the selection with ${share(found.gives[token - state.picked])}`);
    return lines.join("\n");
  }

  function activate() {
    const box = $("text");
    const cell = cells[state.here];
    box.setAttribute("aria-activedescendant", cell.id);
    cell.setAttribute("aria-label", describe(state.here).replaceAll("\n", ", "));
    paint();
  }

  function reveal(c) {
    cells[c].scrollIntoView({ block: "center", behavior: "instant" });
    keepInSight(c);
  }

  function move(c) {
    cells[state.here].removeAttribute("aria-label");
    state.here = Math.min(count - 1, Math.max(0, c));
    activate();
    keepInSight(state.here);
  }

  /** Scroll if a cell is under the bar, or under the panel where that covers the lower half. */
  function keepInSight(c) {
    const box = cells[c].getBoundingClientRect();
    const top = document.querySelector(".bar").offsetHeight + 8;
    const low = isNarrow() ? $("panel").getBoundingClientRect().top : window.innerHeight;
    if (box.top < top || box.bottom > low - 8) {
      scrollBy({ top: box.top - (top + low) / 2, behavior: "instant" });
    }
  }

  // A line break hangs on the end of its cell: the last rectangle would lie a line below.
  const boxOf = (c) => cells[c].getClientRects()[0] ?? cells[c].getBoundingClientRect();

  /** The cell nearest to x on the line above or below, so many lines away. */
  function lineMove(step, lines) {
    let c = state.here;
    const start = boxOf(c);
    const x = start.left;
    for (let n = 0; n < lines; n++) {
      const from = boxOf(c);
      let next = c;
      while (next + step >= 0 && next + step < count && Math.abs(boxOf(next).top - from.top) < from.height * 0.7) next += step;
      const line = boxOf(next).top;
      if (Math.abs(line - from.top) < from.height * 0.7) return next;
      let best = next;
      while (next >= 0 && next < count && Math.abs(boxOf(next).top - line) < from.height * 0.7) {
        if (Math.abs(boxOf(next).left - x) < Math.abs(boxOf(best).left - x)) best = next;
        next += step;
      }
      c = best;
    }
    return c;
  }

  function lineEnd(step) {
    const from = boxOf(state.here);
    let c = state.here;
    while (c + step >= 0 && c + step < count && Math.abs(boxOf(c + step).top - from.top) < from.height * 0.7) c += step;
    return c;
  }

  function onKey(event) {
    if (event.altKey || event.metaKey) return;
    const jump = event.ctrlKey;
    const moves = {
      ArrowLeft: () => state.here - 1,
      ArrowRight: () => state.here + 1,
      ArrowUp: () => lineMove(-1, 1),
      ArrowDown: () => lineMove(1, 1),
      Home: () => (jump ? 0 : lineEnd(-1)),
      End: () => (jump ? count - 1 : lineEnd(1)),
      PageUp: () => lineMove(-1, 15),
      PageDown: () => lineMove(1, 15),
    };
    if (moves[event.key]) move(moves[event.key]());
    else if (event.key === "Enter" || event.key === " ") pick(lastToken(state.here));
    else if (event.key === "[" || event.key === "]") stepHead(event.key === "]" ? 1 : -1);
    else return;
    event.preventDefault();
  }

  function stepHead(step) {
    const heads = data.layers.flatMap((layer, l) => Array.from({ length: layer.heads }, (_, h) => [l, h]));
    const now = heads.findIndex(([l, h]) => l === state.layer && h === state.head);
    const [l, h] = heads[(now + step + heads.length) % heads.length];
    openHead(l, h);
  }

  function tip(text, event) {
    const box = $("tip");
    box.classList.toggle("on", Boolean(text));
    if (!text) return;
    box.textContent = text;
    const { offsetWidth: width, offsetHeight: height } = box;
    const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
    const below = event.clientY + 20 + height < window.innerHeight;
    box.style.transform = `translate(${Math.max(8, left)}px, ${below ? event.clientY + 20 : event.clientY - height - 12}px)`;
  }

  // Start ------------------------------------------------------------------------------------

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
    $("foot").append(list, make("p", {
      text: `Weights are computed in this page from the model's own features, stored in ${data.bits} bits each. At sampled positions of every head no weight was off by more than ${precision} of the largest one there. Characters stand in the order in which the model reads them, and those without a shape are shown as symbols.`,
    }));
  }

  function start() {
    document.body.dataset.ready = "no";
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
})();
