// Messages as elements. All texts become text nodes, never markup of the page.

// The progress of a prompt. `from` is the first report, which comes after restoring.
function readingOf(from, { processed, total, time_ms }) {
  if (processed >= total) return "";
  const perToken = (time_ms - from.time_ms) / 1000 / (processed - from.processed);
  const rate = processed > from.processed ? ` · ${count(Math.round(1 / perToken))} tokens/s · about ${seconds((total - processed) * perToken)} left` : "";
  return `reading: ${count(processed)} of ${plural(total, "token")}${rate}`;
}

// The work of the cache for a reply: how much was restored, the time to first token, and the time saved. The restored
// part is known before the first token, the rest with the last one.
function figuresOf({ done, from, first_ms }, perToken) {
  const { prefix_cache: cache, timings, usage } = done ?? { prefix_cache: { restored: from.cache, source: from.source }, timings: {}, usage: { prompt_tokens: from.total } };
  const all = usage.prompt_tokens, restored = cache.restored, first_s = (first_ms ?? timings.ttft_ms) / 1000;
  const first = first_s >= 0 ? ` · first token after ${seconds(first_s)}` : "";
  const speed = timings.decode_tokens_per_s ? ` · ${timings.decode_tokens_per_s.toFixed(1)} tokens/s` : "";
  if (!restored) return [`${plural(all, "token")} computed, none restored${cache.miss_reason ? ` (${words(cache.miss_reason)})` : ""}${first}${speed}`];
  const spared = (restored * (perToken ?? 0)) / 1000;
  const instead = spared > 0.05 ? ` · about ${seconds(spared)} saved` : "";
  return [make("b", {}, `${count(restored)} of ${count(all)} tokens restored from ${cache.source}`), `${first}${instead}${speed}`];
}

// One message of the conversation, which may grow. `show` draws what is new.
class ShownMessage {
  constructor(message) {
    this.message = message;
    this.reply = message.role === "user" ? null : new GrowingReply();
    this.said = this.reply?.node ?? make("div", { class: "said" }, ...asTyped(message.content), ...(message.pictures ?? []).map(({ name, url }) => make("img", { src: url, alt: name })));
    this.thought = make("div");
    this.summary = make("summary");
    this.thinking = make("details", { open: "" }, this.summary, this.thought);
    this.rest = make("div");
    this.node = make("article", { class: message.role }, make("h2", {}, message.role === "user" ? "You" : message.model ?? "Model"), this.thinking, this.said, this.rest);
    this.shownRest = null;
  }

  show({ isRunning = false, perToken = null, onEdit = null } = {}) {
    const { message } = this, { content, reasoning = "" } = message, isOver = content || !isRunning;
    this.thinking.hidden = !reasoning;
    // It folds by itself once.
    if (isOver && this.summary.textContent !== "Thought") this.thinking.open = false;
    setText(this.summary, isOver ? "Thought" : "Thinking …");
    this.thought.append(reasoning.slice(this.thoughtLength ?? 0));
    this.thoughtLength = reasoning.length;
    this.said.hidden = !content && !message.pictures;
    this.reply?.show(content, !isRunning);
    const lines = linesOf(message, perToken), shown = JSON.stringify([lines.map(({ textContent }) => textContent), isRunning]);
    if (this.shownRest === shown) return;
    this.shownRest = shown;
    const edit = onEdit ? [make("button", { type: "button", class: "copy edit", onclick: onEdit }, "Edit")] : [];
    if (!isRunning && content) lines.push(make("div", { class: "row" }, ...edit, make("button", { type: "button", class: "copy", onclick: ({ target }) => copy(content, this.said, target) }, "Copy")));
    this.rest.replaceChildren(...lines);
  }

  // Shows a field with the message instead of it. `onSend` gets the new text.
  edit(onSend) {
    const field = make("textarea", { rows: 3, "aria-label": "Message" });
    field.value = this.message.content;
    const close = () => {
      form.replaceWith(this.said);
      this.rest.hidden = false;
      this.rest.querySelector(".edit")?.focus();
    };
    const onsubmit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text) onSend(text);
    };
    const form = make("form", { onsubmit }, field, make("p", { class: "quiet" }, "What follows this message is replaced."),
      make("div", { class: "row" }, make("button", { type: "submit" }, "Send"), make("button", { type: "button", onclick: close }, "Cancel")));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      sendOnEnter(event, form);
    });
    this.said.replaceWith(form);
    this.rest.hidden = true;
    field.focus();
  }
}

// What stands below a message: calls, errors, and what was restored.
function linesOf(message, perToken) {
  const lines = (message.calls ?? []).map((call) => make("p", { class: "call" }, `${call.name}(${call.arguments})`));
  if (message.error) lines.push(make("p", { class: "error" }, message.error));
  const figures = message.done || message.from?.cache || (message.from && message.first_ms) ? figuresOf(message, perToken) : [];
  if (message.stopped) figures.push(`${figures.length ? " · " : ""}${message.stopped}`);
  if (figures.length) lines.push(make("p", { class: "figures" }, ...figures));
  return lines;
}

function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}
