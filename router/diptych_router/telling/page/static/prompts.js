/** System prompts that this browser keeps, to be chosen again. */

import { byId } from "./dom.js";
import { lasting } from "./storage.js";

const PLACE = "diptych.prompts";
const MOST = 50;

const choice = byId("prompts", HTMLSelectElement);
const system = byId("system", HTMLTextAreaElement);
const keep = byId("keep-prompt", HTMLButtonElement);
const forget = byId("forget-prompt", HTMLButtonElement);

/** @returns {string[]} the newest first */
function kept() {
  try {
    const found = JSON.parse(lasting.getItem(PLACE) ?? "[]");
    return Array.isArray(found) ? found.filter((prompt) => typeof prompt === "string") : [];
  } catch {
    return [];
  }
}

/** @param {string[]} prompts */
function store(prompts) {
  try {
    lasting.setItem(PLACE, JSON.stringify(prompts.slice(0, MOST)));
  } catch {
    return; // the browser keeps nothing, or has no room
  }
  showPrompts();
}

/** Show which are kept, and which of them is in the field. */
export function showPrompts() {
  const prompts = kept();
  const now = system.value.trim();
  const options = prompts.map((prompt) => new Option(prompt.split("\n")[0].slice(0, 60), prompt));
  choice.replaceChildren(new Option(prompts.length ? "Saved prompts" : "None saved", ""), ...options);
  choice.value = prompts.includes(now) ? now : "";
  choice.disabled = !prompts.length;
  keep.disabled = !now || prompts.includes(now);
  forget.disabled = !prompts.includes(now);
}

choice.addEventListener("change", () => {
  if (choice.value) system.value = choice.value;
  showPrompts();
});
system.addEventListener("input", showPrompts);
keep.addEventListener("click", () => {
  store([system.value.trim(), ...kept()]);
  choice.focus();
});
forget.addEventListener("click", () => {
  store(kept().filter((prompt) => prompt !== system.value.trim()));
  system.focus();
});
showPrompts();
