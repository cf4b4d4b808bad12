"""Logs: structlog, set up once at a process's door.

Role: the only module that configures logging. Console lines on a terminal, JSON lines elsewhere unless told otherwise.
Tracebacks are without local variables: those hold prompts, which are nobody's business but the client's.
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


def is_console(log_format: LogFormat) -> bool:
    """Whether log lines are for people."""
    return log_format == "console" or (log_format == "auto" and sys.stderr.isatty())


def configure_logging(service: str, level: LogLevel = "info", log_format: LogFormat = "auto") -> None:
    """Sends this process's log lines, and those of libraries from warnings upwards, to stderr, each with its
    `service`."""
    # Each prints an exception in its own way; both are told to do it as Python does, without locals.
    rendered: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if is_console(log_format)
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    least = logging.getLevelNamesMapping()[level.upper()]

    identify(service=service)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        # It writes a line in one piece, so that processes that share a stderr don't mix theirs.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # What libraries say by the standard library's loggers, and warn of, goes out in the same form.
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    # The handler too has the level: a library's logger that has one of its own does not ask the root's.
    handler.setLevel(max(least, logging.WARNING))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
