// Elements of the page. Texts of a run are only ever set as text, never as HTML.
"use strict";

function element(tag, attributes = {}, ...children) {
  const svg = element.svg.has(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
element.svg = new Set(["svg", "g", "path", "line", "text", "circle", "rect"]);

// Marks one of several elements as the current one, for styles and for screen readers.
function markCurrent(nodes, isCurrent, kind) {
  for (const node of nodes) {
    if (isCurrent(node)) node.setAttribute("aria-current", kind);
    else node.removeAttribute("aria-current");
  }
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (Number.isInteger(value)) return Math.abs(value) < 1e7 ? String(value) : value.toExponential(2);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function age(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  return `${Math.max(0, Math.round(seconds))} s`;
}

const COLOURS = 8, DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 5", "1 4", "12 4", "4 2"];
const colour = (index) => `var(--c${index % COLOURS})`;
const dash = (index) => DASHES[index % DASHES.length];

function table(headings, rows, { numeric = [], classes = [] } = {}) {
  const cell = (tag, content, column) => element(tag, { class: numeric.includes(column) ? "number" : null, scope: tag === "th" ? "col" : null }, content);
  return element("div", { class: "table", tabindex: "0" }, element("table", {},
    element("thead", {}, element("tr", {}, headings.map((text, i) => cell("th", text, i)))),
    element("tbody", {}, rows.map((row, n) => element("tr", { class: classes[n] || null }, row.map((content, i) => cell("td", content === null ? "-" : content, i)))))));
}

function labelled(text, control) {
  return element("label", {}, text, control);
}

function choice(name, options, value, onchange) {
  return element("fieldset", {}, element("legend", {}, name), options.map(([key, text]) => labelled("", element("span", {},
    element("input", { type: "radio", name, value: key, checked: key === value, onchange: () => onchange(key) }), " ", text))));
}

function select(options, value, onchange, name) {
  return element("select", { "aria-label": name, onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => element("option", { value: key, selected: String(key) === String(value) }, text)));
}

function definitions(pairs) {
  return element("dl", {}, pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value === null ? "-" : String(value)))));
}
