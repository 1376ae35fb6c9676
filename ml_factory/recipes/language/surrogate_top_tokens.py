"""The K tokens that a frozen second model finds most likely at each position: computed in the step, or cached on disk.

N rows, B rows of a batch, T positions, K tokens, V tokens of the surrogate's vocabulary.
"""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import FileError, SettingsError
from ml_factory.progress import progress_phase
from ml_factory.recipes.language.token_rows import PART_BYTES, PartedRows, open_array, write_array
from ml_factory.recipes.language.vocabularies import VocabularyJoin
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.training.device import Device

CACHE_DTYPES = ("float32", "float16")


class SurrogateTopTokens:
    """Function from tokens of the base model (B, T) to (ids int32 (B, T, K), logprobs float32 (B, T, K)).

    The surrogate reads the base's tokens as its own tokens of the same text, its own end of a text for those it lacks.
    Probabilities are of its whole vocabulary; tokens that the base lacks are passed over. A position whose own token it
    lacks has none (ids of -1): it would predict from a stand-in.

    rows_at_once : rows of one forward pass. It is always this many, so that the numbers of a row do not depend on the
        batch it comes in, and a cache equals what the step computes.
    """

    def __init__(self, network: nn.Module, join: VocabularyJoin, k: int, end: int, device: Device, rows_at_once: int):
        usable = int((join.base_of_surrogate >= 0).sum())
        if not 1 <= k <= usable:
            raise SettingsError("The surrogate has fewer tokens", where="surrogate_k", got=k, wanted=f"1 to {usable:,}")
        self.device, self.k, self.rows_at_once = device, k, rows_at_once
        self.network = device.to_device(network.eval().requires_grad_(False))
        read = np.where(join.surrogate_of_base >= 0, join.surrogate_of_base, end)
        self._read_V = device.to_device(torch.from_numpy(read.astype(np.int64)))
        self._known_V = device.to_device(torch.from_numpy(join.surrogate_of_base >= 0))
        self._write_V = device.to_device(torch.from_numpy(join.base_of_surrogate))

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = len(tokens_BT), self.rows_at_once
        missing = -rows % size
        padded_BT = torch.cat([tokens_BT, tokens_BT[-1:].expand(missing, -1)]) if missing else tokens_BT
        # The step's number format does not apply: the surrogate has its own.
        with torch.autocast(self.device.kind, enabled=False):
            parts = [self._of_rows(padded_BT[start : start + size]) for start in range(0, rows, size)]
        ids, logprobs = (torch.cat(part)[:rows] for part in zip(*parts, strict=True))
        return ids, logprobs

    def _of_rows(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        tokens_BT = tokens_BT.long()
        logits_BTV = self.network(self._read_V[tokens_BT]).float()
        logprobs_BTV = logits_BTV - logits_BTV.logsumexp(dim=-1, keepdim=True)
        width = logprobs_BTV.shape[-1]
        write_V = self._write_V[:width] if len(self._write_V) >= width else nn.functional.pad(
            self._write_V, (0, width - len(self._write_V)), value=-1
        )  # fmt: skip
        top = logprobs_BTV.masked_fill(write_V < 0, -torch.inf).topk(self.k, dim=-1)
        known_BT1 = self._known_V[tokens_BT][..., None]
        return torch.where(known_BT1, write_V[top.indices], -1), torch.where(known_BT1, top.values, -torch.inf)


def weights_fingerprint(network: nn.Module) -> str:
    """Return a hash of all weights, on the host."""
    known = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        known.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        known.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return known.hexdigest()[:16]


def cache_top_tokens(
    rows: PartedRows, top_tokens: SurrogateTopTokens, folder: str | os.PathLike, dtype: str = "float32",
    part_rows: int = 0,
) -> tuple[PartedRows, PartedRows]:  # fmt: skip
    """Return (ids, logprobs) of all rows, (N, T, K) each, computed once and kept in `folder`; a part a file.

    Parts that are there are not computed again: a process that is killed loses at most one. Several processes that ask
    for the same wait for the first.

    dtype : of the log-probabilities; float32 equals what a step computes to the bit.
    part_rows : rows of a part; 0 for parts of about 16 MB.
    """
    folder, (count, length) = Path(folder), rows.shape
    part_rows = part_rows or max(PART_BYTES // (length * top_tokens.k * 4), 1)
    starts = range(0, count, part_rows)
    paths = [[folder / f"{name}-{number:05d}.npy" for number in range(len(starts))] for name in ("ids", "logprobs")]
    size = top_tokens.rows_at_once
    with file_lock(folder / "lock"), progress_phase("surrogate", count) as moved:
        for number, start in enumerate(starts):
            inside = np.arange(start, min(start + part_rows, count))
            shape = len(inside), length, top_tokens.k
            if not all(_is_whole(path[number], shape) for path in paths):
                parts = [_to_host(top_tokens, rows[inside[at : at + size]]) for at in range(0, len(inside), size)]
                ids, logprobs = (np.concatenate(one) for one in zip(*parts, strict=True))
                write_array(paths[0][number], ids)
                write_array(paths[1][number], logprobs.astype(dtype))
            moved(len(inside))
    return PartedRows(paths[0], part_rows), PartedRows(paths[1], part_rows)


def _to_host(top_tokens: SurrogateTopTokens, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    device = top_tokens.device
    # A last batch of fewer rows would be another program on XLA.
    filled = np.concatenate([tokens_BT, np.repeat(tokens_BT[-1:], top_tokens.rows_at_once - len(tokens_BT), axis=0)])
    out = top_tokens(device.to_device(torch.from_numpy(filled)))
    device.mark_step("surrogate")
    ids, logprobs = (one.cpu().numpy()[: len(tokens_BT)] for one in out)
    return ids, logprobs


def _is_whole(path: Path, shape: tuple[int, ...]) -> bool:
    """Return True for a file with an array of this shape. Raises FileError for another array."""
    if not files.is_file(path):
        return False
    found = open_array(path).shape
    if found != shape:
        raise FileError("This part of the cache is of other rows", where=path, got=found, wanted=shape,
                        next_step=f"delete {path.parent}: it is made again")  # fmt: skip
    return True
