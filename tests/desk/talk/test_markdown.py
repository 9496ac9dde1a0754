"""Markdown on the page `/chat`: what a reply looks like, how it grows, and what a hostile one cannot do."""

from __future__ import annotations

import hashlib
import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from diskprefix.desk.shared import web_page
from diskprefix.desk.talk.chat_page import CHAT_PAGE
from tests.closing import needs
from tests.desk.browsing import PHONE, WIDE, violations
from tests.desk.talk.test_page import answering, lone_page, say
from tests.test_project import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

PAGE = ROOT / "diskprefix/desk/talk/page"
LIBRARIES = sorted((PAGE / "vendored").glob("*.js"))

# What loads, runs, covers the page, or sends something.
DANGEROUS_TAGS = {"script", "style", "link", "meta", "base", "img", "image", "picture", "source", "audio", "video"} | {
    *("track", "iframe", "frame", "object", "embed", "form", "input", "button", "textarea", "select", "svg", "math"),
    *("template", "slot", "dialog", "marquee", "portal", "area", "map", "use", "html", "head", "body", "noscript"),
}
REPLY = """# Tour of the **sound**

Some *text* with `code`, a [link](https://example.org/a), <b>tags</b> and ~~old~~ text.

#### Far below

1. **First:** it is
2. Nested
   - [x] done

     ```js
     const a = 1;
     ```

| name | size |
| --- | ---: |
| a | 22 |

> quoted

```python
def f(x: int) -> str:
    return "<b>"
```

![a picture](https://elsewhere.example/p.png)
"""
HOSTILE = (
    "<script>ran()</script>",
    "<img src=x onerror=ran()>",
    '<img src="https://elsewhere.example/p.png">',
    "![p](https://elsewhere.example/p.png)",
    "[click](javascript:ran())",
    "[click](JaVaScRiPt&#58;ran())",
    "[click](data:text/html,<script>ran()</script>)",
    '<a href="javascript:ran()" onclick="ran()">click</a>',
    '<a href="vbscript:ran()" style="position:fixed" id="send" name="find" data-several>click</a>',
    "<style>@import 'https://elsewhere.example/s.css'; body { display: none }</style>",
    '<link rel="stylesheet" href="//elsewhere.example/s.css"><link rel="dns-prefetch" href="//elsewhere.example">',
    '<form action="//elsewhere.example"><input name="key" autofocus onfocus=ran()><button>Go</button></form>',
    '<svg onload=ran()><a xlink:href="javascript:ran()">x</a><use href="//elsewhere.example/#a"/></svg>',
    "<math><mtext><table><mglyph><style><img src=x onerror=ran()>",
    '<iframe srcdoc="<script>parent.ran()</script>"></iframe><object data="https://elsewhere.example"></object>',
    '<meta http-equiv="refresh" content="0;url=https://elsewhere.example"><base href="https://elsewhere.example">',
    "<video src=https://elsewhere.example/v onerror=ran()></video><details open ontoggle=ran()>x</details>",
    '<noscript><p title="</noscript><img src=x onerror=ran()>"></noscript>',
    "```<img src=x onerror=ran()>\n</code></pre><script>ran()</script>\n```",
    '```js"onmouseover="ran()\n<!--<script>ran()</script>\n```',
    '[a](https://example.org "title\\" onmouseover=ran() ")',
    '[<img src=x onerror=ran()>](https://example.org/"onmouseover="ran())',
    "| <img src=x onerror=ran()> |\n| - |\n| <script>ran()</script> |",
    "[x]: javascript:ran()\n[x]",
)


def allowed() -> dict[str, Any]:
    """The sanitiser's options, as they stand in the script."""
    text = (PAGE / "markdown.js").read_text("utf-8")
    lists = dict(re.findall(r"^  (\w+): \[([^\]]*)\]", text, re.MULTILINE))
    return {name: set(re.findall(r'"([^"]+)"', names)) for name, names in lists.items()}


def test_the_sanitiser_keeps_only_elements_and_attributes_that_load_and_run_nothing() -> None:
    options = allowed()
    assert set(options) == {"ALLOWED_TAGS", "ALLOWED_ATTR", "ADD_URI_SAFE_ATTR"}
    assert options["ALLOWED_TAGS"] & DANGEROUS_TAGS == set()
    assert options["ALLOWED_ATTR"] == {"href", "class", "start", "align"}
    assert options["ADD_URI_SAFE_ATTR"] == options["ALLOWED_ATTR"] - {"href", "class"}
    text = (PAGE / "markdown.js").read_text("utf-8")
    assert r"ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i," in text
    own = "".join(path.read_text("utf-8") for path in CHAT_PAGE.scripts)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|srcdoc", own)


def test_the_policy_runs_the_page_s_scripts_alone_and_makes_elements_only_of_cleaned_text() -> None:
    answer = CHAT_PAGE.response()
    html, policy = bytes(answer.body).decode(), answer.headers["content-security-policy"]
    texts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(texts) == 4
    hashes = " ".join(f"'{web_page._hash(text)}'" for text in texts)
    assert f"; script-src {hashes};" in policy
    assert "require-trusted-types-for 'script'; trusted-types dompurify" in policy
    assert "img-src data:;" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-dns-prefetch-control"] == "off"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_a_library_is_as_published_and_has_its_licence(library: Any) -> None:
    page = (PAGE / "vendored/README.md").read_text("utf-8")
    row = rf"^\| {re.escape(library.name)} .*\((\S+)\) \| `(\w+)` \|$"
    [(licence, digest)] = re.findall(row, page, re.MULTILINE)
    assert hashlib.sha256(library.read_bytes()).hexdigest() == digest
    text = library.read_text("utf-8").lower()
    assert "\r" not in text, "the browser would change it, and its hash"
    # A script that begins in an open comment needs two ends.
    in_comment = re.sub(r"<!--(-?>|.*?-->)", "", text, flags=re.DOTALL).partition("<!--")[2]
    assert "</script" not in text, "it would end the element that it is in"
    assert "<script" not in in_comment, "the element that it is in would not end"
    assert "license" in text[:400]
    assert len((PAGE / "vendored" / licence).read_text("utf-8")) > 1000
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"{(PAGE / 'vendored').relative_to(ROOT)}/LICENSE.*" in project["license-files"]


def test_the_page_has_all_libraries_and_stays_below_300_kb() -> None:
    assert sorted(CHAT_PAGE.libraries) == LIBRARIES
    assert len(CHAT_PAGE.response().body) < 300_000


def replied(page: Page, *texts: str) -> None:
    page.route("**/v1/chat/completions", answering(*texts))
    say(page, "Go")


@pytest.mark.cases(1)
@needs("chromium")
@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_a_reply_s_markdown_is_drawn(browser: Browser, viewport: Any, scheme: Any) -> None:
    page = lone_page(browser, viewport=viewport, color_scheme=scheme)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    replied(page, *REPLY)
    said = page.locator("article.assistant .said")
    for selector, text in {
        "h3": "Tour of the sound",
        "h3 strong": "sound",
        "h3 ~ h4": "Far below",
        "p em": "text",
        "p del": "old",
        "p > code": "code",
        "a[href='https://example.org/a']": "link",
        "ol > li:nth-child(1) strong": "First:",
        "td[align=right]": "22",
        "blockquote": "quoted",
        ".hljs-title": "f",
        "li .hljs-keyword": "const",
        "a[href='https://elsewhere.example/p.png']": "a picture",
    }.items():
        assert said.locator(selector).inner_text() == text, selector
    assert "☑ done" in said.inner_text()
    assert "<b>tags</b>" in said.inner_text()
    assert {one.get_attribute("rel") for one in said.locator("a").all()} == {"noopener noreferrer"}
    said.locator(".code .copy").last.click()
    said.locator(".copy", has_text="Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == 'def f(x: int) -> str:\n    return "<b>"'
    assert violations(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= viewport["width"]
    page.context.close()


@needs("chromium")
def test_a_hostile_reply_runs_nothing_and_requests_nothing(browser: Browser) -> None:
    page = lone_page(browser)
    asked: list[str] = []
    ran: list[str] = []
    page.expose_function("ran", lambda: ran.append("a script"))
    page.on("request", lambda request: asked.append(request.url))

    def dismiss(dialog: Dialog) -> None:
        ran.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    # By itself and in the middle of a reply, as it grows.
    replied(page, *(f"{one}\n\n" for one in HOSTILE), "x", *"".join(HOSTILE))
    # What the parser let through, the sanitiser stops.
    page.evaluate(
        "(all) => { for (const one of all) find('article.assistant .said').append(cleaned(`<p>${one}</p>`)); }", HOSTILE
    )
    said = page.locator("article.assistant .said")
    for link in said.locator("a:not([href])").all():
        link.dispatch_event("click")
    page.wait_for_timeout(200)
    assert ran == []
    assert {url for url in asked if not url.startswith("http://localhost:8642/")} == set()
    assert len(asked) == 1, asked
    names = "() => [...document.querySelectorAll('.said *')].map((one) => one.localName)"
    # The page itself adds a button to each block of code.
    assert set(page.evaluate(names)) & DANGEROUS_TAGS <= {"button"}
    assert said.locator("button:not(.copy)").count() == 0
    others = "[...document.querySelectorAll('.said :not(.code, .code *, .scroll)')]"
    attributes = f"() => {others}.flatMap((one) => one.getAttributeNames())"
    assert set(page.evaluate(attributes)) <= {"href", "class", "start", "align", "target", "rel"}
    hrefs = "() => [...document.querySelectorAll('.said a[href]')].map((one) => one.protocol)"
    assert set(page.evaluate(hrefs)) <= {"https:"}
    assert page.is_visible("#text")
    page.context.close()


GROW = """(text) => {
  let time = 0;
  const growing = new GrowingReply(() => time), whole = new GrowingReply(() => time);
  for (let end = 3; end < text.length + 3; end += 3) growing.show(text.slice(0, end));
  const shown = growing.node.textContent;
  whole.show(text, true);
  growing.show(text, true);
  return [growing.numParsed, shown, growing.node.innerHTML === whole.node.innerHTML, whole.node.textContent];
}"""
"""Shows a text three characters at a time on a clock that stands still."""

LONG = {
    "paragraphs": "A line of a paragraph, with **bold** words.\nAnd one more.\n\n" * 165,
    "one list": "- an item with `code` and more than a few words\n" * 200,
    "one table": "| a | b |\n| - | - |\n" + "| a longer cell of a row | 2 |\n" * 300,
    "one block of code": "```py\n" + "x = 1  # one\n\n" * 700 + "```\nEnd.",
    "a block of code that never ends": "~~~~\n" + "```\nx\n" * 1650,
    "one line": "word *and* word " * 620,
}
"""Each has about 10,000 characters."""


@pytest.mark.cases(1)
@needs("chromium")
@pytest.mark.parametrize("kind", LONG)
def test_the_work_for_a_reply_that_grows_is_linear(browser: Browser, kind: str) -> None:
    page = lone_page(browser)
    parsed = [page.evaluate(GROW, text)[0] / len(text) for text in (LONG[kind][:5000], LONG[kind])]
    # Short blocks are drawn each time, long ones when they have grown by a sixteenth of their length.
    assert parsed[1] < parsed[0] + 50
    assert parsed[1] < 750
    page.context.close()


@pytest.mark.slow
@needs("chromium")
def test_a_growing_reply_shows_what_the_whole_one_shows(browser: Browser) -> None:
    page = lone_page(browser)
    texts = [REPLY, *LONG.values()]
    texts += ["- a\n\n**b** c\n- d\n", "a\r\nb\r\n\r\nc\r\n", "Title\n==\ntext\n---\n", "1. a\n\n   b\n2. c"]
    texts += [f"```\n{REPLY}", "````md\n```\nx\n```\n````\nafter", "[a]\n\n[a]: https://example.org\n", "<b>\n\n- x"]
    for text in texts:
        _, shown, is_same, whole = page.evaluate(GROW, text[:2000])
        assert is_same, text[:50]
        if "]: " not in text:
            assert shown.replace("\n", "") == whole.replace("\n", ""), text[:50]
    # A clock that moves lets long blocks be drawn between, too.
    drawn = """(text) => {
      let time = 0;
      const growing = new GrowingReply(() => time);
      growing.show(text);
      time = 100;
      growing.show(text + "| last | row |\\n");
      return growing.node.textContent.includes("last");
    }"""
    assert page.evaluate(drawn, LONG["one table"])
    page.context.close()


@needs("chromium")
def test_a_reply_that_the_parser_cannot_read_is_shown_as_it_is(browser: Browser) -> None:
    page = lone_page(browser)
    deep = ">" * 40_000
    drawn = "(text) => { const reply = new GrowingReply(); reply.show(text, true); return reply.node.textContent; }"
    assert page.evaluate(drawn, deep) == deep
    page.context.close()
