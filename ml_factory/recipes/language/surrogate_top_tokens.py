"""The K tokens that a frozen second model finds most likely at each position: computed in the step, or cached on disk.

N rows, B rows of a batch, T positions, K tokens, V tokens of the surrogate's vocabulary.
"""

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.progress import progress_phase
from ml_factory.recipes.language.text import damaged_rows, open_rows, write_header
from ml_factory.recipes.language.vocabularies import VocabularyJoin
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.training.device import Device

PIECE_BYTES = 1 << 24
DONE = "done.json"


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
    rows: np.ndarray, top_tokens: SurrogateTopTokens, folder: str | os.PathLike, dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, logprobs) of all rows, (N, T, K) each on disk, computed once and kept in `folder`.

    A process that is killed goes on at the last piece of 16 MB that it wrote whole. Several processes that ask for the
    same wait for the first.

    dtype : of the log-probabilities; float32 equals what a step computes to the bit.
    """
    folder, shape, size = Path(folder), (*rows.shape, top_tokens.k), top_tokens.rows_at_once
    kinds = {folder / "ids.npy": np.int32, folder / "logprobs.npy": np.dtype(dtype)}
    piece = -(-max(PIECE_BYTES // (4 * shape[1] * shape[2]), 1) // size) * size
    with file_lock(folder / "lock"), progress_phase("surrogate", len(rows)) as moved, ExitStack() as opened:
        begun = all(files.is_file(path) for path in (folder / DONE, *kinds))
        done = files.read_json(folder / DONE)["rows"] if begun else 0
        moved(done)
        outputs = [opened.enter_context(open(path, "r+b" if done else "w+b")) for path in kinds]
        for output, kind in zip(outputs, kinds.values(), strict=True):
            size_before = os.fstat(output.fileno()).st_size
            write_header(output, kind, shape)
            end = output.seek(done * shape[1] * shape[2] * np.dtype(kind).itemsize, os.SEEK_CUR)
            if done and size_before < end:
                raise damaged_rows(Path(output.name), f"{size_before} bytes where {end} were written")
            output.truncate()
        for start in range(done, len(rows), piece):
            inside = rows[start : start + piece]
            parts = [_to_host(top_tokens, inside[at : at + size]) for at in range(0, len(inside), size)]
            for output, kind, values in zip(outputs, kinds.values(), zip(*parts, strict=True), strict=True):
                output.write(np.concatenate(values).astype(kind).tobytes())
                output.flush()
                os.fsync(output.fileno())
            files.write_json(folder / DONE, {"rows": start + len(inside)})
            moved(len(inside))
    ids, logprobs = map(open_rows, kinds)
    return ids, logprobs


def _to_host(top_tokens: SurrogateTopTokens, tokens_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    device = top_tokens.device
    # A last batch of fewer rows would be another program on XLA.
    filled = np.concatenate([tokens_BT, np.repeat(tokens_BT[-1:], top_tokens.rows_at_once - len(tokens_BT), axis=0)])
    out = top_tokens(device.to_device(torch.from_numpy(filled)))
    device.mark_step("surrogate")
    ids, logprobs = (one.cpu().numpy()[: len(tokens_BT)] for one in out)
    return ids, logprobs
