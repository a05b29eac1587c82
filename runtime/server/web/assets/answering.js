/** One answer as it comes: the stream into the message, with the times that matter. */

import { ApiError } from "./api.js";

/**
 * Fill a message with the model's answer; `onChange` is called whenever there is more. Never rejects: a failure, or
 * the user's stop, is written into the message, and what came before it stays.
 * @param {import("./api.js").Api} api
 * @param {Record<string, unknown>} request
 * @param {import("./conversation.js").Message} message
 * @param {AbortSignal} signal
 * @param {() => void} onChange
 */
export async function answer(api, request, message, signal, onChange) {
  const started = performance.now();
  let first = null;
  let last = null;
  let events = 0;
  let finish = null;
  let tokens = null;

  const measure = () => {
    const seconds = first === null || last === null ? 0 : (last - first) / 1000;
    const counted = tokens ?? events;
    message.figures = {
      firstTokenSeconds: first === null ? null : (first - started) / 1000,
      tokensPerSecond: counted > 1 && seconds > 0 ? (counted - 1) / seconds : null,
      tokens,
      finish,
    };
  };

  try {
    for await (const event of api.chat(request, signal)) {
      if (event.content || event.reasoning) {
        last = performance.now();
        first ??= last;
        events += 1;
        message.content += event.content;
        if (event.reasoning) message.reasoning = (message.reasoning ?? "") + event.reasoning;
      }
      finish = event.finish ?? finish;
      tokens = event.usage?.completion_tokens ?? tokens;
      measure();
      onChange();
    }
  } catch (error) {
    if (signal.aborted) finish = "stopped";
    else message.failure = described(error);
  }
  measure();
  onChange();
}

/** Return what went wrong and what to do, for a reader. */
export function described(error) {
  if (!(error instanceof ApiError)) return { message: String(error?.message ?? error), hint: "Try again." };
  return { message: error.message, hint: hint(error) };
}

function hint({ status, code, retryAfter }) {
  if (status === 401) return "Enter an API key in the settings.";
  if (status === 403) return "This key may not do that; enter another one in the settings.";
  if (status === 404 && code === "model_not_found") return "Choose another model at the top of the page.";
  if (status === 400 || status === 413) return "Change the message or the settings, or start a new chat.";
  if (status === 429 || status === 503) {
    return retryAfter === null ? "Try again in a moment." : `Try again in ${Math.ceil(retryAfter)} s.`;
  }
  return "Try again.";
}
