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
  const button = make("button", "small", "Copy");
  button.type = "button";
  button.ariaLabel = label;
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
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
