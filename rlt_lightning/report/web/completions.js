// One completion with its problem, and the completions of one problem side by side.

const MOST_CHOICES = 200;  // problems to choose from
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
  const once = all.problems.every((problem) => Object.values(problem.runs).every((marks) => marks.times < 2));
  let about = "No later explanation beats the mean of its problem's first time, so you see the best and the worst.";
  if (once) about = "Every problem was met once, so none can have improved: you see its best and its worst explanation.";
  if (some) about = "Most improved: if a problem came again, the later completion that beats the mean of the first time by most.";
  const more = order.length > MOST_CHOICES ? ` The list has ${MOST_CHOICES} of ${order.length.toLocaleString("en")} problems. A button in each completion below leads to the others.` : "";
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

// The cards of one problem in one run. A completion that is both best and most improved has one card.
function cards(run, marks) {
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
