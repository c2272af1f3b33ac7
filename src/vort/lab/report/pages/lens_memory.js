"use strict";
// What the model did with the text, and every retrieval weight, computed when asked for.
//
//   weight(t, i) = q[t]·k[i] · sum_s read[t,s] exp(-rate[s] (t - i)) write[i,s] / denominator[t]
//
// All heads are inflated as the page opens, and each is decoded the first time it is looked at. What
// their bytes mean is described in vort/lab/report/lens/codes.py.

const vortMemory = (() => {
  const LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%()*+-;=?@^_`{|}~,./";
  const kept = new Map();
  const inflated = new Map();

  function tableOf(bits, signed, span) {
    const levels = 2 ** (signed ? bits - 1 : bits) - 1;
    const table = new Float32Array(2 ** bits);
    for (let code = 1; code <= levels; code++) {
      table[code] = Math.exp(-span + (span * (code - 1)) / (levels - 1));
      if (signed) table[code + levels + 1] = -table[code];
    }
    return table;
  }

  /** Bytes from "count:letters", five letters for four of them. */
  function bytesOf(text) {
    const colon = text.indexOf(":");
    const values = new Uint8Array(128);
    for (let n = 0; n < 85; n++) values[LETTERS.charCodeAt(n)] = n;
    const bytes = new Uint8Array(Math.ceil((text.length - colon - 1) / 5) * 4);
    const view = new DataView(bytes.buffer);
    for (let i = colon + 1, place = 0; i < text.length; i += 5, place += 4) {
      let number = 0;
      for (let n = 0; n < 5; n++) number = number * 85 + values[text.charCodeAt(i + n)];
      view.setUint32(place, number);
    }
    return bytes.subarray(0, Number(text.slice(0, colon)));
  }

  async function inflate(text) {
    const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  /** Inflate every head. */
  function load(data) {
    const names = data.layers.flatMap(({ heads }, l) => Array.from({ length: heads }, (_, h) => `${l}-${h}`));
    return Promise.all(names.map(async (name) => {
      const texts = document.getElementById(`head-${name}`).textContent.split(" ");
      inflated.set(name, await Promise.all(texts.map(inflate)));
    }));
  }

  /** Bytes one after the other: each call takes the next array. */
  function cursorOf(bytes, levels) {
    const view = new DataView(bytes.buffer, bytes.byteOffset);
    let place = 0;
    /** Numbers of two bytes, all low ones before all high ones, as shares of the levels there are. */
    function planes(count, meaning) {
      const out = new Float32Array(count);
      for (let i = 0; i < count; i++) out[i] = meaning((bytes[place + i] | (bytes[place + count + i] << 8)) / levels);
      place += 2 * count;
      return out;
    }
    return {
      floats(count) {
        const out = new Float32Array(count);
        for (let i = 0; i < count; i++, place += 4) out[i] = view.getFloat32(place, true);
        return out;
      },
      wholes(count, read, size) {
        const out = new Float32Array(count);
        for (let i = 0; i < count; i++, place += size) out[i] = view[read](place, true);
        return out;
      },
      bytes(count) {
        place += count;
        return bytes.subarray(place - count, place);
      },
      shares: (count) => planes(count, (x) => x),
      logs: (count, [low, high]) => planes(count, (x) => Math.exp(low + x * (high - low))),
      codes(count, bits, table) {
        const out = new Float32Array(count);
        if (bits === 8) {
          for (let i = 0; i < count; i++) out[i] = table[bytes[place++]];
          return out;
        }
        for (let i = 0; i < count; i += 2, place += 3) {
          const middle = bytes[place + 1];
          out[i] = table[bytes[place] | ((middle & 15) << 8)];
          if (i + 1 < count) out[i + 1] = table[(middle >> 4) | (bytes[place + 2] << 4)];
        }
        return out;
      },
    };
  }

  /** Rows of logarithms from steps along their axes. */
  function turnedRows(take, small, length, columns, step) {
    const mean = take.floats(columns);
    const [scale] = take.floats(1);
    const axes = take.wholes(columns * columns, "getInt8", 1);
    const high = take.bytes(length * columns);
    const low = small.bytes(length * columns);
    const out = new Float32Array(length * columns);
    for (let t = 0; t < length; t++) {
      const row = out.subarray(t * columns, (t + 1) * columns);
      row.set(mean);
      for (let a = 0; a < columns; a++) {
        const code = low[a * length + t] | (high[a * length + t] << 8);
        if (code === 0) continue;
        const along = (code % 2 ? -(code + 1) / 2 : code / 2) * step * scale;
        for (let c = 0, at = a * columns; c < columns; c++, at++) row[c] += along * axes[at];
      }
    }
    return out;
  }

  /** Softmax of each row, and of its negative beside it. */
  function softmaxes(logits, length) {
    const half = logits.length / length;
    const out = new Float32Array(2 * logits.length);
    for (let t = 0; t < length; t++) {
      for (const [sign, from] of [[1, 0], [-1, half]]) {
        let top = -Infinity;
        for (let c = 0; c < half; c++) top = Math.max(top, sign * logits[t * half + c]);
        let sum = 0;
        const at = 2 * t * half + from;
        for (let c = 0; c < half; c++) sum += out[at + c] = Math.exp(sign * logits[t * half + c] - top);
        for (let c = 0; c < half; c++) out[at + c] /= sum;
      }
    }
    return out;
  }

  /** Positive rows from their logarithms, of mean 1. */
  function evenRows(logs, columns) {
    for (let at = 0; at < logs.length; at += columns) {
      let sum = 0;
      for (let c = 0; c < columns; c++) sum += logs[at + c] = Math.exp(logs[at + c]);
      for (let c = 0; c < columns; c++) logs[at + c] *= columns / sum;
    }
    return logs;
  }

  /** Write weights of orders, straight between those of knots. */
  function writesAt(order, take, count, columns) {
    const knots = take.floats(count);
    const largest = take.floats(1)[0] / 65535;
    const writes = take.wholes(count * columns, "getUint16", 2);
    const out = new Float32Array(order.length * columns);
    for (let i = 0; i < order.length; i++) {
      let [low, high] = [0, count - 1];
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (knots[middle] <= order[i]) low = middle;
        else high = middle;
      }
      const span = knots[high] - knots[low];
      const part = span > 0 ? Math.min(1, Math.max(0, (order[i] - knots[low]) / span)) : 0;
      for (let s = 0; s < columns; s++) {
        out[i * columns + s] = largest * (writes[low * columns + s] * (1 - part) + writes[high * columns + s] * part);
      }
    }
    return out;
  }

  function decode(data, layer, head) {
    const about = data.layers[layer];
    const { gate: gates, reader: readers, knots } = about.each[head];
    const length = data.tokens;
    const [small, take] = inflated.get(`${layer}-${head}`).map((bytes) => cursorOf(bytes, about.levels));
    const routes = tableOf(12, false, data.span);
    const order = take.shares(length);
    const gate = take.logs(length, gates);
    const largestWrite = Float32Array.from(gate);
    let write;
    if (knots) write = writesAt(order, take, knots, about.scales);
    else {
      const largest = take.floats(length);
      for (let i = 0; i < length; i++) largestWrite[i] *= largest[i];
      write = take.codes(length * about.scales, 12, routes);
    }
    let [reader, writer, read, q, k] = [null, null, null, null, null];
    if (about.turned) {
      reader = take.logs(length, readers);
      writer = new Float32Array(length).fill(1);
      const rows = (columns, step) => turnedRows(take, small, length, columns, step);
      q = softmaxes(rows(about.features / 2, data.step), length);
      k = softmaxes(rows(about.features / 2, data.step), length);
      if (about.reads) read = evenRows(rows(about.scales, data.step / 2), about.scales);
    } else {
      const features = tableOf(data.bits, about.signed, data.span);
      reader = take.floats(length);
      writer = take.floats(length);
      if (about.reads) read = take.codes(length * about.scales, 12, routes);
      q = take.codes(length * about.features, data.bits, features);
      k = take.codes(length * about.features, data.bits, features);
    }
    return {
      length,
      scales: about.scales,
      size: about.features,
      rates: about.rates[head],
      includeSelf: about.includeSelf,
      shares: about.shares,
      ordered: about.ordered,
      gated: about.gated,
      reader,
      writer,
      largestWrite,
      order,
      gate,
      write,
      read,
      q,
      k,
    };
  }

  function score(head, t, i) {
    const { q, k, size } = head;
    let sum = 0;
    for (let a = t * size, b = i * size, end = a + size; a < end; a++, b++) sum += q[a] * k[b];
    return sum * head.reader[t] * head.writer[i];
  }

  /** How much position t retrieves of each token up to it: { total [t+1], byScale [S][t+1] }. */
  function reads(head, t) {
    const { scales, rates } = head;
    const total = new Float64Array(t + 1);
    const byScale = rates.map(() => new Float64Array(t + 1));
    const last = head.includeSelf ? t : t - 1;
    for (let i = 0; i <= last; i++) {
      const common = score(head, t, i) * head.largestWrite[i];
      for (let s = 0; s < scales; s++) {
        const read = head.read ? head.read[t * scales + s] : 1;
        const weight = common * read * head.write[i * scales + s] * Math.exp(-rates[s] * (t - i));
        byScale[s][i] = weight;
        total[i] += weight;
      }
    }
    return { total, byScale };
  }

  /** How much each position from i on retrieves of token i: [T - i], by lag. */
  function gives(head, i) {
    const { scales, rates, length } = head;
    const out = new Float64Array(length - i);
    for (let t = head.includeSelf ? i : i + 1; t < length; t++) {
      let kernel = 0;
      for (let s = 0; s < scales; s++) {
        const read = head.read ? head.read[t * scales + s] : 1;
        kernel += read * head.write[i * scales + s] * Math.exp(-rates[s] * (t - i));
      }
      out[t - i] = score(head, t, i) * head.largestWrite[i] * kernel;
    }
    return out;
  }

  /** What is left of token i in the memory after each lag, whoever asks: the retention kernel. */
  function kernel(head, i, lag) {
    let sum = 0;
    for (let s = 0; s < head.scales; s++) {
      sum += head.write[i * head.scales + s] * Math.exp(-head.rates[s] * lag);
    }
    return sum * head.largestWrite[i];
  }

  function open(data, layer, head) {
    const name = `${layer}-${head}`;
    if (!kept.has(name)) kept.set(name, decode(data, layer, head));
    return kept.get(name);
  }

  return { load, open, reads, gives, kernel };
})();
