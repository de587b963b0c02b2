/** The tools that a chat can be given: some that this page runs, one that its user answers, and those
 * that its user describes. Nothing here knows the document. */

import { resultOf } from "./calculator.js";

/**
 * @typedef {object} Call of a tool, as the model wrote it
 * @property {string} id
 * @property {string} name
 * @property {string} arguments JSON, if the model made no mistake
 * @property {string} [result] what the model is told
 *
 * @typedef {{name: string, description?: string, parameters?: object}} Described
 * @typedef {Described & {run: ((asked: any) => string) | null}} Tool run: null: its user answers
 */

/** @type {Record<string, Tool>} */
export const TOOLS = {
  calculator: {
    name: "calculator",
    description: "Compute a number. Knows + - * / % ^ and parentheses.",
    parameters: needing("expression", "such as 2 * (3 + 4)"),
    run: ({ expression }) => String(resultOf(String(expression))),
  },
  current_time: {
    name: "current_time",
    description: "Tell the date and the time of day.",
    parameters: needing("time_zone", "an IANA name, such as Europe/Paris"),
    run: ({ time_zone: timeZone }) =>
      new Date().toLocaleString("en", { dateStyle: "full", timeStyle: "long", timeZone }),
  },
  ask_user: {
    name: "ask_user",
    description: "Ask the user something, and wait for the answer.",
    parameters: needing("question", ""),
    run: null,
  },
};
const MOST_CHARACTERS = 100_000;

/**
 * What the page answers to a call; null: its user is to. What went wrong is told to the model.
 * @param {Call} call
 * @returns {string | null}
 */
export function answerTo({ name, arguments: asked }) {
  const run = Object.hasOwn(TOOLS, name) && TOOLS[name].run;
  if (!run) return null;
  try {
    return run(JSON.parse(asked) ?? {});
  } catch (error) {
    return `Error: ${error instanceof Error ? error.message : error}`;
  }
}

/**
 * The tools that somebody has described: a list of functions as the API has them, or one of them.
 * Throws what is wrong with it.
 * @param {string} text JSON; empty: none
 * @returns {Described[]}
 */
export function describedIn(text) {
  if (!text.trim()) return [];
  if (text.length > MOST_CHARACTERS) throw new Error("are too long");
  const told = JSON.parse(text);
  const functions = [told].flat().map((each) => each?.function ?? each);
  for (const each of functions) {
    if (typeof each?.name !== "string" || !each.name) throw new Error("lack the name of a function");
    if (Object.hasOwn(TOOLS, each.name)) throw new Error(`describe ${each.name}, which the page has`);
  }
  return functions;
}

/**
 * Fields of a request that offer tools; none without tools.
 * @param {Described[]} offered
 * @param {string} choice auto or required
 * @param {boolean} isAnswered whether a call was answered just now: then nobody is forced to another
 */
export function offerOf(offered, choice, isAnswered) {
  if (!offered.length) return {};
  const tools = offered.map(({ name, description, parameters }) => ({
    type: "function",
    function: { name, description, parameters },
  }));
  if (choice !== "required") return { tools, tool_choice: choice };
  return { tools, tool_choice: isAnswered ? "none" : choice, parallel_tool_calls: false };
}

/**
 * A schema of one text that is needed.
 * @param {string} name
 * @param {string} description
 */
function needing(name, description) {
  const properties = { [name]: { type: "string", ...(description && { description }) } };
  return { type: "object", properties, required: [name], additionalProperties: false };
}
