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

const titleOf = ({ messages: [first] }) => (first ? first.content || first.pictures[0].name : "New conversation").replace(/\s+/g, " ").slice(0, 60);

// The conversations that have the words of the search field.
function drawList() {
  const wanted = find("#search").value.trim().toLowerCase();
  const found = chats.filter((one) => [one.system, ...one.messages.map(({ content }) => content)].join("\n").toLowerCase().includes(wanted));
  const isBusy = running !== null;
  find("#chats").replaceChildren(...found.map((one) => make("li", {},
    make("button", { type: "button", class: "open", "aria-current": one === chat ? "true" : null, disabled: isBusy, onclick: () => open(one) }, titleOf(one)),
    ...(isEmpty(one) ? [] : [make("button", { type: "button", class: "forget", "aria-label": `Delete: ${titleOf(one)}`, disabled: isBusy, onclick: () => forget(one) }, "✕")]))));
  setText(find("#none"), found.length ? "" : "No conversation has these words.");
}

function open(other) {
  chat = other;
  showList(false);
  drawChat();
  find("#text").focus();
}

function forget(other) {
  if (!confirm(`Delete “${titleOf(other)}” from the browser?`)) return;
  try {
    localStorage.removeItem(STORED + other.id);
  } catch {
    // Nothing was stored.
  }
  chats = chats.filter((one) => one !== other);
  if (chat === other) chat = chats[0] ?? newChat();
  drawChat();
}

// On a phone, the list covers the conversation until one is chosen.
function showList(isShown) {
  find("#more").setAttribute("aria-expanded", isShown);
  find("#all").classList.toggle("listing", isShown);
}

function drawChat() {
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
  find("#examples").replaceChildren(...examples.map((text) => make("button", { type: "button", onclick: () => send({ role: "user", content: text, limit: SHORT_REPLY }) }, text)),
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
  find("#new").disabled = running !== null;
  drawList();
}

// What is shown of each message.
const articles = new WeakMap();

function articleOf(message) {
  if (!articles.has(message)) articles.set(message, new ShownMessage(message));
  const shown = articles.get(message);
  shown.show({ isRunning: running !== null && message === chat.messages.at(-1), perToken, onEdit: message.role === "user" ? () => edit(message) : null });
  return shown.node;
}

// Sends a message with another text: what came after it is dropped, and its prompt begins as the one before.
function edit(message) {
  if (running) return;
  articles.get(message).edit((text) => {
    if (running) return;
    chat.messages.length = chat.messages.indexOf(message);
    drawChat();
    send({ ...message, content: text });
  });
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
  const messages = chat.messages.slice(0, -1).filter(({ content, pictures }) => content || pictures).map(({ role, content, pictures, reasoning }) => ({ role, content: pictures ? partsOf(content, pictures) : content, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
  return {
    model: find("#model").value, messages: [...system, ...messages], stream: true, return_progress: true,
    stream_options: { include_usage: true }, prefix_cache: { scope: "full" }, max_tokens: limit(),
    ...(chat.temperature == null ? {} : { temperature: chat.temperature }),
  };
}

const partsOf = (text, pictures) => [...pictures.map(({ url }) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])];

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
    if (!reply.done && !reply.stopped && !reply.error) brokenOff(reply);
  } catch (error) {
    if (error.name === "AbortError") reply.stopped ??= "stopped";
    else if (error instanceof TypeError) brokenOff(reply);
    else reply.error = error.message;
    if (error.status === 401) askForKey(error);
  }
  running = null;
  setText(find("#doing"), "");
  drawLast();
  drawButtons();
  store();
  if (!reply.done && (reply.error || reply.isBroken)) waitForDaemon();
}

// The connection ended. What came of the reply is no error.
function brokenOff(reply) {
  reply.isBroken = true;
  const received = reply.content.length || reply.reasoning.length;
  if (received) reply.stopped = `the connection broke after ${plural(received, "character")}; “Answer again” asks once more when the daemon is ready`;
  else reply.error = "The daemon does not answer. “Answer again” asks once more when it is ready.";
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
    const isNew = find("#all").hidden;
    find("#all").hidden = false;
    if (isNew && find("#text").value) find("#text").focus();
    find("#login").hidden = true;
    showDashboardLink();
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else setText(find("#status"), error.message);
  }
}

// Without a token the dashboard would be locked: then the header has the command that opens it.
function showDashboardLink() {
  if (find("#dashboard") === null) return;
  const isOpen = sessionStorage.getItem(TOKEN) !== null;
  find("#dashboard").hidden = !isOpen;
  find("#closed").hidden = isOpen;
  setText(find("#closed code"), opening("dashboard"));
}

// The names of the models that take pictures.
let takingPictures = new Set();

async function readModels() {
  const chosen = find("#model").value;
  const cards = (await ask("GET", "/v1/models")).data, names = cards.map(({ id }) => id);
  takingPictures = new Set(cards.filter(({ architecture }) => architecture?.input_modalities?.includes("image")).map(({ id }) => id));
  find("#choose").hidden = names.length < 2;
  setText(find("#served"), names.length === 1 ? names[0] : "");
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
  if ((!text && !attached.length) || running) return;
  find("#text").value = "";
  send({ role: "user", ...takeAttached(text) });
});

function send(message) {
  // An empty reply is not part of the conversation.
  if (chat.messages.at(-1)?.role === "assistant" && !chat.messages.at(-1).content) chat.messages.pop();
  if (chat.messages.at(-1)?.role === "user") chat.messages.pop();
  drawChat();
  add(message);
  answer().then(drawChat).then(() => scrollTo(0, document.body.scrollHeight));
}

const attachAll = (files) => attach(files, takingPictures.has(find("#model").value));
find("#attach").addEventListener("click", () => find("#attachment").click());
find("#attachment").addEventListener("change", async ({ target }) => {
  await attachAll([...target.files]);
  target.value = "";
  find("#text").focus();
});
find("#text").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attachAll([...event.clipboardData.files]);
});
// The browser would show a file that is dropped beside the box.
for (const name of ["dragover", "drop"])
  addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (name === "drop" && !find("#all").hidden) attachAll([...event.dataTransfer.files]);
  });
find("#text").addEventListener("keydown", (event) => sendOnEnter(event, find("#say")));
find("#stop").addEventListener("click", () => running?.abort());
find("#again").addEventListener("click", () => {
  const mayRepeat = /repeats/.test(chat.messages.pop().stopped);
  drawChat();
  answer(mayRepeat);
});
find("#new").addEventListener("click", () => {
  find("#search").value = "";
  open(emptyChat());
});
find("#search").addEventListener("input", drawList);
find("#more").addEventListener("click", () => showList(!isOpen(find("#more"))));
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
find("#file").addEventListener("change", async ({ target }) => {
  const [texts, problems] = await read([...target.files], textOf);
  chat.system = [chat.system, ...texts.map(({ name, text }) => `${name}:\n${text}`)].filter(Boolean).join("\n\n");
  target.value = "";
  find("#system").value = chat.system;
  store();
  if (problems) setText(find("#kept"), problems);
  drawExamples();
});

const isEmpty = ({ messages, system }) => !messages.length && !system;
const emptyChat = () => chats.find(isEmpty) ?? newChat();

// The address may have a message, which the user sends or not.
function takePrompt() {
  const prompt = new URLSearchParams(location.search).get("prompt");
  if (prompt === null) return;
  history.replaceState(null, "", location.pathname);
  chat = emptyChat();
  find("#text").value = prompt;
}

onLogin(waitForDaemon);
takePrompt();
drawChat();
waitForDaemon();
