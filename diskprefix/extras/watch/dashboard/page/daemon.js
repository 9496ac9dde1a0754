// Talks to the daemon: requests with the key.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "diskprefix-key";

// The link of `diskprefix dashboard` has the token behind #, which browsers do not send. It is kept until the tab is closed.
function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  sessionStorage.setItem(KEY, token);
  history.replaceState(null, "", location.pathname);
  return true;
}
takeToken();
// Opening the link in a tab that already shows the page does not reload it.
addEventListener("hashchange", () => takeToken() && location.reload());

// For a daemon with several models: `model` is the model that is shown.
const several = { is: "several" in document.documentElement.dataset, model: null };

async function call(method, path, body, signal) {
  if (several.is && path.startsWith("/dashboard/") && several.model === null) throw new Error("no model is loaded");
  if (several.model !== null && path.startsWith("/dashboard/")) path += `${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(several.model)}`;
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => null))?.error;
  throw new Refused(answer.status, error?.message ?? `HTTP status ${answer.status}`);
}

function setStatus(kind, text) {
  find("#status").className = kind;
  setText(find("#status"), text);
}

// Shows that the page is locked: the command that opens it, and why a key was refused.
function showLogin(command, error) {
  find("#login").hidden = false;
  setStatus("idle", "locked");
  setText(find("#unlock"), `diskprefix ${command}${location.port === "8642" ? "" : ` --url ${location.origin}`}`);
  setText(find("#login-why"), error.status === 403 ? error.message : sessionStorage.getItem(KEY) ? "This is no key or token of this daemon." : "");
  find("#key").focus();
}

// Calls `open` when a key was entered.
function onLogin(open) {
  find("#copy-unlock").addEventListener("click", ({ target }) => copy(find("#unlock").textContent, find("#unlock"), target.nextElementSibling));
  find("#login").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, find("#key").value.trim());
    find("#key").value = "";
    open();
  });
}

const ask = async (method, path, body) => (await call(method, path, body)).json();
