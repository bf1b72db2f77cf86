import json
import math

import pytest

from kvjax.replay import trace

REQUEST = {"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [40, 41]}


def write(path, *requests):
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in requests]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_reads_requests_and_numbers_their_blocks(tmp_path):
    second = REQUEST | {"timestamp": 5.5, "hash_ids": [40, 10**400]}
    path = write(tmp_path / "trace.jsonl", REQUEST, b"  ", second | {"session": "ignored"})
    assert trace.read(path) == [
        trace.Request(5, 700, 9, (0, 1)),
        trace.Request(5.5, 700, 9, (0, 2)),
    ]
    assert trace.read(path, limit=1) == [trace.Request(5, 700, 9, (0, 1))]


def test_reads_no_further_than_the_limit(tmp_path):
    path = write(tmp_path / "trace.jsonl", REQUEST, b"{")
    assert len(trace.read(path, limit=1)) == 1


WRONG_LINES = {
    "bad JSON": (b'{"timestamp": ', "not JSON"),
    "not UTF-8": (b'{"timestamp": "\xff"}', "not JSON"),
    "deep nesting": (b"[" * 100_000, "not JSON"),
    "no object": ([1, 2], "not a JSON object but list"),
    "missing fields": ({"timestamp": 5, "hash_ids": []}, "missing input_length, output_length"),
    "timestamp is text": (REQUEST | {"timestamp": "5"}, "timestamp='5'"),
    "timestamp is true": (REQUEST | {"timestamp": True}, "timestamp=True"),
    "timestamp is NaN": (REQUEST | {"timestamp": math.nan}, "timestamp=nan"),
    "timestamp is infinite": (REQUEST | {"timestamp": math.inf}, "timestamp=inf"),
    "timestamp is huge": (REQUEST | {"timestamp": 10**400}, "timestamp=1000.* must be from 0 to 2"),
    "timestamp is a list": (REQUEST | {"timestamp": [5]}, r"timestamp=\[5\] must be a number"),
    "too many digits": (b'{"timestamp": ' + b"9" * 5000 + b"}", "not JSON: .*5000 digits"),
    "a key twice": (b'{"timestamp": 5, "timestamp": 6}', "not JSON: .*two values for one key"),
    "timestamp is negative": (REQUEST | {"timestamp": -1}, "timestamp=-1"),
    "input is negative": (REQUEST | {"input_length": -700}, "input_length=-700"),
    "input is nothing": (REQUEST | {"input_length": 0, "hash_ids": []}, "input_length=0"),
    "input is fractional": (REQUEST | {"input_length": 700.5}, "input_length=700.5"),
    "input is absurd": (REQUEST | {"input_length": 10**12}, "input_length=1000000000000"),
    "input is huge": (REQUEST | {"input_length": 10**400}, "input_length=1000"),
    "input is NaN": (REQUEST | {"input_length": math.nan}, "input_length=nan"),
    "input is an object": (REQUEST | {"input_length": {}}, "input_length={} must be an integer"),
    "output is true": (REQUEST | {"output_length": True}, "output_length=True"),
    "output is negative": (REQUEST | {"output_length": -1}, "output_length=-1"),
    "output is absurd": (REQUEST | {"output_length": 10**9}, "output_length=1000000000"),
    "ids are no list": (REQUEST | {"hash_ids": "40"}, "hash_ids must be a list"),
    "an id is text": (REQUEST | {"hash_ids": [40, "41"]}, "hash_ids must be a list"),
    "an id is fractional": (REQUEST | {"hash_ids": [40, 41.0]}, "hash_ids must be a list"),
    "an id is true": (REQUEST | {"hash_ids": [40, True]}, "hash_ids must be a list"),
    "an id is a list": (REQUEST | {"hash_ids": [40, [41]]}, "hash_ids must be a list"),
    "an id is negative": (REQUEST | {"hash_ids": [40, -1]}, "hash_ids must be a list"),
    "too few ids": (REQUEST | {"hash_ids": [40]}, "1 hash_ids do not cover input_length=700"),
    "too many ids": (REQUEST | {"hash_ids": [40, 41, 42]}, "takes 2 blocks of 512 tokens"),
    "an id twice": (REQUEST | {"hash_ids": [40, 40]}, r"hash_ids\[1\]=40 has followed another"),
    "an id elsewhere": (REQUEST | {"hash_ids": [7, 41]}, r"hash_ids\[1\]=41 has followed another"),
    "unsorted": (REQUEST | {"timestamp": 4}, "timestamp=4 is before the previous request's 5"),
}


@pytest.mark.parametrize("line, message", WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "trace.jsonl", REQUEST, b"", line)
    with pytest.raises(ValueError, match=rf"trace\.jsonl:3: .*{message}"):
        trace.read(path)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_trace_is_an_error(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trace\.jsonl:1: the trace holds no request"):
        trace.read(path)
