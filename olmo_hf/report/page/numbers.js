"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = DATA.colors;
const view = { axis: "step", from: null, to: null, smoothing: 40, raw: true, marks: true, hidden: new Set() };
const charts = [];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, attributes = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
};

// ---- numbers ----
function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out.buffer;
}
const column = text => ({ u32: t => new Uint32Array(t), f32: t => new Float32Array(t), f64: t => new Float64Array(t) })[
  text.slice(0, 3)](bytes(text.slice(4)));
function short(value) {
  if (!Number.isFinite(value)) return String(value);
  for (const [factor, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= factor) return trim(value / (suffix === "k" ? 1e3 : factor), 4) + suffix;
  return trim(value, 5);
}
const trim = (value, digits) => String(Number(value.toPrecision(digits)));
const shown = (value, percent) => percent && Number.isFinite(value) ? trim(100 * value, 4) + "%" : short(value);
function firstAtOrAfter(sorted, x) {
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < x) low = middle + 1; else high = middle; }
  return low;
}
function interpolate(xs, ys, x) {
  const i = Math.min(Math.max(firstAtOrAfter(xs, x), 1), xs.length - 1);
  if (xs.length < 2) return ys[0];
  const share = (x - xs[i - 1]) / (xs[i] - xs[i - 1] || 1);
  return ys[i - 1] + share * (ys[i] - ys[i - 1]);
}
function smoothed(values, share) {
  const half = Math.floor(values.length * share / 2);
  if (half < 1) return values;
  const once = movingAverage(values, half);
  return movingAverage(once, half);
}
function movingAverage(values, half) {
  const n = values.length, sums = new Float64Array(n + 1), counts = new Uint32Array(n + 1), out = new Float32Array(n);
  for (let i = 0; i < n; i++) {
    const fine = Number.isFinite(values[i]);
    sums[i + 1] = sums[i] + (fine ? values[i] : 0);
    counts[i + 1] = counts[i] + (fine ? 1 : 0);
  }
  for (let i = 0; i < n; i++) {
    const low = Math.max(i - half, 0), high = Math.min(i + Math.min(i, half) + 1, n), count = counts[high] - counts[low];
    out[i] = count ? (sums[high] - sums[low]) / count : NaN;
  }
  return out;
}

// ---- runs and their axes ----
for (const run of DATA.runs) {
  run.map = { step: column(run.map.step), tokens: column(run.map.tokens), hours: column(run.map.hours) };
  run.at = step => view.axis === "step" ? step : interpolate(run.map.step, run.map[view.axis], step);
  for (const series of Object.values(run.series))
    for (const part of ["raw", "means"]) if (series[part]) {
      const steps = column(series[part].steps);
      series[part] = { steps, values: column(series[part].values), x: { step: steps } };
    }
}
function xs(run, part) {
  if (!part.x[view.axis]) part.x[view.axis] = Float64Array.from(part.steps, step => run.at(step));
  return part.x[view.axis];
}
function wholeRange() {
  let low = Infinity, high = -Infinity;
  for (const run of DATA.runs) if (!view.hidden.has(run.name))
    for (const { raw } of Object.values(run.series)) {
      const x = xs(run, raw);
      low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]);
    }
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}
const range = () => view.from === null ? wholeRange() : [view.from, view.to];

// ---- ticks ----
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough), out = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) out.push(Math.abs(t) < step / 1e6 ? 0 : t);
  return out;
}
function logTicks(low, high) {
  const out = [], decades = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const f of decades > 4 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8]) {
      const t = f * 10 ** power;
      if (t >= low && t <= high) out.push(t);
    }
  return out;
}
