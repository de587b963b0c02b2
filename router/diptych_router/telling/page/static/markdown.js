/**
 * Markdown as elements of the document. The library only finds the parts of a text; each element is
 * made here, so that whatever a model says, nothing of it is read as HTML.
 */

import { CodeBlock } from "./code.js";
import { make } from "./dom.js";
import { formulaOf } from "./math.js";
import { Lexer, Marked, Tokenizer } from "./vendor/marked.esm.js";

const MOST_INLINE_CHARACTERS = 20_000;
/** A longer run of words has no bold words or links, because to find them might take long. */

const MOST_CHARACTERS = 50_000;
/** A longer part stays text: to find what is in some kinds takes the square of their length. */

const MOST_AHEAD_CHARACTERS = 1000;
/** No heading is longer that is underlined, nor the words before a formula with lines of its own. */

const MOST_DEPTH = 24;
/** Lists and quotes nested more deeply stay text. */

/**
 * @typedef {Record<string, any>} Token a part of a text, as the library names it
 * @typedef {{depth: number, heading: number}} Where heading: the level of the one before
 * @typedef {any} Links those that are defined apart from their use, by their names
 */

/**
 * The parts of a text.
 * @param {string} text
 * @param {Links} links known ones; those that the text defines are added
 * @returns {Token[]}
 */
export function partsOf(text, links) {
  /** @type {Token[]} */
  const parts = [];
  let rest = text;
  while (rest.length > MOST_CHARACTERS) {
    const found = overIn(rest, links);
    parts.push(...found);
    rest = rest.slice(found.reduce((sum, { raw }) => sum + raw.length, 0));
  }
  return parts.concat(foundIn(rest, links));
}

/**
 * The first parts of a long text: those that what comes behind them cannot change.
 * @param {string} text
 * @param {Links} links
 * @returns {Token[]}
 */
function overIn(text, links) {
  const code = new Lexer(DIALECT).tokenizer.fences(text);
  if (code) return [code];
  const begin = text.slice(0, MOST_CHARACTERS);
  const found = foundIn(begin, links);
  const last = found.findLastIndex(({ type }) => type !== "space");
  if (last > 0) return found.slice(0, last);
  const raw = begin.slice(0, begin.lastIndexOf("\n") + 1) || begin;
  return [{ type: "html", raw, text: raw }];
}

/**
 * @param {string} text
 * @param {Links} links
 * @returns {Token[]}
 */
function foundIn(text, links) {
  const lexer = /** @type {any} */ (new Lexer(DIALECT));
  lexer.tokens.links = links;
  try {
    lexer.blockTokens(text, lexer.tokens);
    for (const { src, tokens } of lexer.inlineQueue) {
      if (src.length > MOST_INLINE_CHARACTERS) tokens.push({ type: "text", raw: src, text: src });
      else lexer.inlineTokens(src, tokens);
    }
    return lexer.tokens;
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // nested too deeply
    return [{ type: "html", raw: text, text }];
  }
}

/**
 * The elements of a text's part: one or, for white space, none.
 * @param {Token} token
 * @param {Where} where
 * @param {CodeBlock[]} codes the blocks of code are added
 * @returns {Node[]}
 */
export function elementsOf(token, where, codes) {
  const inside = { ...where, depth: where.depth + 1 };
  const blocks = (/** @type {Token[]} */ tokens) =>
    tokens.flatMap((part) => elementsOf(part, inside, codes));
  if (where.depth > MOST_DEPTH) return [literal(token.raw)];
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "hr":
      return [make("hr", "")];
    case "heading":
      where.heading = Math.min(token.depth + 2, where.heading + 1, 6);
      return [aligned(make(headingTag(where.heading), "", ...wordsOf(token.tokens)))];
    case "code": {
      const code = new CodeBlock(token.text, (token.lang ?? "").split(/[\s,{]/)[0]);
      codes.push(code);
      return [code.element];
    }
    case "formula":
      return [formulaOf(token.text, true, token.raw.trim())];
    case "blockquote":
      return [aligned(make("blockquote", "", ...blocks(token.tokens)))];
    case "list":
      return [listOf(token, blocks)];
    case "table":
      return [tableOf(token)];
    case "paragraph":
      return [aligned(make("p", "", ...wordsOf(token.tokens)))];
    case "text":
    case "checkbox":
      return wordsOf([token]);
    default:
      return [literal(token.raw)];
  }
}

/**
 * @param {Token[]} tokens
 * @returns {Node[]}
 */
function wordsOf(tokens) {
  return tokens.flatMap(wordOf);
}

/**
 * @param {Token} token
 * @returns {Node[]}
 */
function wordOf(token) {
  const { type, text, raw, tokens } = token;
  switch (type) {
    case "strong":
    case "em":
    case "del":
      return [make(type, "", ...wordsOf(tokens))];
    case "text":
      return tokens ? wordsOf(tokens) : [new Text(plain(text))];
    case "escape":
      return [new Text(text)];
    case "codespan":
      return [make("code", "", text)];
    case "br":
      return [make("br", "")];
    case "checkbox":
      return [new Text(token.checked ? "☑ " : "☐ ")];
    case "formula":
      return [formulaOf(text, token.isDisplay, raw)];
    case "link":
      return linkOf(token, wordsOf(tokens));
    case "image": // not fetched: its server would learn who reads the answer
      return linkOf(token, [new Text(`Image: ${text || token.href}`)]);
    default:
      return [/^<br\s*\/?>$/i.test(raw) ? make("br", "") : new Text(raw)];
  }
}

/**
 * @param {Token} token
 * @param {Node[]} words
 * @returns {Node[]} the text as it was written, if its address is none to go to
 */
function linkOf({ href, raw }, words) {
  if (!URL.canParse(href)) return [new Text(raw)];
  const { protocol } = new URL(href);
  if (!["http:", "https:", "mailto:"].includes(protocol)) return [new Text(raw)];
  const link = make("a", "", ...words);
  link.href = href;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return [link];
}

/**
 * @param {Token} token
 * @param {(tokens: Token[]) => Node[]} blocks
 */
function listOf(token, blocks) {
  const list = make(token.ordered ? "ol" : "ul", "");
  if (list instanceof HTMLOListElement && token.start !== 1) list.start = token.start;
  for (const item of token.items) list.append(aligned(make("li", "", ...blocks(item.tokens))));
  return list;
}

/** @param {Token} token */
function tableOf({ header, rows }) {
  const cells = (/** @type {"th" | "td"} */ tag, /** @type {Token[]} */ row) =>
    row.map(({ tokens, align }) => aligned(make(tag, align ?? "", ...wordsOf(tokens))));
  const head = make("thead", "", make("tr", "", ...cells("th", header)));
  const body = make("tbody", "");
  for (const row of rows) body.append(make("tr", "", ...cells("td", row)));
  const frame = make("div", "scroll", make("table", "", head, body));
  frame.tabIndex = 0;
  frame.role = "group";
  frame.ariaLabel = "Table";
  return frame;
}

/** @param {number} level */
function headingTag(level) {
  return /** @type {"h3" | "h4" | "h5" | "h6"} */ (`h${level}`);
}

/** @param {string} raw */
function literal(raw) {
  return aligned(make("p", "literal", raw.trimEnd()));
}

/**
 * Let the words decide between left to right and right to left.
 * @template {HTMLElement} T
 * @param {T} element
 */
function aligned(element) {
  element.dir = "auto";
  return element;
}

/** @type {Record<string, string>} */
const NAMED = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", deg: "°", hellip: "…",
  mdash: "—", ndash: "–", middot: "·", times: "×", larr: "←", rarr: "→", le: "≤", ge: "≥", ne: "≠",
};

/**
 * A text whose characters may be written as `&lt;` or `&#60;`.
 * @param {string} text
 */
function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,6}));/gi, (all, ten, hex, name) => {
    if (name) return NAMED[name] ?? all;
    const code = ten ? Number.parseInt(ten, 10) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}

const BLOCK = /^ {0,3}(?:\$\$([^]{1,8000}?)\$\$|\\\[([^]{1,8000}?)\\\])[ \t]*(?:\n|$)/;
const DISPLAY = /^(?:\$\$([^]{1,2000}?)\$\$|\\\[([^]{1,2000}?)\\\])/;
const INLINE = /^(?:\\\(([^]{1,2000}?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n]){1,1000}?)(?<!\s)\$(?![\d$]))/;
/** One dollar opens a formula only before a letter or sign, and closes one only behind it, as in
 *  pandoc: "$5 and $10" is no formula. */

const DIALECT = new Marked({
  gfm: true,
  tokenizer: {
    /** Each line of a list is asked about, and the library would look for an underline to its end. */
    lheading(src) {
      const near = src.slice(0, MOST_AHEAD_CHARACTERS);
      const lines = src.length > near.length ? near.slice(0, near.lastIndexOf("\n") + 1) : near;
      return Tokenizer.prototype.lheading.call(this, lines);
    },
  },
  extensions: [
    {
      name: "formula",
      level: "block",
      start: (/** @type {string} */ src) => {
        // This is asked for each line of a list, so it looks at no more than a few of them.
        const [paragraph] = src.slice(0, MOST_AHEAD_CHARACTERS).split("\n\n", 1);
        const at = paragraph.search(/(?<=\n) {0,3}(?:\$\$|\\\[)/);
        return at >= 0 && BLOCK.test(src.slice(at)) ? at : undefined;
      },
      tokenizer: (/** @type {string} */ src) => formulaIn(src, BLOCK, true),
    },
    {
      name: "formula",
      level: "inline",
      start: (/** @type {string} */ src) => {
        const at = src.search(/\\[([]|(?<![\w$\\])\$/);
        return at < 0 ? undefined : at;
      },
      tokenizer: (/** @type {string} */ src) => formulaIn(src, DISPLAY, true) ?? formulaIn(src, INLINE, false),
    },
  ],
}).defaults;

/**
 * @param {string} src
 * @param {RegExp} form
 * @param {boolean} isDisplay
 */
function formulaIn(src, form, isDisplay) {
  const found = form.exec(src);
  if (!found) return undefined;
  return { type: "formula", raw: found[0], text: (found[1] ?? found[2]).trim(), isDisplay };
}
