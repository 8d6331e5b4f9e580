// Create a run: by a form with a field for each key of its spec, or from TOML, a file or what is typed.

import { ask, attempt } from "./dialogs.js";
import { button, field, h, write } from "./dom.js";
import { specForm } from "./spec_form.js";

const DIFFERS =
  "What was changed in the TOML is not in these fields. Create sends what is shown; a change here takes the TOML's place.";

export async function createRun(session) {
  const openapi = await attempt(() => session.api.get("../openapi.json"));
  if (!openapi) return;
  const schemas = openapi.components.schemas;
  const form = specForm(schemas, () => (fromForm = true));
  const spec = h("textarea", { rows: 16, spellcheck: "false", required: true, class: "code" });
  const file = h("input", { type: "file", accept: ".toml,application/toml,text/plain" });
  let fromForm = true; // the fields were changed since the TOML was
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
  const said = h("p", { class: "quiet", role: "status" });
  const show = (shown) => {
    if (shown === typed && fromForm) {
      spec.value = form.toml();
      fromForm = false;
    }
    const differs = shown === form.element && !fromForm && spec.value !== form.toml();
    write(said, differs ? DIFFERS : "");
    [form.element, typed].forEach((each, i) => {
      each.hidden = each.disabled = each !== shown; // what is disabled need not be filled in
      tabs[i].setAttribute("aria-pressed", each === shown);
    });
  };
  show(form.element);
  const made = await ask({
    title: "Create a run",
    content: [
      h("p", { class: "quiet" }, "A spec never changes afterwards."),
      h("div", { class: "buttons" }, tabs),
      said,
      form.element,
      typed,
    ],
    does: "Create",
    act: () => session.api.ask("POST", "runs", { text: typed.hidden ? form.toml() : spec.value }),
  });
  if (made) location.hash = new URLSearchParams({ run: made.name });
}
