// A form with a field for each key of the run spec, generated from the coordinator's OpenAPI schema, so that it has the
// keys, defaults and descriptions of this version. Empty fields are omitted from the spec.

import { field, h } from "./dom.js";

const OPENED = ["model", "data", "sync"]; // sections that every run needs

/** Return the form's element, and `toml()`, the spec with its values. `changed` is called whenever a value changes. */
export function specForm(schemas, changed) {
  const controls = []; // [section, key, control, the value in TOML], in the order of the spec
  const own = [];
  const sections = [];
  const add = (section, key, schema, needed) => {
    const control = controlOf(schema, needed);
    controls.push([section, key, control, (text) => inToml(schema, text)]);
    return field(section ? `${section}.${key}` : key, control, hintOf(schema));
  };
  const fieldsOf = (schema, section, needed) =>
    Object.entries(schema.properties).flatMap(([key, each]) => {
      const inner = referred(schemas, each);
      const isNeeded = needed && Boolean(schema.required?.includes(key)); // not in an optional section
      return inner ? fieldsOf(inner, `${section}.${key}`, isNeeded) : [add(section, key, each, isNeeded)];
    });
  for (const [key, schema] of Object.entries(schemas.RunSpec.properties)) {
    const inner = referred(schemas, schema);
    const needed = schemas.RunSpec.required.includes(key);
    if (inner) {
      const head = [h("code", {}, `[${key}]`), " ", inner.description];
      const opened = OPENED.includes(key);
      sections.push(h("details", { open: opened }, h("summary", {}, head), ...fieldsOf(inner, key, needed)));
    } else own.push(add("", key, schema, needed));
  }
  const element = h("fieldset", { class: "spec", oninput: () => changed() }, ...own, ...sections);
  return { element, toml: () => tomlOf(controls) };
}

/** Return the schema of a section that this one refers to, if any. */
function referred(schemas, schema) {
  const reference = schema.$ref ?? schema.anyOf?.find((each) => each.$ref)?.$ref;
  return reference && schemas[reference.split("/").at(-1)];
}

/** Return the alternatives for a value, without null. */
const kinds = (schema) => (schema.anyOf ?? [schema]).filter((each) => each.type !== "null");

function controlOf(schema, required) {
  const [kind, ...others] = kinds(schema);
  const choices = kind.enum ?? (kind.type === "boolean" ? ["true", "false"] : null);
  if (choices && !others.length)
    return h("select", { required }, ["", ...choices].map((each) => h("option", { value: each }, each || "–")));
  const numeric = kinds(schema).every((each) => ["integer", "number"].includes(each.type));
  const mode = !numeric ? null : kind.type === "integer" ? "numeric" : "decimal";
  return h("input", { type: "text", required, inputmode: mode, spellcheck: "false", autocomplete: "off" });
}

function hintOf(schema) {
  const otherwise = schema.default ?? null;
  const words = [schema.description, otherwise === null ? null : `default ${JSON.stringify(otherwise)}`];
  return words.filter((each) => each).join("; ");
}

/** Return the typed text as a TOML value: unquoted if it is a number and may be one, or must be a list or a table;
 * otherwise quoted, so that the coordinator's error names the key. */
function inToml(schema, text) {
  const types = kinds(schema).map((each) => each.type);
  if (types.includes("boolean")) return text;
  if (types.includes("object") || (types.includes("array") && text.startsWith("["))) return text;
  const isNumber = /^[+-]?(\d[\d_]*)(\.\d[\d_]*)?([eE][+-]?\d+)?$/.test(text);
  if (isNumber && types.some((each) => ["integer", "number"].includes(each))) return text;
  return JSON.stringify(text).replaceAll("\x7f", "\\u007f");
}

function tomlOf(controls) {
  const sections = new Map([["", []]]);
  for (const [section, key, control, value] of controls) {
    const text = control.value.trim();
    if (!text) continue;
    if (!sections.has(section)) sections.set(section, [`\n[${section}]`]);
    sections.get(section).push(`${key} = ${value(text)}`);
  }
  return `${[...sections.values()].flat().join("\n")}\n`;
}
