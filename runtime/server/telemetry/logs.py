"""Logs of a server: lines for people or JSON for machines, and a line for each request."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from inferencex.runtime.server.calls import RequestRecord

LogFormat = Literal["text", "json"]

REQUEST_LOGGER = "inferencex.requests"

_LOG = logging.getLogger(REQUEST_LOGGER)

# What every record has, and what this module writes itself.
_NOT_EXTRA = {*vars(logging.makeLogRecord({})), "message", "asctime", "event", "fields", "color_message"}


def configure_logging(log_format: LogFormat, level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything that this process logs to `stream` (standard error), from this level on, in this format.

    Handlers that were set before are removed.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, message, and all that was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "log"),
        }
        message = record.getMessage()
        if message:
            line["message"] = message
        line.update({name: value for name, value in vars(record).items() if name not in _NOT_EXTRA})
        line.update(_fields_of(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, message, and what a record has in `fields` as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception follows on lines of its own."""
        words = [_time_of(record), record.levelname.ljust(7)]
        event = getattr(record, "event", None)
        words += [event] if event is not None else []
        message = record.getMessage()
        words += [message] if message else []
        words += [f"{name}={_plain(value)}" for name, value in _fields_of(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class RequestLog:
    """Logs a line for every request once it has ended or was refused; an `Observer`.

    Keys are never logged. Prompts and answers are only with `log_prompts`.
    """

    def __init__(self, *, log_prompts: bool = False) -> None:
        self._log_prompts = log_prompts

    def accepted(self, record: RequestRecord) -> None:
        """Log that a request was queued, for those who debug."""
        _write(logging.DEBUG, "accepted", _identity(record))

    def rejected(self, record: RequestRecord) -> None:
        """Log why a request was refused."""
        _write(logging.INFO, "rejected", {**_identity(record), **_error(record)})

    def finished(self, record: RequestRecord) -> None:
        """Log how a request went."""
        fields = {**_identity(record), "status": record.status, **_result(record), **_error(record)}
        if self._log_prompts and record.output is not None:
            fields["prompt"] = record.output.prompt
            fields["outputs"] = [output.text for output in record.output.outputs]
        _write(logging.ERROR if record.status == "failed" else logging.INFO, "request", fields)


def _identity(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "kind": record.kind,
        "model": record.model,
        "version": record.version,
        "caller": record.caller,
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
    }


def _result(record: RequestRecord) -> dict[str, Any]:
    """Return what came of a request; times in seconds."""
    fields: dict[str, Any] = {"duration": round(record.seconds, 6)}
    output = record.output
    if output is not None:
        times = output.metrics
        fields["output_tokens"] = times.num_generated_tokens
        fields["cached_tokens"] = output.num_cached_tokens
        fields["finish_reasons"] = [each.finish_reason for each in output.outputs]
        for name, seconds in (("queue_time", times.queue_seconds), ("ttft", times.time_to_first_token)):
            fields[name] = None if seconds is None else round(seconds, 6)
    return fields


def _error(record: RequestRecord) -> dict[str, Any]:
    error = record.error
    if error is None:
        return {}
    return {"error": error.reason, "http_status": error.status, "error_message": str(error)}


def _write(level: int, event: str, fields: Mapping[str, Any]) -> None:
    if _LOG.isEnabledFor(level):
        _LOG.log(level, "", extra={"event": event, "fields": fields})


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _plain(value: object) -> str:
    """Return a value as one word: quoted where it has blanks or control characters, so that no line is forged."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, default=str)
    is_word = text.isprintable() and text.isascii() and text != "" and not set(text) & set(" \"'=")
    return text if is_word or not isinstance(value, str) else json.dumps(value)
