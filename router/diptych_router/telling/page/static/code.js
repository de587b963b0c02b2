/** Blocks of code: coloured where their language is known, and copied by a button. */

import { copyButton, make } from "./dom.js";

const MOST_COLOURED_CHARACTERS = 30_000;
/** To colour more would hold the page up. */

/** The file of each language in vendor/languages, and its names. */
const LANGUAGES = Object.entries({
  bash: "sh shell zsh console",
  c: "h",
  cpp: "c++ cc cxx hpp",
  css: "",
  diff: "patch",
  dockerfile: "docker",
  go: "golang",
  ini: "toml",
  java: "",
  javascript: "js jsx mjs node",
  json: "jsonc",
  python: "py python3",
  rust: "rs",
  sql: "sqlite postgresql mysql",
  typescript: "ts tsx",
  xml: "html svg",
  yaml: "yml",
});
const FILES = new Map(
  LANGUAGES.flatMap(([file, names]) => [file, ...names.split(" ")].map((name) => [name, file])),
);

export class CodeBlock {
  #code = make("code", "");

  /**
   * @param {string} text
   * @param {string} language as it was written; empty if it was not
   */
  constructor(text, language) {
    this.language = language;
    this.text = text;
    this.#code.dir = "ltr";
    this.#code.append(text);
    const name = make("span", "", language || "code");
    const head = make("figcaption", "", name, copyButton("Copy code", () => this.text));
    const frame = make("pre", "", this.#code);
    frame.tabIndex = 0; // so that the keyboard can scroll it
    this.element = make("figure", "code", head, frame);
  }

  /**
   * Show a text that begins with the one that is shown.
   * @param {string} text
   */
  grow(text) {
    this.#code.append(text.slice(this.text.length));
    this.text = text;
  }

  /** Nothing more comes: the code can be coloured. */
  async close() {
    const { text } = this;
    const file = FILES.get(this.language.toLowerCase());
    if (!file || text.length > MOST_COLOURED_CHARACTERS) return;
    try {
      const { default: highlighter } = await import("./vendor/highlight.core.min.js");
      if (!highlighter.getLanguage(file)) {
        const grammar = await import(`./vendor/languages/${file}.min.js`);
        highlighter.registerLanguage(file, grammar.default);
      }
      const result = highlighter.highlight(text, { language: file, ignoreIllegals: true });
      this.#code.replaceChildren(...result._emitter.rootNode.children.map(colouredOf));
    } catch (error) {
      console.info(`the code keeps one colour: ${error}`);
    }
  }
}

/**
 * @param {string | {scope?: string, children: any[]}} node of the library's tree
 * @returns {Node | string}
 */
function colouredOf(node) {
  if (typeof node === "string") return node;
  const kind = node.scope?.split(".")[0] ?? "";
  return make("span", kind && `hl-${kind}`, ...node.children.map(colouredOf));
}
