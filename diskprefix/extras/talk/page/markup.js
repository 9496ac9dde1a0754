// Texts of messages as elements. All of it comes in as text nodes, so nothing of a message is markup of the page.

// Blocks between ``` are code; within the rest, what is between ` is.
function marked(text) {
  return text.split(/^```.*$\n?/m).flatMap((part, index) => {
    if (index % 2) return [make("pre", { tabindex: 0 }, part.replace(/\n$/, ""))];
    return part.split("`").map((piece, at) => (at % 2 ? make("code", {}, piece) : document.createTextNode(piece)));
  });
}

// How far the daemon is with a prompt. `from` is the first report, which comes when all is restored.
function readingOf(from, { processed, total, time_ms }) {
  if (processed >= total) return "";
  const perToken = (time_ms - from.time_ms) / 1000 / (processed - from.processed);
  const rate = processed > from.processed ? ` · ${count(Math.round(1 / perToken))} tokens/s · about ${seconds((total - processed) * perToken)} left` : "";
  return `reading: ${count(processed)} of ${plural(total, "token")}${rate}`;
}

// What the cache did for a reply: the cause of the first token's time, and what the time would have been. What was
// restored is known before the first token, the rest with the last one.
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

// One message of the conversation. `said` may be incomplete.
function article(said, perToken) {
  const parts = [];
  if (said.reasoning) {
    const open = !said.content && !said.done;
    parts.push(make("details", open ? { open: "" } : {}, make("summary", {}, said.content || said.done ? "Thought" : "Thinking …"), make("div", {}, said.reasoning)));
  }
  if (said.content) parts.push(make("div", { class: "said" }, ...marked(said.content)));
  for (const call of said.calls ?? []) parts.push(make("p", { class: "call" }, `${call.name}(${call.arguments})`));
  if (said.error) parts.push(make("p", { class: "error" }, said.error));
  const figures = said.done || said.from?.cache || (said.from && said.first_ms) ? figuresOf(said, perToken) : [];
  if (said.stopped) figures.push(`${figures.length ? " · " : ""}${said.stopped}`);
  if (figures.length) parts.push(make("p", { class: "figures" }, ...figures));
  if (said.done && said.content) parts.push(make("button", { type: "button", class: "copy", onclick: ({ target }) => copy(said.content, target.parentNode.querySelector(".said"), target) }, "Copy"));
  return make("article", { class: said.role }, make("h2", {}, said.role === "user" ? "You" : said.model ?? "Model"), ...parts);
}
