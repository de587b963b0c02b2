/** The fields beside the chat: system prompt, sampling and tools. */

import { byId, make } from "./dom.js";
import { TOOLS, describedIn } from "./tools.js";

const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens"];
const OWN_TOOLS = "own_tools";
const CHECKED = [...NUMBERS, OWN_TOOLS];
const FIELDS = ["model", "system", "tool_choice", ...Object.keys(TOOLS), ...CHECKED];

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

/** @returns {{tools: import("./tools.js").Described[], choice: string}} see `offerOf` */
export function offered() {
  const choice = field("tool_choice").value;
  if (choice === "none") return { tools: [], choice };
  const chosen = Object.values(TOOLS).filter(({ name }) => byId(name, HTMLInputElement).checked);
  return { tools: [...chosen, ...describedIn(field(OWN_TOOLS).value)], choice };
}

/**
 * Whether every field has a value that can be sent. The first that has none is shown with the reason.
 * @returns {boolean}
 */
export function areFieldsValid() {
  const wrong = CHECKED.map(field).filter((each) => !check(each));
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
  return Object.fromEntries(FIELDS.map(field).map((at) => [at.id, isTick(at) ? String(at.checked) : at.value]));
}

/** @param {import("./conversation.js").Fields} kept */
export function fillFields(kept) {
  for (const name of FIELDS) {
    const at = field(name);
    const value = kept[name];
    if (typeof value !== "string") continue;
    if (at instanceof HTMLSelectElement && ![...at.options].some((one) => one.value === value)) continue;
    if (isTick(at)) at.checked = value === "true";
    else at.value = value; // but for a model that is gone
  }
}

/** @typedef {HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement} Field */

/** @param {string} name @returns {Field} */
function field(name) {
  return /** @type {Field} */ (byId(name, HTMLElement));
}

/** @param {Field} at @returns {at is HTMLInputElement} */
function isTick(at) {
  return at.type === "checkbox";
}

/** @param {string} name */
function numberField(name) {
  return byId(name, HTMLInputElement);
}

/**
 * Say beside a field what is wrong with it, if anything is.
 * @param {Field} field
 * @returns {boolean}
 */
function check(field) {
  const reason = field instanceof HTMLInputElement ? reasonAgainst(field) : reasonAgainstTools(field.value);
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

/** @param {string} text */
function reasonAgainstTools(text) {
  try {
    describedIn(text);
    return "";
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    return error instanceof SyntaxError ? `are no JSON: ${words}` : words;
  }
}

/** @param {Field} field */
function labelOf(field) {
  return field.labels?.[0]?.textContent?.trim() ?? field.id;
}

/** @param {Field} field */
function problemOf({ id }) {
  return `${id}-problem`;
}

for (const each of CHECKED.map(field)) {
  const problem = make("p", "problem");
  problem.id = problemOf(each);
  each.labels?.[0]?.after(problem);
  each.setAttribute("aria-describedby", problem.id);
  each.addEventListener("change", () => check(each));
  each.addEventListener("input", () => problem.textContent && check(each));
}
