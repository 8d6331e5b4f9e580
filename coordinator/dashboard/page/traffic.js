// What goes over each worker's line, against what per-step all-reduce would have moved.

import { chart } from "./charts.js";
import { traffic } from "./course.js";
import { h, panel, write } from "./dom.js";
import { ASKING, bytes, count } from "./units.js";

export function makeTraffic() {
  const { element, draw } = chart();
  const said = h("p", { class: "quiet" });

  function update(model) {
    const moved = traffic(model.run, model.published, model.workers ?? []);
    const x = moved.map((each) => each.round);
    const line = (name, key, colour, dash) => ({
      name,
      colour,
      dash,
      x,
      y: moved.map((each) => each[key] || null),
      said: moved.map((each) => bytes(each[key])),
      hover: "%{customdata}",
    });
    const lines = [line("up", "up", "accent"), line("down", "down", "second")];
    const last = moved.at(-1);
    if (last?.allreduce) lines.push(line("all-reduce", "allreduce", "quiet", "dot"));
    draw(lines, { x: "round", y: "bytes per worker", log: true, counts: true });
    write(said, last ? compared(last) : model.hasRounds ? "No round has closed yet." : ASKING);
  }

  return { element: panel("Bytes", "third", element, said), update };
}

function compared({ up, down, allreduce, size }) {
  const moved = `${bytes(up)} up and ${bytes(down)} down per worker.`;
  if (!allreduce || !up || !down) return moved;
  const times = `${count(allreduce / up)} and ${count(allreduce / down)} times as much`;
  return `${moved} fp32 all-reduce after each step, a ring of ${size}: ${bytes(allreduce)} each way, ${times}.`;
}
