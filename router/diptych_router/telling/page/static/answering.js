/** One answer: it is read as it comes, and timed. */

/**
 * @typedef {object} Outcome
 * @property {string} text
 * @property {string} reasoning
 * @property {import("./tools.js").Call[]} calls
 * @property {string} requestId by which the router knows it
 * @property {string} end why it ended: stop, length, ..., or stopped by the user
 * @property {number | null} firstTokenMs from the question to the first word, as seen here
 * @property {number | null} tokensPerSecond from the first word to the last
 * @property {number | null} tokens
 * @property {number | null} cachedTokens tokens of the prompt whose KV was there already
 */

/**
 * Read an answer to its end, or until `signal` stops it.
 * @param {import("./service.js").Service} service
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {(piece: {content?: string, reasoning?: string}) => void} shown called for each piece; some
 *   have neither, as while a call is held back until it is whole
 * @param {Outcome} outcome filled while the answer comes, so that it is known after a failure too
 */
export async function readAnswer(service, body, signal, shown, outcome) {
  const began = performance.now();
  let first = 0;
  try {
    const chunks = await service.chat(body, outcome.requestId, signal);
    for await (const chunk of chunks) {
      const now = performance.now();
      const choice = chunk.choices[0];
      const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice?.delta ?? {};
      if ((content || reasoning || calls.length) && !first) {
        first = now;
        outcome.firstTokenMs = first - began;
      }
      if (chunk.usage) takeUsage(outcome, chunk.usage, choice && first ? now - first : 0);
      outcome.text += content ?? "";
      outcome.reasoning += reasoning ?? "";
      for (const piece of calls) takeCall(outcome.calls, piece);
      shown({ content, reasoning });
      if (choice?.finish_reason) outcome.end = choice.finish_reason;
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    outcome.end = "stopped by you";
  }
}

/** @returns {Outcome} */
export function nothingYet() {
  const unknown = { firstTokenMs: null, tokensPerSecond: null, tokens: null, cachedTokens: null };
  return { text: "", reasoning: "", calls: [], requestId: newId(), end: "", ...unknown };
}

/**
 * @param {import("./tools.js").Call[]} calls
 * @param {any} piece of one of them: the first has its id and name, the others go on with its arguments
 */
export function takeCall(calls, { index, id = "", function: { name = "", arguments: asked = "" } = {} }) {
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  call.id += id ?? "";
  call.name += name ?? "";
  call.arguments += asked ?? "";
}

/**
 * @param {Outcome} outcome
 * @param {any} usage of the API, so far
 * @param {number} sinceFirstMs 0: this is not the moment of a token
 */
function takeUsage(outcome, usage, sinceFirstMs) {
  outcome.tokens = usage.completion_tokens;
  outcome.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? outcome.cachedTokens;
  if (sinceFirstMs) outcome.tokensPerSecond = (usage.completion_tokens - 1) / (sinceFirstMs / 1000);
}

/** Also on pages without TLS, which have no `randomUUID`. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
