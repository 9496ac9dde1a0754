// The prefix tree as an icicle: tokens from left to right, a lane for each saved prompt. A trunk spans the prompts that share it.

const LANE = 22, FEW_LANES = 10, MOST_LANES = 60, NARROWEST = 16;

// `root` is that of the tree which the user chose.
const tree = { found: null, chosen: 0, root: null, selected: null, lanes: [], byId: new Map() };

// `served` is the name of the served model. Its trees come first, and of them the busiest.
function showEntries(found, served) {
  const hits = new Map(found.trees.map((one) => [one, one.nodes.reduce((sum, node) => sum + node.hits, 0)]));
  const busiest = (one, other) => (other.model === served) - (one.model === served) || hits.get(other) - hits.get(one);
  tree.found = { ...found, trees: found.trees.toSorted(busiest) };
  const trees = tree.found.trees, isOneModel = trees.every(({ model }) => model === trees[0].model);
  const choice = find("#tree-of");
  whenChanged("trees", trees.map(({ root, tenant_name, options }) => [root, tenant_name, options]), () => {
    const chosen = Math.max(0, trees.findIndex(({ root }) => root === tree.root));
    const label = ({ model, tenant_name: name, options }) => [name, isOneModel ? "" : model, options && `made with ${options}`].filter(Boolean).join(", ");
    choice.replaceChildren(...trees.map((one, index) => make("option", { value: index }, label(one))));
    tree.chosen = choice.value = chosen;
  });
  find("#tree-choice").hidden = trees.length < 2;
  drawTree();
}

function drawTree() {
  const box = find("#icicle"), shown = tree.found?.trees[tree.chosen];
  if (!shown) return box.replaceChildren(make("p", { class: "quiet" }, "Nothing is stored yet."));
  const nodes = placed(shown.nodes), more = find("#more-lanes"), most_lanes = isOpen(more) ? MOST_LANES : FEW_LANES;
  tree.byId = new Map(nodes.map((node) => [node.id, node]));
  const visible = nodes.filter((node) => node.lane < most_lanes);
  // Leaves room on the right for the texts of the longest prompts.
  const most = Math.max(...visible.map((node) => node.end)) * (box.clientWidth < 600 ? 1.8 : 1.4), entries = new Map(tree.found.entries.map((entry) => [entry.id, entry]));
  const focused = document.activeElement?.dataset?.trunk;
  const all = Math.max(...nodes.map((node) => node.lane + node.lanes)), lanes = Math.min(most_lanes, all);
  box.style.setProperty("height", `${lanes * LANE}px`);
  const active = tree.byId.has(tree.selected) ? tree.selected : visible[0].id;
  for (const node of visible) {
    // A node with few tokens can still be seen and clicked: its children begin after its minimum width.
    node.isNarrow = ((node.end - node.start) / most) * box.clientWidth < 3 * NARROWEST;
    node.width = `max(${NARROWEST}px, ${(100 * (node.end - node.start)) / most}%)`;
    node.before = node.parent ? [...tree.byId.get(node.parent).before, tree.byId.get(node.parent).width] : ["0px"];
  }
  box.replaceChildren(...visible.map((node) => buttonOf(node, lanes, entries, node.id === active, shown)));
  if (focused) box.querySelector(`[data-trunk="${focused}"]`)?.focus();
  more.hidden = all <= FEW_LANES;
  const unseen = nodes.filter((node) => node.lane >= MOST_LANES && node.entries.length).length;
  setText(more, !isOpen(more) ? "Show more" : unseen ? `Show fewer (diskprefix inspect --tree has ${count(unseen)} more)` : "Show fewer");
  if (!tree.byId.has(tree.selected)) find("#trunk").replaceChildren();
}

// Gives each node its lanes: as many as its descendants have. Nodes come after their parents.
function placed(nodes) {
  const own = nodes.map((node) => ({ ...node, children: [], lanes: 0, lane: 0 }));
  const byId = new Map(own.map((node) => [node.id, node]));
  for (const node of own) if (node.parent) byId.get(node.parent).children.push(node);
  for (const node of [...own].reverse()) node.lanes = node.children.reduce((sum, child) => sum + child.lanes, 0) || 1;
  let next = 0;
  for (const node of own) {
    if (!node.parent) { node.lane = next; next += node.lanes; }
    let lane = node.lane;
    for (const child of node.children) { child.lane = lane; lane += child.lanes; }
  }
  return own;
}

const heat = (hits) => (hits === 0 ? 0 : hits < 3 ? 1 : hits < 10 ? 2 : 3);

function buttonOf(node, lanes, entries, isActive, shown) {
  const preview = node.entries.map((id) => entries.get(id)?.preview).find(Boolean);
  const shared = node.num_entries > 1 ? `${plural(node.num_entries, "prompt")} · ` : "";
  const isLeaf = !node.children.length;
  // Prompts of one agent begin alike and differ at their ends.
  const [begin, end] = isLeaf ? [preview, preview?.split("…").pop().trim()] : [textBelow(node, entries)?.replace(/ … .*/s, " …"), null];
  const label = !isLeaf && node.isNarrow ? "" : (node.parent ? end : begin) || `${shared}${count(node.end - node.start)} tokens`;
  const height = Math.min(node.lanes, lanes - node.lane) * LANE;
  // A leaf extends to the right edge, so that its text has room; its colour ends with its tokens.
  const style = { left: `calc(${node.before.join(" + ")})`, ...(isLeaf ? { right: "0", "--tokens": node.width } : { width: node.width, "--lines": Math.min(node.lanes, lanes - node.lane) }), top: `${node.lane * LANE}px`, height: `${height}px` };
  const facts = `Tokens ${count(node.start)} to ${count(node.end)}, ${plural(node.num_entries, "saved prompt")}, ${bytes(node.stored_bytes)}, ${plural(node.hits, "hit")}`;
  const attributes = { type: "button", "data-trunk": node.id, class: `heat${heat(node.hits)}${isLeaf ? " leaf" : ""}`, title: facts, "aria-label": preview ? `${facts}. ${preview}` : facts };
  return make("button", { ...attributes, style, tabindex: isActive ? 0 : -1, "aria-pressed": node.id === tree.selected, onclick: () => selectTrunk(node, entries, shown), onkeydown: (event) => moveInTree(event, node) }, make("span", {}, label));
}

// The text of the first prompt below a node. All prompts below it have the same beginning.
function textBelow(node, entries) {
  for (let step = node; step; step = step.children[0]) for (const id of step.entries) if (entries.get(id)?.preview) return entries.get(id).preview;
  return null;
}

function moveInTree(event, node) {
  const siblings = node.parent ? tree.byId.get(node.parent).children : [...tree.byId.values()].filter(({ parent }) => !parent);
  const place = siblings.findIndex(({ id }) => id === node.id);
  const moves = { ArrowLeft: tree.byId.get(node.parent), ArrowRight: node.children[0], ArrowUp: siblings[place - 1], ArrowDown: siblings[place + 1] };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const there = moves[event.key] && find(`[data-trunk="${moves[event.key].id}"]`);
  if (!there) return;
  event.target.tabIndex = -1;
  there.tabIndex = 0;
  there.focus();
}

function selectTrunk(node, entries, shown) {
  tree.selected = node.id;
  for (const button of find("#icicle").querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.trunk === node.id);
  const now = Date.now() / 1000;
  const figures = {
    tokens: `${count(node.start)} to ${count(node.end)}, ${plural(node.num_blocks, "block")}`,
    "shared by": plural(node.num_entries, "saved prompt"),
    "on disk": bytes(node.stored_bytes),
    restored: `${plural(node.hits, "time")}, last used ${ago(node.last_used_at, now)}`,
    "time to compute": node.prefill_s ? seconds(node.prefill_s) : "not measured",
    model: shown.model,
    "computed for": shown.tenant_name,
    ...(shown.options && { "made with": shown.options }),
  };
  const list = make("dl", {}, ...Object.entries(figures).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  find("#trunk").replaceChildren(list, ...node.entries.map((id) => entryOf(id, entries.get(id))));
}

function entryOf(id, entry) {
  const text = make("p", {}, make("code", {}, id.slice(0, 12)), ` ${entry && entry.kind !== "saved" ? `(${entry.kind}) ` : ""}${entry?.preview ?? "texts are not shown here"}`);
  if (!state.now?.may_delete) return text;
  const remove = make("button", { type: "button", class: "danger", onclick: () => deleteEntry(id, entry, remove) }, "Delete this prompt");
  return make("div", {}, text, remove);
}

async function deleteEntry(id, entry, button) {
  if (!confirm(`Delete the saved prompt ${id.slice(0, 12)} (${entry ? count(entry.num_tokens) : "?"} tokens)? The next such prompt is computed.`)) return;
  button.disabled = true;
  try {
    await ask("DELETE", `/dashboard/entries/${id}`);
    tree.selected = null;
    await readEntries();
  } catch (error) {
    button.replaceWith(make("p", { role: "alert" }, error.message));
  }
}
