// Line charts of the last minutes, drawn as SVG, with a crosshair under the pointer.

import { h } from "./dom.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, BOTTOM] = [400, 132, 46, 18];

function svg(tag, attributes, text = "") {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

/** The next of 1, 2, 5, 10, ... that is not below `value`. */
function roundedUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  /** series: [{name, show}], show turns a value into text. */
  constructor(title, series, windowS) {
    this.title = title;
    this.series = series;
    this.windowS = windowS;
    this.points = [];
    this.pointer = null;
    this.keys = series.map((each, place) => h("span", { className: `key s${place}` }, each.name));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
    this.element = h("div", { className: "chart" }, h("h3", {}, h("span", {}, title), ...this.keys), this.picture);
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      this.pointer = (event.clientX - box.left) / box.width * this.width;
      this.draw();
    });
    this.picture.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
  }

  get width() { return this.picture.clientWidth || WIDTH; }

  add(timeS, values) {
    this.points.push({ timeS, values });
    while (this.points[0].timeS < timeS - this.windowS) this.points.shift();
    this.draw();
  }

  draw() {
    if (!this.points.length) return;
    const width = this.width;
    const now = this.points.at(-1).timeS;
    const top = roundedUp(Math.max(...this.points.flatMap((p) => p.values.map((v) => v ?? 0))));
    const x = (timeS) => width - (now - timeS) / this.windowS * (width - LEFT);
    const y = (value) => 6 + (1 - value / top) * (HEIGHT - BOTTOM - 6);
    const parts = [0, 0.5, 1].flatMap((share) => [
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(share * top), y2: y(share * top) }),
      svg("text", { x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" }, this.series[0].show(share * top).replace(/(\.\d*[1-9])0+(?= |$)|\.0+(?= |$)/, "$1")),
    ]);
    parts.push(svg("text", { x: LEFT, y: HEIGHT - 3 }, `−${this.windowS / 60} min`));
    parts.push(svg("text", { x: width, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
    this.series.forEach((_, place) => parts.push(...this.curve(place, x, y)));
    const shown = this.pointed(x) ?? this.points.at(-1);
    if (this.pointer !== null) {
      parts.push(svg("line", { class: "grid", x1: x(shown.timeS), x2: x(shown.timeS), y1: 0, y2: HEIGHT - BOTTOM }));
    }
    shown.values.forEach((value, place) => {
      if (value !== null) parts.push(svg("circle", { class: `dot s${place}`, cx: x(shown.timeS), cy: y(value), r: 4 }));
    });
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(...parts);
    this.describe(shown);
  }

  curve(place, x, y) {
    const runs = [[]];
    for (const { timeS, values } of this.points) {
      if (values[place] === null) runs.push([]);
      else runs.at(-1).push([x(timeS), y(values[place])]);
    }
    return runs.filter((run) => run.length > 1).flatMap((run) => {
      const line = run.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join("L");
      const area = `M${line}L${run.at(-1)[0]},${y(0)}L${run[0][0]},${y(0)}Z`;
      const fill = place === 0 ? [svg("path", { class: "area s0", d: area })] : [];
      return [...fill, svg("path", { class: `line s${place}`, d: `M${line}` })];
    });
  }

  pointed(x) {
    if (this.pointer === null) return null;
    const distance = (point) => Math.abs(x(point.timeS) - this.pointer);
    return this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
  }

  describe({ values }) {
    const texts = this.series.map((each, place) => `${each.name} ${values[place] === null ? "–" : each.show(values[place])}`);
    texts.forEach((text, place) => { this.keys[place].textContent = text; });
    this.picture.setAttribute("aria-label", `${this.title} now: ${texts.join(", ")}`);
  }
}
