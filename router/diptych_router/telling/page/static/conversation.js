/**
 * A conversation, and what is sent of it. It is a tree: a question that is asked in other words, and
 * an answer that is made anew, stand beside the first ones. Nothing here knows the document.
 */

/**
 * @typedef {Record<string, number>} Sampling by the names of the API
 * @typedef {object} Message
 * @property {number} id
 * @property {number} parent the id of the message before; 0 for a first question
 * @property {"user" | "assistant"} role
 * @property {string} text
 * @property {string} [image] a data: URL
 * @property {string} [reasoning]
 * @property {import("./tools.js").Call[]} [calls] of an answer that calls tools; the next answer follows it
 * @property {string} [problem] why a question has no answer, or why an answer is not whole
 * @typedef {Record<string, string>} Fields what the settings say, by the ids of their fields
 */

/** An id that no other conversation has. */
export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

export class Conversation {
  id = newId();
  /** When the last question was asked, in ms of Unix time. */
  changed = 0;
  /** @type {Fields} */
  fields = {};
  /** @type {Message[]} in the order in which they were made */
  messages = [];
  /** @type {Map<number, number>} which of the messages after one, or after 0, is shown */
  #shown = new Map();

  /** The messages that are shown: one of each fork. */
  get path() {
    /** @type {Message[]} */
    const path = [];
    for (let at = this.#after(0); at; at = this.#after(at.id)) path.push(at);
    return path;
  }

  get title() {
    return this.messages[0]?.text.slice(0, 80) ?? "";
  }

  /**
   * All messages that stand at the place of this one.
   * @param {Message} message
   */
  versions({ parent }) {
    return this.messages.filter((other) => other.parent === parent);
  }

  /** @param {Message} message */
  show(message) {
    this.#shown.set(message.parent, message.id);
  }

  /**
   * Ask after the last answer. A question at the end that has none is left beside the path.
   * @param {string} text
   * @param {string | undefined} image
   * @param {Message} [instead] the question that is asked in other words
   */
  ask(text, image, instead) {
    const last = instead ?? this.path.at(-1);
    const parent = last?.role === "user" ? last.parent : (last?.id ?? 0);
    this.changed = Date.now();
    return this.#add({ parent, role: "user", text, ...(image && { image }) });
  }

  /**
   * A new answer, without words yet.
   * @param {Message} question or an answer whose calls have results
   */
  answer(question) {
    return this.#add({ parent: question.id, role: "assistant", text: "" });
  }

  /** @param {Message} answer that has no words */
  drop(answer) {
    this.messages = this.messages.filter((other) => other !== answer);
    const left = this.versions(answer).at(-1);
    if (left) this.show(left);
    else this.#shown.delete(answer.parent);
  }

  /**
   * The body of /v1/chat/completions that has a question as its last message, or the results of calls.
   * @param {Message} question
   * @param {string} model
   * @param {string} system
   * @param {object} options further fields
   */
  request(question, model, system, options) {
    const path = this.path;
    const messages = path.slice(0, path.indexOf(question) + 1).flatMap(asSent);
    if (system) messages.unshift({ role: "system", content: system });
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    return { model, messages, stream: true, stream_options, ...options };
  }

  /** How many of the last answers only called tools, one after the other. */
  get rounds() {
    return this.path.length - 1 - this.path.findLastIndex(({ calls }) => !calls);
  }

  toJSON() {
    const { id, changed, title, fields, messages } = this;
    return { id, changed, title, fields, messages, shown: [...this.#shown] };
  }

  /**
   * A conversation that was kept. Throws if it is none.
   * @param {ReturnType<Conversation["toJSON"]>} kept
   */
  static from(kept) {
    const made = new Conversation();
    Object.assign(made, { id: String(kept.id), changed: Number(kept.changed) });
    made.fields = { ...kept.fields };
    made.messages = kept.messages.filter(isMessage);
    made.#shown = new Map(kept.shown);
    return made;
  }

  /** @param {Omit<Message, "id">} message */
  #add(message) {
    const added = { id: Math.max(0, ...this.messages.map(({ id }) => id)) + 1, ...message };
    this.messages.push(added);
    this.show(added);
    return added;
  }

  /** @param {number} parent */
  #after(parent) {
    const shown = this.#shown.get(parent);
    return this.messages.find((message) => message.parent === parent && message.id === shown);
  }
}

/**
 * Whether something kept is a message. Parents come first, so that no path is endless.
 * @param {any} kept
 */
function isMessage({ id, parent, role, text, image = "data:image/", calls = [] }) {
  const known = role === "user" || role === "assistant";
  const isShown = typeof text === "string" && image.startsWith("data:image/") && calls.every(isCall);
  return known && parent >= 0 && parent < id && isShown;
}

/** @param {any} kept */
function isCall({ id, name, arguments: asked, result = "" }) {
  return [id, name, asked, result].every((each) => typeof each === "string");
}

/**
 * @param {Message} message
 * @returns {Record<string, unknown>[]}
 */
function asSent({ role, text, image, calls }) {
  if (calls) return calledAsSent(text, calls);
  if (!image) return [{ role, content: text }];
  const parts = [
    { type: "image_url", image_url: { url: image } },
    { type: "text", text },
  ];
  return [{ role, content: parts }];
}

/**
 * @param {string} text before the calls
 * @param {import("./tools.js").Call[]} calls
 */
function calledAsSent(text, calls) {
  const told = calls.map(({ id, name, arguments: asked }) => ({
    id, type: "function", function: { name, arguments: asked },
  }));
  const results = calls.map(({ id, result = "The user gave no result." }) => ({
    role: "tool", tool_call_id: id, content: result,
  }));
  return [{ role: "assistant", content: text || null, tool_calls: told }, ...results];
}
