// The charts, which Chart.js draws, each with a table of its values, and the legend of the runs.

const MOST_TABLE_ROWS = 1000;
const drawn = new Map();  // plot element -> its Chart; charts in a folded part are drawn when it opens
const hiddenRuns = new Set();
let showBands = false;  // they are far wider than what a line does, and of several runs hide each other's lines

const distinct = (chart, part) => [...new Set(chart.series.flatMap(part))];
const labelsOf = (chart) => distinct(chart, (series) => series.label);

// A colour with a pattern on it, of tiles of 8 x 8 pixels.
function patterned(paint, place) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const context = tile.getContext("2d");
  context.fillStyle = paint;
  context.fillRect(0, 0, 8, 8);
  context.strokeStyle = color("--panel");
  context.stroke(new Path2D(PATTERNS[place % PATTERNS.length]));
  return context.createPattern(tile, "repeat");
}

// Of several runs a colour is a run, of one run it is a series.
const paintOf = (series, place) => runColor(runs.length > 1 ? series.run : place);

function lines(series, label, place, order) {
  const paint = paintOf(series, place);
  const points = (column) => series.x.map((x, i) => ({ x, y: column[i] }));
  const pointRadius = place > 0 || series.x.length <= 30 ? 3 : 0;
  const line = {
    label, data: points(series.y), borderColor: paint, backgroundColor: paint, borderWidth: 2,
    borderDash: DASHES[(runs.length > 1 ? series.run : place) % DASHES.length], pointStyle: SYMBOLS[place % SYMBOLS.length][0], pointRadius,
    pointBorderWidth: 1.5, clip: false, order,
  };
  if (!series.low || !showBands) return [line];
  const edge = { isEdge: true, borderWidth: 0, pointRadius: 0, pointHoverRadius: 0, backgroundColor: `${paint}2e` };
  return [line, { ...edge, data: points(series.low) }, { ...edge, data: points(series.high), fill: "-1" }];
}

function bars(chart, series, label, place, places) {
  const at = new Map(series.x.map((x, i) => [x, i]));
  const column = (values) => places.map((x) => values[at.get(x)] ?? null);
  const [paint, pattern] = chart.kind === "stack" ? [color(`--phase-${place}`), place] : [runColor(series.run), series.run];
  const [categoryPercentage, barPercentage] = places.length > 60 ? [1, 1] : [0.85, 0.95];  // many bars have no gaps
  return {
    label, data: column(series.y), errors: series.error && column(series.error),
    backgroundColor: patterned(paint, pattern), categoryPercentage, barPercentage,
  };
}

function datasets(chart, places) {
  const labels = labelsOf(chart);
  const shown = chart.series.filter((series) => chart.kind === "stack" || !hiddenRuns.has(series.run));
  return shown.flatMap((series, i) => {
    const name = [runs.length > 1 && chart.kind !== "stack" ? runs[series.run].name : "", series.label];
    const label = name.filter(Boolean).join(", ") || chart.title;
    const place = labels.indexOf(series.label);
    return chart.kind === "lines" ? lines(series, label, place, -i) : bars(chart, series, label, place, places);
  });
}

function tickText(value) {
  const notation = value !== 0 && Math.abs(value) < 1e-3 ? "scientific" : "standard";
  return (value || 0).toLocaleString("en", { notation, maximumSignificantDigits: 9 }).replaceAll("-", "−").replace("E", "e");
}

// The ends of the y axis: a little beyond all lines and bands, but never beyond what the metric can be.
function range(chart) {
  const bands = (series) => (showBands ? [series.low || [], series.high || []] : []);
  const known = chart.series.flatMap((series) => [series.y, ...bands(series)].flat()).filter((value) => value != null);
  if (!known.length) return {};
  const [least, most] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  const [low, high] = (chart.limits || [null, null]).map((limit, i) => limit ?? (i ? Infinity : -Infinity));
  if (!least && !most) return high === 0 ? { suggestedMin: -1, max: 0 } : { min: 0, suggestedMax: Math.min(high, 1) };
  const beside = 0.06 * (most - least) || 0.1 * Math.abs(most);
  const [from, to] = [least - beside, most + beside];
  return {
    suggestedMin: Math.max(low, least >= 0 ? Math.max(0, from) : from),
    suggestedMax: Math.min(high, most <= 0 ? Math.min(0, to) : to),
  };
}

function scales(chart, places) {
  const axis = (text, ticks) => ({ title: { display: Boolean(text), text }, border: { color: color("--line") }, ticks });
  const x = axis(chart.x_title, { maxTicksLimit: 10, maxRotation: 0, autoSkipPadding: 12 });
  const y = axis(chart.unit, { maxTicksLimit: 7, callback: tickText });
  if (typeof places[0] === "number") {
    const gap = places.reduce((least, place, i) => Math.min(least, place - places[i - 1] || least), Infinity);
    const beside = places.length === 1 ? 0.5 : chart.kind === "stack" ? gap / 2 : 0;  // half a bar's width
    Object.assign(x, { type: "linear", offset: false, min: places[0] - beside, max: places.at(-1) + beside });
    Object.assign(x.ticks, { precision: 0, includeBounds: !beside, callback: tickText });
    if (places.length <= 10) x.afterBuildTicks = (built) => { built.ticks = places.map((value) => ({ value })); };
  }
  if (chart.kind === "lines") {
    Object.assign(y, range(chart));
  } else {
    x.grid = { display: false };
    x.stacked = y.stacked = chart.kind === "stack";
    const ends = chart.series.flatMap((series) => (series.error || []).map((error, i) => series.y[i] + error));
    y.suggestedMax = Math.max(0, ...ends);
  }
  return { x, y };
}

function tooltip(chart) {
  const label = ({ dataset, dataIndex, parsed }) =>
    `${dataset.label}: ${number(parsed.y)}${dataset.errors ? ` ± ${number(dataset.errors[dataIndex])}` : ""}`;
  const title = ([item]) => item && `${chart.x_title} ${item.label}`.trim();
  return {
    backgroundColor: color("--bg"), titleColor: color("--fg"), bodyColor: color("--fg"), borderColor: color("--soft"), borderWidth: 1,
    usePointStyle: chart.kind === "lines", boxPadding: 4, caretSize: 0, caretPadding: 8, callbacks: { label, title },
    itemSort: (one, other) => one.datasetIndex - other.datasetIndex,
    // Between two places, both are nearest.
    filter: ({ dataset, parsed }, _, [first]) => !dataset.isEdge && parsed.x === first.parsed.x,
  };
}

// What Chart.js has no element for: the errors of bars, and a line through the places that the tooltip tells of.
const strokes = {
  id: "strokes",
  afterDatasetsDraw(chart) {
    const { ctx, chartArea, scales } = chart;
    const path = chart.data.datasets.flatMap(({ data, errors }, i) => (errors || []).map((error, j) => {
      if (error === null) return "";
      const { x } = chart.getDatasetMeta(i).data[j];
      const [low, high] = [data[j] - error, data[j] + error].map((value) => scales.y.getPixelForValue(value));
      return `M${x - 5} ${low}h10m-5 0V${high}m-5 0h10`;
    }));
    ctx.save();
    ctx.strokeStyle = color("--fg");
    ctx.lineWidth = 1.5;
    ctx.stroke(new Path2D(path.join("")));
    ctx.setLineDash([2, 3]);
    if (chart.tooltip.opacity) ctx.stroke(new Path2D(`M${chart.tooltip.caretX} ${chartArea.top}V${chartArea.bottom}`));
    ctx.restore();
  },
};

function draw(plot, chart) {
  const places = distinct(chart, (series) => series.x);
  if (typeof places[0] === "number") places.sort((a, b) => a - b);
  Object.assign(Chart.defaults, { color: color("--fg"), borderColor: color("--grid") });
  Chart.defaults.font.family = "system-ui, sans-serif";
  drawn.get(plot)?.destroy();
  drawn.set(plot, new Chart(plot.firstChild, {
    type: chart.kind === "lines" ? "line" : "bar",
    data: { labels: places, datasets: datasets(chart, places) },
    options: {
      animation: false, maintainAspectRatio: false,
      layout: { padding: { top: 6, right: 8 } },  // for the half of a line and of a number beyond the axes
      interaction: { mode: chart.kind === "lines" ? "nearest" : "index", axis: "x", intersect: false },
      scales: scales(chart, places),
      plugins: { legend: { display: chart.kind === "stack", align: "start", labels: { boxWidth: 14 } }, tooltip: tooltip(chart) },
    },
    plugins: [strokes],
  }));
}

const redraw = () => drawn.forEach((_, plot) => draw(plot, plot.chart));

// Draw all charts of an element that are not folded away.
function drawIn(element) {
  for (const plot of element.querySelectorAll(".plot")) if (!drawn.has(plot) && !plot.closest("details:not([open])")) draw(plot, plot.chart);
}

// On paper everything is light and open, and every chart has its paper's width.
function preparePrint() {
  const folded = [...document.querySelectorAll("details.print:not([open])")];
  const theme = root.dataset.theme;
  folded.forEach((part) => { part.open = true; });
  root.dataset.theme = "light";
  drawIn(document);
  redraw();
  return () => {
    folded.forEach((part) => { part.open = false; });
    root.dataset.theme = theme;
    redraw();
  };
}
let afterPrint = null;
addEventListener("beforeprint", () => { afterPrint ??= preparePrint(); });
addEventListener("afterprint", () => {
  if (afterPrint) afterPrint();
  afterPrint = null;
});

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
    const parts = String(cell).split(/(?<=[._/])(?=[A-Za-z])/);  // long settings and paths break between words
    const broken = parts.flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
    return el(head ? "th" : "td", head ? { scope: tag === "th" ? "col" : "row" } : {}, broken);
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
  const plot = el("div", { class: "plot", role: "img", "aria-label": described(chart) }, el("canvas"));
  plot.chart = chart;
  const title = chart.kind === "stack" && runs.length > 1 ? `${chart.title}: ${runs[chart.run].name}` : chart.title;
  const labels = labelsOf(chart).filter(Boolean);
  const glyphs = labels.map((label) => {
    const place = labelsOf(chart).indexOf(label);
    const paint = runs.length > 1 ? null : `color: var(--run-${place % NUM_COLORS})`;
    return el("li", {}, el("span", { style: paint, "aria-hidden": "true" }, SYMBOLS[place % SYMBOLS.length][1]), ` ${label}`);
  });
  const more = el("details", {}, el("summary", {}, "Values", el("span", { class: "hidden" }, ` of ${title}`)));
  more.addEventListener("toggle", () => more.childElementCount > 1 || more.append(...values(chart).filter(Boolean)));
  return el("figure", { class: "chart" },
    el(heading, {}, title, chart.name !== chart.title ? el("code", {}, ` ${chart.name}`) : null),
    el("p", { class: "about" }, chart.about),
    el("ul", { class: "glyphs" }, chart.kind === "lines" ? glyphs : []), plot, more);
}

function swatch(run) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const drawnAs = { x1: 0, y1: 6, x2: 36, y2: 6, "stroke-width": 3, "stroke-dasharray": DASHES[run % DASHES.length].join(" ") };
  for (const [name, value] of Object.entries(drawnAs)) line.setAttribute(name, value);
  line.style.stroke = `var(--run-${run % NUM_COLORS})`;
  svg.append(line);
  return svg;
}

// Set whether bands are drawn; the button says which.
function bandButton() {
  const press = () => {
    showBands = !showBands;
    document.querySelectorAll(".bands").forEach((button) => button.setAttribute("aria-pressed", showBands));
    redraw();
  };
  return el("button", { type: "button", class: "bands", "aria-pressed": showBands, onclick: press }, "Bands");
}

function legend(hasBands) {
  const toggle = (run) => (event) => {
    const shown = hiddenRuns.delete(run) || !hiddenRuns.add(run);
    event.currentTarget.setAttribute("aria-pressed", shown);
    redraw();
  };
  return el("div", { class: "legend", role: "group", "aria-label": "Runs in the charts" }, runs.map((run, i) =>
    el("button", { type: "button", "aria-pressed": "true", onclick: toggle(i) }, swatch(i), run.name)), hasBands ? bandButton() : null);
}
