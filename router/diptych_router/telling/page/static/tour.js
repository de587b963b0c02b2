/** Five steps that explain the running service with what it shows at the moment. */

import { byId } from "./dom.js";
import { inBytes } from "./pools.js";

const QUESTION = "What is the name of the capital of France?";

/**
 * @typedef {import("./pools.js").Pools} Pools
 * @typedef {{title: string, shows: string, text: (pools: Pools) => string}} Step
 */

/** @type {Step[]} */
const STEPS = [
  {
    title: "Prefill",
    shows: ".panel.prefill",
    text: () =>
      "A prompt is computed here. A prefill engine reads all of its tokens in a few large steps, and keeps for each of them the keys and values that every later token looks at: the KV cache.",
  },
  {
    title: "KV blocks",
    shows: ".panel.prefill .engine",
    text: (pools) => {
      const [engine] = pools.of("prefill").concat(pools.of("decode"));
      const { block_tokens: tokens = 0, blocks_total: total = 0, blocks_used: used = 0 } = engine ?? {};
      return `The cache lies in blocks of ${tokens} tokens. This engine has ${total}; ${used} are in use now. What begins like an earlier prompt finds its blocks still there, and is not computed again.`;
    },
  },
  {
    title: "The hand-off",
    shows: "#lane",
    text: (pools) =>
      `The finished blocks cross to a decode engine while the rest is still computed. Since you opened this page ${inBytes(pools.received.decode.bytes)} crossed to decode engines, and ${inBytes(pools.received.prefill.bytes)} back: in a next turn the decode engine has the KV of its own answer.`,
  },
  {
    title: "Decode",
    shows: ".panel.decode",
    text: (pools) => {
      const rows = pools.of("decode").reduce((sum, engine) => sum + (engine.running ?? 0), 0);
      return `The answer is generated here, one token a step, for all requests together: ${rows} at the moment. No prompt interrupts these steps, so streams flow evenly.`;
    },
  },
  {
    title: "Leases",
    shows: ".panel.prefill",
    text: (pools) => {
      const leases = pools.of("prefill").reduce((sum, engine) => sum + (engine.leases ?? 0), 0);
      return `Blocks on their way are lent: ${leases} leases are open now. Who has read them gives them back; a lease of a reader that died ends by itself. So you may kill an engine in the middle of an answer: the stream goes on at another one.`;
    },
  },
];

export class Tour {
  #panel = byId("tour", HTMLElement);
  #back = byId("tour-back", HTMLButtonElement);
  #next = byId("tour-next", HTMLButtonElement);
  #at = 0;
  /** @type {Element | null} what the step is about */
  #shown = null;

  /**
   * @param {() => Pools | undefined} pools as they are when a step is shown
   * @param {(words: string) => void} ask
   */
  constructor(pools, ask) {
    this.pools = pools;
    byId("tour-open", HTMLButtonElement).addEventListener("click", () => this.#show(0));
    byId("tour-close", HTMLButtonElement).addEventListener("click", () => this.#close());
    byId("tour-ask", HTMLButtonElement).addEventListener("click", () => ask(QUESTION));
    this.#back.addEventListener("click", () => this.#show(this.#at - 1));
    this.#next.addEventListener("click", () => {
      if (this.#at + 1 < STEPS.length) this.#show(this.#at + 1);
      else this.#close();
    });
    this.#panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it would stop an answer, too
      this.#close();
    });
  }

  /** @param {number} at */
  #show(at) {
    const pools = this.pools();
    if (!pools) return;
    const { title, shows, text } = STEPS[at];
    this.#at = at;
    this.#leave();
    this.#shown = document.querySelector(shows);
    this.#shown?.classList.add("toured");
    this.#shown?.scrollIntoView({ block: "nearest" });
    byId("tour-title", HTMLElement).textContent = `${at + 1} of ${STEPS.length}: ${title}`;
    byId("tour-text", HTMLElement).textContent = text(pools);
    this.#back.disabled = at === 0;
    this.#next.textContent = at + 1 < STEPS.length ? "Next" : "Done";
    const opened = this.#panel.hidden;
    this.#panel.hidden = false;
    if (opened) this.#next.focus();
  }

  #leave() {
    this.#shown?.classList.remove("toured");
    this.#shown = null;
  }

  #close() {
    this.#leave();
    this.#panel.hidden = true;
    byId("tour-open", HTMLButtonElement).focus();
  }
}
