"""The page's Markdown: what becomes of it, and that no text is too strange or too long for it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

RENDER = """async texts => {
  const { MarkdownView } = await import(new URL("assets/markdown/view.js", document.baseURI));
  return texts.map(text => { const view = new MarkdownView(); view.update(text); return view.node.innerHTML; });
}"""

CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("hard  \nbreak\\\nhere", "<p>hard<br>break<br>here</p>"),
    ("# One\n### Three ##\n#no", "<h1>One</h1><h3>Three</h3><p>#no</p>"),
    (
        "a *b* **c** ***d*** _e_ __f__ ~~g~~",
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <em>e</em> <strong>f</strong> <del>g</del></p>",
    ),
    ("**bold with *italic* inside**", "<p><strong>bold with <em>italic</em> inside</strong></p>"),
    ("snake_case_name 2 * 3 * 4 a**", "<p>snake_case_name 2 * 3 * 4 a**</p>"),
    ("\\*no\\* \\`no\\`", "<p>*no* `no`</p>"),
    ("`a*b*` and ``x ` y``", "<p><code>a*b*</code> and <code>x ` y</code></p>"),
    ("`open and **bold**", "<p>`open and <strong>bold</strong></p>"),
    ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("1. a\n2. b", "<ol><li>a</li><li>b</li></ol>"),
    ("3) c\n4) d", '<ol start="3"><li>c</li><li>d</li></ol>'),
    ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("1. a\n   - b\n   - c\n2. d", "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>"),
    ("Steps:\n1. a\n2. b", "<p>Steps:</p><ol><li>a</li><li>b</li></ol>"),
    ("It was in\n1984. Then", "<p>It was in\n1984. Then</p>"),
    ("> quoted\n> > twice", "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
]

LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
LINKS = [
    ("[a *b*](https://x.org/p?q=1)", f'<p><a href="https://x.org/p?q=1" {LINK}>a <em>b</em></a></p>'),
    ("see https://x.org/a_b. Then", f'<p>see <a href="https://x.org/a_b" {LINK}>https://x.org/a_b</a>. Then</p>'),
    ("<mailto:a@x.org>", f'<p><a href="mailto:a@x.org" {LINK}>mailto:a@x.org</a></p>'),
    ("[w](https://x.org/a_(b))", f'<p><a href="https://x.org/a_(b)" {LINK}>w</a></p>'),
    ("![alt](https://x.org/i.png)", f'<p><a href="https://x.org/i.png" {LINK}>alt</a></p>'),
    ("[a](/local) [b](javascript:1)", "<p>[a](/local) [b](javascript:1)</p>"),
]


def test_markdown_becomes_elements(page: Page) -> None:
    cases = CASES + LINKS
    for (source, expected), made in zip(cases, page.evaluate(RENDER, [source for source, _ in cases]), strict=True):
        assert made == expected, source


def test_code_and_tables(page: Page) -> None:
    code, unclosed, inside, table = page.evaluate(
        RENDER,
        [
            "```py\nif a < b:\n\n    *c*\n```\nafter",
            "~~~~\n```\nstill code",
            "1. do\n   ```sh\n   ls\n   ```\n2. next",
            "| a | b |\n|:-:|--:|\n| `x\\|y` | 2 |\n| short |\n\nafter",
        ],
    )
    assert ">if a &lt; b:\n\n    *c*</code>" in code and ">py</span>" in code and code.endswith("<p>after</p>")
    assert ">```\nstill code</code>" in unclosed
    assert inside.startswith("<ol><li>do<figure") and ">ls</code>" in inside and inside.endswith("<li>next</li></ol>")
    assert '<th data-align="center">a</th><th data-align="right">b</th>' in table
    assert "<code>x|y</code>" in table and table.count("<td") == 4 and table.endswith("<p>after</p>")


PIECES = ["*", "**", "_", "~~", "`", "```", "[", "](", ")", "https://x.org", "<", ">", "<b>", "\\", "|", "-", "1.", "#"]
PIECES += [
    "\n",
    "\n\n",
    "    ",
    " ",
    "  \n",
    "a",
    "word",
    "é",
    "日本",
    "🙂",
    "|---|",
    "javascript:",
    '"',
    "\t",
    "\r\n",
    "&lt;",
]

KNOWN = {
    "tags": "div p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr br em strong del code pre a figure figcaption span button "
    "table thead tbody tr th td",
    "attributes": "class href target rel start type tabindex role aria-label data-align",
}

CHECK = """async ([texts, KNOWN]) => {
  const { MarkdownView } = await import(new URL("assets/markdown/view.js", document.baseURI));
  const tags = new Set(KNOWN.tags.split(" "));
  const attributes = new Set(KNOWN.attributes.split(" "));
  const problems = [];
  for (const text of texts) {
    const [whole, growing] = [new MarkdownView(), new MarkdownView()];
    whole.update(text);
    for (let i = 1; i <= text.length; i += 1) growing.update(text.slice(0, i));
    if (whole.node.innerHTML !== growing.node.innerHTML) problems.push(["grows differently", text]);
    for (const node of whole.node.querySelectorAll("*")) {
      if (!tags.has(node.localName)) problems.push([node.localName, text]);
      for (const { name, value } of node.attributes) {
        if (!attributes.has(name)) problems.push([name, text]);
        if (name === "href" && !/^(https?|mailto):/.test(value)) problems.push([value, text]);
      }
    }
  }
  return problems;
}"""


def test_any_text_gives_known_elements_and_grows_alike(page: Page) -> None:
    draw = random.Random(5)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 40))) for _ in range(400)]
    assert page.evaluate(CHECK, [texts, KNOWN]) == []


HOSTILE = [
    "*",
    "**a ",
    "*a _b ",
    "[",
    "![",
    "`",
    "[a](",
    "<",
    "> ",
    "- ",
    "1. ",
    "|",
    "# ",
    "~~~",
    " ",
    "\\",
    "a*",
    "_a_ ",
    "((",
    "https://",
]
HOSTILE += ["*a", "[a](https://x.org) ", "``a`", "| a |\n|---|\n", "-\n", ">\n", "\t", "a\n1. b\n"]

TIME = """async texts => {
  const { MarkdownView } = await import(new URL("assets/markdown/view.js", document.baseURI));
  return texts.map(text => {
    const start = performance.now();
    new MarkdownView().update(text);
    return performance.now() - start;
  });
}"""


def test_no_text_takes_long(page: Page) -> None:
    texts = [piece * (60_000 // len(piece)) for piece in HOSTILE]
    texts += [
        "*a " * 10_000 + "b* " * 10_000,
        "> " * 5000 + "x",
        "  " * 20_000 + "x",
        "# " + " " * 50_000 + "x #",
        "[" * 9000 + "](https://x.org)" * 3000,
    ]
    for text, milliseconds in zip(texts, page.evaluate(TIME, texts), strict=True):
        assert milliseconds < 3000, f"{text[:12]!r} takes {milliseconds:.0f} ms"


EVENTS = """async parts => {
  const { eventData } = await import(new URL("assets/sse.js", document.baseURI));
  const encoder = new TextEncoder();
  const bytes = encoder.encode(parts.text);
  const body = new ReadableStream({ start(controller) {
    for (let i = 0; i < bytes.length; i += parts.size) controller.enqueue(bytes.slice(i, i + parts.size));
    controller.close();
  } });
  const out = [];
  for await (const data of eventData(body)) out.push(data);
  return out;
}"""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_read_however_they_are_cut(page: Page, size: int) -> None:
    text = ": comment\n\ndata: é🙂\n\ndata:no space\r\n\r\nid: 3\ndata: two\ndata: lines\n\n"
    text += "data\n\ndata: [DONE]\r\rdata: cut off"
    assert page.evaluate(EVENTS, {"text": text, "size": size}) == ["é🙂", "no space", "two\nlines", "[DONE]"]
