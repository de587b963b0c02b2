/** When an answer was where, as the router draws it. */

import { make } from "./dom.js";

/**
 * A part that asks for its picture when somebody opens it.
 * @param {() => Promise<string>} ask an SVG
 * @returns {HTMLElement}
 */
export function timelineOf(ask) {
  const box = make("details", "timeline", make("summary", "", "Timeline"));
  let asked = false;
  box.addEventListener("toggle", async () => {
    if (!box.open || asked) return;
    asked = true;
    const shown = make("p", "", "…");
    box.append(shown);
    try {
      shown.replaceWith(pictureOf(await ask()));
    } catch (error) {
      asked = false;
      shown.remove();
      box.append(make("p", "setback", error instanceof Error ? error.message : String(error)));
    }
  });
  return box;
}

/**
 * An image cannot run scripts, whatever is in it.
 * @param {string} svg
 */
function pictureOf(svg) {
  const image = make("img", "");
  image.alt = descriptionIn(svg);
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  return image;
}

/**
 * The text of its `desc`. To parse the picture here would apply its styles, which the page forbids.
 * @param {string} svg
 */
function descriptionIn(svg) {
  const [, text] = /<desc[^>]*>([^<]*)</.exec(svg) ?? ["", ""];
  return text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
}
