// Training and held-out loss by round, tokens or wall time.

import { chart } from "./charts.js";
import { button, h, panel, write } from "./dom.js";
import { ASKING, loss, plural } from "./units.js";

const BY = {
  round: { label: "Round", x: "round", of: ({ round }) => round.round },
  tokens: { label: "Tokens", x: "million tokens", of: ({ before }) => before / 1e6 },
  time: { label: "Wall time", x: "minutes since the run was created", of: ({ at_s }) => at_s / 60 },
};

export function makeLosses() {
  const { element, draw } = chart();
  const summary = h("p", { class: "quiet" });
  let by = "round";
  let model = null;
  const buttons = Object.entries(BY).map(([key, { label }]) =>
    button(label, () => choose(key), "", { "aria-pressed": String(key === by), "data-by": key }),
  );
  const choices = h("div", { class: "choices", role: "group", "aria-label": "Loss by" }, buttons);

  function choose(key) {
    by = key;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.by === key));
    update(model);
  }

  function update(now) {
    model = now;
    const rounds = model.published;
    const { x, of } = BY[by];
    let tokens = 0;
    const training = { name: "training", colour: "accent", x: [], y: [], hover: "%{y:.4f} nats/token" };
    const heldOut = { name: "held-out", colour: "second", x: [], y: [], hover: "%{y:.4f} nats/token" };
    for (const round of rounds) {
      // The held-out loss belongs to the state at the round's start, the training loss to its end.
      if (round.held_out_loss !== null) {
        heldOut.x.push(of({ round, before: tokens, at_s: round.opened_at - model.run.created_at }));
        heldOut.y.push(round.held_out_loss);
      }
      tokens += round.tokens;
      if (round.loss === null) continue;
      training.x.push(of({ round, before: tokens, at_s: round.closed_at - model.run.created_at }));
      training.y.push(round.loss);
    }
    draw([training, heldOut], { x, y: "nats per token", counts: by === "round" });
    const went = [heldOut, training].filter((line) => line.y.length > 1);
    const ways = went.map((line) => `${line.name} ${loss(line.y[0])} → ${loss(line.y.at(-1))}`).join(", ");
    const text = `In nats per token, over ${plural(rounds.length, "round")}: ${ways}.`;
    write(summary, ways ? text : model.hasRounds ? "Fewer than two rounds have closed." : ASKING);
  }

  return { element: panel("Loss", "two-thirds", choices, element, summary), update };
}
