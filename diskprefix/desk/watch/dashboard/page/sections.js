// Draws the sections of the page from the daemon's state.

function drawHeader(now) {
  const exact = { token: "bit-exact at any token", grid: "bit-exact at the ends of steps" }[now.model?.exact_at];
  const scope = now.scope.replace(/^auto:(\d+)$/, "auto ($1 recent prompts)");
  setText(find("#served"), [now.model?.name, exact, `cache ${scope}`].filter(Boolean).join(" · "));
  setStatus({ ok: "", loading: "loading", stopping: "loading" }[now.status] ?? "bad", now.message ?? now.status);
  setText(find("#version"), `diskprefix ${now.version} · `);
}

// Draws the models of a daemon with several: the known models and those in memory (`slots`). Returns the names of the
// loaded models.
const PHASES = { waiting: "waits for memory", loading: "loading", ready: "loaded", leaving: "unloading" };

function drawModels(known, { models: slots, memory_limit: limit }) {
  const loaded = slots.filter((slot) => slot.phase === "ready").map((slot) => slot.model);
  const all = [...known.map((card) => ({ card, name: card.id, slot: slots.find((slot) => slot.model === card.id) })),
    ...slots.filter((slot) => !known.some((card) => card.id === slot.model)).map((slot) => ({ card: {}, name: slot.model, slot }))];
  find("#models").hidden = false;
  const used = slots.reduce((sum, slot) => sum + (slot.phase === "waiting" ? 0 : slot.needed_bytes), 0);
  setText(find("#models-memory"), limit ? `Memory of models: ${part(used, limit)}.` : "");
  whenChanged("models", all, () => find("#models tbody").replaceChildren(...all.map(modelRow)));
  whenChanged("loaded", loaded, () => find("#model").replaceChildren(...loaded.map((name) => make("option", { value: name }, name))));
  find("#choice").hidden = loaded.length < 2;
  find("#model").value = several.model ?? "";
  return loaded;
}

function modelRow({ card, name, slot }) {
  const isIn = slot !== undefined, what = isIn ? "unload" : "load";
  const says = card.problem && !isIn ? card.problem : (isIn ? PHASES[slot.phase] : "not loaded") + (slot?.is_pinned ? ", pinned" : "");
  const needed = slot?.needed_bytes || card.needs_bytes;
  const button = make("button", { type: "button", "aria-label": `${isIn ? "Unload" : "Load"} ${name}`, onclick: ({ target }) => order(name, what, target) }, isIn ? "Unload" : "Load");
  button.disabled = slot?.phase === "leaving";
  return make("tr", { class: card.problem && !isIn ? "failed" : "" }, make("th", { scope: "row" }, name), cell("state", { class: "say" }, says),
    cell("memory", {}, needed ? `${isIn ? "" : "needs "}${bytes(needed)}` : "–"), cell("requests", {}, count(slot?.num_active ?? 0)), make("td", {}, button));
}

async function order(name, what, button) {
  button.disabled = true;
  try {
    await ask("POST", `/models/${encodeURIComponent(name)}/${what}`, {});
    setText(find("#models-said"), "");
  } catch (error) {
    setText(find("#models-said"), error.message);
    button.disabled = false;
  }
}

// A cell of a table. On a phone, rows are cards, and each cell has its title beside it.
const cell = (title, attributes, ...children) => make("td", { "data-title": title, ...attributes }, make("div", {}, ...children));

// Problems that were dismissed in this tab. A warning that recurs has another time or count, and is shown again. Errors
// cannot be dismissed.
const DISMISSED = "diskprefix-dismissed", MOST_PROBLEMS = 3;
const nameOf = (problem) => `${problem.what} ${problem.level === "hint" ? "" : problem.count} ${problem.last_at ?? ""}`;

// Returns the names of the dismissed problems that still exist, and forgets the others.
function dismissed(problems) {
  const names = problems.map(nameOf);
  const hidden = JSON.parse(sessionStorage.getItem(DISMISSED) ?? "[]").filter((name) => names.includes(name));
  sessionStorage.setItem(DISMISSED, JSON.stringify(hidden));
  return hidden;
}

function drawProblems(problems) {
  const hidden = dismissed(problems), left = problems.filter((problem) => !hidden.includes(nameOf(problem))), more = left.length - MOST_PROBLEMS;
  find("#problems").hidden = !left.length;
  setText(find("#more-problems"), more > 0 ? `${count(more)} more; diskprefix top shows all.` : "");
  whenChanged("problems", left, () => {
    const items = left.slice(0, MOST_PROBLEMS).map((problem) =>
      make("li", { class: problem.level },
        make("div", {}, make("span", { class: "level" }, problem.level), `${problem.what}${problem.count > 1 ? ` (${count(problem.count)} times)` : ""}`,
          make("span", { class: "todo" }, problem.todo)),
        problem.level === "error" ? "" : make("button", { type: "button", "aria-label": `Dismiss: ${problem.what}`, onclick: () => dismiss(problem) }, "Dismiss")),
    );
    find("#problems ul").replaceChildren(...items);
  });
}

function dismiss(problem) {
  sessionStorage.setItem(DISMISSED, JSON.stringify([...dismissed(state.now.problems), nameOf(problem)]));
  drawProblems(state.now.problems);
  find("#main").focus();
}

// Shows the benefit of the cache in a sentence, or the progress of loading the model.
function drawSentence(now, ended) {
  const isLoading = now.status === "loading", isNew = !ended.length && !now.requests.length && !now.arriving;
  find("#loading").hidden = !isLoading;
  find("#address").hidden = !isNew;
  find("#requests").hidden = isNew;
  setText(find("#url"), `${location.origin}/v1`);
  const step = now.message ?? "", share = step.match(/(\d+) %/)?.[1];
  whenChanged("step", step, () => {
    setText(find("#step"), step);
    find("#progress").replaceChildren(...(share ? [bar("progressbar", step, [["", Number(share)]], 100, "plain")] : []));
  });
  setText(find("#said"), isLoading ? "" : sentence(now.cache?.savings, ended));
}

function sentence(savings, ended) {
  const today = savings?.today, parts = [];
  if (today?.prompt_tokens) parts.push(`${percent(today.restored_tokens, today.prompt_tokens)} of today's prompt tokens restored, ${seconds(today.saved_s)} of computing saved.`);
  return [...parts, compared(ended)].join(" ").trim();
}

// Compares the last prompt that was mostly restored with a computed one of the same length, most often the same prompt.
// Without such a prompt, uses the mean time for each computed token.
function compared(ended) {
  const of = (outcome) => ended.filter((request) => request.outcome === outcome && request.timings.ttft_ms > 0);
  const cold = of("miss"), warm = of("hit").reverse();
  const twice = warm.find((request) => cold.some((other) => other.prompt_tokens === request.prompt_tokens)), last = twice ?? warm[0];
  if (!last || !cold.length) return "";
  const same = cold.filter((other) => other.prompt_tokens === last.prompt_tokens).pop();
  const computed = (request) => request.prompt_tokens - request.prefix_cache.restored;
  const each = cold.reduce((sum, request) => sum + request.timings.ttft_ms, 0) / cold.reduce((sum, request) => sum + computed(request), 0);
  const whole = same ? seconds(same.timings.ttft_ms / 1000) : `about ${seconds((each * last.prompt_tokens) / 1000)}`;
  return `First token of a prompt of ${plural(last.prompt_tokens, "token")}: ${whole} computed, ${seconds(last.timings.ttft_ms / 1000)} restored.`;
}

const rows = new Map(), LIVE = ["state", "time", "prompt", "first token", "reply", "speed"];

function drawLive({ requests, arriving }) {
  const waiting = requests.filter((request) => request.state === "waiting").length;
  const speed = requests.reduce((sum, request) => sum + (request.reply_tokens ? request.tokens_per_s ?? 0 : 0), 0);
  const counts = [`${count(requests.length - waiting)} running`, `${count(waiting + arriving)} waiting`, ...(speed ? [`${speed.toFixed(1)} tokens a second`] : [])];
  setText(find("#busy"), requests.length + arriving ? counts.join(", ") : "Nothing runs now.");
  const body = find("#live tbody"), ids = new Set(requests.map((request) => request.id));
  for (const [id, row] of rows) if (!ids.has(id)) { row.remove(); rows.delete(id); }
  for (const request of requests) {
    const cells = liveCells(request);
    const row = rows.get(request.id) ?? make("tr", {}, ...LIVE.map((title) => cell(title, {})));
    cells.forEach((cell, index) => row.cells[index].firstChild.replaceChildren(cell));
    rows.set(request.id, row);
    if (!row.isConnected) body.append(row);
  }
}

function liveCells(request) {
  const computed = Math.max(0, request.ready_tokens - request.restored_tokens);
  const label = `Prompt: ${count(request.ready_tokens)} of ${plural(request.prompt_tokens, "token")}, ${count(request.restored_tokens)} restored`;
  const progress = make("div", { class: "beside" },
    bar("progressbar", label, [["restored", request.restored_tokens], ["computed", computed]], request.prompt_tokens),
    make("div", { class: "under" }, `${count(request.ready_tokens)} of ${count(request.prompt_tokens)}, ${count(request.restored_tokens)} restored`));
  const left = request.seconds_left === null ? "" : `, about ${seconds(request.seconds_left)} left`;
  const speed = request.tokens_per_s === null ? "–" : `${request.tokens_per_s.toFixed(1)} tokens/s${left}`;
  return [request.state, seconds(request.elapsed_s), progress, seconds(request.ttft_s), plural(request.reply_tokens, "token"), speed];
}

const PAUSED = { off: "work ahead is off", battery: "not on battery", budget: "the budget of --ahead is used up", "other programs": "other programs want the CPUs" };

// The prompts that are computed while no request waits.
function drawAhead(ahead) {
  find("#ahead").hidden = !ahead?.waiting;
  if (!ahead?.waiting) return;
  const named = ahead.asked.map(({ label, tokens, ready, waits }) => `${label} ${tokens ? `${count(ready)} of ${plural(tokens, "token")}` : "not begun"}${waits === false ? ", waits no longer" : ""}`);
  const others = ahead.waiting - named.length, paused = ahead.paused ? ` (${PAUSED[ahead.paused] ?? ahead.paused})` : "";
  setText(find("#ahead"), `While no request waits: ${[...named, ...(others > 0 ? [plural(others, "prompt")] : [])].join(", ")}${paused}.`);
}

const FEW_ROWS = 6, MANY_ROWS = 50;

function drawEnded(ended, now) {
  const more = find("#more-ended"), isMore = isOpen(more);
  more.hidden = ended.length <= FEW_ROWS;
  setText(more, isMore ? "Show fewer" : "Show more");
  const shown = ended.slice(isMore ? -MANY_ROWS : -FEW_ROWS).reverse();
  const marks = shown.map((request) => [request.number, ago(request.ended_at, now)]);
  whenChanged("ended", marks, () => {
    find("#ended tbody").replaceChildren(...shown.map((request) => endedRow(request, now)));
    find("#further h3").hidden = !shown.some((request) => request.prefix_cache);
    find("#decisions tbody").replaceChildren(...shown.filter((request) => request.prefix_cache).map((request) => decisionRow(request, now)));
  });
}

const whenCell = (request, now) => cell("ended", { title: new Date(request.ended_at * 1000).toLocaleString("en-GB") }, ago(request.ended_at, now));

function endedRow(request, now) {
  const when = whenCell(request, now);
  if (request.is_stopped) return stoppedRow(request, when);
  if (!request.prefix_cache) {
    const size = request.prompt_tokens ? `, ${plural(request.prompt_tokens, "prompt token")}` : "";
    return make("tr", { class: "failed" }, when, cell("failed", { class: "say", colspan: 4 }, `${request.status} ${request.route} · ${request.error ?? "no answer"}${size}`));
  }
  const cache = request.prefix_cache, restored = cache.restored;
  const why = restored ? `${percent(restored, request.prompt_tokens)} from ${cache.source}` : words(cache.miss_reason);
  const label = `${count(restored)} of ${plural(request.prompt_tokens, "prompt token")} restored`;
  const { image_tokens, images_encoded, encode_ms } = request.timings;
  const encoded = images_encoded ? `, ${count(images_encoded)} encoded in ${seconds(encode_ms / 1000)}` : "";
  const images = image_tokens ? [make("div", { class: "under" }, `${count(image_tokens)} of images${encoded}`)] : [];
  return make("tr", {}, when, cell("prompt", {}, plural(request.prompt_tokens, "token"), ...images),
    cell("restored", {}, make("div", { class: "beside" }, bar("meter", label, [["restored", restored]], request.prompt_tokens), make("div", { class: "under" }, why))),
    cell("first token", {}, seconds(request.timings.ttft_ms / 1000)),
    cell("reply", {}, `${plural(request.reply_tokens, "token")} `, make("span", { class: "under" }, `${request.timings.decode_tokens_per_s.toFixed(0)}/s`)));
}

// A reply that a person, an agent or the chat page stopped is no failure.
function stoppedRow(request, when) {
  const { prompt_tokens: prompt, ready_tokens: ready, reply_tokens: reply } = request;
  const far = reply ? `after ${plural(reply, "token")} of the reply` : prompt ? `at ${count(ready)} of ${plural(prompt, "prompt token")}` : "before it began";
  return make("tr", {}, when, cell("prompt", {}, prompt ? plural(prompt, "token") : "–"),
    cell("", { class: "say", colspan: 3 }, make("span", { class: "under" }, `stopped by the client ${far}`)));
}

// What the policy kept of a prompt, and why.
function decisionRow(request, now) {
  const cache = request.prefix_cache, { drafted_tokens: drafted, accepted_tokens: accepted } = request.timings;
  const each = request.reply_tokens / Math.max(1, request.reply_tokens - accepted);
  return make("tr", {}, whenCell(request, now), cell("kept", {}, plural(cache.boundary, "token")),
    cell("reason", {}, words(cache.boundary_reason) + (cache.saved === "dropped" ? ", dropped" : "")),
    cell("draft tokens", {}, drafted ? count(drafted) : "–"), cell("accepted", {}, drafted ? percent(accepted, drafted) : "–"),
    cell("tokens a step", {}, drafted ? each.toFixed(1) : "–"));
}

function drawMeters(now) {
  const { memory, cache } = now;
  whenChanged("meters", [memory, cache && { ...cache, savings: null, gate: null }], () => {
    find("#meters").replaceChildren(...(memory ? memoryMeters(memory) : []), ...(cache ? [meter("Saved on disk", cache.used_bytes, cache.budget_bytes, plural(cache.entries, "prompt"))] : []));
    find("#further-meters").replaceChildren(...(cache ? cacheMeters(cache) : []));
  });
}

function memoryMeters(memory) {
  const titles = memory.slots.map((slot) => make("span", { class: slot.busy ? "busy" : "idle", title: `${plural(slot.tokens, "token")}, ${bytes(slot.num_bytes)}, ${slot.busy ? "running" : "kept for later turns"}` }));
  const slots = make("div", { class: "slots", role: "img", "aria-label": `${plural(memory.slots.length, "conversation")}, ${count(memory.running)} of them running` }, ...titles);
  const process = memory.process_bytes ? [make("p", { class: "under" }, `The process takes ${bytes(memory.process_bytes)} of memory.`)] : [];
  return [meter("Memory of requests", memory.used_bytes, memory.limit_bytes, `${count(memory.running)} of ${count(memory.max_running)} running; ${plural(memory.kept_tokens, "token")} kept for later turns`), slots, ...process];
}

function cacheMeters(cache) {
  const blocks = `${plural(cache.blocks, "block")}, ${{ planes: "compressed", raw: "not compressed" }[cache.codec] ?? cache.codec}; ${count(cache.evicted_blocks)} evicted`;
  const disk = cache.disk_written_last_day_bytes, inAll = `${bytes(cache.disk_written_bytes)} in all`;
  const ahead = cache.ahead_tokens ? [make("p", { class: "under" }, `${plural(cache.ahead_tokens, "token")} computed ahead of requests.`)] : [];
  return [make("p", { class: "under" }, `Saved on disk: ${blocks}.`), ...ahead,
    meter("Write buffer", cache.pending_bytes, cache.buffer_bytes, `${plural(cache.pending, "prompt")} waiting, ${bytes(cache.saved_bytes)} written, ${count(cache.dropped)} dropped`),
    cache.write_budget_bytes ? meter("Written to disk in 24 hours", disk, cache.write_budget_bytes, `${plural(cache.unaffordable, "prompt")} left out, or a part of them; ${inAll}`)
      : make("p", { class: "under" }, `${bytes(disk)} written to disk in 24 hours, ${inAll}.`)];
}

function meter(name, used, limit, note) {
  const label = `${name}: ${part(used, limit)}`;
  const head = make("p", {}, make("b", {}, name), make("span", {}, part(used, limit)));
  return make("div", { class: "meter" }, head, bar("meter", label, [["", used]], limit, used > 0.9 * limit ? "plain high" : "plain"), make("p", { class: "under" }, note));
}

function drawLost(lost) {
  whenChanged("lost", lost, () => {
    const all = lost.reduce((sum, row) => sum + row.tokens, 0);
    const line = (row) => make("div", { class: "beside" }, make("span", {}, row.what),
      bar("meter", `${row.what}: ${count(row.tokens)} of ${count(all)}`, [["", row.tokens]], all),
      make("div", { class: "under" }, `${plural(row.tokens, "token")} of ${plural(row.requests, "request")}, last ${row.last}; ${row.advice}`));
    find("#counts").hidden = !all;
    find("#lost").replaceChildren(...lost.slice(0, FEW_ROWS).map(line));
  });
}
