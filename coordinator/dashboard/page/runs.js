// The view of all runs, as cards.

import { Unreachable, runPath } from "./api.js";
import { createRun } from "./create.js";
import { button, h, sparkline } from "./dom.js";
import { UNKNOWN, amount, bytes, loss, natural, share } from "./units.js";
import { goodput } from "./derived.js";
import { stateBadge } from "./reason.js";

const EVERY_S = 5;
const AGE_S = 4; // oldest accepted response; the first one is fresh, because a run may just have been created
const LINES = 12; // cards with a loss curve: each needs a request
const POINTS = 60;

/** Show the runs until the returned function is called. */
export function showRuns(root, session, ended) {
  const asking = new AbortController();
  const cards = h("div", { class: "cards" });
  const trouble = h("p", { class: "trouble", role: "status" });
  const create = session.allows("admin") && button("Create a run", () => createRun(session), "primary");
  root.append(h("div", { class: "title" }, h("h1", {}, "Runs"), create), trouble, cards);

  const losses = new Map(); // by run: the round, and the losses up to it
  let [shown, runs] = [null, []];

  function draw(unreachable = null) {
    const state = JSON.stringify([runs, unreachable]);
    if (state !== shown && (shown !== null || unreachable === null))
      cards.replaceChildren(
        ...(runs.length ? runs.map((run) => card(run, losses.get(run.name), unreachable)) : [empty(session)]),
      );
    if (create) create.disabled = unreachable !== null;
    shown = state;
  }

  async function refresh() {
    const age_s = shown === null ? 0 : AGE_S;
    runs = (await session.api.all("runs", asking.signal, age_s)).sort((a, b) => natural(a.name, b.name));
    await Promise.all(
      runs.slice(0, LINES).map(async (run) => {
        if (losses.get(run.name)?.round === run.round) return;
        const page = await session.api.get(`${runPath(run.name, "rounds")}?limit=${POINTS}`, asking.signal, age_s);
        losses.set(run.name, { round: run.round, values: page.items.map((each) => each.loss).reverse() });
      }),
    );
    draw();
  }

  async function follow() {
    for (; !asking.signal.aborted;) {
      try {
        if (!document.hidden) await refresh();
        trouble.textContent = "";
      } catch (error) {
        if (asking.signal.aborted) return;
        if (!(error instanceof Unreachable)) return ended(error);
        trouble.textContent = error.message;
        draw(error.message);
      }
      await new Promise((done) => setTimeout(done, 1000 * EVERY_S));
    }
  }

  follow();
  return () => asking.abort();
}

function card(run, line, unreachable) {
  const figure = (label, value) => h("div", {}, h("dt", {}, label), h("dd", {}, value));
  return h(
    "a",
    { class: "card", href: `#${new URLSearchParams({ run: run.name })}` },
    h("div", { class: "title" }, h("h2", {}, run.name), stateBadge(run, unreachable)),
    h("p", { class: "reason" }, run.reason),
    h("progress", { max: run.rounds, value: run.round, "aria-label": `round ${run.round} of ${run.rounds}` }),
    line ? sparkline(line.values, "training loss of the last rounds") : null,
    h(
      "dl",
      { class: "figures" },
      figure("Round", `${run.round} of ${run.rounds}`),
      figure("Held-out loss", run.held_out_loss === null ? UNKNOWN : `${loss(run.held_out_loss)} nats/token`),
      figure("Workers", `${run.live_workers} live`),
      figure("Trained on", amount(run.tokens, "tokens")),
      figure("Goodput", share(goodput(run.account))),
      figure("Sent by all", bytes(run.upload_bytes)),
    ),
  );
}

function empty(session) {
  const how = session.allows("admin")
    ? "Create one here, or with the command "
    : "An admin creates one with the command ";
  return h(
    "p",
    { class: "panel quiet" },
    "There are no runs yet. ",
    how,
    h("code", {}, "outerstep run create run.toml"),
    ".",
  );
}
