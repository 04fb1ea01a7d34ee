"""A bus that calls handlers at named points of a job."""

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from d9d.core.failures.activity import Activity

TContext = TypeVar("TContext")
THandler = TypeVar("THandler", bound=Callable[..., None])

_EVENTS_ATTRIBUTE = "__d9d_events__"


# No slots: typing sets an attribute on what `Event[X](...)` makes, which a frozen class with slots answers with a TypeError.
@dataclass(frozen=True)
class Event(Generic[TContext]):
    """A point in a job at which handlers run. Events with the same id are the same event."""

    id: str
    """Dotted name, such as ``train.step.pre``."""

    def __str__(self) -> str:
        return f"handlers of event {self.id!r}"


class EventBus:
    """Calls the handlers of an event, on the thread that triggers it and in the order of their subscription.

    Each rank has its own bus. A handler that runs collectives must be subscribed on all ranks that take part.
    """

    def __init__(self, activity: Activity | None = None) -> None:
        """Start without handlers.

        Args:
            activity: Told which event is handled. Handlers may take their time: it sets them no limit.
        """
        self._activity = activity or Activity()
        # Handlers of different events take different contexts; `subscribe` has checked each against its event.
        self._handlers: dict[Event[Any], list[Callable[[Any], None]]] = {}

    def subscribe(self, event: Event[TContext], handler: Callable[[TContext], None]) -> None:
        """Run a handler whenever the event is triggered, after those subscribed before.

        A handler that is subscribed twice runs twice. One that is subscribed while its event is being handled runs from
        the next time on.
        """
        self._handlers.setdefault(event, []).append(handler)

    def trigger(self, event: Event[TContext], context: TContext) -> None:
        """Run the handlers of an event one after another.

        The first error stops the rest and reaches the caller with its type, and with a note that names the event and
        the handler.
        """
        handlers = tuple(self._handlers.get(event, ()))
        if not handlers:
            return
        with self._activity.inside(event, limit_s=None):
            for handler in handlers:
                try:
                    handler(context)
                except Exception as error:
                    error.add_note(f"raised by the handler {_name_of(handler)} of event {event.id!r}")
                    raise

    @contextlib.contextmanager
    def bounded(self, event_pre: Event[TContext], event_post: Event[TContext], context: TContext) -> Generator[None]:
        """Trigger one event before the block and one after it.

        ``event_post`` says that the block has done its work, so it is not triggered when the block raises. What must
        be undone in any case belongs into a ``try`` or a context manager, not into a handler.
        """
        self.trigger(event_pre, context)
        yield
        self.trigger(event_post, context)


def subscribe(event: Event[TContext]) -> Callable[[THandler], THandler]:
    """Mark a method as a handler of an event, for `subscribe_annotated`. May be stacked to mark it for several."""

    def mark(handler: THandler) -> THandler:
        # Applied from the bottom up, so the topmost event comes first. The tuple is new each time: a decorator below
        # may have copied it from another function.
        marks = (event, *_events_of(handler))
        setattr(_function_of(handler), _EVENTS_ATTRIBUTE, marks)  # introspection: marks travel with the function
        return handler

    return mark


def subscribe_annotated(bus: EventBus, target: object) -> None:
    """Subscribe all methods of an object that are marked with `subscribe`.

    They are subscribed in the order of their definition, base classes first. A method that a subclass overrides counts
    only if the override is marked, and then at the place of the override. Attributes that are not marked are not
    evaluated.

    Args:
        bus: Where to subscribe them.
        target: Any object.
    """
    for name, events in _marked_methods(type(target)):
        for event in events:
            bus.subscribe(event, getattr(target, name))  # introspection: finds marked methods


def _marked_methods(cls: type) -> Iterator[tuple[str, tuple[Event[Any], ...]]]:
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            events = _events_of(member)
            if events and inspect.getattr_static(cls, name) is member:
                yield name, events


def _events_of(member: object) -> tuple[Event[Any], ...]:
    function = _function_of(member)
    return getattr(function, _EVENTS_ATTRIBUTE, ()) if inspect.isroutine(function) else ()  # introspection: reads marks


def _function_of(member: object) -> object:
    # The decorators of static and class methods may be above or below ours, so marks are kept by the function inside.
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _name_of(handler: Callable[..., None]) -> str:
    # Partial objects and callable instances have no qualified name.
    name = getattr(handler, "__qualname__", None)  # introspection: for an error
    return f"{handler.__module__}.{name}" if name else repr(handler)
