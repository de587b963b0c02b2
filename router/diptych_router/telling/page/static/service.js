/** The service behind the page: what it is asked, always with the key as a header. */

import { eventsOf } from "./events.js";
import { ofTab } from "./storage.js";

const KEY_PLACE = "diptych.api-key";
const GO_ON_MS = 10_000;
/** How long a service whose router is gone may take to answer by another one. */
const PAUSE_MS = 300;
const LOST = new Set([502, 503, 504]);
/** What stands before routers says so. */

/** What the server says when it refuses. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * @typedef {{url: string, token: string}} Control where engines can be killed
 * @typedef {{id: string, sampling: Record<string, number>}} ModelCard one name of the model, and what
 *   it is sampled with where a request does not say
 * @typedef {{model: string, images: boolean, version: string, control: Control | null}} About
 */

export class Service {
  /** The key of this tab; empty without one. */
  #key = ofTab.getItem(KEY_PLACE) ?? "";

  /** @param {typeof fetch} [ask] the browser's, or a recording's */
  constructor(ask = (...asked) => fetch(...asked)) {
    this.ask = ask;
  }

  /** @param {string} key */
  useKey(key) {
    this.#key = key;
    try {
      ofTab.setItem(KEY_PLACE, key);
    } catch {
      return; // a reload then asks for it again
    }
  }

  /** @returns {Promise<About>} */
  async about() {
    return (await this.#get("/ui/api/about")).json();
  }

  /** @returns {Promise<ModelCard[]>} the model and its adapters */
  async models() {
    return (await (await this.#get("/v1/models")).json()).data;
  }

  /**
   * What the router remembers of an answer; see `Explanation` in diptych_protocol/admin.py.
   * @param {string} requestId
   * @returns {Promise<import("./facts.js").Explanation>}
   */
  async answer(requestId) {
    return (await this.#get(`/ui/api/answers/${encodeURIComponent(requestId)}`)).json();
  }

  /**
   * When an answer was where, also while it comes.
   * @param {string} requestId
   * @returns {Promise<import("./ribbon.js").Course | null>} null: the router does not know it
   */
  async timeline(requestId) {
    return (await this.#get(`/ui/api/timelines/${encodeURIComponent(requestId)}`)).json();
  }

  /**
   * Changes of the pools, as they happen.
   * @returns {AsyncGenerator<import("./pools.js").Change>}
   */
  async *changes() {
    const answer = await this.#get("/ui/api/events");
    if (!answer.body) return;
    for await (const { data } of eventsOf(answer.body)) yield JSON.parse(data);
  }

  /**
   * Begin an answer. The chunks are those of the OpenAI API.
   * @param {object} body
   * @param {string} requestId under which the router is to know it
   * @param {AbortSignal} signal
   * @returns {Promise<AsyncGenerator<any>>}
   */
  async chat(body, requestId, signal) {
    /** @param {Record<string, string>} last */
    const ask = (last = {}) =>
      this.#get("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", "x-request-id": requestId, "x-diptych-resumable": "1", ...last },
        body: JSON.stringify(body),
        signal,
      });
    return chunksOf(await ask(), ask);
  }

  /**
   * Kill an engine of this laptop: `diptych up` does it, and starts it again.
   * @param {Control} control
   * @param {string} engine
   */
  async kill(control, engine) {
    const answer = await this.ask(`${control.url}/engines/${encodeURIComponent(engine)}/kill`, {
      method: "POST",
      headers: { authorization: `Bearer ${control.token}` },
    });
    if (!answer.ok) throw await refusalOf(answer);
  }

  /**
   * @param {string} path
   * @param {RequestInit} [options]
   */
  async #get(path, options = {}) {
    const headers = new Headers(options.headers);
    if (this.#key) headers.set("authorization", `Bearer ${this.#key}`);
    const always = /** @type {const} */ ({ cache: "no-store", credentials: "omit" });
    const answer = await this.ask(path, { ...options, ...always, headers });
    if (!answer.ok) throw await refusalOf(answer);
    return answer;
  }
}

/** @param {Response} answer */
async function refusalOf(answer) {
  const body = await answer.json().catch(() => null);
  return new Refused(answer.status, body?.error?.message ?? `HTTP ${answer.status}`);
}

/**
 * The chunks of an answer. One that breaks off goes on with another router, if its events have ids.
 * @param {Response | null} answer
 * @param {(last: Record<string, string>) => Promise<Response>} again
 * @returns {AsyncGenerator<any>}
 */
async function* chunksOf(answer, again) {
  let last = "";
  let giveUpAt = 0;
  for (;;) {
    try {
      answer ??= await again({ "last-event-id": last });
      if (!answer.body) return;
      for await (const { data, id } of eventsOf(answer.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(answer.status, chunk.error.message);
        if (last && !id && chunk.choices[0]?.delta?.content) throw new Error("no router has the rest of the answer");
        if (id) [last, giveUpAt] = [id, 0];
        yield chunk;
      }
      throw new TypeError("the stream broke off before its end");
    } catch (error) {
      const isLost = error instanceof TypeError || (error instanceof Refused && LOST.has(error.status));
      giveUpAt ||= performance.now() + GO_ON_MS;
      if (!last || !isLost || performance.now() > giveUpAt) throw error;
    }
    answer = null;
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}
