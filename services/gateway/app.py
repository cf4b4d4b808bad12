"""The gateway as a process: its links, its HTTP server, and their common end.

Role: puts the parts together, runs until cancelled, then ends every pending call with a 503 and closes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
import zmq.asyncio
from aiohttp import web

from common import codec
from common.config import GatewayConfig, new_peer_id
from common.errors import ConfigError, ProtocolError
from common.metrics import exposed, new_registry
from common.params import DataHome
from common.telemetry import identify
from common.transport import dealer, router
from services.gateway import middleware
from services.gateway.errors import ApiError
from services.gateway.links import ControlLink, DataLink, LinkTiming
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import ModelTable
from services.gateway.pending import PendingCalls
from services.gateway.routes import health, images, models, requests
from services.gateway.state import STATE, GatewayState

log = structlog.get_logger()

# Handlers log their own errors. What is left to aiohttp is HTTP that can't be parsed, which it quotes: maybe a prompt.
_silent = logging.getLogger("stepweave.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False

WILDCARDS = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")
HANDLER_CLOSE_S = 1.0  # for handlers to send their last replies


def _ignore(url: str) -> None:
    pass


async def serve_gateway(
    config: GatewayConfig, on_bound: Callable[[str], None] = _ignore, timing: LinkTiming | None = None
) -> None:
    """Serves until cancelled. `on_bound` is told the URL once it answers. Raises `ConfigError` on an unusable setting,
    or if the scheduler refuses this gateway."""
    registry = new_registry()
    metrics = GatewayMetrics(registry)
    async with (
        exposed(registry, config.metrics_host, config.metrics_port),
        _links(config, timing or LinkTiming(), metrics) as (state, data),
    ):
        metrics.watch(state.calls, state.models, state.control, data, asyncio.get_running_loop())
        runner = web.AppRunner(
            build_app(state, config.max_body_bytes),
            handler_cancellation=True,
            access_log=None,
            logger=_silent,
            shutdown_timeout=HANDLER_CLOSE_S,
        )
        await runner.setup()
        try:
            url = await _listen(runner, config.host, config.port)
            log.info("gateway listens", url=url, data=state.home.address, gateway_id=state.home.gateway_id)
            on_bound(url)
            await _run(state.control, data)
        finally:
            state.calls.shut_down(
                ApiError(
                    "this gateway is shutting down",
                    status=503,
                    type="server_error",
                    code="shutting_down",
                    retry=True,
                )
            )
            await runner.cleanup()


def build_app(state: GatewayState, max_body_bytes: int) -> web.Application:
    """The HTTP application around a state."""
    app = web.Application(middlewares=[middleware.outermost], client_max_size=max_body_bytes)
    app[STATE] = state
    app.on_response_prepare.append(middleware.add_request_id)
    app.add_routes(
        [
            web.post("/v1/images/generations", images.generate),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{model:.+}", models.get_model),
            web.get("/v1/requests/{id}", requests.get_request),
            web.get("/health/live", health.live),
            web.get("/health/ready", health.ready),
        ]
    )
    for route in app.router.routes():
        if route.resource is not None:
            state.metrics.expect_route(route.resource.canonical, draws=route.handler is images.generate)
    return app


@asynccontextmanager
async def _links(
    config: GatewayConfig, timing: LinkTiming, metrics: GatewayMetrics
) -> AsyncIterator[tuple[GatewayState, DataLink]]:
    """Both sockets, open; at the end, what was sent last has gone out or had its time."""
    gateway_id = new_peer_id(config.name)
    identify(gateway_id=gateway_id)
    context = zmq.asyncio.Context()
    data_socket = control_socket = None
    try:
        data_socket = router(context, config.data_bind, codec.data_to_gateway, _report_malformed)
        control_socket = dealer(context, config.scheduler, gateway_id, codec.to_gateway, _report_malformed)
        address = config.advertise or data_socket.endpoint
        if address.startswith(WILDCARDS):
            raise ConfigError(f"workers can't connect to {address}: say with --advertise how they reach this gateway")
        calls, table = PendingCalls(on_ended=metrics.request_ended), ModelTable(on_new=metrics.expect_model)
        control = ControlLink(control_socket, gateway_id, calls, table, timing)
        state = GatewayState(
            home=DataHome(gateway_id=gateway_id, address=address),
            calls=calls,
            models=table,
            control=control,
            request_timeout_s=config.request_timeout_s,
            metrics=metrics,
        )
        yield state, DataLink(data_socket, calls, control.abort)
    finally:
        for link in (data_socket, control_socket):
            if link is not None:
                link.close()
        # It waits for the sockets' last flush, which is bounded.
        await asyncio.to_thread(context.term)


async def _run(control: ControlLink, data: DataLink) -> None:
    """Runs the links' loops until one of them fails or this is cancelled."""
    tasks = [
        asyncio.create_task(loop, name=name)
        for name, loop in (
            ("control receive", control.receive()),
            ("control keep-alive", control.keep_alive()),
            ("data receive", data.receive()),
        )
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    """Starts the HTTP server and returns its URL."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    address = runner.addresses[0]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{address[1]}"


def _report_malformed(sender: str, error: ProtocolError) -> None:
    log.warning("frame dropped", sender=sender, error=str(error)[:256])
