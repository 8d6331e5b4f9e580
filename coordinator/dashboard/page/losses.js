// Training and held-out loss by round, tokens, wall time or bytes; beside another run's held-out loss if one is chosen.

import { Unreachable, runPath } from "./api.js";
import { chart } from "./charts.js";
import { button, h, panel, write } from "./dom.js";
import { ASKING, amount, loss, natural, plural } from "./units.js";

const BY = {
  round: { label: "Round", x: "round", of: (at) => at.round },
  tokens: { label: "Tokens", x: "million tokens", of: (at) => at.tokens / 1e6 },
  time: { label: "Wall time", x: "minutes since the run was created", of: (at) => at.seconds / 60 },
  bytes: { label: "Bytes", x: "megabytes moved by all workers", of: (at) => at.bytes / 1e6 },
};
const BASELINE = "-baseline"; // the name that `outerstep run create --baseline` appends
const OTHER_EVERY_S = 30;

/** Return the held-out and the training losses of rounds, each with where it is: { round, tokens, seconds, bytes }. */
function pointsOf(rounds, created_at) {
  const [heldOut, training] = [[], []];
  let [tokens, bytes] = [0, 0];
  for (const round of rounds) {
    // The held-out loss belongs to the state at the round's start, the training loss to its end.
    const at = { round: round.round, tokens, bytes };
    if (round.held_out_loss !== null)
      heldOut.push({ ...at, seconds: round.opened_at - created_at, loss: round.held_out_loss });
    if (round.loss !== null) training.push({ ...at, seconds: round.closed_at - created_at, loss: round.loss });
    tokens += round.tokens;
    bytes += round.account.upload_bytes + round.account.download_bytes;
  }
  return { heldOut, training };
}

/** Return the loss at this many tokens, between the points around it; null outside of them. */
function lossAt(points, tokens) {
  const after = points.findIndex((each) => each.tokens >= tokens);
  if (after < 0) return null;
  if (points[after].tokens === tokens) return points[after].loss;
  if (after === 0) return null;
  const [low, high] = [points[after - 1], points[after]];
  return low.loss + ((high.loss - low.loss) * (tokens - low.tokens)) / (high.tokens - low.tokens);
}

/** Return true if losses on these training sets (of a run; null if unknown) mean the same. */
const sameText = (...sets) =>
  new Set(sets.map((each) => JSON.stringify([each?.digest, each?.tokenizer_digest]))).size === 1;

/** Return the sentence that compares the last common point of two runs; null if there is none. */
function comparison(own, other, name) {
  for (const point of [...own].reverse()) {
    const beside = point.tokens > 0 ? lossAt(other, point.tokens) : null;
    if (beside === null) continue;
    const apart = point.loss - beside;
    const change = `${Math.abs(100 * Math.expm1(apart)).toFixed(2)} %`;
    const way = apart < 0 ? "below" : "above";
    return `At ${amount(point.tokens, "tokens")} the perplexity is ${change} ${way} that of ${name}.`;
  }
  return null;
}

export function makeLosses(session, own) {
  const { element, draw } = chart();
  const summary = h("p", { class: "quiet" });
  const beside = h("p", { class: "quiet", hidden: true });
  const choice = h("select", { "aria-label": "Compare with another run", onchange: () => chooseOther(choice.value) });
  const asking = new AbortController();
  let by = "round";
  let model = null;
  let other = null; // { name, created_at, rounds }
  let wanted; // the name of the other run; null: none; undefined: the baseline, once there is one
  let [asked_at, listed_at] = [-Infinity, -Infinity];
  let names = [];
  const buttons = Object.entries(BY).map(([key, { label }]) =>
    button(label, () => choose(key), "", { "aria-pressed": String(key === by), "data-by": key }),
  );
  const choices = h("div", { class: "choices", role: "group", "aria-label": "Loss by" }, buttons);

  function choose(key) {
    by = key;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.by === key));
    update(model);
  }

  function chooseOther(name) {
    wanted = name || null;
    other = null;
    asked_at = -Infinity;
    update(model);
  }

  /** List the other runs. */
  async function list() {
    const age_s = listed_at < 0 ? 0 : 4; // a run may just have been created
    listed_at = performance.now();
    const runs = await session.api.all("runs", asking.signal, age_s);
    const now = runs.map((each) => each.name).filter((each) => each !== own).sort(natural);
    if (JSON.stringify(now) === JSON.stringify(names)) return;
    names = now;
    choice.replaceChildren(...["", ...names].map((each) => h("option", { value: each }, each || "compare with …")));
    choice.hidden = !names.length;
    if (wanted === undefined && names.includes(own + BASELINE)) chooseOther(own + BASELINE);
    choice.value = names.includes(wanted) ? wanted : "";
  }

  async function ask() {
    asked_at = performance.now();
    const name = wanted;
    const run = await session.api.get(runPath(name), asking.signal, 4);
    const rounds = await session.api.all(runPath(name, "rounds"), asking.signal, 4);
    if (name !== wanted) return;
    const published = rounds.filter((each) => each.state === "published").sort((a, b) => a.round - b.round);
    other = { name, created_at: run.created_at, data: run.data, rounds: published };
    update(model);
  }

  /** Give the other run up if it cannot be read. If the coordinator does not answer, this run's requests say so. */
  const quietly = (request) =>
    request.catch((error) => {
      if (asking.signal.aborted || error instanceof Unreachable || error.status >= 429) return;
      other = null;
      wanted = null;
      choice.value = "";
      update(model);
    });

  function update(now) {
    model = now;
    if (!model) return;
    const isDue = (at) => performance.now() - at > 1000 * OTHER_EVERY_S;
    if (isDue(listed_at)) quietly(list());
    if (wanted && isDue(asked_at)) quietly(ask());
    const { x, of } = BY[by];
    const { heldOut, training } = pointsOf(model.published, model.run.created_at);
    const theirs = other ? pointsOf(other.rounds, other.created_at).heldOut : [];
    const line = (name, colour, points, more = {}) => ({
      ...{ name, colour, hover: "%{y:.4f} nats/token", ...more },
      ...{ x: points.map(of), y: points.map((each) => each.loss) },
    });
    const lines = [line("training", "accent", training), line("held-out", "second", heldOut)];
    if (theirs.length) lines.push(line("held-out, the other run", "other", theirs, { dash: "dash" }));
    draw(lines, { x, y: "nats per token", counts: by === "round" });
    const ways = [
      ["held-out", heldOut],
      ["training", training],
    ].flatMap(([name, points]) => (points.length > 1 ? [`${name} ${loss(points[0].loss)} → ${loss(points.at(-1).loss)}`] : []));
    const text = `In nats per token, over ${plural(model.published.length, "round")}: ${ways.join(", ")}.`;
    write(summary, ways.length ? text : model.hasRounds ? "Fewer than two rounds have closed." : ASKING);
    const compared = !theirs.length ? null : sameText(model.run.data, other.data)
      ? comparison(heldOut, theirs, other.name)
      : `${other.name} is trained on other text: its losses cannot be compared with these.`;
    beside.hidden = compared === null;
    write(beside, compared ?? "");
  }

  choice.hidden = true;
  const body = [choices, element, summary, h("div", { class: "beside" }, choice, beside)];
  return { element: panel("Loss", "two-thirds", ...body), update, stop: () => asking.abort() };
}
