// The table of the runs, the sections of the page, and their order.

function runTable() {
  const rows = runs.map((run) => {
    const facts = Object.entries(run.facts || {}).map(([name, value]) => `${name}: ${value}`).join("; ");
    return el("tr", {}, el("th", { scope: "row" }, run.name), el("td", {}, facts), el("td", {}, run.folder));
  });
  const head = ["run", "what it holds", "folder"].map((name) => el("th", { scope: "col" }, name));
  const found = [el("table", { class: "runs" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))];
  runs.forEach((run) => run.notes.forEach((note) =>
    found.push(el("p", { class: "soft note" }, runs.length > 1 ? `${run.name}: ${note}` : note))));
  if (data.differences && data.differences.length) {
    found.push(el("details", {}, el("summary", {}, "Settings that differ: ", String(data.differences.length)),
      scrolling("Settings that differ", table([["setting", ...runs.map((run) => run.name)], ...data.differences]))));
  }
  return found;
}

function curves() {
  // The charts of accuracies say themselves what their bands are.
  const banded = data.sections.some((section) => section.charts.some((chart) =>
    !chart.name.startsWith("eval/") && chart.series.some((series) => series.low)));
  const note = banded ? [el("p", { class: "soft" },
    "Bands, where a chart says nothing else: ± one standard deviation over the completions of an iteration.")] : [];
  return note.concat(data.sections.flatMap((section) => {
    const figures = el("div", { class: "charts" }, section.charts.map((chart) => chartFigure(chart, "h4")));
    if (!section.folded) return [el("h3", {}, section.title), figures];
    return [el("h3", {}, section.title), el("details", {}, el("summary", {}, plural(section.charts.length, "chart")), figures)];
  }));
}

document.getElementById("nav").append(el("ul"));
document.getElementById("footer").textContent = data.made;
const dark = matchMedia("(prefers-color-scheme: dark)");
const preferred = () => stored("rlt-report-theme") || (dark.matches ? "dark" : "light");
setTheme(preferred());
dark.addEventListener("change", () => setTheme(preferred()));
document.getElementById("theme").addEventListener("click", () => {
  setTheme(stored("rlt-report-theme", root.dataset.theme === "dark" ? "light" : "dark") || (root.dataset.theme === "dark" ? "light" : "dark"));
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
hideTip();

if (data.sections) part("Runs", ...runTable());
if (runs.length > 1) main.append(legend());
if (data.sections && data.sections.length) part("Curves", ...curves());
for (const [name, heading] of [["groups", "Groups by reward"], ["evaluation", "Evaluation"]]) {
  if (!data[name] || !data[name].length) continue;
  const tables = name === "evaluation" ? data.evaluation_tables : [];
  part(heading, el("div", { class: "charts" }, data[name].map((chart) => chartFigure(chart, "h3"))),
    ...tables.flatMap((one) => [el("h3", {}, one.title), scrolling(one.title, table(one.rows))]));
}
if (all && all.run.length === 1) part("Completion", detail(0, null));
else if (all) browser(comparison());
