/** Server-sent events of a `fetch`: an EventSource could not send the header with the key. */

const MOST_CHARACTERS = 1 << 22;

/**
 * The data of each event, and its id, until the stream ends. Throws if the connection breaks.
 * @param {ReadableStream<Uint8Array<ArrayBuffer>>} body
 * @returns {AsyncGenerator<{data: string, id: string}>}
 */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop() ?? "";
      if (rest.length > MOST_CHARACTERS) throw new Error("an event of the server is too long");
      for (const event of events) {
        const data = fieldOf(event, "data:");
        if (data) yield { data, id: fieldOf(event, "id:") };
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/**
 * @param {string} event
 * @param {string} name with its colon
 * @returns {string} empty: it has none
 */
function fieldOf(event, name) {
  return event
    .split("\n")
    .filter((line) => line.startsWith(name))
    .map((line) => line.slice(name.length).trimStart())
    .join("\n");
}
