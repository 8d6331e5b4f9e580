// Bytes sent and received per worker, compared with per-step all-reduce.

import { chart } from "./charts.js";
import { traffic } from "./derived.js";
import { h, panel, write } from "./dom.js";
import { ASKING, bytes, count } from "./units.js";

export function makeTraffic() {
  const { element, draw } = chart();
  const summary = h("p", { class: "quiet" });

  function update(model) {
    const moved = traffic(model.run, model.published, model.workers ?? []);
    const x = moved.map((each) => each.round);
    const line = (name, key, colour, dash) => ({
      name,
      colour,
      dash,
      x,
      y: moved.map((each) => each[key] || null),
      labels: moved.map((each) => bytes(each[key])),
      hover: "%{customdata}",
    });
    const lines = [line("up", "up", "accent"), line("down", "down", "second")];
    const last = moved.at(-1);
    if (last?.allreduce) lines.push(line("all-reduce", "allreduce", "quiet", "dot"));
    draw(lines, { x: "round", y: "bytes per worker", log: true, counts: true });
    write(summary, last ? compared(last) : model.hasRounds ? "No round has closed yet." : ASKING);
  }

  return { element: panel("Bytes", "third", element, summary), update };
}

function compared({ up, down, allreduce, size }) {
  const moved = `${bytes(up)} up and ${bytes(down)} down per worker.`;
  if (!allreduce || !up || !down) return moved;
  const times = `${count(allreduce / up)} and ${count(allreduce / down)} times as much`;
  return `${moved} Per-step fp32 ring all-reduce of ${size} workers: ${bytes(allreduce)} each way, ${times}.`;
}
