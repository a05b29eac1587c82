/** The live view of the server: how many requests, how full the KV cache, how many tokens a second. */

import { ApiError } from "./api.js";
import { element } from "./dom.js";
import { Sparkline } from "./sparkline.js";

const INTERVAL_MS = 2000;
const INTERVAL_WHEN_DOWN_MS = 8000;
const SHORTEST_SECONDS = 1;
const SHOWN = 60; // values, two minutes

/** A name, a value and its line over time. */
class Meter {
  constructor(name) {
    this.value = element("dd", {}, "–");
    this.line = new Sparkline(SHOWN);
    const head = element("dl", {}, element("div", { class: "meter-head" }, element("dt", {}, name), this.value));
    this.node = element("div", { class: "meter" }, head, this.line.node);
  }

  show(text, value, most = null) {
    this.value.textContent = text;
    this.line.add(value, most);
  }
}

/** Asks for the status again and again while the page is seen. */
export class Monitor {
  #timer = 0;
  #previous = null;
  #rate = 0;
  #asking = false;

  /**
   * @param {{api: import("./api.js").Api, meters: HTMLElement, health: HTMLElement, healthText: HTMLElement,
   *   note: HTMLElement, onReady: () => void}} parts `onReady` is called when the server begins to answer
   */
  constructor({ api, meters, health, healthText, note, onReady }) {
    Object.assign(this, { api, health, healthText, note, onReady });
    this.requests = new Meter("Requests");
    this.cache = new Meter("KV cache");
    this.speed = new Meter("Tokens per second");
    meters.append(this.requests.node, this.cache.node, this.speed.node);
  }

  /** Begin, and pause whenever nobody sees the page. */
  start() {
    document.addEventListener("visibilitychange", () => void this.refresh());
    void this.refresh();
  }

  /** Ask now. */
  async refresh() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    let wait = INTERVAL_MS;
    try {
      this.#show(await this.api.status());
    } catch (error) {
      this.#fail(error);
      wait = INTERVAL_WHEN_DOWN_MS;
    }
    this.#asking = false;
    this.#timer = setTimeout(() => void this.refresh(), wait);
  }

  /** Show a sentence below the meters. */
  explain(text) {
    this.note.textContent = text;
  }

  #show(status) {
    const now = totals(status);
    const load = now.waiting ? `${now.running} running, ${now.waiting} waiting` : `${now.running} running`;
    this.requests.show(load, now.running + now.waiting);
    const used = now.blocks ? now.blocksUsed / now.blocks : 0;
    this.cache.show(`${percent(used)} of ${now.slots.toLocaleString()} tokens`, used, 1);
    this.#measure(now);
    this.speed.show(this.#rate < 10 ? this.#rate.toFixed(1) : String(Math.round(this.#rate)), this.#rate);
    this.explain(spoken(status));
    if (!status.ready) this.#state("busy", status.draining ? "Shutting down" : "Loading");
    else this.#state(now.waiting ? "busy" : "ready", now.waiting ? "Busy" : "Ready");
  }

  /** Take the speed from the tokens since the last time that is long enough ago to tell. */
  #measure(now) {
    const before = this.#previous;
    if (!before) this.onReady();
    const seconds = before ? (now.at - before.at) / 1000 : 0;
    if (before && seconds < SHORTEST_SECONDS) return;
    this.#rate = before ? Math.max(0, now.generated - before.generated) / seconds : 0; // fewer after a model has gone
    this.#previous = now;
  }

  #fail(error) {
    this.#previous = null;
    const denied = error instanceof ApiError && (error.status === 401 || error.status === 403);
    this.#state("down", denied ? "Key needed" : "No connection");
    this.explain(denied ? "The server shows its load to those with a key." : error.message);
  }

  #state(state, text) {
    this.health.dataset.state = state;
    this.healthText.textContent = text;
  }
}

/** Add up what the models report. */
function totals(status) {
  const sum = (value) => status.models.reduce((all, model) => all + value(model), 0);
  return {
    at: performance.now(),
    running: sum((model) => model.running),
    waiting: sum((model) => model.waiting),
    blocks: sum((model) => model.kv_blocks),
    blocksUsed: sum((model) => model.kv_blocks_used),
    slots: sum((model) => model.kv_blocks * model.block_size),
    generated: sum((model) => model.generated_tokens),
  };
}

/** Return a part of 1 as text; a little is not nothing. */
function percent(part) {
  return `${part > 0 && part < 0.1 ? (part * 100).toFixed(1) : Math.round(part * 100)} %`;
}

/** Say what there is besides the meters. */
function spoken(status) {
  const [cached, prompts] = ["cached_tokens", "prompt_tokens"].map((name) => status.models.reduce((all, model) => all + model[name], 0));
  return prompts ? `${percent(cached / prompts)} of all prompt tokens came from the prefix cache.` : "";
}
