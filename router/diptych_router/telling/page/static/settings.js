/** The fields beside the chat: system prompt and sampling. */

import { byId, make } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens"];
const FIELDS = ["model", "system", ...NUMBERS];

/** @returns {string} the system prompt; empty if there is none */
export function systemPrompt() {
  return byId("system", HTMLTextAreaElement).value.trim();
}

/**
 * What the fields ask for, by the names of the API. A field that is empty is left out.
 * @returns {import("./conversation.js").Sampling}
 */
export function sampling() {
  const filled = NUMBERS.map(numberField).filter(({ value }) => value !== "");
  return Object.fromEntries(filled.map(({ id, valueAsNumber }) => [id, valueAsNumber]));
}

/**
 * Whether every field has a value that can be sent. The first that has none is shown with the reason.
 * @returns {boolean}
 */
export function areFieldsValid() {
  const wrong = NUMBERS.map(numberField).filter((field) => !check(field));
  if (!wrong[0]) return true;
  byId("settings", HTMLDetailsElement).open = true;
  wrong[0].focus();
  return false;
}

/**
 * Show in the empty fields what the service takes for them.
 * @param {Record<string, number>} defaults by the names of the API
 */
export function showDefaults(defaults) {
  for (const name of NUMBERS) numberField(name).placeholder = String(defaults[name] ?? "");
}

/** @returns {import("./conversation.js").Fields} what all fields say */
export function fields() {
  return Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
}

/** @param {import("./conversation.js").Fields} kept */
export function fillFields(kept) {
  for (const name of FIELDS) {
    const at = field(name);
    const value = kept[name];
    if (typeof value !== "string") continue;
    if (at instanceof HTMLSelectElement && ![...at.options].some((one) => one.value === value)) continue;
    at.value = value; // but for a model that is gone
  }
}

/** @param {string} name */
function field(name) {
  return /** @type {HTMLInputElement | HTMLSelectElement} */ (byId(name, HTMLElement));
}

/** @param {string} name */
function numberField(name) {
  return byId(name, HTMLInputElement);
}

/**
 * Say beside a field what is wrong with it, if anything is.
 * @param {HTMLInputElement} field
 * @returns {boolean}
 */
function check(field) {
  const reason = reasonAgainst(field);
  byId(problemOf(field), HTMLElement).textContent = reason && `${labelOf(field)} ${reason}.`;
  field.ariaInvalid = reason ? "true" : null;
  return !reason;
}

/** @param {HTMLInputElement} field */
function reasonAgainst({ validity, min, max, step, value }) {
  if (validity.badInput) return "is not a number";
  if (validity.rangeUnderflow) return `is at least ${min}, not ${value}`;
  if (validity.rangeOverflow) return `is at most ${max}, not ${value}`;
  return step === "1" && validity.stepMismatch ? `is a whole number, not ${value}` : "";
}

/** @param {HTMLInputElement} field */
function labelOf(field) {
  return field.labels?.[0]?.textContent?.trim() ?? field.id;
}

/** @param {HTMLInputElement} field */
function problemOf({ id }) {
  return `${id}-problem`;
}

for (const field of NUMBERS.map(numberField)) {
  const problem = make("p", "problem");
  problem.id = problemOf(field);
  field.labels?.[0]?.after(problem);
  field.setAttribute("aria-describedby", problem.id);
  field.addEventListener("change", () => check(field));
  field.addEventListener("input", () => problem.textContent && check(field));
}
