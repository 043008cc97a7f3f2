// Small helpers: elements, numbers for people.

/** An element with properties and children; text children are always text, never markup. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "role") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (value < 1) return String(+value.toFixed(2));
  return value >= 9.95 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

/** Seconds as [number, unit]. */
export function duration(seconds) {
  if (seconds === null) return ["–", ""];
  if (seconds < 1) return [(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0), "ms"];
  return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
}

export function bytes(value) {
  if (value >= 1 << 20) return `${(value / (1 << 20)).toFixed(1)} MiB`;
  return `${Math.round(value / 1024)} KiB`;
}
