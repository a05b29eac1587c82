/** The conversation: what was said, kept in this browser. */

import { Stored } from "./storage.js";

/**
 * @typedef {object} Message
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {string} [reasoning] what the model thought before it answered
 * @property {string} [model]
 * @property {Figures} [figures]
 * @property {{message: string, hint: string}} [failure] why there is no answer, or not all of it
 *
 * @typedef {object} Figures
 * @property {number | null} firstTokenSeconds
 * @property {number | null} tokensPerSecond
 * @property {number | null} tokens
 * @property {string | null} finish why it ended: "stop", "length", "stopped" by the user, ...
 */

/** Messages in turns. An answer always follows the message that it answers. */
export class Conversation {
  #stored = new Stored("conversation");

  constructor() {
    const kept = this.#stored.read([]);
    /** @type {Message[]} */
    this.messages = Array.isArray(kept) ? kept.filter(isMessage) : [];
  }

  /** Add a message and return it. */
  add(message) {
    this.messages.push(message);
    return message;
  }

  /** Remove a message and all that follow it. */
  cutAt(message) {
    this.messages.length = this.messages.indexOf(message);
  }

  /** Keep what is there for the next visit; return whether the browser could. */
  keep() {
    return this.#stored.write(this.messages);
  }

  /**
   * Return the messages as the API takes them. A message that got no answer is left out together with the answer
   * that it did not get: many chat templates insist on turns.
   */
  request(system) {
    const answered = this.messages.filter((message, i) => {
      const answer = message.role === "user" ? this.messages[i + 1] : message;
      return answer === undefined || answer === this.messages.at(-1) || answer.content !== "";
    });
    const turns = answered.filter((message) => message.content !== "");
    const messages = turns.map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}

function isMessage(value) {
  return typeof value?.content === "string" && (value.role === "user" || value.role === "assistant");
}
