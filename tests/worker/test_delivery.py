"""Pictures on real sockets: again until acknowledged, credit, deadlines."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from common import messages as m
from common.errors import RequestError
from services.worker.delivery import Delivery
from tests.worker.peers import DEADLINE_S, FakeGateway, zmq_context

FILE = b"\x89PNG" + bytes(1_000)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    async with zmq_context() as context:
        yield context


@pytest.fixture
async def gateway(context: zmq.asyncio.Context) -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(context)
    yield gateway
    gateway.close()


def output(request_id: str = "r1", payload: bytes = FILE) -> m.ImageOutput:
    return m.ImageOutput(request_id, 1, "worker-test", "png", 32, 32, len(payload))


async def test_a_picture_arrives_whole_and_is_acknowledged(context: zmq.asyncio.Context, gateway: FakeGateway) -> None:
    delivery = Delivery(context, "worker-test")
    await asyncio.wait_for(delivery.deliver(gateway.home, output(), FILE), DEADLINE_S)
    assert gateway.pictures("r1") == [FILE]
    assert gateway.received[0].sender == "worker-test"
    delivery.close()


async def test_a_picture_is_sent_again_until_acknowledged(context: zmq.asyncio.Context, gateway: FakeGateway) -> None:
    gateway.acknowledges = False
    delivery = Delivery(context, "worker-test", resend_s=0.02)
    delivering = asyncio.create_task(delivery.deliver(gateway.home, output(), FILE))
    await gateway.until(lambda: len(gateway.pictures("r1")) >= 3)
    assert not delivering.done()
    gateway.acknowledge(gateway.received[0])
    await asyncio.wait_for(delivering, DEADLINE_S)
    delivery.close()


async def test_a_picture_that_nobody_takes_is_undelivered_at_the_deadline(
    context: zmq.asyncio.Context, gateway: FakeGateway
) -> None:
    gateway.acknowledges = False
    delivery = Delivery(context, "worker-test", resend_s=0.02, deadline_s=0.1)
    with pytest.raises(RequestError) as ended:
        await delivery.deliver(gateway.home, output(), FILE)
    assert ended.value.info.code == "undelivered"
    delivery.close()


async def test_without_credit_decoding_waits_and_goes_on_with_the_next_acknowledgement(
    context: zmq.asyncio.Context, gateway: FakeGateway
) -> None:
    gateway.acknowledges = False
    delivery = Delivery(context, "worker-test", credit_bytes=len(FILE))
    await asyncio.wait_for(delivery.wait_for_credit(gateway.home), DEADLINE_S)
    assert not delivery.stalled
    delivering = asyncio.create_task(delivery.deliver(gateway.home, output(), FILE))
    await gateway.first(m.ImageOutput)
    waiting = asyncio.create_task(delivery.wait_for_credit(gateway.home))
    async with asyncio.timeout(DEADLINE_S):
        while not delivery.stalled:
            await asyncio.sleep(0)
    assert not waiting.done()
    gateway.acknowledge(gateway.received[0])
    await asyncio.wait_for(asyncio.gather(waiting, delivering), DEADLINE_S)
    assert not delivery.stalled
    delivery.close()


async def test_a_gateway_grants_more_credit_with_an_acknowledgement(
    context: zmq.asyncio.Context, gateway: FakeGateway
) -> None:
    gateway.acknowledges = False
    delivery = Delivery(context, "worker-test", credit_bytes=1)
    first = asyncio.create_task(delivery.deliver(gateway.home, output("r1"), FILE))
    second = asyncio.create_task(delivery.deliver(gateway.home, output("r2"), FILE))
    third = asyncio.create_task(delivery.deliver(gateway.home, output("r3"), FILE))
    await gateway.first(m.ImageOutput)
    gateway.acknowledge(gateway.received[0], credit_bytes=10 * len(FILE))
    await gateway.until(lambda: gateway.pictures("r2") and gateway.pictures("r3"))
    assert not second.done()
    gateway.acknowledges = True
    await asyncio.wait_for(asyncio.gather(first, second, third), DEADLINE_S)
    delivery.close()


async def test_waiting_for_credit_ends_at_the_deadline_too(context: zmq.asyncio.Context, gateway: FakeGateway) -> None:
    gateway.acknowledges = False
    delivery = Delivery(context, "worker-test", credit_bytes=1, deadline_s=0.2)
    delivering = asyncio.create_task(delivery.deliver(gateway.home, output(), FILE))
    await gateway.first(m.ImageOutput)
    ended = await asyncio.gather(delivering, delivery.wait_for_credit(gateway.home), return_exceptions=True)
    assert isinstance(ended[0], RequestError)
    delivery.close()


async def test_one_gateways_silence_does_not_hold_up_another(
    context: zmq.asyncio.Context, gateway: FakeGateway
) -> None:
    silent = FakeGateway(context, acknowledges=False)
    delivery = Delivery(context, "worker-test", credit_bytes=1)
    stuck = asyncio.create_task(delivery.deliver(silent.home, output("stuck"), FILE))
    await silent.first(m.ImageOutput)
    await asyncio.wait_for(delivery.deliver(gateway.home, output(), FILE), DEADLINE_S)
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    silent.close()
    delivery.close()


async def test_messages_that_come_with_later_versions_do_no_harm(
    context: zmq.asyncio.Context, gateway: FakeGateway
) -> None:
    gateway.acknowledges = False
    delivery = Delivery(context, "worker-test")
    delivering = asyncio.create_task(delivery.deliver(gateway.home, output(), FILE))
    await gateway.first(m.ImageOutput)
    gateway.link.send(m.CheckpointData("r1", 1, found=False), to="worker-test", payload=b"")
    gateway.link.send(m.Welcome("not for the data link"), to="worker-test")
    gateway.acknowledge(gateway.received[0])
    await asyncio.wait_for(delivering, DEADLINE_S)
    delivery.close()


async def test_a_link_that_is_long_unused_is_closed_and_opened_again_when_needed(
    context: zmq.asyncio.Context, gateway: FakeGateway
) -> None:
    delivery = Delivery(context, "worker-test", unused_s=0.0)
    await asyncio.wait_for(delivery.deliver(gateway.home, output("r1"), FILE), DEADLINE_S)
    assert delivery.open_links == 1
    delivery.close_unused()
    assert delivery.open_links == 0
    await asyncio.wait_for(delivery.deliver(gateway.home, output("r2"), FILE), DEADLINE_S)
    assert gateway.pictures("r2") == [FILE]
    delivery.close()
