// One prompt for several models, answered side by side.

import { NeedsKey, stream } from "./api.js";
import { byId, count, duration, h } from "./dom.js";

const MAX_PICKED = 8;

export class Playground {
  constructor(onNeedsKey) {
    this.onNeedsKey = onNeedsKey;
    this.picked = [];
    this.running = null;
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

  addTyped() {
    const typed = byId("pick").value.trim();
    if (typed) this.add(typed);
    byId("pick").value = "";
  }

  add(model) {
    if (!this.picked.includes(model) && this.picked.length < MAX_PICKED) this.picked.push(model);
    this.show();
  }

  show() {
    byId("picked").replaceChildren(...this.picked.map((model) => h("span", { role: "listitem" }, model,
      h("button", { type: "button", "aria-label": `Remove ${model}`, onclick: () => {
        this.picked = this.picked.filter((other) => other !== model);
        this.show();
      } }, "×"))));
  }

  async run() {
    this.addTyped();
    if (!byId("prompt").value) return byId("prompt").focus();
    if (!this.picked.length) return byId("pick").focus();
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    byId("stop").disabled = false;
    const answers = this.picked.map((model) => new Answer(model));
    byId("answers").replaceChildren(...answers.map((answer) => answer.element));
    byId("answers").setAttribute("aria-busy", "true");
    await Promise.all(answers.map((answer) => answer.ask(this.question(answer.model), running.signal, this.onNeedsKey)));
    if (this.running !== running) return;
    byId("stop").disabled = true;
    byId("answers").removeAttribute("aria-busy");
  }

  question(model) {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    const body = { model, max_tokens: number("max-tokens"), temperature: number("temperature"), seed: number("seed") };
    const prompt = byId("prompt").value;
    return byId("mode").value === "chat"
      ? ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }]
      : ["/v1/completions", { ...body, prompt }];
  }
}

class Answer {
  constructor(model) {
    this.model = model;
    this.version = h("span", {});
    this.thought = h("pre", { className: "thought", hidden: true });
    this.text = h("pre", { tabIndex: 0, "aria-label": `Answer of ${model}` });
    this.facts = h("footer", { role: "status" }, "waiting");
    this.element = h("article", { className: "answer busy", "aria-label": model },
      h("h3", {}, model, this.version), this.thought, this.text, this.facts);
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
