"""How many pages sequences need that grow, decided on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from kvtorch.slots import as_slots

type OnHost = torch.Tensor | np.ndarray | Sequence[int]

_INT64 = np.dtype(np.int64)


def one_entry_each(**arrays: torch.Tensor) -> list[torch.Tensor]:
    """The arrays, where each has one integer for each sequence.

    Raises:
      TypeError: one is not a tensor of int32 or int64.
      ValueError: not one-dimensional, or their sizes differ.
    """
    checked = []
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            raise TypeError(f"{name} is {type(array)}, need a tensor")
        checked.append(as_slots(array, array.device, name=name))
    size = checked[0].numel()
    for array in checked:
        if array.numel() != size:
            sizes = {name: array.numel() for name, array in arrays.items()}
            raise ValueError(f"{sizes} must be equal, one entry for each sequence")
    return checked


def on_host(tensors: Sequence[torch.Tensor], given: Sequence[OnHost | None]) -> list[np.ndarray]:
    """Each tensor as int64 on the host: as given, or else fetched from the device, all at once.

    Raises:
      TypeError: what is given are not integers.
      ValueError: it has another size than the tensor.
    """
    hosts = [tensor if host is None else host for tensor, host in zip(tensors, given, strict=True)]
    away = {i: x for i, x in enumerate(hosts) if isinstance(x, torch.Tensor) and not x.is_cpu}
    if away:
        fetched = [x.long() for x in away.values()]
        together = torch.stack(fetched) if len(away) > 1 else fetched[0][None]
        for i, values in zip(away, together.cpu().numpy(), strict=True):
            hosts[i] = values
    arrays = []
    for tensor, host in zip(tensors, hosts, strict=True):
        array = host.numpy() if isinstance(host, torch.Tensor) else np.asarray(host)
        if array.shape != tensor.shape:
            raise ValueError(
                f"lengths on the host have shape {array.shape}, need {tuple(tensor.shape)}"
            )
        if array.dtype is not _INT64:
            if array.size and array.dtype.kind not in "iu":
                raise TypeError(f"lengths on the host have dtype {array.dtype}, need integers")
            array = array.astype(np.int64)
        arrays.append(array)
    return arrays


def on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on the device; never waits for it."""
    return [x if x.device == device else x.to(device, non_blocking=True) for x in tensors]


def needed(prefix_lens: np.ndarray, seq_lens: np.ndarray, page_size: int) -> tuple[int, int]:
    """How many tokens sequences get, and how many pages beside those of their prefixes.

    A sequence that is to have fewer tokens, or has less than none, gets none.
    """
    if not prefix_lens.size:
        return 0, 0
    seq_lens = np.maximum(prefix_lens, seq_lens)
    if np.minimum.reduce(prefix_lens) < 0:
        seq_lens = np.where(prefix_lens < 0, prefix_lens, seq_lens)
    pages = prefix_lens // -page_size - seq_lens // -page_size  # rounds up, twice negated
    return int(np.add.reduce(seq_lens - prefix_lens)), int(np.add.reduce(pages))


def needed_next(seq_lens: np.ndarray, page_size: int) -> int:
    """How many pages sequences need for their newest tokens alone."""
    return int(np.count_nonzero((seq_lens % page_size == 1 % page_size) & (seq_lens > 0)))


def check_growth(
    prefix_lens: Sequence[int],
    seq_lens: Sequence[int],
    last_slots: Sequence[int],
    taken: Sequence[bool],
    *,
    page_size: int,
) -> None:
    """Raises if a sequence cannot grow as asked.

    Args:
      prefix_lens, seq_lens: tokens that each sequence has, and is to have.
      last_slots: the slot of each prefix's last token.
      taken: for each page, whether somebody has it.
      page_size: slots a page.

    Raises:
      ValueError: a sequence shrinks or has a negative length, or a last slot that is used is not at
        its place of a page that is taken, or two are in one page.
    """
    filled_by = {}
    rows = zip(prefix_lens, seq_lens, last_slots, strict=True)
    for i, (prefix_len, seq_len, slot) in enumerate(rows):
        if not 0 <= prefix_len <= seq_len:
            raise ValueError(
                f"seq_lens[{i}]={seq_len} is less than the {prefix_len=} before; "
                "a sequence grows, or keeps its length as padding"
            )
        place, page = prefix_len % page_size, slot // page_size
        if seq_len == prefix_len or not place:
            continue
        has_owner = 0 <= page < len(taken) and taken[page]
        if not has_owner or (slot + 1) % page_size != place:
            raise ValueError(
                f"last_loc[{i}]={slot} cannot hold token {prefix_len - 1}; allowed: "
                f"slot {place - 1} of a page of {page_size} that was handed out and not freed"
            )
        if (j := filled_by.setdefault(page, i)) != i:
            raise ValueError(
                f"last_loc[{i}]={slot} is in the page of last_loc[{j}]; "
                "two sequences cannot both fill it"
            )
