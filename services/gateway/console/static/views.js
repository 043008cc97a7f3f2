// Workers with what they hold, and the table of adapters.

import { byId, bytes, count, duration, h } from "./dom.js";

const CONDITIONS = { ready: "good", draining: "warn", starting: "warn", away: "bad" };
const SHOWN_CHIPS = 60;

const drawn = new Map();

/** False when a place already shows just this: what has the focus must not be replaced. */
function isNew(place, value) {
  const text = JSON.stringify(value);
  if (drawn.get(place) === text) return false;
  drawn.set(place, text);
  return true;
}

export function showWorkers(workers) {
  const list = byId("worker-list");
  if (!isNew("workers", workers)) return;
  if (!workers) return list.replaceChildren(h("p", { className: "note" }, "Workers are shown to keys with the scope admin."));
  if (!workers.length) return list.replaceChildren(h("p", { className: "note" }, "No worker is known yet."));
  list.replaceChildren(...workers.map(worker));
}

function worker(state) {
  const used = state.total_blocks - state.free_blocks;
  const share = state.total_blocks ? Math.round(100 * used / state.total_blocks) : 0;
  const facts = [
    ["running", count(state.running)], ["waiting", count(state.waiting)],
    ["step", state.step_s ? duration(state.step_s).join(" ") : "–"], ["on device", count(state.on_device)],
  ];
  const more = state.adapters.length - SHOWN_CHIPS;
  return h("article", { className: "worker", "aria-label": `Worker ${state.id}` },
    h("h3", {}, state.id, h("code", {}, state.base), h("span", { className: `pill ${CONDITIONS[state.state]}` }, state.state)),
    h("dl", { className: "facts" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("div", { className: "use" }, h("span", {}, "Arena in use"),
      h("progress", { max: Math.max(state.total_blocks, 1), value: used, "aria-label": `Arena of ${state.id}: ${share}% in use` }),
      h("span", {}, `${share}% of ${count(state.total_blocks)} blocks`)),
    state.adapters.length
      ? h("ul", { className: "chips", "aria-label": "Adapters here" }, ...state.adapters.slice(0, SHOWN_CHIPS).map(chip),
          more > 0 ? h("li", { className: "chip" }, `+${more}`) : null)
      : h("p", { className: "hint" }, "No adapter here yet: the first request brings it."));
}

function chip(adapter) {
  const where = { device: "on device", loading: "loading", disk: "on disk" }[adapter.tier];
  const title = `${adapter.ref}, ${where}, rank ${adapter.rank}${adapter.bytes ? `, ${bytes(adapter.bytes)}` : ""}${adapter.running ? `, ${adapter.running} running` : ""}`;
  return h("li", { className: `chip ${adapter.tier}${adapter.running ? " busy" : ""}`, title, "aria-label": title },
    adapter.ref.replace(/^default\//, ""), adapter.pinned ? "📌" : null, adapter.running ? h("b", {}, String(adapter.running)) : null);
}

/** refs that are on a device, with the number of workers each. */
export function residency(workers) {
  const places = new Map();
  for (const each of workers ?? []) {
    for (const adapter of each.adapters) {
      if (adapter.tier === "device") places.set(adapter.digest, (places.get(adapter.digest) ?? 0) + 1);
    }
  }
  return places;
}

export function showAdapters(found, tenant, places, onTry) {
  const { adapters, total } = found;
  if (!isNew("adapters", [found, tenant, ...places])) return;
  byId("adapter-count").textContent = total === adapters.length ? `${total}` : `${adapters.length} of ${total}: search to narrow`;
  const rows = adapters.map((adapter) => row(adapter, tenant, places, onTry));
  byId("adapter-rows").replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colSpan: 7, className: "note" },
    "Nothing here. Publish one: ", h("code", {}, "registry upload DIR --name NAME")))]));
}

function row(adapter, tenant, places, onTry) {
  const [newest] = adapter.versions;
  const name = adapter.tenant === tenant ? adapter.name : `${adapter.tenant}/${adapter.name}`;
  const numbers = adapter.versions.map((version) => `v${version.number}`);
  const shown = numbers.length > 4 ? [...numbers.slice(0, 3), `+${numbers.length - 3}`] : numbers;
  const held = adapter.versions.filter((version) => places.has(version.digest));
  return h("tr", {},
    h("td", { className: "name" }, name),
    h("td", { className: "number", title: newest.digest }, shown.join(" ")),
    h("td", {}, h("ul", { className: "chips", "aria-label": "Tags" }, ...adapter.tags.map(tag))),
    h("td", { className: "number" }, String(newest.rank || "–")),
    h("td", {}, h("code", {}, newest.base)),
    h("td", {}, h("ul", { className: "chips", "aria-label": "On device" }, ...held.map((version) =>
      h("li", { className: "chip device" }, `v${version.number}`, places.get(version.digest) > 1 ? ` ×${places.get(version.digest)}` : null)))),
    h("td", { className: "last" }, h("button", { className: "quiet", type: "button", "aria-label": `Try ${name}`, onclick: () => onTry(name) }, "Try")));
}

function tag(state) {
  const weights = state.sides.reduce((sum, side) => sum + side.weight, 0);
  const target = state.sides.length === 1
    ? `v${state.sides[0].number}`
    : state.sides.map((side) => `v${side.number} ${Math.round(100 * side.weight / weights)}%`).join(" · ");
  const pending = state.pending.length ? ` → v${state.pending.map((side) => side.number).join(", v")} pending` : "";
  return h("li", { className: pending ? "chip loading" : "chip" }, `${state.tag}: ${target}${pending}`);
}
