/** The page: brings its parts together. */

import { answer, described } from "./answering.js";
import { Api, ApiError } from "./api.js";
import { connectComposer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./dom.js";
import { connectDrawer } from "./drawer.js";
import { Models } from "./models.js";
import { Monitor } from "./monitor.js";
import { Sampling } from "./sampling.js";
import { Follower } from "./scrolling.js";
import { Stored } from "./storage.js";
import { connectTheme } from "./theme.js";
import { Transcript } from "./transcript.js";

const STARTERS = [
  "Explain to a curious friend how attention works in a language model.",
  "Write a Python function that merges two sorted lists.",
  "What are three ways to save energy at home? Answer as a table.",
  "Write a haiku about a quiet server room.",
];
const LONGEST_ANNOUNCEMENT = 600; // characters of an answer that are read out

const api = new Api();
const prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt"));
const conversation = new Conversation();
const sampling = new Sampling(byId("sampling"), /** @type {HTMLTextAreaElement} */ (byId("system")));
const models = new Models(/** @type {HTMLSelectElement} */ (byId("model")), api);
const follower = new Follower(byId("scroll"), byId("jump"));
const transcript = new Transcript(byId("messages"), byId("welcome"), { regenerate, edit });
const drawer = connectDrawer({
  panel: byId("panel"),
  toggle: byId("panel-toggle"),
  close: byId("panel-close"),
  shade: byId("shade"),
  behind: [...document.querySelectorAll("header, main")],
});

/** @type {{message: object, abort: AbortController} | null} */
let running = null;

function show() {
  transcript.show(conversation.messages, running?.message ?? null);
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("clear").disabled = conversation.messages.length === 0;
  byId("export").disabled = conversation.messages.length === 0;
}

function announce(text) {
  byId("announcer").textContent = text;
}

/** Ask the model for an answer to what is there. */
async function ask() {
  const parameters = sampling.read();
  if (parameters === null) {
    drawer.open();
    return;
  }
  const message = conversation.add({ role: "assistant", content: "", model: models.chosen });
  const request = { model: models.chosen, messages: conversation.request(sampling.system), ...parameters };
  const mine = { message, abort: new AbortController() };
  running = mine;
  show();
  follower.toEnd();
  announce("The model is answering.");

  let waits = false;
  const redraw = () => {
    waits = false;
    if (running !== mine) return;
    transcript.grow(message);
    follower.follow();
  };
  await answer(api, request, message, mine.abort.signal, () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(redraw);
  });

  if (running !== mine) return; // a new chat began meanwhile
  running = null;
  show();
  follower.follow();
  keep();
  announce(message.failure ? "" : `Answer: ${message.content.slice(0, LONGEST_ANNOUNCEMENT)}`); // failures are alerts
  void monitor.refresh();
}

function keep() {
  if (!conversation.keep()) announce("The browser does not keep this conversation; export it if you need it.");
}

/** @param {string} text */
function send(text) {
  if (running !== null) return false;
  if (!models.chosen) {
    void connect();
    announce("There is no model to ask yet.");
    return false;
  }
  if (sampling.read() === null) {
    drawer.open();
    sampling.read();
    return false;
  }
  conversation.add({ role: "user", content: text });
  void ask();
  return true;
}

function regenerate(message) {
  if (running !== null) return;
  conversation.cutAt(message);
  void ask();
  prompt.focus();
}

function edit(message, content) {
  if (running !== null) return;
  conversation.cutAt(message);
  if (!send(content)) conversation.add({ role: "user", content });
  prompt.focus();
}

function stop() {
  running?.abort.abort();
}

function clear() {
  stop();
  running = null;
  conversation.messages.length = 0;
  keep();
  show();
  announce("New chat.");
  prompt.focus();
}

function exportConversation() {
  const content = { model: models.chosen, system: sampling.system, messages: conversation.messages };
  const url = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  const link = element("a", { href: url, download: `chat-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json` });
  link.click();
  URL.revokeObjectURL(url);
}

/** Fetch the models, and say why when there are none. */
async function connect() {
  try {
    await models.refresh();
  } catch (error) {
    models.forget();
    const { message, hint } = described(error);
    monitor.explain(`${message} ${hint}`);
    if (error instanceof ApiError && error.status === 401) {
      drawer.open();
      byId("key").focus();
    }
  }
}

const monitor = new Monitor({
  api,
  meters: byId("meters"),
  health: byId("health"),
  healthText: byId("health-text"),
  note: byId("monitor-note"),
  onReady: () => void connect(),
});

function connectKey() {
  const stored = new Stored("key", sessionStorage);
  const field = /** @type {HTMLInputElement} */ (byId("key"));
  field.value = stored.read("");
  api.key = field.value;
  field.addEventListener("change", () => {
    api.key = field.value.trim();
    stored.write(api.key);
    void connect();
    void monitor.refresh();
  });
}

function connectKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target instanceof Element && event.target.matches("input, textarea, select");
    if (event.key === "Escape") stop();
    else if (event.key === "/" && !typing) {
      event.preventDefault();
      prompt.focus();
    }
  });
}

connectTheme(byId("theme"));
connectKey();
connectKeys();
connectComposer({
  form: /** @type {HTMLFormElement} */ (byId("composer")),
  field: prompt,
  onSend: send,
  onRecall: () => {
    const last = conversation.messages.findLast((message) => message.role === "user");
    if (last) transcript.edit(last);
  },
});
byId("stop").addEventListener("click", stop);
byId("clear").addEventListener("click", clear);
byId("export").addEventListener("click", exportConversation);
byId("reset").addEventListener("click", () => sampling.reset());
byId("model").addEventListener("focus", () => void connect());
byId("starters").append(
  ...STARTERS.map((text) =>
    element("li", {}, element("button", { type: "button", class: "starter", click: () => send(text) && prompt.focus() }, text)),
  ),
);
window.addEventListener("pagehide", () => conversation.keep());
show();
void connect();
monitor.start();
