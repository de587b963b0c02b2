/** Helpers for the document. Text is always set as text, never as HTML. */

/**
 * The element of the page with this id.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function byId(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${id}`);
  return found;
}

/**
 * A new element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} className
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/**
 * Set a text, and touch nothing where it is there already.
 * @param {Element} element
 * @param {string} words
 */
export function setText(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

/**
 * @param {string} words
 * @param {string} label longer words for who does not see where it is
 * @param {() => void} act
 */
export function button(words, label, act) {
  const made = make("button", "small", words);
  made.type = "button";
  if (label) made.ariaLabel = label;
  made.addEventListener("click", act);
  return made;
}

/**
 * Whether a key sends what is written: Enter, but not with Shift, and not while a word is composed.
 * @param {KeyboardEvent} event
 */
export function isSend({ key, shiftKey, isComposing }) {
  return key === "Enter" && !shiftKey && !isComposing;
}

/**
 * A list of terms and values.
 * @param {[string, string][]} pairs
 * @returns {HTMLDListElement}
 */
export function termsOf(pairs) {
  const rows = pairs.map(([term, value]) =>
    make("div", "", make("dt", "", term), make("dd", "", value)),
  );
  return make("dl", "", ...rows);
}

/**
 * A button that copies a text.
 * @param {string} label
 * @param {() => string} text
 */
export function copyButton(label, text) {
  const made = button("Copy", label, async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), 2000);
  });
  return made;
}

/** @param {string} text */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = make("textarea", "hidden", text); // without TLS a browser has only the older way
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
