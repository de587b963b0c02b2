/** Both pools as they are now. Nothing here knows the document. */

/**
 * What the server leaves out is 0, or empty.
 * @typedef {object} Engine
 * @property {string} id
 * @property {string} name empty if no engine has ever answered there
 * @property {"prefill" | "decode"} role
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
 *
 * @typedef {object} Change
 * @property {Engine[]} engines
 * @property {string[]} [gone]
 * @property {number} open_requests
 * @property {number} held_requests
 * @property {number} [left_out]
 */

export class Pools {
  /** @type {Map<string, Engine>} */
  engines = new Map();
  open = 0;
  held = 0;
  leftOut = 0;
  /** Blocks and bytes that crossed since the page was opened. */
  crossedBlocks = 0;
  crossedBytes = 0;
  /**
   * Of engines that have received blocks, by name: tokens in a block, and bytes of a block in the
   * mean of all. Kept when an engine goes, for answers that it had a part in.
   * @type {Map<string, {tokens: number, bytes: number}>}
   */
  #blocks = new Map();

  /**
   * Take what changed.
   * @param {Change} change
   * @param {boolean} anew the first change of a stream tells all engines
   * @returns {number} blocks that crossed since the change before
   */
  take(change, anew) {
    let crossed = 0;
    const told = new Set(change.engines.map((engine) => engine.id));
    for (const engine of change.engines) {
      const known = this.engines.get(engine.id);
      if (known) {
        crossed += grown(known.blocks_received, engine.blocks_received);
        this.crossedBytes += grown(known.bytes_received, engine.bytes_received);
      }
      this.engines.set(engine.id, engine);
      const { name, block_tokens: tokens, blocks_received: blocks, bytes_received: bytes } = engine;
      if (tokens && blocks && bytes) this.#blocks.set(name, { tokens, bytes: bytes / blocks });
    }
    const gone = anew ? [...this.engines.keys()].filter((id) => !told.has(id)) : [];
    for (const id of [...gone, ...(change.gone ?? [])]) this.engines.delete(id);
    this.open = change.open_requests;
    this.held = change.held_requests;
    this.leftOut = change.left_out ?? 0;
    this.crossedBlocks += crossed;
    return crossed;
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
