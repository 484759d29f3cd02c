"""Conversations to documents: each reply is learned, all that precedes it is read."""

from typing import Any

from data_pipeline.documents import (
    BadRecord,
    Digest,
    Document,
    ReadCounts,
    digest_of,
    encoded,
    source_of,
    to_document,
)
from data_pipeline.input_files import RecordFormat

NO_REPLY = "no reply of an assistant"
_LEARNED = "assistant"
# ShareGPT's fields and roles, beside those of OpenAI's API.
_NAMES = (("role", "content"), ("from", "value"))
_ROLES = {"human": "user", "gpt": "assistant"}


def render(messages: list[tuple[str, str]]) -> str:
    r"""Returns messages as text that a reply can follow: without its own last line.

    >>> render([("system", "Be brief."), ("user", "2 + 2?")])
    'system: Be brief.\n\nuser: 2 + 2?\n\nassistant:'
    """
    return "".join(f"{role}: {text}\n\n" for role, text in messages) + f"{_LEARNED}:"


def to_documents(value: Any, record_format: RecordFormat, counts: ReadCounts) -> list[Document]:
    """Returns a record's documents: one for each reply of a conversation, else at most one.

    Args:
      value: a parsed record.
      record_format: which fields.
      counts: is added to.

    Raises:
      BadRecord: the record is unfit.
    """
    if not record_format.chat:
        document = to_document(value, record_format, counts)
        return [] if document is None else [document]
    messages = _messages(value, record_format.chat)
    whole, _ = encoded(render(messages), counts)
    # One key for all replies: they belong to the same split, and none sees another's answer there.
    conversation = digest_of(whole.encode())
    documents = []
    for place, (role, text) in enumerate(messages):
        if role != _LEARNED or not text:
            continue
        prompt, prompt_data = encoded(render(messages[:place]), counts)
        reply, data = encoded(f" {text}", counts)
        own = digest_of(b"%d:" % len(prompt_data) + prompt_data + data)
        digest = Digest(conversation.key, own.check)
        documents.append(Document(reply, data, source_of(value, record_format), digest, prompt))
    if not documents:
        counts.skipped[NO_REPLY] += 1
    return documents


def _messages(value: Any, field: str) -> list[tuple[str, str]]:
    """Returns (role, text) of each message.

    Raises:
      BadRecord: the field holds no list of messages.
    """
    found = value
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, list):
        raise BadRecord(f'has no list of messages in "{field}"')
    messages = []
    for message in found:
        for role_name, text_name in _NAMES:
            if isinstance(message, dict) and role_name in message and text_name in message:
                role, text = message[role_name], message[text_name]
                break
        else:
            raise BadRecord('has a message without "role" and "content"')
        if not isinstance(role, str) or not isinstance(text, str):
            raise BadRecord("has a message whose role or content is no string")
        messages.append((_ROLES.get(role, role), text.strip()))
    return messages
