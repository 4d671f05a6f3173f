"""The V4.1 chat format in pure Python, for the conversations the corpus uses.

The same text as deepseek-recipe renders (a test compares them), so that a machine without that
package can build the corpus. Serving does not use it: `deepinfer_jax.text` renders through the
recipe, which also keeps user text from turning into control tokens. Here every text is ours.
"""

import json
from collections.abc import Sequence
from typing import Any

from deepinfer_jax.training.corpus.example import EOS, THINK_END, Example, Message

BOS = "<｜begin▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK = "<think>"
DSML = "｜DSML｜"

_EFFORT = (
    "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)
_TOOLS = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning \
inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_SCHEMA = """

## Response Format:

You MUST strictly adhere to the following schema to reply:
"""


def prompt_text(example: Example) -> str:
    """The rendered prompt of an example, up to and with the tag that opens the reply."""
    thinking = example.reasoning is not None
    messages = list(example.prompt_messages)
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
    if example.tools:
        system += _TOOLS % "\n".join(json.dumps(tool) for tool in example.tools)
    if example.schema is not None:
        system += _SCHEMA + json.dumps(example.schema)
    if thinking:
        system = _EFFORT.format(effort=example.effort) + system
    parts = [BOS, SYSTEM + system if system else ""]
    keep_reasoning = thinking and bool(example.tools)
    parts += [_turn(message, keep_reasoning) for message in messages]
    parts.append(ASSISTANT + (THINK if thinking else THINK_END))
    return "".join(parts)


def document_text(example: Example) -> str:
    """The whole training document: prompt, completion and end token."""
    return prompt_text(example) + example.completion + EOS


def calls_text(calls: Sequence[dict[str, Any]]) -> str:
    """The DSML block of calls (their name and arguments), as it stands at the end of a reply."""
    invokes = "\n".join(_invoke(call["name"], call["arguments"]) for call in calls)
    return f"\n\n<{DSML} calls>\n{invokes}\n</{DSML} calls>"


def _turn(message: Message, keep_reasoning: bool) -> str:
    """One earlier message; reasoning of earlier turns stays only where tools are offered."""
    if message["role"] == "user":
        return USER + message["content"]
    if message["role"] == "tool":
        return f"{USER}<tool_result>{message['content']}</tool_result>"
    calls = message.get("tool_calls", ())
    reply = message["content"] + (calls_text(calls) if calls else "")
    thought = THINK + message.get("reasoning_content", "") if keep_reasoning else ""
    return ASSISTANT + thought + THINK_END + reply + EOS


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    lines = [f'<{DSML} invoke name="{name}">']
    for key, value in arguments.items():
        text = isinstance(value, str)
        shown = value if text else json.dumps(value)
        flag = "true" if text else "false"
        lines.append(f'<{DSML} parameter name="{key}" string="{flag}">{shown}</{DSML} parameter>')
    return "\n".join([*lines, f"</{DSML} invoke>"])
