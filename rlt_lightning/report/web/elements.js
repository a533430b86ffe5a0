// What every other part uses: the data, elements, numbers, sections of the page and the theme.
// All text goes in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const main = document.getElementById("main");
const root = document.documentElement;
const NUM_COLORS = 8;
const DASHES = [[], [9, 5], [3, 3], [9, 3, 3, 3], [14, 4], [14, 3, 3, 3]];  // pixels drawn and left out
const SYMBOLS = [["circle", "●"], ["rect", "■"], ["triangle", "▲"], ["rectRot", "◆"], ["crossRot", "✕"], ["star", "✱"]];
const PATTERNS = ["", "M-1 1L1 -1M0 8L8 0M7 9L9 7", "M0 0L8 8M8 0L0 8", "M3 4H5"];  // paths in a tile of 8 x 8

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
const termName = (name) => data.completions.labels[name] || name;
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

let numIds = 0;
const newId = (word) => `${word}-${(numIds += 1)}`;

function part(title, ...children) {
  const id = newId("part");
  document.getElementById("nav").firstChild.append(el("li", {}, el("a", { href: `#${id}` }, title)));
  main.append(el("section", { "aria-labelledby": id }, el("h2", { id, tabindex: "-1" }, title), ...children));
}

// Store a value in the browser, if one is given, and return what is stored. A page from a file may have no store.
function stored(name, value) {
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
  redraw();
}
