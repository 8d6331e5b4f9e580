// The page: signing in, routing by the part of the address after #, and the frame around every view.

import { Api, Refused, Unreachable } from "./api.js";
import { button, field, h } from "./dom.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showServer } from "./server.js";
import { Session, forgetToken, keepToken, keptToken, takeTokenFromAddress } from "./session.js";
import { showTokens } from "./tokens.js";

const top_ = document.getElementById("top");
const main = document.getElementById("main");

const RETRY_S = 3;
const PAGES = { tokens: showTokens, server: showServer }; // by the part after #

let session = null;
let leave = () => {};

/** Show the view that the address names, or the form to sign in. */
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
  const parameters = new URLSearchParams(location.hash.slice(1));
  const run = parameters.get("run");
  const page = run !== null ? "run" : (Object.keys(PAGES).find((each) => parameters.has(each)) ?? "runs");
  frame(run, page);
  const view = { run: showRun, runs: showRuns, ...PAGES }[page];
  main.replaceChildren();
  leave = view(main, session, ended, run);
}

/** Try again: the coordinator does not answer, so the page does not know what the token allows. */
function wait(error) {
  main.replaceChildren(
    h("section", { class: "panel alone" }, h("p", { class: "trouble", role: "alert" }, error.message)),
  );
  const timer = setTimeout(show, 1000 * RETRY_S);
  leave = () => clearTimeout(timer);
}

/** Replace a view that cannot continue with the reason. */
function ended(error) {
  leave();
  if (error instanceof Refused && error.status === 401) return signIn(error);
  main.replaceChildren(
    h(
      "section",
      { class: "panel alone" },
      h("h1", {}, error.title || "Something went wrong"),
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
    h("span", { class: "who" }, session.description),
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

/** Show the form for a token, with the reason why the last one is no longer valid. */
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
  const reason = h("p", { class: "trouble", role: "alert" }, error?.message ?? "");
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
      h("p", { class: "quiet" }, "Sign in with a token to see this coordinator's runs."),
      field("Token", input, "Kept in this tab until it is closed."),
      reason,
      h("button", { type: "submit", class: "primary" }, "Sign in"),
      h("p", { class: "quiet" }, "An admin creates one: ", h("code", {}, "outerstep token create --scope viewer")),
    ),
  );
  input.focus();
}

addEventListener("hashchange", show);
show();
