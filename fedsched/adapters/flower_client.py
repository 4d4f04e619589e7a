"""The agent's Flower ClientApp: a round's question in, the learner's gradient out, one span around it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsched import tracing
from fedsched.adapters import flower
from fedsched.federation import exchange
from fedsched.federation.exchange import respond
from fedsched.federation.source import GradientSource, Hello

_log = logging.getLogger(__name__)


def client_app(hello: Callable[[], Hello], learner: GradientSource) -> ClientApp:
    """The ClientApp around a learner; any transport of Flower's can call it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays, request = flower.read_request(message.content)
        with tracing.span("gradient", parent=request.traceparent, attributes={"round": request.number}) as span:
            reply = respond(hello(), learner, arrays, request)
            if reply.declined:
                span.set_attribute("declined", reply.declined)
            else:
                span.set_attribute("samples", reply.samples)
            content = flower.reply_content(dataclasses.replace(reply, traceparent=tracing.traceparent(span)))
        return Message(content, reply_to=message)

    return app


def decline(message: Message, term: int, why: str) -> Message:
    """An answer that gives nothing, without asking the learner; an error where the question cannot be read."""
    try:
        _, request = flower.read_request(message.content)
    except Exception as problem:  # an aggregator of another version must not end the agent
        _log.warning("a question of the aggregator cannot be read: %r", problem)
        return flower.failed_reply(message, f"the question cannot be read: {problem!r}")
    return Message(flower.reply_content(exchange.decline(term, request, why)), reply_to=message)


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """The app's answer; where it raises, an error that says so."""
    try:
        return app(message, context)
    except Exception as problem:
        _log.exception("the gradient could not be computed")
        return flower.failed_reply(message, f"the learner failed: {problem!r}")
