// A form with a field for each key of the run spec, made from the coordinator's own description of it (OpenAPI), so that
// it has the keys, defaults and words of this very version. What is left empty is left out of the spec.

import { field, h } from "./dom.js";

const OPENED = ["model", "data", "sync"]; // what nobody can do without

/** Return the form's element, and `toml()`, the spec that its fields make. `changed` is called whenever they do. */
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
      const isNeeded = needed && Boolean(schema.required?.includes(key)); // also of a section that may be left out
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

/** Return the schema that this one refers to, if it is a section of its own. */
function referred(schemas, schema) {
  const reference = schema.$ref ?? schema.anyOf?.find((each) => each.$ref)?.$ref;
  return reference && schemas[reference.split("/").at(-1)];
}

/** Return what a value may be: the alternatives but null. */
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

/** Return what was typed as a value in TOML: as it is where it is a number and may be one, or has to be a list or a
 * table; otherwise quoted, so that the coordinator can say of which key it is wrong. */
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
