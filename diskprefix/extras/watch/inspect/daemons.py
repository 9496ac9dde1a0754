"""The settings of the running daemons that use a store, for commands that read the store beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from diskprefix.errors import NotReady, SettingsError
from diskprefix.extras.daemon_call import Call, running_daemon, state_of
from diskprefix.extras.own_daemon import own_urls
from diskprefix.extras.watch.lost_advice import InEffect


def settings_in_effect(store_id: bytes) -> list[InEffect]:
    """Returns the settings of this user's daemons that use a store, one for each model in memory. Leaves out daemons
    that do not answer, and those with API keys."""
    using = list[dict[str, Any]]()
    for url in own_urls():
        with suppress(NotReady, SettingsError):
            call = running_daemon(url, None)
            if state_of(call, url)["status"] != "loading":
                using += [props for props in _props(call) if props["full_cache"]["state"]["store_id"] == store_id.hex()]
    return [InEffect(props["settings"], props["model"]["loaded_at"]) for props in using]


def _props(call: Call) -> Iterator[dict[str, Any]]:
    answer = call("GET", "/props", None)
    if answer.status != 200:
        return
    if "models" not in answer.body:
        yield answer.body
        return
    for slot in answer.body["models"]:
        # A worker that loads would not answer.
        if slot["phase"] == "ready":
            of_model = call("GET", f"/props?model={quote(slot['model'], safe='')}", None)
            if of_model.status == 200:
                yield of_model.body
