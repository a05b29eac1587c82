/** A small line of the last values, drawn as SVG. */

import { graphic } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 36;

/** The last `length` values of something, newest at the right. */
export class Sparkline {
  #values = [];

  /** @param {number} length how many values the width stands for */
  constructor(length) {
    this.length = length;
    this.area = graphic("path", { class: "area" });
    this.stroke = graphic("path", { class: "stroke" });
    this.node = graphic(
      "svg",
      { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      this.stroke,
    );
  }

  /**
   * Add a value. `most` is the value at the top; null scales to the largest one shown.
   * @param {number} value
   * @param {number | null} most
   */
  add(value, most) {
    this.#values.push(value);
    if (this.#values.length > this.length) this.#values.shift();
    const top = most ?? Math.max(1, ...this.#values);
    const step = WIDTH / (this.length - 1);
    const left = WIDTH - step * (this.#values.length - 1);
    const points = this.#values.map((each, i) => {
      const height = Math.min(1, Math.max(0, each / top)) * (HEIGHT - 2);
      return `${(left + i * step).toFixed(1)} ${(HEIGHT - 1 - height).toFixed(1)}`;
    });
    this.stroke.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${left.toFixed(1)} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
  }
}
