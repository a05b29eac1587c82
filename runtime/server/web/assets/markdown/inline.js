/**
 * Markdown inside a block: code, emphasis, links. Anything else, HTML included, is text.
 *
 * A node is `{type: "text" | "code", text}`, `{type: "break"}`, `{type: "strong" | "em" | "del", depth, children}`
 * or `{type: "link", href, children}`. The time is bounded by a constant times the length, whatever the text.
 */

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;
const BARE_LINK = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const LINK_TARGET = /\(\s*<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,2000})?)>?(?:\s+"[^"]{0,500}")?\s*\)/y;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const LONGEST_LABEL = 400;
const FARTHEST_OPENER = 256; // nodes that a closing run looks back over
const DEEPEST = 8; // labels inside labels
const DEEPEST_EMPHASIS = 24;

/** Return the nodes of a text. */
export function parseInline(text, depth = 0) {
  const scanner = new Scanner(text, depth);
  scanner.run();
  return emphasized(scanner.items);
}

/** Return the address if a link may lead there, null otherwise: `javascript:` and the like stay text. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null; // relative, or no address
  }
}

class Scanner {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.items = [];
    this.absentRuns = new Set(); // lengths of runs of backticks that nothing closes from here on
  }

  run() {
    while (this.at < this.text.length) {
      if (!this.special(this.text[this.at])) this.plain += this.text[this.at++];
    }
    this.flush();
  }

  /** Take what starts here, if it is more than a character of text. */
  special(character) {
    switch (character) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "\n":
        return this.lineEnd();
      case "*":
      case "_":
      case "~":
        return this.delimiters(character);
      case "!":
        return this.text[this.at + 1] === "[" && this.link(this.at + 1);
      case "[":
        return this.link(this.at);
      case "<":
        return this.address(ANGLE_LINK);
      case "h":
        return !WORD.test(this.text[this.at - 1] ?? "") && this.address(BARE_LINK);
      default:
        return false;
    }
  }

  flush() {
    if (this.plain) this.items.push({ type: "text", text: this.plain });
    this.plain = "";
  }

  push(item, end) {
    this.flush();
    this.items.push(item);
    this.at = end;
    return true;
  }

  escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") return this.push({ type: "break" }, this.at + 2);
    if (!PUNCTUATION.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  lineEnd() {
    const hard = /(?: {2,})$/.test(this.plain.slice(-8));
    this.plain = this.plain.trimEnd();
    if (hard) return this.push({ type: "break" }, this.at + 1);
    this.plain += "\n";
    this.at += 1;
    return true;
  }

  code() {
    const { text, at: start } = this;
    const from = endOfRun(text, start);
    const length = from - start;
    if (!this.absentRuns.has(length)) {
      for (let open = text.indexOf("`", from); open !== -1; ) {
        const close = endOfRun(text, open);
        if (close - open === length) {
          const inside = text.slice(from, open).replaceAll("\n", " ");
          const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
          return this.push({ type: "code", text: padded ? inside.slice(1, -1) : inside }, close);
        }
        open = text.indexOf("`", close);
      }
      this.absentRuns.add(length);
    }
    this.plain += text.slice(start, from);
    this.at = from;
    return true;
  }

  delimiters(character) {
    const start = this.at;
    const end = endOfRun(this.text, start);
    const [before, after] = [this.text[start - 1] ?? " ", this.text[end] ?? " "];
    const opens = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const closes = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const inWord = character === "_" && WORD.test(before) && WORD.test(after); // snake_case is a word
    const run = { type: "run", character, length: end - start, opens: opens && !inWord, closes: closes && !inWord };
    return this.push(run, end);
  }

  link(bracket) {
    if (this.depth >= DEEPEST) return false;
    const { text } = this;
    const limit = Math.min(text.length, bracket + LONGEST_LABEL);
    let level = 0;
    for (let i = bracket; i < limit; i += 1) {
      if (text[i] === "\\") i += 1;
      else if (text[i] === "[") level += 1;
      else if (text[i] === "]" && --level === 0) return this.target(text.slice(bracket + 1, i), i + 1);
      else if (text[i] === "\n" && text[i + 1] === "\n") return false;
    }
    return false;
  }

  /** Take the `(address)` after a label. Pictures are links, too: the page fetches nothing from elsewhere. */
  target(label, from) {
    LINK_TARGET.lastIndex = from;
    const match = LINK_TARGET.exec(this.text);
    const href = match && safeAddress(match[1]);
    if (!href) return false;
    const children = label.trim() ? parseInline(label, this.depth + 1) : [{ type: "text", text: href }];
    return this.push({ type: "link", href, children }, from + match[0].length);
  }

  address(pattern) {
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (!match) return false;
    const shown = match[1] ?? match[0].replace(/[.,:;!?*_~'")\]]+$/, "");
    const href = safeAddress(shown);
    if (href === null) return false;
    return this.push({ type: "link", href, children: [{ type: "text", text: shown }] }, this.at + (match[1] ? match[0].length : shown.length));
  }
}

function endOfRun(text, start) {
  let end = start;
  while (text[end] === text[start]) end += 1;
  return end;
}

/** Pair runs of delimiters, inner ones first, and turn what is between them into the children of a node. */
function emphasized(items) {
  const out = [];
  for (const item of items) {
    if (item.type === "run" && item.closes) close(out, item);
    if (item.type !== "run" || item.length > 0) out.push(item);
  }
  return joined(out);
}

/** Let a closing run take what openers before it offer, until one of them has nothing left. */
function close(out, closer) {
  let depth = 1;
  let i = out.length - 1;
  for (let looked = 0; i >= 0 && looked < FARTHEST_OPENER && closer.length > 0; looked += 1) {
    const opener = out[i];
    const width = closer.character === "~" ? 2 : Math.min(opener.length, closer.length, 2);
    const pairs = opener.type === "run" && opener.opens && opener.character === closer.character;
    if (!pairs || width > Math.min(opener.length, closer.length) || depth > DEEPEST_EMPHASIS) {
      depth = Math.max(depth, 1 + (opener.depth ?? 0));
      i -= 1;
      continue;
    }
    const children = joined(out.splice(i + 1));
    opener.length -= width;
    closer.length -= width;
    if (opener.length === 0) out.pop();
    out.push({ type: closer.character === "~" ? "del" : width === 2 ? "strong" : "em", depth, children });
    i = out.length - 1;
    depth = 1;
  }
}

/** Return the nodes with runs that found no partner as text, and neighbouring texts as one. */
function joined(nodes) {
  const out = [];
  for (const item of nodes) {
    const node = item.type === "run" ? { type: "text", text: item.character.repeat(item.length) } : item;
    const last = out.at(-1);
    if (node.type === "text" && last?.type === "text") out[out.length - 1] = { type: "text", text: last.text + node.text };
    else out.push(node);
  }
  return out;
}
