// Texts of messages as elements. All of it comes in as text nodes, so nothing of a message is markup of the page.

// Blocks between ``` are code; within the rest, what is between ` is.
function marked(text) {
  return text.split(/^```.*$\n?/m).flatMap((part, index) => {
    if (index % 2) return [make("pre", { tabindex: 0 }, part.replace(/\n$/, ""))];
    return part.split("`").map((piece, at) => (at % 2 ? make("code", {}, piece) : document.createTextNode(piece)));
  });
}

// What the cache did for a reply: the cause of the first token's time, and what the time would have been.
function figuresOf(done, perToken) {
  const { prefix_cache: cache, timings, usage } = done;
  const all = usage.prompt_tokens, restored = cache.restored;
  const first = `first token after ${seconds(timings.ttft_ms / 1000)}`;
  const speed = timings.decode_tokens_per_s ? ` · ${timings.decode_tokens_per_s.toFixed(1)} tokens/s` : "";
  if (!restored) return [`${plural(all, "token")} computed, none restored (${words(cache.miss_reason ?? "new")}) · ${first}${speed}`];
  const spared = (restored * (perToken ?? 0)) / 1000;
  const instead = spared > 0.05 ? ` · about ${seconds(spared)} saved` : "";
  return [make("b", {}, `${count(restored)} of ${count(all)} tokens restored from ${cache.source}`), ` · ${first}${instead}${speed}`];
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    setText(button, "Copied");
  } catch {
    // Without HTTPS there is no clipboard on other addresses than this machine's.
    getSelection().selectAllChildren(button.parentNode.querySelector(".said"));
    setText(button, "Selected: press Ctrl+C");
  }
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
  if (said.done) parts.push(make("p", { class: "figures" }, ...figuresOf(said.done, perToken)));
  if (said.done && said.content) parts.push(make("button", { type: "button", class: "copy", onclick: ({ target }) => copy(said.content, target) }, "Copy"));
  if (said.stopped) parts.push(make("p", { class: "figures" }, "stopped"));
  return make("article", { class: said.role }, make("h2", {}, said.role === "user" ? "You" : said.model ?? "Model"), ...parts);
}
