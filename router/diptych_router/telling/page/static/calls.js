/** Calls of tools as they are seen: what the model asks for, and what it is told. */

import { CodeBlock } from "./code.js";
import { button, isSend, make, setText } from "./dom.js";
import { TOOLS } from "./tools.js";

/** @typedef {import("./tools.js").Call} Call */

/** One call. */
export class ShownCall {
  #call;
  #name = make("strong", "");
  #code = new CodeBlock("", "json");
  #told = make("div", "told-call");
  /** What #told shows: a result, a form for one (null), or nothing yet. @type {string | null | undefined} */
  #shown;

  /** @param {Call} call */
  constructor(call) {
    this.#call = call;
    this.element = make("section", "call", make("p", "", "Calls ", this.#name), this.#code.element, this.#told);
    this.grow();
  }

  /** Show what has come of the call. */
  grow() {
    const { name, arguments: asked } = this.#call;
    setText(this.#name, name);
    this.element.ariaLabel = `Call of ${name}`;
    if (this.#code.text !== asked) this.#code.grow(asked);
  }

  /**
   * The call is whole: show its result or, where its user may give one, a form for it.
   * @param {((result: string) => void) | null} give null: nobody waits for it
   */
  finish(give) {
    const { name, result } = this.#call;
    const shown = result ?? (give ? null : undefined);
    if (this.#shown === shown && this.#told.hasChildNodes()) return;
    if (this.#shown === undefined) void this.#code.close();
    this.#shown = shown;
    if (result !== undefined) {
      const words = make("div", "result", result);
      words.dir = "auto";
      const who = Object.hasOwn(TOOLS, name) && TOOLS[name].run ? "This page" : "You";
      this.#told.replaceChildren(make("p", "who", `${who} answered`), words);
    } else if (give) this.#told.replaceChildren(formOf(name, give));
    else this.#told.replaceChildren(make("p", "quiet", "It has no result."));
  }

  /** @returns {boolean} whether there is a form, which has the focus now */
  focus() {
    const field = this.#told.querySelector("textarea");
    field?.focus();
    return field !== null;
  }
}

/**
 * @param {string} name
 * @param {(result: string) => void} give
 */
function formOf(name, give) {
  const field = make("textarea", "");
  field.rows = 2;
  field.dir = "auto";
  const words = Object.hasOwn(TOOLS, name) ? "Your answer" : `What ${name} answers`;
  const label = make("label", "", words, field);
  const form = make("form", "edit", label, make("div", "buttons", button("Answer", "", () => form.requestSubmit())));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    give(field.value);
  });
  field.addEventListener("keydown", (event) => {
    if (!isSend(event)) return;
    event.preventDefault();
    form.requestSubmit();
  });
  return form;
}
