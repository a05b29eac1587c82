/** Light or dark: as the system says, until the button says otherwise. */

import { Stored } from "./storage.js";

const ORDER = ["system", "light", "dark"];
const NAMES = { system: "Auto", light: "Light", dark: "Dark" };

/** Let a button go through the themes. */
export function connectTheme(button) {
  const stored = new Stored("theme");
  const kept = stored.read("system");
  let theme = ORDER.includes(kept) ? kept : "system";
  const show = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${NAMES[theme]}`;
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    stored.write(theme);
    show();
  });
  show();
}
