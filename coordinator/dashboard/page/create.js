// Create a run: with a form that has a field for each key of the spec, or from TOML, typed or from a file.

import { ask, attempt } from "./dialogs.js";
import { button, field, h, write } from "./dom.js";
import { specForm } from "./spec_form.js";

const DIFFERS =
  "Changes in the TOML are not shown in these fields. Create sends what is shown; editing a field replaces the TOML.";

export async function createRun(session) {
  const openapi = await attempt(() => session.api.get("../openapi.json"));
  if (!openapi) return;
  const schemas = openapi.components.schemas;
  const form = specForm(schemas, () => (fromForm = true));
  const spec = h("textarea", { rows: 16, spellcheck: "false", required: true, class: "code" });
  const file = h("input", { type: "file", accept: ".toml,application/toml,text/plain" });
  let fromForm = true; // true if the fields were edited last, false if the TOML was
  file.addEventListener("change", async () => {
    if (file.files.length) spec.value = await file.files[0].text();
  });
  const typed = h(
    "fieldset",
    { class: "spec" },
    field("From a file", file),
    field("The run's spec, TOML", spec, "docs/settings.md has every key with its default."),
  );
  const tabs = [button("By fields", () => show(form.element)), button("As TOML", () => show(typed))];
  const status = h("p", { class: "quiet", role: "status" });
  const show = (shown) => {
    if (shown === typed && fromForm) {
      spec.value = form.toml();
      fromForm = false;
    }
    const differs = shown === form.element && !fromForm && spec.value !== form.toml();
    write(status, differs ? DIFFERS : "");
    [form.element, typed].forEach((each, i) => {
      each.hidden = each.disabled = each !== shown; // disabled fields are not validated
      tabs[i].setAttribute("aria-pressed", each === shown);
    });
  };
  show(form.element);
  const made = await ask({
    title: "Create a run",
    content: [
      h("p", { class: "quiet" }, "The spec of a run cannot be changed later."),
      h("div", { class: "buttons" }, tabs),
      status,
      form.element,
      typed,
    ],
    does: "Create",
    act: () => session.api.ask("POST", "runs", { text: typed.hidden ? form.toml() : spec.value }),
  });
  if (made) location.hash = new URLSearchParams({ run: made.name });
}
