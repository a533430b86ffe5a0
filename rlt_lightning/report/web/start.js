// The summary of the runs, the sections of the page, and their order.

// What one run trained, and what that took.
function about(run, i) {
  const facts = Object.entries({ ...run.facts, folder: run.folder }).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("article", { class: "verdict", style: runs.length > 1 ? `--run: var(--run-${i % NUM_COLORS})` : null },
    runs.length > 1 ? el("h3", {}, run.name) : null,
    run.trained ? el("p", {}, run.trained) : null,
    runs.length === 1 && run.over ? el("p", { class: "soft" }, run.over) : null,
    el("dl", { class: "figures" }, facts),
    run.notes.map((note) => el("p", { class: "soft note" }, note)));
}

function allSettings(run) {
  const name = runs.length > 1 ? `All settings of ${run.name}` : "All settings";
  return el("details", {}, el("summary", {}, `${name}: ${run.settings.length}`),
    scrolling(name, table([["setting", "value"], ...run.settings])));
}

function summary() {
  const found = [el("div", { class: "verdicts" }, runs.map(about))];
  if (data.scales) found.push(el("p", { class: "warning" }, data.scales));
  if (data.results.length) {
    found.push(el("h3", {}, "What changed"), runs.length > 1 ? el("p", { class: "soft" }, data.windows) : "",
      scrolling("What changed", table(data.results)));
  }
  if (data.differences.length) {
    found.push(el("h3", {}, "Settings that differ"),
      scrolling("Settings that differ", table([["setting", ...runs.map((run) => run.name)], ...data.differences])));
  } else if (Object.keys(runs[0].main_settings).length && runs.length === 1) {
    found.push(el("h3", {}, "Settings"), el("dl", { class: "figures" }, Object.entries(runs[0].main_settings).map(([name, value]) =>
      el("div", {}, el("dt", { title: name }, name.replaceAll(".init_args", "")), el("dd", {}, value)))));
  }
  found.push(...runs.filter((run) => run.settings.length).map(allSettings));
  return found;
}

// What the reward makes of each kind of completion.
function kindTables() {
  if (!data.kinds || !data.kinds.length) return [];
  const about = "The largest reward need not be the best explanation: compare the kinds, and look at several explanations of a problem. "
    + "Last column: of the groups that have this kind and another one, those in which it has the largest reward.";
  return [el("h3", {}, "What the reward prefers"), el("p", { class: "soft" }, about), ...data.kinds.flatMap(({ run, rows }) => [
    runs.length > 1 ? el("h4", {}, run) : null, scrolling(`What the reward prefers, ${run}`, table(rows))])].filter(Boolean);
}

function curves() {
  // The charts of accuracies say themselves what their bands are.
  const banded = data.sections.some((section) => section.charts.some((chart) =>
    !chart.name.startsWith("eval/") && chart.series.some((series) => series.low)));
  const note = banded ? [el("p", { class: "soft" },
    "“Bands” shows, where a chart says nothing else, ± one standard deviation over the completions of an iteration, clipped at values that the figure cannot have.")] : [];
  return note.concat(data.sections.flatMap((section) => {
    const figures = el("div", { class: "charts" }, section.charts.map((chart) => chartFigure(chart, "h4")));
    if (!section.folded) return [el("h3", {}, section.title), figures];
    return [el("h3", {}, section.title), el("details", { class: "print", ontoggle: () => drawIn(figures) }, el("summary", {}, plural(section.charts.length, "chart")), figures)];
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

if (data.sections) part(runs.length > 1 ? "Runs" : "What the run did", ...summary());
else {
  main.append(figureList(Object.entries(data.facts)));
  main.append(...runs.flatMap((run) => run.notes).map((note) => el("p", { class: "warning" }, note)));
}
const banded = (charts) => charts.some((chart) => chart.series.some((series) => series.low));
const bandsOf = (charts) => (runs.length === 1 && banded(charts) ? [el("p", {}, bandButton())] : []);
if (runs.length > 1) main.append(legend(banded([...data.sections.flatMap((section) => section.charts), ...data.groups])));
if (data.sections && data.sections.length) part("Curves", ...bandsOf(data.sections.flatMap((section) => section.charts)), ...curves());
for (const [name, heading] of [["groups", "Groups by reward"], ["evaluation", "Evaluation"]]) {
  if (!data[name] || !data[name].length) continue;
  const tables = name === "evaluation" ? data.evaluation_tables : [];
  part(heading, ...bandsOf(data[name]), el("div", { class: "charts" }, data[name].map((chart) => chartFigure(chart, "h3"))),
    ...tables.flatMap((one) => [el("h3", {}, one.title), scrolling(one.title, table(one.rows))]));
}
if (all && !data.sections && all.problems.length === 1 && all.run.length <= MOST_CARDS) explanations();
else if (all && all.run.length === 1) part("Completion", detail(0, null));
else if (all) browser(comparison());
if (document.querySelectorAll("nav li").length < 2) document.getElementById("nav").remove();
drawIn(document);
