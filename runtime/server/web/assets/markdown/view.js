/** Markdown on the page: nodes made one by one from what was parsed, so that no text can become markup. */

import { element } from "../dom.js";
import { parseBlocks } from "./blocks.js";
import { parseInline } from "./inline.js";

const COPIED_MS = 1500;

/** The view of a text that grows: only blocks that changed are made anew. */
export class MarkdownView {
  #sources = [];

  constructor() {
    this.node = element("div", { class: "markdown" });
  }

  /** Show a text. */
  update(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.#sources[same]) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const block of blocks.slice(same)) this.node.append(blockNode(block));
    this.#sources = blocks.map((block) => block.source);
  }
}

/** Return a button that copies a text, and says so. */
export function copyButton(text) {
  const button = element("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Copying is not allowed here";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
  return button;
}

function blockNode(block) {
  switch (block.type) {
    case "heading":
      return element(`h${block.level}`, {}, ...inlineNodes(block.text));
    case "code":
      return codeNode(block);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(blockNode));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return element("p", {}, ...inlineNodes(block.text));
  }
}

function codeNode({ language, text }) {
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", {}, language || "text"), copyButton(() => text)),
    element("pre", { tabindex: 0, "aria-label": `Code: ${language || "text"}` }, element("code", {}, text)),
  );
}

function listNode({ ordered, start, loose, items }) {
  const nodes = items.map((blocks) => {
    const tight = !loose && blocks[0]?.type === "paragraph";
    const [first, ...others] = blocks;
    const content = tight ? [...inlineNodes(first.text), ...others.map(blockNode)] : blocks.map(blockNode);
    return element("li", {}, ...content);
  });
  return element(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...nodes);
}

function tableNode({ head, aligns, rows }) {
  const row = (tag, cells) => cells.map((cell, i) => element(tag, { "data-align": aligns[i] }, ...inlineNodes(cell)));
  return element(
    "div",
    { class: "table", tabindex: 0, role: "region", "aria-label": "Table" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...row("th", head))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...row("td", cells)))),
    ),
  );
}

function inlineNodes(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(node) {
  switch (node.type) {
    case "text":
      return node.text;
    case "code":
      return element("code", {}, node.text);
    case "break":
      return element("br");
    case "link":
      return element(
        "a",
        { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" },
        ...node.children.map(inlineNode),
      );
    default:
      return element(node.type, {}, ...node.children.map(inlineNode));
  }
}
