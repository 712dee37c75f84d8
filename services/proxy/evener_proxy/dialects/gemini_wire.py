"""What is read of Gemini's JSON, in one spelling: Google takes ``inlineData`` and ``inline_data``, and null for absent.

Source: the Gemini API reference (v1beta, ``GenerateContentRequest``) and proto3's JSON mapping. Called by
`evener_proxy.dialects.gemini`; JSON that belongs to the agent (arguments, results, schemas) keeps its keys.
"""

import re
from typing import Annotated, Any, TypeVar, cast

import msgspec

from evener_proxy.canonical import CallError

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]

_OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}
_KINDS = {"text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult"}
_underscored = re.compile(r"_([a-z0-9])")

T = TypeVar("T")


class Blob(msgspec.Struct, rename="camel"):
    """Bytes in base64, of either alphabet."""

    mime_type: str | None = None
    data: str | None = None


class FileData(msgspec.Struct, rename="camel"):
    """Media by its address."""

    mime_type: str | None = None
    file_uri: str | None = None


class FunctionCall(msgspec.Struct):
    """A call that the model made."""

    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class Media(msgspec.Struct, rename="camel"):
    """A part of a result."""

    inline_data: Blob | None = None
    file_data: FileData | None = None


class FunctionResponse(msgspec.Struct):
    """The result of a call."""

    name: str | None = None
    id: str | None = None
    response: dict[str, Any] | None = None
    parts: list[Media] | Media | None = None


class ExecutableCode(msgspec.Struct):
    """Code that the vendor ran."""

    code: str | None = None


class CodeExecutionResult(msgspec.Struct):
    """What that code printed."""

    output: str | None = None


class Part(Media, rename="camel"):
    """A piece of a content."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None


class Content(msgspec.Struct):
    """A message; `read_parts` reads its parts."""

    role: str | None = None
    parts: Any = None


class FunctionDeclaration(msgspec.Struct, rename="camel"):
    """A tool of the agent."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class FunctionCallingConfig(msgspec.Struct, rename="camel"):
    """Whether the model must call a tool, and which."""

    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(msgspec.Struct, rename="camel"):
    """How tools are used."""

    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(msgspec.Struct, rename="camel", omit_defaults=True):
    """Wishes about thinking."""

    include_thoughts: bool | None = None
    thinking_budget: Int32 | None = None
    thinking_level: str | None = None


class GenerationConfig(msgspec.Struct, rename="camel", omit_defaults=True):
    """Wishes about sampling."""

    max_output_tokens: Int32 | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | float | None = None
    candidate_count: Int32 | None = None
    seed: Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_logprobs: bool | None = None
    logprobs: Int32 | None = None
    thinking_config: ThinkingConfig | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None


class Body(msgspec.Struct, rename="camel"):
    """A ``GenerateContentRequest``."""

    contents: list[Content | str] | Content | str | None = None
    system_instruction: Content | list[Any] | str | None = None
    tools: list[dict[str, Any]] | dict[str, Any] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: str | None = None


class CountBody(Body, rename="camel"):
    """A ``CountTokensRequest``: contents, or a whole request."""

    generate_content_request: Body | None = None


def read(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises CallError 400 that names the field."""
    try:
        return convert(_spelled(msgspec.json.decode(body)), kind)
    except msgspec.DecodeError as error:
        raise invalid(str(error)) from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


def convert(document: Any, kind: type[T], path: str = "$") -> T:
    """A document in one spelling as a struct; ``path`` is where it lies. Raises CallError 400 that names the field."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        raise invalid(message.replace("`$", f"`{path}") if "`$" in message else f"{message} - at `{path}`") from error


def read_parts(parts: Any, path: str) -> list[Part]:
    """The parts of the content at ``path``: a list of them, or one; a string is a text. Raises CallError 400."""
    return [_part(each, f"{path}.parts[{index}]") for index, each in enumerate(listed(parts))]


def invalid(message: str, param: str | None = None) -> CallError:
    """A request that Gemini would call INVALID_ARGUMENT."""
    return CallError(400, "invalid_request", message, param=param)


def listed(value: list[T] | T | None) -> list[T]:
    """A list of what may be one, or none."""
    if value is None:
        return []
    return cast("list[T]", value) if isinstance(value, list) else [value]


def camel(key: str) -> str:
    """``inline_data`` as ``inlineData``."""
    return _underscored.sub(lambda found: found[1].upper(), key) if "_" in key else key


def _part(given: Any, path: str) -> Part:
    """A part; of a kind that is not known the text is kept, if it has one."""
    if isinstance(given, str):
        return Part(text=given)
    part = convert(given, Part, f"$.{path}")
    if _KINDS.isdisjoint(given):
        within = (cast("dict[str, Any]", value).get("text") for value in given.values() if isinstance(value, dict))
        part.text = next((text for text in within if isinstance(text, str)), None)
    return part


def _spelled(value: Any) -> Any:
    """The document with keys in camelCase, and without nulls in lists."""
    if isinstance(value, dict):
        pairs = [(camel(key), item) for key, item in cast("dict[str, Any]", value).items()]
        return {key: item if key in _OPAQUE else _spelled(item) for key, item in pairs}
    if isinstance(value, list):
        return [_spelled(item) for item in cast("list[Any]", value) if item is not None]
    return value
