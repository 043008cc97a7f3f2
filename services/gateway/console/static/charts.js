// Line charts of a range up to now, drawn as SVG, with a crosshair under the pointer.

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

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds <= 5400 ? `${Math.round(seconds / 60)} min` : `${+(seconds / 3600).toFixed(1)} h`;
}

export class Chart {
  /** series: [{name, show}], show turns a value into text. */
  constructor(title, series) {
    this.title = title;
    this.series = series;
    this.rangeS = 1;
    this.points = [];
    this.pointer = null;
    this.keys = series.map((each, index) => h("span", { className: `key s${index}` }, each.name));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
    this.heading = h("span", {}, title);
    this.element = h("div", { className: "chart" }, h("h3", {}, this.heading, ...this.keys), this.picture);
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      this.pointer = (event.clientX - box.left) / box.width * this.width;
      this.draw();
    });
    this.picture.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
  }

  get width() { return this.picture.clientWidth || WIDTH; }

  /** points: [{ageS, values}], oldest first; a value is null where there is none. */
  set(points, rangeS) {
    this.points = points;
    this.rangeS = rangeS;
    this.draw();
  }

  draw() {
    if (!this.points.length) return;
    const width = this.width;
    const top = roundedUp(Math.max(...this.points.flatMap((p) => p.values.map((v) => v ?? 0))));
    const x = (ageS) => width - ageS / this.rangeS * (width - LEFT);
    const y = (value) => 6 + (1 - value / top) * (HEIGHT - BOTTOM - 6);
    const parts = [0, 0.5, 1].flatMap((share) => [
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(share * top), y2: y(share * top) }),
      svg("text", { x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" }, this.series[0].show(share * top).replace(/(\.\d*[1-9])0+(?= |$)|\.0+(?= |$)/, "$1")),
    ]);
    parts.push(svg("text", { x: LEFT, y: HEIGHT - 3 }, `−${ago(this.rangeS)}`));
    parts.push(svg("text", { x: width, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
    this.series.forEach((_, index) => parts.push(...this.curve(index, x, y)));
    const shown = this.pointed(x) ?? this.points.at(-1);
    if (this.pointer !== null) {
      parts.push(svg("line", { class: "grid", x1: x(shown.ageS), x2: x(shown.ageS), y1: 0, y2: HEIGHT - BOTTOM }));
    }
    shown.values.forEach((value, index) => {
      if (value !== null) parts.push(svg("circle", { class: `dot s${index}`, cx: x(shown.ageS), cy: y(value), r: 4 }));
    });
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(...parts);
    this.describe(shown);
  }

  curve(index, x, y) {
    const runs = [[]];
    for (const { ageS, values } of this.points) {
      if (values[index] === null) runs.push([]);
      else runs.at(-1).push([x(ageS), y(values[index])]);
    }
    return runs.filter((run) => run.length).flatMap((run) => {
      if (run.length === 1) return [svg("circle", { class: `mark s${index}`, cx: run[0][0], cy: run[0][1], r: 1.6 })];
      const line = run.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join("L");
      const area = `M${line}L${run.at(-1)[0]},${y(0)}L${run[0][0]},${y(0)}Z`;
      const fill = index === 0 ? [svg("path", { class: "area s0", d: area })] : [];
      return [...fill, svg("path", { class: `line s${index}`, d: `M${line}` })];
    });
  }

  pointed(x) {
    if (this.pointer === null) return null;
    const distance = (point) => Math.abs(x(point.ageS) - this.pointer);
    return this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
  }

  describe({ ageS, values }) {
    const texts = this.series.map((each, index) => `${each.name} ${values[index] === null ? "–" : each.show(values[index])}`);
    texts.forEach((text, index) => { this.keys[index].textContent = text; });
    this.heading.textContent = this.pointer === null ? this.title : `${this.title}, ${ago(ageS)} ago`;
    this.picture.setAttribute("aria-label", `${this.title} now: ${texts.join(", ")}`);
  }
}
