"""`tools/bench screenshots`: all pictures in this project's pages.

The dashboard's are those that a browser shows after an agent's session, the moving one is a recorded session in a
terminal, and the nouns of the cache are drawn. A test finds a picture that no tool made, that the tool would draw in
another way, or that shows another page than there is now.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import httpx
import msgspec

from diskprefix.daemon import rooms
from diskprefix.daemon.server.process.token_file import page_link
from diskprefix.desk.shared.daemon_call import key_for
from diskprefix.desk.shared.web_page import WebPage
from diskprefix.errors import DiskPrefixError
from diskprefix.runtime.fetch.embedded import embedded_file
from tools.measuring.live_server import POLL_S, LiveServer
from tools.measuring.options import run_tool
from tools.pictures import session_drawing, words_drawing
from tools.pictures.session import Session, record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "diskprefix/desk/watch/dashboard/images"
DRAWN = ROOT / "tools/images"
RECORDED = DRAWN / "restart.json"
"""The session that the moving picture plays."""
SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}


class View(NamedTuple):
    """A photograph of a page. Without a `width`, it has its own. `is_glance`: of the dashboard, only its sentence and
    what is stored."""

    size: str
    scheme: str
    width: int | None = None
    page: str = "dashboard"
    is_glance: bool = False


OF_THE_PAGE = {
    IMAGES / "dashboard.png": View("desktop", "light", 826),
    IMAGES / "phone.png": View("phone", "dark", 293),
    DRAWN / "saved.png": View("desktop", "light", 826, is_glance=True),
}
"""The pictures of the dashboard on its page and on the front page."""
MADE = frozenset({*OF_THE_PAGE, DRAWN / "restart.svg", DRAWN / "words.svg"})
"""All pictures in the project, but those that belong to files of others."""
SOURCES = "sources"
"""The key of a PNG's text with the digest of the page that it shows."""
_BELOW_CARD = 10
"""Pixels, less than between two cards."""
_COLOURS, _LONGEST = 128, 2.7
"""The most colours of a picture, and its largest height as a multiple of its width."""
_SOURCES = tuple(f"diskprefix/{name}.py" for name in ("values", "tokens", "units", "daemon/settings"))
_SYSTEM = "You are a coding agent. You work in a repository, read files before you change them, and answer briefly. "
_TASKS = ("What does the first file do?", "Which of its functions are public?", "Say how it is tested.", "Sum it up.")


def play(server: LiveServer) -> None:
    """Lets an agent work in several turns, and kills the daemon between two of them. Then a question begins a new
    conversation, a reply is stopped, and another program asks twice with a placeholder for a key."""
    url = f"http://127.0.0.1:{server.port}"
    texts = [(ROOT / name).read_text(encoding="utf-8")[:6000] for name in _SOURCES]
    messages = [{"role": "system", "content": _SYSTEM + texts[0]}]
    key = key_for(url)
    with httpx.Client(base_url=url, timeout=600) as client:

        def turn(number: int) -> None:
            messages.append({"role": "user", "content": f"{_TASKS[number]}\n\n{texts[number][:1500]}"})
            messages.append({"role": "assistant", "content": _answer(client, key, messages)})

        turn(0)
        turn(1)
        _wait_saved(client, server.token)
        server.kill()
        server.start()
        turn(2)
        _answer(client, key, [messages[0], {"role": "user", "content": "Which errors does it raise?"}])
        body = {"messages": [messages[0], {"role": "user", "content": texts[1]}], "stream": True, "max_tokens": 400}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=_bearer(key)) as reply:
            next(line for line in reply.iter_lines() if '"content"' in line)
        for _ in range(2):
            _answer(client, "unused", [{"role": "user", "content": texts[2][:3000]}])
        turn(3)
        _wait_saved(client, server.token)


def _answer(client: httpx.Client, key: str, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "max_tokens": 60, "temperature": 0}
    agent = {"User-Agent": "coding-agent/1.0"}
    answer = client.post("/v1/chat/completions", json=body, headers=_bearer(key) | agent).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _wait_saved(client: httpx.Client, token: dict[str, str]) -> None:
    """Waits until nothing waits to be written."""
    while client.get("/dashboard/state", headers=token).raise_for_status().json()["cache"]["pending"]:
        time.sleep(POLL_S)


@contextmanager
def _browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def photographed(browser: Browser, link: str, view: View) -> bytes:
    """Returns a PNG of the whole dashboard, or of what a visitor sees of the chat page."""
    options: dict[str, Any] = {"color_scheme": view.scheme, "viewport": SIZES[view.size]}
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(link)
    (_show_chat if view.page == "chat" else _show_dashboard)(page)
    # The chat page scrolls under its header.
    picture = _glance(page) if view.is_glance else page.screenshot(full_page=view.page == "dashboard")
    context.close()
    return picture


def _glance(page: Page) -> bytes:
    """Returns a PNG of the dashboard without its other sections and the end of the page."""
    page.locator("#requests").evaluate("section => { section.hidden = true; }")
    card = page.locator("section", has=page.locator("#icicle")).bounding_box()
    assert card is not None
    height = card["y"] + card["height"] + _BELOW_CARD
    return page.screenshot(clip={"x": 0, "y": 0, "width": SIZES["desktop"]["width"], "height": height})


def _show_dashboard(page: Page) -> None:
    page.wait_for_selector("#said:not(:empty)")
    page.wait_for_selector("#icicle button")


def _show_chat(page: Page) -> None:
    page.fill("#text", "List five things to check before a long bicycle tour, with a table of two tools.")
    page.click("#send")
    page.locator("#again").wait_for(timeout=120_000)


def smaller(picture: bytes, width: int | None) -> bytes:
    """Returns a PNG with few colours. If there is a width, it has that, and the end of a long page is left out."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    if width is not None:
        image = image.crop((0, 0, image.width, min(image.height, round(_LONGEST * image.width))))
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    made, notes = io.BytesIO(), PngInfo()
    notes.add_text(SOURCES, digest_of_page())
    few = image.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(made, "PNG", optimize=True, pnginfo=notes)
    return made.getvalue()


def digest_of_page() -> str:
    """Returns a digest of the files that the dashboard is made of."""
    page = rooms.page_at("/")
    assert isinstance(page, WebPage)
    files = (page.index, *page.styles, *page.scripts)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def draw() -> None:
    """Draws the pictures that need no daemon: the nouns, and the recorded session."""
    session = msgspec.json.decode(RECORDED.read_bytes(), type=Session)
    (DRAWN / "restart.svg").write_text(session_drawing.drawn(session), encoding="utf-8")
    (DRAWN / "words.svg").write_text(words_drawing.drawn(), encoding="utf-8")


def record_session() -> None:
    """Records the session of the moving picture anew. Raises `DiskPrefixError`."""
    embedded_file(click.echo)
    with tempfile.TemporaryDirectory(prefix="diskprefix-picture-") as work:
        session = record(Path(work))
    RECORDED.write_bytes(session.encoded())
    click.echo(session_drawing.title(session))


def photograph(wanted: Mapping[Path, View]) -> None:
    """Writes pictures of a real daemon's pages after an agent's session."""
    with (
        tempfile.TemporaryDirectory() as work,
        _browser() as browser,
        LiveServer(kv_cache_dir=Path(work, "kv"), log_path=Path(work, "log")) as server,
    ):
        server.start()
        play(server)
        token = server.token["Authorization"].removeprefix("Bearer ")
        for file, view in wanted.items():
            link = page_link(f"http://127.0.0.1:{server.port}", token, "" if view.page == "dashboard" else "chat")
            picture = smaller(photographed(browser, link, view), view.width)
            file.write_bytes(picture)
            click.echo(f"{len(picture) / 1024:6.1f} KiB  {file}")


@click.command()
@click.option("--record", "is_recorded", is_flag=True, help="Only the moving picture: record its session anew.")
@click.option("--draw", "is_drawn", is_flag=True, help="Only draw what needs no daemon.")
@click.option(
    "--all",
    "of_all",
    type=click.Path(path_type=Path, file_okay=False),
    help="Only into this folder: both pages, on a desktop and a phone, light and dark.",
)
def main(is_recorded: bool, is_drawn: bool, of_all: Path | None) -> None:
    """Make the pictures of this project's pages anew.

    Drawn: the nouns of the cache, and a recorded session in which a daemon is killed (the moving picture of the front
    page). `--record` records it again, in half a minute on a quiet machine: its times are in the picture. Photographed:
    the dashboard. A daemon with the embedded model and an empty cache answers an agent in several turns, is killed
    between two of them, answers another question, and is stopped in a reply. Then Debian's chromium shows its pages.
    Takes a minute or two. Look at the pictures before you commit them.

    \b
    Exit codes: 0 done; 1 the daemon or the browser failed; 2 wrong usage.
    """
    if of_all is not None:
        of_all.mkdir(parents=True, exist_ok=True)
        photograph({of_all / name: view for name, view in _all_views()})
        return
    try:
        if is_recorded:
            record_session()
    except DiskPrefixError as error:
        raise click.ClickException(str(error)) from error
    draw()
    if not (is_recorded or is_drawn):
        photograph(OF_THE_PAGE)


def _all_views() -> Iterator[tuple[str, View]]:
    """Yields a name and the view of each page in each size and colours."""
    for page, size, scheme in product(("dashboard", "chat"), SIZES, ("light", "dark")):
        yield f"{page}-{size}-{scheme}.png", View(size, scheme, page=page)


if __name__ == "__main__":
    run_tool(main, "tools/bench screenshots")
