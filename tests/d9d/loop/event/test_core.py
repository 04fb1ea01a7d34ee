"""Subscription, order, bounded blocks and errors."""

import functools

import pytest

from d9d.loop.event import Event, EventBus, subscribe, subscribe_annotated

PRE = Event[list]("test.pre")
POST = Event[list]("test.post")


def test_handlers_run_in_the_order_of_subscription():
    bus, calls = EventBus(), []
    bus.subscribe(PRE, lambda context: context.append("first"))
    bus.subscribe(POST, lambda context: context.append("other event"))
    bus.subscribe(PRE, lambda context: context.append("second"))
    bus.trigger(PRE, calls)
    assert calls == ["first", "second"]


def test_events_of_one_id_are_one_event_and_events_without_handlers_are_fine():
    bus, calls = EventBus(), []
    bus.subscribe(Event[list]("test.pre"), lambda context: context.append("called"))
    bus.trigger(PRE, calls)
    bus.trigger(POST, calls)
    assert calls == ["called"]


def test_a_handler_may_subscribe_while_it_runs():
    bus, calls = EventBus(), []

    def handler(context):
        context.append("outer")
        bus.subscribe(PRE, lambda inner: inner.append("inner"))

    bus.subscribe(PRE, handler)
    bus.trigger(PRE, calls)
    assert calls == ["outer"]
    bus.trigger(PRE, calls)
    assert calls == ["outer", "outer", "inner"]


def test_bounded_surrounds_the_block():
    bus, calls = EventBus(), []
    bus.subscribe(PRE, lambda context: context.append("pre"))
    bus.subscribe(POST, lambda context: context.append("post"))
    with bus.bounded(PRE, POST, calls):
        calls.append("block")
    assert calls == ["pre", "block", "post"]


def test_post_is_not_fired_when_the_block_raises():
    bus, calls = EventBus(), []
    bus.subscribe(POST, lambda context: context.append("post"))
    with pytest.raises(KeyError), bus.bounded(PRE, POST, calls):
        raise KeyError
    assert calls == []


def test_an_error_names_event_and_handler_and_stops_the_rest():
    bus, calls = EventBus(), []

    def broken(_):
        raise ZeroDivisionError("x")

    bus.subscribe(PRE, broken)
    bus.subscribe(PRE, lambda context: context.append("next"))
    with pytest.raises(ZeroDivisionError) as info:
        bus.trigger(PRE, calls)
    (note,) = info.value.__notes__
    assert "'test.pre'" in note
    assert "broken" in note
    assert calls == []


def test_a_partial_can_be_named():
    bus = EventBus()

    def broken(value, _):
        raise ZeroDivisionError(value)

    bus.subscribe(PRE, functools.partial(broken, 1))
    with pytest.raises(ZeroDivisionError) as info:
        bus.trigger(PRE, [])
    assert "broken" in info.value.__notes__[0]


class Base:
    @subscribe(PRE)
    def from_base(self, context):
        context.append("base")

    @subscribe(PRE)
    def overridden(self, context):
        context.append("never")


class Target(Base):
    @subscribe(PRE)
    @subscribe(POST)
    def for_both(self, context):
        context.append("both")

    @subscribe(PRE)
    def early_in_the_alphabet(self, context):
        context.append("second")

    def overridden(self, context):
        context.append("unmarked override")

    @staticmethod
    @subscribe(POST)
    def static(context):
        context.append("static")

    @subscribe(POST)
    @classmethod
    def of_class(cls, context):
        context.append(cls.__name__)

    @property
    def expensive(self):
        raise AssertionError("a property was evaluated")


def test_marked_methods_are_subscribed_in_the_order_of_definition():
    bus, calls = EventBus(), []
    subscribe_annotated(bus, Target())
    bus.trigger(PRE, calls)
    assert calls == ["base", "both", "second"]
    calls.clear()
    bus.trigger(POST, calls)
    assert calls == ["both", "static", "Target"]
