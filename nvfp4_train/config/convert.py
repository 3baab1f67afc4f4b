"""Turns a value as YAML or the command line gives it into a field's type."""

from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from nvfp4_train.config.problem import Problem
from nvfp4_train.config.suggest import choice_fix

MISSING = "???"  # how Hydra writes a value that the user must give
_WORDS: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict[str, Any]: "a mapping of names to values",
}
_LIST_EXAMPLE, _MAPPING_EXAMPLE = "'[a,b]'", "'{a: 1, b: 2}'"
_EXAMPLES: dict[Any, str] = {
    str: "'\"text\"'",
    bool: "true",
    int: "16",
    float: "0.1",
    dict[str, Any]: "'{name: value}'",
}


def convert_value(value: object, hint: Any) -> Any:
    """Return ``value`` as the type of a field.

    Args:
        value: Text, number, bool, None or list.
        hint: ``str``, ``int``, ``float``, ``bool``, an enum, ``list[str]``, ``dict[str, ...]`` of numbers or of
            anything (``Any``), or one of them ``| None``.

    Raises:
        TypeError: if it does not fit.
    """
    if isinstance(hint, UnionType):
        return None if value is None else convert_value(value, _not_none(hint))
    if hint is str and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        return int(value)  # 2e6 is a fine number of tokens
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_member(value, hint)
    if hint == list[str] and isinstance(value, list):
        return [convert_value(item, str) for item in value]
    if get_origin(hint) is dict and isinstance(value, Mapping):
        item_hint = get_args(hint)[1]
        return {str(name): item if item_hint is Any else convert_value(item, item_hint) for name, item in value.items()}
    raise TypeError(f"{value!r} is not {expected_type(hint)}")


def mismatch(key: str, value: object, hint: Any) -> Problem:
    """Return the problem of a value that ``convert_value`` refuses."""
    inner = _not_none(hint) if isinstance(hint, UnionType) else hint
    if isinstance(inner, type) and issubclass(inner, Enum):
        fix = choice_fix(str(value), inner.__members__)
    else:
        other = _MAPPING_EXAMPLE if get_origin(inner) is dict else _LIST_EXAMPLE
        fix = f"for example {key}={_EXAMPLES.get(inner, other)}"
    return Problem(key=key, value=value, rule=f"must be {expected_type(hint)}", fix=fix)


def expected_type(hint: Any) -> str:
    """Say what fits a field, in words."""
    if isinstance(hint, UnionType):
        return f"{expected_type(_not_none(hint))} or null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    if get_origin(hint) is dict and hint not in _WORDS:
        item = get_args(hint)[1]
        return f"names with {_WORDS.get(item, 'a group of keys')} each"
    return _WORDS.get(hint, "a list of texts")


def _not_none(hint: UnionType) -> Any:
    (inner,) = (member for member in get_args(hint) if member is not NoneType)
    return inner


def _enum_member(value: object, enum: type[Enum]) -> Enum:
    # YAML 1.1 reads an unquoted off as false.
    name = "off" if value is False else value
    if not isinstance(name, str) or name not in enum.__members__:
        raise TypeError(f"{value!r} is not {expected_type(enum)}")
    return enum[name]
