// What every other part uses: the data, elements, numbers, sections of the page and the theme.
// All text goes in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const main = document.getElementById("main");
const root = document.documentElement;
const NUM_COLORS = 8;
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = [["circle", "●"], ["square", "■"], ["triangle-up", "▲"], ["diamond", "◆"], ["x", "✖"], ["star", "★"]];
const PATTERNS = ["", "/", "x", "."];

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
  drawn.forEach((chart, plot) => drawChart(plot, chart));
}
