/** The conversation as it is seen. */

import { byId, make } from "./dom.js";

const NEAR_PX = 80;
/** Who has scrolled further up than this is reading, and is left there. */

export class Transcript {
  #log = byId("log", HTMLElement);
  #empty = byId("empty", HTMLElement);

  /** @param {import("./conversation.js").Message} message */
  add(message) {
    this.#empty.hidden = true;
    const text = make("div", "text", message.text);
    const box = make("article", `message ${message.role}`, whoOf(message.role), text);
    if (message.image) {
      const image = make("img", "");
      image.src = message.image;
      image.alt = "The image of this message";
      box.append(image);
    }
    this.#log.append(box);
    box.scrollIntoView({ block: "nearest" });
    return new Shown(box, text, this.#log);
  }

  /** Take the newest message away if it is an answer. */
  removeAnswer() {
    const last = this.#log.lastElementChild;
    if (last?.classList.contains("assistant")) last.remove();
  }

  clear() {
    for (const box of [...this.#log.querySelectorAll(".message")]) box.remove();
    this.#empty.hidden = false;
  }
}

/** A message on the page. */
export class Shown {
  /**
   * @param {HTMLElement} box
   * @param {HTMLElement} text
   * @param {HTMLElement} log
   */
  constructor(box, text, log) {
    this.box = box;
    this.text = text;
    this.log = log;
    /** @type {HTMLElement | null} */
    this.reasoning = null;
  }

  /** @param {boolean} answering */
  setAnswering(answering) {
    this.box.classList.toggle("answering", answering);
    this.box.setAttribute("aria-busy", String(answering));
  }

  /** @param {string} words */
  append(words) {
    const follows = this.#isNearEnd();
    this.text.append(words);
    if (follows) this.#showEnd();
  }

  /** @param {string} words what the model thinks before it answers */
  appendReasoning(words) {
    if (!this.reasoning) {
      this.reasoning = make("div", "text quiet");
      this.text.before(make("details", "", make("summary", "", "Reasoning"), this.reasoning));
    }
    this.reasoning.append(words);
  }

  /** @param {Node} node */
  attach(node) {
    const follows = this.#isNearEnd();
    this.box.append(node);
    if (follows) this.#showEnd();
  }

  #isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  #showEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

/** @param {"user" | "assistant"} role */
function whoOf(role) {
  return make("p", "who", role === "user" ? "You" : "Model");
}
