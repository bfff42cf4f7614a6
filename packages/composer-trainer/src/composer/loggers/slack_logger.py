"""Send metrics as messages to a Slack channel."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from composer.core import Interval, Logger, LoggerDestination, State, Time
from composer.core.checks import to_options, to_strings
from composer.functional.checks import check_sizes
from composer.loggers.products import import_product, require_product
from composer.loggers.values import flat, matches, read, show

Formatter: TypeAlias = Callable[..., str | list[dict[str, Any]]]

_SECONDS_TO_FINISH = 30.0
_MOST_WAITING = 1000


class SlackLogger(LoggerDestination):
    """Send selected metrics and hyperparameters to a Slack channel.

    Messages are sent by a thread, so that training does not wait for the network; closing the run waits up to 30
    seconds for pending messages. In a distributed run the process of rank 0 sends.

    Args:
        include_keys: Patterns of the names to send, ``["loss/*", "metrics/eval/*"]``.
        formatter_func: ``f(data, step=...)`` with a dictionary of numbers (or of hyperparameters, with step None) that
            returns the text of a message, or a list of Slack blocks. One line per name if None.
        log_interval: How often metrics are sent: a time, a string or a number of epochs.
        max_logs_per_message: Maximum number of names per message; more are split into several messages.
        slack_logging_api_key: The token; ``SLACK_LOGGING_API_KEY`` of the environment if None.
        channel_id: The channel; ``SLACK_LOGGING_CHANNEL_ID`` of the environment if None.
        client_kwargs: Further arguments of ``slack_sdk.WebClient``, such as ``proxy`` or ``base_url``.

    Raises:
        ModuleNotFoundError: slack_sdk is not installed.
        ValueError: There is no token or no channel, ``include_keys`` is empty, or a number is out of range.

    Example:
        >>> logger = SlackLogger(["loss/*"], log_interval="1ep", slack_logging_api_key="xoxb-1", channel_id="C1")
        >>> logger.every
        Interval(every=Time(1, TimeUnit.EPOCH))
    """

    def __init__(
        self,
        include_keys: Sequence[str] = (),
        formatter_func: Formatter | None = None,
        log_interval: Interval | Time | str | int = "1ba",
        max_logs_per_message: int = 50,
        slack_logging_api_key: str | None = None,
        channel_id: str | None = None,
        *,
        client_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_product("slack_sdk", "slack")
        self.include_keys = to_strings("include_keys", include_keys)
        if not self.include_keys:
            raise ValueError("include_keys is empty, so nothing would be sent: pass patterns such as ['loss/*'].")
        check_sizes(max_logs_per_message=max_logs_per_message)
        self.formatter_func = formatter_func
        self.every = Interval.named("log_interval", log_interval)
        self.max_logs_per_message = max_logs_per_message
        self._token = _given("slack_logging_api_key", slack_logging_api_key, "SLACK_LOGGING_API_KEY")
        self.channel_id = _given("channel_id", channel_id, "SLACK_LOGGING_CHANNEL_ID")
        self._client_kwargs = to_options("client_kwargs", client_kwargs)
        self._is_silent = False
        self._sender: _Sender | None = None
        self._logger: Logger | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send the selected numbers."""
        chosen = self._chosen(metrics)
        if chosen and not self._is_silent:
            self._send(dict(zip(chosen, read(list(chosen.values())), strict=True)), step)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Send the selected hyperparameters, by flat names."""
        if not self._is_silent:
            self._send(self._chosen(flat(hyperparameters)), None)

    def init(self, state: State, logger: Logger) -> None:
        """Send only from the process of rank 0."""
        self._is_silent, self._logger = state.rank != 0, logger

    def batch_end(self, state: State, logger: Logger) -> None:
        """Report an error of the sending thread."""
        self._report()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the pending messages."""
        if self._sender is not None:
            self._sender.close()
            self._report()
            self._sender = None

    def _chosen(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if matches(name, self.include_keys)}

    def _send(self, data: dict[str, Any], step: int | None) -> None:
        if self._sender is None:
            self._sender = _Sender(self._token, self.channel_id, self._client_kwargs)
        items = list(data.items())
        for start in range(0, len(items), self.max_logs_per_message):
            part = dict(items[start : start + self.max_logs_per_message])
            message = (self.formatter_func or _lines)(part, step=step)
            # Slack shows the text of a message with blocks only in notifications.
            self._sender.send({"text": message} if isinstance(message, str) else {"blocks": message, "text": "metrics"})

    def _report(self) -> None:
        if self._sender is not None and self._sender.error is not None and self._logger is not None:
            self._logger.report_failure(self, "chat_postMessage", self._sender.error)


class _Sender:
    """A thread that sends messages in order and stores the first error."""

    def __init__(self, token: str, channel: str, options: dict[str, Any]) -> None:
        self.error: Exception | None = None
        handlers = import_product("slack_sdk.http_retry.builtin_handlers", "slack")
        client = import_product("slack_sdk", "slack").WebClient(token=token, **options)
        client.retry_handlers.append(handlers.RateLimitErrorRetryHandler(max_retry_count=3))
        self._client, self._channel = client, channel
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._has_timed_out = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; raise ``queue.Full`` if a thousand are waiting."""
        # Without waiting, because a slow network must not slow down the training.
        self._messages.put_nowait(message)

    def close(self) -> None:
        """Wait until all messages are sent; after a timeout, only the message being sent is still finished."""
        try:
            self._messages.put(None, timeout=_SECONDS_TO_FINISH)
        except queue.Full:
            self.error = self.error or TimeoutError("messages were still waiting to be sent")
        self._thread.join(_SECONDS_TO_FINISH)
        if self._thread.is_alive():
            self._has_timed_out = True
            self.error = self.error or TimeoutError("messages were still being sent")

    def _run(self) -> None:
        while (message := self._messages.get()) is not None and not self._has_timed_out:
            try:
                self._client.chat_postMessage(channel=self._channel, **message)
            except Exception as error:  # noqa: BLE001  (the main thread reports it)
                self.error = self.error or error


def _lines(data: Mapping[str, Any], step: int | None) -> str:
    head = [] if step is None else [f"batch {step}"]
    return "\n".join([*head, *(f"{name}: {show(value)}" for name, value in data.items())])


def _given(parameter: str, value: str | None, variable: str) -> str:
    setting = value or os.environ.get(variable)
    if not setting:
        raise ValueError(f"{parameter} is missing: pass it, or set {variable} in the environment.")
    return setting
