/** The panel: beside the chat in a wide window, a drawer over it in a narrow one. */

const NARROW = "(max-width: 64rem)";

/**
 * Connect the panel with its buttons. Returns functions to open and close it.
 * @param {{panel: HTMLElement, toggle: HTMLElement, close: HTMLElement, shade: HTMLElement, behind: HTMLElement[]}} parts
 */
export function connectDrawer({ panel, toggle, close, shade, behind }) {
  const narrow = matchMedia(NARROW);
  let open = false;

  const show = (wanted) => {
    const changed = wanted !== open;
    open = wanted && narrow.matches;
    panel.dataset.open = String(open);
    toggle.setAttribute("aria-expanded", String(open));
    shade.hidden = !open;
    for (const element of behind) element.inert = open; // the focus stays in the drawer while it is open
    if (!changed || !narrow.matches) return;
    if (open) close.focus();
    else toggle.focus();
  };

  toggle.addEventListener("click", () => show(true));
  close.addEventListener("click", () => show(false));
  shade.addEventListener("click", () => show(false));
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && open) {
      event.stopPropagation();
      show(false);
    }
  });
  narrow.addEventListener("change", () => show(false));
  return { open: () => show(true), close: () => show(false) };
}
