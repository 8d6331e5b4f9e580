// What the run is doing or waiting for, in large type, with a countdown.

import { openRound } from "./derived.js";
import { h, write } from "./dom.js";
import { UNKNOWN, countdown, duration } from "./units.js";

const STATES = {
  seeding: "waiting for its first state",
  running: "training",
  paused: "paused",
  draining: "draining: its workers leave after their round",
  finished: "finished",
  stopped: "stopped",
};

const CAUSES = {
  "files-damaged": "files damaged",
  "storage-full": "disk full",
  "storage-unavailable": "storage unavailable",
  "worker-silent": "worker silent",
};

/** Return a run's badge: its state, or what holds it up. `trouble`: the coordinator does not answer, so both are
 * unknown. */
export function stateBadge({ state, held_up_by: cause }, trouble = null) {
  if (trouble !== null) return h("span", { class: "badge unreachable", title: `${state} when last seen` }, "unreachable");
  const title = STATES[state] ?? state;
  if (cause && (state === "running" || state === "seeding"))
    return h("span", { class: `badge held-up ${cause}`, title }, CAUSES[cause] ?? cause);
  return h("span", { class: `badge ${state}`, title }, state);
}

export function makeReason() {
  const sentence = h("p", { class: "sentence" });
  const aloud = h("p", { class: "unseen", "aria-live": "polite" }); // the same for screen readers, without the countdown
  const clock = h("p", { class: "clock", role: "timer" });
  const clockSays = h("p", { class: "quiet" });
  const done = h("progress", { "aria-label": "rounds" });
  const progress = h("p", { class: "quiet" });
  const element = h(
    "section",
    { class: "panel wide now", "aria-label": "Now" },
    h("div", {}, sentence, aloud, progress),
    h("div", { class: "deadline" }, clock, clockSays),
    done,
  );
  let closes_at = null;

  const tick = () => {
    element.classList.toggle("timed", closes_at !== null);
    if (closes_at !== null) write(clock, countdown((closes_at - performance.now()) / 1000));
  };

  function update(model) {
    const { run } = model;
    const open = openRound(model.current);
    element.classList.toggle("troubled", model.trouble !== null || run.held_up_by !== null);
    write(sentence, model.trouble ?? run.reason);
    write(aloud, sentence.textContent.replace(/; closes in [\d.]+ s|: last heard .*? s(?=;)/g, ""));
    done.max = run.rounds;
    done.value = run.round;
    const parts = [`${run.round} of ${run.rounds} rounds done`];
    if (open && run.live_workers)
      parts.push(`${open.sent.size} of ${run.live_workers} workers have sent all of round ${open.round}`);
    if (run.state === "running" && run.round && run.eta_s !== 0)
      parts.push(`${model.trouble === null ? duration(run.eta_s) : UNKNOWN} to go`);
    write(progress, parts.join(" · "));
    const isTimed = open?.closes_in_s != null && run.state !== "stopped" && model.trouble === null;
    closes_at = isTimed ? model.asked_at + 1000 * open.closes_in_s : null;
    write(clockSays, closes_at === null ? "" : `until round ${open.round} closes`);
    tick();
  }

  const timer = setInterval(tick, 500);
  return { element, update, stop: () => clearInterval(timer) };
}
