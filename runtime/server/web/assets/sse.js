/** Server-sent events from the body of a response, as the HTML standard defines the stream (section 9.2.6). */

/**
 * Yield the data of every event. A last event that no blank line ends was cut off, and is not given.
 * @param {ReadableStream<Uint8Array>} body
 */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // whoever stops listening early lets the server stop, too
  }
}
