/** The field for the next message: it grows with its text, Enter sends, Shift+Enter starts a line. */

/**
 * Connect the field.
 * @param {{form: HTMLFormElement, field: HTMLTextAreaElement, onSend: (text: string) => boolean, onRecall: () => void}} parts
 *   `onSend` returns whether the message was taken; `onRecall` is Arrow Up in an empty field
 */
export function connectComposer({ form, field, onSend, onRecall }) {
  const fit = () => {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
  };
  field.addEventListener("input", fit);
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return; // Enter ends a word of an input method
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "ArrowUp" && field.value === "") {
      event.preventDefault();
      onRecall();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() === "" || !onSend(field.value)) return;
    field.value = "";
    fit();
  });
}
