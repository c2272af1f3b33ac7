"use strict";
// Line charts in SVG: linear or logarithmic, a band around each line, values under the pointer.

const vortChart = (() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const SHAPES = ["circle", "square", "diamond", "triangle"];

  /** Eight colours, four shapes; beyond eight lines are dashed. */
  const classOf = (series) => `s s${series.colour % 8}${series.colour >= 8 ? " dashed" : ""}`;

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
    const shows = (value) => (spec.y.percent ? `${(value * 100).toFixed(1)} %` : Number(value.toPrecision(4)).toString());

    const legend = document.createElement("div");
    legend.className = "keys";
    for (const series of spec.series) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const icon = node("svg", { width: 22, height: 12, viewBox: "0 0 22 12", class: classOf(series), "aria-hidden": "true" });
      icon.append(node("line", { x1: 0, y1: 6, x2: 22, y2: 6, class: "line" }), shape(SHAPES[series.colour % 4], 11, 6, 3));
      const name = document.createElement("span");
      name.textContent = series.name;
      button.append(icon, name);
      button.addEventListener("click", () => {
        if (!hidden.delete(series.name)) hidden.add(series.name);
        button.setAttribute("aria-pressed", String(!hidden.has(series.name)));
        draw();
      });
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
      const [left, right, top, bottom] = [46, width - 12, 10, height - 40];
      const u = spec.x.log ? Math.log : (v) => v;
      return {
        left, right, top, bottom, x0, x1, y0, y1,
        x: (v) => left + ((right - left) * (u(v) - u(x0))) / (u(x1) - u(x0)),
        y: (v) => bottom - ((bottom - top) * (v - y0)) / (y1 - y0),
      };
    }

    function draw() {
      const width = Math.max(plot.clientWidth, 240);
      const height = Math.round(Math.min(300, Math.max(210, width * 0.56)));
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
        svg.append(node("polygon", { points: [...up, ...down].join(" "), class: `${classOf(series)} band` }));
      }
      for (const series of shown) {
        const group = node("g", { class: classOf(series) });
        group.append(node("polyline", { points: series.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), class: "line" }));
        if (series.points.length <= 24) for (const p of series.points) group.append(shape(SHAPES[series.colour % 4], x(p[0]), y(p[1]), 2.8));
        svg.append(group);
      }
      svg.append(node("g", { class: "cross" }));
      plot.replaceChildren(svg);
      places = [...new Set(shown.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
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
        const dot = shape(SHAPES[series.colour % 4], x(point[0]), y(point[1]), 4.5);
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
