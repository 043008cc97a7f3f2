// Chooses the page by the address, polls the gateway and keeps the page up to date.

import { Adapters } from "./adapters.js";
import { NeedsKey, get, key } from "./api.js";
import { Chart } from "./charts.js";
import { byId, count, duration, h } from "./dom.js";
import { Playground } from "./playground.js";
import { Rates } from "./rates.js";
import { showRecent, showWorkers } from "./views.js";

const STATE_EVERY_MS = 1000;
const ADAPTERS_EVERY_MS = 4000;
const WINDOW_S = 120;

const seconds = (value) => duration(value).join(" ");
const charts = {
  throughput: new Chart("Tokens a second", [{ name: "generated", show: count }, { name: "prompt", show: count }], WINDOW_S),
  latency: new Chart("First token", [{ name: "p50", show: seconds }, { name: "p95", show: seconds }], WINDOW_S),
  queue: new Chart("Requests", [{ name: "running", show: count }, { name: "waiting", show: count }], WINDOW_S),
};
const rates = new Rates(10);
const playground = new Playground(askForKey);
const adapters = new Adapters(tryModel, showFailure);
let isAsking = false;

/** The page and what it is about: `#adapters/acme/support` is one adapter's. */
function address() {
  const [page, ...rest] = (location.hash.slice(1).split("?")[0] || "operate").split("/");
  if (page === "adapters" && rest.length) return ["adapter", rest.map(decodeURIComponent).join("/")];
  return [["operate", "adapters", "playground"].includes(page) ? page : "operate", ""];
}

async function turn() {
  const [page, subject] = address();
  for (const section of document.querySelectorAll("[data-page]")) section.hidden = section.dataset.page !== page;
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.hash === `#${page}` || (page === "adapter" && link.hash === "#adapters");
    if (isHere) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  document.title = `${subject || page[0].toUpperCase() + page.slice(1)} · Loraplex`;
  if (page === "adapters") await adapters.open();
  if (page === "adapter") await adapters.openOne(subject);
  if (page === "playground") await suggest();
}

function tryModel(name) {
  playground.add(name);
  location.hash = "#playground";
  byId("prompt").focus();
}

/** Names that complete what is typed into the playground: the first page of what matches. */
async function suggest() {
  try {
    const found = await get(`/console/adapters?search=${encodeURIComponent(byId("pick").value)}`);
    byId("known").replaceChildren(...found.adapters.map((each) => h("option", { value: `${each.tenant}/${each.name}` })));
  } catch (error) {
    showFailure(error);
  }
}

function showState(state) {
  const condition = byId("condition");
  condition.textContent = state.not_ready_reason || "ready";
  condition.title = state.not_ready_reason;
  condition.className = `pill ${state.not_ready_reason ? "warn" : "good"}`;
  playground.offer(state.bases);
  showWorkers(state.workers);
  showRecent(state.recent);
  byId("charts").hidden = byId("figures").hidden = !state.totals;
  byId("overview-note").hidden = Boolean(state.totals);
  byId("overview-note").textContent = "Use a key with the scope admin to see the load.";
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
    ["adapters on devices", count(state.num_resident), `of ${count(state.num_adapters)}`],
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
  turn();
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
byId("pick").addEventListener("input", suggest);
addEventListener("hashchange", turn);
if (key.get()) byId("key").hidden = false;
await lookAtState();
await turn();
setInterval(() => {
  if (!isAsking && !document.hidden && address()[0] === "adapters") adapters.look();
}, ADAPTERS_EVERY_MS);
