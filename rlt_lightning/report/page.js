"use strict";
// Draws the page from the data inside it. All text goes in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const main = document.getElementById("main");
  const root = document.documentElement;
  const NUM_COLORS = 8;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const SYMBOLS = [["circle", "●"], ["square", "■"], ["triangle-up", "▲"], ["diamond", "◆"], ["x", "✖"], ["star", "★"]];
  const PATTERNS = ["", "/", "x", "."];
  const PAGE_SIZE = 20;
  const MOST_CHOICES = 200;  // problems in the list of those to compare
  const MOST_TABLE_ROWS = 1000;
  const TERM_NAMES = {
    reward: "reward", solution_log_prob_reward: "solution term", kl_reward: "KL term", format_reward: "format term",
    solution_log_prob_mean: "solution log-prob, mean", solution_log_prob_min: "hardest solution token",
    kl_mean: "KL, mean", kl_max: "KL, largest", num_tokens: "tokens", student_tokens: "student's tokens",
    correct: "correct", formatted: "well-formed", timed_out: "judging broken off", closed: "closed", fits: "fits a student",
  };

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value != null) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child != null && child !== ""));
    return node;
  }
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const runColor = (run) => color(`--run-${run % NUM_COLORS}`);
  const termName = (name) => TERM_NAMES[name] || name;
  const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

  function number(value, signed = false) {
    if (value == null) return "–";
    const size = Math.abs(value);
    let text;
    if (Number.isInteger(value)) text = size.toLocaleString("en");
    else if (size >= 1e6 || size < 1e-3) text = size.toExponential(2);
    else text = size >= 100 ? size.toFixed(1) : size >= 1 ? size.toFixed(2) : size.toFixed(3);
    return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
  }

  // ---- parts of the page and the theme

  let numIds = 0;
  const newId = (word) => `${word}-${(numIds += 1)}`;

  function part(title, ...children) {
    const id = newId("part");
    document.getElementById("nav").firstChild.append(el("li", {}, el("a", { href: `#${id}` }, title)));
    main.append(el("section", { "aria-labelledby": id }, el("h2", { id, tabindex: "-1" }, title), ...children));
  }

  function kept(name, value) {  // in the browser's store, which a page from a file may lack
    try {
      if (value !== undefined) localStorage.setItem(name, value);
      return localStorage.getItem(name);
    } catch (error) {
      return null;
    }
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
    drawn.forEach((chart, plot) => drawChart(plot, chart));
  }

  // ---- charts

  const drawn = new Map();  // plot element -> its chart
  const plots = [];  // of all charts; each is drawn when it is first seen
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
    const few = new Set(chart.series.flatMap((series) => series.x)).size <= 10;
    const xaxis = { ...axis, title: { text: chart.x_title, standoff: 8 } };
    if (chart.kind !== "bars") Object.assign(xaxis, { tickformat: "d" }, few ? { dtick: 1 } : { nticks: 8 });
    const yaxis = { ...axis, title: { text: chart.unit, standoff: 6 }, exponentformat: "power", nticks: 6 };
    if (chart.kind !== "lines") yaxis.rangemode = "tozero";
    const seen = new Set(chart.series.flatMap((series) => [series.y, series.low || [], series.high || []].flat()));
    seen.delete(null);
    if (chart.kind === "lines" && seen.size === 1) {  // else a level line stands on an axis from −1 to 1
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

  function loadPlotly() {  // it is large: the browser takes a second for it
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
    const note = step > 1 ? el("p", { class: "soft" }, `Every ${step}th of ${order.length} rows; all are in the run folder.`) : null;
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
    return el("div", { class: "legend", role: "group", "aria-label": "Runs that are drawn" }, runs.map((run, i) =>
      el("button", { type: "button", "aria-pressed": "true", onclick: toggle(i) }, swatch(i), run.name)));
  }

  // ---- tokens with their figures

  // What the figures say: how far one is from usual, in steps, and how it is told.
  const KL_STEPS = [0.1, 0.5, 1.5, 4];
  const PROBABILITY_STEPS = [0.9, 0.5, 0.1, 0.01];
  const KINDS = {
    kl: {
      surprise: (value) => value,
      level: (value) => KL_STEPS.filter((step) => Math.abs(value) >= step).length,
      tell: (value) => `KL ${number(value)} nats`,
      legend: [["", "below 0.1 nats"], ["w1", "from 0.1"], ["w2", "0.5"], ["w3", "1.5"], ["w4", "4"],
        ["c2", "dashed: negative, likelier to the student than to the teacher"]],
      most: "Least natural to the student:",
    },
    logProb: {
      surprise: (value) => -value,
      level: (value) => PROBABILITY_STEPS.filter((step) => value <= Math.log(step)).length,
      tell: (value) => `log-prob ${number(value)} nats, probability ${number(Math.exp(value))}`,
      legend: [["", "probability above 0.9"], ["w1", "from 0.9 down"], ["w2", "0.5"], ["w3", "0.1"], ["w4", "0.01"]],
      most: "Surprised the student most:",
    },
  };

  function units(texts, figures) {  // tokens, those that are a part of a character together with the rest of it
    const found = [];
    let begun = [];
    texts.forEach((text, i) => {
      begun.push(figures[i]);
      if (text === "") return;
      found.push({ text, figures: begun });
      begun = [];
    });
    if (begun.length && found.length) found.at(-1).figures.push(...begun);
    return found;
  }

  const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  const tip = document.getElementById("tip");

  function showTip(target, text) {
    const box = target.getBoundingClientRect();
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = "0";
    const left = Math.min(box.left, root.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    const above = box.top - tip.offsetHeight - 6;
    tip.style.top = `${(above > 4 ? above : box.bottom + 6) + scrollY}px`;
  }

  function hideTip() {
    tip.hidden = true;
    tip.style.left = "";
    tip.style.top = "";
  }

  // A text whose tokens tell their figures. One stop of the Tab key; arrow keys go from token to token.
  function heat(label, texts, figures, kindName) {
    const kind = KINDS[kindName];
    const found = units(texts, figures);
    for (const unit of found) {  // the figure that says most, of a character's tokens
      const known = unit.figures.filter((value) => value != null);
      unit.value = known.length ? known.reduce((a, b) => (kind.surprise(b) > kind.surprise(a) ? b : a)) : null;
    }
    const ranked = found.map((_, i) => i).filter((i) => found[i].value != null)
      .sort((a, b) => kind.surprise(found[b].value) - kind.surprise(found[a].value));
    const rank = new Map(ranked.map((i, place) => [i, place + 1]));
    const spans = found.map((unit, i) => {
      const level = unit.value == null ? 0 : kind.level(unit.value);
      const side = kindName === "kl" && unit.value < 0 ? "c" : "w";
      const line = unit.text.trim() === "" && unit.text.includes("\n");
      const classes = `t${level ? ` ${side}${level}` : ""}${line ? " line" : ""}`;
      return el("span", { class: classes, tabindex: i ? "-1" : "0", "data-i": i }, unit.text);
    });
    const tell = (i) => {
      const { text, figures: of, value } = found[i];
      if (value == null) return `“${visible(text)}”: no figure`;
      const parts = of.length > 1 ? ` (${of.length} tokens: ${of.map((one) => number(one)).join(", ")})` : "";
      return `“${visible(text)}”: ${kind.tell(value)}${parts}\nnumber ${rank.get(i)} of ${ranked.length} by surprise`;
    };
    const box = el("div", { class: "text", role: "group", "aria-label": `${label}: arrow keys go from token to token` }, spans);
    let current = 0;
    const go = (i) => {
      spans[current].tabIndex = -1;
      current = Math.max(0, Math.min(spans.length - 1, i));
      spans[current].tabIndex = 0;
      spans[current].focus();
    };
    const indexOf = (event) => event.target.dataset && event.target.dataset.i !== undefined ? Number(event.target.dataset.i) : null;
    const show = (event) => indexOf(event) !== null && showTip(event.target, tell(indexOf(event)));
    box.addEventListener("mouseover", show);
    box.addEventListener("focusin", show);
    box.addEventListener("mouseout", hideTip);
    box.addEventListener("focusout", hideTip);
    box.addEventListener("click", (event) => indexOf(event) !== null && go(indexOf(event)));
    box.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: spans.length - 1 };
      if (event.key === "Escape") hideTip();
      if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      go(moves[event.key]);
    });
    const most = ranked.filter((i) => found[i].text.trim() && kind.level(found[i].value) && kind.surprise(found[i].value) > 0);
    const top = most.slice(0, 6).map((i) => {
      const name = `${visible(found[i].text)}, ${kind.tell(found[i].value)}: show it in the text`;
      return el("button", { type: "button", "aria-label": name, onclick: () => go(i) },
        el("code", {}, visible(found[i].text.trim())), ` ${number(found[i].value)}`);
    });
    const key = kind.legend.map(([level, text]) => el("li", {}, el("span", { class: `t ${level}` }, "word"), ` ${text}`));
    return [box, el("ul", { class: "key", "aria-label": "Legend" }, key),
      top.length ? el("div", { class: "top-tokens" }, kind.most, top) : null];
  }

  function textBox(label, text) {
    const name = `${label} (text)`;
    return el("div", { class: "text", tabindex: "0", role: "region", "aria-label": name }, text || "(no text)");
  }

  // ---- completions

  const all = data.completions;

  function title(i) {
    const words = [];
    if (all.step[i] != null) words.push(`iteration ${all.step[i]}`);
    words.push(problemName(all.problem[i]));
    if (all.number[i] != null) words.push(`completion ${all.number[i]}`);
    if (all.column[i] != null) words.push(all.column[i]);
    if (runs.length > 1) words.push(runs[all.run[i]].name);
    return words;
  }

  function problemName(problem) {
    const { row } = all.problems[problem];
    return row == null ? `problem ${problem + 1}` : `row ${row}`;
  }

  function figuresOf(i) {
    const names = Object.keys(all.terms).filter((name) => all.terms[name][i] != null);
    const entries = names.map((name) => [termName(name), number(all.terms[name][i])]);
    if (all.finish[i] != null) entries.push(["ended by", all.finish[i]]);
    return el("dl", { class: "figures" }, entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  function explanation(i) {
    const tokens = all.tokens[i];
    const label = el("p", { class: "label" }, tokens ? "Explanation, by r_KL of each token" : "Explanation");
    if (!tokens) return [label, textBox("Explanation", all.text[i])];
    return [label, ...heat("Explanation", tokens.thought_tokens, tokens.thought_kl, "kl")];
  }

  function solution(i) {
    const tokens = all.tokens[i];
    const text = all.problems[all.problem[i]].solution;
    const label = el("p", { class: "label" }, tokens ? "Solution, by the student's log-prob of each token" : "Solution");
    if (!tokens) return text ? [label, textBox("Solution", text)] : [];
    return [label, ...heat("Solution", tokens.solution_tokens, tokens.solution_log_probs, "logProb")];
  }

  function question(problem) {
    const text = all.problems[problem].question;
    return text ? [el("p", { class: "label" }, "Question"), textBox("Question", text)] : [];
  }

  function detail(i, compare) {
    const button = compare && el("button", { type: "button", onclick: () => compare(all.problem[i]) }, "Compare this problem's completions");
    return el("div", { class: "detail" }, figuresOf(i), ...question(all.problem[i]), ...explanation(i), ...solution(i), button || null);
  }

  function field(label, input) {
    input.id = newId("field");
    return el("div", { class: "field" }, el("label", { for: input.id }, label), input);
  }

  function options(entries) {
    return entries.map(([value, text]) => el("option", { value }, text));
  }

  // The same problem's best, worst and most improved completion, side by side.
  function comparison() {
    const gainOf = (problem) => Math.max(...Object.values(all.problems[problem].runs).map((marks) => marks.gain ?? -Infinity));
    const rangeOf = (problem) => Math.max(...Object.values(all.problems[problem].runs).map((marks) =>
      marks.best == null || marks.worst == null ? 0 : all.terms.reward[marks.best] - all.terms.reward[marks.worst]));
    const ranges = all.problems.map((_, i) => rangeOf(i));
    const gains = all.problems.map((_, i) => gainOf(i));
    const some = gains.some((gain) => gain > 0);
    const order = all.problems.map((_, i) => i).sort((a, b) => (gains[b] === gains[a] ? 0 : gains[b] - gains[a]) || ranges[b] - ranges[a]);
    const name = (i) => {
      const text = all.problems[i].question.replace(/\s+/g, " ");
      const by = gains[i] > 0 ? `gain ${number(gains[i], true)}` : `best to worst ${number(ranges[i])}`;
      return `${problemName(i)} (${by}): ${text.slice(0, 60)}${text.length > 60 ? "…" : ""}`;
    };
    const choice = el("select", { onchange: () => show(Number(choice.value)) }, options(order.slice(0, MOST_CHOICES).map((i) => [i, name(i)])));
    const body = el("div");
    const show = (problem) => {
      if (![...choice.options].some((option) => option.value === String(problem))) choice.append(...options([[problem, name(problem)]]));
      choice.value = problem;
      const byRun = Object.entries(all.problems[problem].runs);
      body.replaceChildren(...question(problem), ...byRun.map(([run, marks]) => el("div", { class: "pair" }, cards(run, marks))));
    };
    const move = (by) => () => show(Number(choice.options[Math.max(0, Math.min(choice.options.length - 1, choice.selectedIndex + by))].value));
    const met = some ? null : all.problems.every((problem) => Object.values(problem.runs).every((marks) => marks.times < 2))
      ? "Every problem was met once, so none can have improved: its best and its worst explanation are shown."
      : "No later explanation beats the mean of its problem's first time: best and worst are shown.";
    const about = some
      ? "Most improved: of a problem that came again, the later completion that beats the mean of the first time by most."
      : met;
    const more = order.length > MOST_CHOICES ? ` The list has ${MOST_CHOICES} of ${order.length.toLocaleString("en")} problems; others are reached from a completion below.` : "";
    const chooser = field(some ? "Problem, largest gain first" : "Problem, widest first", choice);
    chooser.classList.add("wide");
    show(order[0]);
    part("One problem, side by side", el("p", {}, about + more),
      el("div", { class: "filters" }, chooser,
        el("button", { type: "button", onclick: move(-1) }, "Previous"), el("button", { type: "button", onclick: move(1) }, "Next")),
      body);
    return (problem) => {
      show(problem);
      choice.scrollIntoView({ block: "start" });
      choice.focus();
    };
  }

  function cards(run, marks) {  // of one problem in one run; one that is both is shown once
    const kinds = [["best", marks.best], ["most improved", marks.improved], ["worst", marks.worst]].filter(([, i]) => i != null);
    const seen = new Map();
    for (const [kind, i] of kinds) seen.set(i, [...(seen.get(i) || []), kind]);
    return [...seen].map(([i, names]) => {
      const heading = names.join(" and ");
      const gain = names.includes("most improved")
        ? `${number(marks.gain, true)} over the first time's mean of ${number(marks.first_mean)}` : null;
      return el("article", { class: "card", style: `--run: var(--run-${run % NUM_COLORS})` },
        el("h3", {}, heading[0].toUpperCase() + heading.slice(1)), el("p", { class: "soft" }, title(i).join(", ")),
        gain && el("p", { class: "soft" }, gain), figuresOf(i), ...explanation(i), ...solution(i));
    });
  }

  // All completions, to sort, filter and search.
  function browser(compare) {
    const terms = Object.keys(all.terms);
    const indices = all.run.map((_, i) => i);
    const hasSteps = all.step.some((step) => step != null);
    const hasRows = all.problems.some((problem) => problem.row != null);
    const keys = { ...Object.fromEntries(terms.map((name) => [name, all.terms[name]])) };
    if (hasSteps) keys.step = all.step;
    keys.row = all.problem.map((problem) => all.problems[problem].row ?? problem + 1);
    const keyName = (name) => ({ step: "iteration", row: "problem" })[name] || termName(name);

    const search = el("input", { type: "search", oninput: soon });
    const sort = el("select", { onchange: update }, options(Object.keys(keys).map((name) => [name, keyName(name)])));
    const direction = el("select", { onchange: update }, options([["-1", "largest first"], ["1", "smallest first"]]));
    const numeric = (attributes) => el("input", { type: "number", step: "any", oninput: soon, ...attributes });
    const from = numeric({ step: "1", min: "0" });
    const to = numeric({ step: "1", min: "0" });
    const row = numeric({ step: "1", min: "1" });
    const run = el("select", { onchange: update }, options([["", "all runs"], ...runs.map((one, i) => [i, one.name])]));
    const limits = terms.map((name) => {
      const known = all.terms[name].filter((value) => value != null);
      const [least, most] = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
      const bound = (word, value) => numeric({ placeholder: number(value), "aria-label": `${termName(name)}, ${word}` });
      return { name, values: all.terms[name], least: bound("at least", least), most: bound("at most", most) };
    });
    const count = el("p", { role: "status" });
    const list = el("ol", { class: "list" });
    const place = el("span", {});
    const previous = el("button", { type: "button", onclick: () => turn(-1) }, "Previous page");
    const next = el("button", { type: "button", onclick: () => turn(1) }, "Next page");
    let found = indices;
    let page = 0;
    let lower = null;  // texts to search, made at the first search
    let waiting = 0;

    function soon() {
      list.setAttribute("aria-busy", "true");
      clearTimeout(waiting);
      waiting = setTimeout(update, 120);
    }
    const bound = (input) => (input.value === "" ? null : Number(input.value));
    function update() {
      clearTimeout(waiting);
      const tests = [];
      const between = (column, least, most) => {
        if (least === null && most === null) return;
        tests.push((i) => column[i] != null && (least === null || column[i] >= least) && (most === null || column[i] <= most));
      };
      between(all.step, bound(from), bound(to));
      between(keys.row, bound(row), bound(row));
      limits.forEach((limit) => between(limit.values, bound(limit.least), bound(limit.most)));
      if (run.value !== "") tests.push((i) => all.run[i] === Number(run.value));
      const words = search.value.trim().toLowerCase();
      if (words) {
        lower ??= { own: all.text.map((text) => text.toLowerCase()),
          problems: all.problems.map((problem) => `${problem.question}\n${problem.solution}`.toLowerCase()) };
        tests.push((i) => lower.own[i].includes(words) || lower.problems[all.problem[i]].includes(words));
      }
      const column = keys[sort.value];
      const sign = Number(direction.value);
      found = indices.filter((i) => tests.every((test) => test(i)));
      found.sort((a, b) => {  // rows without the figure come last, either way
        if (column[a] == null || column[b] == null) return (column[a] == null) - (column[b] == null) || a - b;
        return sign * (column[a] - column[b]) || a - b;
      });
      page = 0;
      show();
    }
    function turn(by) {
      page += by;
      show();
    }
    function show() {
      const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
      count.textContent = `${found.length.toLocaleString("en")} of ${plural(indices.length, "completion")}`;
      place.textContent = `page ${page + 1} of ${pages}`;
      previous.disabled = page === 0;
      next.disabled = page >= pages - 1;
      list.start = page * PAGE_SIZE + 1;
      list.removeAttribute("aria-busy");
      list.replaceChildren(...found.slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE).map(item));
    }
    function item(i) {
      const shown = ["step", "row"].includes(sort.value) ? "reward" : sort.value;
      const figures = [...new Set([shown, "reward"])].filter((name) => name in all.terms);
      const words = [
        ...figures.map((name) => el("span", { class: "figure" }, `${termName(name)} ${number(all.terms[name][i])}`)),
        ...title(i).map((word) => el("span", {}, word)),
      ];
      if (all.tokens[i]) words.push(el("span", {}, "with tokens"));
      const separated = words.flatMap((word, k) => (k ? [" · ", word] : [word]));
      const id = newId("open");
      const button = el("button", { type: "button", class: "row", "aria-expanded": "false", "aria-controls": id, "data-completion": i },
        ...separated, el("span", { class: "excerpt" }, all.text[i].slice(0, 200).replace(/\s+/g, " ") || "(no text)"));
      const box = el("div", { id });
      button.addEventListener("click", () => {
        const open = button.getAttribute("aria-expanded") === "false";
        button.setAttribute("aria-expanded", open);
        box.replaceChildren(...(open ? [detail(i, compare)] : []));
      });
      return el("li", {}, button, box);
    }

    const reset = () => {
      [search, from, to, row, ...limits.flatMap((limit) => [limit.least, limit.most])].forEach((input) => { input.value = ""; });
      run.value = "";
      update();
    };
    const termFields = limits.map((limit) => el("fieldset", {},
      el("legend", {}, termName(limit.name), termName(limit.name) === limit.name ? "" : ` (${limit.name})`),
      field("at least", limit.least), field("at most", limit.most)));
    const wide = field("Text of explanation, question or solution", search);
    wide.classList.add("wide");
    part("All completions",
      el("div", { class: "filters" }, wide,
        hasSteps ? field("Iteration from", from) : null, hasSteps ? field("to", to) : null,
        field(hasRows ? "Problem (row)" : "Problem (number)", row), runs.length > 1 ? field("Run", run) : null,
        field("Sort by", sort), field("Order", direction), el("button", { type: "button", onclick: reset }, "Clear filters")),
      el("details", {}, el("summary", {}, "Filter by terms"), el("div", { class: "terms" }, termFields)),
      el("div", { class: "pager" }, count, previous, place, next), list);
    update();
  }

  // ---- the whole

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
    const banded = data.sections.some((section) => section.charts.some((chart) => chart.series.some((series) => series.low)));
    const note = banded ? [el("p", { class: "soft" }, "Bands: ± one standard deviation over the completions of an iteration.")] : [];
    return note.concat(data.sections.flatMap((section) => {
      const figures = el("div", { class: "charts" }, section.charts.map((chart) => chartFigure(chart, "h4")));
      if (!section.folded) return [el("h3", {}, section.title), figures];
      return [el("h3", {}, section.title), el("details", {}, el("summary", {}, plural(section.charts.length, "chart")), figures)];
    }));
  }

  document.getElementById("nav").append(el("ul"));
  document.getElementById("footer").textContent = data.made;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => kept("rlt-report-theme") || (dark.matches ? "dark" : "light");
  setTheme(preferred());
  dark.addEventListener("change", () => setTheme(preferred()));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(kept("rlt-report-theme", root.dataset.theme === "dark" ? "light" : "dark") || (root.dataset.theme === "dark" ? "light" : "dark"));
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
  if (plots.length) requestAnimationFrame(() => setTimeout(loadPlotly));  // once the page can be read
})();
