"""Answers of engines are read by whichever parser is installed, with the same result."""

import json
import math

import pytest

from slime.rollout.engines import http

BODY = b'{"text": "\\u00e9", "meta_info": {"output_token_logprobs": [[-0.25, 17, null], [-1e-05, 3, null]]}}'


def strict(body: bytes) -> object:
    """Refuses NaN and infinity, as orjson does."""

    def refuse(name: str) -> object:
        raise ValueError(name)

    return json.loads(body, parse_constant=refuse)


@pytest.mark.parametrize("parse", [json.loads, strict, http._fast_parser()], ids=["json", "strict", "installed"])
def test_every_parser_reads_what_json_reads(monkeypatch: pytest.MonkeyPatch, parse: object):
    monkeypatch.setattr(http, "_parse", parse)
    assert http.parsed(BODY) == json.loads(BODY)
    low, none = http.parsed(b"[-Infinity, NaN]")
    assert low == -math.inf and math.isnan(none)
    with pytest.raises(ValueError):
        http.parsed(b"not JSON")
