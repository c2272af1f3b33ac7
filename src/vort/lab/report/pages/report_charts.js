"use strict";
// Line charts in SVG: linear or logarithmic, a band around each line, values under the pointer.

const vortChart = (() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const SHAPES = ["circle", "square", "diamond", "triangle", "cross", "down"];
  const CROWDED = 6;

  /** 32 looks: eight colours in four dashes. Two of one colour have different shapes as well. */
  const classOf = ({ look }) => `s s${look % 8} d${Math.floor(look / 8) % 4}${look === 0 ? " ours" : ""}`;
  const shapeOf = ({ look }) => SHAPES[(look + Math.floor(look / 8)) % SHAPES.length];

  function node(name, attributes = {}, text) {
    const made = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function niceTicks(low, high, count) {
    const rough = (high - low) / count || 1;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= rough);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let n = Math.ceil(Math.log10(low) - 1e-9); 10 ** n <= high * 1.000001; n++) ticks.push(10 ** n);
    if (ticks.length >= 2) return ticks;
    return [...new Set([low, Math.sqrt(low * high), high].map((x) => Number(x.toPrecision(2))))];
  }

  function shape(kind, x, y, size) {
    if (kind === "circle") return node("circle", { cx: x, cy: y, r: size });
    const s = size * 1.1;
    const points = {
      square: [[-s, -s], [s, -s], [s, s], [-s, s]],
      diamond: [[0, -s * 1.3], [s * 1.3, 0], [0, s * 1.3], [-s * 1.3, 0]],
      triangle: [[0, -s * 1.3], [s * 1.2, s], [-s * 1.2, s]],
      down: [[0, s * 1.3], [s * 1.2, -s], [-s * 1.2, -s]],
      cross: [[-1, -3], [1, -3], [1, -1], [3, -1], [3, 1], [1, 1], [1, 3], [-1, 3], [-1, 1], [-3, 1], [-3, -1], [-1, -1]].map(([a, b]) => [a * s * 0.48, b * s * 0.48]),
    }[kind];
    return node("polygon", { points: points.map(([a, b]) => `${x + a},${y + b}`).join(" ") });
  }

  const brief = (v) => (Math.abs(v) >= 1000 ? v.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(v.toPrecision(3))));

  /** Draws one chart into a box and again whenever the box changes its width. */
  function chart(box, spec, say) {
    const hidden = new Set();
    let places = [];
    let at = null;
    let frame = null;
    let lit = null;
    const shows = (value) => (spec.y.percent ? `${(value * 100).toFixed(1)} %` : Number(value.toPrecision(4)).toString());

    const legend = document.createElement("div");
    legend.className = "keys";
    for (const series of spec.series) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const icon = node("svg", { width: 34, height: 12, viewBox: "0 0 34 12", class: classOf(series), "aria-hidden": "true" });
      icon.append(node("line", { x1: 0, y1: 6, x2: 34, y2: 6, class: "line" }), shape(shapeOf(series), 17, 6, 3));
      const name = document.createElement("span");
      name.textContent = series.name;
      button.append(icon, name);
      button.addEventListener("click", () => {
        if (!hidden.delete(series.name)) hidden.add(series.name);
        button.setAttribute("aria-pressed", String(!hidden.has(series.name)));
        draw();
      });
      const light = (on) => () => { lit = on ? series.name : null; emphasise(); };
      for (const [event, on] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]]) button.addEventListener(event, light(on));
      legend.append(button);
    }
    const plot = document.createElement("div");
    plot.className = "plot-area";
    plot.tabIndex = 0;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${spec.title}. ${spec.x.label} against ${spec.y.label}, ${spec.series.map((s) => s.name).join(", ")}. Arrow keys read out values.`);
    const spoken = document.createElement("p");
    spoken.className = "hidden";
    spoken.setAttribute("role", "status");
    box.append(legend, plot, spoken);

    /** Room at the right for the names of many lines, where there is any. */
    function margin(width) {
      if (spec.series.length <= CROWDED || width < 560) return 0;
      return Math.min(width * 0.36, 30 + 6.1 * Math.max(...spec.series.map((s) => s.name.length)));
    }

    /** Each line's name at its end, moved apart where lines end together, with a thread between. */
    function nameLines(svg, shown, width) {
      const { right, top, bottom, x, y } = frame;
      const step = Math.min(14, (bottom - top + 20) / shown.length);
      const rows = shown.map((series) => {
        const end = series.points.at(-1);
        return { series, x: x(end[0]), from: y(end[1]), y: y(end[1]) };
      }).sort((a, b) => a.from - b.from);
      rows.forEach((row, n) => { if (n) row.y = Math.max(row.y, rows[n - 1].y + step); });
      let floor = bottom + 6;
      for (const row of [...rows].reverse()) { row.y = Math.min(row.y, floor); floor = row.y - step; }
      const most = Math.floor((width - right - 26) / 6.1);
      for (const row of rows) {
        const group = node("g", { class: classOf(row.series), "data-name": row.series.name });
        const text = row.series.name.length > most ? `${row.series.name.slice(0, most - 1)}…` : row.series.name;
        group.append(
          node("polyline", { points: `${row.x + 4},${row.from} ${right + 12},${row.y} ${right + 20},${row.y}`, class: "thread" }),
          node("text", { x: right + 24, y: row.y + 4, class: "name" }, text),
        );
        svg.append(group);
      }
    }

    /** The line under the pointer in the legend; the others step back. */
    function emphasise() {
      for (const group of plot.querySelectorAll("[data-name]")) group.classList.toggle("back", lit !== null && group.dataset.name !== lit);
    }

    function scales(width, height) {
      const seen = spec.series.filter((s) => !hidden.has(s.name));
      const points = (seen.length ? seen : spec.series).flatMap((s) => s.points);
      const xs = points.map((p) => p[0]);
      let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
      let [y0, y1] = [Math.min(...points.map((p) => p[2])), Math.max(...points.map((p) => p[3]))];
      if (spec.y.percent) [y0, y1] = [0, Math.max(1, y1)];
      else {
        const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
        [y0, y1] = [y0 - room, y1 + room];
      }
      if (x1 <= x0) [x0, x1] = spec.x.log ? [x0 / 2, x0 * 2] : [x0 - 1, x0 + 1];
      const [left, right, top, bottom] = [46, width - 12 - margin(width), 10, height - 40];
      const u = spec.x.log ? Math.log : (v) => v;
      return {
        left, right, top, bottom, x0, x1, y0, y1,
        x: (v) => left + ((right - left) * (u(v) - u(x0))) / (u(x1) - u(x0)),
        y: (v) => bottom - ((bottom - top) * (v - y0)) / (y1 - y0),
      };
    }

    function draw() {
      const width = Math.max(plot.clientWidth, 240);
      const crowded = spec.series.length > CROWDED;
      const height = Math.round(Math.min(crowded ? 400 : 300, Math.max(crowded ? 280 : 210, width * 0.56)));
      frame = scales(width, height);
      const { left, right, top, bottom, x, y } = frame;
      const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
      const yTicks = niceTicks(frame.y0, frame.y1, spec.y.percent ? 4 : 5);
      for (const tick of yTicks) {
        svg.append(node("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "grid" }));
        svg.append(node("text", { x: left - 6, y: y(tick) + 4, class: "tick end" }, spec.y.percent ? `${Math.round(tick * 100)} %` : brief(tick)));
      }
      const xTicks = spec.x.log ? logTicks(frame.x0, frame.x1) : niceTicks(frame.x0, frame.x1, width < 400 ? 3 : 5);
      for (const tick of xTicks) {
        svg.append(node("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, class: "grid" }));
        svg.append(node("text", { x: x(tick), y: bottom + 16, class: "tick middle" }, brief(tick)));
      }
      svg.append(node("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
      svg.append(node("text", { x: right, y: height - 5, class: "label end" }, spec.x.label));
      svg.append(node("text", { x: left + 4, y: top + 4, class: "label" }, spec.y.percent ? "" : spec.y.label));
      const shown = spec.series.filter((s) => !hidden.has(s.name));
      for (const series of shown) {
        if (!series.points.some((p) => p[3] > p[2])) continue;
        const up = series.points.map((p) => `${x(p[0])},${y(p[3])}`);
        const down = [...series.points].reverse().map((p) => `${x(p[0])},${y(p[2])}`);
        svg.append(node("polygon", { points: [...up, ...down].join(" "), class: `${classOf(series)} band`, "data-name": series.name }));
      }
      // VORT comes first in the legend and last here: on top.
      for (const series of [...shown].reverse()) {
        const group = node("g", { class: classOf(series), "data-name": series.name });
        group.append(node("polyline", { points: series.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), class: "line" }));
        // Shapes on every point, or on some of a long line, at other places for each line.
        const every = series.points.length <= 24 ? 1 : Math.ceil(series.points.length / 7);
        const start = every === 1 ? 0 : Math.round((every * ((series.look * 3) % 8)) / 8);
        series.points.forEach((p, n) => { if (n % every === start % every) group.append(shape(shapeOf(series), x(p[0]), y(p[1]), 2.8)); });
        svg.append(group);
      }
      if (margin(width)) nameLines(svg, shown, width);
      svg.append(node("g", { class: "cross" }));
      plot.replaceChildren(svg);
      places = [...new Set(shown.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
      emphasise();
      if (at !== null) mark();
    }

    function mark() {
      const cross = plot.querySelector(".cross");
      if (!cross) return "";
      cross.replaceChildren();
      if (at === null || !places.length) return "";
      const { x, y, top, bottom } = frame;
      cross.append(node("line", { x1: x(at), x2: x(at), y1: top, y2: bottom, class: "hair" }));
      const rows = [];
      let head = "";
      for (const series of spec.series) {
        const point = hidden.has(series.name) ? undefined : series.points.find((p) => p[0] === at);
        if (!point) continue;
        head = point[4];
        const dot = shape(shapeOf(series), x(point[0]), y(point[1]), 4.5);
        dot.setAttribute("class", `${classOf(series)} dot`);
        cross.append(dot);
        const spread = point[3] > point[2] ? `  (${shows(point[2])} to ${shows(point[3])})` : "";
        rows.push([point[1], `${series.name}  ${shows(point[1])}${spread}`]);
      }
      rows.sort((a, b) => b[0] - a[0]);
      return [head, ...rows.map((row) => row[1])].join("\n");
    }

    plot.addEventListener("pointermove", (event) => {
      const svg = plot.querySelector("svg");
      if (!svg || !places.length) return;
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      at = places.reduce((best, p) => (Math.abs(frame.x(p) - px) < Math.abs(frame.x(best) - px) ? p : best));
      say(mark(), event.clientX, event.clientY);
    });
    const leave = () => { at = null; mark(); say(""); };
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") { leave(); return; }
      if (!(event.key in moves) || !places.length) return;
      event.preventDefault();
      const now = at === null ? (moves[event.key] > 0 ? -1 : places.length) : places.indexOf(at);
      at = places[Math.min(places.length - 1, Math.max(0, now + moves[event.key]))];
      const text = mark();
      spoken.textContent = text.replaceAll("\n", ", ");
      const area = plot.getBoundingClientRect();
      say(text, area.left + (frame.x(at) / plot.clientWidth) * area.width, area.top + area.height / 3);
    });
    let known = 0;
    new ResizeObserver(() => {
      if (plot.clientWidth && plot.clientWidth !== known) {
        known = plot.clientWidth;
        draw();
      }
    }).observe(plot);
    draw();
  }

  return { chart };
})();
