/** The image of the next question: chosen, pasted or dropped. */

import { byId } from "./dom.js";

const MOST_BYTES = 2 << 20;
/** A request has at most 4 MiB, and an image grows by a third on its way. */

const KINDS = ["image/png", "image/jpeg", "image/webp"];

const input = byId("image", HTMLInputElement);
const label = byId("image-label", HTMLElement);
const picked = byId("picked", HTMLElement);
const preview = byId("preview", HTMLImageElement);

/** @type {File | undefined} */
let file;

/** @param {boolean} areTaken whether the model takes images */
export function offerImages(areTaken) {
  label.hidden = !areTaken;
}

/** @returns {Promise<string | undefined>} the image as a data: URL */
export async function pickedImage() {
  if (!file) return undefined;
  if (file.size > MOST_BYTES) throw new Error(`the image has more than ${MOST_BYTES >> 20} MiB`);
  return read(file);
}

export function unpickImage() {
  file = undefined;
  input.value = "";
  picked.hidden = true;
  preview.removeAttribute("src");
}

/**
 * @param {File} file
 * @returns {Promise<string>}
 */
function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error("the image cannot be read"));
    reader.readAsDataURL(file);
  });
}

/** @param {FileList | undefined | null} files */
async function pick(files) {
  const chosen = [...(files ?? [])].find(({ type }) => KINDS.includes(type));
  if (!chosen || label.hidden) return false;
  file = chosen;
  picked.hidden = false;
  byId("picked-name", HTMLElement).textContent = file.name;
  if (file.size <= MOST_BYTES) preview.src = await read(file);
  return true;
}

input.addEventListener("change", () => pick(input.files));
byId("unpick", HTMLButtonElement).addEventListener("click", () => {
  unpickImage();
  byId("words", HTMLElement).focus();
});
const composer = byId("composer", HTMLElement);
composer.addEventListener("paste", ({ clipboardData }) => void pick(clipboardData?.files));
composer.addEventListener("dragover", (event) => {
  if (!label.hidden && event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
composer.addEventListener("drop", (event) => {
  if (label.hidden || !event.dataTransfer?.files.length) return;
  event.preventDefault();
  void pick(event.dataTransfer.files);
});
