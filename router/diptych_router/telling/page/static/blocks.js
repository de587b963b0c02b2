/** The blocks of an engine as squares: what they are for, and how many fit. Nothing here knows the
 * document. */

const PITCHES = [14, 12, 11, 10, 9, 8, 7, 6, 5, 4];
/** Pixels from one square to the next, the nicest first. */
const SMALL_PITCH = 5;
/** The same where a square stands for several blocks. */

/**
 * @typedef {"filled" | "arriving" | "lent" | "remembered" | "free"} Kind
 * @typedef {{kind: Kind, whose: string, blocks: number}} Group whose: see `Holder`; empty: nobody's,
 *   or of requests that the engine does not count one by one
 * @typedef {{pitch: number, columns: number, perSquare: number, squares: number[]}} Plan how many
 *   blocks a square stands for, and how many squares each group has
 */

/**
 * The blocks of an engine by what they are for. They add up to its total: a block that several
 * requests share is the first one's, and one that is lent is the lease's.
 * @param {import("./pools.js").Engine} engine
 * @returns {Group[]}
 */
export function groupsOf(engine) {
  const { blocks_total: total = 0, blocks_used: used = 0, holders = [] } = engine;
  let left = used;
  /** @param {Kind} kind @param {number} wanted @param {string} whose @returns {Group} */
  const take = (kind, wanted, whose = "") => {
    const blocks = Math.max(0, Math.min(wanted, left));
    left -= blocks;
    return { kind, whose, blocks };
  };
  const arriving = holders.map((x) => take("arriving", x.arriving ?? 0, x.whose));
  const known = arriving.reduce((sum, group) => sum + group.blocks, 0);
  arriving.push(take("arriving", (engine.blocks_arriving ?? 0) - known));
  const lent = take("lent", engine.blocks_lent ?? 0);
  const filled = holders.map((x) => take("filled", x.blocks - (x.arriving ?? 0), x.whose));
  filled.push(take("filled", left));
  left = total - used;
  const remembered = take("remembered", engine.blocks_remembered ?? 0);
  const free = take("free", left);
  return [...filled, ...arriving, lent, remembered, free].filter((group) => group.blocks > 0);
}

/**
 * How to draw groups in a space: one square for each block where that fits, otherwise one for
 * several, rounded up for each group.
 * @param {Group[]} groups
 * @param {number} width
 * @param {number} height
 * @returns {Plan}
 */
export function planOf(groups, width, height) {
  const total = groups.reduce((sum, group) => sum + group.blocks, 0);
  const room = (/** @type {number} */ pitch) => Math.floor(width / pitch) * Math.floor(height / pitch);
  const pitch = PITCHES.find((each) => room(each) >= total) ?? SMALL_PITCH;
  const perSquare = Math.max(1, Math.ceil(total / Math.max(1, room(pitch) - groups.length)));
  const squares = groups.map((group) => Math.ceil(group.blocks / perSquare));
  return { pitch, columns: Math.max(1, Math.floor(width / pitch)), perSquare, squares };
}

/**
 * The group at a place; undefined: none.
 * @param {Plan} plan
 * @param {number} x
 * @param {number} y
 * @returns {number | undefined}
 */
export function groupAt({ pitch, columns, squares }, x, y) {
  const column = Math.floor(x / pitch);
  if (column >= columns) return undefined;
  let index = Math.floor(y / pitch) * columns + column;
  for (const [group, count] of squares.entries()) {
    if (index < count) return group;
    index -= count;
  }
  return undefined;
}

/** @param {Group} group */
export function keyOf({ kind, whose }) {
  return `${kind} ${whose}`;
}
