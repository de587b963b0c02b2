/** The fields beside the chat: system prompt and sampling. */

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens"];

/** @returns {string} the system prompt; empty if there is none */
export function systemPrompt() {
  return byId("system", HTMLTextAreaElement).value.trim();
}

/**
 * What the fields ask for, by the names of the API. A field that is empty is left out.
 * @returns {import("./conversation.js").Sampling}
 */
export function sampling() {
  /** @type {import("./conversation.js").Sampling} */
  const chosen = {};
  for (const name of NUMBERS) {
    const field = byId(name, HTMLInputElement);
    if (!field.checkValidity()) throw new Error(`${labelOf(field)}: ${field.validationMessage}`);
    if (field.value !== "") chosen[name] = field.valueAsNumber;
  }
  return chosen;
}

/**
 * Show in the empty fields what the service takes for them.
 * @param {Record<string, number>} defaults by the names of the API
 */
export function showDefaults(defaults) {
  for (const name of NUMBERS) {
    byId(name, HTMLInputElement).placeholder = String(defaults[name] ?? "");
  }
}

/** @param {HTMLInputElement} field */
function labelOf(field) {
  return field.labels?.[0]?.textContent?.trim() ?? field.id;
}
