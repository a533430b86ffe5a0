// The charts, each with a table of its values, and the legend of the runs.

const MOST_TABLE_ROWS = 1000;
const drawn = new Map();  // plot element -> its chart
const plots = [];  // elements of all charts; each chart is drawn when the reader first sees it
const hiddenRuns = new Set();

function traces(chart) {
  const labels = [...new Set(chart.series.map((series) => series.label))];
  const found = [];
  for (const series of chart.series) {
    if (hiddenRuns.has(series.run) && chart.kind !== "stack") continue;
    const name = [runs.length > 1 && chart.kind !== "stack" ? runs[series.run].name : "", series.label]
      .filter(Boolean).join(", ") || chart.title;
    const paint = runColor(series.run);
    const place = labels.indexOf(series.label);
    if (chart.kind === "stack") {
      const marker = { color: color(`--phase-${place}`), line: { color: color("--panel"), width: 0.5 } };
      marker.pattern = { shape: PATTERNS[place], size: 6, fgcolor: color("--panel"), fillmode: "overlay" };
      found.push({ type: "bar", x: series.x, y: series.y, name, marker });
    } else if (chart.kind === "bars") {
      const error = { type: "data", array: series.error, color: color("--fg"), thickness: 1.5, width: 6 };
      const pattern = { shape: PATTERNS[series.run % 4], size: 7, fgcolor: color("--panel"), fillmode: "overlay" };
      found.push({ type: "bar", x: series.x, y: series.y, name, error_y: error, marker: { color: paint, pattern } });
    } else {
      if (series.low) found.push(...band(series, paint));
      const dash = DASHES[series.run % DASHES.length];
      const marks = place > 0 || series.x.length <= 30;
      found.push({
        type: "scatter", mode: marks ? "lines+markers" : "lines", x: series.x, y: series.y, name,
        line: { color: paint, width: 2, dash }, marker: { color: paint, size: 6, symbol: SYMBOLS[place % 6][0] },
      });
    }
  }
  return found;
}

function band(series, paint) {
  const common = { type: "scatter", mode: "lines", x: series.x, hoverinfo: "skip", showlegend: false };
  const line = { width: 0, color: paint };
  const fillcolor = `${paint}2e`;
  return [{ ...common, y: series.low, line }, { ...common, y: series.high, line, fill: "tonexty", fillcolor }];
}

function layout(chart) {
  const axis = { gridcolor: color("--grid"), linecolor: color("--line"), zeroline: false, automargin: true };
  const places = [...new Set(chart.series.flatMap((series) => series.x))];
  const xaxis = { ...axis, title: { text: chart.x_title, standoff: 8 } };
  if (chart.kind !== "bars") Object.assign(xaxis, { tickformat: "d" }, places.length <= 10 ? { tickvals: places } : { nticks: 8 });
  const yaxis = { ...axis, title: { text: chart.unit, standoff: 6 }, exponentformat: "power", nticks: 6 };
  if (chart.kind !== "lines") yaxis.rangemode = "tozero";
  const seen = new Set(chart.series.flatMap((series) => [series.y, series.low || [], series.high || []].flat()));
  seen.delete(null);
  // Without a range, a level line stands on an axis from −1 to 1.
  if (chart.kind === "lines" && seen.size === 1) {
    const [value] = seen;
    yaxis.range = value ? [value - Math.abs(value) / 2, value + Math.abs(value) / 2] : [-0.05, 1];
  }
  return {
    margin: { l: 48, r: 8, t: 8, b: 36 },
    font: { family: "system-ui, sans-serif", size: 12, color: color("--fg") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    xaxis, yaxis, barmode: chart.kind === "stack" ? "stack" : "group",
    showlegend: chart.kind === "stack", legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "x unified", dragmode: false,
    hoverlabel: { bgcolor: color("--bg"), bordercolor: color("--soft"), font: { color: color("--fg") } },
  };
}

function drawChart(plot, chart) {
  Plotly.react(plot, traces(chart), layout(chart), { displayModeBar: false, responsive: true });
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting || drawn.has(entry.target)) continue;
    drawn.set(entry.target, entry.target.chart);
    drawChart(entry.target, entry.target.chart);
    watcher.unobserve(entry.target);
  }
}, { rootMargin: "300px" });

// Plotly is large: the browser needs a second to load it.
function loadPlotly() {
  document.head.append(el("script", {}, document.getElementById("plotly").textContent));
  plots.forEach((plot) => watcher.observe(plot));
}

function described(chart) {
  const parts = chart.series.map((series) => {
    const name = [runs.length > 1 ? runs[series.run].name : "", series.label].filter(Boolean).join(", ");
    const places = series.y.map((_, i) => i).filter((i) => series.y[i] != null);
    const values = places.map((i) => series.y[i]);
    if (!values.length) return `${name}: no values`;
    const begin = `${name ? `${name}: ` : ""}${number(values[0])} at ${series.x[places[0]]}`;
    if (values.length === 1) return begin;
    const last = `${number(values.at(-1))} at ${series.x[places.at(-1)]}`;
    const [least, most] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    return `${begin}, ${last}; least ${number(least)}, largest ${number(most)}`;
  });
  const unit = chart.unit ? `, ${chart.unit}` : "";
  return `${chart.title}${unit}${chart.x_title ? ` by ${chart.x_title}` : ""}. ${parts.join(". ")}.`;
}

function scrolling(label, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}

function table(rows, attributes = {}) {
  const cells = (row, tag) => row.map((cell, i) => {
    const head = tag === "th" || i === 0;
    return el(head ? "th" : "td", head ? { scope: tag === "th" ? "col" : "row" } : {}, String(cell));
  });
  return el("table", attributes, el("thead", {}, el("tr", {}, cells(rows[0], "th"))),
    el("tbody", {}, rows.slice(1).map((row) => el("tr", {}, cells(row, "td")))));
}

function values(chart) {
  const header = [chart.x_title || "set"];
  const byX = new Map();
  chart.series.forEach((series) => {
    const columns = [["", series.y], ["from", series.low], ["to", series.high], ["± s.e.", series.error]].filter(([, y]) => y);
    columns.forEach(([kind, column]) => {
      const place = header.length;
      header.push([runs.length > 1 ? runs[series.run].name : "", series.label, kind].filter(Boolean).join(", ") || "value");
      series.x.forEach((x, i) => {
        if (!byX.has(x)) byX.set(x, []);
        byX.get(x)[place] = number(column[i]);
      });
    });
  });
  const order = [...byX.keys()];
  if (typeof order[0] === "number") order.sort((a, b) => a - b);
  const step = Math.ceil(order.length / MOST_TABLE_ROWS);
  const rows = order.filter((_, i) => i % step === 0).map((x) => [x, ...header.slice(1).map((_, i) => byX.get(x)[i + 1] ?? "")]);
  const note = step > 1 ? el("p", { class: "soft" }, `Every ${step}th of ${order.length} rows. The run folder has all of them.`) : null;
  return [note, scrolling(`Values of ${chart.title}`, table([header, ...rows]))];
}

function chartFigure(chart, heading) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": described(chart) });
  plot.chart = chart;
  plots.push(plot);
  const title = chart.kind === "stack" && runs.length > 1 ? `${chart.title}: ${runs[chart.run].name}` : chart.title;
  const labels = [...new Set(chart.series.map((series) => series.label))].filter(Boolean);
  const all = [...new Set(chart.series.map((series) => series.label))];
  const glyphs = labels.map((label) => `${SYMBOLS[all.indexOf(label) % 6][1]} ${label}`).join("   ");
  const more = el("details", {}, el("summary", {}, "Values", el("span", { class: "hidden" }, ` of ${title}`)));
  more.addEventListener("toggle", () => more.childElementCount > 1 || more.append(...values(chart).filter(Boolean)));
  return el("figure", { class: "chart" },
    el(heading, {}, title, chart.name !== chart.title ? el("code", {}, ` ${chart.name}`) : null),
    el("p", { class: "about" }, chart.about),
    glyphs && chart.kind === "lines" ? el("p", { class: "glyphs" }, glyphs) : null, plot, more);
}

function swatch(run) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const dash = { solid: "", dash: "9 5", dot: "3 3", dashdot: "9 3 3 3", longdash: "14 4", longdashdot: "14 3 3 3" };
  const drawnAs = { x1: 0, y1: 6, x2: 36, y2: 6, "stroke-width": 3, "stroke-dasharray": dash[DASHES[run % DASHES.length]] };
  for (const [name, value] of Object.entries(drawnAs)) line.setAttribute(name, value);
  line.style.stroke = `var(--run-${run % NUM_COLORS})`;
  svg.append(line);
  return svg;
}

function legend() {
  const toggle = (run) => (event) => {
    const shown = hiddenRuns.delete(run) || !hiddenRuns.add(run);
    event.currentTarget.setAttribute("aria-pressed", shown);
    drawn.forEach((chart, plot) => drawChart(plot, chart));
  };
  return el("div", { class: "legend", role: "group", "aria-label": "Runs in the charts" }, runs.map((run, i) =>
    el("button", { type: "button", "aria-pressed": "true", onclick: toggle(i) }, swatch(i), run.name)));
}
