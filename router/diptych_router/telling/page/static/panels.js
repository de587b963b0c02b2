/** The pools on the page: a panel for each, and the hinge between them. */

import { byId, make } from "./dom.js";
import { Pools, inBytes } from "./pools.js";

const RETRY_MS = 2000;
const MOST_SQUARES = 12;
/** More blocks that cross at once are shown as so many squares. */
const SICK = new Set(["away", "silent", "failing"]);

/** @typedef {(engine: string) => Promise<void>} Kill */

export class Panels {
  pools = new Pools();
  /** @type {Map<string, HTMLElement>} by engine */
  #cards = new Map();
  #section = byId("pools", HTMLElement);
  #line = byId("pools-line", HTMLElement);
  #lane = byId("lane", HTMLElement);

  /**
   * @param {import("./service.js").Service} service
   * @param {Kill | null} kill null: engines cannot be killed here
   */
  constructor(service, kill) {
    this.service = service;
    this.kill = kill;
  }

  /** Show the pools until the tab is closed; a stream that ends is asked for again. */
  async follow() {
    this.#section.hidden = false;
    for (;;) {
      try {
        let anew = true;
        for await (const change of this.service.changes()) {
          this.#show(change, this.pools.take(change, anew));
          anew = false;
        }
      } catch (error) {
        this.#line.textContent = `The pools are not shown: ${String(error)}`;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /**
   * @param {import("./pools.js").Change} change
   * @param {number} crossed
   */
  #show(change, crossed) {
    for (const engine of change.engines) this.#fill(engine.id);
    for (const [id, card] of this.#cards) {
      if (this.pools.engines.has(id)) continue;
      card.remove();
      this.#cards.delete(id);
    }
    for (const role of /** @type {const} */ (["prefill", "decode"])) this.#arrange(role);
    const { open, held, leftOut } = this.pools;
    const waiting = held ? `, ${held} of them wait for an engine` : "";
    const more = leftOut ? `; ${leftOut} more engines are not shown` : "";
    this.#line.textContent = `${open} open request${open === 1 ? "" : "s"}${waiting}${more}`;
    byId("crossed", HTMLElement).textContent = String(this.pools.crossedBlocks);
    byId("crossed-bytes", HTMLElement).textContent = inBytes(this.pools.crossedBytes);
    this.#cross(Math.min(crossed, MOST_SQUARES));
  }

  /** @param {"prefill" | "decode"} role */
  #arrange(role) {
    const list = byId(role, HTMLUListElement);
    const cards = this.pools.of(role).map((engine) => this.#cards.get(engine.id));
    cards.forEach((card, at) => {
      if (card && list.children[at] !== card) list.insertBefore(card, list.children[at] ?? null);
    });
  }

  /** @param {string} id */
  #fill(id) {
    const engine = this.pools.engines.get(id);
    if (!engine) return;
    let card = this.#cards.get(id);
    if (!card) {
      card = make("li", "engine");
      this.#cards.set(id, card);
      card.append(make("div", "figures"));
      if (this.kill) card.append(this.#killButton(id, this.kill));
    }
    card.classList.toggle("bad", SICK.has(engine.state));
    card.dataset.state = engine.state;
    card.dataset.name = engine.name;
    card.querySelector(".figures")?.replaceChildren(...figuresOf(engine));
    const button = card.querySelector("button");
    if (button) {
      button.disabled = !engine.name || engine.state === "away";
      button.setAttribute("aria-label", `Kill ${engine.name}`);
    }
  }

  /**
   * @param {string} id
   * @param {Kill} kill
   */
  #killButton(id, kill) {
    const button = make("button", "", "Kill");
    button.type = "button";
    button.addEventListener("click", () => {
      button.disabled = true;
      void kill(this.pools.engines.get(id)?.name ?? "");
    });
    return button;
  }

  /** @param {number} squares */
  #cross(squares) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches || document.hidden) return;
    for (let at = 0; at < squares; at += 1) {
      const square = make("span", "block");
      square.style.top = `${10 + ((at * 37) % 70)}%`;
      square.style.animationDelay = `${at * 60}ms`;
      square.addEventListener("animationend", () => square.remove());
      this.#lane.append(square);
    }
  }
}

/**
 * @param {import("./pools.js").Engine} engine
 * @returns {HTMLElement[]}
 */
function figuresOf(engine) {
  const state = make("span", "state", engine.state);
  const head = make("p", "name", state, engine.name || "an engine that has not answered yet");
  if (engine.state === "away") return [head];
  const used = engine.blocks_used ?? 0;
  const total = engine.blocks_total ?? 0;
  const list = make("dl", "");
  for (const [term, value] of [
    ["rows", engine.running ?? 0],
    ["queue", queueOf(engine)],
    ["blocks in use", `${used} of ${total}`],
    engine.role === "prefill" ? ["sent", engine.blocks_sent ?? 0] : ["received", engine.blocks_received ?? 0],
  ]) {
    list.append(make("dt", "", String(term)), make("dd", "", String(value)));
  }
  const meter = make("meter", "");
  meter.max = Math.max(1, total);
  meter.value = used;
  meter.setAttribute("aria-label", "Blocks in use");
  return [head, list, meter];
}

/** @param {import("./pools.js").Engine} engine */
function queueOf(engine) {
  const waiting = engine.waiting ?? 0;
  return engine.queued_tokens ? `${waiting} (${engine.queued_tokens} tokens)` : String(waiting);
}
