"""What allocating slots for a batch costs the host, ours beside SGLang's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import Peer
from kvtorch.allocators import PagedTokenToKVPoolAllocator

REQUESTS = 64
PAGE_SIZE = 16
NUM_SLOTS = 2**20  # a batch of 50 calls fits several times
PREFIX, EXTEND = 72, 64

NAMES = ("alloc_extend, 64 requests", "alloc_decode, 64 requests")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One way of calling one allocator.

    Attributes:
      case: what the tables call the operation.
      name: what they call the allocator.
      num_tokens: slots that a call hands out.
      reset: frees everything but the last slots of the prefixes; before each batch of calls.
      call: hands out slots.
    """

    case: str
    name: str
    num_tokens: int
    reset: Callable[[], None]
    call: Callable[[], Any]


def allocations(device: str, peers: dict[str, Peer]) -> list[Allocation]:
    """Sequences of 72 tokens that grow by 64; sequences of 64 to 127 that grow by one."""
    found = _of(PagedTokenToKVPoolAllocator, "triton", device, on_host=False)
    found += _of(PagedTokenToKVPoolAllocator, "triton +host", device, on_host=True)
    if "sglang" in peers and peers["sglang"].allocator is not None:
        found += _of(peers["sglang"].allocator, "sglang", device, on_host=False)
    return sorted(found, key=lambda allocation: NAMES.index(allocation.case))


def _of(maker: Any, name: str, device: str, on_host: bool) -> list[Allocation]:
    allocator = maker(NUM_SLOTS, PAGE_SIZE, torch.bfloat16, device, None)
    held = torch.empty(0)

    def reset() -> None:
        nonlocal held
        allocator.clear()
        held = allocator.alloc(REQUESTS * PAGE_SIZE).view(REQUESTS, PAGE_SIZE)

    def lens(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return values.to(device), values

    prefixes, prefixes_cpu = lens(torch.full((REQUESTS,), PREFIX))
    totals, totals_cpu = lens(torch.full((REQUESTS,), PREFIX + EXTEND))
    grown, grown_cpu = lens(65 + torch.arange(REQUESTS))
    reset()
    extended_last = held[:, PREFIX % PAGE_SIZE - 1].contiguous()
    # A negative place is that of a page's last slot, where the next token starts another page.
    decoded_last = held[torch.arange(REQUESTS), (grown_cpu - 1) % PAGE_SIZE - 1].contiguous()
    extend_host = {"prefix_lens_cpu": prefixes_cpu, "seq_lens_cpu": totals_cpu} if on_host else {}
    decode_host = {"seq_lens_cpu": grown_cpu} if on_host else {}
    num_tokens = REQUESTS * EXTEND

    def extend() -> Any:
        return allocator.alloc_extend(prefixes, totals, extended_last, num_tokens, **extend_host)

    def decode() -> Any:
        return allocator.alloc_decode(grown, decoded_last, **decode_host)

    return [
        Allocation(NAMES[0], name, num_tokens, reset, extend),
        Allocation(NAMES[1], name, REQUESTS, reset, decode),
    ]
