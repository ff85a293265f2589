class Chart {
  constructor(spec, lines) {
    Object.assign(this, { spec, lines, log: spec.log_scale, hidden: new Set() });
    this.canvas = make("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("aria-label", spec.title);
    const box = make("input", { type: "checkbox", checked: this.log });
    box.onchange = () => { this.log = box.checked; this.draw(); };
    this.legend = make("div", { className: "legend" });
    for (const line of new Map(lines.map(line => [line.label, line])).values())
      this.legend.append(this.toggle(line.label, line));
    const log = make("label", { className: "log" }, box, " log");
    const card = make("div", { className: "chart" }, make("h3", { textContent: spec.title }),
      make("span", { className: "unit", textContent: spec.unit }), log, this.legend, this.canvas);
    card.id = "chart-" + spec.title.toLowerCase().replace(/[^a-z]+/g, "-");
    document.getElementById("charts").append(card);
    this.listen();
    charts.push(this);
  }
  toggle(name, { color, dash }) {
    const swatch = make("i"), many = DATA.runs.length > 1;  // then the colour says the run, the dash the metric
    swatch.style.background = many && dash.length ?
      `repeating-linear-gradient(90deg, currentColor 0 ${dash[0]}px, transparent 0 ${dash[0] + dash[1]}px)` :
      many ? "currentColor" : color;
    const button = make("button", { type: "button" }, swatch, name);
    button.onclick = () => {
      this.hidden.has(name) ? this.hidden.delete(name) : this.hidden.add(name);
      button.classList.toggle("off"); this.draw();
    };
    return button;
  }
  visible() { return this.lines.filter(line => !view.hidden.has(line.run.name) && !this.hidden.has(line.label)); }
  smooth(line) {
    const part = line.series.means || line.series.raw;
    if (line.smoothKey !== view.smoothing) {
      line.smoothKey = view.smoothing;
      line.smooth = part.values.length < 30 ? part.values : smoothed(part.values, (view.smoothing / 100) ** 2 * 0.12);
    }
    return { x: xs(line.run, part), values: line.smooth };
  }
  raw(line) { return { x: xs(line.run, line.series.raw), values: line.series.raw.values }; }
  layers(line) {
    const few = line.series.raw.values.length < 30;
    if (!this.spec.smooth) return [this.raw(line)];
    return view.raw && !few && view.smoothing > 0 ? [this.raw(line), this.smooth(line)] :
      view.smoothing > 0 ? [this.smooth(line)] : [this.raw(line)];
  }
  yRange(from, to) {
    let low = Infinity, high = -Infinity, least = Infinity;
    for (const line of this.visible()) for (const { x, values } of this.layers(line))
      for (let i = firstAtOrAfter(x, from), end = firstAtOrAfter(x, to * (1 + 1e-12)); i < end; i++) {
        const v = values[i];
        if (!Number.isFinite(v)) continue;
        if (v < low) low = v;
        if (v > high) high = v;
        if (v > 0 && v < least) least = v;
      }
    if (low > high) return [0, 1];
    if (this.log && least < Infinity) return [least / 1.08, Math.max(high, least * 1.01) * 1.08];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [low >= 0 && low < (high - low) * 0.5 ? Math.max(low - pad, 0) : low - pad, high + pad];
  }
  draw() {
    const ratio = window.devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = this.canvas;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    const [from, to] = range(), [low, high] = this.yRange(from, to), log = this.log && low > 0;
    const frame = this.frame = { left: 58, right: width - 10, top: 8, bottom: height - 22 };
    this.px = x => frame.left + (x - from) / (to - from || 1) * (frame.right - frame.left);
    this.xAt = px => from + (px - frame.left) / (frame.right - frame.left) * (to - from);
    const f = v => log ? Math.log(v) : v;
    this.py = v => frame.bottom - (f(v) - f(low)) / (f(high) - f(low) || 1) * (frame.bottom - frame.top);
    this.axes(g, from, to, low, high, log);
    g.save();
    g.beginPath(); g.rect(frame.left, frame.top, frame.right - frame.left, frame.bottom - frame.top); g.clip();
    if (view.marks) this.drawMarks(g, from, to);
    for (const line of this.visible()) {
      const layers = this.layers(line);
      layers.forEach((layer, k) => this.curve(g, layer, line, k < layers.length - 1));
    }
    g.restore();
  }
  axes(g, from, to, low, high, log) {
    const { left, right, top, bottom } = this.frame;
    g.font = "11px system-ui, sans-serif"; g.lineWidth = 1;
    g.textAlign = "right"; g.textBaseline = "middle";
    for (const t of log ? logTicks(low, high) : ticks(low, high, Math.max((bottom - top) / 45, 2))) {
      const y = this.py(t);
      g.strokeStyle = css("--line"); g.beginPath(); g.moveTo(left, y); g.lineTo(right, y); g.stroke();
      g.fillStyle = css("--soft"); g.fillText(shown(t, this.spec.percent), left - 6, y);
    }
    g.textAlign = "center"; g.textBaseline = "top";
    for (const t of ticks(from, to, Math.max((right - left) / 110, 2))) {
      const half = g.measureText(short(t)).width / 2;
      g.fillText(short(t), Math.min(this.px(t), right + 8 - half), bottom + 5);
    }
  }
  drawMarks(g, from, to) {
    const { top, bottom } = this.frame;
    for (const run of DATA.runs) if (!view.hidden.has(run.name)) for (const mark of run.marks) {
      const at = run.at(mark.step);
      if (at < from || at > to) continue;
      const x = this.px(at);
      g.strokeStyle = g.fillStyle = mark.kind === "spike" ? css("--mark") : css("--soft");
      if (mark.kind === "checkpoint" || mark.kind === "evaluation") {
        g.globalAlpha = 0.5; g.fillRect(x - 0.5, bottom - (mark.kind === "checkpoint" ? 6 : 3), 1, 6); g.globalAlpha = 1;
      } else if (mark.kind === "spike") {
        g.beginPath(); g.moveTo(x - 5, top); g.lineTo(x + 5, top); g.lineTo(x, top + 8); g.fill();
      } else {
        g.setLineDash([2, 3]); g.beginPath(); g.moveTo(x, top); g.lineTo(x, bottom); g.stroke(); g.setLineDash([]);
      }
    }
  }
  curve(g, { x, values }, line, faint) {
    g.strokeStyle = g.fillStyle = line.color; g.globalAlpha = faint ? 0.28 : 1; g.lineWidth = faint ? 1 : 1.7;
    g.setLineDash(line.dash); g.lineJoin = "round";
    let i = Math.max(firstAtOrAfter(x, this.xAt(this.frame.left)) - 1, 0);
    const end = Math.min(firstAtOrAfter(x, this.xAt(this.frame.right)) + 1, x.length), dots = end - i < 30;
    const dense = end - i > 3 * (this.frame.right - this.frame.left);
    let open = false;
    g.beginPath();
    while (i < end) {
      if (!Number.isFinite(values[i])) { open = false; i++; continue; }
      const px = this.px(x[i]);
      let low = values[i], high = values[i], last = values[i];
      if (dense) for (; i + 1 < end && this.px(x[i + 1]) < px + 1 && Number.isFinite(values[i + 1]); i++) {
        last = values[i + 1];
        if (last < low) low = last;
        if (last > high) high = last;
      }
      open ? g.lineTo(px, this.py(low)) : g.moveTo(px, this.py(low));
      if (high !== low) { g.lineTo(px, this.py(high)); g.lineTo(px, this.py(last)); }
      open = true; i++;
    }
    g.stroke(); g.setLineDash([]);
    if (dots) for (i = 0; i < end; i++) if (Number.isFinite(values[i])) {
      g.beginPath(); g.arc(this.px(x[i]), this.py(values[i]), 2.5, 0, 7); g.fill();
    }
    g.globalAlpha = 1;
  }
  listen() {
    const canvas = this.canvas;
    let start = null;
    const inside = event => event.clientX - canvas.getBoundingClientRect().left;
    canvas.onpointerdown = event => { start = inside(event); };
    canvas.onpointermove = event => {
      if (start === null) return this.hover(event);
      this.draw();
      const g = canvas.getContext("2d");
      g.fillStyle = css("--soft"); g.globalAlpha = 0.2;
      g.fillRect(start, this.frame.top, inside(event) - start, this.frame.bottom - this.frame.top);
    };
    canvas.onpointerup = event => {
      const [a, b] = [start, inside(event)].sort((p, q) => p - q).map(this.xAt);
      if (start !== null && Math.abs(inside(event) - start) > 5) zoom(a, b);
      start = null;
    };
    canvas.onpointerleave = () => { start = null; tip.hidden = true; this.draw(); };
    canvas.ondblclick = () => zoom(null, null);
  }
  hover(event) {
    const box = this.canvas.getBoundingClientRect(), at = this.xAt(event.clientX - box.left), rows = [];
    this.draw();
    const g = this.canvas.getContext("2d");
    let place = null;
    for (const line of this.visible()) {
      const x = xs(line.run, line.series.raw), values = line.series.raw.values;
      let i = Math.min(firstAtOrAfter(x, at), x.length - 1);
      if (i > 0 && at - x[i - 1] < x[i] - at) i--;
      if (place === null) place = { x: x[i], step: line.series.raw.steps[i], run: line.run };
      const swatch = make("i"); swatch.style.cssText = `display:inline-block;width:9px;height:9px;background:${line.color}`;
      rows.push(make("tr", {}, make("td", {}, swatch, " " + line.name),
        make("td", { textContent: shown(values[i], this.spec.percent) })));
      g.fillStyle = line.color;
      if (Number.isFinite(values[i])) { g.beginPath(); g.arc(this.px(x[i]), this.py(values[i]), 3.5, 0, 7); g.fill(); }
    }
    if (place === null) return;
    const px = this.px(place.x);
    g.strokeStyle = css("--soft"); g.beginPath(); g.moveTo(px, this.frame.top); g.lineTo(px, this.frame.bottom); g.stroke();
    const tokens = interpolate(place.run.map.step, place.run.map.tokens, place.step);
    const near = place.run.marks.filter(m => m.step === place.step && m.text).map(m => make("div", { textContent: m.text }));
    tip.replaceChildren(make("b", { textContent: `step ${place.step.toLocaleString("en")}, ${short(tokens)} tokens` }),
      make("table", {}, ...rows), ...near);
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  }
}
