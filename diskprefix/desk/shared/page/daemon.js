// Talks to the daemon: requests with the key.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const TOKEN = "diskprefix-token";
let unlocking = Promise.resolve(), wasRefused = false;

// Exchanges a key for a token that ends with the daemon's process, and keeps only that, until the tab is closed. Whoever
// listens on the port later gets what an open page sends.
function unlock(key) {
  sessionStorage.removeItem(TOKEN);
  return (unlocking = exchange(key));
}

async function exchange(key) {
  try {
    const answer = await fetch("/page-token", { method: "POST", headers: { Authorization: `Bearer ${key}` } });
    wasRefused = answer.status === 401;
    if (answer.ok) sessionStorage.setItem(TOKEN, (await answer.json()).token);
  } catch {
    // The next request says that there is no daemon.
  }
}

// The link of `diskprefix dashboard` has a token or a key behind #, which browsers do not send.
function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("token");
  if (key === null) return;
  history.replaceState(null, "", location.pathname + location.search);
  return unlock(key);
}
takeKey();
// Opening the link in a tab that already shows the page does not reload it.
addEventListener("hashchange", () => takeKey()?.then(() => location.reload()));

// For a daemon with several models: `model` is the model that is shown.
const several = { is: "several" in document.documentElement.dataset, model: null };

async function call(method, path, body, signal) {
  if (several.is && path.startsWith("/dashboard/") && several.model === null) throw new Error("no model is loaded");
  if (several.model !== null && path.startsWith("/dashboard/")) path += `${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(several.model)}`;
  await unlocking;
  const headers = {}, token = sessionStorage.getItem(TOKEN);
  if (token) headers["Authorization"] = `Bearer ${token}`;
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

// The command that opens a page with the token.
const opening = (command) => `diskprefix ${command}${location.port === "8642" ? "" : ` --url ${location.origin}`}`;

// Shows that the page is locked: the command that opens it, and why.
function showLogin(command, error) {
  find("#login").hidden = false;
  setStatus("idle", "locked");
  setText(find("#unlock"), opening(command));
  setText(find("#login-why"), error.status === 403 ? error.message : wasRefused ? "This is no key or token of this daemon."
    : sessionStorage.getItem(TOKEN) ? "The daemon was started again after this page was opened, or the key was removed. Open the page again." : "");
  if (error.status === 401) sessionStorage.removeItem(TOKEN);
  find("#key").focus();
}

// Calls `open` when a key was entered.
function onLogin(open) {
  find("#copy-unlock").addEventListener("click", ({ target }) => copy(find("#unlock").textContent, find("#unlock"), target.nextElementSibling));
  find("#login").addEventListener("submit", (event) => {
    event.preventDefault();
    // The files of the token and of API keys have other words before it, that of the token settings behind it.
    const given = find("#key").value.trim();
    unlock(given.match(/[\w-]+-[0-9a-f]{64}/)?.[0] ?? given.split(/\s+/).pop()).then(open);
    find("#key").value = "";
  });
}

const ask = async (method, path, body) => (await call(method, path, body)).json();
