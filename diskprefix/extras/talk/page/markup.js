// Messages as elements. All texts become text nodes, never markup of the page.

// Text between ``` is a block of code, and text between ` is inline code.
function marked(text) {
  return text.split(/^```.*$\n?/m).flatMap((part, index) => {
    if (index % 2) return [make("pre", { tabindex: 0 }, part.replace(/\n$/, ""))];
    return part.split("`").map((piece, at) => (at % 2 ? make("code", {}, piece) : document.createTextNode(piece)));
  });
}

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

// One message of the conversation, which may be incomplete.
function article(message, perToken) {
  const parts = [];
  if (message.reasoning) {
    const open = !message.content && !message.done;
    parts.push(make("details", open ? { open: "" } : {}, make("summary", {}, message.content || message.done ? "Thought" : "Thinking …"), make("div", {}, message.reasoning)));
  }
  if (message.content) parts.push(make("div", { class: "said" }, ...marked(message.content)));
  for (const call of message.calls ?? []) parts.push(make("p", { class: "call" }, `${call.name}(${call.arguments})`));
  if (message.error) parts.push(make("p", { class: "error" }, message.error));
  const figures = message.done || message.from?.cache || (message.from && message.first_ms) ? figuresOf(message, perToken) : [];
  if (message.stopped) figures.push(`${figures.length ? " · " : ""}${message.stopped}`);
  if (figures.length) parts.push(make("p", { class: "figures" }, ...figures));
  if (message.done && message.content) parts.push(make("button", { type: "button", class: "copy", onclick: ({ target }) => copy(message.content, target.parentNode.querySelector(".said"), target) }, "Copy"));
  return make("article", { class: message.role }, make("h2", {}, message.role === "user" ? "You" : message.model ?? "Model"), ...parts);
}
