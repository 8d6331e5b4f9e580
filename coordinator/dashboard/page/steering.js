// Pause, resume, drain, stop: for whoever may.

import { runPath } from "./api.js";
import { ask, attempt, tell } from "./dialogs.js";
import { button, h } from "./dom.js";

// What may be asked of a run in each of its states.
const MAY = {
  seeding: ["paused", "draining", "stopped"],
  running: ["paused", "draining", "stopped"],
  paused: ["running", "draining", "stopped"],
  draining: ["running", "stopped"],
};
const ACTS = {
  running: { label: "Resume", done: "The run goes on." },
  paused: { label: "Pause", done: "The run is paused: the open round closes as usual, and no other opens." },
  draining: { label: "Drain", done: "The run is draining: its workers leave once their round is over." },
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
    if (done) tell(ACTS[to].done);
    refresh();
  }

  function stop() {
    return ask({
      title: `Stop ${name}?`,
      content: [
        h(
          "p",
          {},
          "The run is over then and cannot go on: the open round is given up. A checkpoint of its last state is kept. To have it rest, pause it.",
        ),
      ],
      does: "Stop the run",
      kind: "danger",
      act: () => change("stopped"),
    });
  }

  return { element, update };
}
