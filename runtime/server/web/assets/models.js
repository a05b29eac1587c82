/** The list of models to choose from, as the server has them now. */

import { element } from "./dom.js";
import { Stored } from "./storage.js";

/** The field with the models of the server. */
export class Models {
  #stored = new Stored("model");

  /**
   * @param {HTMLSelectElement} select
   * @param {import("./api.js").Api} api
   */
  constructor(select, api) {
    this.select = select;
    this.api = api;
    this.shown = "";
    select.addEventListener("change", () => this.#stored.write(select.value));
  }

  /** The name of the chosen model; an empty string while there is none. */
  get chosen() {
    return this.select.value;
  }

  /** Ask the server again. Rejects with an ApiError. The choice stays where the model still exists. */
  async refresh() {
    const names = (await this.api.models()).map((model) => model.id);
    if (names.join("\n") === this.shown && names.length) return;
    const wanted = this.chosen || this.#stored.read("");
    const options = names.map((name) => element("option", { value: name }, name));
    this.select.replaceChildren(...(names.length ? options : [element("option", { value: "" }, "No model is loaded")]));
    this.select.disabled = names.length === 0;
    if (names.includes(wanted)) this.select.value = wanted;
    this.shown = names.join("\n");
  }

  /** Show that the models are not known. */
  forget() {
    if (this.shown) return; // what was known is still the best guess
    this.select.replaceChildren(element("option", { value: "" }, "No models known"));
    this.select.disabled = true;
  }
}
