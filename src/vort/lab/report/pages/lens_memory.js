"use strict";
// What the model did with the text, and every retrieval weight, computed when asked for.
//
//   weight(t, i) = q[t]·k[i] · sum_s read[t,s] exp(-rate[s] (t - i)) write[i,s] / denominator[t]
//
// A head is decoded the first time it is looked at. Codes are described in vort/report/lens/codes.py.

const vortMemory = (() => {
  const kept = new Map();

  function tableOf(bits, signed, span) {
    const levels = 2 ** (signed ? bits - 1 : bits) - 1;
    const table = new Float32Array(2 ** bits);
    for (let code = 1; code <= levels; code++) {
      table[code] = Math.exp(-span + (span * (code - 1)) / (levels - 1));
      if (signed) table[code + levels + 1] = -table[code];
    }
    return table;
  }

  /** Bytes one after the other: each call takes the next array. */
  function cursorOf(text) {
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    const view = new DataView(bytes.buffer);
    let place = 0;
    return {
      floats(count) {
        const out = new Float32Array(count);
        for (let i = 0; i < count; i++, place += 4) out[i] = view.getFloat32(place, true);
        return out;
      },
      shares(count) {
        const out = new Float32Array(count);
        for (let i = 0; i < count; i++, place += 2) out[i] = view.getUint16(place, true) / 65535;
        return out;
      },
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

  function decode(data, layer, head) {
    const about = data.layers[layer];
    const length = data.tokens;
    const take = cursorOf(document.getElementById(`head-${layer}-${head}`).textContent);
    const features = tableOf(data.bits, about.signed, data.span);
    const routes = tableOf(12, false, data.span);
    return {
      length,
      scales: about.scales,
      size: about.features,
      rates: about.rates[head],
      includeSelf: about.includeSelf,
      shares: about.shares,
      ordered: about.ordered,
      gated: about.gated,
      reader: take.floats(length),
      writer: take.floats(length),
      largestWrite: take.floats(length),
      order: take.shares(length),
      gate: take.shares(length),
      write: take.codes(length * about.scales, 12, routes),
      read: about.reads ? take.codes(length * about.scales, 12, routes) : null,
      q: take.codes(length * about.features, data.bits, features),
      k: take.codes(length * about.features, data.bits, features),
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

  return { open, reads, gives, kernel };
})();
