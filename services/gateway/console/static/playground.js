// One prompt for several models, answered side by side.

import { copyButton } from "./adapters.js";
import { NeedsKey, stream } from "./api.js";
import { byId, count, duration, h } from "./dom.js";

const MAX_PICKED = 8;
const KEPT = "loraplex-playground";
const FIELDS = ["prompt", "system", "mode", "max-tokens", "temperature", "seed"];
const MAX_COMPARED_WORDS = 600;

export class Playground {
  constructor(onNeedsKey) {
    this.onNeedsKey = onNeedsKey;
    this.picked = [];
    this.running = null;
    this.answers = [];
    this.isNew = !this.restore();
    for (const name of FIELDS) byId(name).addEventListener("input", () => this.keep());
    byId("mode").addEventListener("change", () => this.showMode());
    for (const name of ["left", "right"]) byId(name).addEventListener("change", () => this.compare());
    this.showMode();
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("add").addEventListener("click", () => this.addTyped());
    byId("pick").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.ctrlKey) { event.preventDefault(); this.addTyped(); }
    });
    byId("ask").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.run(); }
    });
  }

  /** What the form held when this tab was last here; false if it never was. */
  restore() {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
    if (!kept) return false;
    for (const name of FIELDS) byId(name).value = kept[name] ?? "";
    this.picked = kept.picked;
    this.show();
    return true;
  }

  keep() {
    const fields = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
    sessionStorage.setItem(KEPT, JSON.stringify({ ...fields, picked: this.picked }));
  }

  /** Begin with a base, and with chat where it has a template. */
  offer(bases) {
    if (!this.isNew || !bases.length) return;
    this.isNew = false;
    if (bases[0].can_chat) byId("mode").value = "chat";
    if (!this.picked.length) this.add(bases[0].id);
    this.showMode();
  }

  showMode() {
    byId("system").hidden = byId("system-label").hidden = byId("mode").value !== "chat";
  }

  addTyped() {
    const typed = byId("pick").value.trim();
    if (typed) this.add(typed);
    byId("pick").value = "";
  }

  add(model) {
    if (!this.picked.includes(model) && this.picked.length < MAX_PICKED) this.picked.push(model);
    this.show();
    this.keep();
  }

  show() {
    byId("picked").replaceChildren(...this.picked.map((model) => h("span", { role: "listitem" }, model,
      h("button", { type: "button", "aria-label": `Remove ${model}`, onclick: () => {
        this.picked = this.picked.filter((other) => other !== model);
        this.show();
        this.keep();
      } }, "×"))));
  }

  async run() {
    this.addTyped();
    const lacking = byId("prompt").value ? (this.picked.length ? "" : "pick") : "prompt";
    byId("run-note").textContent = { prompt: "Write a prompt first.", pick: "Choose a model first.", "": "" }[lacking];
    if (lacking) return byId(lacking).focus();
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    byId("stop").disabled = false;
    const answers = this.picked.map((model) => new Answer(model));
    this.answers = answers;
    byId("compare").hidden = true;
    byId("difference").replaceChildren();
    byId("answers").replaceChildren(...answers.map((answer) => answer.element));
    byId("answers").setAttribute("aria-busy", "true");
    await Promise.all(answers.map((answer) => answer.ask(this.question(answer.model), running.signal, this.onNeedsKey)));
    if (this.running !== running) return;
    byId("stop").disabled = true;
    byId("answers").removeAttribute("aria-busy");
    this.offerComparison();
  }

  offerComparison() {
    byId("compare").hidden = this.answers.length < 2;
    for (const [index, name] of ["left", "right"].entries()) {
      byId(name).replaceChildren(h("option", { value: "" }, "–"), ...this.answers.map((answer, index) => h("option", { value: index }, answer.model)));
      byId(name).value = this.answers.length > 2 ? "" : String(index);
    }
    this.compare();
  }

  compare() {
    const [left, right] = ["left", "right"].map((name) => this.answers[byId(name).value]);
    if (!left || !right || left === right) return byId("difference").replaceChildren();
    const [first, second] = difference(words(left.text.textContent), words(right.text.textContent));
    byId("difference").replaceChildren(...[[left, first], [right, second]].map(([answer, parts]) =>
      h("article", { className: "answer", "aria-label": `Difference of ${answer.model}` }, h("h2", {}, answer.model),
        h("pre", {}, ...parts.map(([word, isCommon]) => (isCommon ? word : h("mark", {}, word)))))));
  }

  question(model) {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const body = { model, max_tokens: number("max-tokens"), temperature: number("temperature"), seed: number("seed") };
    const [prompt, system] = [byId("prompt").value, byId("system").value];
    return byId("mode").value === "chat"
      ? ["/v1/chat/completions", { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }] }]
      : ["/v1/completions", { ...body, prompt }];
  }
}

class Answer {
  constructor(model) {
    this.model = model;
    this.version = h("span", {});
    this.thought = h("pre", { className: "thought", hidden: true });
    this.text = h("pre", { tabIndex: 0, "aria-label": `Answer of ${model}` });
    this.facts = h("p", { role: "status" }, "waiting");
    this.element = h("article", { className: "answer busy", "aria-label": model },
      h("h2", {}, model, this.version, copyButton(() => this.text.textContent, `Copy the answer of ${model}`)), this.thought, this.text, this.facts);
  }

  async ask([path, body], signal, onNeedsKey) {
    const beganMs = performance.now();
    let firstMs = null;
    let usage = null;
    let reason = "";
    try {
      for await (const [kind, value] of stream(path, body, signal)) {
        if (kind === "served") { this.version.textContent = value.split(":").at(-1); continue; }
        usage = value.usage ?? usage;
        const choice = value.choices[0];
        if (!choice) continue;
        const said = choice.text ?? choice.delta.content ?? "";
        const thought = choice.delta?.reasoning ?? "";
        if (said || thought) firstMs ??= performance.now();
        if (thought) { this.thought.hidden = false; this.thought.append(thought); }
        this.text.append(said);
        reason = choice.finish_reason ?? reason;
      }
      this.done(beganMs, firstMs, usage, reason);
    } catch (error) {
      if (error instanceof NeedsKey) onNeedsKey(error);
      this.failed(signal.aborted ? "stopped" : error.message, signal.aborted);
    }
    this.element.classList.remove("busy");
  }

  done(beganMs, firstMs, usage, reason) {
    const facts = [[count(usage?.completion_tokens ?? 0), "tokens"]];
    if (firstMs !== null) facts.push([duration((firstMs - beganMs) / 1000).join(" "), "to first"]);
    facts.push([duration((performance.now() - beganMs) / 1000).join(" "), "in all"], [reason, ""]);
    this.facts.replaceChildren(...facts.map(([value, name]) => h("span", {}, h("b", {}, value), name && ` ${name}`)));
  }

  failed(why, wasStopped) {
    this.facts.replaceChildren(h("span", { className: wasStopped ? "" : "error" }, why));
    this.element.classList.toggle("failed", !wasStopped);
  }
}

function words(text) {
  return (text.match(/\s*\S+|\s+$/g) ?? []).slice(0, MAX_COMPARED_WORDS);
}

/** The words of two texts, each with whether it belongs to their longest common sequence. */
function difference(left, right) {
  const lengths = Array.from({ length: left.length + 1 }, () => new Uint16Array(right.length + 1));
  for (let i = left.length - 1; i >= 0; i--) {
    for (let j = right.length - 1; j >= 0; j--) {
      lengths[i][j] = left[i] === right[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const [first, second] = [[], []];
  let [i, j] = [0, 0];
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && left[i] === right[j]) {
      first.push([left[i++], true]);
      second.push([right[j++], true]);
    } else if (j >= right.length || (i < left.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
      first.push([left[i++], false]);
    } else {
      second.push([right[j++], false]);
    }
  }
  return [first, second];
}
