/** The settings of a request: fields that are empty leave the choice to the model. */

import { element } from "./dom.js";
import { Stored } from "./storage.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];

/** The fields below "Sampling", and the system prompt. */
export class Sampling {
  #stored = new Stored("settings");
  #inputs = new Map();

  /**
   * @param {HTMLElement} grid where the fields go
   * @param {HTMLTextAreaElement} system
   */
  constructor(grid, system) {
    this.systemField = system;
    const kept = this.#stored.read({});
    for (const { name, label, ...bounds } of FIELDS) {
      const id = `sampling-${name}`;
      const input = element("input", { id, type: "number", inputmode: "decimal", placeholder: "Default", ...bounds });
      input.step = bounds.step < 1 ? "any" : "1"; // steps are for the arrows: any fraction is a value
      input.value = kept[name] ?? "";
      this.#inputs.set(name, input);
      grid.append(element("div", {}, element("label", { for: id }, label), input));
    }
    this.stopField = element("textarea", { id: "sampling-stop", rows: 1, placeholder: "None", "aria-describedby": "stop-note" });
    this.stopField.value = kept.stop ?? "";
    const note = element("p", { class: "note", id: "stop-note" }, "One per line; \\n is a line break.");
    grid.append(element("div", { class: "wide" }, element("label", { for: "sampling-stop" }, "Stop at"), this.stopField, note));
    system.value = kept.system ?? "";
    for (const field of [...this.#inputs.values(), this.stopField, system]) field.addEventListener("input", () => this.#keep());
  }

  /** The system prompt, or an empty string. */
  get system() {
    return this.systemField.value.trim();
  }

  /** Return the fields that are set, as the API takes them; null after showing the user what is wrong with one. */
  read() {
    const values = {};
    for (const [name, input] of this.#inputs) {
      if (!input.checkValidity()) {
        input.reportValidity();
        return null;
      }
      if (input.value !== "") values[name] = input.valueAsNumber;
    }
    const stop = this.stopField.value.split("\n").filter((line) => line !== "");
    if (stop.length) values.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
    return values;
  }

  /** Empty every field of sampling. The system prompt stays. */
  reset() {
    for (const input of this.#inputs.values()) input.value = "";
    this.stopField.value = "";
    this.#keep();
  }

  #keep() {
    const values = { system: this.systemField.value, stop: this.stopField.value };
    for (const [name, input] of this.#inputs) values[name] = input.value;
    this.#stored.write(values);
  }
}
