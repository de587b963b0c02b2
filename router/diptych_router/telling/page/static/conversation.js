/** A conversation, and what is sent of it. Nothing here knows the document. */

/**
 * @typedef {{role: "user" | "assistant", text: string, image?: string}} Message image: a data: URL
 * @typedef {Record<string, number>} Sampling by the names of the API
 */

export class Conversation {
  /** @type {Message[]} */
  messages = [];

  /**
   * @param {string} text
   * @param {string} [image]
   */
  ask(text, image) {
    this.messages.push({ role: "user", text, ...(image ? { image } : {}) });
  }

  /** @param {string} text an answer, whole or cut short */
  answered(text) {
    this.messages.push({ role: "assistant", text });
  }

  /** Forget the newest answer, so that it can be made anew. */
  forgetAnswer() {
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
  }

  /** Whether there is a question that an answer can be made to. */
  get canRegenerate() {
    return this.messages.length > 0;
  }

  /**
   * The body of /v1/chat/completions.
   * @param {string} model
   * @param {string} system
   * @param {Sampling} sampling
   */
  request(model, system, sampling) {
    const messages = this.messages.map(asSent);
    if (system) messages.unshift({ role: "system", content: system });
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { model, messages, ...stream, ...sampling };
  }
}

/**
 * @param {Message} message
 * @returns {{role: string, content: unknown}}
 */
function asSent({ role, text, image }) {
  if (!image) return { role, content: text };
  const parts = [
    { type: "image_url", image_url: { url: image } },
    { type: "text", text },
  ];
  return { role, content: parts };
}
