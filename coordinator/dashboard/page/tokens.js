// Tokens: create, list, revoke. For admins.

import { Refused, coordinator, joinCommand } from "./api.js";
import { ask, notify } from "./dialogs.js";
import { button, field, h, panel } from "./dom.js";
import { UNKNOWN, moment } from "./units.js";

const DAY_S = 86400;
const KINDS = {
  join: "join: boxes exchange it for worker tokens",
  viewer: "viewer: read",
  operator: "operator: control runs and workers",
  worker: "worker: join a run",
  admin: "admin: everything",
};

/** Show the tokens until the returned function is called. */
export function showTokens(root, session, ended) {
  const asking = new AbortController();
  const body = h("tbody");
  const table = h(
    "table",
    { class: "tokens" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["Token", "Scope", "Run", "Note", "Created", "Last used", "Expires", "Uses", ""].map((name) =>
          h("th", { scope: "col" }, name),
        ),
      ),
    ),
    body,
  );
  const news = h("div", { "aria-live": "polite" });
  root.append(
    h(
      "div",
      { class: "title" },
      h("h1", {}, "Tokens"),
      button("Create a token", () => make(), "primary"),
    ),
    news,
    panel("All tokens", "", h("div", { class: "scrolls" }, table)),
  );

  async function refresh() {
    try {
      const tokens = await session.api.all("tokens", asking.signal);
      body.replaceChildren(...tokens.sort((a, b) => b.created_at - a.created_at).map(row));
    } catch (error) {
      if (!asking.signal.aborted) ended(error);
    }
  }

  function row(token) {
    const cell = (label, text) => h("td", { "data-label": label }, text);
    const own = token.id === session.own.id;
    return h(
      "tr",
      {},
      h("th", { scope: "row", "data-label": "Token" }, h("code", {}, token.id), own && " (yours)"),
      cell("Scope", token.scope),
      cell("Run", token.run ?? "all"),
      cell("Note", token.note || UNKNOWN),
      cell("Created", moment(token.created_at)),
      cell("Last used", token.last_used_at === null ? "never" : moment(token.last_used_at)),
      cell("Expires", token.expires_at === null ? "never" : moment(token.expires_at)),
      cell("Uses", token.uses === null ? UNKNOWN : `${token.used} of ${token.uses}`),
      h(
        "td",
        { class: "acts" },
        button("Revoke", () => revoke(token), "plain", { "aria-label": `Revoke ${token.id}` }),
      ),
    );
  }

  async function make() {
    const own = session.own.run;
    const runs = await session.api.all("runs", asking.signal);
    const scope = h(
      "select",
      { name: "scope" },
      Object.entries(KINDS).map(([value, label]) => h("option", { value }, label)),
    );
    const run = h(
      "select",
      { name: "run" },
      own === null && h("option", { value: "" }, "all runs"),
      runs.map((each) => h("option", { value: each.name }, each.name)),
    );
    const days = h("input", { name: "days", type: "number", min: 0.01, step: "any", placeholder: "never" });
    const uses = h("input", { name: "uses", type: "number", min: 1, max: 1000000, placeholder: "100" });
    const note = h("input", { name: "note", maxlength: 200 });
    const usesField = field("Uses", uses, "how many times it can be exchanged");
    scope.addEventListener("change", () => {
      usesField.hidden = scope.value !== "join";
    });
    const made = await ask({
      title: "Create a token",
      content: [
        field("Scope", scope),
        field("Run", run),
        usesField,
        field("Expires after, days", days),
        field("Note", note, "for example who uses it"),
      ],
      does: "Create it",
      act: () =>
        session.api.ask("POST", "tokens", {
          json: {
            scope: scope.value,
            note: note.value,
            ...(run.value ? { run: run.value } : {}),
            ...(days.value ? { expires_in_s: Number(days.value) * DAY_S } : {}),
            ...(uses.value && scope.value === "join" ? { uses: Number(uses.value) } : {}),
          },
        }),
    });
    if (!made) return;
    news.replaceChildren(secret(made));
    refresh();
  }

  /** Return a panel with the secret, which is shown once, and how to use it. */
  function secret(made) {
    const run = made.run ?? "RUN";
    const link = `${coordinator}/#${new URLSearchParams({ token: made.token, ...(made.run ? { run: made.run } : {}) })}`;
    const how = {
      join: ["On each box:", `OUTERSTEP_TOKEN=${made.token} ${joinCommand(run)}`],
      worker: ["On the box:", `OUTERSTEP_TOKEN=${made.token} ${joinCommand(run)}`],
    }[made.scope] ?? ["This link opens the dashboard with this token:", link];
    return panel(
      "The new token",
      "fresh",
      h(
        "p",
        {},
        `The secret is shown only now, and is not stored. Scope ${made.scope}, for ${made.run ?? "all runs"}.`,
      ),
      copied(made.token),
      h("p", {}, how[0]),
      copied(how[1]),
      button("Done", () => news.replaceChildren(), "plain"),
    );
  }

  function copied(text) {
    const copy = () =>
      navigator.clipboard.writeText(text).then(
        () => notify("Copied."),
        () => notify("This browser does not allow copying: select the text.", true),
      );
    return h("div", { class: "copied" }, h("code", { tabindex: "0" }, text), button("Copy", copy, "plain"));
  }

  async function revoke(token) {
    const done = await ask({
      title: `Revoke token ${token.id}?`,
      content: [
        h(
          "p",
          {},
          `Scope ${token.scope}${token.note ? `, “${token.note}”` : ""}. Workers that joined with it lose their leases at once, and pages that use it are signed out. This cannot be undone.`,
        ),
        token.id === session.own.id && h("p", { class: "trouble" }, "This is the token that you are signed in with."),
      ],
      does: "Revoke it",
      kind: "danger",
      act: async () => {
        await session.api.ask("DELETE", `tokens/${token.id}`);
        return true;
      },
    });
    if (!done) return;
    notify(`Token ${token.id} is revoked.`);
    refresh();
  }

  if (session.allows("admin", session.own.run)) refresh();
  else
    ended(
      new Refused(403, {
        title: "Not for this token",
        detail: "Managing tokens needs an admin token; sign in with one.",
      }),
    );
  return () => asking.abort();
}
