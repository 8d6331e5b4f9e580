// One run: its parts, in the order in which they are looked at.

import { Following } from "./following.js";
import { h, write } from "./dom.js";
import { makeEpochs } from "./epochs.js";
import { makeEvents } from "./events.js";
import { makeFigures } from "./figures.js";
import { makeJudgements } from "./judgements.js";
import { makeLosses } from "./losses.js";
import { makeReason, stateBadge } from "./reason.js";
import { makeSteering } from "./steering.js";
import { makeTimeline } from "./timeline.js";
import { makeTraffic } from "./traffic.js";
import { makeWorkers } from "./workers.js";

/** Show a run until the function that is returned is called. */
export function showRun(root, session, ended, name) {
  const following = new Following(session.api, name, () => soon(), ended);
  const refresh = () => following.refresh();
  const steering = makeSteering(session, name, refresh);
  const parts = [
    makeReason(),
    makeFigures(),
    makeLosses(),
    makeTraffic(),
    makeTimeline(),
    makeWorkers(session, name, refresh),
    makeEpochs(),
    makeEvents(),
    makeJudgements(),
  ];
  const badge = h("span", {});
  const grid = h(
    "div",
    { class: "grid", hidden: true },
    parts.map((part) => part.element),
  );
  const asking = h("p", { class: "quiet", role: "status" }, "Asking for the run …");
  root.append(h("div", { class: "title" }, h("h1", {}, name), badge, steering.element), asking, grid);

  let due = false;
  function soon() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (following.run === null) return write(asking, following.trouble ?? asking.textContent);
      asking.remove();
      grid.hidden = false;
      badge.replaceChildren(stateBadge(following.run, following.trouble));
      for (const part of [steering, ...parts]) part.update(following);
    });
  }

  following.start();
  return () => {
    following.stop();
    for (const part of parts) part.stop?.();
  };
}
