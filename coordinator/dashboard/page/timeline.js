// What each worker did in each of the last rounds, as bars. In a round the worker that took longest has the full width.

import { SHOWN_ROUNDS } from "./run_model.js";
import { KINDS, WAITS, costsText, openRound, timeline, waitingText } from "./derived.js";
import { button, h, panel, write } from "./dom.js";
import { UNKNOWN, duration, plural, share } from "./units.js";

const [ROW, BAR, NAME, PHONE_NAME, AXIS] = [22, 12, 132, 84, 20]; // pixels
const FEW = 16; // rows to show until the user asks for all
const SLOW = 1.25; // times the median that is worth mentioning

export function makeTimeline() {
  const canvas = h("canvas", { role: "img" });
  const tip = h("p", { class: "tip", hidden: true });
  const summary = h("p", { class: "verdict" });
  const more = button(
    "",
    () => {
      all = !all;
      update(model);
    },
    "plain",
  );
  const key = (name, label) => h("li", {}, h("i", { class: `key ${name}`, "aria-hidden": "true" }), label);
  const legend = h(
    "ul",
    { class: "legend" },
    Object.entries(KINDS).map(([name, label]) => key(name, label)),
    key("late", "late"),
    key("gone", "gone"),
  );
  const body = h("tbody");
  const table = h(
    "details",
    {},
    h("summary", {}, "Show as a table"),
    h(
      "div",
      { class: "scrolls" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            [
              "worker",
              "gave",
              "weight",
              "held up",
              "training",
              ...Object.values(WAITS).map((name) => `waiting: ${name}`),
              "against the median",
              "late",
              "gone",
            ].map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        body,
      ),
    ),
  );
  let [all, model, rows, columns, places] = [false, null, [], [], null];

  function update(now) {
    model = now;
    if (!model.workers) return;
    const fit = Math.max(4, Math.floor((canvas.parentElement.clientWidth - NAME) / 34));
    const details = model.lastDetails.slice(-Math.min(SHOWN_ROUNDS, fit));
    rows = timeline(details, model.workers).filter(
      (row) => row.live || row.cells.some((cell) => cell.stages || cell.sent),
    );
    if (rows.length > FEW) rows.sort((a, b) => (b.slow ?? 0) - (a.slow ?? 0));
    columns = details;
    more.hidden = rows.length <= FEW;
    write(more, all ? `Show the ${FEW} slowest` : `Show all ${rows.length} workers`);
    const reported = details.findLast((each) => each.waiting);
    write(summary, [sentence(rows), waitingText(reported), costsText(reported)].filter(Boolean).join(" "));
    draw(all ? rows : rows.slice(0, FEW));
    if (table.open) tabulate(rows);
  }
  table.addEventListener("toggle", () => tabulate(rows));

  function draw(shown) {
    const width = canvas.parentElement.clientWidth;
    const height = shown.length * ROW + AXIS;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    canvas.setAttribute("aria-label", `Rounds of ${shown.length} workers. ${summary.textContent}`);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    const left = width < 500 ? PHONE_NAME : NAME;
    const open = openRound(model.current);
    const across = Math.min(110, (width - left) / (columns.length + (open ? 1 : 0) || 1));
    places = { left, across, shown };
    const longest = columns.map((_, i) => Math.max(...rows.map((row) => row.cells[i].stages?.all ?? 0)) || 1);
    shown.forEach((row, y) => {
      const middle = y * ROW + ROW / 2;
      pen.fillStyle = colour(row.slow > SLOW ? "late" : row.live ? "text" : "quiet");
      pen.fillText(fitting(pen, row.worker, left - 10), 0, middle);
      row.cells.forEach((cell, i) => bar(pen, colour, cell, left + i * across, middle, across - 3, longest[i]));
      if (open && row.live) {
        pen.fillStyle = colour(open.sent.has(row.worker) ? "wait" : "train");
        pen.globalAlpha = 0.45;
        pen.fillRect(left + columns.length * across, middle - BAR / 2, across - 3, BAR);
        pen.globalAlpha = 1;
      }
    });
    pen.fillStyle = colour("quiet");
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const every = Math.ceil(30 / across);
    columns.forEach(
      (each, i) => i % every === 0 && pen.fillText(String(each.round), left + i * across, height - AXIS / 2 + 2),
    );
    if (open && columns.length % every === 0)
      pen.fillText("now", left + columns.length * across, height - AXIS / 2 + 2);
  }

  function bar(pen, colour, cell, x, middle, width, longest) {
    const top = middle - BAR / 2;
    pen.fillStyle = colour("track");
    pen.fillRect(x, top, width, BAR);
    if (cell.gone) {
      pen.strokeStyle = colour("gone");
      pen.beginPath();
      for (let at = -BAR; at < width; at += 6) {
        const from = Math.max(0, -at);
        const to = Math.min(BAR, width - at);
        pen.moveTo(x + at + from, top + BAR - from);
        pen.lineTo(x + at + to, top + BAR - to);
      }
      pen.stroke();
    } else if (cell.stages) {
      let at = x;
      for (const kind of Object.keys(KINDS)) {
        const wide = (width * cell.stages[kind]) / longest;
        pen.fillStyle = colour(kind);
        pen.fillRect(at, top, wide, BAR);
        at += wide;
      }
    } else if (cell.sent) {
      pen.fillStyle = colour("train");
      pen.globalAlpha = 0.45; // the worker has contributed but not reported its times yet
      pen.fillRect(x, top, width, BAR);
      pen.globalAlpha = 1;
    }
    if (cell.late_s !== null) {
      pen.fillStyle = colour("late");
      pen.fillRect(x, top + BAR + 1, width, 3);
    }
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = places?.shown[Math.floor((event.clientY - box.top) / ROW)];
    const cell = row?.cells[Math.floor((event.clientX - box.left - places.left) / places.across)];
    tip.hidden = !cell;
    if (!cell) return;
    write(tip, describe(row.worker, cell));
    tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - 240)}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });

  function tabulate(shown) {
    if (!table.open) return;
    const mean = (cells, from, kind, text = duration) => {
      const known = cells.map((cell) => cell[from]?.[kind] ?? null).filter((each) => each !== null);
      return known.length ? text(known.reduce((sum, each) => sum + each, 0) / known.length) : UNKNOWN;
    };
    body.replaceChildren(
      ...shown.map(({ worker, cells, slow }) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, worker),
          h("td", {}, mean(cells, "adds", "tokens", share)),
          h("td", {}, mean(cells, "adds", "weight", share)),
          h("td", {}, mean(cells, "adds", "held_s")),
          h("td", {}, mean(cells, "stages", "train")),
          Object.keys(WAITS).map((what) => h("td", {}, mean(cells, "waits", what))),
          h("td", {}, slow === null ? UNKNOWN : share(slow)),
          h("td", {}, plural(cells.filter((cell) => cell.late_s !== null).length, "round")),
          h("td", {}, plural(cells.filter((cell) => cell.gone).length, "round")),
        ),
      ),
    );
  }

  const watched = new ResizeObserver(() => model && update(model));
  const holder = h("div", { class: "canvas" }, canvas, tip);
  watched.observe(holder);
  return {
    element: panel("Rounds by worker", "wide", summary, legend, holder, more, table),
    update,
    stop: () => watched.disconnect(),
  };
}

/** Return the picture's message in a sentence: which workers are slow, late or gone. */
function sentence(rows) {
  const parts = [];
  const slowest = rows.filter((row) => row.slow !== null).sort((a, b) => b.slow - a.slow)[0];
  if (slowest?.slow > SLOW)
    parts.push(`${slowest.worker} is the slowest: its inner steps take ${slowest.slow.toFixed(2)} times the median`);
  else if (slowest) parts.push("all workers train at about the same speed");
  const counted = (which, word) => {
    const found = rows.filter(which);
    const who = found.length > 2 ? `${found.length} workers` : found.map((row) => row.worker).join(" and ");
    if (found.length) parts.push(`${who} ${found.length > 1 ? "were" : "was"} ${word}`);
  };
  counted((row) => row.cells.some((cell) => cell.late_s !== null), "late");
  counted((row) => row.cells.some((cell) => cell.gone), "gone for a while");
  if (!parts.length)
    return rows.length ? "Workers report a round's times when they start the next one." : "No worker has taken part yet.";
  const text = parts.join("; ");
  return `${slowest && text.startsWith(slowest.worker) ? text : text[0].toUpperCase() + text.slice(1)}.`;
}

function describe(worker, cell) {
  const spent = Object.entries(KINDS).filter(([kind]) => cell.stages?.[kind] > 0);
  const parts = spent.map(([kind, name]) => `${name} ${duration(cell.stages[kind])}`);
  const waited = Object.entries(WAITS).filter(([what]) => cell.waits?.[what] >= 0.05);
  const seconds = waited.map(([what, name]) => `${name} ${duration(cell.waits[what])}`);
  if (seconds.length) parts.push(`training stood still for ${seconds.join(", ")}`);
  if (cell.adds?.tokens > 0) parts.push(`gave ${share(cell.adds.tokens)} of the tokens`);
  if (cell.adds?.held_s >= 0.05) parts.push(`all others waited ${duration(cell.adds.held_s)} for it`);
  if (cell.gone) parts.push("gone");
  else if (!cell.stages) parts.push(cell.sent ? "contributed" : "no contribution yet");
  if (cell.late_s !== null) parts.push(`late by ${duration(cell.late_s)}`);
  return `${worker}, round ${cell.round}: ${parts.join(", ")}`;
}

function fitting(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
