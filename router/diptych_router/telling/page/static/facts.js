/** What became of an answer: where it was computed, why there, and what it took. */

import { make, termsOf } from "./dom.js";
import { inBytes } from "./pools.js";
import { inTime, timelineOf } from "./ribbon.js";

/**
 * @typedef {object} Candidate
 * @property {string} engine
 * @property {boolean} chosen
 * @property {number} cost
 * @property {Record<string, number>} terms
 * @property {number} cached_tokens
 * @property {number} stored_tokens
 *
 * @typedef {object} Attempt
 * @property {string} reason
 * @property {string} prefill
 * @property {string} decode
 * @property {string} fetch
 * @property {number} fetch_tokens
 * @property {{duty: string, num_able: number, candidates: Candidate[]}[]} choices
 * @property {number | null} first_token_expected_s
 * @property {number | null} first_token_s
 * @property {number | null} cached_tokens
 * @property {number | null} hand_off_expected_s
 * @property {number | null} hand_off_s
 * @property {number} received_tokens
 * @property {string[]} decoded_by
 * @property {string} setback
 * @property {string} why
 *
 * @typedef {{prompt_tokens: number, outcome: string, attempts: Attempt[]}} Known one answer
 * @typedef {{policy: string, disaggregate: string, requests: Known[]}} Explanation
 */

const DUTIES = { prefill: "To compute the prompt", decode: "To decode", both: "To do both" };

/**
 * @param {import("./answering.js").Outcome} outcome
 * @param {Explanation | null} explanation null: the router does not say
 * @param {import("./pools.js").Pools} pools
 * @param {() => Promise<import("./ribbon.js").Course | null>} askTimeline
 * @returns {HTMLElement}
 */
export function factsOf(outcome, explanation, pools, askTimeline) {
  const attempts = explanation?.requests[0]?.attempts ?? [];
  const box = make("div", "facts");
  const last = attempts.at(-1);
  if (last) box.append(wayOf(last));
  for (const attempt of attempts) {
    if (attempt.setback) {
      const engines = [attempt.prefill, ...namesOf(attempt)].filter(Boolean).join(" → ");
      box.append(make("p", "setback", `Went on elsewhere after ${engines}: ${attempt.why}`));
    }
  }
  box.append(termsOf(figuresOf(outcome, attempts, pools)));
  if (explanation && last) {
    const why = make("details", "", make("summary", "", "Why there"));
    attempts.forEach((attempt, at) => why.append(...whyOf(attempt, at, explanation.policy)));
    box.append(timelineOf(askTimeline), why);
  }
  return box;
}

/** @param {Attempt} attempt */
function wayOf(attempt) {
  const decode = make("span", "decode", namesOf(attempt).join(", then "));
  if (!attempt.prefill) return make("p", "way", "computed by ", decode);
  return make("p", "way", make("span", "prefill", attempt.prefill), " → ", decode);
}

/** @param {Attempt} attempt */
function namesOf(attempt) {
  return attempt.decoded_by.length ? attempt.decoded_by : [attempt.decode];
}

/**
 * @param {import("./answering.js").Outcome} outcome
 * @param {Attempt[]} attempts
 * @param {import("./pools.js").Pools} pools
 * @returns {[string, string][]}
 */
function figuresOf(outcome, attempts, pools) {
  /** @type {[string, string][]} */
  const figures = [];
  if (outcome.firstTokenMs !== null) {
    figures.push(["first token", inTime(outcome.firstTokenMs / 1000)]);
  }
  if (outcome.tokensPerSecond) figures.push(["tokens/s", outcome.tokensPerSecond.toFixed(0)]);
  if (outcome.tokens !== null) figures.push(["tokens", String(outcome.tokens)]);
  const cached = outcome.cachedTokens ?? attempts.at(-1)?.cached_tokens ?? null;
  if (cached !== null) figures.push(["cached tokens", String(cached)]);
  const moved = movedBy(attempts, pools);
  if (moved) figures.push(["moved", moved]);
  if (outcome.end) figures.push(["ended", outcome.end]);
  return figures;
}

/**
 * What crossed the hinge for all attempts together; empty if nothing did.
 * @param {Attempt[]} attempts
 * @param {import("./pools.js").Pools} pools
 */
function movedBy(attempts, pools) {
  let [tokens, blocks, bytes, known] = [0, 0, 0, true];
  for (const attempt of attempts.filter((each) => each.received_tokens)) {
    tokens += attempt.received_tokens;
    const moved = pools.moved(namesOf(attempt)[0], attempt.received_tokens);
    known &&= moved !== null;
    blocks += moved?.blocks ?? 0;
    bytes += moved?.bytes ?? 0;
  }
  if (!tokens) return "";
  if (!known) return `KV of ${tokens} tokens`;
  return `${blocks} block${blocks === 1 ? "" : "s"}, ${inBytes(bytes)}`;
}

/**
 * @param {Attempt} attempt
 * @param {number} at
 * @param {string} policy
 * @returns {Node[]}
 */
function whyOf(attempt, at, policy) {
  const fetched = attempt.fetch ? `; ${attempt.fetch_tokens} tokens from ${attempt.fetch}` : "";
  const title = `Attempt ${at + 1}: ${attempt.reason} (policy ${policy})${fetched}`;
  const tables = attempt.choices.map((choice) => candidatesOf(choice));
  return [make("p", "", title), ...tables, ...truthOf(attempt)];
}

/** @param {Attempt["choices"][number]} choice */
function candidatesOf({ duty, num_able: able, candidates }) {
  const terms = [...new Set(candidates.flatMap((candidate) => Object.keys(candidate.terms)))];
  const head = ["engine", "cached tokens", ...terms.map(headingOf), "total"];
  const rows = candidates.map((candidate) => {
    const stored = candidate.stored_tokens;
    const cells = [
      `${candidate.cached_tokens}${stored ? ` + ${stored} on disk` : ""}`,
      ...terms.map((term) => amountOf(term, candidate.terms[term])),
      amountOf(terms[0] ?? "", candidate.cost),
    ];
    const name = make("th", "", (candidate.chosen ? "✓ " : "") + candidate.engine);
    name.scope = "row";
    return make("tr", candidate.chosen ? "chosen" : "", name, ...cells.map((c) => make("td", "", c)));
  });
  const duties = /** @type {Record<string, string>} */ (DUTIES);
  const more = able > candidates.length ? ` (${candidates.length} of ${able} engines)` : "";
  const table = make(
    "table",
    "",
    make("caption", "", `${duties[duty] ?? duty}: what each engine would cost${more}`),
    make("thead", "", make("tr", "", ...head.map((h) => make("th", "", h)))),
    make("tbody", "", ...rows),
  );
  return make("div", "scroll", table);
}

/** @param {Attempt} attempt */
function truthOf(attempt) {
  /** @type {[string, string][]} */
  const pairs = [];
  for (const [what, expected, real] of /** @type {const} */ ([
    ["first token", attempt.first_token_expected_s, attempt.first_token_s],
    ["hand-off", attempt.hand_off_expected_s, attempt.hand_off_s],
  ])) {
    if (real === null) continue;
    const predicted = expected === null ? "" : `, ${inTime(expected)} were expected`;
    pairs.push([what, inTime(real) + predicted]);
  }
  return pairs.length ? [termsOf(pairs)] : [];
}

/** @param {string} term */
function headingOf(term) {
  return term.endsWith("_s") ? `${term.slice(0, -2)} ms` : term.replaceAll("_", " ");
}

/**
 * @param {string} term
 * @param {number | undefined} value
 */
function amountOf(term, value) {
  if (value === undefined) return "–";
  return term.endsWith("_s") ? (value * 1000).toFixed(1) : String(value);
}
