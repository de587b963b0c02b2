/** The conversation as it is seen. */

import { ShownCall } from "./calls.js";
import { button, byId, copyButton, isSend, make } from "./dom.js";
import { StreamedText } from "./streamed.js";

const NEAR_PX = 80;
/** Who has scrolled further up than this is reading, and is left there. */

const log = byId("log", HTMLElement);
const empty = byId("empty", HTMLElement);

let isAtEnd = true;
let lastTop = 0;
log.addEventListener("scroll", () => {
  const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  if (isNear || log.scrollTop < lastTop) isAtEnd = isNear; // what grows scrolls nobody up
  lastTop = log.scrollTop;
});
log.addEventListener("click", ({ target }) => {
  if (target instanceof Element && target.closest("summary")) isAtEnd = false; // is read, too
});
const sizes = new ResizeObserver(() => {
  if (isAtEnd) log.scrollTop = log.scrollHeight;
});
sizes.observe(log);

/**
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {object} Actions what can be done with a message
 * @property {(question: Message) => void} retry also after an answer whose calls have results
 * @property {(answer: Message, call: import("./tools.js").Call, result: string) => void} give
 * @property {(question: Message, text: string) => boolean} edit false: it is not sent yet
 * @property {(version: Message) => void} show
 */

/** @param {import("./tools.js").Call[]} calls whether all have results */
export function areAnswered(calls) {
  return calls.every(({ result }) => result !== undefined);
}

export class Transcript {
  /** @type {WeakMap<Message, Shown>} */
  #boxes = new WeakMap();
  #actions;

  /** @param {Actions} actions */
  constructor(actions) {
    this.#actions = actions;
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    const { path } = conversation;
    const focused = document.activeElement;
    const left = focused?.closest(".message");
    const place = [...log.querySelectorAll(".message")].findIndex((box) => box === left);
    empty.hidden = path.length > 0;
    const boxes = path.map((message) => this.shown(message).box);
    for (const old of log.querySelectorAll(".message")) {
      if (!boxes.includes(/** @type {HTMLElement} */ (old))) old.remove();
    }
    log.append(...boxes.filter((box, at) => log.children[at + 1] !== box));
    path.forEach((message, at) => {
      const versions = conversation.versions(message);
      const shown = this.shown(message);
      shown.showCalls(message.calls ?? []);
      shown.finishCalls(at === path.length - 1, this.#actions);
      shown.showTools(versions, path[at - 1], this.#actions, at === path.length - 1);
    });
    if (focused?.isConnected || !boxes[place]) return;
    const buttons = [...boxes[place].querySelectorAll("button")];
    const same = buttons.find((button) => !button.disabled && button.ariaLabel === focused?.ariaLabel);
    focus(same ?? boxes[place]);
  }

  /** @param {Message} message */
  shown(message) {
    const known = this.#boxes.get(message);
    if (known) return known;
    const made = new Shown(message);
    this.#boxes.set(message, made);
    return made;
  }

  /**
   * Nothing is changed while an answer comes.
   * @param {boolean} isAnswering
   */
  setAnswering(isAnswering) {
    const focused = document.activeElement?.closest(".tools button");
    if (isAnswering && focused) focus(/** @type {HTMLElement} */ (focused.closest(".message")));
    for (const button of log.querySelectorAll(".tools button")) {
      if (button instanceof HTMLButtonElement) button.disabled = isAnswering || isEnd(button);
    }
  }

  showEnd() {
    isAtEnd = true;
    log.scrollTop = log.scrollHeight;
  }
}

/**
 * Put the focus there, for whoever works by keyboard, and scroll nowhere.
 * @param {HTMLElement} element
 */
function focus(element) {
  if (element.localName !== "button") element.tabIndex = -1;
  element.focus({ preventScroll: true });
}

/** A message on the page. */
export class Shown {
  #message;
  #text = make("div", "text");
  #tools = make("div", "tools");
  #pace = make("p", "pace quiet");
  #words;
  /** @type {HTMLElement | null} */
  #reasoning = null;
  /** @type {ShownCall[]} */
  #calls = [];

  /** @param {Message} message */
  constructor(message) {
    this.#message = message;
    const { role, text, image, reasoning } = message;
    const who = make("p", "who", role === "user" ? "You" : "Model");
    this.box = make("article", `message ${role}`, who, this.#text);
    sizes.observe(this.box);
    this.#words = new StreamedText(this.#text);
    if (role === "user") {
      this.#text.dir = "auto";
      this.#text.textContent = text;
    } else if (text || reasoning) {
      if (reasoning) this.appendReasoning(reasoning);
      this.append(text);
      this.setAnswering(false);
    }
    if (image) {
      const picture = make("img", "");
      picture.src = image;
      picture.alt = "The image of this message";
      this.box.append(picture);
    }
    this.box.append(this.#tools);
  }

  /** @param {boolean} answering */
  setAnswering(answering) {
    if (!answering) this.#words.finish();
    this.box.classList.toggle("answering", answering);
    this.box.setAttribute("aria-busy", String(answering));
    if (answering) this.#tools.before(this.#pace);
    else this.#pace.remove();
  }

  /** @param {string} words */
  append(words) {
    this.#words.append(words);
  }

  /** @param {string} words what the model thinks before it answers */
  appendReasoning(words) {
    if (!this.#reasoning) {
      this.#reasoning = make("div", "thoughts quiet");
      this.#reasoning.dir = "auto";
      this.#text.before(make("details", "reasoning", make("summary", "", "Reasoning"), this.#reasoning));
    }
    this.#reasoning.append(words);
  }

  /** @param {import("./tools.js").Call[]} calls as far as they have come */
  showCalls(calls) {
    for (const call of calls.slice(this.#calls.length)) {
      const shown = new ShownCall(call);
      (this.#calls.at(-1)?.element ?? this.#text).after(shown.element);
      this.#calls.push(shown);
    }
    for (const shown of this.#calls) shown.grow();
  }

  /**
   * @param {boolean} areOpen whether the calls may still get results
   * @param {Actions} actions
   */
  finishCalls(areOpen, { give }) {
    const message = this.#message;
    this.#calls.forEach((shown, at) => {
      const call = message.calls?.[at];
      shown.finish(call && areOpen ? (result) => give(message, call, result) : null);
    });
  }

  /** Let whoever works by keyboard answer the first call that waits for a result. */
  focusCall() {
    return this.#calls.some((call) => call.focus());
  }

  /** @param {string} words how fast the answer comes */
  setPace(words) {
    this.#pace.textContent = words;
  }

  /** @param {Node} node */
  attach(node) {
    this.#tools.before(node);
  }

  /**
   * What can be done with the message now, and what became of it.
   * @param {Message[]} versions all that stand at its place
   * @param {Message | undefined} before the message before
   * @param {Actions} actions
   * @param {boolean} isLast
   */
  showTools(versions, before, actions, isLast) {
    const message = this.#message;
    const isQuestion = message.role === "user";
    const question = isQuestion ? message : before;
    /** @type {Node[]} */
    const tools = [];
    if (message.problem) tools.push(make("p", "problem", message.problem));
    if (versions.length > 1) tools.push(versionsOf(message, versions, actions.show));
    if (isQuestion) tools.push(button("Edit", "Edit this question", () => this.#edit(actions)));
    else if (message.text) tools.push(copyButton("Copy this answer", () => message.text));
    if (isLast && message.calls && areAnswered(message.calls)) {
      tools.push(button("Go on", "Go on with these results", () => actions.retry(message)));
    }
    if (question && (!isQuestion || message.problem)) {
      tools.push(button("Retry", "Retry this question", () => actions.retry(question)));
    }
    this.#tools.replaceChildren(...tools);
  }

  /** @param {Actions} actions */
  #edit(actions) {
    const field = make("textarea", "");
    field.value = this.#message.text;
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    field.ariaLabel = "The question in other words";
    field.dir = "auto";
    const send = make("button", "main small", "Send");
    const cancel = button("Cancel", "", () => end());
    const form = make("form", "edit", field, make("div", "buttons", cancel, send));
    const end = () => {
      form.replaceWith(this.#text);
      this.#tools.hidden = false;
      this.#tools.querySelector("button")?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text && actions.edit(this.#message, text)) end();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it would stop an answer, too
      end();
    });
    field.addEventListener("keydown", (event) => {
      if (!isSend(event)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.#text.replaceWith(form);
    this.#tools.hidden = true;
    field.focus();
  }
}

/**
 * The way to the other versions of a message.
 * @param {Message} message
 * @param {Message[]} versions
 * @param {(version: Message) => void} show
 */
function versionsOf(message, versions, show) {
  const at = versions.indexOf(message);
  const before = button("‹", "The version before", () => show(versions[at - 1]));
  const after = button("›", "The next version", () => show(versions[at + 1]));
  before.dataset.end = String(at === 0);
  after.dataset.end = String(at === versions.length - 1);
  for (const way of [before, after]) way.disabled = isEnd(way);
  const count = make("span", "quiet", `${at + 1} of ${versions.length}`);
  return make("span", "versions", before, count, after);
}

/** @param {HTMLButtonElement} way whether it leads nowhere */
function isEnd(way) {
  return way.dataset.end === "true";
}
