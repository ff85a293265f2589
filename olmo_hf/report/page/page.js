// ---- the page ----
const tip = document.getElementById("tip");
function redraw() { for (const chart of charts) chart.draw(); }
function zoom(from, to) { view.from = from; view.to = to; redraw(); }
function build() {
  const many = DATA.runs.length > 1, dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  for (const spec of DATA.charts) {
    const lines = [];
    DATA.runs.forEach((run, r) => spec.names.forEach((name, n) => {
      if (!run.series[name]) return;
      const label = spec.labels[n];
      lines.push({ run, series: run.series[name], label, name: many ? `${run.name} · ${label}` : label,
        color: COLORS[(many ? r : n) % COLORS.length], dash: many ? dashes[n % dashes.length] : [] });
    }));
    if (lines.length) new Chart(spec, lines);
  }
  if (many) DATA.runs.forEach((run, r) => {
    const swatch = make("i"); swatch.style.cssText =
      `display:inline-block;width:14px;height:4px;margin-right:5px;background:${COLORS[r % COLORS.length]}`;
    const button = make("button", { type: "button" }, swatch, run.name);
    button.onclick = () => {
      view.hidden.has(run.name) ? view.hidden.delete(run.name) : view.hidden.add(run.name);
      button.classList.toggle("off"); redraw();
    };
    document.getElementById("runs").append(button);
  });
}
function controls() {
  for (const radio of document.querySelectorAll("[name=axis]"))
    radio.onchange = () => { view.axis = radio.value; zoom(null, null); };
  const on = (id, change) => { document.getElementById(id).oninput = event => { change(event.target); redraw(); }; };
  on("smoothing", input => { view.smoothing = Number(input.value); });
  on("raw", input => { view.raw = input.checked; });
  on("marks", input => { view.marks = input.checked; });
  document.getElementById("reset").onclick = () => zoom(null, null);
  window.onresize = redraw;
}
function table(head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map(cell => make(tag, { textContent: cell })));
  return make("table", {}, line(head, "th"), ...rows.map(row => line(row, "td")));
}
function words() {
  document.getElementById("subtitle").textContent = DATA.subtitle;
  for (const [name, value] of DATA.tiles) document.getElementById("tiles").append(
    make("div", { className: "tile" }, make("b", { textContent: value }), make("span", { textContent: name })));
  const spikes = document.getElementById("spikes"), events = document.getElementById("events"),
    settings = document.getElementById("settings");
  for (const run of DATA.runs) {
    const of = DATA.runs.length > 1 ? ` of ${run.name}` : "";
    if (run.spikes.length) spikes.append(make("h2", { textContent: `Spikes${of}` }));
    for (const spike of run.spikes) {
      const body = spike.instances.map(one => make("div", {}, make("b", { textContent: one.title }),
        make("pre", { textContent: one.text })));
      const look = make("button", { type: "button", textContent: "look" });
      look.onclick = event => {
        event.preventDefault();
        const at = run.at(spike.step), width = (wholeRange()[1] - wholeRange()[0]) * 0.02;
        zoom(at - width, at + width); scrollTo({ top: 0 });
      };
      if (spike.settings) body.push(make("details", {}, make("summary", { textContent: "settings in force" }),
        make("pre", { textContent: spike.settings })));
      spikes.append(make("details", {}, make("summary", {}, spike.title + " ", look), ...body,
        make("p", { textContent: spike.note })));
    }
    if (run.launches.length) events.append(make("h2", { textContent: `Launches${of}` }),
      table(["began", "at step", "processes", "versions", "changed settings"], run.launches));
    if (run.happenings.length) events.append(make("h2", { textContent: `Events${of}` }),
      table(["when", "step", "what"], run.happenings));
    if (run.settings) settings.append(make("h2", { textContent: `Settings${of}` }),
      make("details", {}, make("summary", { textContent: "config.yaml" }), make("pre", { textContent: run.settings })));
  }
}
words(); build(); controls(); redraw();
document.body.dataset.ready = "yes";
