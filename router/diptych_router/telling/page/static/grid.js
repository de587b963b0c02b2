/** An engine's blocks as squares, and beside them in words: what they are for, and whose. */

import { groupAt, groupsOf, keyOf, planOf } from "./blocks.js";
import { make, setText } from "./dom.js";

const OTHERS = 5;
/** How many colours the requests of others have. */
const WORDS = /** @type {const} */ ({
  filled: "in use",
  arriving: "arriving",
  lent: "lent",
  remembered: "remembered",
  free: "free",
});
const MEANINGS = /** @type {const} */ ({
  filled: "hold the KV of a request that is computed here",
  arriving: "are reserved for KV that comes from another engine",
  lent: "are under a lease until another engine has read them",
  remembered: "keep the beginning of a prompt, and are free for others",
  free: "hold nothing",
});

export class Grid {
  /** @type {import("./blocks.js").Group[]} */
  #groups = [];
  /** @type {import("./blocks.js").Plan | null} */
  #plan = null;
  /** What each square looks like that is drawn. @type {string[]} */
  #drawn = [];
  #canvas = make("canvas", "squares");
  #legend = make("ul", "legend");
  #told = make("p", "told quiet");
  #scale = make("p", "scale quiet");
  /** @type {Map<string, HTMLButtonElement>} by group */
  #buttons = new Map();
  #size = "";
  #room = { width: 0, height: 0 };
  #selected = "";
  #tokens = 0;
  #dead = false;

  /** @param {(whose: string) => string} idOf the id of a request of this page; empty: another one */
  constructor(idOf) {
    this.idOf = idOf;
    this.space = make("div", "space", this.#canvas);
    this.foot = make("div", "foot", this.#scale);
    this.parts = [this.space, this.#legend, this.#told, this.foot];
    this.#canvas.setAttribute("role", "img");
    this.#legend.setAttribute("aria-label", "What the blocks are for");
    new ResizeObserver(([{ contentRect }]) => {
      this.#room = { width: Math.floor(contentRect.width), height: Math.floor(contentRect.height) };
      this.draw();
    }).observe(this.space);
    this.#canvas.addEventListener("click", (event) => this.#select(this.#keyAt(event), false));
    this.#canvas.addEventListener("pointermove", (event) => {
      const group = this.#groups.find((each) => keyOf(each) === this.#keyAt(event));
      this.#canvas.title = group ? this.#sentence(group) : "";
    });
  }

  /**
   * @param {import("./pools.js").Engine} engine
   * @param {boolean} dead nobody answers there: its blocks are gone
   */
  show(engine, dead) {
    const lost = { blocks_total: engine.blocks_total, id: "", name: "", role: engine.role, state: "" };
    this.#groups = groupsOf(dead ? lost : engine);
    this.#dead = dead;
    this.#tokens = engine.block_tokens ?? this.#tokens;
    const words = this.#groups.map((group) => `${group.blocks} ${this.#name(group)}`);
    this.#canvas.setAttribute("aria-label", dead ? "No blocks" : `Blocks: ${words.join(", ")}`);
    this.#showLegend();
    this.#select(this.#selected, true);
    this.draw();
  }

  /** Draw the squares that look different now, or all after a change of size. */
  draw() {
    const { width, height } = this.#room;
    if (!width || !height) return;
    const plan = (this.#plan = planOf(this.#groups, width, height));
    const { pitch, columns } = plan;
    const rows = Math.ceil(plan.squares.reduce((a, b) => a + b, 0) / columns);
    const pen = this.#sized(width, Math.max(1, Math.min(height, rows * pitch)), pitch);
    if (!pen) return;
    const colours = getComputedStyle(this.#canvas);
    let at = 0;
    this.#groups.forEach((group, number) => {
      const alpha = this.#dead ? 0.4 : !this.#selected || this.#selected === keyOf(group) ? 1 : 0.25;
      const colour = colours.getPropertyValue(this.#colour(group)).trim();
      const look = `${group.kind} ${colour} ${alpha}`;
      pen.globalAlpha = alpha;
      pen.fillStyle = pen.strokeStyle = colour;
      for (const end = at + plan.squares[number]; at < end; at += 1) {
        if (this.#drawn[at] === look) continue;
        const [x, y] = [(at % columns) * pitch, Math.floor(at / columns) * pitch];
        if (this.#drawn[at]) pen.clearRect(x, y, pitch, pitch);
        drawSquare(pen, group.kind, x, y, pitch - (pitch > 5 ? 2 : 1));
        this.#drawn[at] = look;
      }
    });
    for (const gone of this.#drawn.splice(at).keys()) {
      pen.clearRect(((at + gone) % columns) * pitch, Math.floor((at + gone) / columns) * pitch, pitch, pitch);
    }
    const [size, blocks] = [plan.perSquare, plan.perSquare === 1 ? "block" : "blocks"];
    const tokens = this.#tokens ? ` of ${this.#tokens} tokens` : "";
    setText(this.#scale, `1 square = ${size} ${blocks}${tokens}`);
    this.#scale.title = size > 1 ? "Rounded up, so that a square is drawn for each request" : "";
  }

  /**
   * The pen of a canvas of a size, in which nothing is drawn yet if that is new.
   * @param {number} width
   * @param {number} height
   * @param {number} pitch
   */
  #sized(width, height, pitch) {
    const sharp = window.devicePixelRatio || 1;
    const size = `${width} ${height} ${pitch} ${sharp}`;
    const pen = this.#canvas.getContext("2d");
    if (this.#size === size || !pen) return pen;
    this.#size = size;
    this.#drawn = [];
    this.#canvas.width = width * sharp;
    this.#canvas.height = height * sharp;
    pen.scale(sharp, sharp);
    return pen;
  }

  #showLegend() {
    const keys = new Set(this.#groups.map(keyOf));
    for (const [key, button] of this.#buttons) {
      if (keys.has(key)) continue;
      button.parentElement?.remove();
      this.#buttons.delete(key);
    }
    this.#groups.forEach((group, place) => {
      const key = keyOf(group);
      let button = this.#buttons.get(key);
      if (!button) {
        button = make("button", "", make("span", `swatch ${group.kind}`), make("span", ""));
        button.type = "button";
        button.addEventListener("click", () => this.#select(this.#selected === key ? "" : key, false));
        this.#buttons.set(key, button);
        const item = make("li", "", button);
        this.#legend.insertBefore(item, this.#legend.children[place] ?? null);
      }
      button.dataset.kind = group.kind;
      button.dataset.blocks = String(group.blocks);
      button.dataset.colour = this.#colour(group).slice(2);
      button.title = this.#sentence(group);
      const words = button.lastElementChild;
      if (words) setText(words, `${group.blocks.toLocaleString("en")} ${this.#name(group)}`);
    });
  }

  /**
   * Tell what a group of blocks is, and let it stand out.
   * @param {string} key empty: none
   * @param {boolean} again it was selected before
   */
  #select(key, again) {
    const group = this.#groups.find((each) => keyOf(each) === key);
    this.#selected = group ? key : "";
    for (const [each, button] of this.#buttons) {
      button.setAttribute("aria-pressed", String(each === this.#selected));
    }
    this.#told.setAttribute("aria-live", again ? "off" : "polite"); // counts change all the time
    const told = group ? this.#sentence(group) : "";
    setText(this.#told, told);
    if (!again) this.draw();
  }

  /** @param {MouseEvent} event */
  #keyAt({ offsetX, offsetY }) {
    const at = this.#plan ? groupAt(this.#plan, offsetX, offsetY) : undefined;
    return at === undefined ? "" : keyOf(this.#groups[at]);
  }

  /** @param {import("./blocks.js").Group} group */
  #name({ kind, whose }) {
    if (this.#dead) return "gone";
    if (kind !== "filled" && kind !== "arriving") return WORDS[kind];
    if (!whose) return `${WORDS[kind]}, unnamed`;
    return `${WORDS[kind]}, ${this.idOf(whose) ? "this chat" : whose.slice(0, 4)}`;
  }

  /** @param {import("./blocks.js").Group} group */
  #sentence({ kind, whose, blocks }) {
    if (this.#dead) return "These blocks were lost with the process that had them.";
    const id = whose && this.idOf(whose);
    const owner = id ? ` Request ${id}, of this chat.` : whose ? ` Request ${whose}, of another client or chat.` : "";
    const tokens = this.#tokens ? ` (${blocks * this.#tokens} tokens)` : "";
    return `${blocks} block${blocks === 1 ? "" : "s"}${tokens} ${MEANINGS[kind]}.${owner}`;
  }

  /** @param {import("./blocks.js").Group} group the name of a custom property */
  #colour({ kind, whose }) {
    if (this.#dead) return "--bad";
    if (kind === "free") return "--line";
    if (!whose) return kind === "filled" ? "--soft" : "--accent";
    if (this.idOf(whose)) return "--accent";
    return `--request-${parseInt(whose.slice(0, 4), 16) % OTHERS}`;
  }
}

/**
 * A block. What it is for can be seen without its colour.
 * @param {CanvasRenderingContext2D} pen
 * @param {import("./blocks.js").Kind} kind
 * @param {number} x
 * @param {number} y
 * @param {number} size
 */
function drawSquare(pen, kind, x, y, size) {
  if (kind === "filled") {
    pen.fillRect(x, y, size, size);
  } else if (kind === "lent") {
    const hole = Math.max(1, Math.round(size / 3));
    pen.fillRect(x, y, size, size);
    pen.clearRect(x + (size - hole) / 2, y + (size - hole) / 2, hole, hole);
  } else if (kind === "arriving") {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x + size, y + size);
    pen.lineTo(x, y + size);
    pen.fill();
    pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  } else if (kind === "remembered") {
    const alpha = pen.globalAlpha;
    pen.globalAlpha = alpha * 0.4;
    pen.fillRect(x, y, size, size);
    pen.globalAlpha = alpha;
  } else {
    pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  }
}
