"""``adapters smoke`` and ``adapters rescan``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest

from e2e.fleet import Emulator, settings_for, write_adapter
from support.gateway import GatewayProcess

from .conftest import Cli

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        pass


@pytest.fixture
def engine() -> Iterator[tuple[str, dict[str, list[tuple[str, float]]]]]:
    """An engine that answers each model with the tokens it was given: nothing real can be told to differ by 1e-5 nats."""
    tokens: dict[str, list[tuple[str, float]]] = {}

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        known = tokens.get(body["model"])
        start_response("200 OK" if known else "404 Not Found", [("content-type", "application/json")])
        if known is None:
            return [b'{"error": {"message": "no such model"}}']
        names, values = [t for t, _ in known], [v for _, v in known]
        return [json.dumps({"choices": [{"logprobs": {"tokens": names, "token_logprobs": values}}]}).encode()]

    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", tokens
        server.shutdown()
        thread.join()


SAME = [(" the", -0.5), (" end", -1.25)]


@pytest.mark.parametrize(
    ("adapter", "code", "first", "apart"),
    [
        (SAME, 5, None, 0.0),
        ([(" the", -0.5), (" end", -1.2505)], 5, None, 0.0005),
        ([(" the", -0.5), (" end", -1.27)], 0, None, 0.02),
        ([(" the", -0.5), (" start", -1.25)], 0, 1, 0.0),
        ([(" the", -0.5)], 0, None, 0.0),
    ],
    ids=["equal", "noise", "logprobs", "tokens", "length"],
)
def test_smoke_tells_an_adapter_that_changes_nothing(
    cli: Cli, engine: tuple[str, dict[str, list[tuple[str, float]]]], adapter: list[tuple[str, float]], code: int,
    first: int | None, apart: float,
) -> None:  # fmt: skip
    url, tokens = engine
    tokens.update(base=SAME, sql=adapter)
    done = cli("adapters", "smoke", "sql", "--url", url, "--base", "base", "--json")
    assert done.code == code, done.err
    found = done.items("smoke")
    assert (found["changes_something"], found["first_different_token"]) == (code == 0, first)
    assert found["largest_logprob_difference_nats"] == pytest.approx(apart)
    assert ("answers as base does" in done.err) == (code == 5)


def test_smoke_of_an_unknown_adapter_says_what_the_server_said(
    cli: Cli, engine: tuple[str, dict[str, list[tuple[str, float]]]]
) -> None:
    url, tokens = engine
    tokens.update(base=SAME)
    done = cli("adapters", "smoke", "sql", "--url", url, "--base", "base")
    assert (done.code, "no such model" in done.err) == (1, True)


def test_smoke_without_a_server_or_a_key_is_told(cli: Cli) -> None:
    done = cli("adapters", "smoke", "sql", "--url", "http://127.0.0.1:9", "--base", "base")
    assert (done.code, "does not answer" in done.err) == (4, True)
    done = cli("adapters", "smoke", "sql", "--url", "http://127.0.0.1:9", "--base", "base", "--key-env", "NO_SUCH_KEY")
    assert (done.code, "NO_SUCH_KEY is not set" in done.err) == (3, True)


def test_rescan_takes_in_what_came_and_names_what_could_not_be_taken_in(cli: Cli, tmp_path: Path) -> None:
    scan = tmp_path / "adapters"
    write_adapter(scan, "one")
    with Emulator(tmp_path) as emulator:
        settings = settings_for([emulator], {}, adapters={"folder": "adapters"})
        with GatewayProcess(tmp_path, settings).start(replicas_up=1) as gateway:
            write_adapter(scan, "two")
            done = cli("adapters", "rescan", "--config", gateway.config)
            assert (done.code, done.out) == (0, "added: two\nchanged: none\nremoved: none\n")
            (scan / "three").mkdir()
            (scan / "three" / "adapter_config.json").write_text("{}")
            done = cli("adapters", "rescan", "--config", gateway.config, "--json")
            assert done.code == 5
            assert done.items("rescan")["added"] == []
            assert done.items("rescan")["problems"][0].startswith("three ")
        done = cli("adapters", "rescan", "--config", gateway.config)
        assert (done.code, "no gateway answers" in done.err) == (4, True)
