// Starts the page, and keeps it up to date.

const state = { now: null, ended: [] };
const MOST_ENDED = 400, RETRY_MS = 2000, ENTRIES_MS = 5000;

function onState(now) {
  const last = state.ended.length ? state.ended[state.ended.length - 1].number : 0;
  // After a restart of the daemon the numbers begin anew, and the first event has all that it remembers.
  state.ended = (state.fresh ? now.ended : [...state.ended, ...now.ended.filter((one) => one.number > last)]).slice(-MOST_ENDED);
  state.now = now;
  find("#all").hidden = now.status === "loading";
  if (now.ended.length || state.fresh) drawTtft(find("#ttft"), state.ended);
  state.fresh = false;
  drawHeader(now);
  drawSaid(now, state.ended);
  drawProblems(now.problems);
  drawLive(now);
  drawEnded(state.ended, now.now);
  drawMeters(now);
  drawMisses(now.cache);
  find("#simulator").hidden = !now.recording;
}

// What is stored is read again when more was saved since, but not before the daemon would: reading it takes the daemon longer.
let readAfter = -1, readNotBefore = 0, reading = Promise.resolve();

function readEntries() {
  readNotBefore = Infinity;
  return (reading = reading.then(readOnce));
}

async function readOnce() {
  const before = state.now.cache?.saved_bytes ?? 0;
  try {
    const found = await ask("GET", "/dashboard/entries");
    // An answer that was kept may be without what was saved last.
    readAfter = found.age_s > 0 ? 0 : before;
    readNotBefore = Date.now() + 1000 * found.again_s;
    showEntries(found);
  } catch (error) {
    readNotBefore = 0;
    find("#icicle").replaceChildren(make("p", { class: "quiet" }, error.message));
  }
}

async function readClients() {
  const found = await ask("GET", "/dashboard/clients");
  const show = () => setText(find("#recipe"), found[find("#client").selectedIndex]?.text ?? "");
  find("#client").replaceChildren(...found.map((one) => make("option", { value: one.name }, one.title)));
  find("#client").onchange = show;
  show();
}

// Goes on with the model that is shown while it is loaded, or shows another one. Returns false if none is loaded.
async function chooseModel() {
  const loaded = drawModels(await ask("GET", "/props"));
  if (!loaded.includes(several.model)) several.model = loaded[0] ?? null;
  find("#model").value = several.model ?? "";
  return several.model !== null;
}

async function follow() {
  let clientsOf;
  for (;;) {
    state.fresh = true;
    try {
      const is_there = !several.is || (await chooseModel());
      const answer = is_there && (await call("GET", "/dashboard/events", undefined, several.change.signal));
      if (is_there) for await (const data of eventsOf(answer)) {
        const now = JSON.parse(data);
        onState(now);
        if (now.cache && readAfter < 0 && Date.now() >= readNotBefore) readEntries();
        if (now.model && clientsOf !== several.model) { clientsOf = several.model; readClients(); }
      }
      setText(find("#status"), is_there ? "the daemon has ended; trying again …" : "no model is loaded: a request loads one");
    } catch (error) {
      if (error.status === 401 || error.status === 403) return askForKey(error);
      setText(find("#status"), error.name === "AbortError" ? "connecting …" : "no answer; trying again …");
    }
    find("#status").className = "bad";
    readAfter = -1;
    readNotBefore = 0;
    const isChosen = several.change.signal.aborted;
    several.change = new AbortController();
    if (!isChosen) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function askForKey(error) {
  for (const id of ["#all", "#said", "#loading", "#problems", "#address"]) find(id).hidden = true;
  find("#login").hidden = false;
  find("#status").className = "bad";
  setText(find("#status"), "locked");
  setText(find("#login-why"), error.message);
  find("#key").focus();
}

find("#login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("#key").value.trim());
  find("#key").value = "";
  find("#login").hidden = true;
  find("#said").hidden = false;
  follow();
});

find("#model").addEventListener("change", () => {
  several.model = find("#model").value;
  several.change.abort();
});

find("#simulation").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = find("#simulation button");
  button.disabled = true;
  find("#simulated").replaceChildren(make("p", { class: "quiet" }, "simulating …"));
  try {
    drawSimulated(await ask("POST", "/dashboard/simulation", { hours: Number(find("#hours").value) }), state.now.scope);
  } catch (error) {
    find("#simulated").replaceChildren(make("p", {}, error.message));
  }
  button.disabled = false;
});

for (const [id, draw] of [["#more-ended", () => drawEnded(state.ended, state.now.now)], ["#more-lanes", drawTree]])
  find(id).addEventListener("click", ({ target }) => {
    target.setAttribute("aria-expanded", !isOpen(target));
    draw();
  });

find("#tree-of").addEventListener("change", () => {
  tree.chosen = find("#tree-of").selectedIndex;
  tree.selected = null;
  drawTree();
});

for (const [button, text] of [["#copy", "#recipe"], ["#copy-address", "#url"]])
  find(button).addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(find(text).textContent);
      setText(find(`${button} + span`), "copied");
    } catch {
      // Without HTTPS there is no clipboard on other addresses than this machine's.
      getSelection().selectAllChildren(find(text));
      setText(find(`${button} + span`), "selected: press Ctrl+C");
    }
  });

if (several.is) setInterval(() => {
  if (!document.hidden && !find("#all").hidden) ask("GET", "/props").then(drawModels, () => {});
}, RETRY_MS);
setInterval(() => {
  const cache = state.now?.cache;
  if (!document.hidden && cache && Date.now() >= readNotBefore && cache.pending === 0 && cache.saved_bytes !== readAfter) readEntries();
}, ENTRIES_MS);
new ResizeObserver(() => state.now && drawTtft(find("#ttft"), state.ended)).observe(find("#ttft"));
follow();
