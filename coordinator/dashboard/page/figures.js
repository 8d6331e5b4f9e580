// The run's main figures, each with its unit and a short explanation.

import { goodput, speed, traffic } from "./derived.js";
import { h, write } from "./dom.js";
import { UNKNOWN, amount, bytes, count, loss, share } from "./units.js";

export function makeFigures() {
  const list = h("dl", { class: "wide tiles", "aria-label": "Figures" });
  const tiles = new Map();

  function tile(label, value, note) {
    if (!tiles.has(label)) {
      const parts = { value: h("dd", {}), note: h("dd", { class: "quiet" }) };
      tiles.set(label, parts);
      list.append(h("div", { class: "tile" }, h("dt", {}, label), parts.value, parts.note));
    }
    write(tiles.get(label).value, value);
    write(tiles.get(label).note, note);
  }

  function update(model) {
    const { run, published } = model;
    const workers = model.workers ?? [];
    const last = published.at(-1);
    const moved = traffic(run, published, workers).at(-1);
    const bits = run.held_out_bits_per_byte;
    const diverged = run.divergences;
    tile(
      "Held-out loss",
      loss(run.held_out_loss),
      bits === null ? "nats per token" : `nats per token, ${loss(bits)} bits per byte`,
    );
    tile("Training loss", loss(last?.loss), last ? `nats per token, round ${last.round}` : "nats per token");
    tile("Trained on", amount(run.tokens, "tokens"), `${count(run.step)} inner steps`);
    tile("Speed", amount(speed(published), "tokens/s"), "all workers, including sync");
    tile("Goodput", share(goodput(run.account)), "of the time in inner steps");
    tile(
      "Sent per worker",
      bytes(moved?.up),
      moved?.allreduce && moved.up ? `${count(moved.allreduce / moved.up)} × less than all-reduce` : "pseudo-gradients",
    );
    tile("Workers", `${run.live_workers} live`, model.workers ? `of ${workers.length} that ever joined` : UNKNOWN);
    tile("Divergences", String(diverged), diverged ? "times a worker had to resync" : "all replicas agree");
  }

  return { element: list, update };
}
