/** The ribbon: when an answer was where. It grows while the answer comes, and is its timeline then. */

import { make, setText } from "./dom.js";

const ASK_MS = 250;
const END_TRIES = 8;
/** How often the end of an answer is asked for after its last word. */

const ROUTER = "router";
const NEAR_END = 0.2;
/** A mark in this last share of the time has its label before it. */
const SHARE = 0.65;
/** How much of the room between it and the one before it is left to that one's label. */
const MOST_TICKS = 200;
/** Of a row: tokens that come faster are one tick. */

/**
 * @typedef {{kind: string, began_s: number, ended_s: number, label: string}} Bar
 * @typedef {{at_s: number, label: string, is_bad: boolean}} Mark
 * @typedef {{name: string, bars: Bar[], marks: Mark[], ticks_s: number[]}} Lane
 * @typedef {{title: string, seconds: number, lanes: Lane[]}} Timeline see lanes.py
 * @typedef {{whose: string, engine: string, outcome: string, timeline: Timeline}} Course see routes.py
 */

export class Ribbon {
  element = make("div", "ribbon");
  #title = make("p", "ribbon-title");
  #lanes = make("div", "ribbon-lanes");
  #told = make("p", "hidden ribbon-told");

  constructor() {
    this.element.append(this.#title, this.#lanes, this.#told);
    this.#lanes.setAttribute("aria-hidden", "true");
  }

  /** @param {Course} course */
  show({ timeline, outcome }) {
    const { title, seconds, lanes } = timeline;
    setText(this.#title, `${title.replace(/ \+ 0 tokens, not ended$/, " tokens")} · ${inTime(seconds)}`);
    this.#title.title = title;
    this.element.dataset.outcome = outcome;
    while (this.#lanes.children.length > lanes.length) this.#lanes.lastElementChild?.remove();
    lanes.forEach((lane, at) => {
      const row = this.#lanes.children[at] ?? this.#lanes.appendChild(newRow());
      fillRow(row, lane, Math.max(seconds, 0.001));
    });
    setText(this.#told, toldOf(timeline));
  }
}

/** Asks for the course of the newest answer while it comes, and again when something happens. */
export class Following {
  #requestId = "";
  #timer = 0;

  /**
   * @param {(requestId: string) => Promise<Course | null>} ask null: it is not known yet
   * @param {(course: Course, requestId: string) => void} show
   */
  constructor(ask, show) {
    this.ask = ask;
    this.show = show;
  }

  /** @param {string} requestId of an answer that begins */
  begin(requestId) {
    this.#requestId = requestId;
    this.#again(ASK_MS / 5);
  }

  /** Whether no answer comes now. */
  get isIdle() {
    return !this.#requestId;
  }

  /** Until its end is in the router's record, which may be a moment later than here. */
  async end() {
    const requestId = this.#requestId;
    this.#requestId = "";
    clearTimeout(this.#timer);
    for (let left = END_TRIES; requestId && left; left -= 1) {
      const course = await this.#look(requestId);
      if (course?.outcome || this.#requestId) return;
      await new Promise((resolve) => setTimeout(resolve, ASK_MS));
    }
  }

  /** @param {number} after */
  #again(after) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(async () => {
      const requestId = this.#requestId;
      if (requestId && !document.hidden) await this.#look(requestId);
      if (requestId && requestId === this.#requestId) this.#again(ASK_MS);
    }, after);
  }

  /** @param {string} requestId @returns {Promise<Course | null>} null: it is not known yet */
  async #look(requestId) {
    const course = await this.ask(requestId).catch(() => null);
    if (course && (!this.#requestId || this.#requestId === requestId)) this.show(course, requestId);
    return course;
  }
}

/**
 * The ribbon of an answer that is over, drawn when somebody opens it.
 * @param {() => Promise<Course | null>} ask
 * @returns {HTMLElement}
 */
export function timelineOf(ask) {
  const box = make("details", "timeline", make("summary", "", "Timeline"));
  let asked = false;
  box.addEventListener("toggle", async () => {
    if (!box.open || asked) return;
    asked = true;
    const ribbon = new Ribbon();
    try {
      const course = await ask();
      if (!course) throw new Error("The router does not remember this answer any more.");
      ribbon.show(course);
      box.append(ribbon.element);
    } catch (error) {
      asked = false;
      box.append(make("p", "setback", error instanceof Error ? error.message : String(error)));
    }
  });
  return box;
}

function newRow() {
  return make("div", "ribbon-row", make("span", "ribbon-name"), make("div", "ribbon-track"));
}

/**
 * The elements of one kind in a track, so many: those that are there, more of them, or fewer.
 * @param {Element} track
 * @param {string} kind
 * @param {number} count
 */
function elementsIn(track, kind, count) {
  const all = /** @type {HTMLElement[]} */ ([...track.querySelectorAll(`.${kind}`)]);
  for (const left of all.splice(count)) left.remove();
  while (all.length < count) all.push(track.appendChild(make("span", kind)));
  return all;
}

/**
 * Times without those that follow another too closely to be seen.
 * @param {number[]} times
 * @param {number} least seconds
 */
function apart(times, least) {
  let last = -Infinity;
  return times.filter((time) => time - last >= least && ((last = time), true));
}

/**
 * A row is drawn anew some times a second: what is in it keeps its elements.
 * @param {Element} row
 * @param {Lane} lane
 * @param {number} seconds of the whole answer
 */
function fillRow(row, lane, seconds) {
  const [name, track] = row.children;
  setText(name, lane.name);
  const share = (/** @type {number} */ at) => `${((100 * Math.min(at, seconds)) / seconds).toFixed(3)}%`;
  const bars = elementsIn(track, "bar", lane.bars.length);
  lane.bars.forEach((bar, at) => {
    const shown = bars[at];
    shown.className = `bar ${bar.kind}`;
    shown.style.left = share(bar.began_s);
    shown.style.width = share(bar.ended_s - bar.began_s);
    shown.title = `${bar.label}: ${inTime(bar.began_s)} to ${inTime(bar.ended_s)}`;
    setText(shown.firstElementChild ?? shown.appendChild(make("span", "")), bar.label);
  });
  const times = apart(lane.ticks_s, seconds / MOST_TICKS);
  const ticks = elementsIn(track, "tick", times.length);
  times.forEach((time, at) => (ticks[at].style.left = share(time)));
  const marks = [...lane.marks].sort((a, b) => a.at_s - b.at_s);
  const flags = elementsIn(track, "mark", marks.length);
  marks.forEach((mark, at) => {
    const { late, from, to } = roomOf(marks, at, seconds);
    const label = lane.bars.length > 0 && lane.name !== ROUTER ? "" : mark.label;
    const shown = flags[at];
    shown.className = `mark${mark.is_bad ? " bad" : ""}${late ? " late" : ""}`;
    setText(shown.firstElementChild ?? shown.appendChild(make("span", "")), label);
    shown.style.left = share(from);
    shown.style.width = share(to - from);
    shown.title = `${mark.label}: at ${inTime(mark.at_s)}`;
  });
}

/**
 * Where a mark's label has room: up to the next mark, or, for one near the end, before it.
 * @param {Mark[]} marks in the order of time
 * @param {number} at
 * @param {number} seconds
 */
function roomOf(marks, at, seconds) {
  const time = (/** @type {number} */ index) => Math.min(marks[index]?.at_s ?? seconds, seconds);
  const lastIsLate = time(marks.length - 1) > (1 - NEAR_END) * seconds;
  const before = (/** @type {number} */ index) => (index ? time(index - 1) : 0);
  const parting = (/** @type {number} */ index) => time(index) * SHARE + before(index) * (1 - SHARE);
  const isLast = at === marks.length - 1;
  if (isLast && lastIsLate) return { late: true, from: at ? parting(at) : 0, to: time(at) };
  const to = lastIsLate && at === marks.length - 2 ? parting(at + 1) : time(at + 1);
  return { late: false, from: time(at), to };
}

/** @param {Timeline} timeline */
function toldOf({ lanes }) {
  return lanes
    .map(({ name, bars, marks }) => {
      const parts = [
        ...bars.map((bar) => `${bar.label} from ${inTime(bar.began_s)} to ${inTime(bar.ended_s)}`),
        ...marks.map((mark) => `${mark.label} at ${inTime(mark.at_s)}`),
      ];
      return `${name}: ${parts.join(", ")}.`;
    })
    .join(" ");
}

/** @param {number} seconds */
export function inTime(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(0)} ms`;
}
