"""Integers that are written with a fraction or an exponent: JSON has numbers only, and some clients send 10.0."""

from functools import cache
from typing import Any

import msgspec.inspect as types
from msgspec import Struct


def with_integers(fields: dict[str, Any], request_type: type[Struct]) -> None:
    """Replace floats without a fraction by integers, in place, in all fields that take integers or lists of them.

    Other floats stay as they are, so that the error that they cause names the field.
    """
    for name in _integer_fields(request_type) & fields.keys():
        fields[name] = _integral(fields[name])


def _integral(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if float in kinds or list in kinds:
            return [_integral(item) for item in value]
    return value


@cache
def _integer_fields(request_type: type[Struct]) -> frozenset[str]:
    info = types.type_info(request_type)
    assert isinstance(info, types.StructType)
    return frozenset(field.encode_name for field in info.fields if _takes_integers(field.type))


def _takes_integers(kind: types.Type) -> bool:
    """Whether a value of a field may be an integer, or a list of integers, but not another number."""
    match kind:
        case types.IntType():
            return True
        case types.ListType(item_type=item) | types.Metadata(type=item):
            return _takes_integers(item)
        case types.UnionType(types=alternatives):
            return any(map(_takes_integers, alternatives))
        case _:
            return False
