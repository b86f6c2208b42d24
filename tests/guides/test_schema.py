"""A schema is read as it is written, or it is said where it is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.errors import SchemaError
from kvtransfer.guides.schema import Parameter, Schema, read_schema

TRIP: dict[str, Any] = {
    "name": "trip",
    "layout": [
        {"module": "persona", "text": "You plan.\n"},
        {
            "union": "city",
            "modules": [
                {"module": "paris", "text": "The Seine.\n"},
                {"module": "rome", "text": "The Tiber, {sic}.\n"},
            ],
        },
        {
            "module": "plan",
            "text": "{who} stays {days} days.",
            "parameters": {"days": 3, "who": 2},
        },
    ],
}


def test_modules_unions_and_parameters_come_out_as_they_stand() -> None:
    schema = Schema.from_dict(TRIP)

    assert schema.name == "trip"
    assert [slot.union for slot in schema.slots] == [None, "city", None]
    assert [module.name for module in schema.modules] == ["persona", "paris", "rome", "plan"]
    *_, rome, plan = schema.modules
    assert rome.parts == ("The Tiber, {sic}.\n",)
    assert plan.parts == (Parameter("who", 2), " stays ", Parameter("days", 3), " days.")
    assert plan.parameters == (Parameter("who", 2), Parameter("days", 3))


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trip.json"
    path.write_text(json.dumps(TRIP), encoding="utf-8")

    assert read_schema(path) == Schema.from_dict(TRIP)


def module(**changed: Any) -> dict[str, Any]:
    return {"name": "s", "layout": [{"module": "a", "text": "Text."} | changed]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "the schema is a list"),
        ({"layout": []}, "has no 'name'"),
        ({"name": "s"}, "has no 'layout'"),
        ({"name": "s", "layout": []}, "no list of modules"),
        ({"name": "s", "layout": {}}, "no list of modules"),
        ({"name": " ", "layout": [{}]}, "the schema, slot 1 has no 'module'"),
        (module() | {"name": ""}, "no text in 'name'"),
        (module() | {"version": 2}, "unknown field 'version'"),
        (module(module=3), "slot 1: there is no text in 'module'"),
        (module(text=""), r"slot 1 \(module 'a'\): there is no text in 'text'"),
        (module(text="\ud800"), "half a character"),
        (module(parameters=["x"]), "'parameters' is no object"),
        (module(parameters={"x": 3}), r"module 'a'\): \{x\} stands 0 times"),
        (module(text="{x}{x}", parameters={"x": 3}), r"\{x\} stands 2 times"),
        (module(text="{x}", parameters={"x": 0}), "'x' has 0 tokens"),
        (module(text="{x}", parameters={"x": True}), "'x' has True tokens"),
        (module(text="{x}", parameters={"x": "3"}), "'x' has '3' tokens"),
        (module(text="{}", parameters={"": 3}), "a parameter is called ''"),
        (module(text="{ }", parameters={" ": 3}), "a parameter is called ' '"),
        # Their places overlap: as two parameters they would be one, and text.
        (module(text="{a}{b}", parameters={"a}{b": 3, "b": 3}), r"is called 'a\}\{b'"),
        (module(text="{{a}", parameters={"{a": 3, "a": 3}), r"is called '\{a'"),
        (module(txt="x"), "slot 1 has an unknown field 'txt'"),
        (
            {"name": "s", "layout": [{"module": "a", "text": "b"}] * 2},
            "two modules are called 'a'",
        ),
        (
            {
                "name": "s",
                "layout": [
                    {"union": "u", "modules": [{"module": name, "text": "b"}]} for name in "ab"
                ],
            },
            "two unions are called 'u'",
        ),
        ({"name": "s", "layout": [{"union": "u", "modules": []}]}, r"\(union 'u'\): 'modules' is"),
        (
            {"name": "s", "layout": [{"union": "u", "modules": [{"module": "a"}]}]},
            r"slot 1 \(union 'u'\), alternative 1 has no 'text'",
        ),
        ({"name": "s", "layout": ["a"]}, "slot 1 is a str, not an object"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(data: Any, says: str) -> None:
    with pytest.raises(SchemaError, match=says) as caught:
        Schema.from_dict(data)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no schema at"),
        (b'{\n"name": ', "line 2 is not JSON"),
        (b"\xff", "cannot be read"),
        (b"[]", r"trip\.json is a list"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "trip.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(SchemaError, match=says):
        read_schema(path)


def test_a_folder_is_no_schema(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="cannot be read"):
        read_schema(tmp_path)
