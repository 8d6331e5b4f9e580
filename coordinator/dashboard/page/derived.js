// Figures derived from the REST responses. Pure functions.

import { median } from "./units.js";

// Stages that follow one another, so that their seconds add up to a worker's whole time; other stages overlap with them.
const SUCCESSIVE = ["join", "seed", "recover", "wait", "evaluate", "train", "gather", "sync", "leave"];
const LAST = 20; // rounds that the speed is averaged over

// The kinds of time that are shown.
export const KINDS = { train: "training", send: "sending", wait: "waiting", other: "joining, evaluating" };

/** The share of the workers' time spent in inner steps; null before the first report. */
export function goodput(account) {
  const all = SUCCESSIVE.reduce((sum, stage) => sum + (account.seconds[stage] ?? 0), 0);
  return all ? (account.seconds.train ?? 0) / all : null;
}

/** Tokens per second of all workers together over the last rounds, including sync and waiting; null before the first. */
export function speed(published) {
  const last = published.slice(-LAST);
  if (!last.length) return null;
  const took = last.at(-1).closed_at - last[0].opened_at;
  return took > 0 ? last.reduce((sum, each) => sum + each.tokens, 0) / took : null;
}

/** Bytes that each of `workers` sends and receives in `steps` ring all-reduces of fp32 gradients. */
export function allreduceBytes(workers, elements, steps) {
  return workers > 1 ? (2 * (workers - 1) * 4 * elements * steps) / workers : 0;
}

/** Cumulative bytes per worker by round: up, down, and what per-step all-reduce would have moved each way. */
export function traffic(run, published, workers) {
  const size = Math.max(1, workers.filter((each) => each.contributions > 0).length);
  const steps = run.round ? run.step / run.round : 0;
  let [up, down] = [0, 0];
  return published.map((each, i) => {
    up += Math.max(each.upload_bytes, each.account.upload_bytes) / size;
    down += (each.account.download_bytes || each.delta_bytes * size) / size;
    return { round: each.round, up, down, allreduce: allreduceBytes(size, run.elements ?? 0, (i + 1) * steps), size };
  });
}

/** What a worker waits for, by the name in the REST response. */
export const WAITS = {
  upload: "upload",
  workers: "other workers",
  coordinator: "coordinator",
  download: "download",
  opening: "a round to open",
};

const percent = (part) => `${(100 * part).toFixed(1)} %`;

/** How much of a round's time was spent waiting and what would save some of it, as a sentence; empty if unknown. */
export function waitingText(detail) {
  const waiting = detail?.waiting;
  if (!waiting) return "";
  const never = waiting.never === null ? "" : `without sync.wait = "always" up to ${percent(waiting.never)} would be saved, with `;
  const text = `${never}twice as many inner steps ${never ? "" : "would save "}${percent(waiting.doubled_h)}`;
  return `In round ${detail.round} the workers waited ${percent(waiting.share)} of their time; ${text}.`;
}

/** The workers that were waited for during a larger share of a round than their share of its tokens, and those that
 * dropped what they had trained because they got the deltas of the round before too late; a sentence each. */
export function costsText(detail) {
  const seconds = detail ? detail.closed_at - detail.opened_at : 0;
  const remedy =
    detail?.waiting?.never === null
      ? "more sync.inner_steps give it time"
      : 'with sync.wait = "never" nobody waits for it';
  const dropped = Object.entries(detail?.accounts ?? {})
    .filter(([, account]) => account.dropped_steps)
    .map(
      ([worker, account]) =>
        `${worker} dropped ${account.dropped_steps} inner steps before round ${detail.round}: the others were a round ` +
        "further before it had their deltas; more sync.inner_steps give its line time.",
    );
  const costs = Object.entries(detail?.adds ?? {})
    .filter(([, { tokens, held_s }]) => tokens > 0 && held_s > tokens * seconds)
    .map(
      ([worker, { tokens, held_s }]) =>
        `${worker} costs more than it gives: ${percent(held_s / seconds)} of round ${detail.round} was spent ` +
        `waiting for it, and it gave ${percent(tokens)} of the tokens; ${remedy}.`,
    );
  return [...dropped, ...costs].join(" ");
}

/** A worker's time in a round, in seconds: { train, send, wait, other, all }; null if it reported nothing. */
export function stages(account) {
  if (!account || !Object.keys(account.seconds).length) return null;
  const of = (...names) => names.reduce((sum, name) => sum + (account.seconds[name] ?? 0), 0);
  const send = Math.min(of("sync"), of("upload"));
  const found = {
    train: of("train"),
    send: of("gather") + send,
    wait: of("wait", "sync") - send,
    other: of("join", "seed", "recover", "evaluate", "leave"),
  };
  return { ...found, all: found.train + found.send + found.wait + found.other };
}

/**
 * The rounds of each worker, for the timeline: rows of { worker, live, cells, slow }. A cell has `stages` and `waits`,
 * the seconds of what the worker did and waited for (null: not reported), `adds` (what it gave, and for how long it was
 * waited for; null: unknown), `gone` (the worker was absent), `late_s` (seconds that it was late) and `sent` (its
 * contribution counts).
 * `slow`: the time of its inner steps relative to the median, averaged over the rounds.
 */
export function timeline(details, workers) {
  const columns = details.map((each) => {
    const sent = new Set(each.fragments.flatMap((fragment) => fragment.contributors));
    const late = new Map();
    for (const { worker, late_s } of each.late) late.set(worker, Math.max(late_s, late.get(worker) ?? 0));
    const usual = median(
      Object.values(each.accounts)
        .map((account) => account.seconds.train ?? 0)
        .filter((s) => s > 0),
    );
    return { ...each, sent, late, usual };
  });
  return workers.map((worker) => {
    const times = [];
    const cells = columns.map((column) => {
      const found = stages(column.accounts[worker.name]);
      if (found?.train > 0 && column.usual > 0) times.push(found.train / column.usual);
      const sent = column.sent.has(worker.name);
      const late_s = column.late.get(worker.name) ?? null;
      const before = worker.epoch === 1 && worker.joined_at > column.opened_at;
      const gone = !before && !found && !sent && late_s === null;
      const [waits, adds] = [column.waits[worker.name] ?? null, column.adds[worker.name] ?? null];
      return { round: column.round, stages: found, waits, adds, sent, late_s, gone };
    });
    const slow = times.length ? times.reduce((sum, each) => sum + each, 0) / times.length : null;
    return { worker: worker.name, live: worker.state === "live", cells, slow };
  });
}

/** The contributions that did not count in full, newest first: { round, worker, factor, reason }. */
export function judged(details) {
  const found = new Map();
  for (const each of details) {
    for (const fragment of each.fragments) {
      for (const [worker, { factor, reason }] of Object.entries(fragment.verdicts)) {
        const key = `${each.round} ${worker}`;
        if (factor !== 1 && !(found.get(key)?.factor <= factor))
          found.set(key, { round: each.round, worker, factor, reason });
      }
    }
  }
  return [...found.values()].reverse();
}

/** The open round: the workers that have sent all fragments, and the seconds from the request to the next deadline. */
export function openRound(current) {
  if (!current || current.state === "published") return null;
  const of = current.fragments.map((fragment) => new Set(fragment.contributors));
  const [first, ...others] = of;
  const sent = first ? [...first].filter((worker) => others.every((each) => each.has(worker))) : [];
  const deadlines = current.fragments.map((each) => each.closes_in_s).filter((each) => each !== null);
  return { round: current.round, sent: new Set(sent), closes_in_s: deadlines.length ? Math.min(...deadlines) : null };
}
