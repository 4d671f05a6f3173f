"""What a request asks for: the grammar of its reply, and where in the reply it begins."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from deepinfer_jax import strict_json

Kind = Literal["json", "regex", "ebnf"]
_SO_ARGS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar and its start. Equal descriptions are equal and hash equally.

    Attributes:
      kind: "json" (the reply is a JSON value of a JSON schema, draft 2020-12), "regex" (the whole
        reply matches; syntax of Rust's regex crate), "ebnf" (a Lark grammar in llguidance's dialect
        with a rule `start`).
      schema: the grammar's text. A JSON schema may be given as its text, a dictionary or a boolean,
        and is kept as text without spaces. The order of its keys stays: the properties of a reply
        come in that order.
      trigger_token_ids: the grammar begins once these tokens have come in a row; empty: at once.
      bound_token_id: once this token has come, the missing trigger tokens are forced.
    """

    kind: Kind
    schema: str | Mapping[str, Any] | bool
    trigger_token_ids: Sequence[int] = ()
    bound_token_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in get_args(Kind):
            said = reprlib.repr(self.kind)
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {said}")
        text = _json_schema(self.schema) if self.kind == "json" else _plain(self.kind, self.schema)
        object.__setattr__(self, "schema", text)
        ids = self.trigger_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise TypeError(
                f"trigger_token_ids must be a list of token ids, got {reprlib.repr(ids)}"
            )
        for token in ids:
            _token("trigger_token_ids", token)
        object.__setattr__(self, "trigger_token_ids", tuple(ids))
        if self.bound_token_id is not None:
            _token("bound_token_id", self.bound_token_id)
            if not self.trigger_token_ids:
                raise ValueError(
                    f"bound_token_id={self.bound_token_id} needs trigger_token_ids, the tokens "
                    "that it forces; give them or leave it out"
                )

    @property
    def text(self) -> str:
        """`schema` as the text it is kept as."""
        assert isinstance(self.schema, str)
        return self.schema

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> Grammar:
        """The grammar of a mapping with the fields of this class, or of `so_args`.

        Raises ValueError or TypeError that says which key, what was expected and what came.
        """
        if not isinstance(value, Mapping):
            raise TypeError(f"grammar must be a mapping, got {reprlib.repr(value)}")
        if "kind" not in value:
            return cls.from_so_args(value)
        renamed = {"schema_type" if key == "kind" else key: each for key, each in value.items()}
        try:
            return cls.from_so_args(renamed)
        except (TypeError, ValueError) as error:
            said = str(error).replace("so_args", "grammar", 1).replace("schema_type", "kind")
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(said) from None

    @classmethod
    def from_so_args(cls, so_args: Mapping[str, Any]) -> Grammar:
        """The grammar of the published engine's `so_args`, `schema_type` and all.

        Raises ValueError or TypeError that says which key, what was expected and what came.
        """
        if not isinstance(so_args, Mapping):
            raise TypeError(f"so_args must be a mapping, got {reprlib.repr(so_args)}")
        for key in so_args:
            if key not in _SO_ARGS:
                known = ", ".join(_SO_ARGS)
                said = reprlib.repr(key)
                raise ValueError(f"so_args has the unknown key {said}; known are {known}")
        for key in _SO_ARGS[:2]:
            if key not in so_args:
                raise ValueError(f"so_args needs {key!r}, got only {list(so_args)}")
        trigger = so_args.get("trigger_token_ids")
        try:
            return cls(
                so_args["schema_type"],
                so_args["schema"],
                () if trigger is None else trigger,
                so_args.get("bound_token_id"),
            )
        except (TypeError, ValueError) as error:
            said = str(error).replace("kind must", "schema_type must", 1)
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"so_args: {said}") from None

    def check_token_ids(self, vocab_size: int, eos: int) -> None:
        """Raise ValueError for a trigger or bound token that the model lacks or that is its end."""
        bound = () if self.bound_token_id is None else (self.bound_token_id,)
        for name, ids in (
            ("trigger_token_ids", self.trigger_token_ids),
            ("bound_token_id", bound),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(f"{name} must lie in 0..{vocab_size - 1}, got {token}")
                if token == eos:
                    raise ValueError(
                        f"{name} holds {token}, the end token: the reply would be over; choose "
                        "tokens that come before the grammar"
                    )


def _token(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must hold token ids (one id for a bound token), got {reprlib.repr(value)}"
        )
    if not 0 <= value < 2**31:
        raise ValueError(f"{name} must be in [0, 2**31), got {reprlib.repr(value)}")


def _plain(kind: str, schema: object) -> str:
    if not isinstance(schema, str):
        raise TypeError(f"schema must be text for kind {kind!r}, got {type(schema).__name__}")
    try:
        schema.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"schema holds half of a surrogate pair: {error}") from None
    if kind == "ebnf" and not schema.strip():
        raise ValueError('schema is empty; a Lark grammar has a rule such as start: "yes" | "no"')
    return schema


def _json_schema(schema: object) -> str:
    """The schema as text without spaces, checked to be JSON. Key order stays."""
    if not isinstance(schema, str | Mapping | bool):
        raise TypeError(
            "schema must be a JSON schema as text, dictionary or boolean, got "
            f"{type(schema).__name__}"
        )
    try:
        if isinstance(schema, str):
            schema = json.loads(
                schema, object_pairs_hook=strict_json.once, parse_constant=strict_json.no_constant
            )
        text = json.dumps(schema, separators=(",", ":"), allow_nan=False, default=_mapping)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"schema is not a JSON schema: {error}; got {reprlib.repr(schema)}"
        ) from None
    except RecursionError:
        raise ValueError("schema is nested too deep; flatten it with $defs and $ref") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"schema must be a JSON object or boolean, got {reprlib.repr(schema)}")
    return text


def _mapping(value: object) -> dict[str, Any]:
    """A mapping that is no dictionary, as one; json has no other hook for it."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")
