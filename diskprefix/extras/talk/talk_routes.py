"""The routes of the chat page."""

from __future__ import annotations

import os
import shlex
import signal
import sys

from fastapi import APIRouter, Depends
from fastapi.exceptions import HTTPException
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.extras.web_page import CHAT_PAGE
from diskprefix.server.guards import is_loopback
from diskprefix.server.status import require_admin, require_owner

router = APIRouter(prefix="/chat", include_in_schema=False)


@router.head("")
@router.get("")
async def page() -> Response:
    """The page. It needs no key, and asks for one."""
    return CHAT_PAGE.response()


@router.post("/kill", dependencies=[Depends(require_admin), Depends(require_owner)])
async def kill(request: Request) -> Response:
    """End this process with SIGKILL, as a crash or the kernel would, after the answer: how it is started again."""
    settings = request.app.state.daemon.settings
    if settings.api_keys is None and not is_loopback(settings.host):
        raise HTTPException(403, "a daemon without API keys that other machines reach is not killed from a page")
    command = shlex.join(["diskprefix", *sys.argv[1:]])
    return JSONResponse({"command": command}, background=BackgroundTask(os.kill, os.getpid(), signal.SIGKILL))
