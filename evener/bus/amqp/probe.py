"""Whether a broker takes a message and not only a connection: under a memory or disk alarm it accepts one and takes none.

What is made for the question goes with its connection. Called by ``evener doctor``.
"""

from aio_pika import Message

from evener.bus.amqp.link import Link, Lost, Refused, guard

TAKE_S = 3.0
"""Longest wait for a confirm; an idle broker gives one within 10 ms."""


async def probe(url: str) -> str | None:
    """What is wrong with the broker at ``url``, in one line with what to do; None where nothing is."""
    link = Link(url, "doctor")
    try:
        channel = await link.channel(confirms=True)
        queue = await guard(channel.declare_queue(exclusive=True, auto_delete=True), TAKE_S)
    except Lost as error:
        await link.close()
        return f"{link.place} does not answer: {error}; is RabbitMQ up? see EVENER_AMQP_URL"
    except Refused as error:
        await link.close()
        return f"{link.place} refused: {error}; see EVENER_AMQP_URL and the user's permissions"
    try:
        for _ in range(2):  # the first is what makes a broker under an alarm stop reading
            await guard(channel.default_exchange.publish(Message(b""), queue.name), TAKE_S)
    except (Lost, Refused) as error:
        return f"{link.place} takes no message ({error}): a memory or disk alarm? see `rabbitmq-diagnostics alarms`"
    finally:
        await link.close()
    return None
