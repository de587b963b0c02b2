/** Conversations that this browser keeps: the newest ones, as many as have room. */

import { Conversation } from "./conversation.js";

const PLACE = "diptych.chat.";
const OPEN = "diptych.open-chat";
const MOST = 50;
const MOST_CHARACTERS = 4_000_000;
/** Browsers keep about five million for all of a site. */

const MOST_WITH_IMAGES = 1_500_000;
/** A longer conversation is kept without its images. */

/** @typedef {ReturnType<Conversation["toJSON"]>} Kept */

/** All that is kept, the newest first. @returns {Kept[]} */
export function keptChats() {
  const found = keys().flatMap((key) => read(key) ?? []);
  return found.sort((one, other) => other.changed - one.changed);
}

/**
 * @param {Conversation} conversation
 * @returns {boolean} whether it was kept
 */
export function keepChat(conversation) {
  if (!conversation.messages.length) return false;
  const whole = JSON.stringify(conversation);
  const text = whole.length > MOST_WITH_IMAGES ? JSON.stringify(conversation, withoutImages) : whole;
  const key = PLACE + conversation.id;
  const others = keptChats().filter(({ id }) => id !== conversation.id);
  let characters = text.length + others.reduce((sum, other) => sum + sizeOf(other.id), 0);
  while (others.length >= MOST || characters > MOST_CHARACTERS) {
    const oldest = others.pop();
    if (!oldest) return false;
    characters -= sizeOf(oldest.id);
    forgetChat(oldest.id);
  }
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // the browser keeps nothing, or has no room
  }
}

/** @param {string} id */
export function keptChat(id) {
  try {
    const kept = read(PLACE + id);
    return kept ? Conversation.from(kept) : null;
  } catch {
    return null; // it was made by something else
  }
}

/** @param {string} id */
export function forgetChat(id) {
  localStorage.removeItem(PLACE + id);
}

/** The conversation that this tab had open before it was loaded again. */
export function openChat() {
  return keptChat(sessionStorage.getItem(OPEN) ?? "");
}

/** @param {Conversation} conversation */
export function setOpenChat({ id }) {
  try {
    sessionStorage.setItem(OPEN, id);
  } catch {
    return; // a reload then begins a new one
  }
}

function keys() {
  return Object.keys(localStorage).filter((key) => key.startsWith(PLACE));
}

/** @param {string} id */
function sizeOf(id) {
  return localStorage.getItem(PLACE + id)?.length ?? 0;
}

/**
 * @param {string} key
 * @returns {Kept | null}
 */
function read(key) {
  try {
    const kept = JSON.parse(localStorage.getItem(key) ?? "null");
    return Array.isArray(kept?.messages) && Array.isArray(kept.shown) ? kept : null;
  } catch {
    return null;
  }
}

/**
 * @param {string} name
 * @param {unknown} value
 */
function withoutImages(name, value) {
  return name === "image" ? undefined : value;
}
