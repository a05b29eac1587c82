/** JSON kept by the browser. A browser that keeps nothing (private windows, a full disk) is no reason to stop. */

const PREFIX = "inferencex.";

/** A value under a name, in `localStorage` or, for what must not outlive the tab, in `sessionStorage`. */
export class Stored {
  /**
   * @param {string} name
   * @param {Storage} storage
   */
  constructor(name, storage = localStorage) {
    this.name = PREFIX + name;
    this.storage = storage;
  }

  /** Return what was kept, or `otherwise` where there is nothing, or nothing readable. */
  read(otherwise) {
    try {
      return JSON.parse(this.storage.getItem(this.name) ?? "null") ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  /** Keep a value; return whether the browser did. */
  write(value) {
    try {
      this.storage.setItem(this.name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}
