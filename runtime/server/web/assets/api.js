/** What the page asks of its server, always below the address that the page itself came from. */

import { eventData } from "./sse.js";

/** A request that failed: what the server said of it, or why no answer was understood. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string | null, retryAfter?: number | null}} facts
   */
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The HTTP API with one key, or none. */
export class Api {
  key = "";

  /** Return the models that can be asked, as `/v1/models` lists them. */
  async models() {
    return (await this.#json("v1/models")).data;
  }

  /** Return the state of the server, as `/v1/status` gives it. */
  status() {
    return this.#json("v1/status");
  }

  /**
   * Yield what each event of a streamed chat brings.
   * @param {Record<string, unknown>} request the body of `/v1/chat/completions`, without `stream`
   * @param {AbortSignal} signal
   * @returns {AsyncGenerator<{content: string, reasoning: string, finish: string | null, usage: object | null}>}
   */
  async *chat(request, signal) {
    const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
    const response = await this.#send("v1/chat/completions", { method: "POST", body, signal });
    if (!response.body) throw new ApiError("The server sent an answer without a body.", { status: response.status });
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const event = parsed(data);
      if (event.error) throw failure(event.error, response.status, null);
      const [choice] = event.choices ?? [];
      yield {
        content: choice?.delta?.content ?? "",
        reasoning: choice?.delta?.reasoning_content ?? "",
        finish: choice?.finish_reason ?? null,
        usage: event.usage ?? null,
      };
    }
    throw new ApiError("The connection ended before the answer was complete.");
  }

  async #json(path) {
    return parsed(await (await this.#send(path, {})).text());
  }

  async #send(path, options) {
    const headers = { Accept: "application/json, text/event-stream" };
    if (options.body) headers["Content-Type"] = "application/json";
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer. Is it running, and is the network there?");
    }
    if (response.ok) return response;
    const seconds = Number.parseFloat(response.headers.get("Retry-After") ?? "");
    throw failure(errorOf(await response.text()), response.status, Number.isFinite(seconds) ? seconds : null);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(`The server sent something that is not JSON: ${text.slice(0, 200)}`);
  }
}

/** The `error` of an error's body; proxies on the way answer with pages of their own. */
function errorOf(text) {
  try {
    return JSON.parse(text).error ?? {};
  } catch {
    return {};
  }
}

function failure(error, status, retryAfter) {
  const message = error.message || `The server answered with status ${status}.`;
  return new ApiError(message, { status, code: error.code ?? null, retryAfter });
}
