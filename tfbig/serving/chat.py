"""Chats to prompts, by the template that came with the tokenizer."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfbig.errors import UserError
from tfbig.serving.errors import RequestError
from tfbig.serving.fields import checked_text

ROLES = ("system", "developer", "user", "assistant")
_MOST_MESSAGES = 1024
# For models whose tokenizer has none: the plain text that fine-tuning on chats learns from
# (data_pipeline/chat.py), and any language model can go on from.
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ChatTemplate:
    """Renders messages.

    Args:
      source: a Jinja template as Hugging Face's tokenizers have them, "" for plain text.
      special_tokens: values that the template may name, e.g. eos_token.

    Raises:
      UserError: the template cannot be compiled.
    """

    def __init__(self, source: str = "", special_tokens: Mapping[str, str] | None = None) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # Templates come with models: they see the messages and nothing of this process.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # What transformers' own rendering gives them besides.
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _to_json
        self.is_plain = not source
        try:
            self._template = environment.from_string(source or PLAIN)
        except jinja2.TemplateError as error:
            raise UserError(f"the tokenizer's chat template is damaged: {error}") from None
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def of_folder(cls, folder: Path) -> "ChatTemplate":
        """Returns the template beside a folder's tokenizer.json.

        Raises:
          UserError: tokenizer_config.json is no JSON, or the template is damaged.
        """
        path, source, names = folder / "tokenizer_config.json", "", {}
        if path.is_file():
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path} is not JSON: {error}") from None
            template = config.get("chat_template") or ""
            if isinstance(template, list):  # several, by name
                template = next((t["template"] for t in template if t["name"] == "default"), "")
            source = template
            for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
                token = config.get(name)
                token = token.get("content") if isinstance(token, dict) else token
                names[name] = token or ""
        apart = folder / "chat_template.jinja"
        if apart.is_file():
            source = apart.read_text(encoding="utf-8")
        return cls(source, names)

    def render(self, messages: Any) -> str:
        """Returns the prompt that a chat stands for.

        Raises:
          RequestError: the messages are wrong.
        """
        import jinja2

        checked = _checked(messages)
        try:
            return self._template.render(
                messages=checked, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", parameter="messages"
            ) from None


def _raise_exception(message: str) -> None:
    """What templates call to refuse a chat."""
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes what HTML would read, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _checked(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= _MOST_MESSAGES:
        raise RequestError(
            f"messages must be a list of 1 to {_MOST_MESSAGES} messages.", parameter="messages"
        )
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError("each message must be an object.", parameter="messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"a message's role must be one of {', '.join(ROLES)}.", parameter="messages"
        )
    content = message.get("content")
    if isinstance(content, list):  # parts, of which only text is understood
        parts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise RequestError("a message's content must be text.", parameter="messages")
            parts.append(checked_text("content", part.get("text")))
        content = "".join(parts)
    return {"role": str(role), "content": checked_text("content", content)}
