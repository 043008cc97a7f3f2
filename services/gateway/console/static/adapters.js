// The list of adapters, one page at a time, and the page of one adapter.

import { get, key, post } from "./api.js";
import { byId, bytes, count, h } from "./dom.js";

const SHOWN_LABELS = 3;
const FILTERS = ["search", "base", "tag", "resident", "sort"];

/** What the list shows: the fields of the form and the page, as they stand in the address. */
function queryOfAddress() {
  return new URLSearchParams(location.hash.split("?")[1] ?? "");
}

function setAddress(changes) {
  const query = new URLSearchParams();
  for (const name of FILTERS) {
    const value = byId(name).value;
    if (value && !(name === "sort" && value === "name")) query.set(name, value);
  }
  if (changes.page > 1) query.set("page", changes.page);
  const text = query.toString();
  history.replaceState(null, "", `#adapters${text ? `?${text}` : ""}`);
}

export class Adapters {
  constructor(onTry, onFailure) {
    this.onTry = onTry;
    this.onFailure = onFailure;
    this.page = 1;
    this.drawn = "";
    for (const name of FILTERS) byId(name).addEventListener("input", () => this.turnTo(1));
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("previous").addEventListener("click", () => this.turnTo(this.page - 1));
    byId("next").addEventListener("click", () => this.turnTo(this.page + 1));
  }

  /** Show what the address says. */
  open() {
    const query = queryOfAddress();
    this.page = Number(query.get("page") ?? 1);
    for (const name of FILTERS) {
      const value = query.get(name) ?? (name === "sort" ? "name" : "");
      if (name === "base" && value && ![...byId(name).options].some((option) => option.value === value)) {
        byId(name).append(h("option", { value }, value));
      }
      byId(name).value = value;
    }
    return this.look();
  }

  turnTo(page) {
    this.page = page;
    setAddress({ page });
    return this.look();
  }

  async look() {
    const query = queryOfAddress();
    const asked = query.toString();
    try {
      const found = await get(`/console/adapters?${asked}`);
      if (asked === queryOfAddress().toString()) this.show(found);
    } catch (error) {
      this.onFailure(error);
    }
  }

  show(found) {
    const asked = [...queryOfAddress().keys()].some((name) => name !== "sort");
    const text = JSON.stringify(found);
    if (text === this.drawn) return; // what has the focus must not be replaced
    this.drawn = text;
    const bases = ["", ...found.bases];
    if (byId("base").options.length !== bases.length) {
      const chosen = byId("base").value;
      byId("base").replaceChildren(...bases.map((value) => h("option", { value }, value || "all bases")));
      byId("base").value = chosen;
    }
    byId("adapter-count").textContent = found.total.toLocaleString("en");
    byId("page-number").textContent = `${found.page} of ${found.num_pages}`;
    byId("previous").disabled = found.page <= 1;
    byId("next").disabled = found.page >= found.num_pages;
    const rows = found.adapters.map((adapter) => this.row(adapter));
    byId("adapter-rows").replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colSpan: 7, className: "note" },
      ...(asked ? ["No adapter matches. "] : ["Nothing here yet. Publish one: ", h("code", {}, "registry upload DIR --name NAME")])))]));
  }

  row(adapter) {
    const [newest] = adapter.versions;
    const full = `${adapter.tenant}/${adapter.name}`;
    const numbers = adapter.versions.map((version) => `v${version.number}`);
    const more = adapter.num_versions - numbers.length;
    const held = adapter.versions.filter((version) => version.num_workers);
    return h("tr", {},
      h("td", { className: "name" }, h("a", { href: `#adapters/${full}` }, adapter.name), h("span", {}, ` ${adapter.tenant}`),
        adapter.labels.length ? h("span", { className: "labels" }, adapter.labels.slice(0, SHOWN_LABELS).join("  ")) : null),
      h("td", { className: "number", title: newest.digest }, numbers.join(" "), more > 0 ? ` +${more}` : null),
      h("td", {}, h("ul", { className: "chips", "aria-label": "Tags" }, ...adapter.tags.map(tagChip))),
      h("td", { className: "number" }, String(newest.rank || "–")),
      h("td", {}, h("code", {}, newest.base)),
      h("td", {}, h("ul", { className: "chips", "aria-label": "On device" }, ...held.map((version) =>
        h("li", { className: "chip device" }, `v${version.number}`, version.num_workers > 1 ? ` ×${version.num_workers}` : null)))),
      h("td", { className: "last" }, h("button", { className: "quiet", type: "button", "aria-label": `Try ${adapter.name}`, onclick: () => this.onTry(full) }, "Try")));
  }

  /** The page of one adapter. */
  async openOne(full) {
    const element = byId("adapter");
    try {
      const adapter = await get(`/console/adapter?name=${encodeURIComponent(full)}`);
      element.replaceChildren(...this.one(adapter, full));
    } catch (error) {
      element.replaceChildren(h("p", { className: "note error" }, error.message));
      this.onFailure(error);
    }
  }

  one(adapter, full) {
    const [newest] = adapter.versions;
    const labels = Object.entries({ ...newest.labels, ...newest.adapter_labels }).map(([name, value]) => `${name}=${value}`);
    const used = (use) => `${count(use.requests)} requests, ${count(use.errors)} failed, ${count(use.generated_tokens)} tokens`;
    const facts = [
      ["Digest", h("code", {}, newest.digest)], ["Base", newest.base], ["Rank", String(newest.rank || "–")],
      ["Size", newest.size_bytes ? bytes(newest.size_bytes) : "–"], ["Created", when(newest.created_unix_s)],
      ["Published by", newest.creator || "–"], ["Visible", newest.visibility ?? (newest.public ? "public" : "–")],
      ["Labels", labels.join(", ") || "–"], ["Made from", newest.parent || "–"],
      ["Last minute", adapter.last_minute ? used(adapter.last_minute) : "no requests"],
      ["Last 30 days", adapter.usage?.requests ? used(adapter.usage) : "no requests"], ["Last used", adapter.usage?.last_day || "–"],
    ];
    const auth = key.get() ? ' -H "authorization: Bearer $LORAPLEX_API_KEY"' : "";
    const command = `curl ${location.origin}/v1/completions${auth} -H 'content-type: application/json' -d '${JSON.stringify({ model: full, prompt: "Hello", max_tokens: 32 })}'`;
    return [
      h("div", { className: "head" }, h("h1", {}, full), h("p", {}, `${count(adapter.num_versions)} ${adapter.num_versions === 1 ? "version" : "versions"}`),
        h("span", { className: "tools" }, h("button", { className: "primary", type: "button", onclick: () => this.onTry(full) }, "Try it"))),
      adapter.may_change ? this.descriptionForm(full, newest.description ?? "") : newest.description ? h("p", {}, newest.description) : null,
      adapter.problem ? h("p", { className: "note error" }, `The registry is unreachable, so this is not all: ${adapter.problem}`) : null,
      h("dl", { className: "panel about" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      h("p", { className: "row command" }, h("code", { tabIndex: 0 }, command), copyButton(command, "Copy the command")),
      h("h2", {}, "Tags"),
      h("div", { className: "panel scroll" }, h("table", {}, h("tbody", {}, ...adapter.tags.map((tag) => this.tagRow(adapter, full, tag))))),
      adapter.may_change ? this.tagForm(full) : null,
      h("h2", {}, "Versions"),
      h("div", { className: "panel scroll" }, h("table", {}, h("tbody", {}, ...adapter.versions.map((version) => this.versionRow(adapter, full, version))))),
      h("p", { className: "note error", id: "change-error", role: "alert", hidden: true }),
    ].filter(Boolean);
  }

  tagRow(adapter, full, tag) {
    const moves = (adapter.history?.[tag.tag] ?? []).slice(0, 5).map((move) => `${when(move.at_unix_s)} ${targets(move.targets) || "deleted"}${move.by ? ` by ${move.by}` : ""}`);
    return h("tr", {},
      h("td", { className: "name" }, tag.tag), h("td", {}, targets(tag.targets)),
      h("td", {}, h("ul", { className: "moves", "aria-label": `History of ${tag.tag}` }, ...moves.map((move) => h("li", {}, move)))),
      h("td", { className: "last" }, adapter.may_change ? h("button", { className: "quiet", type: "button",
        onclick: () => this.change(full, { action: "rollback", tag: tag.tag }, `Roll ${tag.tag} back?`) }, "Roll back") : null));
  }

  versionRow(adapter, full, version) {
    const labels = Object.entries(version.labels ?? {}).map(([name, value]) => `${name}=${value}`);
    return h("tr", {},
      h("td", { className: "name" }, `v${version.number}`), h("td", {}, h("code", { title: version.digest }, version.digest.slice(7, 19))),
      h("td", {}, when(version.created_unix_s)), h("td", { className: "number" }, version.size_bytes ? bytes(version.size_bytes) : ""),
      h("td", {}, labels.join(", ")),
      h("td", {}, version.num_workers ? h("span", { className: "chip device" }, `on ${version.num_workers}`) : null),
      h("td", { className: "last" }, adapter.may_change ? h("button", { className: "quiet", type: "button", "aria-label": `Delete v${version.number}`,
        onclick: () => this.change(full, { action: "delete", version: version.number }, `Delete v${version.number}? Its number is never used again.`) }, "Delete") : null));
  }

  descriptionForm(full, description) {
    const text = h("input", { value: description, maxLength: 256, placeholder: "What is it for?", "aria-label": "Description" });
    const form = h("form", { className: "row", autocomplete: "off" }, text, h("button", { className: "quiet", type: "submit" }, "Describe"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.change(full, { action: "describe", description: text.value }, "Change the description?");
    });
    return form;
  }

  tagForm(full) {
    const tag = h("input", { placeholder: "tag", "aria-label": "Tag", required: true });
    const target = h("input", { placeholder: "v3, or v3=90 v4=10", "aria-label": "Versions", required: true });
    const form = h("form", { className: "row", autocomplete: "off" }, tag, target, h("button", { className: "quiet", type: "submit" }, "Move the tag"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const targets = {};
      for (const part of target.value.trim().split(/\s+/)) {
        const [version, weight] = part.replace(/^v/, "").split("=");
        targets[version] = Number(weight ?? 1);
      }
      this.change(full, { action: "tag", tag: tag.value.trim(), targets }, `Point ${tag.value.trim()} at ${target.value.trim()}?`);
    });
    return form;
  }

  async change(full, what, question) {
    if (!confirm(question)) return;
    try {
      await post("/console/adapter", { name: full, ...what });
      setTimeout(() => this.openOne(full), 300); // a moved tag reaches the gateway a moment later
    } catch (error) {
      byId("change-error").textContent = error.message;
      byId("change-error").hidden = false;
    }
  }
}

export function copyButton(text, label) {
  const button = h("button", { className: "quiet", type: "button", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    await copy(typeof text === "function" ? text() : text, button);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** Browsers offer their clipboard only to pages that came by HTTPS or from this machine. */
async function copy(text, button) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { value: text, className: "hidden" });
  button.after(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  button.focus();
}

function when(unixS) {
  return unixS ? new Date(1000 * unixS).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "–";
}

function targets(all) {
  const weights = all.reduce((sum, target) => sum + target.weight, 0);
  return all.length === 1 ? `v${all[0].number}` : all.map((target) => `v${target.number} ${Math.round(100 * target.weight / weights)}%`).join(" · ");
}

function tagChip(tag) {
  const pending = tag.pending.length ? ` → v${tag.pending.map((target) => target.number).join(", v")} pending` : "";
  return h("li", { className: pending ? "chip loading" : "chip" }, `${tag.tag}: ${targets(tag.targets)}${pending}`);
}
