"""Which requests to serve when there is no trace?

Conversations with the statistics of Mooncake's published conversation trace (FAST'25 release,
``conversation_trace.jsonl``), on which every figure below was measured.
"""

import bisect

import numpy as np

from kvjax.replay.trace import BLOCK_LEN, Request

DESCRIPTION = "generated, with the statistics of Mooncake's conversation trace (FAST'25)"
NUM_REQUESTS = 12_031

_MEAN_INTERVAL_MS = 294  # 12 031 requests in 59 minutes
_CONTINUED = 0.385  # requests that share more than the system prompt with an earlier one
_SYSTEM_PROMPT = 0  # the block that every request begins with

_QUANTILES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 1)
_FIRST_INPUT_LEN = (891, 905, 1320, 5226, 13008, 25526, 51670, 89867, 126195)
_OUTPUT_LEN = (1, 24, 156, 350, 472, 597, 800, 1118, 2000)
# What a continued conversation adds to its last input and output, and how long that takes.
_ADDED_LEN = (0, 0, 9, 26, 366, 4228, 9398, 16705, 91467)
_PAUSE_MS = (3e3, 42e3, 66e3, 123e3, 264e3, 482e3, 757e3, 1479e3, 3030e3)


def generate(num_requests: int, seed: int) -> list[Request]:
    """Requests with Poisson arrivals, some of which continue an earlier one."""
    random = np.random.default_rng(seed)

    def draw(values: tuple[float, ...]) -> np.ndarray:
        return np.interp(random.random(num_requests), _QUANTILES, values).astype(int)

    arrivals_ms = random.exponential(_MEAN_INTERVAL_MS, num_requests).cumsum().astype(int)
    first_lens, output_lens, added_lens = (
        draw(_FIRST_INPUT_LEN),
        draw(_OUTPUT_LEN),
        draw(_ADDED_LEN),
    )
    pauses_ms = draw(_PAUSE_MS)
    continues = random.random(num_requests) < _CONTINUED

    requests = []
    open_ended: list[Request] = []  # those that nobody has continued yet, by arrival
    next_block = _SYSTEM_PROMPT + 1
    for i in range(num_requests):
        arrival_ms = int(arrivals_ms[i])
        wanted_ms = arrival_ms - pauses_ms[i]
        position = bisect.bisect_left(open_ended, wanted_ms, key=lambda r: r.arrival_ms)
        input_len, shared = int(first_lens[i]), (_SYSTEM_PROMPT,)
        if continues[i] and position < len(open_ended):
            earlier = open_ended[position]
            continued_len = earlier.input_len + earlier.output_len + int(added_lens[i])
            if continued_len <= _FIRST_INPUT_LEN[-1]:  # else the context is full: start again
                del open_ended[position]
                input_len = continued_len
                shared = earlier.block_ids[: earlier.input_len // BLOCK_LEN]
        num_new = -(-input_len // BLOCK_LEN) - len(shared)
        block_ids = (*shared, *range(next_block, next_block + num_new))
        next_block += num_new
        request = Request(arrival_ms, input_len, int(output_lens[i]), block_ids)
        requests.append(request)
        open_ended.append(request)
    return requests
