// Texts whose tokens carry figures.

// Figures of a token: how surprising one is, in steps, and how the page words it.
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

// The tokens with their figures. Tokens that only together make a character are one unit.
function units(texts, figures) {
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

// Tokens with the figure to show of each and its rank by surprise. A character of several tokens shows the largest.
function measured(texts, figures, kind) {
  const found = units(texts, figures);
  for (const unit of found) {
    const known = unit.figures.filter((value) => value != null);
    unit.value = known.length ? known.reduce((a, b) => (kind.surprise(b) > kind.surprise(a) ? b : a)) : null;
  }
  const ranked = found.map((_, i) => i).filter((i) => found[i].value != null)
    .sort((a, b) => kind.surprise(found[b].value) - kind.surprise(found[a].value));
  return [found, ranked];
}

function tokenSpan(unit, i, kindName) {
  const level = unit.value == null ? 0 : KINDS[kindName].level(unit.value);
  const side = kindName === "kl" && unit.value < 0 ? "c" : "w";
  const line = unit.text.trim() === "" && unit.text.includes("\n");
  const classes = `t${level ? ` ${side}${level}` : ""}${line ? " line" : ""}`;
  return el("span", { class: classes, tabindex: i ? "-1" : "0", "data-i": i }, unit.text);
}

// Show a token's figure when the pointer or the focus is on it; arrow keys move the focus. Returns what moves it.
function followTokens(box, spans, tell) {
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
  return go;
}

// A text whose tokens show their figures. The Tab key stops at it once; arrow keys move from token to token.
function heat(label, texts, figures, kindName) {
  const kind = KINDS[kindName];
  const [found, ranked] = measured(texts, figures, kind);
  const rank = new Map(ranked.map((i, place) => [i, place + 1]));
  const tell = (i) => {
    const { text, figures: of, value } = found[i];
    if (value == null) return `“${visible(text)}”: no figure`;
    const parts = of.length > 1 ? ` (${of.length} tokens: ${of.map((one) => number(one)).join(", ")})` : "";
    return `“${visible(text)}”: ${kind.tell(value)}${parts}\nnumber ${rank.get(i)} of ${ranked.length} by surprise`;
  };
  const spans = found.map((unit, i) => tokenSpan(unit, i, kindName));
  const box = el("div", { class: "text", role: "group", "aria-label": `${label}: arrow keys go from token to token` }, spans);
  const go = followTokens(box, spans, tell);
  const most = ranked.filter((i) => found[i].text.trim() && kind.level(found[i].value) && kind.surprise(found[i].value) > 0);
  const top = most.slice(0, 6).map((i) => {
    const name = `${visible(found[i].text)}, ${kind.tell(found[i].value)}: show it in the text`;
    return el("button", { type: "button", "aria-label": name, onclick: () => go(i) },
      el("code", {}, `“${visible(found[i].text.trim())}”`), ` ${number(found[i].value)}`);
  });
  const key = kind.legend.map(([level, text]) => el("li", {}, el("span", { class: `t ${level}` }, "word"), ` ${text}`));
  return [box, el("ul", { class: "key", "aria-label": "Legend" }, key),
    top.length ? el("div", { class: "top-tokens" }, kind.most, top) : null];
}

function textBox(label, text) {
  const name = `${label} (text)`;
  return el("div", { class: "text", tabindex: "0", role: "region", "aria-label": name }, text || "(no text)");
}
