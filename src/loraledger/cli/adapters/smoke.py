"""``loraledger adapters smoke``: does this adapter change anything?

The same prompt goes to the base model and to the adapter, at temperature 0 with log probabilities. An engine that loaded an adapter
and applies nothing of it answers as the base does: that is the one fault which a folder's headers cannot show (all-zero weights,
a filter nobody remembers). One different token is proof; where all tokens agree, the largest difference of their log
probabilities decides, because a weak adapter moves those first. A server that sends none is compared by its text.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from loraledger.cli.ask import at
from loraledger.cli.options import ConfigOption, JsonOption, load_settings
from loraledger.cli.output import print_json
from loraledger.errors import BadRequestError, ConfigError, ObjectiveError, TargetError

NOISE = 1e-3
"""Nats. Two runs of one model in bfloat16 on one engine differ by less when nothing else runs; real adapters by 0.01 and more."""

Tokens = list[tuple[str, float]]


def smoke(
    name: Annotated[str, typer.Argument(help="The adapter, as clients name it.")],
    url: Annotated[
        str | None, typer.Option(help="Gateway or engine to ask. Default: the gateway of the settings.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Name of the base model there. Default: base.names of the settings.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key of a tenant that may call both.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="What both are asked to continue.")] = "The answer to the question is",
    tokens: Annotated[int, typer.Option(min=1, max=256, help="How many tokens are compared.")] = 16,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask base and adapter the same and compare. Exit code 5: the adapter changes nothing."""
    if url is None or base is None:
        settings = load_settings(config).settings
        url = url or f"http://{at(settings.listen.host)}:{settings.listen.port}"
        base = base or settings.base.names[0]
    key = None
    if key_env is not None:
        key = os.environ.get(key_env)
        if not key:
            raise ConfigError(f"--key-env: the environment variable {key_env} is not set")
    first, second = (_complete(url, key, model, prompt, tokens) for model in (base, name))
    differ = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a[0] != b[0]), None)
    same = differ if differ is not None else min(len(first), len(second))
    apart = max((abs(a[1] - b[1]) for a, b in zip(first[:same], second[:same], strict=True)), default=0.0)
    changes = differ is not None or len(first) != len(second) or apart > NOISE
    found = {
        "adapter": name,
        "base": base,
        "changes_something": changes,
        "first_different_token": differ,
        "largest_logprob_difference_nats": apart,
        "tokens_compared": same,
        "base_text": "".join(token for token, _ in first),
        "adapter_text": "".join(token for token, _ in second),
    }
    if as_json:
        print_json("smoke", found)
    else:
        where = f"token {differ + 1} differs" if differ is not None else f"the same {same} tokens"
        print(f"{base}: {found['base_text']!r}")
        print(f"{name}: {found['adapter_text']!r}")
        print(f"{where}; log probabilities before that differ by up to {apart:.2g} nats")
    if not changes:
        raise ObjectiveError(
            f"{name} answers as {base} does: its weights are zero, or the engine applies none of its modules "
            "(see `loraledger adapters inspect`)"
        )


def _complete(url: str, key: str | None, model: str, prompt: str, tokens: int) -> Tokens:
    """Greedy continuation with the log probability of each token."""
    import httpx2

    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "seed": 0}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        reply = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300.0, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise TargetError(f"{url} does not answer: {error}") from error
    if 400 <= reply.status_code < 500:
        raise BadRequestError(f"{model}: {url} answered {reply.status_code}: {reply.text[:300]}")
    if reply.status_code != 200:
        raise TargetError(f"{model}: {url} answered {reply.status_code}: {reply.text[:300]}")
    return _tokens(reply.json(), url, model)


def _tokens(answer: Any, url: str, model: str) -> Tokens:  # noqa: ANN401 - what another server sent
    try:
        found = answer["choices"][0]["logprobs"]
        return list(zip(map(str, found["tokens"]), map(float, found["token_logprobs"]), strict=True))
    except (KeyError, IndexError, TypeError, ValueError):
        pass  # some servers send none: then the text decides
    try:
        return [(str(answer["choices"][0]["text"]), 0.0)]
    except (KeyError, IndexError, TypeError) as error:
        raise TargetError(f"{model}: {url} did not answer with a completion") from error
