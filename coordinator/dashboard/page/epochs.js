// The work units of the epoch, as a map of squares: trained on, assigned to whom, free.

import { h, panel, write } from "./dom.js";
import { amount, count, plural, share } from "./units.js";

const SQUARES = 400;
const SHADES = 6; // of those that are assigned: neighbours differ

export function makeEpochs() {
  const map = h("div", { class: "units", role: "img" });
  const said = h("p", {});
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
    if (!epoch) return write(said, "No epoch has begun.");
    const assigned = Object.entries(epoch.assigned).sort();
    const taken = assigned.reduce((sum, [, units]) => sum + units, 0);
    const whole = epoch.units ?? epoch.consumed + taken;
    const whose = epoch.worker === null ? "" : ` of ${epoch.worker}'s own data`;
    const free = epoch.free === null ? "" : `, ${count(epoch.free)} free`;
    const done = `${count(epoch.consumed)} of ${amount(whole, "units")} trained on (${share(whole ? epoch.consumed / whole : null)})`;
    const underWay = `${count(taken)} assigned to ${plural(assigned.length, "worker")}`;
    write(said, `Epoch ${epoch.epoch}${whose}: ${done}, ${underWay}${free}.`);
    const each = Math.max(1, Math.ceil(whole / SQUARES));
    const others = model.epochs.length - 1;
    const known = others ? ` The coordinator also knows ${plural(others, "other epoch")}.` : "";
    write(rest, `A square is ${plural(each, "unit")}; they are ordered by what became of them.${known}`);
    draw(epoch, assigned, whole, each);
  }

  function draw(epoch, assigned, whole, each) {
    const state = JSON.stringify([epoch, each]);
    if (state === drawn) return;
    drawn = state;
    // Each square is of whoever has the unit at its beginning.
    const ofWorkers = assigned.map(([worker, units], i) => [
      `assigned shade-${i % SHADES}`,
      units,
      `assigned to ${worker}`,
    ]);
    const parts = [["consumed", epoch.consumed, "trained on"], ...ofWorkers];
    const squares = [];
    let [part, until] = [0, parts[0][1]];
    for (let unit = 0; unit < whole; unit += each) {
      while (part < parts.length && unit >= until) {
        part += 1;
        until += parts[part]?.[1] ?? 0;
      }
      const [kind, , title] = parts[part] ?? ["free", 0, "free"];
      squares.push(h("i", { class: kind, title }));
    }
    map.setAttribute("aria-label", said.textContent);
    map.replaceChildren(...squares);
  }

  return { element: panel("Work units", "third", said, map, legend, rest), update };
}
