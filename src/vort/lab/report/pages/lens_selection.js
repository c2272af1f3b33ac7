"use strict";
// Choosing a token: by pointer, by keys, by following what it reads.

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
    lines.push(`the selection reads ${weight(sum)} from here`);
  } else if (found && c > cellOf[state.picked]) lines.push(`retrieves the selection with ${weight(found.gives[token - state.picked])}`);
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
