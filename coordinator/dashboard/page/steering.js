// Buttons to pause, resume, drain and stop a run, for operators.

import { runPath } from "./api.js";
import { ask, attempt, notify } from "./dialogs.js";
import { button, h } from "./dom.js";

// The changes that are possible in each state of a run.
const MAY = {
  seeding: ["paused", "draining", "stopped"],
  running: ["paused", "draining", "stopped"],
  paused: ["running", "draining", "stopped"],
  draining: ["running", "stopped"],
};
const ACTS = {
  running: { label: "Resume", done: "The run continues." },
  paused: { label: "Pause", done: "The run is paused: the open round closes as usual, and no new round opens." },
  draining: { label: "Drain", done: "The run is draining: its workers leave when their round has closed." },
  stopped: { label: "Stop", kind: "danger", done: "The run is stopped." },
};

export function makeSteering(session, name, refresh) {
  const element = h("div", { class: "buttons", role: "group", "aria-label": "Steer the run" });
  let shown = null;

  function update(model) {
    const { state } = model.run;
    if (!session.allows("operator", name)) return;
    if (state !== shown)
      element.replaceChildren(...(MAY[state] ?? []).map((to) => button(ACTS[to].label, () => act(to), ACTS[to].kind)));
    shown = state;
    for (const each of element.children) each.disabled = model.trouble !== null;
  }

  const change = (state) => session.api.ask("PATCH", runPath(name), { json: { state } });

  async function act(to) {
    const done = to === "stopped" ? await stop() : await attempt(() => change(to));
    if (done) notify(ACTS[to].done);
    refresh();
  }

  function stop() {
    return ask({
      title: `Stop ${name}?`,
      content: [
        h(
          "p",
          {},
          "A stopped run cannot be resumed, and the open round is discarded. A checkpoint of the last state is kept. To interrupt the run, pause it.",
        ),
      ],
      does: "Stop the run",
      kind: "danger",
      act: () => change("stopped"),
    });
  }

  return { element, update };
}
