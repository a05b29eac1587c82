/**
 * Markdown as blocks: paragraphs, headings, code, lists, quotes, tables and rules.
 *
 * A block is `{type, source, ...}`; `source` is the text that it was made of, so that a view of a growing text knows
 * which blocks are still the same. HTML has no meaning here: it is text.
 */

// None of these can be made to look at a line more than a few times over: what they read comes from a model.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*)|[ \t]*$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const BLANK = /^[ \t]*$/;
const DEEPEST = 12; // quotes and lists inside one another; below that they are text

/** Return the blocks of a text. */
export function parseBlocks(text) {
  return blocksOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (BLANK.test(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

/** Return the block that starts at a line, and the line after it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fencedCode(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: withoutClosing(heading[2] ?? "") }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
  }
  if (startsTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

/** A heading's text without the number signs that may close it. */
function withoutClosing(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function fencedCode(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  const indent = lines[at].indexOf(fence);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines
    .slice(at + 1, end)
    .map((line) => line.slice(Math.min(indent, line.length - line.trimStart().length)))
    .join("\n");
  return [{ type: "code", language: info.trim().split(/\s/)[0], text }, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: blocksOf(inside, depth + 1) }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const mark = first[2].at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || match[2].at(-1) !== mark || RULE.test(lines[end])) break;
    const [content, next] = item(lines, end, match);
    items.push(blocksOf(content, depth + 1));
    let after = next;
    while (after < lines.length && BLANK.test(lines[after])) after += 1;
    const again = after < lines.length ? ITEM.exec(lines[after]) : null;
    end = next;
    if (again?.[2].at(-1) !== mark) break;
    loose ||= after > next;
    end = after;
  }
  return [{ type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, loose, items }, end];
}

/** Return the lines of a list's item without their indent, and the line after it. */
function item(lines, at, match) {
  const spaces = match[3] ?? " ";
  const indent = match[1].length + match[2].length + (spaces.length > 4 ? 1 : spaces.length);
  const content = [lines[at].slice(indent)];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const inside = line.length - line.trimStart().length >= Math.min(indent, 2);
    const blank = BLANK.test(line);
    const lazy = !blank && !BLANK.test(lines[end - 1]) && !startsBlock(line) && !ITEM.test(line);
    if (!blank && !inside && !lazy) break;
    content.push(line.slice(Math.min(indent, line.length - line.trimStart().length)));
    end += 1;
  }
  while (content.length > 1 && BLANK.test(content.at(-1))) {
    content.pop();
    end -= 1;
  }
  return [content, end];
}

function startsTable(lines, at) {
  const next = lines[at + 1];
  return next !== undefined && lines[at].includes("|") && next.includes("-") && TABLE_RULE.test(next) && cells(lines[at]).length === cells(next).length;
}

function table(lines, at) {
  const aligns = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left"));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !BLANK.test(lines[end])) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => {
    const row = cells(line);
    return aligns.map((_, column) => row[column] ?? "");
  });
  return [{ type: "table", head: cells(lines[at]), aligns, rows }, end];
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end])) {
    if (startsBlock(lines[end]) && depth < DEEPEST) break;
    if (startsTable(lines, end)) break;
    end += 1;
  }
  return [{ type: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd() }, end];
}

/** Whether a line ends the paragraph before it. A number does so only as a list's first: years start lines, too. */
function startsBlock(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const match = ITEM.exec(line);
  return match !== null && Boolean(match[4]) && (!/\d/.test(match[2]) || Number.parseInt(match[2], 10) === 1);
}
