// The conversation: its copy in the browser, its requests, and waiting for the daemon.

// Each conversation has its own entry, so that two tabs do not overwrite each other's.
const STORED = "diskprefix-chat-", RETRY_MS = 500, LEAST_COMPUTED = 32, LONGEST_REPLY = 1024;

let chats = storedChats();
let chat = chats[0] ?? newChat();
let running = null;
// Milliseconds to compute a token of a prompt, from the last reply that computed enough of them.
let perToken = null;

function storedChats() {
  const found = [];
  try {
    for (const key of Object.keys(localStorage).filter((key) => key.startsWith(STORED))) {
      try {
        found.push(JSON.parse(localStorage.getItem(key)));
      } catch {
        localStorage.removeItem(key);
      }
    }
  } catch {
    // The browser stores nothing for this page.
  }
  return found.sort((a, b) => b.used - a.used);
}

function newChat() {
  const created = { id: crypto.getRandomValues(new Uint32Array(1))[0], used: Date.now(), system: "", messages: [] };
  chats.unshift(created);
  return created;
}

function store() {
  chat.used = Date.now();
  try {
    localStorage.setItem(STORED + chat.id, JSON.stringify(chat));
    setText(find("#kept"), "");
  } catch {
    setText(find("#kept"), "This conversation is too large for the browser to keep: it ends with this tab.");
  }
}

const titleOf = (chat) => (chat.messages[0]?.content ?? "New conversation").slice(0, 60);

function drawChat() {
  find("#which").replaceChildren(...chats.map((other) => make("option", { value: other.id }, titleOf(other))));
  find("#which").value = chat.id;
  find("#system").value = chat.system;
  find("#temperature").value = chat.temperature ?? "";
  find("#length").value = chat.length ?? "";
  for (const { done } of chat.messages) if (done) learn(done);
  find("#log").replaceChildren(...chat.messages.map(articleOf));
  drawExamples();
  drawButtons();
}

// Offers examples in an empty conversation; with the document, the questions that were not asked yet.
function drawExamples() {
  const asked = chat.messages.map(({ content }) => content), has = chat.system === DOCUMENT, isNew = !chat.messages.length;
  const questions = QUESTIONS.filter((question) => !asked.includes(question));
  find("#try").hidden = running !== null || !(has ? questions.length : isNew && !chat.system);
  setText(find("#h-try"), has ? "Ask about the handbook" : "Try it");
  setText(find("#try-says"), !has ? "The long document shows what the cache is for: it is computed for the first question, and restored for the next ones."
    : isNew ? "The first answer takes a while: the document is computed." : "The next answer begins at once: the document is restored. Restart the daemon and ask again: then it is read from the disk.");
  const examples = has ? questions : EXAMPLES;
  find("#examples").replaceChildren(...examples.map((text) => make("button", { type: "button", onclick: () => send(text, SHORT_REPLY) }, text)),
    ...(has ? [] : [make("button", { type: "button", id: "long", onclick: useDocument }, "A long document: the handbook of a library")]));
}

function useDocument() {
  chat.system = DOCUMENT;
  store();
  drawChat();
  find("#examples button")?.focus();
}

function drawButtons() {
  const last = chat.messages[chat.messages.length - 1];
  find("#send").hidden = running !== null;
  find("#stop").hidden = running === null;
  find("#again").hidden = running !== null || last?.role !== "assistant";
  for (const id of ["#which", "#new", "#forget"]) find(id).disabled = running !== null;
}

// What is shown of each message.
const articles = new WeakMap();

function articleOf(message) {
  if (!articles.has(message)) articles.set(message, new ShownMessage(message));
  const shown = articles.get(message);
  shown.show({ isRunning: running !== null && message === chat.messages.at(-1), perToken });
  return shown.node;
}

let isDrawing = false;

// Draws what came at most once for each picture of the screen.
function drawSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    if (running) drawLast();
  });
}

function drawLast() {
  const isAtEnd = innerHeight + scrollY > document.body.scrollHeight - 80;
  articleOf(chat.messages.at(-1));
  if (isAtEnd) scrollTo(0, document.body.scrollHeight);
}

function add(message) {
  chat.messages.push(message);
  find("#log").append(articleOf(message));
  scrollTo(0, document.body.scrollHeight);
}

function learn({ prefix_cache: cache, timings, usage }) {
  const computed = usage.prompt_tokens - cache.restored;
  if (computed >= LEAST_COMPUTED && timings.prefill_ms) perToken = timings.prefill_ms / computed;
}

const limit = () => chat.length ?? chat.messages[chat.messages.length - 2].limit ?? LONGEST_REPLY;

// The body of a request. Each turn's prompt begins with the prompt of the turn before.
function body() {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  const messages = chat.messages.slice(0, -1).filter(({ content }) => content).map(({ role, content, reasoning }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
  return {
    model: find("#model").value, messages: [...system, ...messages], stream: true, return_progress: true,
    stream_options: { include_usage: true }, prefix_cache: { scope: "full" }, max_tokens: limit(),
    ...(chat.temperature == null ? {} : { temperature: chat.temperature }),
  };
}

async function answer(mayRepeat = false) {
  const reply = { role: "assistant", model: find("#model").value, content: "", reasoning: "", calls: [] }, began = performance.now();
  running = new AbortController();
  add(reply);
  drawExamples();
  drawButtons();
  try {
    const response = await call("POST", "/v1/chat/completions", body(), running.signal);
    for await (const data of eventsOf(response)) {
      if (data !== "[DONE]") take(reply, JSON.parse(data), began);
      if (reply.done || mayRepeat || !repeatsItself(reply.content || reply.reasoning)) continue;
      reply.stopped = "stopped: the reply repeats itself; “Answer again” lets it go on";
      break;
    }
    if (!reply.done && !reply.stopped) reply.error ??= "the connection ended before the reply did";
  } catch (error) {
    if (error.name === "AbortError") reply.stopped ??= "stopped";
    else reply.error = error instanceof TypeError ? "no answer: the daemon was not there" : error.message;
    if (error.status === 401) askForKey(error);
  }
  running = null;
  setText(find("#doing"), "");
  drawLast();
  drawButtons();
  store();
  if (reply.error && !reply.done) waitForDaemon();
}

// True if a text ends with the same piece four times, or more often if it has no letters, as lines of tables.
function repeatsItself(text) {
  for (let length = 1; length <= text.length / 4 && length <= 400; length++) {
    const piece = text.slice(-length), times = Math.max(4, Math.ceil((/\p{L}/u.test(piece) ? 80 : 400) / length));
    if (text.endsWith(piece.repeat(times))) return true;
  }
  return false;
}

function take(reply, chunk, began) {
  const isFirst = !reply.content && !reply.reasoning;
  if (chunk.error) reply.error = chunk.error.message;
  if (chunk.prompt_progress) {
    reply.from ??= chunk.prompt_progress;
    setText(find("#doing"), readingOf(reply.from, chunk.prompt_progress));
  }
  const delta = chunk.choices?.[0]?.delta ?? {};
  if (delta.content || delta.reasoning_content || delta.tool_calls) reply.first_ms ??= performance.now() - began;
  if (chunk.choices?.[0]?.finish_reason === "length") reply.stopped = `cut short at ${plural(limit(), "token")}`;
  reply.reasoning += delta.reasoning_content ?? "";
  reply.content += delta.content ?? "";
  for (const { index, function: called } of delta.tool_calls ?? []) {
    reply.calls[index] ??= { name: "", arguments: "" };
    reply.calls[index].name += called.name ?? "";
    reply.calls[index].arguments += called.arguments ?? "";
  }
  if (chunk.prefix_cache) {
    reply.done = { usage: chunk.usage, prefix_cache: chunk.prefix_cache, timings: chunk.timings };
    learn(reply.done);
  }
  if (reply.content || reply.reasoning) setText(find("#doing"), "");
  // The first word comes with what was restored, even where the browser is slow.
  if (isFirst) drawLast();
  else drawSoon();
}

// Yields the data of each event of an answer, until it ends.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (waiting + value).split("\n\n");
      waiting = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) yield data.slice(6);
      }
    }
  } finally {
    // The daemon need not compute a rest that nobody reads.
    reader.cancel().catch(() => {});
  }
}

// The daemon: whether it is there, and its models.

let waiting = null;

// All callers share one wait.
const waitForDaemon = () => (waiting ??= untilReady(performance.now()).finally(() => (waiting = null)));

async function untilReady(since) {
  find("#status").className = "loading";
  for (;;) {
    try {
      const health = await (await fetch("/health")).json();
      if (health.status === "ok" || health.status === "degraded") break;
      setText(find("#status"), health.status === "loading" ? health.message ?? "loading the model …"
        : health.error?.message ?? `the daemon is ${health.status ?? "not one that this page knows"}`);
    } catch {
      setText(find("#status"), `no daemon for ${Math.round((performance.now() - since) / 1000)} s`);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  try {
    await readModels();
    setStatus("", "ready");
    find("#all").hidden = false;
    find("#login").hidden = true;
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else setText(find("#status"), error.message);
  }
}

async function readModels() {
  const chosen = find("#model").value;
  const names = (await ask("GET", "/v1/models")).data.map(({ id }) => id);
  find("#model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) find("#model").value = chosen;
}

function askForKey(error) {
  find("#all").hidden = true;
  showLogin("chat --browser", error);
}

// What the user does.

find("#say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("#text").value.trim();
  if (!text || running) return;
  find("#text").value = "";
  send(text);
});

function send(text, limit) {
  // An empty reply is not part of the conversation.
  if (chat.messages.length && !chat.messages[chat.messages.length - 1].content) chat.messages.pop();
  if (chat.messages[chat.messages.length - 1]?.role === "user") chat.messages.pop();
  add({ role: "user", content: text, limit });
  answer().then(drawChat).then(() => scrollTo(0, document.body.scrollHeight));
}

find("#text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("#say").requestSubmit();
});
find("#stop").addEventListener("click", () => running?.abort());
find("#again").addEventListener("click", () => {
  const mayRepeat = /repeats/.test(chat.messages.pop().stopped);
  drawChat();
  answer(mayRepeat);
});
find("#new").addEventListener("click", () => {
  chat = chats.find(({ messages, system }) => !messages.length && !system) ?? newChat();
  drawChat();
  find("#text").focus();
});
find("#forget").addEventListener("click", () => {
  if (!confirm("Delete this conversation from the browser?")) return;
  try {
    localStorage.removeItem(STORED + chat.id);
  } catch {
    // Nothing was stored.
  }
  chats = chats.filter((other) => other !== chat);
  chat = chats[0] ?? newChat();
  drawChat();
});
find("#which").addEventListener("change", () => {
  chat = chats.find(({ id }) => String(id) === find("#which").value);
  drawChat();
});
find("#system").addEventListener("change", () => {
  chat.system = find("#system").value;
  store();
  drawExamples();
});
for (const name of ["temperature", "length"])
  find(`#${name}`).addEventListener("change", ({ target }) => {
    if (!target.reportValidity()) return;
    chat[name] = target.value === "" ? null : Number(target.value);
    store();
  });
find("#file").addEventListener("change", async () => {
  for (const file of find("#file").files) chat.system += `${chat.system ? "\n\n" : ""}${file.name}:\n${await file.text()}`;
  find("#file").value = "";
  find("#system").value = chat.system;
  store();
  drawExamples();
});
onLogin(waitForDaemon);
drawChat();
waitForDaemon();
