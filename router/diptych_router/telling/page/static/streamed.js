/**
 * A text in Markdown that is shown while it grows. Blocks that can no longer change are left alone,
 * and the last one is made anew at most once a frame.
 */

import { elementsOf, partsOf } from "./markdown.js";

const REST = 8;
/** How many times as long as it took to show the text nothing is shown anew. */

const DEFINITION = /^ {0,3}\[[^\]\n]+\]:/m;

export class StreamedText {
  /** The text as it came. */
  text = "";
  #box;
  #settled = 0;
  /** @type {ChildNode[]} what may still change, at the end of the box */
  #open = [];
  /** @type {import("./code.js").CodeBlock[]} of the open part */
  #codes = [];
  /** @type {import("./markdown.js").Links} of the settled part */
  #links = Object.create(null);
  #where = { depth: 0, heading: 2 };
  #frame = 0;
  #restsUntil = 0;

  /** @param {HTMLElement} box */
  constructor(box) {
    this.#box = box;
  }

  /** @param {string} words */
  append(words) {
    this.text += words;
    if (!this.#frame) this.#frame = requestAnimationFrame((now) => this.#onFrame(now));
  }

  /** Nothing more comes. Show all. */
  finish() {
    cancelAnimationFrame(this.#frame);
    if (DEFINITION.test(this.text)) this.#startAgain(); // a link may be used before it is defined
    this.#show();
    this.#close();
  }

  /** @param {number} now */
  #onFrame(now) {
    if (now < this.#restsUntil) {
      this.#frame = requestAnimationFrame((later) => this.#onFrame(later));
      return;
    }
    this.#frame = 0;
    const began = performance.now();
    this.#show();
    const ended = performance.now();
    this.#restsUntil = ended + REST * (ended - began);
  }

  #show() {
    const rest = this.text.slice(this.#settled).replaceAll("\r", " ");
    const parts = partsOf(rest, { __proto__: null, ...this.#links });
    const last = parts.findLastIndex(({ type }) => type !== "space");
    if (this.#grow(parts, last)) return;
    for (const node of this.#open) node.remove();
    this.#codes = [];
    this.#open = [];
    parts.forEach((part, at) => this.#add(part, at < last));
  }

  /**
   * Show a part at the end of the box.
   * @param {import("./markdown.js").Token} part
   * @param {boolean} isOver whether nothing that comes can change it
   */
  #add(part, isOver) {
    const where = { ...this.#where };
    const nodes = /** @type {ChildNode[]} */ (elementsOf(part, where, this.#codes));
    this.#box.append(...nodes);
    if (!isOver) {
      this.#open.push(...nodes);
      return;
    }
    this.#where = where;
    if (part.type === "def") this.#links[part.tag] ??= part;
    this.#close();
    this.#settled += part.raw.length;
  }

  /**
   * Whether the open part is one block of code, which only got longer.
   * @param {import("./markdown.js").Token[]} parts
   * @param {number} last
   */
  #grow(parts, last) {
    const [code] = this.#codes;
    const { type, text } = parts[last] ?? {};
    if (last !== 0 || type !== "code" || !code || this.#open[0] !== code.element) return false;
    if (!text.startsWith(code.text)) return false;
    code.grow(text);
    return true;
  }

  #close() {
    for (const code of this.#codes) void code.close();
    this.#codes = [];
  }

  #startAgain() {
    this.#box.replaceChildren();
    this.#settled = 0;
    this.#open = [];
    this.#codes = [];
    this.#where = { depth: 0, heading: 2 };
  }
}
