// The work units of the newest epoch as a map of squares: trained on, assigned, free.

import { h, panel, write } from "./dom.js";
import { ASKING, amount, count, natural, plural, share } from "./units.js";

const SQUARES = 400;
const SHADES = 6; // number of shades of assigned squares, by worker

export function makeEpochs() {
  const map = h("div", { class: "units", role: "img" });
  const summary = h("p", {});
  const legend = h(
    "ul",
    { class: "legend" },
    ["consumed", "assigned", "free"].map((name) =>
      h(
        "li",
        {},
        h("i", { class: `key ${name}`, "aria-hidden": "true" }),
        { consumed: "trained on", assigned: "assigned", free: "free" }[name],
      ),
    ),
  );
  const rest = h("p", { class: "quiet" });
  let drawn = null;

  function update(model) {
    const [epoch] = model.epochs ?? [];
    map.hidden = legend.hidden = !epoch;
    if (!epoch) return write(summary, model.epochs === null ? ASKING : "No epoch has begun.");
    const assigned = Object.entries(epoch.assigned);
    const taken = assigned.reduce((sum, [, units]) => sum + units, 0);
    const whole = epoch.units ?? epoch.consumed + taken;
    const whose = epoch.worker === null ? "" : ` of ${epoch.worker}'s own data`;
    const free = epoch.free === null ? "" : `, ${count(epoch.free)} free`;
    const done = `${count(epoch.consumed)} of ${amount(whole, "units")} trained on (${share(whole ? epoch.consumed / whole : null)})`;
    const underWay = `${count(taken)} assigned to ${plural(assigned.length, "worker")}`;
    write(summary, `Epoch ${epoch.epoch}${whose}: ${done}, ${underWay}${free}.`);
    const each = Math.max(1, Math.ceil(whole / SQUARES));
    const others = model.epochs.length - 1;
    const known = others ? ` The coordinator also has ${plural(others, "earlier epoch")}.` : "";
    write(rest, `One square is ${plural(each, "unit")}, in order.${known}`);
    draw(epoch, model.ranges, whole, each);
  }

  /** Draw the squares. Each shows the state of its first unit. */
  function draw(epoch, ranges, whole, each) {
    const state = JSON.stringify([epoch, ranges, each]);
    if (state === drawn) return;
    drawn = state;
    const shades = new Map(Object.keys(epoch.assigned).sort(natural).map((worker, i) => [worker, i % SHADES]));
    const squares = [];
    let next = 0; // index into the ranges
    for (let unit = epoch.first; unit < epoch.first + whole; unit += each) {
      while (next < ranges.length && ranges[next].stop <= unit) next += 1;
      const range = ranges[next]?.start <= unit ? ranges[next] : null;
      squares.push(h("i", square(range, shades)));
    }
    map.setAttribute("aria-label", summary.textContent);
    map.replaceChildren(...squares);
  }

  return { element: panel("Work units", "third", summary, map, legend, rest), update };
}

function square(range, shades) {
  if (range === null || range.state === "free") return { class: "free", title: "free" };
  const { worker, round, consumed_round } = range;
  if (range.state === "consumed") {
    const how = worker === null ? `by the end of round ${consumed_round}` : `by ${worker} in round ${consumed_round}`;
    return { class: "consumed", title: `trained on ${how}` };
  }
  return { class: `assigned shade-${shades.get(worker) ?? 0}`, title: `assigned to ${worker} for round ${round}` };
}
