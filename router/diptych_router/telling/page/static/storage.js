/** What this browser keeps for the page. */

const NOTHING = {
  getItem: () => null,
  setItem() {
    throw new Error("this browser lets no site keep anything");
  },
  removeItem() {},
};

/** @param {"localStorage" | "sessionStorage"} name */
function allowed(name) {
  try {
    return window[name] ?? NOTHING;
  } catch {
    return NOTHING; // so its user wants it
  }
}

/** Of all tabs, until it is removed. */
export const lasting = allowed("localStorage");

/** Of this tab, until it is closed. */
export const ofTab = allowed("sessionStorage");
