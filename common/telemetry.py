"""Logs: structlog, set up once at a process's door.

Role: the only module that configures logging. Console lines on a terminal, JSON lines elsewhere unless told otherwise.
"""

import logging
import sys

import structlog

from common.config import LogFormat, LogLevel

_process: dict[str, object] = {}  # said in every line; not context variables: those don't reach other threads


def identify(**fields: object) -> None:
    """Adds `fields`, such as a worker's id, to every later line of this process."""
    _process.update(fields)


def _add_process(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {**_process, **event}


def configure_logging(service: str, level: LogLevel = "info", log_format: LogFormat = "auto") -> None:
    """Sends this process's log lines to stderr, each with its `service`."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )

    identify(service=service)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendered = [renderer] if console else [structlog.processors.format_exc_info, renderer]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # It writes a line in one piece, so that processes that share a stderr don't mix theirs.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # What libraries say by the standard library's loggers goes out in the same form.
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
