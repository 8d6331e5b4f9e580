// Verdicts: contributions that did not count in full, and workers that diverged from the run's state.

import { SHOWN_ROUNDS } from "./run_model.js";
import { judged } from "./derived.js";
import { h, panel, write } from "./dom.js";
import { ASKING, plural, share } from "./units.js";

const SHOWN = 12;

export function makeVerdicts() {
  const summary = h("p", {});
  const list = h("ul", { class: "lines" });
  let drawn = null;

  function update(model) {
    const found = judged(model.lastDetails);
    const diverged = (model.workers ?? []).filter((each) => each.divergences);
    const rounds = Math.min(SHOWN_ROUNDS, model.details.size);
    const times = model.run.divergences;
    const last = `of the last ${plural(rounds, "round")}`;
    const counted = found.length
      ? `${plural(found.length, "contribution")} ${last} did not count in full.`
      : `All contributions ${last} counted in full.`;
    const agreed = times
      ? `A worker diverged from the run's state ${plural(times, "time")}, and resynced.`
      : "Every compared replica was bit-identical to the run's state.";
    if (!rounds && !model.hasDetails) write(summary, ASKING);
    else write(summary, `${rounds ? counted : "No round has been judged yet."} ${agreed}`);
    const lines = [
      ...diverged.map((each) => [each.name, `diverged ${plural(each.divergences, "time")}`]),
      ...found
        .slice(0, SHOWN)
        .map((each) => [each.worker, `round ${each.round}: counted ${share(each.factor)}. ${each.reason}`]),
    ];
    const state = JSON.stringify(lines);
    if (state !== drawn) list.replaceChildren(...lines.map(([who, what]) => h("li", {}, h("b", {}, who), " ", what)));
    drawn = state;
  }

  return { element: panel("Verdicts", "third", summary, list), update };
}
