// Dialogs before actions that cannot be undone, and notices about their results.

import { Refused, Unreachable } from "./api.js";
import { button, h } from "./dom.js";

/**
 * Open a dialog with `content` and two buttons. The second one calls `act`; if that fails, the dialog shows the reason
 * and stays open. Resolves with the result of `act`, or with undefined if the dialog was cancelled.
 */
export function ask({ title, content = [], does, act, kind = "primary" }) {
  return new Promise((done) => {
    const reason = h("p", { class: "trouble", role: "alert" });
    const go = h("button", { type: "submit", class: kind }, does);
    const form = h(
      "form",
      { onsubmit: (event) => submit(event) },
      h("h2", {}, title),
      ...content,
      reason,
      h(
        "div",
        { class: "buttons" },
        button("Cancel", () => dialog.close()),
        go,
      ),
    );
    const dialog = h("dialog", { "aria-label": title, onclose: () => close() }, form);
    let result;
    const close = () => {
      dialog.remove();
      done(result);
    };
    const submit = async (event) => {
      event.preventDefault();
      go.disabled = true;
      reason.textContent = "";
      try {
        result = (await act(form)) ?? null;
        dialog.close();
      } catch (error) {
        reason.textContent = message(error);
      } finally {
        go.disabled = false;
      }
    };
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Show a notice, which disappears after a few seconds. */
export function notify(text, isTrouble = false) {
  const notice = document.getElementById("notice");
  const line = h("p", { class: isTrouble ? "trouble" : null }, text);
  notice.replaceChildren(line);
  setTimeout(() => line.remove(), isTrouble ? 15000 : 6000);
}

/** Call `act`; if it fails, show a notice with the reason. */
export async function attempt(act) {
  try {
    return await act();
  } catch (error) {
    notify(message(error), true);
    return undefined;
  }
}

function message(error) {
  if (error instanceof Refused || error instanceof Unreachable) return error.message;
  console.error(error);
  return `Error in this page: ${error.message}. Reload it; if the error persists, report it.`;
}
