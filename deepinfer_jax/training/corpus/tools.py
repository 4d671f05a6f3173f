"""Tool calls: when to call, what to pass, and what to say after the result."""

import dataclasses
import functools
import json
from typing import Any

from deepinfer_jax.training.corpus import chat, words
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.example import (
    EOS,
    THINK_END,
    Example,
    Message,
    Task,
    effort_of,
    says_exactly,
    user,
)
from deepinfer_jax.training.corpus.facts import FACT


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in parameters.items()},
            "required": list(parameters),
        },
    }


_TOOLS = {
    "get_weather": _tool("get_weather", "Get the weather of a city.", city="string"),
    "add": _tool("add", "Add two numbers.", a="integer", b="integer"),
    "multiply": _tool("multiply", "Multiply two numbers.", a="integer", b="integer"),
    "set_timer": _tool("set_timer", "Set a timer.", minutes="integer"),
    "get_time": _tool("get_time", "Get the time in a city.", city="string"),
    "send_message": _tool("send_message", "Send a message.", to="string", text="string"),
}
_REQUESTS = {
    "get_weather": (
        "What is the weather in {city}?",
        "How is the weather in {city} today?",
    ),
    "add": ("What is {a} + {b}?", "Add {a} and {b}."),
    "multiply": ("What is {a} * {b}?", "Multiply {a} and {b}."),
    "set_timer": ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
    "get_time": ("What time is it in {city}?", "Tell me the time in {city}."),
    "send_message": ("Tell {to} that {text}.", "Send a message to {to}: {text}"),
}
_NAMES = tuple(_TOOLS)
_WEATHER = ("sunny", "rainy", "cloudy", "windy", "snowy")
_TEXTS = (
    "I am late", "dinner is ready", "the train is here", "I am at home", "the meeting is over",
    "we won the match",
)  # fmt: skip


def says_call(call: dict[str, Any], completion: str) -> bool:
    """Check: the reply is exactly this one tool call."""
    reply = completion.rpartition(THINK_END)[2].partition(EOS)[0]
    return reply.strip() == chat.calls_text([call]).strip()


def _arguments(draw: Draw, name: str) -> dict[str, Any]:
    """Arguments for a tool."""
    if name in ("get_weather", "get_time"):
        return {"city": draw.pick(words.CITIES)}
    if name == "set_timer":
        return {"minutes": draw.between(1, 60)}
    if name == "send_message":
        return {"to": draw.pick(words.NAMES), "text": draw.pick(_TEXTS)}
    return {"a": draw.between(2, 99), "b": draw.between(2, 99)}


def _outcome(draw: Draw, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """What the tool gives back, and what the assistant says then."""
    if name == "get_weather":
        sky, degrees = draw.pick(_WEATHER), draw.between(1, 35)
        result = json.dumps({"weather": sky, "degrees": degrees})
        return result, f"It is {sky} in {arguments['city']}, {degrees} degrees."
    if name == "get_time":
        clock = f"{draw.between(1, 12)}:{draw.between(10, 59)}"
        return clock, f"It is {clock} in {arguments['city']}."
    if name == "set_timer":
        return "ok", f"The timer is set for {arguments['minutes']} minutes."
    if name == "send_message":
        return "sent", f"I sent your message to {arguments['to']}."
    a, b = arguments["a"], arguments["b"]
    value, sign = (a + b, "+") if name == "add" else (a * b, "*")
    return str(value), f"{a} {sign} {b} = {value}"


def _draw_call(draw: Draw) -> tuple:
    name = draw.pick(_NAMES)
    return (name, *_arguments(draw, name).items())


def _offered(draw: Draw, name: str, alone: bool) -> tuple[dict[str, Any], ...]:
    """The tool itself, alone or beside another one."""
    names = [name]
    if not alone and draw.chance(0.6):
        other = draw.pick(_NAMES)
        names = [name] if other == name else draw.some([name, other], 2)
    return tuple(_TOOLS[each] for each in names)


def _build_call(draw: Draw, combination: tuple) -> Example:
    name, *pairs = combination
    arguments = dict(pairs)
    call = {"name": name, "arguments": arguments}
    question = draw.pick(_REQUESTS[name]).format_map(arguments)
    answered = draw.chance(0.35)
    tools = _offered(draw, name, alone=answered)  # both turns and two tools would not fit
    if draw.chance(0.12):  # a question that needs no tool
        plain = FACT.build(draw, FACT.draw(draw))
        return dataclasses.replace(plain, task="tool", tools=tools)
    thinking, effort = draw.chance(0.5), effort_of(draw)
    plan = f"I call {name}." if effort == 50 else f"The user asks: {question} I call {name}."
    if not answered:
        return Example(
            task="tool",
            prompt_messages=user(question),
            answer=chat.calls_text([call]),
            check=functools.partial(says_call, call),
            reasoning=plan if thinking else None,
            effort=effort,
            tools=tools,
        )
    result, reply = _outcome(draw, name, arguments)
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thinking:
        turn["reasoning_content"] = plan
    return Example(
        task="tool",
        prompt_messages=(*user(question), turn, {"role": "tool", "content": result}),
        answer=reply,
        check=functools.partial(says_exactly, reply),
        reasoning="I have the result." if thinking else None,
        effort=effort,
        tools=tools,
    )


TOOL = Task("tool", 4, _draw_call, _build_call)
