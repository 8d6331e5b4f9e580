// Questions before what cannot be taken back, and what came of an act.

import { Refused, Unreachable } from "./api.js";
import { button, h } from "./dom.js";

/**
 * Open a dialog with `content` and two buttons. `act` does what it is about: where it is refused, the dialog says why
 * and stays. Resolves with what `act` returned; with undefined where it was called off.
 */
export function ask({ title, content = [], does, act, kind = "primary" }) {
  return new Promise((done) => {
    const said = h("p", { class: "trouble", role: "alert" });
    const go = h("button", { type: "submit", class: kind }, does);
    const form = h(
      "form",
      { onsubmit: (event) => submit(event) },
      h("h2", {}, title),
      ...content,
      said,
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
      said.textContent = "";
      try {
        result = (await act(form)) ?? null;
        dialog.close();
      } catch (error) {
        said.textContent = inWords(error);
      } finally {
        go.disabled = false;
      }
    };
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Tell something that has no part of its own; it goes away by itself. */
export function tell(text, isTrouble = false) {
  const notice = document.getElementById("notice");
  const line = h("p", { class: isTrouble ? "trouble" : null }, text);
  notice.replaceChildren(line);
  setTimeout(() => line.remove(), isTrouble ? 15000 : 6000);
}

/** Do `act`, and tell what it was refused for. */
export async function attempt(act) {
  try {
    return await act();
  } catch (error) {
    tell(inWords(error), true);
    return undefined;
  }
}

function inWords(error) {
  if (error instanceof Refused || error instanceof Unreachable) return error.message;
  console.error(error);
  return `This page has a fault: ${error.message}. Load it again; if it stays, report it.`;
}
