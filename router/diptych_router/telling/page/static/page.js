/** The page: it joins the chat, the pools and the service behind them. */

import { nothingYet, readAnswer } from "./answering.js";
import { showChats } from "./chats.js";
import { Comparison } from "./compare.js";
import { Conversation } from "./conversation.js";
import { byId, isSend } from "./dom.js";
import { factsOf } from "./facts.js";
import { keepChat, keptChat, openChat, setOpenChat } from "./history.js";
import { offerImages, pickedImage, unpickImage } from "./images.js";
import { Panels } from "./panels.js";
import { showPrompts } from "./prompts.js";
import { Recording } from "./recording.js";
import { areFieldsValid, fields, fillFields, offered, sampling, showDefaults, systemPrompt } from "./settings.js";
import { Refused, Service } from "./service.js";
import { answerTo, offerOf } from "./tools.js";
import { Tour } from "./tour.js";
import { areAnswered, Transcript } from "./transcript.js";

const EXPLAIN_TRIES = 5;
const EXPLAIN_AGAIN_MS = 300;
const MOST_ROUNDS = 8;
/** After so many answers that only call tools the page asks before it goes on. */

const recording = await Recording.published();
const service = new Service(recording?.fetch);
const transcript = new Transcript({ retry, edit, show, give });
const comparison = new Comparison(service);
let conversation = new Conversation();

const words = byId("words", HTMLTextAreaElement);
const model = byId("model", HTMLSelectElement);
const send = byId("send", HTMLButtonElement);
const stop = byId("stop", HTMLButtonElement);
const problem = byId("problem", HTMLElement);
const announced = byId("status", HTMLElement);
const door = byId("door", HTMLDialogElement);

/** @type {AbortController | null} */
let answering = null;
/** @type {Panels | null} null until the service has let the page in */
let panels = null;
/** @type {Promise<void> | null} the newest look at what the service is */
let entered = null;

function enter() {
  entered = lookAround();
  return entered;
}

/** Learn what the service is; ask for a key where it wants one. */
async function lookAround() {
  try {
    const [about, models] = await Promise.all([service.about(), service.models()]);
    model.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    showDefaults(models[0]?.sampling ?? {});
    offerImages(about.images);
    const kept = recording ? null : openChat();
    if (kept) open(kept);
    document.title = `${about.model} · Diptych`;
    if (door.open) door.close();
    words.focus();
    if (!panels) {
      const { control } = about;
      const killer = control && ((/** @type {string} */ engine) => kill(control, engine));
      panels = new Panels(service, killer, () => void lookAgain(about));
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
 * Tell of another run: what it serves, and where its engines are killed, only a new page knows.
 * @param {import("./service.js").About} before
 */
async function lookAgain(before) {
  const now = await service.about().catch(() => before);
  const [then, here] = [before, now].map(({ model, control }) => JSON.stringify([model, control]));
  if (then !== here) say("The service was started anew: reload this page.");
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
  await entered;
  const text = words.value.trim() || conversation.path.findLast(({ role }) => role === "user")?.text;
  if (!areFieldsValid()) return;
  if (!text || answering) {
    say(text ? "An answer is on its way: stop it first." : "Write what is to be compared.");
    return;
  }
  try {
    const alone = new Conversation();
    const question = alone.ask(text, undefined);
    say(null);
    await comparison.run(alone.request(question, model.value, systemPrompt(), sampling()));
  } catch (error) {
    say(error);
  }
}

async function ask() {
  try {
    await entered; // a quick user asks before the page knows a model
    const image = await pickedImage();
    const text = words.value.trim();
    if (!text || answering || !areFieldsValid()) return;
    say(null);
    const question = conversation.ask(text, image);
    words.value = "";
    unpickImage();
    await answer(question);
  } catch (error) {
    say(error);
  }
}

/** @param {import("./conversation.js").Message} question */
function retry(question) {
  if (!answering && areFieldsValid()) void answer(question);
}

/**
 * @param {import("./conversation.js").Message} question
 * @param {string} text what it is asked instead
 * @returns {boolean} whether it is asked
 */
function edit(question, text) {
  if (answering || !areFieldsValid()) return false;
  void answer(conversation.ask(text, question.image, question));
  return true;
}

/**
 * @param {import("./conversation.js").Message} message
 * @param {import("./tools.js").Call} call of the message
 * @param {string} result
 */
function give(message, call, result) {
  if (answering || !areFieldsValid()) return;
  call.result = result;
  keep(conversation);
  transcript.show(conversation);
  if (areAnswered(message.calls ?? [])) void answer(message);
  else transcript.shown(message).focusCall();
}

/** @param {import("./conversation.js").Message} version */
function show(version) {
  conversation.show(version);
  keep(conversation);
  transcript.show(conversation);
}

/**
 * Make an answer to a question, or to the results of calls, beside those that there are. What it calls
 * of the page's tools is answered, and it goes on.
 * @param {import("./conversation.js").Message} question
 */
async function answer(question) {
  const into = conversation;
  const outcome = nothingYet();
  const made = into.answer(question);
  const { tools, choice } = offered();
  const options = { ...sampling(), ...offerOf(tools, choice, Boolean(question.calls)) };
  const body = into.request(question, model.value, systemPrompt(), options);
  const shown = transcript.shown(made);
  const control = new AbortController();
  delete question.problem;
  into.fields = fields();
  keep(into);
  transcript.show(into);
  shown.setAnswering(true);
  setAnswering(control);
  transcript.showEnd();
  announced.textContent = "The answer begins.";
  panels?.begin(outcome.requestId);
  let setback = "";
  try {
    await readAnswer(service, body, control.signal, ({ content, reasoning }) => {
      made.text = outcome.text;
      if (content) shown.append(content);
      if (reasoning) {
        made.reasoning = outcome.reasoning;
        shown.appendReasoning(reasoning);
      }
      if (outcome.calls.length) shown.showCalls((made.calls = outcome.calls));
      shown.setPace(paceOf(outcome));
    }, outcome);
    const called = outcome.calls.map(({ name }) => ` It calls ${name}.`).join("");
    announced.textContent = `The answer is complete. ${outcome.text}${called}`;
  } catch (error) {
    setback = wordsOf(error);
    announced.textContent = setback;
  }
  shown.setAnswering(false);
  setAnswering(null);
  void panels?.end();
  const isThere = Boolean(outcome.text || outcome.reasoning || made.calls);
  const isWhole = !setback && !control.signal.aborted;
  if (isWhole) for (const call of made.calls ?? []) call.result = answerTo(call) ?? undefined;
  if (!isThere) into.drop(made);
  if (isThere && setback) made.problem = setback;
  else if (!isThere) question.problem = setback || `No answer: ${outcome.end || "it was empty"}.`;
  keep(into);
  if (conversation === into) transcript.show(into);
  if (isWhole && made.calls && conversation === into) goOn(made);
  if (isThere && panels) {
    const ask = () => service.timeline(outcome.requestId);
    shown.attach(factsOf(outcome, await explained(outcome), panels.pools, ask));
  }
}

/**
 * Answer with the results of calls, or wait for those that the user has to give.
 * @param {import("./conversation.js").Message} message
 */
function goOn(message) {
  if (!areAnswered(message.calls ?? [])) {
    if (!words.value) transcript.shown(message).focusCall();
  } else if (conversation.rounds < MOST_ROUNDS) void answer(message);
}

/** @param {import("./answering.js").Outcome} outcome so far */
function paceOf({ tokens, tokensPerSecond }) {
  if (!tokens) return "";
  const rate = tokensPerSecond && Number.isFinite(tokensPerSecond) ? tokensPerSecond : 0;
  return `${tokens} tokens${rate ? `, ${rate.toFixed(1)} tokens/s` : ""}`;
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
  transcript.setAnswering(control !== null);
}

/**
 * Show a conversation; an answer that is coming elsewhere is stopped.
 * @param {Conversation} chosen
 */
function open(chosen) {
  answering?.abort();
  conversation = chosen;
  setOpenChat(chosen);
  fillFields(chosen.fields);
  showPrompts();
  transcript.show(chosen);
  transcript.showEnd();
  say(null);
  words.focus();
}

/** @param {Conversation} chat that may get another id by this */
function keep(chat) {
  if (!keepChat(chat)) say("This browser has no room to keep this chat.");
  if (chat === conversation) setOpenChat(chat);
}

/** @param {unknown} error null: nothing is wrong */
function say(error) {
  problem.textContent = error === null ? "" : wordsOf(error);
}

/** @param {unknown} error */
function wordsOf(error) {
  return error instanceof Error ? error.message : String(error);
}

byId("composer", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  void ask();
});
words.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  void ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) answering?.abort();
});
stop.addEventListener("click", () => answering?.abort());
byId("compare-open", HTMLButtonElement).addEventListener("click", () => void compare());
byId("clear", HTMLButtonElement).addEventListener("click", () => open(new Conversation()));
byId("open-chats", HTMLButtonElement).addEventListener("click", () => {
  showChats({
    open: (id) => {
      if (id !== conversation.id) open(keptChat(id) ?? new Conversation());
    },
    forgotten: (id) => {
      if (id !== conversation.id) return;
      conversation.messages = []; // so that an answer that ends now is not kept
      open(new Conversation());
    },
  });
});
addEventListener("pagehide", () => answering && keep(conversation));
byId("door-form", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  service.useKey(byId("key", HTMLInputElement).value.trim());
  void enter();
});

new Tour(
  () => panels?.pools,
  (question) => {
    words.value = question;
    void ask();
  },
);
setAnswering(null);
await enter();
recording?.offer();
