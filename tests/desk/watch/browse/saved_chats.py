"""A store with saved conversations and the tokenizer that made them: no model is needed for what people read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.prefixstore.store.schema import RootRecord
from diskprefix.prefixstore.store.statistics.savings import SavingsLog, Tally
from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from diskprefix.tokens import TokenPath, root_hash
from diskprefix.values import SHARED, Tenant
from tests.daemon.server.chat_model import VOCAB_SIZE, write_tokenizer
from tests.prefixstore.store.building import BLOCK, Clock, layout_of, open_store, publication

LAYOUT = layout_of(4_000)
NOW = 1_800_000_000.0
ALICE = SHARED.with_salt("alice")


def tokenizer_in(folder: Path) -> Any:
    if not folder.exists():
        folder.mkdir(parents=True)
        write_tokenizer(folder)
    return read_tokenizer(folder, None)


class SavedChats:
    """A store in `folder` to which conversations are saved as a daemon would save them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.tokenizer = tokenizer
        self.clock = Clock(NOW)
        self.store: Store = open_store(folder, clock=self.clock)
        self.renderer = PromptRenderer(tokenizer_in(tokenizer), vocab_size=VOCAB_SIZE, max_positions=1 << 20)

    def save(
        self, body: dict[str, Any], *, tenant: Tenant = SHARED, model: str = "tiny", torch: str = "2.13"
    ) -> Publication:
        self.clock.now += 60
        prompt = self.renderer.replay(ChatRequest.model_validate(body).conversation, None).prompt
        identity = f'{{"fingerprint":{{"torch_version":"{torch}","products":"x"}},"model":"{model}","salt":"{tenant}"}}'
        root = root_hash(identity)
        made = publication(self.store, prompt.token_ids, root=root, layout=LAYOUT)
        assert made.entry is not None
        made = replace(
            made,
            epoch=self.store.epochs.of(str(tenant)),
            entry=type(made.entry)(
                root=root,
                num_tokens=len(prompt.token_ids),
                scope="full",
                preview=prompt.text,
                created_at=self.clock.now,
                reason="full",
            ),
            root_record=RootRecord(
                model=model,
                block_size=BLOCK,
                layout=LAYOUT,
                created_at=self.clock.now,
                identity=identity,
                tenant=str(tenant),
                tokenizer=str(self.tokenizer),
            ),
            prompt=TokenPath(self.store.secret, root, prompt.token_ids, BLOCK),
        )
        self.store.publish(made)
        log = SavingsLog(self.store)
        counts = Tally(requests=2, prompt_tokens=200, restored_tokens=100, saved_s=1.5)
        log.record_request(self.store.epochs.of(str(tenant)), root, made.root_record, counts)
        self.store.write_from(log.writing)
        return made


SYSTEM = (
    "You look after the harbor library of a small town. Answer questions about ships, tides and birds, briefly.\n"
    "The current date is Saturday, November 21, 2026.\n"
    "Say when you do not know something. Never guess the depth of the water. Name the page of the book you used.\n"
    "The reading room opens at nine and closes at six; on Sundays it stays closed, whatever the weather is.\n"
)


def chat(question: str, system: str = SYSTEM) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}
