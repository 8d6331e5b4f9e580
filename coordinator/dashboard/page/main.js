// The page: who looks, what is looked at (the part of the address behind #), and the frame around it.

import { Api, Refused, Unreachable } from "./api.js";
import { button, field, h } from "./dom.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showServer } from "./server.js";
import { Session, forgetToken, keepToken, keptToken, takeTokenFromAddress } from "./session.js";
import { showTokens } from "./tokens.js";

const top_ = document.getElementById("top");
const main = document.getElementById("main");

const ASK_AGAIN_S = 3;
const PAGES = { tokens: showTokens, server: showServer }; // by what is behind the #

let session = null;
let leave = () => {};

/** Show what the address says, to whoever holds the token. */
async function show() {
  leave();
  leave = () => {};
  takeTokenFromAddress();
  const token = keptToken();
  if (token === null) return signIn();
  if (session?.api.token !== token) {
    try {
      const api = new Api(token);
      session = new Session(api, await api.get("tokens/self"));
    } catch (error) {
      return error instanceof Unreachable ? wait(error) : signIn(error);
    }
  }
  const asked = new URLSearchParams(location.hash.slice(1));
  const run = asked.get("run");
  const page = run !== null ? "run" : (Object.keys(PAGES).find((each) => asked.has(each)) ?? "runs");
  frame(run, page);
  const view = { run: showRun, runs: showRuns, ...PAGES }[page];
  main.replaceChildren();
  leave = view(main, session, ended, run);
}

/** Nobody answers, so nobody knows what the token is good for: ask again. */
function wait(error) {
  main.replaceChildren(
    h("section", { class: "panel alone" }, h("p", { class: "trouble", role: "alert" }, error.message)),
  );
  const timer = setTimeout(show, 1000 * ASK_AGAIN_S);
  leave = () => clearTimeout(timer);
}

/** What was asked for is not to be had any more. */
function ended(error) {
  leave();
  if (error instanceof Refused && error.status === 401) return signIn(error);
  main.replaceChildren(
    h(
      "section",
      { class: "panel alone" },
      h("h1", {}, error.title || "That went wrong"),
      h("p", {}, error.message),
      h("p", {}, h("a", { href: "#" }, "All runs")),
    ),
  );
}

function frame(run, page) {
  document.title = run === null ? "Outerstep" : `${run} · Outerstep`;
  const link = (href, label, current) => h("a", { href, "aria-current": current ? "page" : null }, label);
  const tokens = session.own.allows.includes("admin");
  top_.replaceChildren(
    h("a", { class: "brand", href: "#" }, h("span", { class: "mark", "aria-hidden": "true" }), "Outerstep"),
    h(
      "nav",
      { "aria-label": "Pages" },
      link("#", "Runs", page === "runs"),
      tokens && link("#tokens", "Tokens", page === "tokens"),
      session.allows("operator") && link("#server", "Server", page === "server"),
    ),
    h("span", { class: "who" }, session.said),
    button("Sign out", () => signOut(), "plain"),
  );
}

function signOut() {
  leave();
  leave = () => {};
  forgetToken();
  session = null;
  history.replaceState(null, "", location.pathname);
  signIn();
}

/** Show the form for a token, with why the one before is good no more. */
function signIn(error = null) {
  session = null;
  if (error?.status === 401) forgetToken();
  document.title = "Outerstep";
  top_.replaceChildren();
  const input = h("input", {
    type: "password",
    name: "token",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
  });
  const said = h("p", { class: "trouble", role: "alert" }, error?.message ?? "");
  const submit = async (event) => {
    event.preventDefault();
    keepToken(input.value.trim());
    await show();
  };
  main.replaceChildren(
    h(
      "form",
      { class: "panel alone", onsubmit: submit },
      h("h1", {}, h("span", { class: "mark", "aria-hidden": "true" }), "Outerstep"),
      h("p", { class: "quiet" }, "This coordinator shows its runs to whoever holds a token."),
      field("Token", input, "It stays in this tab, until the tab is closed."),
      said,
      h("button", { type: "submit", class: "primary" }, "Sign in"),
      h("p", { class: "quiet" }, "An admin makes one: ", h("code", {}, "outerstep token create --scope viewer")),
    ),
  );
  input.focus();
}

addEventListener("hashchange", show);
show();
