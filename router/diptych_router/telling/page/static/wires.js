/** The ways between engines on the page: along the gutters and the lane, never over the chat. */

/**
 * @typedef {{x: number, y: number}} Point
 * @typedef {{left: number, right: number, top: number, bottom: number, role: "prefill" | "decode"}}
 *   Place a card, and the pool that it is in
 */

const GUTTER = 13;
/** Pixels from a card to its gutter. */
const HEAD = 22;
/** Pixels from a card's upper edge to where the way begins. */

/**
 * The way from a card to a height of the lane: out of the card, and along the gutter.
 * @param {Place} card
 * @param {number} lane
 * @returns {Point[]}
 */
export function wayToLane(card, lane) {
  const left = card.role === "prefill";
  const x = left ? card.right + GUTTER : card.left - GUTTER;
  const y = Math.min(card.top + HEAD, card.bottom);
  return [{ x: left ? card.right : card.left, y }, { x, y }, { x, y: lane }];
}

/**
 * The way from one card to another.
 * @param {Place} from
 * @param {Place} to
 * @param {number} lane
 * @returns {Point[]}
 */
export function wayBetween(from, to, lane) {
  const [out, into] = [wayToLane(from, lane), wayToLane(to, lane).reverse()];
  if (from.role === to.role) return [...out.slice(0, 2), ...into.slice(1)];
  return [...out, ...into];
}

/**
 * The point of a way after this share of it.
 * @param {Point[]} way
 * @param {number} share 0 to 1
 * @returns {Point}
 */
export function pointAt(way, share) {
  const lengths = way.slice(1).map((point, at) => Math.hypot(point.x - way[at].x, point.y - way[at].y));
  let left = share * lengths.reduce((a, b) => a + b, 0);
  for (const [at, length] of lengths.entries()) {
    if (left <= length && length > 0) {
      const [a, b, part] = [way[at], way[at + 1], left / length];
      return { x: a.x + (b.x - a.x) * part, y: a.y + (b.y - a.y) * part };
    }
    left -= length;
  }
  return way[way.length - 1];
}
