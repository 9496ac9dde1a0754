"""The routes of the chat page."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

from fastapi import APIRouter, Depends
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response

from diskprefix.extras.web_page import CHAT_PAGE
from diskprefix.server.status import require_admin, require_owner

router = APIRouter(prefix="/chat", include_in_schema=False)


@router.head("")
@router.get("")
async def page() -> Response:
    """The page. It needs no key, and asks for one."""
    return CHAT_PAGE.response()


@router.post("/kill", dependencies=[Depends(require_admin), Depends(require_owner)])
async def kill() -> Response:
    """End this process with SIGKILL, as a crash or the kernel would, after the answer: how it is started again."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return JSONResponse({"command": command}, background=BackgroundTask(os.kill, os.getpid(), signal.SIGKILL))
