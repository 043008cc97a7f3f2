// Workers with what they hold, failures, and the models in use.

import { byId, bytes, count, duration, h } from "./dom.js";

const CONDITIONS = { ready: "good", draining: "warn", starting: "warn", unreachable: "bad" };
const [FEWEST_CHIPS, MOST_CHIPS, CHIPS_OF_ALL] = [4, 60, 300];

const drawn = new Map();

/** False when a element already shows just this: what has the focus must not be replaced. */
function isNew(element, value) {
  const text = JSON.stringify(value);
  if (drawn.get(element) === text) return false;
  drawn.set(element, text);
  return true;
}

export function showWorkers(workers) {
  const list = byId("worker-list");
  if (!isNew("workers", workers)) return;
  if (!workers) return list.replaceChildren(h("p", { className: "note" }, "Use a key with the scope admin to see the workers."));
  if (!workers.length) return list.replaceChildren(h("p", { className: "note" }, "No worker is known yet."));
  const isWell = (each) => Number(each.state === "ready");
  const order = [...workers].sort((a, b) => isWell(a) - isWell(b)); // trouble first
  const numChips = Math.min(MOST_CHIPS, Math.max(FEWEST_CHIPS, Math.floor(CHIPS_OF_ALL / workers.length)));
  list.replaceChildren(...order.map((each) => worker(each, numChips)));
}

function worker(state, numChips) {
  const share = (blocks) => (state.total_blocks ? Math.round(100 * blocks / state.total_blocks) : 0);
  const [used, cached] = [share(state.used_blocks), share(state.idle_blocks)];
  const isUnreachable = state.state === "unreachable";
  const facts = isUnreachable ? [] : [
    ["running", count(state.running)], ["waiting", count(state.waiting)],
    ["per token", state.step_s ? duration(state.step_s).join(" ") : "–"], ["on device", count(state.on_device)],
  ];
  const more = state.num_adapters - Math.min(state.adapters.length, numChips);
  return h("article", { className: "worker", "aria-label": `Worker ${state.id}` },
    h("h3", {}, state.id, h("code", {}, state.base), h("span", { className: `pill ${CONDITIONS[state.state]}` }, state.state)),
    isUnreachable ? h("p", { className: "hint" }, "It does not answer. What it runs and holds is unknown.") : null,
    h("dl", { className: "facts", hidden: isUnreachable }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("div", { className: "use", hidden: isUnreachable }, h("span", {}, "Memory"),
      meter(`Memory of ${state.id}: ${used}% in use, ${cached}% cached`, used, cached),
      h("span", {}, `${used}% in use, ${cached}% cached`)),
    state.adapters.length
      ? h("ul", { className: "chips", "aria-label": "Adapters here" }, ...state.adapters.slice(0, numChips).map(chip),
          more > 0 ? h("li", { className: "chip" }, `+${more}`) : null)
      : h("p", { className: "hint", hidden: isUnreachable }, "No adapter here yet: the first request brings it."));
}

/** A bar of two parts; the second one is what goes when its space is needed. */
function meter(label, used, cached) {
  const bar = h("div", { className: "meter", role: "img", "aria-label": label });
  for (const [kind, share] of [["used", used], ["cached", cached]]) {
    const part = h("span", { className: kind });
    part.style.width = `${share}%`;
    bar.append(part);
  }
  return bar;
}

function chip(adapter) {
  const where = { device: "on device", loading: "loading", host: "in host memory", disk: "on disk" }[adapter.tier];
  const [name, ...others] = adapter.names.map((each) => each.replace(/^default\//, ""));
  const title = `${[name, ...others].join(", ")}: ${where}, rank ${adapter.rank}${adapter.bytes ? `, ${bytes(adapter.bytes)}` : ""}${adapter.running ? `, ${adapter.running} running` : ""}`;
  const text = `${name}${others.length ? ` +${others.length}` : ""}`;
  const inside = name.includes(":v") ? h("a", { href: `#adapters/${adapter.names[0].split(":")[0]}` }, text) : text;
  return h("li", { className: `chip ${adapter.tier}${adapter.running ? " busy" : ""}`, title, "aria-label": title },
    inside, adapter.pinned ? "📌" : null, adapter.running ? h("b", {}, String(adapter.running)) : null);
}

const nothing = (text, columns) => h("tr", {}, h("td", { colSpan: columns, className: "note" }, text));

/** Failures of the chosen range by reason; null = the key may not see them. */
export function showFailures(failures) {
  byId("failures").hidden = !failures;
  if (!failures || !isNew("failures", failures)) return;
  byId("failure-rows").replaceChildren(...(failures.length
    ? failures.map(([reason, number]) => h("tr", {}, h("td", { className: "error" }, reason), h("td", { className: "number" }, count(number))))
    : [nothing("No request failed or was refused.", 2)]));
}

/** The models of the last minute. */
export function showModels({ models }) {
  byId("models").hidden = !models;
  if (!models || !isNew("models", models)) return;
  byId("model-rows").replaceChildren(...(models.length
    ? models.map((each) => h("tr", {},
      h("td", { className: "name" }, each.model.includes("/") ? h("a", { href: `#adapters/${each.model}` }, each.model) : each.model),
      h("td", { className: "number" }, count(each.requests)), h("td", { className: each.errors ? "number error" : "number" }, count(each.errors)),
      h("td", { className: "number" }, count(each.generated_tokens))))
    : [nothing("No request within the last minute.", 4)]));
}
