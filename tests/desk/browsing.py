"""What the tests of pages in a real browser share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


UNREACHABLE = """() => [...document.querySelectorAll("body *")].filter(element => {
  const style = getComputedStyle(element), scrolls = /auto|scroll/.test(style.overflowX + style.overflowY);
  const isNamed = element.tabIndex === 0 && element.role && element.ariaLabel;
  const fields = "a, button, input, textarea, select";
  const takesFocus = element.matches(fields) || element.querySelector(fields);
  return scrolls && element.checkVisibility() && !isNamed && !takesFocus;
}).map(element => element.outerHTML.slice(0, 200))"""
"""The elements that may scroll, contain nothing that takes the focus, and cannot take it themselves under a name."""


def violations(page: Page) -> list[str]:
    """Returns the faults of a page that keep people from using it: axe's, and regions that no key can scroll."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    faults = axe.Axe().run(page).response["violations"]
    by_axe = [f"{fault['id']} ({fault['impact']}): {fault['nodes'][0]['html'][:200]}" for fault in faults]
    return by_axe + [f"no key can scroll it: {html}" for html in page.evaluate(UNREACHABLE)]
