// Markdown of replies as elements. A reply is never trusted: the parser escapes its HTML, DOMPurify keeps only the elements
// and attributes below, and the page's policy runs no other script and loads nothing.

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "strong", "em", "del", "code", "pre", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  // Their values are no addresses.
  ADD_URI_SAFE_ATTR: ["start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const ALLOWED_IN_CODE = { ...ALLOWED, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] };
// Characters of a block of code that gets colours.
const LONGEST_COLOURED = 50_000;
// While a reply grows, its last block is drawn again each time if it is short; else when it has grown by this part of its
// length, or when drawing takes at most this part of the time. It never takes more than half of the time.
const SHORT_BLOCK = 2_000, GROWN = 1 / 16, DRAWING = 1 / 8;

const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);
const parser = new marked.Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // A picture would be a request to elsewhere: it becomes a link.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// HTML as elements, without what a reply must not contain.
function cleaned(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  return fragment;
}

// A block of code with its language and a button that copies it.
function codeBlock(text, language = "", isColoured = true) {
  const code = make("code", {}, text), pre = make("pre", { tabindex: 0, role: "group", "aria-label": "Code" }, code);
  if (isColoured && hljs.getLanguage(language) && text.length <= LONGEST_COLOURED)
    code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, ALLOWED_IN_CODE));
  const button = make("button", { type: "button", class: "copy", onclick: ({ target }) => copy(code.textContent, code, target) }, "Copy code");
  return make("div", { class: "code" }, make("div", { class: "row" }, make("span", { class: "quiet" }, language || "text"), button), pre);
}

// The elements of tokens of the parser. `above` is the level of the heading above, so that none is left out.
function elementsOf(tokens, above, isColoured) {
  const fragment = cleaned(parser.parser(tokens));
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code"), language = /^language-(\S+)/.exec(code?.className ?? "")?.[1];
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), language, isColoured));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  let level = above;
  for (const heading of fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    level = Math.min(level + 1, Number(heading.tagName[1]) + 2, 6);
    heading.replaceWith(make(`h${level}`, {}, ...heading.childNodes));
  }
  return [[...fragment.childNodes], level];
}

// A reply that grows. Blocks of which no more text can come are drawn once; only the last ones are drawn again. So the
// work is linear in the length of the reply, and beyond that a part of the time. `numParsed` counts the characters that
// were parsed; `now` returns milliseconds.
class GrowingReply {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.drawnAt = this.took = 0;
    this.node = make("div", { class: "said" });
    this.numParsed = 0;
    this.restart();
  }

  restart() {
    this.text = "";
    // The beginning of the text that may be drawn again, its elements, and the level of the heading above it.
    this.begin = 0;
    this.last = [];
    this.above = 2;
    // The end of an open block of code, and the text node that grows.
    this.fence = null;
    this.isWhole = false;
    this.node.replaceChildren();
  }

  // Draws `text`. Unless it is whole, it begins with the text of the call before.
  show(text, isWhole = false) {
    if (isWhole && this.isWhole && this.text === text) return;
    if (isWhole) this.restart();
    this.isWhole = isWhole;
    const added = text.slice(this.text.length);
    if (this.fence && !this.fence.ends(text, this.text.length)) {
      this.fence.code.append(added);
      this.text = text;
      return;
    }
    if (!isWhole && !this.mayDraw(added.length, text.length - this.begin)) return;
    const began = this.now();
    this.text = text;
    for (const node of this.last) node.remove();
    try {
      this.parse(text.slice(this.begin), isWhole);
    } catch {
      // The parser calls itself for each level of a block in a block.
      this.last = [make("p", { class: "plain" }, text.slice(this.begin))];
      this.node.append(...this.last);
    }
    this.drawnAt = this.now();
    this.took = this.drawnAt - began;
  }

  mayDraw(numAdded, length) {
    if (length <= SHORT_BLOCK) return numAdded > 0;
    const time = this.now() - this.drawnAt;
    if (time > 0 && this.took < DRAWING * time) return true;
    return numAdded > GROWN * (length - SHORT_BLOCK) && this.took <= time;
  }

  parse(rest, isWhole) {
    this.fence = null;
    this.numParsed += rest.length;
    const tokens = parser.lexer(rest), numReady = isWhole ? tokens.length : this.numReady(tokens, rest);
    if (numReady) {
      const [nodes, level] = elementsOf(tokens.slice(0, numReady), this.above, true);
      this.node.append(...nodes);
      this.above = level;
      this.begin += lengthOf(tokens.slice(0, numReady));
    }
    const open = tokens.slice(numReady);
    [this.last] = open.length ? elementsOf(open, this.above, false) : [[]];
    this.node.append(...this.last);
    this.fence = openFence(open, this.last);
  }

  // The number of tokens that no more text can change: a whole line follows them. The beginning of a line does not tell
  // yet whether it continues the block before.
  numReady(tokens, rest) {
    const lastLine = rest.lastIndexOf("\n");
    let ready = 0, at = 0;
    tokens.forEach(({ type, raw }, index) => {
      if (type !== "space" && at <= lastLine) ready = index;
      at += raw.length;
    });
    // The parser changes ends of lines of other systems; then the places in the text are unknown.
    return at === rest.length ? ready : 0;
  }
}

const lengthOf = (tokens) => tokens.reduce((sum, { raw }) => sum + raw.length, 0);

// The block of code at the end of the text, if it is still open.
function openFence(tokens, nodes) {
  const token = tokens[0], found = token?.type === "code" && /^ {0,3}(`{3,}|~{3,})[^\n]*\n/.exec(token.raw);
  if (tokens.length !== 1 || !found) return null;
  const closing = new RegExp(`^ {0,3}${found[1][0]}{${found[1].length},}[ \\t]*$`, "m");
  if (closing.test(token.raw.slice(found[0].length))) return null;
  const code = nodes[0].querySelector("code");
  // The parser drops the end of the last line.
  if (token.raw.endsWith("\n") && token.text) code.append("\n");
  return { code, ends: (text, from) => closing.test(text.slice(text.lastIndexOf("\n", from - 1) + 1)) };
}

// What a person wrote, as typed; text between lines of ``` is a block of code, and text between ` is inline code.
function asTyped(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(/^(`{3,})(.*)\n([^]*?)(?:\n?^\1`*[ \t]*$\n?|(?![^]))/gm)) {
    parts.push(...inline(text.slice(at, found.index)), codeBlock(found[3], found[2].trim()));
    at = found.index + found[0].length;
  }
  return [...parts, ...inline(text.slice(at))];
}

const inline = (text) => text.split("`").map((piece, at) => (at % 2 ? make("code", {}, piece) : document.createTextNode(piece)));
