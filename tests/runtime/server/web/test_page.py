"""The chat page in a browser: what a user does, and what the server hears of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.runtime.server.web.scripted import HOLD, Script, model_status

if TYPE_CHECKING:
    from playwright.sync_api import Page

ANSWER = '#messages [data-role="assistant"]'
USER = '#messages [data-role="user"]'


def send(page: Page, text: str) -> None:
    page.locator("#model:enabled").wait_for()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page, text: str) -> None:
    expect(page.locator(f"{ANSWER} .markdown").last).to_have_text(text)
    expect(page.locator("#send")).to_be_visible()


def test_opens_with_models_and_state(page: Page) -> None:
    expect(page).to_have_title("InferenceX")
    expect(page.locator("#model option")).to_have_text(["tiny", "large"])
    expect(page.locator("#health-text")).to_have_text("Ready")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#welcome")).to_be_visible()


def test_an_answer_comes_piece_by_piece(page: Page, script: Script) -> None:
    script.answers.append(["Hello", " there", HOLD, ", friend."])
    send(page, "Hi")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Hello there")
    expect(page.locator("#stop")).to_be_visible()
    script.go_on.set()
    answered(page, "Hello there, friend.")
    expect(page.locator(USER)).to_contain_text("Hi")
    expect(page.locator(f"{ANSWER} .figures")).to_have_text(
        re.compile(r"^[\d.]+ tokens/s · first token after \d+\.\d\d s · 3 tokens$")
    )
    expect(page.locator("#announcer")).to_have_text("Answer: Hello there, friend.")
    [asked] = script.asked
    assert asked["model"] == "tiny" and asked["stream"] is True and asked["stream_options"] == {"include_usage": True}
    assert asked["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_conversation_has_turns_and_settings(page: Page, script: Script) -> None:
    script.answers += [["One."], ["Two."]]
    page.fill("#system", "Be brief.")
    page.select_option("#model", "large")
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 64, "seed": 0}
    for name, value in values.items():
        page.fill(f"#sampling-{name}", str(value))
    page.fill("#sampling-stop", "END\n\\n\\n")
    send(page, "First")
    answered(page, "One.")
    send(page, "Second")
    answered(page, "Two.")
    asked = script.asked[1]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Second"},
    ]
    assert {name: asked[name] for name in values} == values
    assert asked["model"] == "large" and asked["stop"] == ["END", "\n\n"]


def test_settings_that_cannot_be_are_not_sent(page: Page, script: Script) -> None:
    page.fill("#sampling-top_p", "7")
    send(page, "Hi")
    expect(page.locator("#sampling-top_p")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("Hi")
    assert script.asked == []
    page.click("#reset")
    expect(page.locator("#sampling-top_p")).to_have_value("")
    script.answers.append(["Fine."])
    page.press("#prompt", "Enter")
    answered(page, "Fine.")
    assert "top_p" not in script.asked[0]


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_request(page: Page, script: Script, way: str) -> None:
    script.answers += [["Once upon", HOLD, " a time"], ["Again."]]
    send(page, "Tell me a story")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Once upon")
    page.click("#stop") if way == "button" else page.keyboard.press("Escape")
    expect(page.locator(f"{ANSWER} .figures")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    assert script.left.wait(10), "the server sees that the client has gone"
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Once upon")
    send(page, "And now?")
    answered(page, "Again.")
    assert script.asked[1]["messages"][1] == {"role": "assistant", "content": "Once upon"}


def test_regenerate_asks_the_same_again(page: Page, script: Script) -> None:
    script.answers += [["First."], ["Second."]]
    send(page, "Hi")
    answered(page, "First.")
    page.get_by_role("button", name="Regenerate").click()
    answered(page, "Second.")
    expect(page.locator(ANSWER)).to_have_count(1)
    assert script.asked[0]["messages"] == script.asked[1]["messages"]


def test_an_edited_message_replaces_what_followed(page: Page, script: Script) -> None:
    script.answers += [["One."], ["Two."], ["Three."]]
    for text, reply in (("a", "One."), ("b", "Two.")):
        send(page, text)
        answered(page, reply)
    page.locator(USER).first.hover()
    page.locator(USER).first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("c")
    page.get_by_label("Edit message").press("Enter")
    answered(page, "Three.")
    expect(page.locator(USER)).to_have_count(1)
    assert script.asked[2]["messages"] == [{"role": "user", "content": "c"}]


def test_an_edit_can_be_given_up(page: Page, script: Script) -> None:
    script.answers.append(["One."])
    send(page, "a")
    answered(page, "One.")
    page.press("#prompt", "ArrowUp")
    page.get_by_label("Edit message").fill("something else")
    page.get_by_label("Edit message").press("Escape")
    expect(page.locator(USER)).to_contain_text("a")
    assert len(script.asked) == 1


def test_everything_works_by_keyboard(page: Page, script: Script) -> None:
    script.answers += [["One."], ["Two.", HOLD]]
    page.locator("#model:enabled").wait_for()
    page.keyboard.type("line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("break")
    page.keyboard.press("Enter")
    answered(page, "One.")
    assert script.asked[0]["messages"][0]["content"] == "line\nbreak"
    expect(page.locator("#prompt")).to_be_focused()
    # From the field back to the answer's buttons, and to the last of them.
    regenerate = page.get_by_role("button", name="Regenerate")
    for _ in range(6):
        page.keyboard.press("Shift+Tab")
        if regenerate.evaluate("node => node === document.activeElement"):
            break
    expect(regenerate).to_be_focused()
    outline = regenerate.evaluate("node => getComputedStyle(node).outlineStyle + getComputedStyle(node).outlineWidth")
    assert outline == "solid2px", "what has the focus shows it"
    page.keyboard.press("Enter")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Two.")
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    page.locator("#scroll").focus()
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("")


def test_the_focus_goes_through_the_page_in_order(page: Page) -> None:
    page.locator("#model:enabled").wait_for()
    page.locator(".skip").focus()
    order = ["skip"]
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.id || document.activeElement.className")
        if not name:
            break
        order.append(name)
    named = [
        name
        for name in order
        if name in ("skip", "model", "theme", "scroll", "prompt", "system", "sampling-seed", "key")
    ]
    assert named == ["skip", "model", "theme", "scroll", "prompt", "system", "sampling-seed", "key"]


def test_the_conversation_is_still_there_after_a_reload(page: Page, script: Script) -> None:
    script.answers += [["**Bold** answer."], ["Next."]]
    send(page, "Hi")
    answered(page, "Bold answer.")
    page.reload()
    expect(page.locator(f"{ANSWER} .markdown strong")).to_have_text("Bold")
    send(page, "More")
    answered(page, "Next.")
    assert len(script.asked[1]["messages"]) == 3
    page.click("#clear")
    expect(page.locator("#messages > *")).to_have_count(0)
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_export_gives_the_conversation(page: Page, script: Script) -> None:
    script.answers.append(["Answer."])
    send(page, "Hi")
    answered(page, "Answer.")
    with page.expect_download() as download:
        page.click("#export")
    content = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert download.value.suggested_filename.startswith("chat-")
    assert [message["content"] for message in content["messages"]] == ["Hi", "Answer."]


def test_copy_takes_the_source_of_an_answer(page: Page, script: Script) -> None:
    script.answers.append(["Look:\n\n```py\nx = 1\n```\n"])
    send(page, "Hi")
    page.locator(".code").get_by_role("button", name="Copy").click()
    expect(page.locator(".code").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.locator(f"{ANSWER} > .actions").get_by_role("button", name="Copy").click()
    expect(page.locator(f"{ANSWER} > .actions").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "Look:\n\n```py\nx = 1\n```\n"


def test_thoughts_can_be_folded(page: Page, script: Script) -> None:
    script.answers.append([{"reasoning_content": "Let me <b>see</b>."}, HOLD, "Done."])
    send(page, "Hi")
    thoughts = page.locator(f"{ANSWER} details")
    expect(thoughts.locator("summary")).to_have_text("Thinking…")
    expect(thoughts.locator(".thoughts")).to_have_text("Let me <b>see</b>.")
    script.go_on.set()
    answered(page, "Done.")
    expect(thoughts.locator("summary")).to_have_text("Thoughts")
    expect(thoughts.locator(".thoughts")).not_to_be_visible()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".thoughts")).to_be_visible()


ERROR = {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "queue_full"}}


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        ((429, ERROR, {"Retry-After": "7"}), "the queue is full", "Try again in 7 s."),
        ((503, ERROR, {}), "the queue is full", "Try again in a moment."),
        ((400, {"error": {"message": "too long"}}, {}), "too long", "Change the message or the settings"),
        ((502, {}, {}), "The server answered with status 502.", "Try again."),
        (["Half", {"error": {"message": "it broke", "code": None}}], "it broke", "Try again."),
    ],
    ids=["full", "down", "refused", "proxy", "midway"],
)
def test_errors_are_told_and_can_be_tried_again(
    page: Page, script: Script, answer: object, message: str, hint: str
) -> None:
    script.answers += [answer, ["Better."]]
    send(page, "Hi")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(message)
    expect(alert).to_contain_text(hint)
    page.get_by_role("button", name="Try again").click()
    answered(page, "Better.")
    expect(alert).not_to_be_visible()
    assert script.asked[1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_message_without_an_answer_is_no_turn(page: Page, script: Script) -> None:
    script.answers += [(400, {"error": {"message": "too long"}}, {}), ["Yes."]]
    send(page, "very long")
    expect(page.get_by_role("alert")).to_contain_text("too long")
    send(page, "short")
    answered(page, "Yes.")
    assert script.asked[1]["messages"] == [{"role": "user", "content": "short"}]


def test_a_stream_that_is_cut_off_is_an_error(page: Page, script: Script) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body='data: {"choices": [{"index": 0, "delta": {"content": "Half"}}]}\n\ndata: {"choi',
        ),
    )
    send(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("The connection ended before the answer was complete.")
    expect(page.locator(f"{ANSWER} .markdown")).to_have_text("Half")


def test_a_server_that_is_gone_is_said_to_be(page: Page, script: Script) -> None:
    page.locator("#model:enabled").wait_for()
    page.route("**/v1/**", lambda route: route.abort())
    send(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(page.locator("#health-text")).to_have_text("No connection")


def test_a_key_is_asked_for_and_kept_with_the_tab(page: Page, script: Script) -> None:
    script.key = "secret"
    page.reload()
    expect(page.locator("#health-text")).to_have_text("Key needed")
    expect(page.locator("#key")).to_be_focused()
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    expect(page.locator("#model option")).to_have_text(["tiny", "large"])
    script.answers.append(["Let in."])
    send(page, "Hi")
    answered(page, "Let in.")
    assert page.evaluate("JSON.stringify(localStorage)").find("secret") == -1
    page.reload()
    expect(page.locator("#health-text")).to_have_text("Ready")


def test_load_is_shown_live(page: Page, script: Script) -> None:
    script.status["models"] = [
        model_status(running=3, waiting=2, kv_blocks_used=25, prompt_tokens=200, cached_tokens=50),
        model_status(running=1, kv_blocks=300, kv_blocks_used=15),
    ]
    expect(page.locator(".meter dd").nth(0)).to_have_text("4 running, 2 waiting")
    expect(page.locator(".meter dd").nth(1)).to_have_text("10 % of 6,400 tokens")
    expect(page.locator("#health-text")).to_have_text("Busy")
    expect(page.locator("#monitor-note")).to_contain_text("25 %")
    script.status = {"ready": False, "draining": True, "models": []}
    expect(page.locator("#health-text")).to_have_text("Shutting down")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_until_told(page: Page, scheme: str) -> None:
    def brightness() -> int:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    page.emulate_media(color_scheme=scheme)
    assert (brightness() > 384) == (scheme == "light")
    for theme, bright in (("Light", True), ("Dark", False), ("Auto", scheme == "light")):
        page.click("#theme")
        expect(page.locator("#theme")).to_have_text(f"Theme: {theme}")
        assert (brightness() > 384) == bright
    page.click("#theme")
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: Light")


CONTRAST = """selectors => {
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parts = color => { const c = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    c.fillStyle = color; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = node => { for (; node; node = node.parentElement) {
    const color = parts(getComputedStyle(node).backgroundColor); if (color[3] === 255) return color; } };
  return selectors.map(selector => { const node = document.querySelector(selector);
    const [a, b] = [luminance(parts(getComputedStyle(node).color)), luminance(behind(node))];
    return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(page: Page, script: Script, scheme: str) -> None:
    script.answers.append(["Some `code` and [a link](https://example.org).", {"error": {"message": "it broke"}}])
    page.emulate_media(color_scheme=scheme)
    send(page, "Hi")
    expect(page.get_by_role("alert")).to_be_visible()
    selectors = ["body", "#health-text", ".note", ".hint", "#theme", "#send", f"{USER} .body", f"{ANSWER} code"]
    selectors += [f"{ANSWER} a", ".failure strong", ".failure span", ".figures", "#reset", ".meter-head dt"]
    for selector, contrast in page.evaluate(CONTRAST, selectors):
        assert contrast >= 4.5, f"{selector} in {scheme}: {contrast:.2f}"  # WCAG 2.2, 1.4.3


def test_fits_a_phone(page: Page, script: Script) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    script.answers.append(
        ["word " * 40 + "\n\n```\n" + "x" * 300 + "\n```\n\n| a | b |\n|---|---|\n| " + "y" * 200 + " | 2 |"]
    )
    send(page, "Hi " + "z" * 200)
    expect(page.locator(".code")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#scroll").evaluate("node => node.scrollWidth <= node.clientWidth")
    for part in ("#model", "#health", "#theme", "#panel-toggle", "#prompt", "#send"):
        box = page.locator(part).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 360, part
    expect(page.locator("#panel")).not_to_be_visible()
    page.click("#panel-toggle")
    expect(page.locator("#panel")).to_be_visible()
    expect(page.locator("#panel-close")).to_be_focused()
    assert page.locator("main").evaluate("node => node.inert")
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).not_to_be_visible()
    expect(page.locator("#panel-toggle")).to_be_focused()


ATTACKS = [
    '<img src=x onerror="window.attacked=1">',
    "<script>window.attacked=1</script>",
    "[click](javascript:window.attacked=1) ![look](javascript:window.attacked=1)",
    "<javascript:window.attacked=1> [x](data:text/html,<script>1</script>) [y](vbscript:a)",
    '```"><img src=x onerror=window.attacked=1>\n</code><script>window.attacked=1</script>\n```',
    "| <svg onload=window.attacked=1> |\n|---|\n| <iframe srcdoc='<script>1</script>'> |",
    '[a](https://example.org/"onmouseover="window.attacked=1)',
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_model_writes_stays_text(page: Page, script: Script, attack: str) -> None:
    script.answers.append([{"reasoning_content": attack}, *attack, "\n\nharmless"])
    send(page, attack)
    expect(page.locator(f"{ANSWER} .markdown")).to_contain_text("harmless")
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("window.attacked") is None
    assert page.locator("#messages :is(img, script, iframe, svg, object, embed, form, input)").count() == 0
    for link in page.locator("#messages a").all():
        assert (link.get_attribute("href") or "").startswith("https://example.org/")
        assert not link.evaluate("node => node.getAttributeNames().some(name => name.startsWith('on'))")
    expect(page.locator(f"{USER} .body")).to_have_text(attack)


def test_the_browser_itself_refuses_markup(page: Page) -> None:
    other = page.context.new_page()  # its console may complain
    other.goto(page.url)
    refused = other.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'taken' } catch (error) { error.name }")
    assert refused == "TypeError"


def test_a_reader_who_scrolled_up_stays_there(page: Page, script: Script) -> None:
    script.answers.append(["line\n\n" * 60, HOLD, "more\n\n" * 20])
    send(page, "Hi")
    scroll = page.locator("#scroll")
    expect(page.locator(f"{ANSWER} .markdown p")).to_have_count(60)
    scroll.evaluate("node => { node.scrollTop = 0 }")
    expect(page.locator("#jump")).to_be_visible()
    script.go_on.set()
    expect(page.locator(f"{ANSWER} .markdown p")).to_have_count(80)
    assert scroll.evaluate("node => node.scrollTop") == 0
    page.click("#jump")
    assert scroll.evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight") < 2
