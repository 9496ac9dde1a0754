// Numbers as people read them, and elements of the page.

const count = new Intl.NumberFormat("en").format;

function bytes(number) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (number < 1024) return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} TiB`;
}

// Two sizes, in one unit unless the first one is much smaller.
function part(number, whole) {
  if (number && number < whole / 64) return `${bytes(number)} of ${bytes(whole)}`;
  const [size, unit] = bytes(whole).split(" ");
  return `${((number * size) / (whole || 1)).toFixed(unit === "B" ? 0 : 1)} of ${size} ${unit}`;
}

function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 120) return `${s.toFixed(1)} s`;
  if (s < 7200) return `${(s / 60).toFixed(1)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;
}

function ago(when, now) {
  const s = Math.max(0, now - when);
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return s < 86400 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86400)} d ago`;
}

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "–");
const IN_FULL = { too_short: "too short to be saved on the disk", no_logits: "saved without the state to begin a reply" };
const words = (code) => IN_FULL[code] ?? String(code).replaceAll("_", " ");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
}

const isOpen = (button) => button.getAttribute("aria-expanded") === "true";
const find = (selector) => document.querySelector(selector);

// Makes an element. Texts of prompts and requests become text nodes, never markup.
function make(tag, attributes = {}, ...children) {
  const space = ["svg", "g", "line", "text", "circle", "rect", "title"].includes(tag);
  const node = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, setting] of Object.entries(value)) node.style.setProperty(key, setting);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Calls `draw` only if `value` differs from the last time, so that focused and selected elements stay.
const drawn = new Map();
function whenChanged(name, value, draw) {
  const text = JSON.stringify(value);
  if (drawn.get(name) === text) return;
  drawn.set(name, text);
  draw();
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Copies the text of `node`, and reports it in `status`.
async function copy(text, node, status) {
  try {
    await navigator.clipboard.writeText(text);
    setText(status, "Copied");
  } catch {
    // Without HTTPS, browsers have a clipboard for addresses of this machine only.
    getSelection().selectAllChildren(node);
    setText(status, "Selected: press Ctrl+C");
  }
}

// A bar of parts of a whole: [[class, amount], …].
function bar(role, label, parts, whole, classes = "") {
  const done = parts.reduce((sum, [, amount]) => sum + amount, 0);
  const widths = parts.map(([name, amount]) =>
    make("span", { class: name, style: { width: `${whole ? Math.min(100, (100 * amount) / whole) : 0}%` } }),
  );
  const values = { "aria-valuemin": 0, "aria-valuemax": Math.max(whole, done, 1), "aria-valuenow": done };
  return make("div", { class: `bar ${classes}`, role, "aria-label": label, ...values }, ...widths);
}
