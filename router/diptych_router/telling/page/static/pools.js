/** Both pools as they are now. Nothing here knows the document. */

/**
 * What the server leaves out is 0, or empty; see panels.py.
 * @typedef {{whose: string, blocks: number, arriving?: number}} Holder a request that holds blocks
 *
 * @typedef {object} Engine
 * @property {string} id
 * @property {string} name empty if no engine has ever answered there
 * @property {"prefill" | "decode"} role
 * @property {"prefill" | "decode"} [home] the pool that it was taken from
 * @property {string} state
 * @property {number} [running]
 * @property {number} [waiting]
 * @property {number} [queued_tokens]
 * @property {number} [blocks_used]
 * @property {number} [blocks_total]
 * @property {number} [block_tokens]
 * @property {number} [blocks_sent]
 * @property {number} [blocks_received]
 * @property {number} [bytes_received]
 * @property {number} [leases]
 * @property {number} [blocks_lent]
 * @property {number} [blocks_arriving]
 * @property {number} [blocks_remembered]
 * @property {number} [blocks_pinned]
 * @property {Holder[]} [holders]
 * @property {number} [tokens_computed]
 * @property {number} [tokens_generated]
 *
 * @typedef {object} Move
 * @property {number} number
 * @property {string} sender
 * @property {string} receiver
 * @property {string} whose
 * @property {boolean} [is_prefix]
 * @property {number} blocks
 * @property {number} bytes
 * @property {number} ms
 *
 * @typedef {object} Change
 * @property {Engine[]} engines
 * @property {string[]} [gone]
 * @property {number} open_requests
 * @property {number} held_requests
 * @property {number} [left_out]
 * @property {Move[]} [moves]
 *
 * @typedef {{computed: number, generated: number}} Rates tokens a second
 */

const KILLED = "killed";

export class Pools {
  /** @type {Map<string, Engine>} */
  engines = new Map();
  open = 0;
  held = 0;
  leftOut = 0;
  /** What each pool has received since the page was opened. */
  received = { prefill: { blocks: 0, bytes: 0 }, decode: { blocks: 0, bytes: 0 } };
  /**
   * Of engines that have received blocks, by name: tokens in a block, and bytes of a block in the
   * mean of all. Kept when an engine goes, for answers that it had a part in.
   * @type {Map<string, {tokens: number, bytes: number}>}
   */
  #blocks = new Map();
  /** @type {Map<string, {at: number, rates: Rates}>} by engine */
  #rates = new Map();
  /** Engines that this page has asked to be killed, and that the router still takes for alive. */
  #killed = new Set();

  /**
   * Take what changed.
   * @param {Change} change
   * @param {boolean} anew the first change of a stream tells all engines
   * @param {number} now in milliseconds
   */
  take(change, anew, now) {
    const told = new Set(change.engines.map((engine) => engine.id));
    for (const engine of change.engines) this.#takeEngine(engine, now);
    const gone = anew ? [...this.engines.keys()].filter((id) => !told.has(id)) : [];
    for (const id of [...gone, ...(change.gone ?? [])]) this.engines.delete(id);
    this.open = change.open_requests;
    this.held = change.held_requests;
    this.leftOut = change.left_out ?? 0;
  }

  /** @param {Engine} engine @param {number} now */
  #takeEngine(engine, now) {
    const known = this.engines.get(engine.id);
    if (known) {
      const received = this.received[engine.role];
      received.blocks += grown(known.blocks_received, engine.blocks_received);
      received.bytes += grown(known.bytes_received, engine.bytes_received);
      this.#rates.set(engine.id, { at: now, rates: this.#ratesBetween(known, engine, now) });
      const restarted = (engine.tokens_generated ?? 0) < (known.tokens_generated ?? 0);
      if (engine.state !== "ok" || restarted) this.#killed.delete(engine.id);
    }
    // Who does not answer tells no figures; the size of its pool is still drawn.
    const total = engine.blocks_total || known?.blocks_total;
    this.engines.set(engine.id, total ? { ...engine, blocks_total: total } : engine);
    const { name, block_tokens: tokens, blocks_received: blocks, bytes_received: bytes } = engine;
    if (tokens && blocks && bytes) this.#blocks.set(name, { tokens, bytes: bytes / blocks });
  }

  /** @param {Engine} before @param {Engine} after @param {number} now @returns {Rates} */
  #ratesBetween(before, after, now) {
    const last = this.#rates.get(after.id)?.at;
    const seconds = last === undefined ? 0 : (now - last) / 1000;
    if (seconds <= 0 || seconds > 3) return { computed: 0, generated: 0 }; // it was idle meanwhile
    return {
      computed: grown(before.tokens_computed, after.tokens_computed) / seconds,
      generated: grown(before.tokens_generated, after.tokens_generated) / seconds,
    };
  }

  /** @param {Engine} engine @returns {Rates} */
  ratesOf({ id, running }) {
    return (running && this.#rates.get(id)?.rates) || { computed: 0, generated: 0 };
  }

  /**
   * An engine is killed by this page, which the router does not know yet; or it is not after all.
   * @param {string} id
   * @param {boolean} killed
   */
  mark(id, killed) {
    if (killed) this.#killed.add(id);
    else this.#killed.delete(id);
  }

  /** @param {Engine} engine */
  stateOf({ id, state }) {
    return this.#killed.has(id) ? KILLED : state;
  }

  /** @param {"prefill" | "decode"} role */
  of(role) {
    const those = [...this.engines.values()].filter((engine) => engine.role === role);
    return those.sort((a, b) => a.name.localeCompare(b.name) || a.id.localeCompare(b.id));
  }

  /**
   * Blocks and bytes that so many tokens of KV were, at the engine that received them.
   * @param {string} name
   * @param {number} tokens
   * @returns {{blocks: number, bytes: number} | null} null: the engine is not known
   */
  moved(name, tokens) {
    const block = this.#blocks.get(name);
    if (!block) return null;
    const blocks = Math.ceil(tokens / block.tokens);
    return { blocks, bytes: blocks * block.bytes };
  }
}

/**
 * How far a total has grown. One that fell is that of another process.
 * @param {number | undefined} before
 * @param {number | undefined} after
 */
function grown(before = 0, after = 0) {
  return after >= before ? after - before : after;
}

/**
 * A move in words: what, how much, how long and how fast.
 * @param {Move} move
 */
export function traceOf({ sender, receiver, is_prefix: prefix, blocks, bytes, ms }) {
  const speed = ms > 0 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms, ${(bytes / ms / 1e6).toFixed(2)} GB/s` : "";
  return {
    what: prefix ? "prefix" : "hand-off",
    way: `${sender} → ${receiver}`,
    figures: [`${blocks} block${blocks === 1 ? "" : "s"}`, inBytes(bytes), speed].filter(Boolean).join(", "),
  };
}

/** @param {number} bytes */
export function inBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (bytes >= 1000 && at < units.length - 1) {
    bytes /= 1000;
    at += 1;
  }
  return `${bytes.toFixed(at && bytes < 10 ? 1 : 0)} ${units[at]}`;
}
