// Create a run, from the TOML of its spec: a file, or what is typed.

import { ask } from "./dialogs.js";
import { field, h } from "./dom.js";

const EXAMPLE = `name = "my-run"

[model]
preset = "llama-150m"

[data]
source = "/data/text"

[sync]
rounds = 200
inner_steps = 500
`;

export async function createRun(session) {
  const spec = h("textarea", {
    name: "spec",
    rows: 16,
    spellcheck: "false",
    required: true,
    class: "code",
    value: EXAMPLE,
  });
  const file = h("input", { type: "file", accept: ".toml,application/toml,text/plain" });
  file.addEventListener("change", async () => {
    if (file.files.length) spec.value = await file.files[0].text();
  });
  const made = await ask({
    title: "Create a run",
    content: [
      field("From a file", file),
      field(
        "The run's spec, TOML",
        spec,
        "A spec never changes afterwards. docs/settings.md has every key with its default.",
      ),
    ],
    does: "Create",
    act: () => session.api.ask("POST", "runs", { text: spec.value }),
  });
  if (made) location.hash = new URLSearchParams({ run: made.name });
}
