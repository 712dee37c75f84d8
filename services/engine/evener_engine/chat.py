"""Between messages and tokens. Invariant: cached tokenisation gives the ids that tokenising the whole text gives.

A prompt of an agent is 1,300 tokens of which a handful are new, so each piece between special tokens is tokenised once.
Tool calls are parsed as vLLM's Hermes parser does; what does not parse stays in the content. The server calls this.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jinja2
from transformers import AutoTokenizer

from .weights import PolicyError

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import AddedToken, Tokenizer

PIECES = 4096  # cached pieces: some 64 sessions of 64 messages

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


class ChatError(ValueError):
    """Messages this policy's chat template cannot render."""


class Reply(NamedTuple):
    """What a completion says: text before the first tool call, and (name, JSON arguments) of each call."""

    content: str | None
    tool_calls: list[tuple[str, str]]


class Chat:
    """A policy folder's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        try:
            self.tokenizer = cast("Any", AutoTokenizer.from_pretrained(folder))
        except (OSError, ValueError) as error:
            raise PolicyError(f"cannot read the policy's tokenizer in {folder}: {error}") from error
        if not self.tokenizer.is_fast:
            raise PolicyError(f"the policy's tokenizer has no tokenizer.json ({folder})")
        self.eos: int | None = self.tokenizer.eos_token_id
        self._backend: Tokenizer = self.tokenizer.backend_tokenizer
        self._boundary = _boundary(list(self._backend.get_added_tokens_decoder().values()))
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        self._tokens: dict[int, tuple[str, list[int]]] = {}

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> list[int]:
        """Prompt ids of a conversation, with the generation prompt unless `arguments` says otherwise."""
        arguments = {"add_generation_prompt": True} | arguments
        try:
            text: str = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages], tools=tools, tokenize=False, **arguments
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise ChatError(f"the chat template failed on these messages: {error}") from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without adding special tokens."""
        if self._boundary is None:
            return self._backend.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        start = 0
        for match in self._boundary.finditer(text):
            ids += self._piece(text[start : match.start()])
            start = match.start()
        return ids + self._piece(text[start:])

    def _piece(self, piece: str) -> list[int]:
        known = self._pieces.get(piece)
        if known is not None:
            self._pieces.move_to_end(piece)
            return known
        ids = self._backend.encode(piece, add_special_tokens=False).ids
        self._pieces[piece] = ids
        if len(self._pieces) > PIECES:
            self._pieces.popitem(last=False)
        return ids

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token(self, token: int) -> tuple[str, list[int]]:
        """A single token's text and its UTF-8 bytes, as log-probability entries show it."""
        known = self._tokens.get(token)
        if known is None:
            text = self.decode([token], skip_special=False)
            known = self._tokens[token] = (text, list(text.encode()))
        return known


def _boundary(added: list[AddedToken]) -> re.Pattern[str] | None:
    """A pattern for the special tokens before which a text may be cut without changing its ids.

    The tokenizer cuts there itself, before anything else looks at the text, unless another added token can overlap the
    special one's start, or the special one depends on what stands before it.
    """

    def cuts(token: AddedToken) -> bool:
        text = token.content
        if not token.special or token.normalized or token.lstrip or token.single_word or text[0].isalnum():
            return False
        return not any(text[0] in o.content[1:] or (o is not token and o.content.startswith(text)) for o in added)

    texts = sorted((token.content for token in added if cuts(token)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text parts joined, tool arguments parsed (vLLM does the same)."""
    message = dict(message)
    if isinstance(parts := message.get("content"), list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in cast("list[Any]", parts)]
        if not all(isinstance(text, str) for text in texts):
            raise ChatError("only text parts are supported in a message's content")
        message["content"] = "\n".join(cast("list[str]", texts))
    elif parts is None:
        message["content"] = ""
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_parsed_arguments(call) for call in calls]
    return message


def _parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if not arguments:
        function["arguments"] = {}
    elif isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            function["arguments"] = arguments  # an agent's own broken JSON: the template prints it as it is
    return call | {"function": function}


def parse_reply(text: str) -> Reply:
    """Hermes tool calls of a completion; if any of them is malformed, all of the text is content."""
    if "<tool_call>" not in text:
        return Reply(text, [])
    calls: list[tuple[str, str]] = []
    for closed, unclosed in _TOOL_CALL.findall(text):
        try:
            call = json.loads(closed or unclosed)
        except ValueError:
            return Reply(text, [])
        if not isinstance(call, dict):
            return Reply(text, [])
        name, arguments = cast("dict[str, Any]", call).get("name"), cast("dict[str, Any]", call).get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Reply(text, [])
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return Reply(text[: text.index("<tool_call>")] or None, calls)
