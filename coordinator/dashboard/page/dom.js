// Builds elements. Children are always inserted as text, never parsed as HTML: names, hosts and sentences are untrusted.

/** Return an element: `h("p", { class: "quiet" }, "text", child)`. Attributes "on…" add listeners; null is skipped. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Set an element's text if it differs, so that a screen reader does not read the same sentence twice. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Return a button. `kind`: "" or "danger" or "primary". */
export function button(label, onclick, kind = "", attributes = {}) {
  return h("button", { type: "button", class: kind || null, onclick, ...attributes }, label);
}

let fields = 0;

/** Return a form field with its label, and `hint` below it. */
export function field(label, control, hint = null) {
  control.id = `field-${(fields += 1)}`;
  if (hint) control.setAttribute("aria-describedby", `${control.id}-hint`);
  return h(
    "div",
    { class: "field" },
    h("label", { for: control.id }, label),
    control,
    hint && h("small", { id: `${control.id}-hint` }, hint),
  );
}

/** Return a part of the page with a heading. */
export function panel(title, classes, ...children) {
  return h("section", { class: `panel ${classes}`, "aria-label": title }, h("h2", {}, title), ...children);
}

const SVG = "http://www.w3.org/2000/svg";

/** Return a small line chart of `values` (null: unknown). */
export function sparkline(values, label) {
  const known = values.filter((value) => value !== null);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "sparkline");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  if (known.length < 2) return svg;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = known.map((value, i) => `${(100 * i) / (known.length - 1)},${22 - (20 * (value - low)) / span}`);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}
