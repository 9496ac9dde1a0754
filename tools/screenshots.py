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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx
import msgspec

from diskprefix.errors import DiskPrefixError
from diskprefix.extras.daemon_call import key_for
from diskprefix.extras.web_page import DASHBOARD_PAGE
from diskprefix.model.load.embedded import embedded_file
from diskprefix.server.process.token_file import page_link
from tools.measuring.live_server import POLL_S, LiveServer
from tools.measuring.options import run_tool
from tools.pictures import session_drawing, words_drawing
from tools.pictures.session import Session, record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "diskprefix/extras/watch/dashboard/images"
DRAWN = ROOT / "tools/images"
RECORDED = DRAWN / "restart.json"
"""The session that the moving picture plays."""
SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
OF_THE_PAGE = {"dashboard.png": ("desktop", "light", 826), "phone.png": ("phone", "dark", 293)}
"""The pictures in the dashboard's README.md, each with its width there."""
MADE = frozenset({*(IMAGES / name for name in OF_THE_PAGE), DRAWN / "restart.svg", DRAWN / "words.svg"})
"""All pictures in the project, but those that belong to files of others."""
SOURCES = "sources"
"""The key of a PNG's text with the digest of the page that it shows."""
_COLOURS, _LONGEST = 128, 2.7
"""The most colours of a picture, and its largest height as a multiple of its width."""
_SOURCES = tuple(f"diskprefix/{name}.py" for name in ("values", "tokens", "units", "settings"))
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


def photographed(browser: Browser, link: str, page_name: str, size: str, scheme: str) -> bytes:
    """Returns a PNG of the whole dashboard, or of what a visitor sees of the chat page."""
    scheme_options: dict[str, Any] = {"color_scheme": scheme, "viewport": SIZES[size]}
    context = browser.new_context(**scheme_options)
    page = context.new_page()
    page.goto(link)
    (_show_chat if page_name == "chat" else _show_dashboard)(page)
    # The chat page scrolls under its header.
    picture = page.screenshot(full_page=page_name == "dashboard")
    context.close()
    return picture


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
    files = (DASHBOARD_PAGE.index, *DASHBOARD_PAGE.styles, *DASHBOARD_PAGE.scripts)
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


def photograph(folder: Path, wanted: Sequence[tuple[str, str, str, str, int | None]]) -> None:
    """Writes pictures of a real daemon's pages after an agent's session to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as work,
        _browser() as browser,
        LiveServer(kv_cache_dir=Path(work, "kv"), log_path=Path(work, "log")) as server,
    ):
        server.start()
        play(server)
        token = server.token["Authorization"].removeprefix("Bearer ")
        for name, page, size, scheme, width in wanted:
            link = page_link(f"http://127.0.0.1:{server.port}", token, "" if page == "dashboard" else "chat")
            picture = smaller(photographed(browser, link, page, size, scheme), width)
            (folder / name).write_bytes(picture)
            click.echo(f"{len(picture) / 1024:6.1f} KiB  {folder / name}")


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
        photograph(of_all, list(_all_views()))
        return
    try:
        if is_recorded:
            record_session()
    except DiskPrefixError as error:
        raise click.ClickException(str(error)) from error
    draw()
    if not (is_recorded or is_drawn):
        photograph(IMAGES, list(_views_of_the_page()))


def _views_of_the_page() -> Iterator[tuple[str, str, str, str, int | None]]:
    """Yields the name, the page, the size, the colours and the width of each picture of the dashboard's README.md."""
    for name, (size, scheme, width) in OF_THE_PAGE.items():
        yield name, "dashboard", size, scheme, width


def _all_views() -> Iterator[tuple[str, str, str, str, int | None]]:
    """Yields the same of each page in each size and colours."""
    for page, size, scheme in product(("dashboard", "chat"), SIZES, ("light", "dark")):
        yield f"{page}-{size}-{scheme}.png", page, size, scheme, None


if __name__ == "__main__":
    run_tool(main, "tools/bench screenshots")
