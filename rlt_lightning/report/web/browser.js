// All completions, to sort, filter and search.

const PAGE_SIZE = 20;

// The columns to sort and filter by: terms, iteration and problem.
// The first one is the default: what the run writes at its end, not what earned most.
function sortKeys() {
  const keys = {};
  if (all.step.some((step) => step != null)) keys.step = all.step;
  keys.row = all.problem.map((problem) => all.problems[problem].row ?? problem + 1);
  if (all.lead.some((lead) => lead != null)) keys.lead = all.lead;
  return { ...keys, ...all.terms };
}

// The fields that choose and order completions; a change calls `update`, a text field's change `soon`.
function makeFields(keys, update, soon) {
  const keyName = (name) => ({ step: "iteration", row: "problem", lead: "reward minus its group's mean" })[name] || termName(name);
  const kinds = [...new Set(all.kind)].filter((kind) => kind != null).sort();
  const judged = all.right.some((right) => right != null);
  const numeric = (attributes) => el("input", { type: "number", step: "any", oninput: soon, ...attributes });
  const limits = Object.entries(all.terms).map(([name, values]) => {
    const known = values.filter((value) => value != null);
    const [least, most] = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
    const bound = (word, value) => numeric({ placeholder: number(value), "aria-label": `${termName(name)}, ${word}` });
    return { name, values, least: bound("at least", least), most: bound("at most", most) };
  });
  return {
    search: el("input", { type: "search", oninput: soon }),
    sort: el("select", { onchange: update }, options(Object.keys(keys).map((name) => [name, keyName(name)]))),
    direction: el("select", { onchange: update }, options(keys.step ? [["-1", "largest first"], ["1", "smallest first"]] : [["1", "smallest first"], ["-1", "largest first"]])),
    kind: kinds.length ? el("select", { onchange: update }, options([["", "all kinds"], ...kinds.map((kind) => [kind, kind])])) : null,
    right: judged ? el("select", { onchange: update }, options([["", "right and wrong"], ["true", "right"], ["false", "wrong"]])) : null,
    from: numeric({ step: "1", min: "0" }),
    to: numeric({ step: "1", min: "0" }),
    row: numeric({ step: "1", min: "1" }),
    run: el("select", { onchange: update }, options([["", "all runs"], ...runs.map((one, i) => [i, one.name])])),
    limits,
  };
}

function clearFields(fields) {
  const { search, from, to, row, limits } = fields;
  [search, from, to, row, ...limits.flatMap((limit) => [limit.least, limit.most])].forEach((input) => { input.value = ""; });
  [fields.run, fields.kind, fields.right].forEach((select) => { if (select) select.value = ""; });
}

let lowerCase = null;  // the texts to search, made at the first search

// What a completion must fulfil to be in the list, as functions of its number.
function tests(keys, fields) {
  const found = [];
  const bound = (input) => (input.value === "" ? null : Number(input.value));
  const between = (column, least, most) => {
    if (least === null && most === null) return;
    found.push((i) => column[i] != null && (least === null || column[i] >= least) && (most === null || column[i] <= most));
  };
  between(all.step, bound(fields.from), bound(fields.to));
  between(keys.row, bound(fields.row), bound(fields.row));
  fields.limits.forEach((limit) => between(limit.values, bound(limit.least), bound(limit.most)));
  if (fields.run.value !== "") found.push((i) => all.run[i] === Number(fields.run.value));
  if (fields.kind && fields.kind.value !== "") found.push((i) => all.kind[i] === fields.kind.value);
  if (fields.right && fields.right.value !== "") found.push((i) => String(all.right[i]) === fields.right.value);
  const words = fields.search.value.trim().toLowerCase();
  if (words) {
    lowerCase ??= { own: all.text.map((text) => text.toLowerCase()),
      problems: all.problems.map((problem) => `${problem.question}\n${problem.solution}`.toLowerCase()) };
    found.push((i) => lowerCase.own[i].includes(words) || lowerCase.problems[all.problem[i]].includes(words));
  }
  return found;
}

// The completions that the fields choose, in the order that they choose. Rows without the figure come last.
function chosen(keys, fields) {
  const conditions = tests(keys, fields);
  const column = keys[fields.sort.value];
  const sign = Number(fields.direction.value);
  const found = all.run.map((_, i) => i).filter((i) => conditions.every((test) => test(i)));
  return found.sort((a, b) => {
    if (column[a] == null || column[b] == null) return (column[a] == null) - (column[b] == null) || a - b;
    return sign * (column[a] - column[b]) || a - b;
  });
}

// A completion in the list: one line, which opens to its details.
function listItem(i, sortedBy, compare) {
  const shown = ["step", "row", "lead"].includes(sortedBy) ? "reward" : sortedBy;
  const figures = [...new Set([shown, "reward"])].filter((name) => name in all.terms);
  const words = [
    ...figures.map((name) => el("span", { class: "figure" }, `${termName(name)} ${number(all.terms[name][i])}`)),
    all.lead[i] != null ? el("span", {}, `${number(all.lead[i], true)} from its group's mean`) : null,
    ...judgements(i),
    ...title(i).map((word) => el("span", {}, word)),
  ].filter(Boolean);
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

// The fields as they stand on the page.
function fieldRows(keys, fields, reset) {
  const hasRows = all.problems.some((problem) => problem.row != null);
  const termFields = fields.limits.map(({ name, least, most }) => el("fieldset", {},
    el("legend", {}, termName(name), termName(name) === name ? "" : ` (${name})`), field("at least", least), field("at most", most)));
  const wide = field("Text of explanation, question or solution", fields.search);
  wide.classList.add("wide");
  return [
    el("div", { class: "filters" }, wide,
      keys.step ? field("Iteration from", fields.from) : null, keys.step ? field("to", fields.to) : null,
      field(hasRows ? "Problem (row)" : "Problem (number)", fields.row), runs.length > 1 ? field("Run", fields.run) : null,
      fields.kind ? field("Kind", fields.kind) : null, fields.right ? field("Answer", fields.right) : null,
      field("Sort by", fields.sort), field("Order", fields.direction), el("button", { type: "button", onclick: reset }, "Clear filters")),
    el("details", {}, el("summary", {}, "Filter by terms"), el("div", { class: "terms" }, termFields)),
  ];
}

// The list, in pages. `compare` shows a problem's completions side by side.
function browser(compare) {
  const keys = sortKeys();
  const count = el("p", { role: "status" });
  const list = el("ol", { class: "list" });
  const place = el("span", {});
  const previous = el("button", { type: "button", onclick: () => turn(-1) }, "Previous page");
  const next = el("button", { type: "button", onclick: () => turn(1) }, "Next page");
  let found = [];
  let page = 0;
  let waiting = 0;

  function soon() {  // once the reader stops typing
    list.setAttribute("aria-busy", "true");
    clearTimeout(waiting);
    waiting = setTimeout(update, 120);
  }
  function update() {
    clearTimeout(waiting);
    found = chosen(keys, fields);
    page = 0;
    show();
  }
  function turn(by) {
    page += by;
    show();
  }
  function show() {
    const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
    const copies = (places) => places.reduce((sum, i) => sum + all.copies[i], 0);
    const total = copies(found);
    const merged = total > found.length ? `, ${found.length.toLocaleString("en")} different: identical samples of a problem are one entry` : "";
    count.textContent = `${total.toLocaleString("en")} of ${plural(copies([...all.run.keys()]), "completion")}${merged}`;
    place.textContent = `page ${page + 1} of ${pages}`;
    previous.disabled = page === 0;
    next.disabled = page >= pages - 1;
    list.start = page * PAGE_SIZE + 1;
    list.removeAttribute("aria-busy");
    const items = found.slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE);
    list.replaceChildren(...items.map((i) => listItem(i, fields.sort.value, compare)));
  }

  const fields = makeFields(keys, update, soon);
  const reset = () => {
    clearFields(fields);
    update();
  };
  part("All completions", ...kindTables(), ...fieldRows(keys, fields, reset), el("div", { class: "pager" }, count, previous, place, next), list);
  update();
}
