/** Arithmetic in words that nobody has checked: it is read, and never run as a program. */

const MOST_CHARACTERS = 1000;
const MOST_DEPTH = 50;
const PARTS = /\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|(.))/giy;

/** @type {Record<string, (a: number, b: number) => number>} */
const SIGNS = {
  "+": (a, b) => a + b,
  "-": (a, b) => a - b,
  "*": (a, b) => a * b,
  "/": (a, b) => a / b,
  "%": (a, b) => a % b,
};
const SUMS = ["+", "-"];
const PRODUCTS = ["*", "/", "%"];

/**
 * Compute an expression of + - * / % ^ and parentheses. Throws what is wrong with it.
 * @param {string} expression
 * @returns {number}
 */
export function resultOf(expression) {
  if (expression.length > MOST_CHARACTERS) throw new Error("the expression is too long");
  const plain = expression.replaceAll("**", "^").replaceAll("×", "*").replaceAll("÷", "/");
  const parts = [...plain.trim().matchAll(PARTS)].map(([, number, sign]) => number ?? sign);
  const reader = new Reader(parts);
  const result = reader.chain(SUMS, 0);
  if (reader.next !== undefined) throw new Error(`unexpected ${reader.next}`);
  if (!Number.isFinite(result)) throw new Error("the result is no finite number");
  return Number(result.toPrecision(15));
}

class Reader {
  #at = 0;

  /** @param {string[]} parts numbers and signs */
  constructor(parts) {
    this.parts = parts;
  }

  /** The part that comes now; undefined at the end. */
  get next() {
    return this.parts[this.#at];
  }

  /**
   * Sums of products, or products of powers.
   * @param {string[]} signs
   * @param {number} depth
   * @returns {number}
   */
  chain(signs, depth) {
    const one = () => (signs === SUMS ? this.chain(PRODUCTS, depth) : this.#signed(depth));
    let result = one();
    while (signs.includes(this.next)) result = SIGNS[this.#take()](result, one());
    return result;
  }

  /** @param {number} depth @returns {number} */
  #signed(depth) {
    if (depth > MOST_DEPTH) throw new Error("the expression is nested too deeply");
    if (SUMS.includes(this.next)) {
      const sign = this.#take() === "-" ? -1 : 1;
      return sign * this.#signed(depth + 1);
    }
    const base = this.#single(depth);
    if (this.next !== "^") return base;
    this.#take();
    return base ** this.#signed(depth + 1);
  }

  /** @param {number} depth */
  #single(depth) {
    const part = this.#take();
    if (part === "(") {
      const inside = this.chain(SUMS, depth + 1);
      if (this.#take() !== ")") throw new Error("a parenthesis is not closed");
      return inside;
    }
    const number = Number(part);
    if (part === undefined || Number.isNaN(number)) throw new Error(`no number: ${part ?? "the end"}`);
    return number;
  }

  #take() {
    const part = this.next;
    this.#at += 1;
    return part;
  }
}
