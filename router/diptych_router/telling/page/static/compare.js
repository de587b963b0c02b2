/** The same prompt through one engine and through both pools, side by side. */

import { nothingYet, readAnswer } from "./answering.js";
import { byId, make, termsOf } from "./dom.js";

/**
 * @typedef {object} Way
 * @property {string} title
 * @property {string} about
 * @property {boolean} remoteDecode of `kv_transfer_params`
 */

/** @type {Way[]} */
const WAYS = [
  { title: "One engine", about: "It computes the prompt and goes on itself.", remoteDecode: false },
  {
    title: "Two pools",
    about: "A prefill engine computes the prompt; its KV crosses to a decode engine.",
    remoteDecode: true,
  },
];
/** So that both ways draw the same tokens. */
const SEED = 1;

export class Comparison {
  #dialog = byId("compare", HTMLDialogElement);
  #columns = byId("ways", HTMLElement);
  #verdict = byId("verdict", HTMLElement);
  /** @type {AbortController | null} */
  #running = null;

  /** @param {import("./service.js").Service} service */
  constructor(service) {
    this.service = service;
    this.#dialog.addEventListener("close", () => this.#running?.abort());
    byId("compare-close", HTMLButtonElement).addEventListener("click", () => this.#dialog.close());
  }

  /**
   * One way after the other: at the same time they would wait for each other.
   * @param {object} body of /v1/chat/completions
   */
  async run(body) {
    const running = (this.#running = new AbortController());
    const columns = WAYS.map(columnOf);
    this.#columns.replaceChildren(...columns.map(({ box }) => box));
    this.#verdict.textContent = "";
    this.#dialog.showModal();
    const texts = [];
    try {
      for (const [at, { remoteDecode }] of WAYS.entries()) {
        const asked = {
          seed: SEED,
          ...body,
          // Nobody remembers anything of a prompt with a salt of its own.
          cache_salt: String(Math.random()),
          kv_transfer_params: { do_remote_decode: remoteDecode },
        };
        texts.push(await this.#answer(asked, columns[at], running.signal));
        if (running.signal.aborted) return;
      }
      this.#verdict.textContent =
        texts[0] === texts[1]
          ? "Both answers are the same, word for word."
          : "The answers differ. Where two tokens are nearly as likely, rounding decides: the two ways compute the prompt in other pieces.";
    } catch (error) {
      this.#verdict.textContent = error instanceof Error ? error.message : String(error);
    }
  }

  /**
   * @param {object} body
   * @param {ReturnType<typeof columnOf>} column
   * @param {AbortSignal} signal
   */
  async #answer(body, { text, figures }, signal) {
    const outcome = nothingYet();
    let [last, pause] = [0, 0];
    const see = (/** @type {{content?: string}} */ { content }) => {
      if (!content) return;
      const now = performance.now();
      if (last) pause = Math.max(pause, now - last);
      last = now;
      text.append(content);
    };
    await readAnswer(this.service, body, signal, see, outcome);
    figures.replaceChildren(
      termsOf([
        ["first token", `${outcome.firstTokenMs?.toFixed(0) ?? "–"} ms`],
        ["tokens/s", outcome.tokensPerSecond?.toFixed(0) ?? "–"],
        ["longest pause", `${pause.toFixed(0)} ms`],
      ]),
    );
    return outcome.text;
  }
}

/** @param {Way} way */
function columnOf({ title, about }) {
  const text = make("div", "text");
  text.dir = "auto";
  const figures = make("div", "figures");
  const box = make("section", "compared", make("h3", "", title), make("p", "quiet", about), text, figures);
  return { box, text, figures };
}
