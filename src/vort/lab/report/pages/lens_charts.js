"use strict";
// The panel's two charts, on canvas: thousands of points stay quick.

const vortCharts = (() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function begin(canvas, height) {
    const width = Math.max(canvas.clientWidth, 200);
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${css("--sans")}`;
    return { pen, width, height, left: 38, right: width - 6, top: 8, bottom: height - 30 };
  }

  const POWERS = ["⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"];
  const power = (n) => (n === 0 ? "1" : `10${n < 0 ? "⁻" : ""}${[...String(Math.abs(n))].map((d) => POWERS[d]).join("")}`);

  function ticksOf(largest) {
    const ticks = [];
    for (let value = 1; value <= largest; value *= 10) ticks.push(value);
    return ticks;
  }

  function lagAxis(frame, largest, place) {
    const { pen, top, bottom, left, right } = frame;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const value of ticksOf(largest)) {
      const x = place(value);
      pen.strokeStyle = css("--line");
      line(pen, x, top, x, bottom);
      pen.fillStyle = css("--faint");
      pen.fillText(value.toLocaleString("en"), Math.min(Math.max(x, left + 4), right - 10), bottom + 4);
    }
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    pen.fillText("lag, tokens", right, bottom + 17);
    pen.strokeStyle = css("--faint");
    line(pen, left, bottom, right, bottom);
  }

  function line(pen, x0, y0, x1, y1) {
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  /**
   * What a token gives: its kernel as a line, the weight with which each later position in fact
   * retrieves it as dots, on two logarithmic axes. Returns lagAt(x).
   */
  function influence(canvas, weights, kernel, marked) {
    const frame = begin(canvas, 178);
    const { pen, left, right, top, bottom } = frame;
    const largest = Math.max(weights.length - 1, 2);
    let high = kernel(1);
    let low = Infinity;
    for (let lag = 1; lag < weights.length; lag++) {
      const size = Math.abs(weights[lag]);
      if (size > high) high = size;
      if (size > 0 && size < low) low = size;
    }
    low = Math.min(low, kernel(largest));
    const ceiling = Math.ceil(Math.log10(high || 1) - 0.05);
    const floor = Math.max(Math.floor(Math.log10(low > 0 && Number.isFinite(low) ? low : 1e-6)), ceiling - 7);
    const x = (lag) => left + ((right - left) * Math.log(lag)) / Math.log(largest);
    const y = (value) => bottom - ((bottom - top) * (Math.log10(value) - floor)) / (ceiling - floor || 1);
    pen.textBaseline = "middle";
    for (let n = floor; n <= ceiling; n++) {
      pen.strokeStyle = css("--line");
      line(pen, left, y(10 ** n), right, y(10 ** n));
      pen.fillStyle = css("--faint");
      pen.textAlign = "right";
      if (ceiling - floor < 5 || (n - floor) % 2 === 0) pen.fillText(power(n), left - 5, y(10 ** n));
    }
    lagAxis(frame, largest, x);
    pen.save();
    pen.beginPath();
    pen.rect(left, top - 4, right - left + 4, bottom - top + 4);
    pen.clip();
    pen.fillStyle = css("--cool");
    pen.globalAlpha = Math.max(0.16, Math.min(0.7, 300 / weights.length));
    for (let lag = 1; lag < weights.length; lag++) {
      const size = Math.abs(weights[lag]);
      if (size > 0) pen.fillRect(x(lag) - 1.1, y(size) - 1.1, 2.2, 2.2);
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 1.8;
    pen.beginPath();
    for (let step = 0; step <= 120; step++) {
      const lag = largest ** (step / 120);
      const value = kernel(lag);
      if (value > 0) pen.lineTo(x(lag), y(value));
    }
    pen.stroke();
    if (marked) {
      pen.strokeStyle = css("--focus");
      line(pen, x(marked), top, x(marked), bottom);
    }
    pen.restore();
    return (place) => Math.min(largest, Math.max(1, Math.round(largest ** ((place - left) / (right - left)))));
  }

  /** What a position reads, by lag in octaves, each bar stacked by time scale (fast on top). */
  function scales(canvas, byScale, colours, only, words) {
    const frame = begin(canvas, 150);
    const { pen, left, right, top, bottom } = frame;
    const last = byScale[0].length - 1;
    const octaves = Math.max(1, Math.floor(Math.log2(Math.max(last, 1))) + 1);
    const bars = byScale.map((weights) => {
      const sums = new Float64Array(octaves + 1);
      for (let i = 0; i <= last; i++) {
        const lag = last - i;
        sums[lag === 0 ? 0 : Math.floor(Math.log2(lag)) + 1] += Math.abs(weights[i]);
      }
      return sums;
    });
    let high = 0;
    for (let bin = 0; bin <= octaves; bin++) {
      let sum = 0;
      bars.forEach((bar, s) => { if (only === null || only === s) sum += bar[bin]; });
      if (sum > high) high = sum;
    }
    high = high || 1;
    const step = (right - left) / (octaves + 1);
    pen.textBaseline = "middle";
    for (const part of [0.5, 1]) {
      const y = bottom - (bottom - top - 4) * part;
      pen.strokeStyle = css("--line");
      line(pen, left, y, right, y);
      pen.fillStyle = css("--faint");
      pen.textAlign = "right";
      pen.fillText(words(high * part), left - 5, y);
    }
    for (let bin = 0; bin <= octaves; bin++) {
      let base = bottom;
      bars.forEach((bar, s) => {
        if (only !== null && only !== s) return;
        const tall = ((bottom - top - 4) * bar[bin]) / high;
        pen.fillStyle = colours[s];
        pen.fillRect(left + bin * step + 1.5, base - tall, step - 3, tall);
        base -= tall;
      });
    }
    pen.strokeStyle = css("--faint");
    line(pen, left, bottom, right, bottom);
    pen.textBaseline = "top";
    pen.textAlign = "center";
    pen.fillStyle = css("--faint");
    const skip = octaves > 9 ? 2 : 1;
    for (let bin = 0; bin <= octaves; bin += bin === 0 ? 1 : skip) {
      const text = bin === 0 ? "self" : (2 ** (bin - 1)).toLocaleString("en");
      pen.fillText(text, left + (bin + 0.5) * step, bottom + 4);
    }
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    pen.fillText("lag from, tokens back", right, bottom + 17);
  }

  /** Colours of time scales, slow to fast as the model lists them: dark stays, light fades. */
  function ramp(rates) {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
    const ranks = rates.map((rate) => rates.filter((other) => other < rate).length);
    const top = Math.max(rates.length - 1, 1);
    return ranks.map((rank) => {
      const share = 1 - rank / top;
      const light = dark ? 0.86 - 0.42 * share : 0.84 - 0.46 * share;
      return `oklch(${light.toFixed(3)} 0.13 ${(72 - 42 * share).toFixed(0)})`;
    });
  }

  return { influence, scales, ramp };
})();
