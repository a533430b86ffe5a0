// One completion with its problem, and completions of one problem side by side.

const MOST_CHOICES = 200;  // problems to choose from
const LARGEST_IS_NOT_BEST = "The largest reward need not be the best explanation: it may be luck, or a text that is merely likely.";
const MOST_CARDS = 12;  // explanations of a single problem that are all shown open
// The student's log-prob of the solution without and with the explanation, and the probability of a token.
const CHANGE = ["student_log_prob_before", "student_log_prob_after", "student_prob_before", "student_prob_after"];
const all = data.completions;

function title(i) {
  const words = [];
  if (all.step[i] != null) words.push(`iteration ${all.step[i]}`);
  words.push(problemName(all.problem[i]));
  if (all.sample[i]) words.push(all.sample[i]);
  if (all.column[i] != null) words.push(all.column[i]);
  if (runs.length > 1) words.push(runs[all.run[i]].name);
  return words;
}

function problemName(problem) {
  const { row } = all.problems[problem];
  return row == null ? `problem ${problem + 1}` : `row ${row}`;
}

// A completion's reward minus the mean of its group (same problem and iteration); null for a group of one.
function leadOf(i) {
  const marks = all.problems[all.problem[i]].runs[all.run[i]];
  const group = String(all.step[i]);
  const reward = (all.terms.reward || [])[i];
  return reward == null || marks.means[group] == null || marks.sizes[group] < 2 ? null : reward - marks.means[group];
}
if (all) all.lead = all.run.map((_, i) => leadOf(i));

// What a rule says of a completion: its kind, and whether it ends with the right answer.
function judgements(i) {
  const found = [];
  if (all.kind[i] != null) found.push(el("span", { class: `mark kind-${all.kind[i]}` }, all.kind[i]));
  if (all.right[i] != null) found.push(el("span", { class: `mark ${all.right[i] ? "right" : "wrong"}` }, all.right[i] ? "✓ right answer" : "✗ wrong answer"));
  return found;
}

// A probability by its logarithm, which may be too small for a number.
function probability(log) {
  if (log == null) return "–";
  if (log > Math.log(1e-3)) return Math.exp(log).toFixed(3);
  const exponent = Math.floor(log / Math.LN10);
  return `${Math.exp(log - exponent * Math.LN10).toFixed(1)}e−${-exponent}`;
}

// What the explanation makes of the student's probability of the solution; only `rlt teach` and `rlt explain` know it.
function change(i) {
  const [before, after, byTokenBefore, byTokenAfter] = CHANGE.map((name) => (all.terms[name] || [])[i]);
  if (before == null || after == null) return null;
  return el("p", {}, "The student's probability of the whole solution: ", el("strong", {}, `${probability(before)} → ${probability(after)}`),
    ", without → with the explanation.", el("span", { class: "soft" }, ` Per token (geometric mean): ${number(byTokenBefore)} → ${number(byTokenAfter)}.`));
}

// The reward and what it is the sum of, then all other figures, folded.
function figuresOf(i) {
  const names = Object.keys(all.terms).filter((name) => all.terms[name][i] != null && !CHANGE.includes(name));
  const entry = (name) => [termName(name), number(all.terms[name][i])];
  const isMain = (name) => name === "reward" || name.endsWith("_reward");
  const [main, more] = [names.filter(isMain).map(entry), names.filter((name) => !isMain(name)).map(entry)];
  if (all.lead[i] != null && all.run.length > 1) main.splice(1, 0, ["minus its group's mean", number(all.lead[i], true)]);
  if (all.finish[i] != null) more.push(["ended by", all.finish[i]]);
  if (!main.length) return [figureList(more)];
  return [figureList(main), more.length ? el("details", { class: "print" }, el("summary", {}, `${more.length} more figures`), figureList(more)) : null];
}

function figureList(entries) {
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
  const { question: text, about } = all.problems[problem];
  if (!text) return [];
  return [el("p", { class: "label" }, "Question"), textBox("Question", text), about ? el("p", { class: "soft" }, about) : null];
}

function detail(i, compare) {
  const button = compare && el("button", { type: "button", onclick: () => compare(all.problem[i]) }, "Compare this problem's completions");
  return el("div", { class: "detail" }, ...question(all.problem[i]), ...body(i), button || null);
}

// What a completion is and what it is worth, without its question.
function body(i) {
  return [el("p", {}, ...judgements(i)), change(i), ...figuresOf(i), ...explanation(i), ...solution(i)];
}

// The explanations of a single problem, each as a card.
function explanations() {
  const rewards = all.terms.reward || [];
  const best = rewards.reduce((found, reward, i) => (reward > (rewards[found] ?? -Infinity) ? i : found), 0);
  const heading = (i) => [all.sample[i] || `explanation ${i + 1}`, all.run.length > 1 && i === best && rewards.length ? "largest reward" : ""].filter(Boolean).join(": ");
  const about = all.run.length > 1 ? el("p", {}, LARGEST_IS_NOT_BEST) : null;
  const { solution: text } = all.problems[0];
  const isBelow = all.run.length === 1 && all.tokens[0];  // with its figures
  part("The problem", ...question(0), ...(text && !isBelow ? [el("p", { class: "label" }, "Solution"), textBox("Solution", text)] : []));
  part(all.run.length > 1 ? "Explanations" : "The explanation", about, el("div", { class: "pair" }, all.run.map((_, i) => el("article", { class: "card" },
    all.run.length > 1 || all.sample[i] ? el("h3", {}, heading(i)[0].toUpperCase() + heading(i).slice(1)) : null, ...body(i)))));
}

function field(label, input) {
  input.id = newId("field");
  return el("div", { class: "field" }, el("label", { for: input.id }, label), input);
}

function options(entries) {
  return entries.map(([value, text]) => el("option", { value }, text));
}

// A problem's typical completions of the first and the last time, and those of the largest and smallest reward.
function comparison() {
  const ofRuns = (problem, figure) => Math.max(...Object.values(all.problems[problem].runs).map(figure));
  const gains = all.problems.map((_, i) => ofRuns(i, (marks) => marks.gain ?? -Infinity));
  const ranges = all.problems.map((_, i) => ofRuns(i, (marks) =>
    marks.highest == null || marks.lowest == null ? 0 : all.terms.reward[marks.highest] - all.terms.reward[marks.lowest]));
  const times = all.problems.map((_, i) => ofRuns(i, (marks) => marks.times));
  const spread = ranges.some((range) => range > 0);  // none with one completion of each problem
  const again = times.some((count) => count > 1);
  const order = all.problems.map((_, i) => i).sort((a, b) => (times[b] > 1) - (times[a] > 1) || a - b);
  const name = (i) => {
    const text = all.problems[i].question.replace(/\s+/g, " ");
    const about = [
      ...(spread ? [`${termName("reward")} differs by ${number(ranges[i])}`] : []),
      ...(gains[i] > -Infinity ? [`last minus first time ${number(gains[i], true)}`] : []),
    ];
    return `${problemName(i)}${about.length ? ` (${about.join(", ")})` : ""}: ${text.slice(0, 60)}${text.length > 60 ? "…" : ""}`;
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
  let about = "Typical: the median among its problem's completions of that iteration. ";
  if (!again) about = `${data.sections ? "Every problem was met once, so none shows what was learned. " : ""}Typical: the median completion. `;
  about += LARGEST_IS_NOT_BEST;
  const more = order.length > MOST_CHOICES ? ` The list has ${MOST_CHOICES} of ${order.length.toLocaleString("en")} problems. A button in each completion below leads to the others.` : "";
  const chooser = field("Problem", choice);
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

// The cards of one problem in one run. A completion that is two of them has one card.
function cards(run, marks) {
  const times = marks.times > 1;
  const kinds = [[times ? "typical, first time" : "typical", marks.typical_first], ["typical, last time", marks.typical_last],
    [`largest ${termName("reward")}`, marks.highest], [`smallest ${termName("reward")}`, marks.lowest]].filter(([, i]) => i != null);
  const seen = new Map();
  for (const [kind, i] of kinds) seen.set(i, [...(seen.get(i) || []), kind]);
  return [...seen].map(([i, names]) => {
    const heading = names.join("; ");
    return el("article", { class: "card", style: `--run: var(--run-${run % NUM_COLORS})` },
      el("h3", {}, heading[0].toUpperCase() + heading.slice(1)), el("p", { class: "soft" }, title(i).join(", ")),
      ...body(i));
  });
}
