// Talks to the daemon: requests with the key, and the stream of events. EventSource cannot send a key.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "diskprefix-key";

// A daemon with several models: `model` is the one that is shown.
const several = { is: "several" in document.documentElement.dataset, model: null, change: new AbortController() };

async function call(method, path, body, signal) {
  if (several.model !== null && path.startsWith("/dashboard/")) path += `?model=${encodeURIComponent(several.model)}`;
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new Refused(answer.status, said?.error?.message ?? `HTTP status ${answer.status}`);
}

const ask = async (method, path, body) => (await call(method, path, body)).json();

// Calls `onState` for each event until the stream ends. A refusal is thrown, and an AbortError when another model is
// chosen.
async function watch(onState) {
  const answer = await call("GET", "/dashboard/events", undefined, several.change.signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data) onState(JSON.parse(data.slice(6)));
    }
  }
}
