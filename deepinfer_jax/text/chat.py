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
) -> "deepseek_recipe.Conversation":
    """The recipe's conversation. Raises ValueError for a malformed message or tool."""
    import deepseek_recipe

    turns = [_message(index, message) for index, message in enumerate(messages)]
    if not turns:
        raise ValueError("messages must not be empty; give at least one user message")
    options: dict[str, Any] = {} if schema is None else {"response_schema": dict(schema)}
    return deepseek_recipe.Conversation(
        turns,
        thinking_mode=thinking,
        reasoning_effort=effort,
        tools=[_tool(index, tool) for index, tool in enumerate(tools)],
        tool_choice=tool_choice,
        **options,
    )


def encoding(tokenizer: "deepseek_recipe.Tokenizer") -> "deepseek_recipe.DeepseekV41Encoding":
    """The V4.1 prompt encoding over a recipe tokenizer."""
    import deepseek_recipe

    return deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)


def _message(index: int, message: Mapping[str, Any]) -> "deepseek_recipe.Message":
    import deepseek_recipe

    role, content = message.get("role"), message.get("content") or ""
    if role not in _ROLES:
        raise ValueError(f"messages[{index}].role must be one of {_ROLES}, got {role!r}")
    if not isinstance(content, str):
        raise ValueError(
            f"messages[{index}].content must be a string, got {type(content).__name__}; image "
            "parts are not rendered here"
        )
    if role == "assistant":
        calls = [_call(index, call) for call in message.get("tool_calls") or ()]
        return deepseek_recipe.AssistantMessage(
            content, message.get("reasoning_content"), calls or None, message.get("prefix", False)
        )
    if role == "tool":
        return deepseek_recipe.ToolMessage(content, message.get("tool_call_id"))
    return {
        "system": deepseek_recipe.SystemMessage,
        "user": deepseek_recipe.UserMessage,
        "latest_reminder": deepseek_recipe.LatestReminderMessage,
    }[role](content)


def _call(index: int, call: Mapping[str, Any]) -> "deepseek_recipe.ToolCall":
    import deepseek_recipe

    inner = call.get("function", call)
    name, arguments = inner.get("name"), inner.get("arguments", {})
    if not isinstance(name, str):
        raise ValueError(f"messages[{index}].tool_calls need a name, got {name!r}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return deepseek_recipe.ToolCall(call.get("id", ""), name, text)


def _tool(index: int, tool: Mapping[str, Any]) -> "deepseek_recipe.ToolDefinition":
    import deepseek_recipe

    inner = tool.get("function", tool)
    if not isinstance(inner.get("name"), str):
        raise ValueError(f"tools[{index}] needs a name, got {inner.get('name')!r}")
    return deepseek_recipe.ToolDefinition(
        inner["name"], inner.get("description"), inner.get("parameters")
    )
