// Chooses the page by the address, polls the gateway and keeps the page up to date.

import { Adapters } from "./adapters.js";
import { NeedsKey, get, key } from "./api.js";
import { Chart } from "./charts.js";
import { byId, count, duration, h } from "./dom.js";
import { Playground } from "./playground.js";
import { showFailures, showModels, showWorkers } from "./views.js";

const STATE_EVERY_MS = 1000;
const ADAPTERS_EVERY_MS = 4000;
const HISTORY_EVERY_MS = 3000;

const seconds = (value) => duration(value).join(" ");
const charts = [
  [new Chart("Tokens a second", [{ name: "generated", show: count }, { name: "prompt", show: count }]), ["generated_tokens_per_s", "prompt_tokens_per_s"]],
  [new Chart("First token", [{ name: "p50", show: seconds }, { name: "p95", show: seconds }]), ["first_token_p50_s", "first_token_p95_s"]],
  [new Chart("Requests a second", [{ name: "served", show: count }, { name: "failed", show: count }]), ["served_per_s", "failed_per_s"]],
  [new Chart("Requests at once", [{ name: "running", show: count }, { name: "waiting", show: count }]), ["running", "waiting"]],
];
const playground = new Playground(askForKey);
const adapters = new Adapters(tryModel, showFailure);
let isAsking = false;
let showsLoad = false;

/** The page and what it is about: `#adapters/acme/support` is one adapter's. */
function address() {
  const [page, ...rest] = (location.hash.slice(1).split("?")[0] || "operate").split("/");
  if (page === "adapters" && rest.length) return ["adapter", rest.join("/")];
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
  if (page === "operate") await lookAtHistory();
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
  showsLoad = Boolean(state.recent);
  byId("load").hidden = byId("overview").hidden || !showsLoad;
  byId("figures").hidden = !showsLoad;
  byId("overview-note").hidden = showsLoad;
  byId("overview-note").textContent = "Use a key with the scope admin to see the load.";
  if (!showsLoad) return;
  showModels(state.recent);
  const now = state.recent;
  const ready = state.workers.filter((worker) => worker.state === "ready").length;
  const figures = [
    ["tokens/s (1 min)", count(now.tokens_per_s), ""], ["requests/s (1 min)", count(now.requests_per_s), ""],
    ["first token, p50", ...duration(now.first_token_p50_s)], ["first token, p95", ...duration(now.first_token_p95_s)],
    ["adapters on devices", count(state.num_resident), `of ${count(state.num_adapters)}`],
    ["workers ready", count(ready), `of ${state.workers.length}`],
  ];
  byId("figures").replaceChildren(...figures.map(([name, value, unit]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, unit)))));
}

/** The charts and failures of the range in the address: `#operate?range=1h`. */
async function lookAtHistory() {
  const range = new URLSearchParams(location.hash.split("?")[1] ?? "").get("range") ?? "5m";
  for (const link of document.querySelectorAll("#ranges a")) {
    if (link.hash.endsWith(`=${range}`)) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  }
  if (!showsLoad) return;
  try {
    const { range_s: rangeS, columns, failures } = await get(`/console/history?range=${encodeURIComponent(range)}`);
    for (const [chart, names] of charts) {
      chart.set(columns.age_s.map((ageS, index) => ({ ageS, values: names.map((name) => columns[name][index]) })), rangeS);
    }
    showFailures(failures);
  } catch (error) {
    showFailure(error);
  }
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

byId("charts").append(...charts.map(([chart]) => chart.element));
byId("pick").addEventListener("input", suggest);
addEventListener("hashchange", turn);
if (key.get()) byId("key").hidden = false;
await lookAtState();
await turn();
setInterval(() => {
  if (!isAsking && !document.hidden && address()[0] === "operate") lookAtHistory();
}, HISTORY_EVERY_MS);
setInterval(() => {
  if (!isAsking && !document.hidden && address()[0] === "adapters") adapters.look();
}, ADAPTERS_EVERY_MS);
