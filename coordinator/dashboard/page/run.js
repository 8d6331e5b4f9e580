// The view of one run: its panels, in the order on the page.

import { RunModel } from "./run_model.js";
import { h, write } from "./dom.js";
import { makeEpochs } from "./epochs.js";
import { makeEvents } from "./events.js";
import { makeFigures } from "./figures.js";
import { makeLosses } from "./losses.js";
import { makeReason, stateBadge } from "./reason.js";
import { makeSteering } from "./steering.js";
import { makeTimeline } from "./timeline.js";
import { makeTraffic } from "./traffic.js";
import { makeVerdicts } from "./verdicts.js";
import { makeWorkers } from "./workers.js";

/** Show a run until the returned function is called. */
export function showRun(root, session, ended, name) {
  const model = new RunModel(session.api, name, () => soon(), ended);
  const refresh = () => model.refresh();
  const steering = makeSteering(session, name, refresh);
  const parts = [
    makeReason(),
    makeFigures(),
    makeLosses(session, name),
    makeTraffic(),
    makeTimeline(),
    makeWorkers(session, name, refresh),
    makeEpochs(),
    makeEvents(),
    makeVerdicts(),
  ];
  const badge = h("span", {});
  const grid = h(
    "div",
    { class: "grid", hidden: true },
    parts.map((part) => part.element),
  );
  const asking = h("p", { class: "quiet", role: "status" }, "Loading the run …");
  root.append(h("div", { class: "title" }, h("h1", {}, name), badge, steering.element), asking, grid);

  let due = false;
  function soon() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (model.run === null) return write(asking, model.trouble ?? asking.textContent);
      asking.remove();
      grid.hidden = false;
      badge.replaceChildren(stateBadge(model.run, model.trouble));
      for (const part of [steering, ...parts]) part.update(model);
    });
  }

  model.start();
  return () => {
    model.stop();
    for (const part of parts) part.stop?.();
  };
}
