"""Chat messages as deepseek-recipe's conversations.

The recipe owns the V4.1 prompt format. It encodes every stretch of text that came from outside
(contents, tool results, arguments, descriptions) without the control vocabulary. It is imported at
the first use, since a server is not the only thing that encodes text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import deepseek_recipe

Effort = Literal["low", "high", "xhigh", "max"]
ToolChoice = Literal["auto", "none", "required"]
REQUIRED = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜System｜>",
    "<｜User｜>", "<｜Assistant｜>", "｜DSML｜",
)  # fmt: skip
_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")


def conversation(
    messages: Iterable[Mapping[str, Any]],
    *,
    thinking: bool,
    effort: Effort | None,
    tools: Iterable[Mapping[str, Any]],
    tool_choice: ToolChoice,
    schema: Mapping[str, Any] | None,
    mark: str = "",
) -> "deepseek_recipe.Conversation":
    """The recipe's conversation. Raises ValueError for a malformed message or tool.

    mark: what stands for an image in contents ("": there are none). The recipe calls the images by
    their numbers, as `path` of its sources.
    """
    import deepseek_recipe

    turns, shown = [], 0
    for index, message in enumerate(_list("messages", messages)):
        turn = _message(index, message, mark, shown)
        turns.append(turn)
        shown += len(turn.image_sources)
    if not turns:
        raise ValueError("messages must not be empty; give at least one user message")
    options: dict[str, Any] = {}
    if schema is not None:
        options["response_schema"] = dict(_mapping("schema", schema))
    return deepseek_recipe.Conversation(
        turns,
        thinking_mode=thinking,
        reasoning_effort=effort,
        tools=[_tool(index, tool) for index, tool in enumerate(_list("tools", tools))],
        tool_choice=tool_choice,
        **options,
    )


def encoding(tokenizer: "deepseek_recipe.Tokenizer") -> "deepseek_recipe.DeepseekV41Encoding":
    """The V4.1 prompt encoding over a recipe tokenizer."""
    import deepseek_recipe

    return deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)


# -- fields of the wrong kind, named by their place ------------------------------------------------


def _mapping(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} must be a mapping, got {value!r}")
    return value


def _list(place: str, value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{place} must be a list of mappings, got {value!r}")
    return value


def _text(place: str, value: Any) -> str | None:
    """A string, or None where there is none."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place} must be a string, got {value!r}")
    return value


# -- parts of a conversation -----------------------------------------------------------------------


def _message(index: int, given: Any, mark: str, shown: int) -> "deepseek_recipe.Message":
    """A message; `shown`: images in those before it."""
    import deepseek_recipe

    place = f"messages[{index}]"
    message = _mapping(place, given)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"{place}.role must be one of {_ROLES}, got {role!r}")
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"{place}.content must be a string or a list of parts, not empty, got {content!r}"
        )
    content = content or ""
    if role == "assistant":
        return _assistant(place, message, content)
    if role == "latest_reminder":
        return deepseek_recipe.LatestReminderMessage(content)
    numbers = range(shown, shown + content.count(mark)) if mark else ()
    sources = [deepseek_recipe.BytesImageSource(b"", path=str(number)) for number in numbers]
    images: Any = {"image_sources": sources, "image_token": mark} if sources else {}
    if role == "tool":
        name = _text(f"{place}.tool_call_id", message.get("tool_call_id"))
        return deepseek_recipe.ToolMessage(content, name, **images)
    return {
        "system": deepseek_recipe.SystemMessage,
        "user": deepseek_recipe.UserMessage,
    }[role](content, **images)


def _assistant(
    place: str, message: Mapping[str, Any], content: str
) -> "deepseek_recipe.AssistantMessage":
    import deepseek_recipe

    calls, prefix = message.get("tool_calls"), message.get("prefix", False)
    if not isinstance(prefix, bool):
        raise ValueError(f"{place}.prefix must be true or false, got {prefix!r}")
    return deepseek_recipe.AssistantMessage(
        content,
        _text(f"{place}.reasoning_content", message.get("reasoning_content")),
        None if calls is None else _calls(f"{place}.tool_calls", calls) or None,
        prefix,
    )


def _calls(place: str, calls: Any) -> "list[deepseek_recipe.ToolCall]":
    return [_call(f"{place}[{number}]", call) for number, call in enumerate(_list(place, calls))]


def _call(place: str, given: Any) -> "deepseek_recipe.ToolCall":
    import deepseek_recipe

    call, inner, name = _named(place, given)
    arguments = inner.get("arguments", {})
    if not isinstance(arguments, str | Mapping):
        raise ValueError(f"{place}.arguments must be a mapping or its JSON text, got {arguments!r}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return deepseek_recipe.ToolCall(_text(f"{place}.id", call.get("id")) or "", name, text)


def _tool(index: int, given: Any) -> "deepseek_recipe.ToolDefinition":
    import deepseek_recipe

    place = f"tools[{index}]"
    _, inner, name = _named(place, given)
    parameters = inner.get("parameters")
    return deepseek_recipe.ToolDefinition(
        name,
        _text(f"{place}.description", inner.get("description")),
        None if parameters is None else _mapping(f"{place}.parameters", parameters),
    )


def _named(place: str, given: Any) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """(the mapping, the one under its `function` or itself, the name in that)."""
    outer = _mapping(place, given)
    inner = _mapping(f"{place}.function", outer["function"]) if "function" in outer else outer
    name = inner.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{place} needs a name, got {name!r}")
    return outer, inner, name
