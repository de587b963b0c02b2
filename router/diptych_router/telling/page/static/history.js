/** Conversations that this browser keeps: the newest ones, as many as have room. */

import { Conversation, newId } from "./conversation.js";
import { lasting, ofTab } from "./storage.js";

const PLACE = "diptych.chat.";
const OPEN = "diptych.open-chat";
const MOST = 50;
const MOST_CHARACTERS = 4_000_000;
/** Browsers keep about five million for all of a site. */

const MOST_WITH_IMAGES = 1_500_000;
/** A longer conversation is kept without its images. */

const LAST_DATE = 8.64e15;
/** No later time has a date. */

/** @typedef {ReturnType<Conversation["toJSON"]>} Kept */

/** @type {WeakMap<Conversation, string>} what this tab has read or written of each last */
const ownCopies = new WeakMap();

/** All that is kept, the newest first. @returns {Kept[]} */
export function keptChats() {
  const found = keys().flatMap((key) => read(key) ?? []);
  return found.sort((one, other) => other.changed - one.changed);
}

/**
 * Keep a conversation; the oldest ones make room for it. What another tab has made of it stays as it
 * is: this one is then kept beside it, with an id of its own.
 * @param {Conversation} conversation
 * @returns {boolean} false: the browser does not keep it as it is now
 */
export function keepChat(conversation) {
  if (!conversation.messages.length) return true;
  const stored = lasting.getItem(PLACE + conversation.id);
  if (stored !== null && stored !== ownCopies.get(conversation)) conversation.id = newId();
  const whole = JSON.stringify(conversation);
  const text = whole.length > MOST_WITH_IMAGES ? JSON.stringify(conversation, withoutImages) : whole;
  if (text.length > MOST_CHARACTERS) return false;
  const others = keptChats().filter(({ id }) => id !== conversation.id);
  let characters = text.length + others.reduce((sum, { id }) => sum + sizeOf(id), 0);
  const canMakeRoom = characters + sizeOf(conversation.id) >= 2 * text.length;
  for (;;) {
    const isBounded = others.length < MOST && characters <= MOST_CHARACTERS;
    if (isBounded) {
      const problem = write(conversation, text);
      if (!problem) return true;
      if (problem !== "QuotaExceededError" || !canMakeRoom) return false;
    }
    const oldest = others.pop();
    if (!oldest) return false;
    characters -= sizeOf(oldest.id);
    forgetChat(oldest.id);
  }
}

/** @param {string} id */
export function keptChat(id) {
  try {
    const kept = read(PLACE + id);
    if (!kept) return null;
    const made = Conversation.from(kept);
    ownCopies.set(made, lasting.getItem(PLACE + id) ?? "");
    return made;
  } catch {
    return null; // it was made by something else
  }
}

/** @param {string} id */
export function forgetChat(id) {
  lasting.removeItem(PLACE + id);
}

/** The conversation that this tab had open before it was loaded again. */
export function openChat() {
  return keptChat(ofTab.getItem(OPEN) ?? "");
}

/** @param {Conversation} conversation */
export function setOpenChat({ id }) {
  try {
    ofTab.setItem(OPEN, id);
  } catch {
    return; // a reload then begins a new one
  }
}

function keys() {
  return Object.keys(lasting).filter((key) => key.startsWith(PLACE));
}

/** @param {string} id */
function sizeOf(id) {
  return lasting.getItem(PLACE + id)?.length ?? 0;
}

/**
 * @param {Conversation} conversation
 * @param {string} text
 * @returns {string} the name of what went wrong; empty: nothing
 */
function write(conversation, text) {
  try {
    lasting.setItem(PLACE + conversation.id, text);
    ownCopies.set(conversation, text);
    return "";
  } catch (error) {
    return error instanceof Error ? error.name : "Error";
  }
}

/**
 * @param {string} key
 * @returns {Kept | null}
 */
function read(key) {
  try {
    const kept = JSON.parse(lasting.getItem(key) ?? "null");
    const isListed = PLACE + kept?.id === key && typeof kept.title === "string" && isDate(kept.changed);
    return isListed && Array.isArray(kept.messages) && Array.isArray(kept.shown) ? kept : null;
  } catch {
    return null;
  }
}

/** @param {unknown} value */
function isDate(value) {
  return typeof value === "number" && Math.abs(value) <= LAST_DATE;
}

/**
 * @param {string} name
 * @param {unknown} value
 */
function withoutImages(name, value) {
  return name === "image" ? undefined : value;
}
