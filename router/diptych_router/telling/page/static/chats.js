/** The list of conversations that this browser keeps. */

import { byId, make } from "./dom.js";
import { forgetChat, keptChats } from "./history.js";

const dialog = byId("chats", HTMLDialogElement);
const list = byId("chats-list", HTMLElement);
const note = byId("chats-note", HTMLElement);
const forgetAll = byId("forget-all", HTMLButtonElement);

const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/**
 * Show the list.
 * @param {{open: (id: string) => void, forgotten: (id: string) => void}} actions
 */
export function showChats(actions) {
  const chats = keptChats();
  const draw = () => {
    forgetAll.disabled = !chats.length;
    forgetAll.textContent = "Delete all";
    note.textContent = chats.length
      ? "They are in this browser, for everybody who uses it, until they are deleted. The newest 50 are kept."
      : "No conversation is kept in this browser.";
  };
  const forget = (/** @type {string} */ id) => {
    forgetChat(id);
    chats.splice(chats.findIndex((chat) => chat.id === id), 1);
    actions.forgotten(id);
  };
  list.replaceChildren(
    ...chats.map(({ id, title, changed, fields }) => {
      const name = make("span", "title", title || "Without words");
      name.dir = "auto";
      const about = make("span", "quiet", [WHEN.format(changed), fields?.model].filter(Boolean).join(" · "));
      const open = make("button", "chat", name, about);
      const remove = make("button", "small", "Delete");
      open.type = remove.type = "button";
      remove.ariaLabel = `Delete ${title}`;
      const row = make("li", "", open, remove);
      open.addEventListener("click", () => {
        dialog.close();
        actions.open(id);
      });
      remove.addEventListener("click", () => {
        const next = row.nextElementSibling ?? row.previousElementSibling;
        row.remove();
        forget(id);
        draw();
        (next?.querySelector("button") ?? byId("chats-close", HTMLElement)).focus();
      });
      return row;
    }),
  );
  forgetAll.onclick = () => {
    const question = `Delete all ${chats.length}?`;
    if (forgetAll.textContent !== question) {
      forgetAll.textContent = question;
      return;
    }
    for (const { id } of [...chats]) forget(id);
    list.replaceChildren();
    draw();
    byId("chats-close", HTMLElement).focus();
  };
  draw();
  dialog.showModal();
}

byId("chats-close", HTMLButtonElement).addEventListener("click", () => dialog.close());
