/** Formulas as MathML, which browsers draw with their own fonts. The library is loaded with the first. */

import { make } from "./dom.js";

const LIBRARY = new URL("./vendor/temml.min.js", import.meta.url).href;
const MOST_CHARACTERS = 4000;
/** A longer formula stays text. */

const DEFINES = /\\(?:[gex]?def|let|futurelet|(?:re)?new(?:command|environment)|providecommand)\b/;
/** A few definitions that call each other make millions of symbols, so none is obeyed. */

const OPTIONS = { throwOnError: true, trust: false, maxSize: [20, 200], maxExpand: 200 };

/** @type {Promise<void> | undefined} */
let loading;

/**
 * @param {string} tex
 * @param {boolean} isDisplay whether it has lines of its own
 * @param {string} source shown until the formula is there, and instead of one that cannot be drawn
 * @returns {HTMLElement}
 */
export function formulaOf(tex, isDisplay, source) {
  const box = make("span", isDisplay ? "formula display" : "formula", source);
  box.dir = "ltr";
  if (tex.length > MOST_CHARACTERS || DEFINES.test(tex)) return box;
  if (library()) draw(box, tex, isDisplay);
  else void load().then(() => draw(box, tex, isDisplay), () => {});
  return box;
}

/**
 * @param {HTMLElement} box
 * @param {string} tex
 * @param {boolean} isDisplay
 */
function draw(box, tex, isDisplay) {
  const drawn = document.createElement("span");
  try {
    library().render(tex, drawn, { ...OPTIONS, displayMode: isDisplay });
  } catch {
    return; // no TeX, or nested too deeply
  }
  for (const element of drawn.querySelectorAll("[id], [href]")) {
    element.removeAttribute("id"); // ids are the page's own
    element.removeAttribute("href");
  }
  box.replaceChildren(...drawn.childNodes);
}

/** What the library's file defines; undefined until it is loaded. */
function library() {
  return /** @type {any} */ (globalThis).temml;
}

/** The file is no module, so it cannot be imported. */
function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = make("script", "");
    script.src = LIBRARY;
    script.addEventListener("load", () => resolve());
    script.addEventListener("error", () => {
      loading = undefined;
      reject(new Error(`${LIBRARY} cannot be loaded`));
    });
    document.head.append(script);
  });
  return loading;
}
