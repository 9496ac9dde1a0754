// Starts the page, and updates it.

const state = { now: null, ended: [], stoppedAt: null, fresh: true };
const MOST_ENDED = 400, UPDATE_MS = 500, RETRY_MS = 2000, ENTRIES_MS = 5000;

function onState(now) {
  const last = lastNumber();
  state.ended = (state.fresh ? now.ended : [...state.ended, ...now.ended.filter(({ number }) => number > last)]).slice(-MOST_ENDED);
  state.now = now;
  state.stoppedAt = null;
  drawStopped();
  find("#all").hidden = now.status === "loading";
  if (now.ended.length || state.fresh) drawTtft(find("#ttft"), state.ended);
  state.fresh = now.status === "loading";
  drawHeader(now);
  drawSentence(now, state.ended);
  drawProblems(now.problems);
  drawLive(now);
  drawAhead(now.ahead);
  drawEnded(state.ended, now.now);
  drawMeters(now);
  drawLost(now.lost);
}

const lastNumber = () => state.ended.at(-1)?.number ?? 0;

// Shows that the daemon has stopped, and dims its last figures.
function drawStopped() {
  const isStopped = state.stoppedAt !== null && state.now !== null;
  document.body.classList.toggle("stopped", state.stoppedAt !== null);
  find("#stopped").hidden = !isStopped;
  if (!isStopped) return;
  const s = Math.round((Date.now() - state.stoppedAt) / 1000);
  setText(find("#h-stopped"), `The daemon stopped ${ago(0, s)}`);
  setText(find("#command"), state.now.command);
  setStatus("bad", "stopped");
}

// The saved prompts are read again after new ones were saved, but no earlier than the daemon itself reads them again.
let readAfter = -1, readNotBefore = 0, reading = Promise.resolve();

function readEntries() {
  readNotBefore = Infinity;
  return (reading = reading.then(readOnce));
}

async function readOnce() {
  const before = state.now?.cache?.saved_bytes ?? 0;
  try {
    const found = await ask("GET", "/dashboard/entries");
    // A cached answer may lack the newest prompts.
    readAfter = found.age_s > 0 ? 0 : before;
    readNotBefore = Date.now() + 1000 * found.again_s;
    showEntries(found, state.now?.model?.name);
  } catch (error) {
    readNotBefore = 0;
    find("#icicle").replaceChildren(make("p", { class: "quiet" }, error.message));
  }
}

async function readModels() {
  const [known, slots] = await Promise.all([ask("GET", "/v1/models"), ask("GET", "/props")]);
  return drawModels(known.data, slots);
}

// Keeps the shown model while it is loaded, or chooses another. Returns false if none is loaded.
async function chooseModel() {
  const loaded = await readModels();
  if (!loaded.includes(several.model)) several.model = loaded[0] ?? null;
  find("#model").value = several.model ?? "";
  return several.model !== null;
}

const OF_ONE_MODEL = ["#all", "#said", "#loading", "#problems", "#address"];

async function follow() {
  for (;;) {
    let pause_ms = UPDATE_MS;
    try {
      if (several.is && state.fresh && !(await chooseModel())) {
        state.now = state.stoppedAt = null;
        drawStopped();
        for (const id of OF_ONE_MODEL) find(id).hidden = true;
        setText(find("#served"), "");
        setStatus("idle", "no model is loaded");
        pause_ms = RETRY_MS;
      } else {
        const model = several.model;
        const now = await ask("GET", `/dashboard/state?since=${state.fresh ? 0 : lastNumber()}`);
        find("#said").hidden = false;
        if (model === several.model) onState(now);
        if (now.cache && readAfter < 0 && Date.now() >= readNotBefore) readEntries();
      }
    } catch (error) {
      if (error.status === 401 || error.status === 403) return askForKey(error);
      if (error instanceof Refused) setStatus("loading", error.message);
      else {
        state.stoppedAt ??= Date.now();
        setStatus("bad", "no answer; trying again …");
        drawStopped();
      }
      pause_ms = RETRY_MS;
      beginAnew();
    }
    await new Promise((resolve) => setTimeout(resolve, pause_ms));
  }
}

// Another daemon or model counts its requests from the start.
function beginAnew() {
  state.fresh = true;
  readAfter = -1;
  readNotBefore = 0;
}

function askForKey(error) {
  // The daemon answers, so it has not stopped.
  state.stoppedAt = null;
  drawStopped();
  for (const id of [...OF_ONE_MODEL, "#models"]) find(id).hidden = true;
  showLogin("dashboard", error);
}

onLogin(() => {
  find("#login").hidden = true;
  find("#said").hidden = false;
  follow();
});

find("#model").addEventListener("change", () => {
  several.model = find("#model").value;
  beginAnew();
});

for (const [id, draw] of [["#more-ended", () => drawEnded(state.ended, state.now.now)], ["#more-lanes", drawTree]])
  find(id).addEventListener("click", ({ target }) => {
    target.setAttribute("aria-expanded", !isOpen(target));
    draw();
  });

find("#tree-of").addEventListener("change", () => {
  tree.chosen = find("#tree-of").selectedIndex;
  tree.root = tree.found.trees[tree.chosen].root;
  tree.selected = null;
  drawTree();
});

for (const [button, text] of [["#copy-address", "#url"], ["#copy-command", "#command"]])
  find(button).addEventListener("click", () => copy(find(text).textContent, find(text), find(`${button} + span`)));

if (several.is) setInterval(() => {
  if (!document.hidden && !find("#all").hidden && state.stoppedAt === null) readModels().catch(() => {});
}, RETRY_MS);
setInterval(() => {
  const cache = state.now?.cache;
  if (!document.hidden && cache && state.stoppedAt === null && Date.now() >= readNotBefore && cache.pending === 0 && cache.saved_bytes !== readAfter) readEntries();
}, ENTRIES_MS);
setInterval(() => state.stoppedAt !== null && drawStopped(), 1000);
new ResizeObserver(() => state.now && drawTtft(find("#ttft"), state.ended)).observe(find("#ttft"));
follow();
