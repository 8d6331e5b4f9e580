// The workers as a sortable table; on a phone, one block per worker.

import { joinCommand, runPath } from "./api.js";
import { KINDS, goodput, stages } from "./derived.js";
import { ask, attempt, notify } from "./dialogs.js";
import { button, h, panel, write } from "./dom.js";
import { ASKING, UNKNOWN, amount, bytes, count, duration, loss, natural, share } from "./units.js";

const FEW = 25; // rows to show until the user asks for all: 200 rows would push the events far down

const fact = (worker, name) => worker.host[name] ?? null;
const inRound = ({ metrics }) =>
  metrics.round === null ? UNKNOWN : `round ${metrics.round}, step ${metrics.inner_step ?? UNKNOWN}`;

// Each column: its name, what it shows of a worker, its sort key, and its kind.
const COLUMNS = [
  ["Worker", (w) => h("span", { class: "name", title: w.name }, w.name), (w) => w.name],
  ["State", (w) => h("span", { class: `badge ${w.state}` }, w.state), (w) => w.state],
  ["Doing", doing, doing],
  ["At", inRound, (w) => 1e6 * (w.metrics.round ?? -1) + (w.metrics.inner_step ?? 0), "number"],
  ["Rate", (w) => amount(w.metrics.tokens_per_second, "tokens/s"), (w) => w.metrics.tokens_per_second ?? -1, "number"],
  ["Loss", (w) => loss(w.metrics.loss), (w) => w.metrics.loss ?? -1, "number"],
  ["Tokens", (w) => count(w.tokens), (w) => w.tokens, "number"],
  ["Up", (w) => bytes(w.metrics.upload_bytes || w.upload_bytes), (w) => w.metrics.upload_bytes, "number"],
  ["Down", (w) => bytes(w.metrics.download_bytes), (w) => w.metrics.download_bytes, "number"],
  ["Goodput", shares, (w) => goodput(w.account) ?? -1, "number"],
  ["Score", (w) => w.score.toFixed(2), (w) => w.score, "number"],
  [
    "Seen",
    (w) => (w.last_seen_s === null ? UNKNOWN : `${duration(w.last_seen_s)} ago`),
    (w) => w.last_seen_s ?? 1e12,
    "number",
  ],
  ["Machine", machine, (w) => String(fact(w, "device") ?? "")],
];

function doing(worker) {
  if (worker.quarantined_until !== null) return `out until round ${worker.quarantined_until}`;
  return worker.state === "live" ? (worker.metrics.phase ?? UNKNOWN) : UNKNOWN;
}

/** The share of the worker's time in inner steps, and a bar with the other shares. */
function shares(worker) {
  const found = stages(worker.account);
  if (!found) return UNKNOWN;
  const parts = Object.entries(KINDS).map(([kind, name]) => [
    kind,
    found[kind] / found.all,
    `${name} ${share(found[kind] / found.all)}`,
  ]);
  const summary = parts.map(([, , text]) => text).join(", ");
  const bar = h(
    "span",
    { class: "shares", role: "img", title: summary, "aria-label": summary },
    parts.map(([kind, part]) => h("i", { class: `key ${kind}`, style: `width: ${100 * part}%` })),
  );
  return [share(goodput(worker.account)), bar];
}

/** What a worker reports about its machine: one line that distinguishes boxes, and all of it as a tooltip. */
function machine(worker) {
  const facts = Object.entries(worker.host).map(([name, value]) => `${name}: ${value}`);
  if (worker.metrics.peak_memory_bytes !== null) facts.push(`peak memory: ${bytes(worker.metrics.peak_memory_bytes)}`);
  if (worker.metrics.mfu !== null) facts.push(`MFU: ${share(worker.metrics.mfu)}`);
  const short = ["host", "device", "kernels"].map((name) => fact(worker, name)).filter((value) => value !== null);
  return h("span", { class: "machine", title: facts.join("\n") }, short.join(" · ") || UNKNOWN);
}

export function makeWorkers(session, name, refresh) {
  const may = session.allows("operator", name);
  const body = h("tbody");
  const heads = COLUMNS.map(([label, , , kind], i) =>
    h(
      "th",
      { scope: "col", class: kind, "aria-sort": "none" },
      button(label, () => sort(i), "sort"),
    ),
  );
  const table = h(
    "table",
    { class: "workers" },
    h("thead", {}, h("tr", {}, heads, may && h("th", { scope: "col" }, h("span", { class: "unseen" }, "Acts")))),
    body,
  );
  const more = button(
    "",
    () => {
      all = !all;
      update(model);
    },
    "plain",
  );
  const none = h("p", { class: "quiet" });
  const rows = new Map(); // by name: { text, row }
  let [by, down, all, model] = [0, false, false, null];

  function sort(column) {
    [by, down] = column === by ? [by, !down] : [column, Boolean(COLUMNS[column][3])];
    update(model);
  }

  function update(now) {
    model = now;
    const workers = model.workers ?? [];
    const hint = `No worker has joined yet. On each box, with a join token in OUTERSTEP_TOKEN: ${joinCommand(name)}`;
    write(none, model.workers === null ? ASKING : workers.length ? "" : hint);
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : down ? "descending" : "ascending"));
    const key = COLUMNS[by][2];
    const sorted = [...workers].sort((a, b) => compare(key(a), key(b)) * (down ? -1 : 1) || compare(a.name, b.name));
    const shown = all ? sorted : sorted.slice(0, FEW);
    more.hidden = sorted.length <= FEW;
    write(more, all ? `Show ${FEW} workers` : `Show all ${sorted.length} workers`);
    const elements = shown.map((worker) => {
      const text = JSON.stringify(worker);
      if (rows.get(worker.name)?.text !== text)
        rows.set(worker.name, { text, row: row(worker, rows.get(worker.name)?.row) });
      return rows.get(worker.name).row;
    });
    if (elements.length !== body.children.length || elements.some((each, i) => each !== body.children[i]))
      body.replaceChildren(...elements);
    for (const act of body.querySelectorAll(".acts button")) act.disabled = model.trouble !== null;
    table.classList.toggle("stale", model.trouble !== null);
  }

  /**
   * Return a worker's row. An existing row keeps its buttons where they are: a button that is taken out of the page while it
   * is pressed gets no click, even if it is put back at once.
   */
  function row(worker, old) {
    const cells = COLUMNS.map(([label, shown, , kind], i) =>
      h(i ? "td" : "th", { "data-label": label, class: kind, scope: i ? null : "row" }, shown(worker)),
    );
    const state = `${worker.state} ${worker.quarantined_until !== null}`;
    if (old?.dataset.state === state) {
      cells.forEach((cell, i) => old.children[i].replaceWith(cell));
      return old;
    }
    return h("tr", { "data-state": state }, cells, may && h("td", { class: "acts" }, acts(worker)));
  }

  function acts(worker) {
    const quarantined = worker.quarantined_until !== null;
    return [
      worker.state === "live" &&
        button("Evict", () => evict(worker.name), "plain", { "aria-label": `Evict ${worker.name}` }),
      (worker.state === "banned" || quarantined) &&
        button("Readmit", () => readmit(worker.name), "plain", { "aria-label": `Readmit ${worker.name}` }),
    ];
  }

  const change = (worker, state) => session.api.ask("PATCH", runPath(name, "workers", worker), { json: { state } });

  async function evict(worker) {
    const ban = h("input", { type: "checkbox", name: "ban" });
    const done = await ask({
      title: `Evict ${worker}?`,
      content: [
        h(
          "p",
          {},
          "Its lease ends at once, and its work units return to the pool. Its contributions stay. It can rejoin by itself, unless it is banned.",
        ),
        h("label", { class: "check" }, ban, "Ban it until it is readmitted"),
      ],
      does: "Evict",
      kind: "danger",
      act: () => change(worker, ban.checked ? "banned" : "evicted"),
    });
    if (done) notify(`${worker} is ${done.state}.`);
    refresh();
  }

  async function readmit(worker) {
    if (await attempt(() => change(worker, "readmitted"))) notify(`${worker} can take part again.`);
    refresh();
  }

  return { element: panel("Workers", "wide", none, h("div", { class: "scrolls" }, table), more), update };
}

const compare = (a, b) => (typeof a === "number" ? a - b : natural(String(a), String(b)));
