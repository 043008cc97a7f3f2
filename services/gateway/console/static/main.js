// Polls the gateway and keeps the page up to date.

import { NeedsKey, get, key } from "./api.js";
import { Chart } from "./charts.js";
import { byId, count, duration, h } from "./dom.js";
import { Playground } from "./playground.js";
import { Rates } from "./rates.js";
import { residency, showAdapters, showWorkers } from "./views.js";

const STATE_EVERY_MS = 1000;
const ADAPTERS_EVERY_MS = 4000;
const WINDOW_S = 120;

const seconds = (value) => duration(value).join(" ");
const charts = {
  throughput: new Chart("Tokens a second", [{ name: "generated", show: count }, { name: "read", show: count }], WINDOW_S),
  latency: new Chart("First token", [{ name: "p50", show: seconds }, { name: "p95", show: seconds }], WINDOW_S),
  queue: new Chart("Requests", [{ name: "running", show: count }, { name: "waiting", show: count }], WINDOW_S),
};
const rates = new Rates(10);
const playground = new Playground(askForKey);
let places = new Map();
let tenant = "";
let isAsking = false;

function showState(state) {
  tenant = state.tenant;
  const condition = byId("condition");
  condition.textContent = state.not_ready_reason || "ready";
  condition.title = state.not_ready_reason;
  condition.className = `pill ${state.not_ready_reason ? "warn" : "good"}`;
  if (!playground.picked.length && state.bases.length) playground.add(state.bases[0].id);
  showWorkers(state.workers);
  places = residency(state.workers);
  byId("charts").hidden = byId("figures").hidden = !state.totals;
  byId("overview-note").hidden = Boolean(state.totals);
  byId("overview-note").textContent = "Load is shown to keys with the scope admin.";
  if (state.totals) showLoad(state, rates.add(state.time_s, state.totals));
}

function showLoad(state, now) {
  charts.throughput.add(state.time_s, [now.tokens, now.prompts]);
  charts.latency.add(state.time_s, [now.p50, now.p95]);
  charts.queue.add(state.time_s, [state.running, state.waiting]);
  const ready = state.workers.filter((worker) => worker.state === "ready").length;
  const figures = [
    ["tokens/s", count(now.tokens), ""], ["requests/s", count(now.requests), ""],
    ["first token, p50", ...duration(now.p50)], ["first token, p95", ...duration(now.p95)],
    ["adapters on devices", count(places.size), `of ${count(state.num_adapters)}`],
    ["workers ready", count(ready), `of ${state.workers.length}`],
  ];
  byId("figures").replaceChildren(...figures.map(([name, value, unit]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, unit)))));
}

async function lookAtState() {
  try {
    if (!isAsking && !document.hidden) showState(await get("/console/state"));
  } catch (error) {
    showFailure(error);
  }
  setTimeout(lookAtState, STATE_EVERY_MS);
}

async function lookAtAdapters() {
  try {
    const search = encodeURIComponent(byId("search").value);
    const found = await get(`/console/adapters?search=${search}`);
    showAdapters(found, tenant, places, (name) => {
      playground.add(name);
      byId("prompt").focus();
    });
    const names = found.adapters.map((each) => (each.tenant === tenant ? each.name : `${each.tenant}/${each.name}`));
    byId("known").replaceChildren(...names.map((name) => h("option", { value: name })));
  } catch (error) {
    showFailure(error);
  }
}

function showFailure(error) {
  if (error instanceof NeedsKey) return askForKey(error);
  byId("condition").textContent = "gateway away";
  byId("condition").title = error.message;
  byId("condition").className = "pill bad";
}

function askForKey(error) {
  byId("key").hidden = false;
  byId("key-error").textContent = error?.message ?? "";
  byId("key-error").hidden = !error?.message;
  if (isAsking) return;
  isAsking = true;
  byId("key-dialog").showModal();
}

byId("key").addEventListener("click", () => askForKey());
byId("key-dialog").addEventListener("close", () => {
  isAsking = false;
  const typed = byId("key-input").value.trim();
  if (typed) key.set(typed);
  byId("key-input").value = "";
  lookAtAdapters();
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} mode`);
}
const system = matchMedia("(prefers-color-scheme: dark)");
const wanted = () => localStorage.getItem("loraplex-theme") ?? (system.matches ? "dark" : "light");
setTheme(wanted());
system.addEventListener("change", () => setTheme(wanted()));
byId("theme").addEventListener("click", () => {
  localStorage.setItem("loraplex-theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  setTheme(wanted());
});

byId("charts").append(...Object.values(charts).map((chart) => chart.element));
byId("search").addEventListener("input", lookAtAdapters);
if (key.get()) byId("key").hidden = false;
await lookAtState();
await lookAtAdapters();
setInterval(() => { if (!isAsking && !document.hidden) lookAtAdapters(); }, ADAPTERS_EVERY_MS);
