/** What moves over the page: blocks from engine to engine, and the thread of the answer. Frames are
 * drawn only while something moves. */

import { byId } from "./dom.js";
import { pointAt, wayBetween, wayToLane } from "./wires.js";

const FLIGHT_MS = 1100;
const APART_MS = 55;
/** From one block of a flight to the next. */
const MOVE_MS = 700;
/** For the thread, from one engine to another. */
const MOST_SQUARES = 16;
/** More blocks that cross at once are shown as so many squares. */
const MOST_FLYING = 160;
const SLOW_FRAME_MS = 40;
const SLOW_FRAMES = 8;
const REST_MS = 5000;
/** After so many slow frames one after the other flights are only told, for so long. */

/**
 * @typedef {{sender: string, receiver: string, began: number}} Square one block between two engines
 * @typedef {{points: import("./wires.js").Point[], colour: string}} Way
 * @typedef {{engine: string, before: string, since: number}} Thread
 */

export class Stage {
  #canvas = byId("stage", HTMLCanvasElement);
  #lane = byId("lane", HTMLElement);
  #still = matchMedia("(prefers-reduced-motion: reduce)");
  /** @type {Square[]} */
  #squares = [];
  /** @type {Thread | null} */
  #thread = null;
  #frame = 0;
  #last = 0;
  #slow = 0;
  #restsUntil = 0;

  /** @param {(engine: string) => import("./wires.js").Place | null} placeOf by name */
  constructor(placeOf) {
    this.placeOf = placeOf;
    const redraw = () => this.#wake();
    addEventListener("resize", redraw);
    document.addEventListener("scroll", redraw, { capture: true, passive: true });
  }

  /** Whether the machine is too busy for motion. */
  get isSlow() {
    return performance.now() < this.#restsUntil;
  }

  /**
   * Let blocks fly from their sender to their receiver.
   * @param {import("./pools.js").Move} move
   */
  fly({ sender, receiver, blocks }) {
    if (this.#still.matches || document.hidden || this.isSlow) return;
    const now = performance.now();
    for (let at = 0; at < Math.min(blocks, MOST_SQUARES) && this.#squares.length < MOST_FLYING; at += 1) {
      this.#squares.push({ sender, receiver, began: now + at * APART_MS });
    }
    this.#wake();
  }

  /**
   * Show which engine the answer comes from.
   * @param {string} engine by name; empty: there is no answer now
   */
  thread(engine) {
    if (engine === (this.#thread?.engine ?? "")) return;
    const before = this.#thread?.engine ?? "";
    this.#thread = engine ? { engine, before, since: performance.now() } : null;
    this.#canvas.dataset.thread = engine;
    this.#wake();
  }

  #wake() {
    if (this.#frame || !(this.#thread || this.#squares.length || this.#canvas.dataset.drawn)) return;
    this.#last = 0;
    this.#frame = requestAnimationFrame((now) => this.#draw(now));
  }

  /** @param {number} now */
  #draw(now) {
    this.#frame = 0;
    if (this.#last) this.#slow = now - this.#last > SLOW_FRAME_MS ? this.#slow + 1 : 0;
    this.#last = now;
    if (this.#slow >= SLOW_FRAMES) {
      this.#squares = [];
      this.#slow = 0;
      this.#restsUntil = now + REST_MS;
    }
    const pen = this.#clear();
    if (!pen) return;
    this.#squares = this.#squares.filter((square) => now < square.began + FLIGHT_MS);
    const moves = this.#thread ? this.#drawThread(pen, this.#thread, now) : false;
    this.#drawFlying(pen, now);
    this.#canvas.dataset.drawn = this.#thread || this.#squares.length ? "yes" : "";
    if (moves || this.#squares.length) {
      this.#frame = requestAnimationFrame((next) => this.#draw(next));
    }
  }

  /**
   * The ways are those of this frame: the page may have grown since a block began to fly.
   * @param {CanvasRenderingContext2D} pen
   * @param {number} now
   */
  #drawFlying(pen, now) {
    /** @type {Map<string, Way | null>} */
    const ways = new Map();
    for (const { sender, receiver, began } of this.#squares) {
      const key = `${sender} ${receiver}`;
      const way = ways.get(key) ?? this.#wayBetween(sender, receiver);
      ways.set(key, way);
      if (!way || now < began) continue;
      const { x, y } = pointAt(way.points, easedOf((now - began) / FLIGHT_MS));
      pen.fillStyle = way.colour;
      pen.fillRect(x - 5, y - 5, 10, 10);
    }
  }

  /**
   * @param {string} sender
   * @param {string} receiver
   * @returns {Way | null} null: one of them is not on the page
   */
  #wayBetween(sender, receiver) {
    const [from, to] = [this.placeOf(sender), this.placeOf(receiver)];
    if (!from || !to) return null;
    const points = wayBetween(from, to, this.#laneAt(from.role === "prefill" ? 0.67 : 0.86));
    const style = getComputedStyle(document.documentElement);
    return { points, colour: style.getPropertyValue(`--${from.role}`).trim() };
  }

  #clear() {
    const sharp = window.devicePixelRatio || 1;
    const [width, height] = [innerWidth * sharp, innerHeight * sharp];
    if (this.#canvas.width !== width || this.#canvas.height !== height) {
      this.#canvas.width = width;
      this.#canvas.height = height;
    }
    const pen = this.#canvas.getContext("2d");
    pen?.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen?.clearRect(0, 0, innerWidth, innerHeight);
    return pen;
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {Thread} thread
   * @param {number} now
   * @returns {boolean} whether it still moves
   */
  #drawThread(pen, { engine, before, since }, now) {
    const [place, last] = [this.placeOf(engine), this.placeOf(before)];
    if (!place) return false;
    const share = this.#still.matches ? 1 : Math.min(1, (now - since) / MOVE_MS);
    const style = getComputedStyle(document.documentElement);
    const middle = this.#middle();
    /** @param {import("./wires.js").Place} to */
    const wayTo = (to) => [middle, ...wayToLane(to, middle.y).reverse()];
    if (last && last !== place && share < 1) {
      strokeWay(pen, wayTo(last), 1 - share, style.getPropertyValue("--bad").trim());
    }
    strokeWay(pen, wayTo(place), last ? share : 1, style.getPropertyValue(`--${place.role}`).trim());
    return share < 1;
  }

  #middle() {
    const { left, width } = this.#lane.getBoundingClientRect();
    return { x: left + width / 2, y: this.#laneAt(0.48) };
  }

  /** @param {number} share of the lane's height */
  #laneAt(share) {
    const { top, height } = this.#lane.getBoundingClientRect();
    return top + height * share;
  }
}

/** @param {number} share of the time @returns {number} of the way: slow at both ends */
function easedOf(share) {
  return share < 0.5 ? 2 * share * share : 1 - 2 * (1 - share) * (1 - share);
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {import("./wires.js").Point[]} way
 * @param {number} share how much of it, from its beginning
 * @param {string} colour
 */
function strokeWay(pen, way, share, colour) {
  const end = pointAt(way, share);
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(way[0].x, way[0].y);
  let length = share * lengthOf(way);
  for (let at = 1; at < way.length; at += 1) {
    const step = Math.hypot(way[at].x - way[at - 1].x, way[at].y - way[at - 1].y);
    if (step > length) break;
    pen.lineTo(way[at].x, way[at].y);
    length -= step;
  }
  pen.lineTo(end.x, end.y);
  pen.stroke();
  pen.beginPath();
  pen.arc(way[0].x, way[0].y, 5, 0, 2 * Math.PI);
  pen.fill();
  pen.beginPath();
  pen.arc(end.x, end.y, 3.5, 0, 2 * Math.PI);
  pen.fill();
}

/** @param {import("./wires.js").Point[]} way */
function lengthOf(way) {
  return way.slice(1).reduce((sum, { x, y }, at) => sum + Math.hypot(x - way[at].x, y - way[at].y), 0);
}
