"""The route of the chat page."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diskprefix.extras.web_page import CHAT_PAGE

router = APIRouter(prefix="/chat", include_in_schema=False)


@router.get("")
async def page() -> Response:
    """The page. It needs no key, and asks for one."""
    return CHAT_PAGE.response()
