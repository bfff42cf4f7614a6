"""Messages to Slack: the real client with a local server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from composer.loggers import SlackLogger
from fixtures import trained


class Slack(ThreadingHTTPServer):
    """Implements chat.postMessage and records messages; it answers the first ones by ``errors``."""

    def __init__(self):
        self.messages, self.errors = [], []
        self.is_open = threading.Event()
        self.is_open.set()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/api/"

    @property
    def texts(self):
        return [message["text"] for message in self.messages]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.is_open.wait(30)
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_json = self.headers["Content-Type"].startswith("application/json")
        message = json.loads(content) if is_json else {name: value[0] for name, value in parse_qs(content).items()}
        message |= {"path": self.path, "authorization": self.headers["Authorization"]}
        status, answer = self.server.errors.pop(0) if self.server.errors else (200, {"ok": True})
        if answer["ok"]:
            self.server.messages.append(message)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def slack():
    """Return a server that runs until the test ends."""
    server = Slack()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def make_logger(slack):
    """Return a function that makes a logger which sends to the server."""

    def make(include_keys=("loss/*",), **options):
        return SlackLogger(
            include_keys,
            slack_logging_api_key="xoxb-secret",
            channel_id="C42",
            client_kwargs={"base_url": slack.url},
            **options,
        )

    return make


class TestMessages:
    def test_real_training(self, slack, make_logger):
        """The selected metrics are sent to the channel with their step, in order, with the token."""
        logger = make_logger(["loss/train/total", "max_duration"], log_interval="2ba")

        loss = float(trained(loggers=logger).state.total_loss)

        assert slack.texts[0] == "max_duration: 1ep"
        assert [text.splitlines()[0] for text in slack.texts[1:]] == ["batch 1", "batch 3", "batch 4"]
        assert slack.texts[-1] == f"batch 4\nloss/train/total: {loss:.4g}"
        assert {(one["channel"], one["path"], one["authorization"]) for one in slack.messages} == {
            ("C42", "/api/chat.postMessage", "Bearer xoxb-secret")
        }

    def test_custom_format(self, slack, make_logger, make_loop):
        """A function may return the text or Slack blocks."""

        def as_blocks(data, step):
            return [{"type": "section", "text": {"type": "mrkdwn", "text": f"*{step}* {data}"}}]

        loop = make_loop(make_logger(formatter_func=as_blocks))
        loop.batch()
        loop.engine.close()

        blocks = slack.messages[0]["blocks"]
        blocks = json.loads(blocks) if isinstance(blocks, str) else blocks
        assert blocks[0]["text"]["text"] == "*0* {'loss/train/total': 0.0}"

    def test_rank_zero_only(self, slack, make_logger, make_loop):
        """Other processes send nothing."""
        loop = make_loop(make_logger(["*"]), rank=1)
        loop.logger.log_hyperparameters({"a": 1})
        loop.fit()
        loop.engine.close()

        assert slack.messages == []


class TestFailures:
    def test_training_is_not_blocked(self, slack, make_logger, make_loop):
        """While Slack does not respond, training continues; pending messages are sent later."""
        slack.is_open.clear()
        loop = make_loop(make_logger())

        loop.fit()
        sent_before = len(slack.messages)
        slack.is_open.set()
        loop.engine.close()

        assert sent_before == 0
        assert len(slack.messages) == 6

    def test_wrong_channel(self, slack, make_logger, make_loop):
        """A rejected message is reported once, and later messages are sent."""
        slack.errors = [(200, {"ok": False, "error": "channel_not_found"})] * 2
        loop = make_loop(make_logger())

        with pytest.warns(
            RuntimeWarning, match=r"(?s)SlackLogger\.chat_postMessage failed .*channel_not_found"
        ) as caught:
            loop.fit().engine.close()

        assert len(caught) == 1
        assert len(slack.messages) == 4

    def test_no_network(self, make_loop):
        """Without a network training continues."""
        logger = SlackLogger(
            ["loss/*"],
            log_interval="0ba",
            slack_logging_api_key="x",
            channel_id="C",
            client_kwargs={"base_url": "http://127.0.0.1:9/", "timeout": 1},
        )
        loop = make_loop(logger)

        with pytest.warns(RuntimeWarning, match="SlackLogger.chat_postMessage failed"):
            loop.fit().engine.close()


class TestSettings:
    def test_from_the_environment(self, monkeypatch):
        """Token and channel can be environment variables."""
        monkeypatch.setenv("SLACK_LOGGING_API_KEY", "xoxb-1")
        monkeypatch.setenv("SLACK_LOGGING_CHANNEL_ID", "C1")

        assert SlackLogger(["a"]).channel_id == "C1"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"slack_logging_api_key": None}, "slack_logging_api_key is missing.*SLACK_LOGGING_API_KEY"),
            ({"channel_id": None}, "channel_id is missing.*SLACK_LOGGING_CHANNEL_ID"),
            ({"include_keys": ()}, "include_keys is empty"),
            ({"max_logs_per_message": 0}, "max_logs_per_message must be at least 1, got 0"),
            ({"log_interval": "-1ba"}, "log_interval must be 0"),
        ],
    )
    def test_invalid_settings_raise(self, options, message, monkeypatch):
        """Settings without token, channel or names raise."""
        monkeypatch.delenv("SLACK_LOGGING_API_KEY", raising=False)
        monkeypatch.delenv("SLACK_LOGGING_CHANNEL_ID", raising=False)

        with pytest.raises(ValueError, match=message):
            SlackLogger(**{"include_keys": ["a"], "slack_logging_api_key": "x", "channel_id": "C"} | options)
