/** The page: it joins the chat, the pools and the service behind them. */

import { nothingYet, readAnswer } from "./answering.js";
import { Comparison } from "./compare.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { factsOf } from "./facts.js";
import { Panels } from "./panels.js";
import { Recording } from "./recording.js";
import { sampling, showDefaults, systemPrompt } from "./settings.js";
import { Refused, Service } from "./service.js";
import { Tour } from "./tour.js";
import { Transcript } from "./transcript.js";

const MOST_IMAGE_BYTES = 2 << 20;
/** A request has at most 4 MiB, and an image grows by a third on its way. */

const EXPLAIN_TRIES = 5;
const EXPLAIN_AGAIN_MS = 300;

const recording = await Recording.published();
const service = new Service(recording?.fetch);
const conversation = new Conversation();
const transcript = new Transcript();
const comparison = new Comparison(service);

const words = byId("words", HTMLTextAreaElement);
const model = byId("model", HTMLSelectElement);
const send = byId("send", HTMLButtonElement);
const stop = byId("stop", HTMLButtonElement);
const again = byId("again", HTMLButtonElement);
const image = byId("image", HTMLInputElement);
const picked = byId("picked", HTMLElement);
const problem = byId("problem", HTMLElement);
const announced = byId("status", HTMLElement);
const door = byId("door", HTMLDialogElement);

/** @type {AbortController | null} */
let answering = null;
/** @type {Panels | null} null until the service has let the page in */
let panels = null;

/** Learn what the service is; ask for a key where it wants one. */
async function open() {
  try {
    const [about, models] = await Promise.all([service.about(), service.models()]);
    model.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    showDefaults(models[0]?.sampling ?? {});
    byId("image-label", HTMLElement).hidden = !about.images;
    document.title = `${about.model} · Diptych`;
    if (door.open) door.close();
    words.focus();
    if (!panels) {
      const { control } = about;
      panels = new Panels(service, control && ((engine) => kill(control, engine)));
      void panels.follow();
    }
  } catch (error) {
    if (!(error instanceof Refused && error.status === 401)) {
      say(error);
      return;
    }
    byId("door-problem", HTMLElement).textContent = door.open ? "This key is not known here." : "";
    if (!door.open) door.showModal();
  }
}

/**
 * @param {import("./service.js").Control} control
 * @param {string} engine
 */
async function kill(control, engine) {
  try {
    await service.kill(control, engine);
    announced.textContent = `${engine} was killed.`;
    return true;
  } catch (error) {
    say(error);
    return false;
  }
}

/** Ask what is written, or else what was asked last, in both ways. */
async function compare() {
  const text = words.value.trim() || conversation.messages.findLast(({ role }) => role === "user")?.text;
  if (!text || answering) {
    say(text ? "An answer is on its way: stop it first." : "Write what is to be compared.");
    return;
  }
  try {
    const alone = new Conversation();
    alone.ask(text);
    say(null);
    await comparison.run(alone.request(model.value, systemPrompt(), sampling()));
  } catch (error) {
    say(error);
  }
}

async function ask() {
  const text = words.value.trim();
  if (!text || answering) return;
  say(null);
  try {
    conversation.ask(text, await pickedImage());
  } catch (error) {
    say(error);
    return;
  }
  transcript.add({ role: "user", text, image: conversation.messages.at(-1)?.image });
  words.value = "";
  unpick();
  await answer();
}

/** Make the answer to what was asked last. */
async function answer() {
  const outcome = nothingYet();
  const asked = conversation.messages;
  const shown = transcript.add({ role: "assistant", text: "" });
  const control = new AbortController();
  setAnswering(control);
  shown.setAnswering(true);
  announced.textContent = "The answer begins.";
  panels?.begin(outcome.requestId);
  try {
    const body = conversation.request(model.value, systemPrompt(), sampling());
    const see = {
      words: (/** @type {string} */ piece) => shown.append(piece),
      reasoning: (/** @type {string} */ piece) => shown.appendReasoning(piece),
    };
    await readAnswer(service, body, control.signal, see, outcome);
    announced.textContent = `The answer is complete. ${outcome.text}`;
  } catch (error) {
    say(error);
    announced.textContent = "";
  }
  shown.setAnswering(false);
  setAnswering(null);
  void panels?.end();
  if (conversation.messages !== asked) return; // a new chat was begun meanwhile
  if (outcome.text) conversation.answered(outcome.text);
  else transcript.removeAnswer();
  again.disabled = !conversation.canRegenerate;
  if (outcome.text && panels) {
    const ask = () => service.timeline(outcome.requestId);
    shown.attach(factsOf(outcome, await explained(outcome), panels.pools, ask));
  }
}

/**
 * What the router says of an answer, once it is over there too.
 * @param {import("./answering.js").Outcome} outcome
 */
async function explained({ requestId }) {
  for (let left = EXPLAIN_TRIES; requestId && left; left -= 1) {
    try {
      const explanation = await service.answer(requestId);
      if (left === 1 || explanation.requests.every((known) => known.outcome)) return explanation;
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) return null;
    }
    await new Promise((resolve) => setTimeout(resolve, EXPLAIN_AGAIN_MS));
  }
  return null;
}

/** @param {AbortController | null} control */
function setAnswering(control) {
  answering = control;
  send.disabled = control !== null;
  stop.disabled = control === null;
  again.disabled = control !== null || !conversation.canRegenerate;
}

async function regenerate() {
  if (answering || !conversation.canRegenerate) return;
  say(null);
  conversation.forgetAnswer();
  transcript.removeAnswer();
  await answer();
}

function begin() {
  answering?.abort();
  conversation.messages = [];
  transcript.clear();
  say(null);
  again.disabled = true;
  words.focus();
}

/** @returns {Promise<string | undefined>} the chosen image as a data: URL */
async function pickedImage() {
  const file = image.files?.[0];
  if (!file) return undefined;
  if (file.size > MOST_IMAGE_BYTES) {
    throw new Error(`the image has more than ${MOST_IMAGE_BYTES >> 20} MiB`);
  }
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error("the image cannot be read"));
    reader.readAsDataURL(file);
  });
}

function unpick() {
  image.value = "";
  picked.hidden = true;
}

/** @param {unknown} error null: nothing is wrong */
function say(error) {
  problem.textContent = error === null ? "" : error instanceof Error ? error.message : String(error);
}

byId("composer", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  void ask();
});
words.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    void ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !door.open) answering?.abort();
});
stop.addEventListener("click", () => answering?.abort());
again.addEventListener("click", () => void regenerate());
byId("compare-open", HTMLButtonElement).addEventListener("click", () => void compare());
byId("clear", HTMLButtonElement).addEventListener("click", begin);
image.addEventListener("change", () => {
  picked.hidden = !image.files?.length;
  picked.textContent = `Image: ${image.files?.[0]?.name ?? ""}`;
});
byId("door-form", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  service.useKey(byId("key", HTMLInputElement).value.trim());
  void open();
});

new Tour(
  () => panels?.pools,
  (question) => {
    words.value = question;
    void ask();
  },
);
await open();
recording?.offer();
