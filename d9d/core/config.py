"""Settings that users write: what is wrong with them, all at once, with the valid values and the nearest name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, LiteralString, TypeAlias, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import ErrorType

from d9d.core.module_names import did_you_mean
from d9d.core.yaml_file import read_yaml

__all__ = ["Config", "config_problems", "listed", "read_config"]

Settings = TypeVar("Settings", bound=BaseModel)

_Models: TypeAlias = Sequence[type[BaseModel]]

_SHOWN_CHARACTERS = 60
_QUOTED = "'([^']*)'"


class Config(BaseModel):
    """Settings by name. Others than those that it declares are refused.

    What is wrong is a ``pydantic.ValidationError``, whose messages name what would be valid.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    # Any: whatever somebody has written.
    def _explain(cls, settings: Any, validate: ModelWrapValidatorHandler["Config"]) -> "Config":  # noqa: ANN401
        try:
            return validate(settings)
        except ValidationError as error:
            raise _explained(error, cls) from None


def read_config(path: str | Path, kind: type[Settings]) -> Settings:
    """Read settings from a YAML file.

    Args:
        path: The file.
        kind: What it holds: a `Config`, or a pydantic model of the job's own.

    Raises:
        ValueError: With what is wrong with the file: where, which value, and what would be valid.
        OSError: If it cannot be read.
    """
    settings = read_yaml(Path(path))
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        problems = config_problems(error, kind, settings)
    raise ValueError(f"{path}: {listed(problems)}")


def config_problems(error: ValidationError, kind: object, settings: object, root: str = "") -> list[str]:
    """Say what a validation has found, each with where it is, the value, and what would be valid.

    Args:
        error: What was found.
        kind: What was wanted: a pydantic model, or a union of them.
        settings: What was given.
        root: Where the settings are, if they are a part of others.
    """
    problems: list[str] = []
    for each in _explained(error, kind).errors(include_url=False):
        message = each["msg"].removeprefix("Value error, ")
        message = re.sub("^Input should be", "must be", message).replace("Field required", "is missing")
        message = re.sub("a valid (tuple|list|set)$", "a list", message)
        where = _path(each, kind, settings, root)
        value = each["input"]
        has_value = where and each["type"] != "missing" and not isinstance(value, BaseModel | Mapping | list | tuple)
        shown = f" ({_short(value)})" if has_value else ""
        gap = " " if message.startswith(("is ", "must ")) else ": "
        problems.append(f"{where}{shown}{gap}{message}" if where else message)
    return list(dict.fromkeys(problems))


def listed(problems: Sequence[str]) -> str:
    """Write one problem as it is, and several in lines of their own, as the end of a message."""
    return problems[0] if len(problems) == 1 else "".join(f"\n- {problem}" for problem in problems)


def _explained(error: ValidationError, kind: object) -> ValidationError:
    """Return the same errors with messages that say what would be valid; those that do already stay as they are."""
    details: list[InitErrorDetails] = []
    for each in error.errors(include_url=False):
        loc, given, context = each["loc"], each["input"], each.get("ctx", {})
        own = each["msg"] if _is_custom(each) else _message(each, _models_at(kind, loc), _models_at(kind, loc[:-1]))
        # pydantic wants texts that stand in the code, for translations.
        literal = cast("tuple[LiteralString, LiteralString]", (each["type"], own))
        what = each["type"] if own is None else PydanticCustomError(*literal, context or None)
        details.append(InitErrorDetails(type=what, loc=loc, input=given, ctx=context))
    return ValidationError.from_exception_data(error.title, details)


def _is_custom(error: ErrorDetails) -> bool:
    """Tell whether an error has another message than pydantic's own."""
    try:
        return PydanticKnownError(cast("ErrorType", error["type"]), error.get("ctx")).message() != error["msg"]
    except (KeyError, TypeError):  # unknown to pydantic, or without what its own message is made of
        return True


def _message(error: ErrorDetails, models: _Models, parents: _Models) -> str | None:
    """Say what would be valid; None where pydantic does.

    Args:
        error: What is wrong.
        models: What may be at its place.
        parents: What may be around it.
    """
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            names = _names(parents)
            return f"is unknown.{did_you_mean(error['loc'][-1], names)} Valid are {', '.join(names)}."
        case "literal_error" | "enum":
            return f"{error['msg']}.{did_you_mean(error['input'], re.findall(_QUOTED, context['expected']))}"
        case "union_tag_invalid":
            tag, tags = context["tag"], context["expected_tags"]
            hint = did_you_mean(tag, re.findall(_QUOTED, tags))
            return f"{_unquoted(context['discriminator'])} is {tag!r}, which is unknown.{hint} Valid are {tags}."
        case "union_tag_not_found":
            name = _unquoted(context["discriminator"])
            tags = [repr(tag) for model in models if name in model.model_fields for tag in _literals(model, name)]
            return f"{name} is missing, which says what it is. Valid are {', '.join(tags)}."
        case "model_type" | "model_attributes_type":
            lead = "is empty" if error["input"] is None else "is no mapping"
            return f"{lead}: give settings by name. Valid are {', '.join(_names(models))}."
        case _:
            return None


def _unquoted(text: str) -> str:
    return text.strip("'")


def _names(models: _Models) -> list[str]:
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _literals(model: type[BaseModel], name: str) -> tuple[object, ...]:
    """Return the values that a field may have, if they are a few given ones."""
    annotation = model.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _walk(kind: object, loc: Sequence[str | int]) -> Iterator[tuple[str | int | None, _Models]]:
    """Go to a place of settings as pydantic names it, with the tags of unions between names.

    Yields:
        The next name or index, None for a tag; and the models that may be there.
    """
    models = _models_in(kind)
    for part in loc:
        tagged = [model for model in models if isinstance(part, str) and _has_tag(model, part)]
        if len(models) > 1 and tagged:
            models = tagged
            yield None, models
            continue
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [model for field in fields for model in _models_in(field.annotation)] if fields else models
        yield part, models


def _models_at(kind: object, loc: Sequence[str | int]) -> _Models:
    return [_models_in(kind), *(models for _, models in _walk(kind, loc))][-1]


def _models_in(annotation: object) -> _Models:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _has_tag(model: type[BaseModel], tag: str) -> bool:
    return model.__name__ == tag or any(tag in _literals(model, name) for name in model.model_fields)


def _path(error: ErrorDetails, kind: object, settings: object, root: str) -> str:
    """Write where an error is in the settings, without the tags of unions."""
    path, here = root, settings
    for part, _ in _walk(kind, error["loc"]):
        if isinstance(here, Mapping) and part in here:
            path, here = f"{path}.{part}" if path else str(part), cast(Mapping[object, object], here)[part]
        elif isinstance(here, Sequence) and isinstance(part, int) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
    if error["type"] == "missing":
        name = str(error["loc"][-1])
        path = f"{path}.{name}" if path else name
    return path


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
