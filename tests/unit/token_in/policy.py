"""A template with a real byte-level tokenizer, as an engine serves them."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from evener.engines.sampler import EngineRefused
from evener.trace.record import Ids, int32
from tests.unit.token_in.templates import SPECIAL, Template

Message = dict[str, Any]
TOKENIZER = Path(__file__).parents[3] / "examples/first-run/tiny-policy/tokenizer.json"


@cache
def tokenizer() -> Tokenizer:
    """The example policy's, with every end and opener of `SPECIAL` as a token."""
    found = Tokenizer.from_file(str(TOKENIZER))
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.split()])
    return found


class TemplatePolicy:
    """See `evener_proxy.token_in.soundness.Policy`. ``rendered`` counts the renderings."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.rendered = 0
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        clock = count()
        environment.globals |= {"raise_exception": _raise, "today": lambda: "30 Nov 2026", "ticks": lambda: next(clock)}
        self._source = environment.from_string(template.source)

    async def render(self, messages: Sequence[Message], tools: Any) -> Ids:
        """The prompt. Raises EngineRefused where the template raises."""
        return self.encode(self.text(messages, tools))

    async def stops(self, ids: Iterable[int]) -> frozenset[int]:
        """Those of ``ids`` that are the template's ``stops``."""
        return frozenset(ids) & {self.id(text) for text in self.template.stops}

    async def token(self, text: str) -> int | None:
        """The id of a text that is one token."""
        ids = self.encode(text)
        return int(ids[0]) if len(ids) == 1 else None

    def id(self, text: str) -> int:
        """The id of a special token."""
        found = tokenizer().token_to_id(text)
        assert found is not None, text
        return found

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        return int32(tokenizer().encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Ids) -> str:
        """The text of ids."""
        return tokenizer().decode(ids.tolist(), skip_special_tokens=False)

    def text(self, messages: Sequence[Message], tools: Any) -> str:
        """The prompt as text."""
        self.rendered += 1
        try:
            return self._source.render(
                messages=[_for_template(message) for message in messages], tools=tools, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise EngineRefused(400, str(error), "messages") from error


def _raise(text: str) -> None:
    raise jinja2.TemplateError(text)


def _for_template(message: Message) -> Message:
    """As engines do: arguments as data, nothing as an empty text."""
    shown = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        functions = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
        shown["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return shown
