// The coordinator's status: findings with remedies, disks, backups, database, clients, recent errors.

import { Refused, Unreachable, pause } from "./api.js";
import { h, panel, write } from "./dom.js";
import { UNKNOWN, bytes, duration, moment, plural, share } from "./units.js";

const EVERY_S = 5;

/** Show the coordinator until the returned function is called. */
export function showServer(root, session, ended) {
  const asking = new AbortController();
  const trouble = h("p", { class: "trouble", role: "status" });
  const findings = h("div", { class: "findings", "aria-live": "polite" });
  const tiles = h("dl", { class: "tiles server" });
  const errors = h("ul", { class: "lines errors" });
  const none = h("p", { class: "quiet" });
  root.append(
    h("div", { class: "title" }, h("h1", {}, "Server")),
    trouble,
    findings,
    tiles,
    panel("Recent warnings and errors", "recent", none, errors),
  );

  let shown = null;

  async function refresh() {
    const status = await session.api.get("status", asking.signal);
    tiles.replaceChildren(...tilesOf(status));
    const state = JSON.stringify([status.findings, status.errors]);
    if (state === shown) return;
    shown = state;
    findings.replaceChildren(...findingsOf(status.findings));
    write(
      none,
      (status.errors.length ? "" : "None since the start. ") +
        (status.coordinators.length ? "Of the coordinator that leads; each of the others has its own log." : ""),
    );
    errors.replaceChildren(...status.errors.map(error));
  }

  async function follow() {
    for (; !asking.signal.aborted; ) {
      try {
        if (!document.hidden) await refresh();
        write(trouble, "");
      } catch (error) {
        if (asking.signal.aborted) return;
        if (!(error instanceof Unreachable)) return ended(error);
        write(trouble, `${error.message} The last known status is shown below.`);
      }
      await pause(EVERY_S);
    }
  }

  if (session.allows("operator")) follow();
  else
    ended(
      new Refused(403, {
        title: "Not for this token",
        detail: "The server's status needs an operator or admin token for all runs; sign in with one.",
      }),
    );
  return () => asking.abort();
}

function findingsOf(findings) {
  if (!findings.length) return [h("p", { class: "panel fine" }, "✓ Nothing is wrong.")];
  return findings.map((each) =>
    h(
      "section",
      { class: "panel finding" },
      h("h2", {}, each.run === null ? "" : `${each.run}: `, each.about.replaceAll("-", " ")),
      h("p", { class: "sentence" }, each.message),
      h("p", { class: "quiet" }, coded(`${each.remedy}.`)),
    ),
  );
}

/** Return the text, with the parts between backticks as code. */
const coded = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

function tilesOf(status) {
  const ago = (at) => (at === null ? "never" : `${duration(Math.max(0, status.now - at))} ago`);
  const { backup, clients, database, notifications } = status;
  return [
    ...status.disks.map((disk) =>
      tile(
        `Disk: ${disk.places.join(", ")}`,
        `${bytes(disk.free_bytes)} free`,
        `${share(disk.free_bytes / disk.size_bytes)} of ${bytes(disk.size_bytes)}`,
      ),
    ),
    backup === null
      ? tile("Backup", UNKNOWN, "Not scheduled: start the coordinator with --backup.")
      : tile(
          "Backup",
          ago(backup.last_at),
          `every ${duration(backup.every_s)}; last failure: ${ago(backup.failed_at)}`,
        ),
    tile(
      "Database",
      database.answer_s === null ? "no answer" : `${(1000 * database.answer_s).toFixed(1)}\u00a0ms`,
      database.fault || `${database.backend}, ${bytes(database.size_bytes)}, schema ${database.schema_revision}`,
    ),
    tile(
      "Clients",
      plural(clients.workers, "worker"),
      `${plural(clients.connections, "connection")}, ${plural(clients.streams, "event stream")}`,
    ),
    ...(notifications.length === 0
      ? [tile("Notifications", UNKNOWN, "None: start the coordinator with --notify.")]
      : notifications.map((each) =>
          tile(
            `Notifications: ${each.name}`,
            each.failed ? `${each.failed} failed` : "all sent",
            `last sent: ${ago(each.sent_at)}`,
          ),
        )),
    ...status.coordinators.map((each) =>
      tile(
        each.leads ? "Leader" : "Standby",
        each.address,
        `version ${each.version}, seen ${duration(each.silent_s)} ago` +
          (each.store_fault ? `; it cannot use the store: ${each.store_fault}` : ""),
      ),
    ),
    ...status.aggregators.map((each) =>
      tile("Aggregator", each.host, `version ${each.version}, seen ${duration(each.silent_s)} ago`),
    ),
    tile("Version", status.version, `protocol ${status.protocol}, up for ${duration(status.now - status.started_at)}`),
  ];
}

function tile(label, value, more) {
  return h(
    "div",
    { class: "tile" },
    h("dt", {}, label),
    h("dd", {}, value),
    h("dd", { class: "quiet" }, more),
  );
}

function error(each) {
  return h(
    "li",
    { class: each.level === "warning" ? "" : "bad" },
    h("time", {}, moment(each.at)),
    " ",
    h("span", { class: "kind" }, each.level),
    " ",
    each.message,
    each.count > 1 && h("span", { class: "quiet" }, ` (${each.count} times)`),
  );
}
