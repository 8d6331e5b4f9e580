// The run's events, newest first, live.

import { h, panel } from "./dom.js";
import { moment } from "./units.js";

const BAD = new Set([
  "lost",
  "late",
  "banned",
  "evicted",
  "refused",
  "quarantined",
  "diverged",
  "screened",
  "equal",
  "contribution-lost",
  "evaluations-differ",
  "evaluation-refuted",
  "epoch-broken",
  "fault",
  "storage-full",
  "storage-unavailable",
  "corrupt",
  "redone",
  "spoilt",
  "suspected",
  "rolled-back",
]);

export function makeEvents() {
  const list = h("ol", {
    class: "lines events",
    role: "log",
    "aria-live": "off",
    tabindex: "0",
    "aria-label": "Events, newest first",
  });
  let last = null;

  function update(model) {
    const events = model.events ?? [];
    const fresh = events.filter((each) => last === null || each.id > last);
    if (!fresh.length) return;
    last = fresh.at(-1).id;
    list.prepend(...fresh.reverse().map(line));
    while (list.children.length > 100) list.lastChild.remove();
  }

  return { element: panel("Events", "two-thirds tall", list), update };
}

function line(event) {
  const at = new Date(1000 * event.at).toISOString();
  return h(
    "li",
    { class: BAD.has(event.kind) ? "bad" : null },
    h("time", { datetime: at, title: at }, moment(event.at)),
    " ",
    h("span", { class: "kind" }, event.kind),
    " ",
    event.message,
  );
}
