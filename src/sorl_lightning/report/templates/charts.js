"use strict";
// Curves and heat maps. Colours come from the style sheet, so that a theme is one set of variables.
const DATA = JSON.parse(document.getElementById("data").textContent);
const off = new Set(); // numbers of the runs that are not drawn
const some = (name) => DATA.runs.some((run) => Object.keys(run[name]).length > 0);
let axis = some("by_collection") ? "collection" : "step";
const DASH = { solid: "solid", dashed: "dash", dotted: "dot", marked: "dot" };

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => (value === null || value === undefined ? "—" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
const longest = Math.max(1, ...DATA.runs.flatMap((run) => Object.values(run.figures).map((series) => series.seconds.at(-1) ?? 0)));
const [timeUnit, timeScale] = longest < 300 ? ["seconds", 1] : longest < 3 * 3600 ? ["minutes", 60] : ["hours", 3600];
const AXES = { collection: "collection", step: "optimiser updates", time: `${timeUnit} since the start` };

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function points(run, tag, along) {
  const series = along === "collection" ? run.by_collection[tag] : run.figures[tag];
  if (!series) return null;
  const x = along === "time" ? series.seconds.map((seconds) => seconds / timeScale) : series.steps;
  return { x, y: series.values, of: series.of };
}

function themed(title) {
  const line = { gridcolor: css("--rule"), linecolor: css("--muted"), zeroline: false, automargin: true, tickfont: { size: 11 } };
  return {
    margin: { l: 46, r: 10, t: 8, b: 38 }, showlegend: false, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 12, color: css("--muted") },
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--rule"), font: { color: css("--ink"), size: 12 } },
    xaxis: { ...line, showgrid: false, ticks: "outside", ticklen: 4, tickcolor: css("--rule"), title: { text: title, standoff: 6, font: { size: 12 } } },
    yaxis: { ...line, linewidth: 0 },
  };
}

const CONFIG = { displayModeBar: false, responsive: true };

function chartOf(figure) {
  return DATA.charts[figure.dataset.section][Number(figure.dataset.chart)];
}

function traces(chart, along) {
  return DATA.runs.flatMap((run, number) => (off.has(number) ? [] : chart.lines.flatMap((line) => {
    const found = points(run, line.tag, along);
    if (!found) return [];
    const hue = css(`--hue${number}`);
    const name = [DATA.runs.length > 1 ? run.label : "", chart.lines.length > 1 || DATA.runs.length === 1 ? line.label : ""].filter(Boolean).join(", ");
    const marked = line.style === "marked" || found.x.length === 1;
    return [{
      x: found.x, y: found.y, name, type: "scatter", mode: marked ? "lines+markers" : "lines",
      line: { color: hue, width: marked ? 1 : 1.8, dash: DASH[line.style] }, marker: { color: hue, size: 7 },
      hovertemplate: `%{y:.4~g} ${chart.unit}<extra>${name.replaceAll("<", "&lt;")}</extra>`, meta: { run: number, tag: line.tag },
    }];
  })));
}

function draw(figure) {
  const chart = chartOf(figure);
  const along = chart.axis || axis;
  const layout = themed(AXES[along]);
  if (chart.share) Object.assign(layout.yaxis, { range: [-0.03, 1.03], tickformat: ".0%" });
  if (chart.share && chart.unit !== "share of trajectories") delete layout.yaxis.range, layout.yaxis.rangemode = "tozero";
  if (chart.logarithmic) layout.yaxis.type = "log";
  layout.uirevision = along;
  const drawn = traces(chart, along);
  Plotly.react(figure.querySelector(".plot"), drawn, layout, CONFIG);
  figure.dataset.drawn = along;
  if (figure.querySelector("details").open) fillNumbers(figure);
}

// The same numbers as a table: what is drawn, to the digit.
function fillNumbers(figure) {
  const chart = chartOf(figure);
  const along = chart.axis || axis;
  const drawn = traces(chart, along);
  const rows = [...new Set(drawn.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const columns = drawn.map((trace) => new Map(trace.x.map((x, place) => [x, trace.y[place]])));
  const head = element("tr", {}, element("th", { scope: "col" }, AXES[along]), ...drawn.map((trace) => element("th", { scope: "col" }, trace.name)));
  const body = rows.map((x) => element("tr", {}, element("th", { scope: "row" }, along === "time" ? x.toFixed(2) : String(x)),
    ...columns.map((column) => element("td", {}, column.has(x) ? String(column.get(x) ?? "not finite") : ""))));
  const cut = DATA.runs.flatMap((run) => chart.lines.map((line) => points(run, line.tag, along))).some((found) => found && found.of > found.x.length);
  const note = cut ? [element("p", { class: "note" }, "Evenly spaced values of a longer curve.")] : [];
  figure.querySelector("details .scroll").replaceChildren(...note, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

// Turns by collections, one map a run, all on one scale.
function grid(run, name) {
  const along = Object.keys(run.by_collection).length ? "by_collection" : "figures";
  const start = `turns/${name}/`;
  const tags = Object.keys(run[along]).filter((tag) => tag.startsWith(start));
  const depth = Math.max(-1, ...tags.map((tag) => Number(tag.slice(start.length)))) + 1;
  const x = [...new Set(tags.flatMap((tag) => run[along][tag].steps))].sort((a, b) => a - b);
  const z = Array.from({ length: depth }, (_, turn) => {
    const series = run[along][start + turn];
    const held = new Map((series?.steps ?? []).map((step, place) => [step, series.values[place]]));
    return x.map((step) => held.get(step) ?? null);
  });
  return { x, y: z.map((_, turn) => turn), z, along };
}

function heatScale(name, grids) {
  const values = grids.flatMap((map) => map.z.flat()).filter((value) => value !== null);
  const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  if (name === "ratio") {
    const reach = Math.max(Math.abs(least - 1), Math.abs(most - 1), 1e-6);
    return { zmin: 1 - reach, zmax: 1 + reach, colorscale: [[0, css("--heat-high")], [0.5, css("--heat-low")], [1, css("--heat-above")]] };
  }
  return { zmin: Math.min(0, least), zmax: most > 0 ? most : 1, colorscale: [[0, css("--heat-low")], [1, css("--heat-high")]] };
}

function drawHeat() {
  const figures = [...document.querySelectorAll(".heat")];
  if (!figures.length) return;
  const name = document.querySelector("input[name=turn-figure]:checked").value;
  const [, unit] = DATA.heat_maps[name];
  const grids = DATA.runs.map((run) => grid(run, name));
  const scale = heatScale(name, grids);
  figures.forEach((figure, number) => {
    const map = grids[number];
    figure.hidden = off.has(number) || map.z.length === 0;
    if (figure.hidden) return;
    const layout = themed(map.along === "by_collection" ? AXES.collection : AXES.step);
    layout.hovermode = "closest";
    Object.assign(layout.yaxis, { autorange: "reversed", dtick: 1, title: { text: "turn", standoff: 6, font: { size: 12 } }, showgrid: false });
    const bar = { thickness: 9, outlinewidth: 0, tickfont: { size: 11 }, title: { text: unit, side: "right", font: { size: 11 } } };
    Plotly.react(figure.querySelector(".plot"), [{
      ...map, ...scale, type: "heatmap", colorbar: bar, xgap: 1, ygap: 1, hoverongaps: false,
      hovertemplate: `turn %{y}, ${layout.xaxis.title.text} %{x}<br>%{z:.4~g} ${unit}<extra></extra>`,
    }], layout, CONFIG);
  });
}

const charts = [...document.querySelectorAll("figure.chart")];
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    if (entry.target.id === "turns") drawHeat(), entry.target.dataset.drawn = "1";
    else draw(entry.target);
  }
}, { rootMargin: "500px" });
charts.forEach((figure) => near.observe(figure));
if (document.getElementById("turns")) near.observe(document.getElementById("turns"));

function redraw() {
  charts.filter((figure) => figure.dataset.drawn).forEach(draw);
  if (document.getElementById("turns")?.dataset.drawn) drawHeat();
}

for (const input of document.querySelectorAll("input[name=axis]")) {
  input.disabled = input.value === "collection" && !some("by_collection");
  input.checked = input.value === axis;
  input.addEventListener("change", () => { axis = input.value; redraw(); });
}
for (const input of document.querySelectorAll("input[name=turn-figure]")) input.addEventListener("change", drawHeat);
for (const button of document.querySelectorAll(".run")) {
  button.addEventListener("click", () => {
    const number = Number(button.dataset.run);
    if (!off.delete(number)) off.add(number);
    button.setAttribute("aria-pressed", String(!off.has(number)));
    redraw();
  });
}
for (const figure of charts) figure.querySelector("details").addEventListener("toggle", () => fillNumbers(figure));
for (const button of document.querySelectorAll("button.save")) {
  const figure = button.closest("figure");
  const filename = figure.querySelector("figcaption strong").textContent.toLowerCase().replaceAll(/[^a-z0-9]+/g, "_");
  button.addEventListener("click", () => Plotly.downloadImage(figure.querySelector(".plot"), { format: "svg", filename, width: 640, height: 360 }));
}

function theme(name, keep) {
  document.documentElement.dataset.theme = name;
  try { if (keep) localStorage.setItem("sorl-theme", name); } catch { /* a file may have no storage */ }
  redraw();
}
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme(event.matches ? "dark" : "light", false));
addEventListener("beforeprint", () => { charts.forEach(draw); drawHeat(); });
