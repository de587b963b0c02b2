/** The pools on the page: a card for each engine, what moves between them, and the ribbon. */

import { byId, make, setText } from "./dom.js";
import { Grid } from "./grid.js";
import { Pools, inBytes, traceOf } from "./pools.js";
import { Following, Ribbon } from "./ribbon.js";
import { Stage } from "./stage.js";

const RETRY_MS = 2000;
const MOST_TRACES = 20;
const MOST_OWN = 200;
/** The most requests of this page that are known by their names among the holders of blocks. */
const GONE = new Set(["away", "killed"]);
const SICK = new Set([...GONE, "silent", "failing"]);
const ROLES = /** @type {const} */ (["prefill", "decode"]);

/** @typedef {(engine: string) => Promise<boolean>} Kill whether it was done */

export class Panels {
  pools = new Pools();
  /** @type {Map<string, Card>} by engine */
  #cards = new Map();
  /** @type {Map<string, string>} the ids of this page's requests, by their names among holders */
  #own = new Map();
  #section = byId("pools", HTMLElement);
  #line = byId("pools-line", HTMLElement);
  #traces = byId("traces", HTMLElement);
  #ribbon = new Ribbon();
  /** @type {Following} */
  #answer;
  #stage = new Stage((engine) => this.#placeOf(engine));

  /**
   * @param {import("./service.js").Service} service
   * @param {Kill | null} kill null: engines cannot be killed here
   * @param {() => void} cameBack called when the service is there again
   */
  constructor(service, kill, cameBack) {
    this.service = service;
    this.kill = kill;
    this.cameBack = cameBack;
    this.#answer = new Following(
      (requestId) => service.timeline(requestId),
      (course, requestId) => this.#showCourse(course, requestId),
    );
    byId("ribbon", HTMLElement).append(this.#ribbon.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const card of this.#cards.values()) card.grid.draw();
    });
  }

  /** Show the pools until the tab is closed; a stream that ends is asked for again. */
  async follow() {
    this.#section.hidden = false;
    for (let isFirst = true; ; isFirst = false) {
      try {
        let anew = true;
        for await (const change of this.service.changes()) {
          if (anew && !isFirst) this.cameBack();
          this.pools.take(change, anew, performance.now());
          this.#show(change);
          anew = false;
        }
      } catch (error) {
        this.#line.textContent = `The pools are not shown: ${String(error)}`;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** @param {string} requestId of an answer that begins */
  begin(requestId) {
    this.#answer.begin(requestId);
  }

  /** The answer has ended, as far as this page can see. */
  async end() {
    await this.#answer.end();
    if (this.#answer.isIdle) this.#stage.thread("");
  }

  /** @param {import("./pools.js").Change} change */
  #show(change) {
    for (const engine of change.engines) this.#fill(engine.id);
    for (const [id, card] of this.#cards) {
      if (this.pools.engines.has(id)) continue;
      card.element.remove();
      this.#cards.delete(id);
    }
    for (const role of ROLES) this.#arrange(role);
    const { open, held, leftOut, received } = this.pools;
    const waiting = held ? `, ${held} of them wait for an engine` : "";
    const more = leftOut ? `; ${leftOut} more engines are not shown` : "";
    setText(this.#line, `${open} open request${open === 1 ? "" : "s"}${waiting}${more}`);
    for (const role of ROLES) {
      setText(byId(`into-${role}`, HTMLElement), received[role].blocks.toLocaleString("en"));
      setText(byId(`bytes-${role}`, HTMLElement), inBytes(received[role].bytes));
    }
    for (const move of change.moves ?? []) this.#moved(move);
  }

  /** @param {import("./pools.js").Move} move */
  #moved(move) {
    this.#stage.fly(move);
    const { what, way, figures } = traceOf(move);
    const own = this.#own.has(move.whose) ? "own" : "";
    const item = make("li", own, make("span", "what", what), make("span", "", way), make("span", "figures", figures));
    const back = this.#cardOf(move.receiver)?.element.dataset.role === "prefill";
    item.dataset.into = back ? "prefill" : "decode";
    item.title = `${what}: ${way}, ${figures}`;
    this.#traces.prepend(item);
    while (this.#traces.children.length > MOST_TRACES) this.#traces.lastElementChild?.remove();
  }

  /** @param {"prefill" | "decode"} role */
  #arrange(role) {
    const list = byId(role, HTMLUListElement);
    this.pools.of(role).forEach((engine, at) => {
      const card = this.#cards.get(engine.id)?.element;
      if (card && list.children[at] !== card) list.insertBefore(card, list.children[at] ?? null);
    });
  }

  /** @param {string} id */
  #fill(id) {
    const engine = this.pools.engines.get(id);
    if (!engine) return;
    let card = this.#cards.get(id);
    if (!card) {
      card = new Card((whose) => this.#own.get(whose) ?? "", this.kill && (() => this.#killNow(id)));
      this.#cards.set(id, card);
    }
    card.fill(engine, this.pools.stateOf(engine), this.pools.ratesOf(engine));
  }

  /** The router learns of it a moment later than this page, which asked for it. @param {string} id */
  async #killNow(id) {
    this.pools.mark(id, true);
    this.#fill(id);
    if (await this.kill?.(this.pools.engines.get(id)?.name ?? "")) return;
    this.pools.mark(id, false);
    this.#fill(id);
  }

  /**
   * @param {import("./ribbon.js").Course} course
   * @param {string} requestId
   */
  #showCourse(course, requestId) {
    if (!this.#own.has(course.whose)) {
      this.#own.set(course.whose, requestId);
      if (this.#own.size > MOST_OWN) this.#own.delete(this.#own.keys().next().value ?? "");
      for (const id of this.#cards.keys()) this.#fill(id);
    }
    this.#ribbon.show(course);
    this.#stage.thread(course.outcome ? "" : course.engine);
  }

  /** @param {string} name */
  #cardOf(name) {
    return [...this.#cards.values()].find((card) => card.element.dataset.name === name);
  }

  /** @param {string} name @returns {import("./wires.js").Place | null} */
  #placeOf(name) {
    const card = this.#cardOf(name)?.element;
    if (!card) return null;
    const { top, bottom } = card.getBoundingClientRect();
    const { left, right } = (card.closest(".panel") ?? card).getBoundingClientRect();
    return { left, right, top, bottom, role: card.dataset.role === "prefill" ? "prefill" : "decode" };
  }
}

/** One engine. */
class Card {
  element = make("li", "engine");
  #name = make("span", "name");
  #state = make("span", "state");
  #brief = make("p", "brief");
  #list = make("dl", "");
  /** @type {Map<string, HTMLElement>} by term */
  #figures = new Map();

  /**
   * @param {(whose: string) => string} idOf see `Grid`
   * @param {(() => void) | null} kill
   */
  constructor(idOf, kill) {
    this.grid = new Grid(idOf);
    const head = make("summary", "", this.#name, this.#state);
    head.title = "Figures of this engine";
    const about = make("details", "about", head, this.#list);
    this.element.append(about, this.#brief, ...this.grid.parts);
    this.button = kill && make("button", "kill", "Kill");
    if (this.button && kill) {
      this.button.type = "button";
      this.button.addEventListener("click", kill);
      this.grid.foot.append(this.button);
    }
  }

  /**
   * @param {import("./pools.js").Engine} engine
   * @param {string} state
   * @param {import("./pools.js").Rates} rates
   */
  fill(engine, state, rates) {
    const gone = GONE.has(state);
    this.element.classList.toggle("bad", SICK.has(state));
    this.element.dataset.role = engine.role;
    this.element.dataset.state = state;
    this.element.dataset.name = engine.name;
    setText(this.#name, engine.name || "an engine that has not answered yet");
    setText(this.#state, engine.home ? `${state}, from ${engine.home}` : state);
    setText(this.#brief, gone ? "nobody answers" : briefOf(engine, rates));
    for (const [term, value] of figuresOf(engine, rates)) {
      let at = this.#figures.get(term);
      if (!at) this.#figures.set(term, (at = make("dd", "")));
      if (!at.parentElement) this.#list.append(make("dt", "", term), at);
      setText(at, gone ? "–" : value);
    }
    this.grid.show(engine, gone);
    if (this.button) {
      this.button.disabled = !engine.name || gone;
      this.button.setAttribute("aria-label", `Kill ${engine.name}`);
    }
  }
}

/**
 * @param {import("./pools.js").Engine} engine
 * @param {import("./pools.js").Rates} rates
 */
function briefOf(engine, { computed, generated }) {
  const { running = 0, waiting = 0, blocks_used: used = 0, blocks_total: total = 0 } = engine;
  const rate = generated >= 1 ? [`${generated.toFixed(0)} tokens/s`] : computed >= 1 ? [`${computed.toFixed(0)} prompt tokens/s`] : [];
  const rows = waiting ? `${running} running, ${waiting} waiting` : `${running} running`;
  return [rows, `${used} of ${total.toLocaleString("en")} blocks`, ...rate].join(" · ");
}

/**
 * @param {import("./pools.js").Engine} engine
 * @param {import("./pools.js").Rates} rates
 * @returns {[string, string][]}
 */
function figuresOf(engine, { computed, generated }) {
  const { blocks_used: used = 0, blocks_total: total = 0, block_tokens: tokens = 0 } = engine;
  const share = total ? ((100 * used) / total).toFixed(1) : "0";
  const received = `${engine.blocks_received ?? 0} blocks, ${inBytes(engine.bytes_received ?? 0)}`;
  return [
    ["rows", `${engine.running ?? 0} running, ${engine.waiting ?? 0} waiting`],
    ["queue", `${engine.queued_tokens ?? 0} tokens of prompts`],
    ["in use", `${used} of ${total} blocks (${share} %)`],
    ["room", `${(total * tokens).toLocaleString("en")} tokens of KV`],
    ["remembered", `${engine.blocks_remembered ?? 0} blocks`],
    ["pinned", `${engine.blocks_pinned ?? 0} blocks for a next turn`],
    ["lent", `${engine.blocks_lent ?? 0} blocks in ${engine.leases ?? 0} leases`],
    ["sent", `${engine.blocks_sent ?? 0} blocks`],
    ["received", received],
    ["speed", `${computed.toFixed(0)} prompt tokens/s, ${generated.toFixed(0)} tokens/s`],
  ];
}
