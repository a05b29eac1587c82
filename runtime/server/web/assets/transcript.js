/** The messages on the page, and what can be done with each. */

import { element } from "./dom.js";
import { MarkdownView, copyButton } from "./markdown/view.js";

const FINISHES = {
  length: "cut at the token limit",
  stopped: "stopped",
  content_filter: "withheld by a filter",
};

/**
 * The list of messages.
 * @typedef {object} Actions
 * @property {(message: object) => void} regenerate
 * @property {(message: object, content: string) => void} edit
 */
export class Transcript {
  /** @type {Map<object, MessageView>} */
  #views = new Map();

  /**
   * @param {HTMLElement} list
   * @param {HTMLElement} welcome shown while there is no message
   * @param {Actions} actions
   */
  constructor(list, welcome, actions) {
    this.list = list;
    this.welcome = welcome;
    this.actions = actions;
  }

  /**
   * Show these messages. Elements of messages that are shown already stay as they are.
   * @param {object[]} messages
   * @param {object | null} growing the one that is being written
   */
  show(messages, growing) {
    for (const [message, view] of this.#views) {
      if (messages.includes(message)) continue;
      view.node.remove();
      this.#views.delete(message);
    }
    for (const message of messages) {
      let view = this.#views.get(message);
      if (!view) {
        view = message.role === "user" ? new UserView(message, this.actions) : new AssistantView(message, this.actions);
        this.#views.set(message, view);
        this.list.append(view.node);
      }
      view.update(message === growing, message === messages.at(-1), growing !== null);
    }
    this.welcome.hidden = messages.length > 0;
  }

  /** Show more of the message that is being written. */
  grow(message) {
    this.#views.get(message)?.update(true, true, true);
  }

  /** Open the editor of a message. */
  edit(message) {
    this.#views.get(message)?.openEditor?.();
  }
}

class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = element("div", { class: "body" }, message.content);
    this.editButton = element("button", { type: "button", class: "quiet", click: () => this.openEditor() }, "Edit");
    this.bar = element("div", { class: "actions" }, copyButton(() => message.content), this.editButton);
    this.node = element(
      "li",
      { class: "message", "data-role": "user" },
      element("span", { class: "hidden" }, "You:"),
      this.body,
      this.bar,
    );
  }

  update(_growing, _last, busy) {
    this.editButton.disabled = busy;
  }

  openEditor() {
    if (this.editButton.disabled) return;
    const field = element("textarea", { rows: Math.min(12, this.message.content.split("\n").length + 1), "aria-label": "Edit message" });
    field.value = this.message.content;
    const close = () => {
      form.replaceWith(this.body, this.bar);
      this.editButton.focus();
    };
    const form = element(
      "form",
      { class: "edit" },
      field,
      element(
        "div",
        {},
        element("button", { type: "button", class: "quiet", click: close }, "Cancel"),
        element("button", { type: "submit", class: "primary" }, "Send"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(this.message, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    this.bar.remove();
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

class AssistantView {
  constructor(message, actions) {
    this.message = message;
    this.markdown = new MarkdownView();
    this.waiting = element("span", { class: "waiting" });
    this.thoughts = element("div", { class: "thoughts" });
    this.summary = element("summary");
    this.reasoning = element("details", { class: "reasoning" }, this.summary, this.thoughts);
    this.problem = element("strong");
    this.hint = element("span");
    this.failure = element("div", { class: "failure", role: "alert" }, this.problem, this.hint);
    this.regenerate = element("button", { type: "button", class: "quiet", click: () => actions.regenerate(message) });
    this.copy = copyButton(() => message.content);
    this.figures = element("span", { class: "figures" });
    this.node = element(
      "li",
      { class: "message", "data-role": "assistant" },
      element("span", { class: "hidden" }, "Model:"),
      this.reasoning,
      this.markdown.node,
      this.waiting,
      this.failure,
      element("div", { class: "actions" }, this.copy, this.regenerate, this.figures),
    );
  }

  update(growing, last, busy) {
    const { content, reasoning, failure, figures } = this.message;
    const thinking = growing && Boolean(reasoning) && !content;
    this.node.setAttribute("aria-busy", String(growing));
    this.reasoning.hidden = !reasoning;
    this.summary.textContent = thinking ? "Thinking…" : "Thoughts";
    if (this.thoughts.textContent !== (reasoning ?? "")) this.thoughts.textContent = reasoning ?? "";
    if (thinking !== this.wasThinking) this.reasoning.open = thinking; // shut by itself once the answer begins
    this.wasThinking = thinking;
    this.markdown.update(content);
    this.markdown.node.hidden = !content;
    this.waiting.hidden = !growing || Boolean(content);
    this.failure.hidden = !failure;
    this.problem.textContent = failure?.message ?? "";
    this.hint.textContent = failure?.hint ?? "";
    this.copy.hidden = growing || !content;
    this.regenerate.hidden = growing || !last;
    this.regenerate.disabled = busy;
    this.regenerate.textContent = failure ? "Try again" : "Regenerate";
    this.figures.textContent = figures ? spoken(figures, growing) : "";
  }
}

/** Return the figures of an answer as a line of text. */
function spoken({ firstTokenSeconds, tokensPerSecond, tokens, finish }, growing) {
  const parts = [];
  if (tokensPerSecond !== null) parts.push(`${tokensPerSecond.toFixed(tokensPerSecond < 100 ? 1 : 0)} tokens/s`);
  if (firstTokenSeconds !== null) parts.push(`first token after ${firstTokenSeconds.toFixed(2)} s`);
  if (tokens !== null && !growing) parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (FINISHES[finish]) parts.push(FINISHES[finish]);
  return parts.join(" · ");
}
