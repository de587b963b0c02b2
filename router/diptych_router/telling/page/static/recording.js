/** A recorded run, which plays where no service is: what the page was answered, and what its user
 * did, each at its time. See tests/support/page_recording.py, which records it. */

import { byId, make } from "./dom.js";

const MS_BETWEEN_LETTERS = 25;
const NEVER = new Promise(() => {});

/**
 * @typedef {object} Answer of the service to one request of the page
 * @property {number} at in ms since the recording's start, as all times here
 * @property {string} method
 * @property {string} url
 * @property {number} status
 * @property {Record<string, string>} headers
 * @property {[number, string][]} pieces of the body, as they came
 * @property {boolean} ended whether the body had an end when the recording did
 *
 * @typedef {{at: number, ask?: string, kill?: string}} Deed a question, or the engine that was killed
 * @typedef {{answers: Answer[], deeds: Deed[]}} Run
 */

export class Recording {
  /** @type {(value: unknown) => void} */
  #begin = () => {};
  #begun = new Promise((resolve) => (this.#begin = resolve));
  /** When the recording's time was 0, by the clock of this page. */
  #zero = Infinity;
  /** Answers that were given and are given once: streams, and what was posted. */
  #given = new Set();
  /** The recorded id of each request that this page has named anew. */
  #ids = new Map();

  /** @param {Run} run */
  constructor(run) {
    this.run = run;
  }

  /**
   * The recording that this page was published with; null for the page of a service.
   * @returns {Promise<Recording | null>}
   */
  static async published() {
    const named = document.querySelector('meta[name="diptych-recording"]');
    if (!named) return null;
    const file = await fetch(named.getAttribute("content") ?? "");
    if (!file.ok) throw new Error(`the recording: HTTP ${file.status}`);
    return new Recording(await file.json());
  }

  /** Show what this is, with a button that plays it. */
  offer() {
    const play = make("button", "main", "Play");
    const what = make("p", "", "A recorded run: two pools answer, and an engine is killed. ");
    what.append(make("span", "quiet", "diptych up shows your own."));
    const bar = make("div", "recording", what, play);
    document.querySelector("main")?.before(bar);
    byId("composer", HTMLFormElement).inert = true; // only the recording asks
    document.body.classList.add("recorded");
    play.addEventListener("click", async () => {
      play.disabled = true;
      await this.#play();
      play.textContent = "Play again";
      play.disabled = false;
      play.addEventListener("click", () => location.reload());
    });
  }

  /**
   * In the place of `fetch`.
   * @param {RequestInfo | URL} asked
   * @param {RequestInit} [options]
   * @returns {Promise<Response>}
   */
  fetch = async (asked, options = {}) => {
    const [path, id] = partsOf(String(asked));
    const answer = this.#answerTo(options.method ?? "GET", path + (this.#ids.get(id) ?? id));
    if (!answer) return new Response(null, { status: 404 });
    if (isGivenOnce(answer)) this.#given.add(answer);
    const named = new Headers(options.headers).get("x-request-id");
    if (named) this.#ids.set(named, answer.headers["x-request-id"]);
    await this.#reach(answer.at);
    const init = { status: answer.status, headers: answer.headers };
    return new Response(this.#body(answer, options.signal ?? null), init);
  };

  /**
   * The first that was not given yet, or the newest of what can be asked again.
   * @param {string} method
   * @param {string} url
   */
  #answerTo(method, url) {
    const alike = this.run.answers.filter((each) => each.method === method && each.url === url);
    const next = alike.find((answer) => isGivenOnce(answer) && !this.#given.has(answer));
    const others = alike.filter((answer) => !isGivenOnce(answer));
    return next ?? others.findLast(({ at }) => at <= this.#now()) ?? others[0];
  }

  /**
   * @param {Answer} answer
   * @param {AbortSignal | null} signal
   * @returns {ReadableStream<Uint8Array>}
   */
  #body(answer, signal) {
    const pieces = answer.pieces.values();
    return new ReadableStream({
      pull: async (stream) => {
        const { value, done } = pieces.next();
        if (done && !answer.ended) await NEVER;
        if (!done) await this.#reach(value[0]);
        if (signal?.aborted) stream.error(signal.reason);
        else if (done) stream.close();
        else stream.enqueue(new TextEncoder().encode(value[1]));
      },
    });
  }

  #now() {
    return performance.now() - this.#zero;
  }

  /**
   * Wait for a time of the recording. Before it is played, what was at its start is there.
   * @param {number} at
   */
  async #reach(at) {
    if (at <= 0) return;
    await this.#begun;
    const left = at - this.#now();
    if (left > 0) await new Promise((resolve) => setTimeout(resolve, left));
  }

  /** Do what its user did. */
  async #play() {
    byId("clear", HTMLButtonElement).click();
    this.#zero = performance.now();
    this.#begin(null);
    for (const deed of this.run.deeds) {
      const { ask = "", kill } = deed;
      await this.#reach(deed.at - ask.length * MS_BETWEEN_LETTERS);
      if (kill) buttonNamed(`Kill ${kill}`)?.click();
      else await this.#type(ask, deed.at);
    }
    await this.#reach(Math.max(...this.run.answers.flatMap(({ pieces }) => pieces.map(([at]) => at))));
  }

  /**
   * @param {string} words
   * @param {number} until they are sent then
   */
  async #type(words, until) {
    const field = byId("words", HTMLTextAreaElement);
    for (let length = 1; length <= words.length; length += 1) {
      field.value = words.slice(0, length);
      await this.#reach(until - (words.length - length) * MS_BETWEEN_LETTERS);
    }
    byId("composer", HTMLFormElement).requestSubmit();
  }
}

/**
 * @param {string} url
 * @returns {[string, string]} without its last part, and that part, which may be a request's id
 */
function partsOf(url) {
  const at = url.lastIndexOf("/") + 1;
  return [url.slice(0, at), url.slice(at)];
}

/** @param {Answer} answer */
function isGivenOnce({ method, headers }) {
  return method !== "GET" || (headers["content-type"] ?? "").startsWith("text/event-stream");
}

/**
 * @param {string} name
 * @returns {HTMLButtonElement | undefined}
 */
function buttonNamed(name) {
  const buttons = [...document.querySelectorAll("button")];
  return buttons.find((button) => (button.ariaLabel ?? button.textContent) === name);
}
